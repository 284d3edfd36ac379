"""Classification heads of angles: with a margin between classes, trained on some of them, with a width for each."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int

from attnlab.errors import UserError
from attnlab.functional import cores
from attnlab.losses import check_targets, nan_outside, softmax_loss
from attnlab.models.heads.head import Head, linear_logits, output_weight, wide
from attnlab.nn.parameter import param
from attnlab.typing import DropoutKey

DRAWN = 0xFC2
"""Folded into the key of a step, to make the draw differ from those of dropout."""

SMALLEST = 1e-12
"""Below the squares of norms and sines, whose roots are differentiated."""


class ArcFaceHead(Head):
    """Cosines between hidden state and class, `scale cos(theta_k)`, with `cos(theta_y + margin)` for the target's.

    The margin is in training alone, so that evaluations report the loss of the cosines. Beyond `pi - margin`, where
    `cos(theta + margin)` would rise again, it goes on as `cos(theta) - margin sin(margin)`. Centres start normal with
    standard deviation 0.01. Deng et al. 2019, https://arxiv.org/abs/1801.07698. `vocab` is ignored.

    Raises `UserError` for a scale that is not positive, and a margin outside of 0 to pi.
    """

    def __init__(self, dim: int, vocab: int, *, classes: int, scale: float = 64.0, margin: float = 0.5, rngs: nnx.Rngs):
        del vocab
        if scale <= 0:
            raise UserError(f'scale is {scale}; it must be positive')
        if not 0 <= margin < math.pi:
            raise UserError(f'margin is {margin}; it must be from 0 to less than pi')
        self.scale, self.margin, self.classes = scale, margin, classes
        start = jax.nn.initializers.normal(0.01)
        self.weight = param(start, (classes, dim), axes=('vocab', 'embed'), group='embedding', rngs=rngs)

    def losses(self, hidden: Float[Array, '*b d'], targets: Int[Array, '*b']) -> Float[Array, '*b']:
        """Cross-entropy in nats of the scaled cosines."""
        check_targets(targets, self.classes)
        return softmax_loss(self.logits(hidden), targets)

    def objective(self, hidden: Float[Array, '*b d'], targets: Int[Array, '*b'], key: DropoutKey) -> Float[Array, '*b']:
        """Cross-entropy in nats with the margin."""
        del key
        check_targets(targets, self.classes)
        cosines = self.cosines(hidden)
        own = jax.nn.one_hot(targets, self.classes, dtype=jnp.bool_)
        return softmax_loss(self.scale * jnp.where(own, self.moved(cosines), cosines), targets)

    def moved(self, cosines: Float[Array, '*b']) -> Float[Array, '*b']:
        """The cosines with the margin."""
        # The sine from the cosine: the derivative of arccos has no bound.
        sines = jnp.sqrt(jnp.maximum(1 - jnp.square(cosines), SMALLEST))
        nearer = cosines * math.cos(self.margin) - sines * math.sin(self.margin)
        beyond = cosines - self.margin * math.sin(self.margin)
        return jnp.where(cosines > -math.cos(self.margin), nearer, beyond)

    def logits(self, hidden: Float[Array, '*b d']) -> Float[Array, '*b o']:
        """The scaled cosines, in float32."""
        return self.scale * self.cosines(hidden)

    def cosines(self, hidden: Float[Array, '*b d']) -> Float[Array, '*b o']:
        """The cosine of every class, in float32."""
        return linear_logits(_unit(wide(hidden)), _unit(wide(self.weight[...])))


class PartialFC(ArcFaceHead):
    """An ArcFace head trained over the classes of the batch and others drawn for it, `share` of all, without weights.

    Where classes are divided over devices each draws among its own: of its `o` classes the `share o` of the greatest
    draws, those of the batch before all others, and all of these where they are more. Each sees the centres that it
    draws alone; normalisers are added up over devices. The reported loss is over all classes.
    An et al. 2022, https://arxiv.org/abs/2203.15565.

    Raises `UserError` for a share that is not above 0 and up to 1, and what `ArcFaceHead` raises.
    """

    of_batch = True

    def __init__(
        self,
        dim: int,
        vocab: int,
        *,
        classes: int,
        share: float = 0.1,
        scale: float = 64.0,
        margin: float = 0.5,
        rngs: nnx.Rngs,
    ):
        super().__init__(dim, vocab, classes=classes, scale=scale, margin=margin, rngs=rngs)
        if not 0 < share <= 1:
            raise UserError(f'share is {share}; it must be above 0 and at most 1')
        self.share = share

    def objective(self, hidden: Float[Array, '*b d'], targets: Int[Array, '*b'], key: DropoutKey) -> Float[Array, '*b']:
        """Cross-entropy in nats with the margin, among the classes that are kept."""
        check_targets(targets, self.classes)
        parts = cores.parts('o', self.classes)
        places, kept = self._kept(targets, jax.random.fold_in(key, DRAWN), parts)
        weight = self.weight[...].reshape(parts, -1, self.weight.shape[-1])
        centres = jnp.take_along_axis(weight, places[..., None], axis=1)
        cosines = jnp.einsum('...d,pnd->...pn', _unit(wide(hidden)), _unit(wide(centres)))
        classes = places + self.classes // parts * jnp.arange(parts)[:, None]
        own = classes.reshape((1,) * targets.ndim + classes.shape) == targets[..., None, None]
        logits = self.scale * jnp.where(own, self.moved(cosines), cosines)
        there = kept.reshape((1,) * targets.ndim + kept.shape)
        normalizer = jax.nn.logsumexp(jnp.where(there, logits, -jnp.inf), axis=(-2, -1))
        return nan_outside(normalizer - jnp.sum(jnp.where(own, logits, 0), axis=(-2, -1)), targets, self.classes)

    def _kept(self, targets: Int[Array, '*b'], key: Array, parts: int) -> tuple[Int[Array, 'p n'], Bool[Array, 'p n']]:
        """Classes by their place in each part, and which of them are kept; as many as the batch could need."""
        size = self.classes // parts
        least = max(1, int(self.share * size))
        most = min(size, max(least, targets.size))
        positive = jnp.zeros(self.classes, jnp.float32).at[targets.reshape(-1)].set(1, mode='drop')
        order = jax.random.uniform(key, (self.classes,), jnp.float32) + 2 * positive
        draws, places = jax.lax.top_k(order.reshape(parts, size), most)
        return places, (jnp.arange(most)[None] < least) | (draws >= 2)


class WrappedCauchyHead(Head):
    """Scores that are densities of wrapped Cauchy laws of the angle to the class, each with a width of its own.

        x_k = scale / (2 pi) (1 - rho_k^2) / (1 + rho_k^2 - 2 rho_k cos(theta_k)),   rho_k = sigmoid(r_k)

    The scale is `1 + softplus(s)`, learned from s = 0, unless one is given; `r_k` starts at -1.
    Han 2023, https://arxiv.org/abs/2305.18732. `vocab` is ignored. Raises `UserError` for a scale that is not positive.
    """

    def __init__(self, dim: int, vocab: int, *, classes: int, scale: float | None = None, rngs: nnx.Rngs):
        del vocab
        if scale is not None and scale <= 0:
            raise UserError(f'scale is {scale}; it must be positive, or None to be learned')
        self.classes, self.scale = classes, scale
        self.weight = output_weight(dim, classes, rngs)
        self.widths = param(nnx.initializers.constant(-1.0), (classes,), axes=('vocab',), group='vector', rngs=rngs)
        self.raw_scale = (
            param(nnx.initializers.zeros, (), axes=(), group='vector', rngs=rngs) if scale is None else None
        )

    def losses(self, hidden: Float[Array, '*b d'], targets: Int[Array, '*b']) -> Float[Array, '*b']:
        """Cross-entropy in nats."""
        check_targets(targets, self.classes)
        return softmax_loss(self.logits(hidden), targets)

    def logits(self, hidden: Float[Array, '*b d']) -> Float[Array, '*b o']:
        """The scores of the classes, in float32."""
        cosines = linear_logits(_unit(wide(hidden)), _unit(wide(self.weight[...])))
        rho = jax.nn.sigmoid(self.widths[...]).reshape((1,) * (cosines.ndim - 1) + (-1,))
        scale: Any = self.scale if self.raw_scale is None else 1 + jax.nn.softplus(self.raw_scale[...])
        return scale / (2 * math.pi) * (1 - rho**2) / (1 + rho**2 - 2 * rho * cosines)


def _unit(x: Float[Array, '*b d']) -> Float[Array, '*b d']:
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + SMALLEST)
