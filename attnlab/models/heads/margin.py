"""A classification head with a margin between the angles of classes."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from attnlab.errors import UserError
from attnlab.losses import softmax_loss
from attnlab.models.heads.head import Head, check_targets, linear_logits, wide
from attnlab.nn.parameter import param
from attnlab.typing import DropoutKey

SMALLEST = 1e-12
"""Below the squares of norms and sines, whose roots are differentiated."""


class ArcFaceHead(Head):
    """Cosines between hidden state and class, `scale cos(theta_k)`, with `cos(theta_y + margin)` for the target's.

    The margin is in training alone, so that the reported loss is that of the cosines. Beyond `pi - margin`, where
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
        # The sine from the cosine: the derivative of arccos has no bound.
        sines = jnp.sqrt(jnp.maximum(1 - jnp.square(cosines), SMALLEST))
        nearer = cosines * math.cos(self.margin) - sines * math.sin(self.margin)
        beyond = cosines - self.margin * math.sin(self.margin)
        moved = jnp.where(cosines > -math.cos(self.margin), nearer, beyond)
        own = jax.nn.one_hot(targets, self.classes, dtype=jnp.bool_)
        return softmax_loss(self.scale * jnp.where(own, moved, cosines), targets)

    def logits(self, hidden: Float[Array, '*b d']) -> Float[Array, '*b o']:
        """The scaled cosines, in float32."""
        return self.scale * self.cosines(hidden)

    def cosines(self, hidden: Float[Array, '*b d']) -> Float[Array, '*b o']:
        """The cosine of every class, in float32."""
        return linear_logits(_unit(wide(hidden)), _unit(wide(self.weight[...])))


def _unit(x: Float[Array, '*b d']) -> Float[Array, '*b d']:
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + SMALLEST)
