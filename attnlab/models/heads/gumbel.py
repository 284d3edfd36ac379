"""A head of classes that are told from the others one by one, by a skewed function of their scores."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from attnlab.losses import check_targets, nan_outside, softmax_loss
from attnlab.models.heads.classification import ClassificationHead
from attnlab.models.heads.head import wide
from attnlab.typing import DropoutKey

LEAST = -4.0
"""Scores are taken for at least this, as in the released code: `exp(-exp(4))` is 2e-24."""


class GumbelHead(ClassificationHead):
    """`q_k = exp(-exp(-x_k))`, the distribution function of Gumbel's law, trained by binary cross-entropy.

        objective: -log q_y - sum_{k != y} log(1 - q_k)

    Its slope is steeper for a rare class that is missed than for the many that are rightly absent. Predictions are
    `q_k / sum_i q_i`, whose cross-entropy is reported. Scores start at `-log log o`, where `q_k` is `1 / o`.
    Alexandridis et al. 2022, https://arxiv.org/abs/2207.10936. `vocab` is ignored.
    """

    def __init__(self, dim: int, vocab: int, *, classes: int, rngs: nnx.Rngs):
        super().__init__(dim, vocab, classes=classes, rngs=rngs)
        start: Any = self.linear.bias
        start[...] = jnp.full((classes,), -math.log(math.log(max(classes, 2))), jnp.float32)

    def objective(self, hidden: Float[Array, '*b d'], targets: Int[Array, '*b'], key: DropoutKey) -> Float[Array, '*b']:
        """The binary cross-entropies of all classes, added up."""
        del key
        check_targets(targets, self.classes)
        log_chances = self.logits(hidden)
        own = jax.nn.one_hot(targets, self.classes, dtype=jnp.bool_)
        # 1 - q from the logarithm of q, since q rounds to 1.
        tiny = jnp.finfo(log_chances.dtype).tiny
        absent = jnp.log(jnp.maximum(-jnp.expm1(log_chances), tiny))
        losses = -jnp.sum(jnp.where(own, log_chances, absent), axis=-1)
        return nan_outside(losses, targets, self.classes)

    def losses(self, hidden: Float[Array, '*b d'], targets: Int[Array, '*b']) -> Float[Array, '*b']:
        """Cross-entropy in nats of the predictions."""
        check_targets(targets, self.classes)
        return softmax_loss(self.logits(hidden), targets)

    def logits(self, hidden: Float[Array, '*b d']) -> Float[Array, '*b o']:
        """`log q = -exp(-x)`, in float32."""
        return -jnp.exp(-jnp.maximum(self.linear(wide(hidden)), LEAST))
