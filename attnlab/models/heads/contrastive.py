"""A classification head whose training also pushes the means of classes apart."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from attnlab.errors import UserError
from attnlab.losses import check_targets
from attnlab.models.heads.classification import ClassificationHead
from attnlab.models.heads.head import wide
from attnlab.nn.projections import Linear
from attnlab.typing import DropoutKey

SMALLEST = 1e-12
"""Below squares of norms, whose roots are differentiated."""


class BlockContrastiveHead(ClassificationHead):
    """A softmax trained with a term that pushes the means of the classes of a batch apart.

        objective: (1 - share) cross-entropy + share / o mean_k log(1 + sum_{j != k} exp(sharpness cos(m_k, m_j)))

    over the classes k, j that occur in the batch, with `m_k` the mean of their projected hidden states. The
    cross-entropy is reported. Kulatilleke, Chandra and Portmann 2022, https://arxiv.org/abs/2212.08184, as the released
    code computes it. `vocab` is ignored.

    Args:
      dim: model width.
      vocab: ignored.
      classes: their number.
      share: the weight of the second term.
      sharpness: what cosines are multiplied by.
      width: channels that hidden states are projected to for the means.

    Raises `UserError` for a share outside of 0 to 1.
    """

    of_batch = True

    def __init__(
        self,
        dim: int,
        vocab: int,
        *,
        classes: int,
        share: float = 0.5,
        sharpness: float = 0.2,
        width: int = 16,
        rngs: nnx.Rngs,
    ):
        super().__init__(dim, vocab, classes=classes, rngs=rngs)
        if not 0 <= share <= 1:
            raise UserError(f'share is {share}; it must be from 0 to 1')
        self.share, self.sharpness = share, sharpness
        self.project = Linear(dim, width, bias=True, axes=('embed', None), rngs=rngs)

    def objective(self, hidden: Float[Array, '*b d'], targets: Int[Array, '*b'], key: DropoutKey) -> Float[Array, '*b']:
        """See the class; the second term is the same for every row."""
        del key
        check_targets(targets, self.classes)
        return (1 - self.share) * self.losses(hidden, targets) + self.share * self.apart(hidden, targets)

    def apart(self, hidden: Float[Array, '*b d'], targets: Int[Array, '*b']) -> Float[Array, '']:
        """The second term: how alike the means of the classes are."""
        projected = self.project(wide(hidden))
        projected = projected.reshape(-1, projected.shape[-1])
        own = jax.nn.one_hot(targets.reshape(-1), self.classes, dtype=projected.dtype)
        counts = jnp.sum(own, axis=0)
        means = jnp.einsum('no,nd->od', own, projected) / jnp.maximum(counts, 1)[:, None]
        directions = means * jax.lax.rsqrt(jnp.sum(jnp.square(means), axis=-1, keepdims=True) + SMALLEST)
        there = counts > 0
        alike = jnp.where(jnp.eye(self.classes, dtype=jnp.bool_), 0, directions @ directions.T)
        each = jax.nn.logsumexp(jnp.where(there[None], self.sharpness * alike, -jnp.inf), axis=1)
        return jnp.sum(jnp.where(there, each, 0)) / (jnp.maximum(jnp.sum(there), 1) * self.classes)
