"""Learned sinks: somewhere to put weight that belongs on no key."""

from flax import nnx
from jax import Array
from jaxtyping import Float

from attnlab.nn.parameter import param


class LearnedSink(nnx.Module):
    """The score of one more key for every head, which has no value: `p_j = exp(s_j) / (exp(b) + sum_l exp(s_l))`.

    It starts at `start`; at 0 the denominator is one more, and at minus infinity there is no sink.
    OpenAI 2025, https://arxiv.org/abs/2508.10925.
    """

    def __init__(self, *, heads: int, start: float = 0.0, rngs: nnx.Rngs):
        self.scores = param(nnx.initializers.constant(start), (heads,), axes=('heads',), group='vector', rngs=rngs)

    def __call__(self) -> Float[Array, 'h']:
        return self.scores[...]
