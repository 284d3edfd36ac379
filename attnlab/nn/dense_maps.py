"""Weight maps that need full rows of scores: they sample, have a learned parameter, or depend on the order of the keys.

All are made as `map(heads=, rngs=)` and map `ScoreRows` to weights; see `attnlab.functional.dense`.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int

from attnlab.errors import UserError
from attnlab.functional.dense import ScoreRows, softmax
from attnlab.functional.entmax import entmax
from attnlab.functional.recomputed import recomputed
from attnlab.functional.straight_through import straight_through
from attnlab.module import Module
from attnlab.nn.parameter import param
from attnlab.typing import DropoutKey

LOWEST_ALPHA = 1.01


class AdaptiveEntmax(Module):
    """`alpha`-entmax, `alpha` learned for every head: a softmax near 1, a sparsemax at 2.

    `alpha = 1 + sigmoid(a)`, at least 1.01; `a` starts standard normal. With `direct`, as in the released code,
    `alpha` itself is the parameter, started likewise and clipped to its range where it is used.
    Correia, Niculae and Martins 2019, https://arxiv.org/abs/1909.00015.
    """

    def __init__(self, *, heads: int, direct: bool = False, rngs: nnx.Rngs):
        self.direct = direct

        def start(key: Array, shape: tuple[int, ...], dtype: type) -> Array:
            raw = jax.random.normal(key, shape, dtype)
            return jnp.clip(1 + jax.nn.sigmoid(raw), LOWEST_ALPHA, 2) if direct else raw

        self.raw = param(start, (heads,), axes=('heads',), group='vector', rngs=rngs)

    def alpha(self) -> Float[Array, 'h']:
        """The exponents."""
        alpha = self.raw[...] if self.direct else 1 + jax.nn.sigmoid(self.raw[...])
        return jnp.clip(alpha, LOWEST_ALPHA, 2)

    def __call__(self, rows: ScoreRows, key: DropoutKey | None) -> Float[Array, 'b h t s']:
        return entmax(rows.scores, self.alpha(), rows.visible)


class GumbelSoftmax(Module):
    """Sampled weights in training: `softmax((s + g) / tau)`, `g` standard Gumbel noise on every visible key.

    With `hard` the sample is the one-hot row of the greatest `s_j + g_j`, and its gradient that of the soft one.
    In evaluation nothing is sampled: the weights are `softmax(s / tau)`, or for `hard`, whose mean it is,
    `softmax(s)`. Jang, Gu and Poole 2017, https://arxiv.org/abs/1611.01144.
    Raises `UserError` for a temperature that is not positive.
    """

    def __init__(self, *, heads: int, temperature: float = 1.0, hard: bool = False, rngs: nnx.Rngs):
        del heads, rngs
        if temperature <= 0:
            raise UserError(f'the temperature of GumbelSoftmax is {temperature}; it must be positive')
        self.temperature = temperature
        self.hard = hard

    def __call__(self, rows: ScoreRows, key: DropoutKey | None) -> Float[Array, 'b h t s']:
        if key is None:
            return softmax(rows.scores if self.hard else rows.scores / self.temperature, rows.visible)
        noisy = rows.scores + jax.random.gumbel(key, rows.scores.shape, rows.scores.dtype)
        soft = softmax(noisy / self.temperature, rows.visible)
        return straight_through(_greatest(noisy, rows.visible).astype(soft.dtype), soft) if self.hard else soft


class NoisySoftmax(Module):
    """The softmax with its greatest score lowered by noise in training, so that it saturates later.

        s_j <- s_j - a (limit_j - s_j) |xi|,   j the key of the greatest score,   xi standard normal

    `limit_j` is the score of a key of the same norm in the direction of the query, so a match that is nearly
    perfect is hardly changed. The paper lowers the logit of the label in a classifier; a row of attention has no label,
    so its greatest score is lowered instead. In evaluation it is the softmax.
    Chen, Deng and Du 2017, https://arxiv.org/abs/1708.03769. Raises `UserError` for a negative strength.
    """

    def __init__(self, *, heads: int, strength: float = 0.3, rngs: nnx.Rngs):
        del heads, rngs
        if strength < 0:
            raise UserError(f'the strength of NoisySoftmax is {strength}; it must be at least 0')
        self.strength = strength

    def __call__(self, rows: ScoreRows, key: DropoutKey | None) -> Float[Array, 'b h t s']:
        if key is None:
            return softmax(rows.scores, rows.visible)
        xi = jnp.abs(jax.random.normal(key, (*rows.scores.shape[:-1], 1), rows.scores.dtype))
        lowered = rows.scores - self.strength * (rows.limits - rows.scores) * xi
        return softmax(jnp.where(_greatest(rows.scores, rows.visible), lowered, rows.scores), rows.visible)


class NoisySmallTemperature(Module):
    """`softmax((s + xi) / T)` over the `kept` greatest of its noisy scores, with a small temperature T.

    In training `xi` is normal with standard deviation `noise`, drawn for every visible key, which lets a gradient
    through where the softmax alone is saturated, and leaves out others by chance; in evaluation there is none, and the
    greatest scores are kept. Ties at the last place are all kept. After the sparse-noisy softmax of Zhang and Ding,
    https://arxiv.org/abs/2306.06855, whose noise is not known to us: a reconstruction from its abstract.

    Args:
      heads: ignored; maps share one signature.
      temperature: T.
      noise: the standard deviation, in the units of the scores.
      kept: the most keys of a row with a weight; `None`: all.

    Raises `UserError` for a temperature that is not positive, and a negative noise.
    """

    def __init__(
        self, *, heads: int, temperature: float = 0.1, noise: float = 1.0, kept: int | None = 8, rngs: nnx.Rngs
    ):
        del heads, rngs
        if temperature <= 0:
            raise UserError(f'the temperature of NoisySmallTemperature is {temperature}; it must be positive')
        if noise < 0:
            raise UserError(f'the noise of NoisySmallTemperature is {noise}; it must be at least 0')
        self.temperature, self.noise, self.kept = temperature, noise, kept

    def __call__(self, rows: ScoreRows, key: DropoutKey | None) -> Float[Array, 'b h t s']:
        scores, visible = rows.scores, rows.visible
        if key is not None and self.noise > 0:
            scores = scores + self.noise * jax.random.normal(key, scores.shape, scores.dtype)
        if self.kept is not None and self.kept < scores.shape[-1]:
            seen = jnp.where(visible, jax.lax.stop_gradient(scores), -jnp.inf)
            visible = visible & (seen >= jax.lax.top_k(seen, self.kept)[0][..., -1:])
        return softmax(scores / self.temperature, visible)


class StickBreaking(Module):
    """Every key takes a share of what later ones left, `w_ij = sigmoid(s_ij) prod_(j < l < i) (1 - sigmoid(s_il))`.

    Of the keys before the query, latest first; its own is left out, and the first query of a document reads nothing.
    A row sums to one less `prod_(l < i) (1 - sigmoid(s_il))`, which with `remainder` is the weight of the own key.
    Products are sums of logarithms. It has an order, and so needs all keys of a causal row: no window.
    Tan et al. 2024, https://arxiv.org/abs/2410.17980.
    """

    ordered = True

    def __init__(self, *, heads: int, remainder: bool = False, rngs: nnx.Rngs):
        del heads, rngs
        self.remainder = remainder

    def __call__(self, rows: ScoreRows, key: DropoutKey | None) -> Float[Array, 'b h t s']:
        return (_whole if self.remainder else _shares)(rows.scores, rows.visible, rows.own)


@recomputed
def _shares(
    scores: Float[Array, 'b h t s'], visible: Bool[Array, 'b h t s'], own: Int[Array, 't']
) -> Float[Array, 'b h t s']:
    return _broken(scores, visible, own)[0]


@recomputed
def _whole(
    scores: Float[Array, 'b h t s'], visible: Bool[Array, 'b h t s'], own: Int[Array, 't']
) -> Float[Array, 'b h t s']:
    """The shares, and what is left after all of them for the own key."""
    shares, left = _broken(scores, visible, own)
    return jnp.where(visible & _marked(own, scores), jnp.exp(jnp.sum(left, axis=3, keepdims=True)), shares)


def _broken(
    scores: Float[Array, 'b h t s'], visible: Bool[Array, 'b h t s'], own: Int[Array, 't']
) -> tuple[Float[Array, 'b h t s'], Float[Array, 'b h t s']]:
    """The shares, and the logarithm of what each leaves."""
    seen = visible & ~_marked(own, scores)
    left = jnp.where(seen, jax.nn.log_sigmoid(-scores), 0)
    # Of the keys after each: shifted, since a large term taken away again would leave its rounding.
    between = jnp.pad(jax.lax.cumsum(left, axis=3, reverse=True), ((0, 0), (0, 0), (0, 0), (0, 1)))[..., 1:]
    return jnp.where(seen, jnp.exp(jax.nn.log_sigmoid(scores) + between), 0), left


def _marked(own: Int[Array, 't'], scores: Float[Array, 'b h t s']) -> Bool[Array, '1 1 t s']:
    """Which of the keys is that of the query's own token."""
    return (jnp.arange(scores.shape[3])[None] == own[:, None])[None, None]


def _greatest(scores: Float[Array, '*b s'], visible: Bool[Array, '*b s']) -> Bool[Array, '*b s']:
    """Marks the first visible key of the greatest score in every row that has one."""
    place = jnp.argmax(jnp.where(visible, scores, -jnp.inf), axis=-1, keepdims=True)
    return (jax.lax.broadcasted_iota(place.dtype, scores.shape, scores.ndim - 1) == place) & visible
