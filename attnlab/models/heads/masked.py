"""A classification head for tasks that follow one another, whose older classes are left alone."""

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from attnlab.losses import check_targets, softmax_loss
from attnlab.models.heads.classification import ClassificationHead
from attnlab.typing import DropoutKey


class MaskedSoftmaxHead(ClassificationHead):
    """A softmax trained over the classes that occur in a batch; the scores of all others are a constant, `mask`.

    So the classes of earlier tasks are not pushed down, and get no gradient. With `mask=None` it is minus infinity:
    they are left out. A finite one keeps a part of the pull on the classes that are there. All classes are in the
    reported loss. Kim, Kwon and Kim 2023, https://arxiv.org/abs/2309.14808. `vocab` is ignored.
    """

    of_batch = True

    def __init__(self, dim: int, vocab: int, *, classes: int, mask: float | None = None, rngs: nnx.Rngs):
        super().__init__(dim, vocab, classes=classes, rngs=rngs)
        self.mask = mask

    def objective(self, hidden: Float[Array, '*b d'], targets: Int[Array, '*b'], key: DropoutKey) -> Float[Array, '*b']:
        """Cross-entropy in nats over the classes that occur."""
        del key
        check_targets(targets, self.classes)
        occurs = jnp.zeros(self.classes, jnp.bool_).at[targets.reshape(-1)].set(True)
        scores = self.logits(hidden)
        occurs = occurs.reshape((1,) * (scores.ndim - 1) + (-1,))
        return softmax_loss(jnp.where(occurs, scores, -jnp.inf if self.mask is None else self.mask), targets)
