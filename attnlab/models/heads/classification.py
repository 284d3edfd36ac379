"""A head of classes."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from attnlab.errors import UserError
from attnlab.losses import check_targets, softmax_loss
from attnlab.models.heads.head import Head, wide
from attnlab.nn.projections import Linear
from attnlab.typing import DropoutKey


class ClassificationHead(Head):
    """A linear map of one vector per document to classes: `logits = x W + b`, with softmax.

    With `smoothing` `s`, training minimises the cross-entropy of `1 - s` times the class and `s` times equal shares of
    all `classes` (Szegedy et al. 2016, https://arxiv.org/abs/1512.00567); evaluations report losses without.

    `vocab` is ignored; heads share one signature. Raises `UserError` for a smoothing out of `[0, 1)`.
    """

    def __init__(self, dim: int, vocab: int, *, classes: int, smoothing: float = 0.0, rngs: nnx.Rngs):
        del vocab
        if not 0 <= smoothing < 1:
            raise UserError(f'smoothing of ClassificationHead is {smoothing}; it must be at least 0 and below 1')
        self.smoothing = smoothing
        self.classes = classes
        self.linear = Linear(dim, classes, bias=True, axes=('embed', None), group='embedding', rngs=rngs)

    def losses(self, hidden: Float[Array, '*b d'], targets: Int[Array, '*b']) -> Float[Array, '*b']:
        """Cross-entropy in nats."""
        check_targets(targets, self.classes)
        return softmax_loss(self.logits(hidden), targets)

    def objective(self, hidden: Float[Array, '*b d'], targets: Int[Array, '*b'], key: DropoutKey) -> Float[Array, '*b']:
        """Cross-entropy with the smoothed class, in nats."""
        losses = self.losses(hidden, targets)
        if not self.smoothing:
            return losses
        of_all = -jnp.mean(jax.nn.log_softmax(self.logits(hidden), axis=-1), axis=-1)
        return (1 - self.smoothing) * losses + self.smoothing * of_all

    def logits(self, hidden: Float[Array, '*b d']) -> Float[Array, '*b o']:
        """Scores of the classes, in float32."""
        return self.linear(wide(hidden))
