"""Learned attention sinks."""

from flax import nnx
from jax import Array
from jaxtyping import Float

from attnlab.module import Module
from attnlab.nn.parameter import param


class LearnedSink(Module):
    """The score of an additional key without a value, one per head: `p_j = exp(s_j) / (exp(b) + sum_l exp(s_l))`.

    It starts at `start`; 0 adds one to the denominator, minus infinity disables the sink.
    OpenAI 2025, https://arxiv.org/abs/2508.10925.
    """

    def __init__(self, *, heads: int, start: float = 0.0, rngs: nnx.Rngs):
        self.scores = param(nnx.initializers.constant(start), (heads,), axes=('heads',), group='vector', rngs=rngs)

    def __call__(self) -> Float[Array, 'h']:
        return self.scores[...]
