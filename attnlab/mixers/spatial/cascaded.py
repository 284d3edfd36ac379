"""Attention among neighbours, then scans of what it has read."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional.grids import Grid, axial_angles, flatten, required_grid, unflatten
from attnlab.functional.lookup import taken
from attnlab.functional.precision import wide_dtype
from attnlab.functional.recomputed import recomputed
from attnlab.functional.rotary import rotate_by_angles
from attnlab.mixers.mixer import TwoSided
from attnlab.mixers.spatial.windows import neighbours, offset_bias
from attnlab.mixers.state_space.two_sided import CrossScan
from attnlab.nn.convolutions import DepthwiseConv
from attnlab.nn.heads import head_channels
from attnlab.nn.norms import LayerNorm
from attnlab.nn.parameter import param
from attnlab.nn.projections import Linear, default_rank
from attnlab.typing import Heads, Sequence


class LocalAttentionAndScan(TwoSided):
    """SegMAN's mixer: attention to the `side` x `side` nearest tokens, then four scans of its outputs:

        u = NeighbourhoodAttention(R q, R k, v)    w = norm(CrossScan(silu(norm(conv(u)))))    y = W_o (u + w + conv(v))

    Queries and keys are rotated, half of their channels by the row, half by the column, at frequencies from 1 to
    1/10000 inclusive; the relative bias of neighbours starts at zero. Convolutions are depthwise, 3 x 3 before the
    scans and 5 x 5 of the values; scans have the width of the model. Fu, Lou and Yu 2025,
    https://arxiv.org/abs/2412.11890.

    Raises `UserError` for heads that do not divide `dim` into multiples of 4, without a grid of two axes, and for a
    grid with an axis shorter than `side`.

    Args:
      dim: model width.
      heads: number of heads.
      side: of a neighbourhood, in tokens.
      state: states a channel of the scans.
      implementation: of the core of the scans; `None`: the default of the platform.
      rngs: draws the parameters.
    """

    convolves = True

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        side: int = 7,
        state: int = 1,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        self.heads, self.channels, self.side = heads, head_channels(dim, heads), side
        self.qkv = Linear(dim, 3 * dim, bias=True, rngs=rngs)
        zeros = nnx.initializers.zeros
        self.bias = param(zeros, ((2 * side - 1) ** 2, heads), axes=(None, 'heads'), group='vector', rngs=rngs)
        self.near = DepthwiseConv(dim, width=5, rngs=rngs)
        self.conv = DepthwiseConv(dim, rngs=rngs)
        self.before, self.after = (LayerNorm(dim, rngs=rngs) for _ in range(2))
        self.scans = CrossScan(dim, state=state, dt_rank=default_rank(dim), implementation=implementation, rngs=rngs)
        self.output = Linear(dim, dim, bias=True, axes=('heads', 'embed'), rngs=rngs)

    def __call__(self, x: Sequence, ctx: Context, state: None = None) -> tuple[Sequence, None]:
        grid = required_grid(ctx, type(self).__name__, axes=2)
        if min(grid) < self.side:
            raise UserError(
                f'LocalAttentionAndScan has side {self.side}; every axis of the grid must have at least as many '
                f'tokens, and it is {grid}'
            )
        q, k, v = jnp.split(self.qkv(x), 3, axis=-1)
        shape = (*x.shape[:2], self.heads, self.channels)
        read = self._attended(q.reshape(shape), k.reshape(shape), v.reshape(shape), grid).reshape(x.shape)
        scanned = recomputed(jax.nn.silu)(self.before(self._placed(self.conv, read, grid)))
        y = read + self.after(self.scans(scanned, grid)) + self._placed(self.near, v, grid)
        return self.output(y), None

    def _attended(self, q: Heads, k: Heads, v: Heads, grid: Grid) -> Float[Array, 'b t h k']:
        wide = wide_dtype(q.dtype)
        angles = axial_angles(grid, self.channels, 10000.0, wide, inclusive=True)
        by = jnp.broadcast_to(angles[None, :, None], (*q.shape[:2], 1, angles.shape[-1]))
        q, k = (rotate_by_angles(each, by, interleaved=True) for each in (q, k))
        keys, offsets = neighbours(grid, self.side, 1)
        scores = jnp.einsum('b t h k, b t n h k -> b h t n', q, taken(k, keys, 1), preferred_element_type=wide)
        bias = offset_bias(self.bias[...], offsets, self.side).astype(wide)
        weights = jax.nn.softmax(scores * self.channels**-0.5 + bias[None], axis=-1)
        return jnp.einsum('b h t n, b t n h k -> b t h k', weights.astype(v.dtype), taken(v, keys, 1))

    def _placed(self, conv: DepthwiseConv, x: Sequence, grid: Grid) -> Sequence:
        return flatten(conv(unflatten(x, grid)), grid)
