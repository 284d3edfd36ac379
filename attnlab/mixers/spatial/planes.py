"""Attention in windows of planes of a volume, between convolutions."""

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Shaped

from attnlab.context import PADDING, Context
from attnlab.errors import UserError
from attnlab.functional.dense import softmax
from attnlab.functional.grids import coordinates, required_grid
from attnlab.functional.lookup import taken
from attnlab.functional.precision import wide_dtype
from attnlab.mixers.mixer import TwoSided
from attnlab.module import Module
from attnlab.nn.activations import gelu_exact
from attnlab.nn.convolutions import DepthwiseConv
from attnlab.nn.heads import head_channels
from attnlab.nn.norms import LayerNorm
from attnlab.nn.parameter import param
from attnlab.nn.projections import Linear
from attnlab.typing import Sequence

Volume = tuple[int, int, int]
Windows = Shaped[Array, 'n s h k']
Occupied = Bool[Array, 'b t']
"""Whether there is anything at a place."""


class LocalEnhancement(Module):
    """`[norm(x W_1 + c_1) | norm(gelu(norm(conv(x))) W_2 + c_2)]`, each half of the channels.

    `conv` is depthwise, 3 x 3 x 3, and reads zeros where a place is empty, which makes it the sparse one of the paper
    at places that are not. Norms are over channels, where the paper normalises over the batch.
    """

    def __init__(self, dim: int, *, rngs: nnx.Rngs):
        self.plain = Linear(dim, dim - dim // 2, bias=True, axes=('embed', None), rngs=rngs)
        self.around = Linear(dim, dim // 2, bias=True, axes=('embed', None), rngs=rngs)
        self.conv = DepthwiseConv(dim, axes=3, rngs=rngs)
        self.inner = LayerNorm(dim, rngs=rngs)
        self.first, self.second = (LayerNorm(size, rngs=rngs) for size in (dim - dim // 2, dim // 2))

    def __call__(self, x: Sequence, grid: Volume, there: Occupied | None = None) -> Sequence:
        around = x if there is None else jnp.where(there[..., None], x, 0)
        near = self.conv(around.reshape(x.shape[0], *grid, -1)).reshape(x.shape)
        near = self.around(gelu_exact(self.inner(near)))
        return jnp.concatenate([self.first(self.plain(x)), self.second(near)], axis=-1)


class PlaneAttention(TwoSided):
    """ConDaFormer's mixer: softmax attention in flat windows across every axis, a third of the heads each.

        u = enhance(x)    q, k, v = u W    y = W_o enhance(read)
        s_ij = (q_i . k_j + q_i . A_{i-j}) / sqrt(key_dim) + k_j . B_{i-j}
        read_i = sum_j softmax_j(s_ij) (v_j + C_{i-j})

    A window is `side` tokens long on two axes and one on the third. `A`, `B` and `C` are sums over the axes of learned
    vectors, one for every offset on an axis and head, which the three kinds of windows share. `enhance` is
    `LocalEnhancement`. `shifted` windows start half a side before the grid. Windows reach beyond the grid, where there
    is nothing; an image is a volume of depth 1. Places of segment 0 are empty: nothing is read there. Where heads do
    not divide by three the first kinds have one more. Duan et al. 2023, https://arxiv.org/abs/2312.11112.

    Raises `UserError` for heads that do not divide `dim`, for fewer than three, and without a grid.

    Args:
      dim: model width.
      heads: at least three.
      side: of a window, in tokens.
      shifted: whether windows are shifted by half of it.
      rngs: draws the parameters.
    """

    convolves = True

    def __init__(self, dim: int, *, heads: int, side: int = 8, shifted: bool = False, rngs: nnx.Rngs):
        if heads < 3:
            raise UserError(f'heads of PlaneAttention is {heads}; it must be at least 3, one for every kind of planes')
        self.heads, self.key_dim = heads, head_channels(dim, heads)
        self.side, self.shift = side, side // 2 if shifted else 0
        self.before, self.after = (LocalEnhancement(dim, rngs=rngs) for _ in range(2))
        self.qkv = Linear(dim, 3 * dim, bias=True, rngs=rngs)
        shape, start = (3, 2 * side - 1, -(-heads // 3), self.key_dim), nnx.initializers.normal(0.02)
        axes = (None, None, 'heads', None)
        self.of_queries, self.of_keys, self.of_values = (
            param(start, shape, axes=axes, group='vector', rngs=rngs) for _ in range(3)
        )
        self.output = Linear(dim, dim, bias=True, axes=('heads', 'embed'), rngs=rngs)

    def __call__(self, x: Sequence, ctx: Context, state: None = None) -> tuple[Sequence, None]:
        grid = required_grid(ctx, type(self).__name__)
        volume: Volume = (1, *grid) if len(grid) == 2 else grid
        there = None if ctx.segments is None else ctx.segments > PADDING
        shape = (*x.shape[:2], self.heads, self.key_dim)
        q, k, v = (part.reshape(shape) for part in jnp.split(self.qkv(self.before(x, volume, there)), 3, axis=-1))
        ends = list(itertools.accumulate((len(part) for part in np.array_split(range(self.heads), 3)), initial=0))
        reads = [
            self._in_planes(q[:, :, part], k[:, :, part], v[:, :, part], there, volume, axis)
            for axis, part in enumerate(itertools.starmap(slice, itertools.pairwise(ends)))
        ]
        return self.output(self.after(jnp.concatenate(reads, axis=2).reshape(x.shape), volume, there)), None

    def _in_planes(
        self, q: Array, k: Array, v: Array, occupied: Occupied | None, grid: Volume, across: int
    ) -> Float[Array, 'b t h k']:
        """The reads of windows that are flat on the axis `across`."""
        window: Volume = tuple(1 if axis == across else self.side for axis in range(3))  # type: ignore[assignment]
        before = [0 if size == 1 else self.shift for size in window]
        around = [(first, -(first + size) % side) for first, size, side in zip(before, grid, window, strict=True)]
        there = np.pad(np.ones(grid, bool), around)
        shape = there.shape
        wide = wide_dtype(q.dtype)
        queries, keys, values = (_windows(each, grid, around, window) for each in (q, k, v))
        seen = jnp.asarray(_cut(there[None, ..., None], window)[..., 0])
        offsets = coordinates(window)[:, None] - coordinates(window)[None] + self.side - 1
        tables = (
            each[...].astype(wide)[:, :, : q.shape[2]] for each in (self.of_queries, self.of_keys, self.of_values)
        )
        moved = [
            sum((taken(part, offsets[..., axis], 0) for axis, part in enumerate(table)), start=0.0) for table in tables
        ]
        scale = self.key_dim**-0.5
        scores = scale * jnp.einsum('nihk,njhk->nhij', queries, keys, preferred_element_type=wide)
        scores = scores + scale * jnp.einsum('nihk,ijhk->nhij', queries.astype(wide), moved[0])
        scores = scores + jnp.einsum('njhk,ijhk->nhij', keys.astype(wide), moved[1])
        visible = jnp.tile(seen, (q.shape[0], 1))
        if occupied is not None:
            visible = visible & _windows(occupied[..., None, None], grid, around, window)[..., 0, 0]
        visible = visible[:, None, None]
        weights = softmax(scores, jnp.broadcast_to(visible, scores.shape))
        read = jnp.einsum('nhij,njhk->nihk', weights, values.astype(wide)) + jnp.einsum(
            'nhij,ijhk->nihk', weights, moved[2]
        )
        whole = _joined(read, q.shape[0], shape, window)
        inside = tuple(slice(first, first + size) for first, size in zip(before, grid, strict=True))
        return whole[(slice(None), *inside)].reshape(q.shape).astype(q.dtype)


def _windows(x: Shaped[Array, 'b t h k'], grid: Volume, around: list[tuple[int, int]], window: Volume) -> Windows:
    """Tokens by window, those of a row of the batch one after another."""
    placed = jnp.pad(x.reshape(x.shape[0], *grid, *x.shape[2:]), [(0, 0), *around, (0, 0), (0, 0)])
    return _cut(placed.reshape(*placed.shape[:4], -1), window).reshape(-1, np.prod(window), *x.shape[2:])


def _cut(x: Any, window: Volume) -> Any:
    """An array `b z y x f` of whole windows as `n s f`."""
    counts = [size // side for size, side in zip(x.shape[1:4], window, strict=True)]
    apart = x.reshape(x.shape[0], *itertools.chain(*zip(counts, window, strict=True)), x.shape[-1])
    return apart.transpose(0, 1, 3, 5, 2, 4, 6, 7).reshape(-1, int(np.prod(window)), x.shape[-1])


def _joined(x: Windows, batch: int, grid: Volume, window: Volume) -> Float[Array, 'b z y x f']:
    """The inverse of `_cut`, channels of heads joined."""
    counts = [size // side for size, side in zip(grid, window, strict=True)]
    apart = x.reshape(batch, *counts, *window, -1)
    return apart.transpose(0, 1, 4, 2, 5, 3, 6, 7).reshape(batch, *grid, -1)
