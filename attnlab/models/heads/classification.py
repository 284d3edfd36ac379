"""A head of classes."""

from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from attnlab.losses import softmax_loss
from attnlab.models.heads.head import Head, check_targets, wide
from attnlab.nn.projections import Linear


class ClassificationHead(Head):
    """A linear map of one vector per document to classes: `logits = x W + b`, with softmax.

    `vocab` is ignored; heads share one signature.
    """

    def __init__(self, dim: int, vocab: int, *, classes: int, rngs: nnx.Rngs):
        del vocab
        self.classes = classes
        self.linear = Linear(dim, classes, bias=True, axes=('embed', None), group='embedding', rngs=rngs)

    def losses(self, hidden: Float[Array, '*b d'], targets: Int[Array, '*b']) -> Float[Array, '*b']:
        """Cross-entropy in nats."""
        check_targets(targets, self.classes)
        return softmax_loss(self.logits(hidden), targets)

    def logits(self, hidden: Float[Array, '*b d']) -> Float[Array, '*b o']:
        """Scores of the classes, in float32."""
        return wide(self.linear(hidden))
