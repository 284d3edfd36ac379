"""What turns hidden states into predictions."""

import jax
from flax import nnx

from attnlab.nn.parameter import param


class LanguageHead(nnx.Module):
    """A linear map onto the vocabulary, or other outputs: `logits = hidden W^T`.

    `W` is of shape `o d`, normal with variance 1 / d.
    """

    def __init__(self, dim: int, vocab: int, *, rngs: nnx.Rngs):
        self.weight = param(
            jax.nn.initializers.normal(dim**-0.5), (vocab, dim), axes=('vocab', 'embed'), group='embedding', rngs=rngs
        )
