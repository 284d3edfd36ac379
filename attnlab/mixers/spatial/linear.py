"""Mixers of linear cost as on images: with places, pools and convolutions in two dimensions."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float

from attnlab.context import Context
from attnlab.functional.grids import Grid, axial_angles, flatten, required_grid, unflatten
from attnlab.functional.newton import FIXED, BacktrackedStep, FixedStep, solved
from attnlab.functional.precision import wide_dtype
from attnlab.functional.recomputed import gated
from attnlab.functional.rotary import rotate_by_angles
from attnlab.mixers.linear.softmax_free import gaussian
from attnlab.mixers.mixer import TwoSided
from attnlab.mixers.spatial.reduced import adaptive_bins, check_sides
from attnlab.nn.activations import gelu_exact
from attnlab.nn.convolutions import DepthwiseConv, joined_blocks
from attnlab.nn.feature_maps import NormAware
from attnlab.nn.heads import by_head, head_channels
from attnlab.nn.norms import LayerNorm
from attnlab.nn.parameter import param
from attnlab.nn.projections import BlockDiagonal, Linear
from attnlab.typing import Heads, Sequence

COARSE = 7
"""Values of a bias on every axis, before it is resized to the grid."""


class GridAgentAttention(TwoSided):
    """Softmax attention by way of agents, `y = W_o (softmax(s q a^T + C) (softmax(s a k^T + B) v) + conv(v))`.

    The agents `a` are means of the queries over `side` x `side` bins of the grid, as in `PooledReduction`; `s` is one
    over the root of the channels. `B` and `C` are learned for every head and agent at 7 x 7 places, and interpolated
    linearly to the grid. `conv` is depthwise, 3 x 3. Han et al. 2024, https://arxiv.org/abs/2312.08874.

    Raises `UserError` for heads that do not divide `dim`, and without a grid of two axes.

    Args:
      dim: model width.
      heads: number of heads.
      side: agents on every axis.
      bias: whether the projections have one; not that of keys, which the softmax cancels.
      rngs: draws the parameters.
    """

    convolves = True

    def __init__(self, dim: int, *, heads: int, side: int = 7, bias: bool = True, rngs: nnx.Rngs):
        self.heads, self.channels, self.side = heads, head_channels(dim, heads), side
        self.query, self.value = (Linear(dim, dim, bias=bias, rngs=rngs) for _ in range(2))
        self.key = Linear(dim, dim, rngs=rngs)
        shape, start = (heads, side**2, COARSE, COARSE), nnx.initializers.normal(0.02)
        self.agent_bias, self.query_bias = (
            param(start, shape, axes=('heads', None, None, None), group='vector', rngs=rngs) for _ in range(2)
        )
        self.conv = DepthwiseConv(dim, rngs=rngs)
        self.output = Linear(dim, dim, bias=bias, axes=('heads', 'embed'), rngs=rngs)

    def __call__(self, x: Sequence, ctx: Context, state: None = None) -> tuple[Sequence, None]:
        grid = required_grid(ctx, type(self).__name__, axes=2)
        wide, plain = wide_dtype(x.dtype), self.value(x)
        q, k, v = (by_head(each, self.heads).astype(wide) for each in (self.query(x), self.key(x), plain))
        rows, columns = (jnp.asarray(adaptive_bins(size, self.side), wide) for size in grid)
        agents = jnp.einsum('iy,byxhk,jx->bijhk', rows, unflatten(q, grid), columns)
        agents = agents.reshape(x.shape[0], -1, *q.shape[2:]) * self.channels**-0.5
        near, far = (_resized(table[...].astype(wide), grid) for table in (self.agent_bias, self.query_bias))
        weights = jax.nn.softmax(jnp.einsum('bnhk,bthk->bhnt', agents, k) + near[None], axis=-1)
        read = jnp.einsum('bhnt,bthv->bnhv', weights, v)
        scores = jnp.einsum('bthk,bnhk->bhtn', q, agents) + jnp.swapaxes(far, 1, 2)[None]
        y = jnp.einsum('bhtn,bnhv->bthv', jax.nn.softmax(scores, axis=-1), read).reshape(x.shape).astype(x.dtype)
        return self.output(y + _convolved(self.conv, plain, grid)), None


class GridInLine(TwoSided):
    """Linear attention that is injective in its queries, with a residual of the 3 x 3 tokens around, `y = W_o (o + r)`:

        o_i = s q_i . sum_j (k_j - mean k) v_j^T + mean v,   s = 1 / (n sqrt(k))
        r_i = sum_o f_o v_{i+o},   f = W_2 gelu(W_1 mean(x) + c_1) + c_2

    of `n` tokens: weights sum to one and may be negative (`attnlab.mixers.linear.inline.InLine`). The factors `f` are
    one a channel and neighbour, `W_1` and `W_2` map the channels of each head on their own. Han et al. 2024,
    https://arxiv.org/abs/2412.06590.

    Raises `UserError` for heads that do not divide `dim`, and without a grid of two axes.

    Args:
      dim: model width.
      heads: number of heads.
      bias: whether the projections have one; that of keys would cancel.
      rngs: draws the parameters.
    """

    convolves = True

    def __init__(self, dim: int, *, heads: int, bias: bool = True, rngs: nnx.Rngs):
        self.heads, self.channels = heads, head_channels(dim, heads)
        self.query, self.value = (Linear(dim, dim, bias=bias, rngs=rngs) for _ in range(2))
        self.key = Linear(dim, dim, rngs=rngs)
        self.first = BlockDiagonal(dim, blocks=heads, rngs=rngs)
        self.second = BlockDiagonal(dim, blocks=heads, features=9 * dim, rngs=rngs)
        self.output = Linear(dim, dim, bias=bias, axes=('heads', 'embed'), rngs=rngs)

    def __call__(self, x: Sequence, ctx: Context, state: None = None) -> tuple[Sequence, None]:
        grid = required_grid(ctx, type(self).__name__, axes=2)
        wide, plain = wide_dtype(x.dtype), self.value(x)
        q, k, v = (by_head(each, self.heads).astype(wide) for each in (self.query(x), self.key(x), plain))
        # Of the scale each factor has the root: keys times values would leave the range of float16.
        root = (x.shape[1] * self.channels**0.5) ** -0.5
        memory = jnp.einsum('bthk,bthv->bhkv', (k - jnp.mean(k, axis=1, keepdims=True)) * root, v)
        read = jnp.einsum('bthk,bhkv->bthv', q * root, memory) + jnp.mean(v, axis=1, keepdims=True)
        return self.output((read.reshape(x.shape) + self._residual(x, plain, grid)).astype(x.dtype)), None

    def _residual(self, x: Sequence, v: Sequence, grid: Grid) -> Sequence:
        wide = wide_dtype(x.dtype)
        # Factors of whole images cost nothing in float32; XLA on a CPU lacks products of one token in bfloat16.
        mean = jnp.mean(x.astype(wide), axis=1, keepdims=True)
        factors = self.second(gelu_exact(self.first(mean)))
        taps = factors.reshape(x.shape[0], 1, 1, x.shape[-1], 9)
        around = jnp.pad(unflatten(v.astype(wide), grid), ((0, 0), (1, 1), (1, 1), (0, 0)))
        parts = (
            around[:, row : row + grid[0], column : column + grid[1]] * taps[..., 3 * row + column]
            for row, column in itertools.product(range(3), repeat=2)
        )
        return flatten(sum(parts, start=jnp.zeros((), wide)), grid)


class GridSoftmaxFreeAttention(TwoSided):
    """Reads values by a Gaussian kernel, by way of landmarks of the grid, `y = W_o (P (Q + e I)^-1 P^T v + conv(v))`:

        P_ia = exp(-|q_i - l_a|^2 / 2)    Q_ab = exp(-|l_a - l_b|^2 / 2)    q = W_q x / k^(1/4)

    As `attnlab.mixers.linear.softmax_free.SoftmaxFreeAttention`, but a landmark is made of a block of `stride` x
    `stride` tokens, and `conv` is of `width` x `width` tokens, with one kernel a head. Rows and columns beyond the last
    whole block are in no landmark. Lu et al. 2021, https://arxiv.org/abs/2110.11945.

    Raises `UserError` for heads that do not divide `dim`, an even `width`, a `ridge` with which `newton` may diverge,
    without a grid of two axes, and for one with an axis shorter than a block.

    Args:
      dim: model width.
      heads: number of heads.
      stride: side of a block.
      width: of the convolution of values.
      normalised: whether the inverse is divided by the roots of the row sums of `Q` (Lu et al. 2024,
        https://arxiv.org/abs/2207.03341).
      ridge: `e`.
      newton: how the inverse is found.
      iterations: of Newton's method.
      bias: whether the projections have one.
      rngs: draws the parameters.
    """

    convolves = True

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        stride: int = 2,
        width: int = 3,
        normalised: bool = False,
        ridge: float = 0.01,
        newton: FixedStep | BacktrackedStep = FIXED,
        iterations: int = 20,
        bias: bool = True,
        rngs: nnx.Rngs,
    ):
        newton.check_ridge(type(self).__name__, ridge)
        self.heads, self.channels, self.stride = heads, head_channels(dim, heads), stride
        self.normalised, self.ridge, self.newton, self.iterations = normalised, ridge, newton, iterations
        self.query, self.value = (Linear(dim, dim, bias=bias, rngs=rngs) for _ in range(2))
        self.landmark = Linear(stride**2 * self.channels, self.channels, axes=(None, None), rngs=rngs)
        self.norm = LayerNorm(self.channels, rngs=rngs)
        self.conv = DepthwiseConv(dim, width=width, kernels=heads, bias=False, rngs=rngs)
        self.output = Linear(dim, dim, bias=bias, axes=('heads', 'embed'), rngs=rngs)

    def __call__(self, x: Sequence, ctx: Context, state: None = None) -> tuple[Sequence, None]:
        grid = required_grid(ctx, type(self).__name__, axes=2)
        check_sides(grid, self.stride)
        wide, plain = wide_dtype(x.dtype), self.value(x)
        q = by_head(self.query(x), self.heads).astype(wide) * self.channels**-0.25
        landmarks = self._landmarks(q, grid)
        to_landmarks, between = gaussian(q, landmarks), gaussian(landmarks, landmarks)
        sums = jnp.sum(between, axis=-1)
        ridged = between + self.ridge * jnp.eye(between.shape[-1], dtype=wide)[None, None]
        inverse = self.newton(ridged, jnp.max(sums, axis=-1, keepdims=True), None, self.iterations)
        if self.normalised:
            inverse = inverse * (sums[..., None] * sums[..., None, :]) ** -0.5
        y = jnp.einsum('bhtn,bthv->bhnv', to_landmarks, by_head(plain, self.heads).astype(wide))
        y = jnp.einsum('bhtn,bhnv->bthv', to_landmarks, solved(inverse, y))
        return self.output(y.reshape(x.shape).astype(x.dtype) + _convolved(self.conv, plain, grid)), None

    def _landmarks(self, q: Heads, grid: Grid) -> Float[Array, 'b n h k']:
        image = jnp.moveaxis(unflatten(q, grid), 3, 1)
        blocks = joined_blocks(image.reshape(-1, *image.shape[2:]), self.stride)
        made = gelu_exact(self.norm(self.landmark(blocks)))
        return jnp.moveaxis(made.reshape(q.shape[0], self.heads, -1, self.channels), 1, 2)


class GridNormAwareAttention(TwoSided):
    """Linear attention with the features of `NormAware`, rotated by place where values are summed:

        o_i = f(q_i) R_i . mean_j (f(k_j) R_j) v_j^T / (f(q_i) . mean_j f(k_j) + 1e-6)
        y = W_o (norm(o + conv(v)) silu(x W_g))

    Half of the channels of `R` are rotated by the row, half by the column, at frequencies from 1 to 1/10000 inclusive;
    what divides is not rotated. `conv` is depthwise, 5 x 5; the norm is a layer norm of all heads. Meng et al. 2025,
    https://arxiv.org/abs/2506.21137.

    Raises `UserError` for heads that do not divide `dim` into multiples of 4, and without a grid of two axes.

    Args:
      dim: model width.
      heads: number of heads.
      rngs: draws the parameters.
    """

    convolves = True

    def __init__(self, dim: int, *, heads: int, rngs: nnx.Rngs):
        self.heads, self.channels = heads, head_channels(dim, heads)
        self.query, self.key, self.value, self.gate = (Linear(dim, dim, bias=True, rngs=rngs) for _ in range(4))
        self.conv = DepthwiseConv(dim, width=5, rngs=rngs)
        self.norm = LayerNorm(dim, rngs=rngs)
        self.output = Linear(dim, dim, bias=True, axes=('heads', 'embed'), rngs=rngs)

    def __call__(self, x: Sequence, ctx: Context, state: None = None) -> tuple[Sequence, None]:
        grid = required_grid(ctx, type(self).__name__, axes=2)
        wide, plain = wide_dtype(x.dtype), self.value(x)
        q, k, v = (by_head(each, self.heads).astype(wide) for each in (self.query(x), self.key(x), plain))
        q, k = NormAware().features(q, k, ctx.positions)
        total = jnp.einsum('bthm,bhm->bth', q, jnp.mean(k, axis=1)) + 1e-6
        angles = axial_angles(grid, self.channels, 10000.0, wide, inclusive=True)
        memory = jnp.einsum('bthm,bthv->bhmv', self._rotated(k, angles), v / x.shape[1])
        read = jnp.einsum('bthm,bhmv->bthv', self._rotated(q, angles), memory) / total[..., None]
        y = self.norm(read.reshape(x.shape).astype(x.dtype) + _convolved(self.conv, plain, grid))
        return self.output(gated(y, self.gate(x))), None

    def _rotated(self, features: Float[Array, 'b t h m'], angles: Float[Array, 't r']) -> Float[Array, 'b t h m']:
        """Positive and negative parts, each rotated by itself."""
        by = jnp.broadcast_to(angles[None, :, None], (*features.shape[:2], 1, angles.shape[-1]))
        parts = (rotate_by_angles(part, by, interleaved=True) for part in jnp.split(features, 2, axis=-1))
        return jnp.concatenate(list(parts), axis=-1)


def _convolved(conv: Any, x: Sequence, grid: Grid) -> Sequence:
    return flatten(conv(unflatten(x, grid)), grid)


def _resized(table: Float[Array, 'h n y x'], grid: Grid) -> Float[Array, 'h n t']:
    """Returns values of `COARSE` places on every axis at every token: interpolated between centres of their parts."""
    rows, columns = (jnp.asarray(_interpolation(size), table.dtype) for size in grid)
    return jnp.einsum('iy,hnyx,jx->hnij', rows, table, columns).reshape(*table.shape[:2], -1)


def _interpolation(size: int) -> Float[np.ndarray, 'i y']:
    centres = np.clip((np.arange(size) + 0.5) * COARSE / size - 0.5, 0, COARSE - 1)
    return np.maximum(1 - np.abs(centres[:, None] - np.arange(COARSE)), 0)
