"""Heads over a vocabulary: a linear map with softmax, separate from the embedding or tied to it."""

from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from attnlab.errors import UserError
from attnlab.losses import next_token_loss
from attnlab.models.heads.head import Head, linear_logits, output_weight


class VocabularyHead(Head):
    """A linear map to the vocabulary, `logits = hidden W^T`, `W` of shape `o d`; the loss never stores all logits."""

    weight: nnx.Param

    def losses(self, hidden: Float[Array, '*b d'], targets: Int[Array, '*b']) -> Float[Array, '*b']:
        """Cross-entropy in nats, `-log softmax(hidden W^T)[target]`."""
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
