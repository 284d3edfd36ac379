"""Weights of the levels that the past of a recurrence is divided into."""

import jax
from flax import nnx
from jax import Array
from jaxtyping import Float

from attnlab.errors import UserError
from attnlab.functional.precision import wide_dtype
from attnlab.module import Module
from attnlab.nn.parameter import param
from attnlab.nn.projections import Linear
from attnlab.typing import Sequence


class LevelWeights(Module):
    """A positive weight for every head and level, `softplus(c * (x W))`, in float32 or better; `c` starts at one.

    `count` is how many levels there are, that of the token itself among them: they reach over `2^(count - 1)` tokens.
    Guo et al. 2025, https://arxiv.org/abs/2506.04761. Raises `UserError` for fewer than two.
    """

    def __init__(self, dim: int, *, heads: int, count: int = 15, rngs: nnx.Rngs):
        if count < 2:
            raise UserError(
                f'the count of LevelWeights is {count}; it must be at least 2, the token itself and its past'
            )
        self.heads, self.count = heads, count
        self.linear = Linear(dim, heads * count, rngs=rngs)
        self.scale = param(nnx.initializers.ones, (heads, count), axes=('heads', None), group='dynamics', rngs=rngs)

    def __call__(self, x: Sequence) -> Float[Array, 'b t h l']:
        """Returns the weights. Raises `UserError` for rows longer than the levels reach."""
        reach = 1 << (self.count - 1)
        if x.shape[1] > reach:
            raise UserError(f'rows have {x.shape[1]} tokens; {self.count} levels reach over {reach}: give levels.count')
        wide = self.linear(x).astype(wide_dtype(x.dtype)).reshape(*x.shape[:2], self.heads, self.count)
        return jax.nn.softplus(self.scale[...].astype(wide.dtype)[None, None] * wide)
