"""A vocabulary head that is trained on some of the tokens at a time."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from attnlab.functional.lookup import lookup
from attnlab.losses import check_targets, nan_outside
from attnlab.models.heads.head import linear_logits, output_weight, target_logits
from attnlab.models.heads.language import VocabularyHead
from attnlab.typing import DropoutKey

NEGATIVES = 0x5A3D
"""Folded into the key of a step, to make the draw differ from those of dropout."""


class SampledSoftmax(VocabularyHead):
    """A softmax trained over the target and `negatives` tokens drawn for the batch, and reported over all of them.

    Tokens are drawn with replacement from `q(j) = log((j + 2) / (j + 1)) / log(o + 1)`, for tokens numbered by
    frequency. With `correction` the logits, the target's too, are `x_j - log(negatives q(j))`, which makes the
    distribution of the data the minimum; without it frequent tokens, drawn often, are held down. Draws of the target
    itself do not count. Jean et al. 2015, https://arxiv.org/abs/1412.2007.
    """

    estimated = True

    def __init__(self, dim: int, vocab: int, *, negatives: int = 64, correction: bool = True, rngs: nnx.Rngs):
        self.negatives, self.correction = negatives, correction
        self.weight = output_weight(dim, vocab, rngs)

    def objective(self, hidden: Float[Array, '*b d'], targets: Int[Array, '*b'], key: DropoutKey) -> Float[Array, '*b']:
        """`-log p(target)` among the target and the drawn tokens."""
        classes = self.weight.shape[0]
        check_targets(targets, classes)
        drawn = log_uniform(jax.random.fold_in(key, NEGATIVES), self.negatives, classes)
        weight = self.weight[...]
        own = target_logits(hidden, weight, jnp.clip(targets, 0, classes - 1))
        others = linear_logits(hidden, lookup(weight, drawn))
        ones = (1,) * targets.ndim
        if self.correction:
            own = own - log_expected(targets, self.negatives, classes)
            others = others - log_expected(drawn, self.negatives, classes).reshape(*ones, -1).astype(others.dtype)
        others = jnp.where(drawn.reshape(*ones, -1) == targets[..., None], -jnp.inf, others)
        losses = jax.nn.logsumexp(jnp.concatenate([own[..., None], others], axis=-1), axis=-1) - own
        return nan_outside(losses, targets, classes)


class AugmentAndReduce(VocabularyHead):
    """A softmax trained on a bound of its loss that takes some of the tokens at a time, without bias.

        -log p(y) <= log eta - 1 + (1 + sum_{k != y} exp(x_k - x_y)) / eta      for every eta > 0

    The sum is `o / negatives` times that over tokens drawn evenly with replacement, the target left out; `eta`, at best
    `1 / p(y)`, is estimated from a second draw and not differentiated, so that the mean of the objective is at least
    the loss. Ruiz et al. 2018, https://arxiv.org/abs/1802.04220, who keep an estimate of eta for every example.
    """

    estimated = True

    def __init__(self, dim: int, vocab: int, *, negatives: int = 64, rngs: nnx.Rngs):
        self.negatives = negatives
        self.weight = output_weight(dim, vocab, rngs)

    def objective(self, hidden: Float[Array, '*b d'], targets: Int[Array, '*b'], key: DropoutKey) -> Float[Array, '*b']:
        """The bound."""
        classes = self.weight.shape[0]
        check_targets(targets, classes)
        weight = self.weight[...]
        own = target_logits(hidden, weight, jnp.clip(targets, 0, classes - 1))
        drawn = jax.random.randint(jax.random.fold_in(key, NEGATIVES), (2, self.negatives), 0, classes)

        def log_odds(drawn: Int[Array, ' n']) -> Float[Array, '*b']:
            """`log(1 + sum)`: minus the logarithm of the target's probability."""
            others = linear_logits(hidden, lookup(weight, drawn)) - own[..., None] + math.log(classes / self.negatives)
            others = jnp.where(drawn.reshape((1,) * targets.ndim + (-1,)) == targets[..., None], -jnp.inf, others)
            return jnp.logaddexp(jax.nn.logsumexp(others, axis=-1), 0)

        log_eta = jax.lax.stop_gradient(log_odds(drawn[1]))
        return nan_outside(log_eta - 1 + jnp.exp(log_odds(drawn[0]) - log_eta), targets, classes)


def log_uniform(key: Array, count: int, classes: int) -> Int[Array, ' n']:
    """Draws classes with replacement, class j with probability `log((j + 2) / (j + 1)) / log(classes + 1)`."""
    drawn = jnp.expm1(jax.random.uniform(key, (count,), jnp.float32) * math.log(classes + 1))
    return jnp.clip(drawn.astype(jnp.int32), 0, classes - 1)


def log_expected(tokens: Int[Array, '*b'], count: int, classes: int) -> Float[Array, '*b']:
    """The logarithm of how often each of `tokens` is expected among `count` draws of `log_uniform`."""
    chance = jnp.log1p(1 / (tokens.astype(jnp.float32) + 1)) / math.log(classes + 1)
    return jnp.log(count * chance)
