"""Heads over a vocabulary: a linear map with softmax, separate from the embedding or tied to it."""

import math

from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from attnlab.errors import UserError
from attnlab.losses import capped, check_targets, next_token_loss
from attnlab.models.heads.head import Head, in_gradient_only, linear_logits, output_weight, target_logits
from attnlab.typing import DropoutKey


class VocabularyHead(Head):
    """A linear map to the vocabulary, `logits = hidden W^T`, `W` of shape `o d`; the loss never stores all logits."""

    weight: nnx.Param

    def losses(self, hidden: Float[Array, '*b d'], targets: Int[Array, '*b']) -> Float[Array, '*b']:
        """Cross-entropy in nats, `-log softmax(hidden W^T)[target]`."""
        check_targets(targets, self.weight.shape[0])
        return next_token_loss(hidden, self.weight[...], targets)

    def logits(self, hidden: Float[Array, '*b d']) -> Float[Array, '*b o']:
        """Scores of every token, in float32."""
        return linear_logits(hidden, self.weight[...])


class LanguageHead(VocabularyHead):
    """A vocabulary head with its own weights, initialised normal with variance 1 / d."""

    def __init__(self, dim: int, vocab: int, *, rngs: nnx.Rngs):
        self.weight = output_weight(dim, vocab, rngs)


class TiedHead(VocabularyHead):
    """A vocabulary head that shares its weights with the embedding table.

    Press and Wolf 2017, https://arxiv.org/abs/1608.05859. Raises `UserError` for inputs without a table.
    """

    def __init__(self, table: nnx.Param | None):
        if table is None:
            raise UserError('model.head is None, which ties it to the embedding, but there is no embedding; set a head')
        self.weight = table


class BoundedHead(LanguageHead):
    """A vocabulary head whose logits are kept small: capped, `c tanh(hidden W^T / c)`, and their normaliser penalised.

    Training adds the gradient of `z_loss (log Z)^2`, with `Z` the sum of the exponentials of the logits; the reported
    loss is that of the predictions alone.

    Args:
      dim: model width.
      vocab: number of tokens.
      z_loss: weight of the penalty (1e-4 in Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311).
      soft_cap: the cap `c` (30 in Gemma team 2024, https://arxiv.org/abs/2408.00118); `None`: no cap.

    Raises `UserError` for a negative weight and for a cap that is not positive.
    """

    def __init__(self, dim: int, vocab: int, *, z_loss: float = 1e-4, soft_cap: float | None = None, rngs: nnx.Rngs):
        if z_loss < 0:
            raise UserError(f'z_loss is {z_loss}; it must be at least 0')
        if soft_cap is not None and not 0 < soft_cap < math.inf:
            raise UserError(f'soft_cap is {soft_cap}; it must be positive and finite, or None')
        self.z_loss, self.soft_cap = z_loss, soft_cap
        self.weight = output_weight(dim, vocab, rngs)

    def losses(self, hidden: Float[Array, '*b d'], targets: Int[Array, '*b']) -> Float[Array, '*b']:
        """Cross-entropy in nats under the capped logits."""
        check_targets(targets, self.weight.shape[0])
        return next_token_loss(hidden, self.weight[...], targets, soft_cap=self.soft_cap)

    def objective(self, hidden: Float[Array, '*b d'], targets: Int[Array, '*b'], key: DropoutKey) -> Float[Array, '*b']:
        """The losses, with the gradient of the penalty besides."""
        del key
        losses = self.losses(hidden, targets)
        # The fused loss hands out no normaliser: it is the loss plus the target's logit.
        log_normalizer = losses + capped(target_logits(hidden, self.weight[...], targets), self.soft_cap)
        return losses + in_gradient_only(self.z_loss * log_normalizer**2)

    def logits(self, hidden: Float[Array, '*b d']) -> Float[Array, '*b o']:
        """The capped scores of every token, in float32."""
        return capped(linear_logits(hidden, self.weight[...]), self.soft_cap)
