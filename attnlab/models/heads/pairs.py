"""A head that compares two documents."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from attnlab.losses import softmax_loss
from attnlab.models.heads.head import Head, wide
from attnlab.nn.projections import Linear


class PairHead(Head):
    """The vectors of two documents to classes: `logits = relu([x, y, x y, x - y] W_1 + b_1) W_2 + b_2`.

    A hidden state is `[x, y]`; there are `dim` hidden units. The features are those of the retrieval task of the Long
    Range Arena: Tay et al. 2021, https://arxiv.org/abs/2011.04006. `vocab` is ignored; heads share one signature.
    """

    documents = 2

    def __init__(self, dim: int, vocab: int, *, classes: int, rngs: nnx.Rngs):
        del vocab
        self.into = Linear(4 * dim, dim, bias=True, axes=('embed', 'mlp'), rngs=rngs)
        self.out = Linear(dim, classes, bias=True, axes=('mlp', None), group='embedding', rngs=rngs)

    def losses(self, hidden: Float[Array, '*b d'], targets: Int[Array, '*b']) -> Float[Array, '*b']:
        """Cross-entropy in nats."""
        return softmax_loss(self.logits(hidden), targets)

    def logits(self, hidden: Float[Array, '*b d']) -> Float[Array, '*b o']:
        """Scores of the classes, in float32 or better."""
        x, y = jnp.split(hidden, 2, axis=-1)
        features = jnp.concatenate([x, y, x * y, x - y], axis=-1)
        return self.out(wide(jax.nn.relu(self.into(features))))
