"""Operations on the output of each attention head."""

from flax import nnx
from jax import Array
from jaxtyping import Float

from attnlab.module import Module
from attnlab.nn.parameter import param
from attnlab.typing import Heads


class ShapedRead(Module):
    """The output of shaped attention, `a v_i + b y_i - c u_i`, for every head.

    `y_i` is the output of softmax attention, `v_i` the query's own value and `u_i` the mean of the visible values; the
    gains `a`, `b` and `c` are learned and start at 1. The weights are then centred at the identity, so that signals in
    deep stacks neither vanish nor explode. Noci et al. 2023, https://arxiv.org/abs/2306.17759; causal and with
    trainable gains: He and Hofmann 2024, https://arxiv.org/abs/2311.01906.
    """

    def __init__(self, *, heads: int, rngs: nnx.Rngs):
        def gain() -> nnx.Param:
            return param(nnx.initializers.ones, (heads,), axes=('heads',), group='vector', rngs=rngs)

        self.own, self.read, self.mean = gain(), gain(), gain()

    def __call__(self, own: Heads, read: Heads, mean: Heads) -> Heads:
        def scaled(gain: nnx.Param, values: Heads) -> Float[Array, 'b t h v']:
            # In the type of the gains, so that their gradients are summed over tokens in float32.
            return (gain[...][None, None, :, None] * values).astype(values.dtype)

        return scaled(self.own, own) + scaled(self.read, read) - scaled(self.mean, mean)
