"""A softmax whose target is made less likely by noise in training."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from attnlab.errors import UserError
from attnlab.losses import check_targets, softmax_loss
from attnlab.models.heads.head import Head, linear_logits, output_weight, wide
from attnlab.typing import DropoutKey

NOISE = 0x4015E
"""Folded into the key of a step, to make the draw differ from those of dropout."""


class NoisySoftmaxHead(Head):
    """A softmax of `x_k = w_k hidden`, trained with a target that is lower the further it is from its class.

        x_y <- x_y - strength (|w_y| |hidden| - x_y) |xi|,   xi standard normal, one number per prediction

    so that the softmax saturates later; what points in the direction of its class is left alone, and nothing is drawn
    for the reported loss. Chen, Deng and Du 2017, https://arxiv.org/abs/1708.03769. `vocab` is ignored.

    Raises `UserError` for a negative strength.
    """

    def __init__(self, dim: int, vocab: int, *, classes: int, strength: float = 0.3, rngs: nnx.Rngs):
        del vocab
        if strength < 0:
            raise UserError(f'strength is {strength}; it must be at least 0')
        self.classes, self.strength = classes, strength
        self.weight = output_weight(dim, classes, rngs)

    def losses(self, hidden: Float[Array, '*b d'], targets: Int[Array, '*b']) -> Float[Array, '*b']:
        """Cross-entropy in nats, without noise."""
        check_targets(targets, self.classes)
        return softmax_loss(self.logits(hidden), targets)

    def objective(self, hidden: Float[Array, '*b d'], targets: Int[Array, '*b'], key: DropoutKey) -> Float[Array, '*b']:
        """Cross-entropy in nats with the lowered target."""
        check_targets(targets, self.classes)
        scores = self.logits(hidden)
        norms = _norm(wide(hidden))[..., None] * _norm(wide(self.weight[...])).reshape((1,) * targets.ndim + (-1,))
        xi = jnp.abs(jax.random.normal(jax.random.fold_in(key, NOISE), targets.shape, scores.dtype))
        lowered = scores - self.strength * (norms - scores) * xi[..., None]
        own = jax.nn.one_hot(targets, self.classes, dtype=jnp.bool_)
        return softmax_loss(jnp.where(own, lowered, scores), targets)

    def logits(self, hidden: Float[Array, '*b d']) -> Float[Array, '*b o']:
        """The scores of the classes, in float32."""
        return linear_logits(hidden, self.weight[...])


def _norm(x: Float[Array, '*b d']) -> Float[Array, '*b']:
    # The root of zero has no derivative.
    return jnp.sqrt(jnp.sum(jnp.square(x), axis=-1) + jnp.finfo(x.dtype).tiny)
