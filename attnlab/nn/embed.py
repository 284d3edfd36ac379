"""The table of token vectors."""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from attnlab.nn.parameter import Initializer, param
from attnlab.typing import Sequence, Tokens

small_normal = nnx.initializers.normal(0.02)


class Embedding(nnx.Module):
    """A learned vector per token, `y_t = E[token_t]`, `E` of shape `vocab dim`.

    The table may serve as the output head as well: `embedding.weight`. A token outside the vocabulary gives NaN.
    """

    def __init__(self, vocab: int, dim: int, *, initializer: Initializer = small_normal, rngs: nnx.Rngs):
        self.weight = param(initializer, (vocab, dim), axes=('vocab', 'embed'), group='embedding', rngs=rngs)

    def __call__(self, tokens: Tokens, dtype: DTypeLike | None = None) -> Sequence:
        """Looks `tokens` up, giving activations of type `dtype` (`None`: the table's own)."""
        table = self.weight[...]
        # Cast after the lookup: the gradient of the table then adds up in the table's type.
        return jnp.take(table, tokens, axis=0, mode='fill').astype(table.dtype if dtype is None else dtype)
