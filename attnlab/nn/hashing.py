"""Binary codes of queries and keys, whose products stand for weights of attention: a kernelised hash, and its fit."""

import abc
import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float

from attnlab.context import PADDING
from attnlab.functional.documents import document_means
from attnlab.functional.precision import wide_dtype
from attnlab.module import Module
from attnlab.nn.parameter import buffer
from attnlab.typing import Segments

STEPS, RATE, MOMENTUM = 100, 5e-4, 0.9
"""Of the gradient descent that fits the direction of a bit, as in the released code."""

NEAREST = 10
"""How many tokens count as similar to each token, and how many as dissimilar, as in the released code."""

DRAWN = 512
"""Random vectors that stand for tokens until there are some."""


class Codes(abc.ABC):
    """From the number behind a bit to the bit."""

    @abc.abstractmethod
    def __call__(self, z: Float[Array, '*b']) -> Float[Array, '*b']:
        """The bits, or what stands for them, from -1 to 1."""


@dataclasses.dataclass(frozen=True)
class Signs(Codes):
    """1 above zero, -1 elsewhere; the gradient is that of `Clipped`, straight through where `|z| < 1`.

    Liu et al. 2022, https://arxiv.org/abs/2209.09004.
    """

    def __call__(self, z: Float[Array, '*b']) -> Float[Array, '*b']:
        """The signs."""
        return _signs(z)


@dataclasses.dataclass(frozen=True)
class Clipped(Codes):
    """`z`, clipped to -1 and 1: the function whose gradient `Signs` has."""

    def __call__(self, z: Float[Array, '*b']) -> Float[Array, '*b']:
        """The clipped numbers."""
        return jnp.clip(z, -1, 1)


@jax.custom_vjp
def _signs(z: Array) -> Array:
    return jnp.where(z > 0, jnp.ones_like(z), -jnp.ones_like(z))


_signs.defvjp(
    lambda z: (_signs(z), jnp.abs(z) < 1),
    lambda inside, gradient: (jnp.where(inside, gradient, jnp.zeros_like(gradient)),),
)


SIGNS = Signs()


class Learned(NamedTuple):
    """What a hash holds of each head.

    Attributes:
      anchors: vectors that others are compared with.
      spread: the mean of the squared distances to them.
      means: of the kernel of every anchor.
      directions: one a bit.
    """

    anchors: Float[Array, 'h m k']
    spread: Float[Array, ' h']
    means: Float[Array, 'h m']
    directions: Float[Array, 'h n m']


class KernelHash(Module):
    """Codes of `bits` bits, of vectors x of length one, one hash a head:

        k_m = exp(-|x - a_m|^2 / (2 s)) - mean_m        code_r = sign(sum_m w_rm k_m)

    Anchors `a`, the mean squared distance `s`, means and directions `w` are buffers: they have no gradient, and
    `learned` says how they are fitted. Until then vectors are drawn in the place of tokens, and directions normal: the
    hash is random. Liu et al. 2022, https://arxiv.org/abs/2209.09004; in its released code `s` is that of the row at
    hand (`DocumentHash`).

    Args:
      key_dim: channels of a vector.
      heads: how many hashes there are.
      bits: of a code.
      anchors: of a hash.
      codes: from numbers to bits.
      rngs: draws the buffers.
    """

    def __init__(
        self, key_dim: int, *, heads: int, bits: int = 16, anchors: int = 25, codes: Codes = SIGNS, rngs: nnx.Rngs
    ):
        self.codes = codes
        of_anchors, of_tokens, of_directions = jax.random.split(rngs.params(), 3)
        drawn = _unit(jax.random.normal(of_anchors, (heads, anchors, key_dim), jnp.float32))
        tokens = _unit(jax.random.normal(of_tokens, (1, DRAWN, heads, key_dim), jnp.float32))
        distances, share = _distances(tokens, drawn), jnp.full((1, DRAWN), 1 / DRAWN)
        spread = _mean_distance(distances, share)
        means = jnp.einsum('bt,bthm->hm', share, jnp.exp(-distances / (2 * spread[None, None, :, None])))
        axes = ('heads', None, None)
        self.anchors = buffer(drawn, axes=axes)
        self.spread = buffer(spread, axes=axes[:1])
        self.means = buffer(means, axes=axes[:2])
        self.directions = buffer(jax.random.normal(of_directions, (heads, bits, anchors), jnp.float32), axes=axes)
        self.fitted = buffer(jnp.zeros((), bool), axes=())

    def __call__(self, x: Float[Array, 'b t h k'], segments: Segments | None = None) -> Float[Array, 'b t h n']:
        """The codes of vectors of length one, in float32 or better."""
        held = self.held(wide_dtype(x.dtype))
        centred = self._kernels(x, held, segments) - held.means[None, None]
        return self.codes(jnp.einsum('bthm,hnm->bthn', centred, held.directions, precision=jax.lax.Precision.HIGHEST))

    def _kernels(self, x: Float[Array, 'b t h k'], held: Learned, segments: Segments | None) -> Float[Array, 'b t h m']:
        distances = _distances(x, held.anchors)
        return jnp.exp(-distances / (2 * self._spread(distances, held, segments)[..., None]))

    def _spread(
        self, distances: Float[Array, 'b t h m'], held: Learned, segments: Segments | None
    ) -> Float[Array, '#b #t h']:
        """What the kernels of every token divide squared distances by."""
        del distances, segments
        return held.spread[None, None]

    def held(self, dtype: DTypeLike) -> Learned:
        """The buffers."""
        return Learned(*(getattr(self, name)[...].astype(dtype) for name in Learned._fields))

    def fit(self, x: Float[Array, 'b t h k'], segments: Segments, key: Array) -> None:
        """Sets the buffers to what is `learned`, in place; those that have been fitted stay."""
        found, before = self.learned(x, segments, key), self.held(x.dtype)
        for name, new, old in zip(Learned._fields, found, before, strict=True):
            variable = getattr(self, name)
            variable[...] = jnp.where(self.fitted[...], old, new).astype(variable[...].dtype)
        self.fitted[...] = jnp.ones((), bool)

    def learned(self, x: Float[Array, 'b t h k'], segments: Segments, key: Array) -> Learned:
        """The buffers fitted to vectors of length one, of the tokens of the rows that are no padding.

        Anchors are tokens of the first row by chance, the same for all heads. Of every token the nearest ten tokens of
        its row have the target 1, the furthest ten -1, others 0; `Y`, times the number of bits n. Then for every bit

            w <- argmin of  -mean (1 / (n t)) y^T Y y,  y = tanh(z / 2)        Y <- Y - y y^T,  y = sign(z)

        by descent from where it is, which is kept where the signs do better, with t the tokens of a row. Half of them
        at most are near.
        """
        seen = jnp.not_equal(segments, PADDING)
        held, place = self.held(x.dtype), _some(seen[0], self.anchors.shape[-2], key)
        anchors, share = jnp.moveaxis(x[0, place], 0, 1), seen.astype(x.dtype) / jnp.sum(seen)
        held = held._replace(anchors=anchors, spread=_mean_distance(_distances(x, anchors), share))
        kernels = self._kernels(x, held, segments)
        held = held._replace(means=jnp.einsum('bt,bthm->hm', share, kernels))
        kernels = jnp.where(seen[..., None, None], kernels - held.means[None, None], 0)
        bits = held.directions.shape[1]
        targets = _targets(x, seen) * bits
        sizes = bits * jnp.maximum(jnp.sum(seen, axis=1), 1).astype(x.dtype)

        def bit(targets: Array, start: Array) -> tuple[Array, Array]:
            found = _descended(start, kernels, targets, sizes)
            before, after = (_hard(each, kernels, seen) for each in (start, found))
            better = _loss(after, targets, sizes) < _loss(before, targets, sizes)
            y = jnp.where(better, after, before)
            return targets - jnp.einsum('bth,bsh->bhts', y, y), jnp.where(better, found, start)

        _, directions = jax.lax.scan(bit, targets, jnp.moveaxis(held.directions, 1, 0))
        return held._replace(directions=jnp.moveaxis(directions, 0, 1))


class DocumentHash(KernelHash):
    """`KernelHash` whose `s` is the mean squared distance of the document at hand: a code depends on all its tokens.

    So it is in the code released with Liu et al. 2022, https://arxiv.org/abs/2209.09004, one document a row.
    """

    def _spread(
        self, distances: Float[Array, 'b t h m'], held: Learned, segments: Segments | None
    ) -> Float[Array, 'b #t h']:
        return document_means(jnp.mean(distances, axis=-1), segments)


def _unit(x: Float[Array, '... k']) -> Float[Array, '... k']:
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def _distances(x: Float[Array, 'b t h k'], anchors: Float[Array, 'h m k']) -> Float[Array, 'b t h m']:
    """Squared; differences of larger numbers, hence the highest precision."""
    products = jnp.einsum('bthk,hmk->bthm', x, anchors, precision=jax.lax.Precision.HIGHEST)
    of_x, of_anchors = (jnp.sum(jnp.square(each), axis=-1) for each in (x, anchors))
    return of_x[..., None] + of_anchors[None, None] - 2 * products


def _mean_distance(distances: Float[Array, 'b t h m'], share: Float[Array, 'b t']) -> Float[Array, ' h']:
    return jnp.einsum('bt,bthm->h', share, distances) / distances.shape[-1]


def _some(seen: Bool[Array, ' t'], count: int, key: Array) -> Array:
    """Places of tokens that are seen, by chance; each once before any is taken again."""
    order = jnp.argsort(jnp.where(seen, jax.random.uniform(key, seen.shape), 2))
    return order[jnp.arange(count) % jnp.maximum(jnp.sum(seen), 1)]


def _targets(x: Float[Array, 'b t h k'], seen: Bool[Array, 'b t']) -> Float[Array, 'b h t s']:
    products = jnp.einsum('bthk,bshk->bhts', x, x, precision=jax.lax.Precision.HIGHEST)
    pairs = (seen[:, :, None] & seen[:, None, :])[:, None]
    most = min(NEAREST, x.shape[1])
    last = jnp.clip(jnp.sum(seen, axis=1) // 2, 1, most)[:, None, None, None] - 1

    def bound(sign: int) -> Float[Array, 'b h t 1']:
        """The last of what is nearest, or furthest with the sign -1, to every token."""
        ranked = jax.lax.top_k(jnp.where(pairs, sign * products, -jnp.inf), most)[0]
        return jnp.take_along_axis(ranked, jnp.broadcast_to(last, (*ranked.shape[:-1], 1)), axis=-1)

    alike, unlike = products >= bound(1), -products >= bound(-1)
    return jnp.where(pairs, alike.astype(x.dtype) - unlike.astype(x.dtype), 0)


def _loss(y: Float[Array, 'b t h'], targets: Float[Array, 'b h t s'], sizes: Float[Array, ' b']) -> Float[Array, '']:
    """The mean over rows, each divided by its size, and heads."""
    return -jnp.mean(jnp.einsum('bth,bhts,bsh->bh', y, targets, y) / sizes[:, None])


def _hard(
    direction: Float[Array, 'h m'], kernels: Float[Array, 'b t h m'], seen: Bool[Array, 'b t']
) -> Float[Array, 'b t h']:
    z = jnp.einsum('bthm,hm->bth', kernels, direction)
    return jnp.where(seen[..., None], _signs(z), 0)


def _descended(
    start: Float[Array, 'h m'],
    kernels: Float[Array, 'b t h m'],
    targets: Float[Array, 'b h t s'],
    sizes: Float[Array, ' b'],
) -> Float[Array, 'h m']:
    def soft(direction: Array) -> Array:
        return _loss(jnp.tanh(jnp.einsum('bthm,hm->bth', kernels, direction) / 2), targets, sizes)

    def step(carry: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], None]:
        direction, velocity = carry
        gradient = jax.grad(soft)(direction)
        velocity = MOMENTUM * velocity + gradient
        # Nesterov's.
        return (direction - RATE * (gradient + MOMENTUM * velocity), velocity), None

    return jax.lax.scan(step, (start, jnp.zeros_like(start)), None, length=STEPS)[0][0]
