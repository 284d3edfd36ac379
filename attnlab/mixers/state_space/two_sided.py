"""Selective state-space models that read in several directions: both ways, and along four scans of an image."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from attnlab.context import Context
from attnlab.functional.grids import Grid, flatten, required_grid, unflatten
from attnlab.functional.lookup import taken
from attnlab.functional.recomputed import gated
from attnlab.mixers.mixer import TwoSided
from attnlab.mixers.state_space.selective import SelectiveMaps
from attnlab.module import Module
from attnlab.nn.convolutions import DepthwiseConv
from attnlab.nn.norms import LayerNorm
from attnlab.nn.orders import Orders, Raster
from attnlab.nn.preludes import Prelude, ShortConv
from attnlab.nn.projections import Linear, default_rank
from attnlab.typing import Segments, Sequence


class SelectiveScan(SelectiveMaps):
    """A selective scan in one direction, without a state of its own; see `SelectiveMaps`."""

    def __init__(self, inner: int, *, state: int, dt_rank: int, implementation: str | None, rngs: nnx.Rngs):
        super().__init__(inner, state=state, dt_rank=dt_rank, rngs=rngs)
        self.implementation = implementation

    def __call__(self, x: Sequence, segments: Segments | None) -> Sequence:
        return self.scan(x, segments, implementation=self.implementation)[0]


class TwoWaySSM(TwoSided):
    """Vim: two selective state-space models, one of which reads the row from its end.

        x, z = split(u W_in)
        y = f(x) silu(z) + reversed(g(reversed(x))) silu(z)    out = y W_out / 2

    `f` and `g` are each a prelude, a short causal convolution, and a scan (`SelectiveScan`), with parameters of their
    own; half the sum is that of the released configs, the paper has the sum. Zhu et al. 2024, https://arxiv.org/abs/2401.09417.

    Args:
      dim: model width.
      expand: inner width over model width.
      state: states a channel.
      dt_rank: width of the bottleneck that step sizes are read through; `None`: `dim / 16`, rounded up.
      prelude: made as `prelude(inner, rngs=rngs)`, one for each direction.
      implementation: of the core; `None`: the default of the platform.
      rngs: draws the parameters.
    """

    def __init__(
        self,
        dim: int,
        *,
        expand: int = 2,
        state: int = 16,
        dt_rank: int | None = None,
        prelude: Callable[..., Prelude] = ShortConv,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        inner, dt_rank = expand * dim, default_rank(dim, dt_rank)
        scan: dict[str, Any] = {'state': state, 'dt_rank': dt_rank, 'implementation': implementation}
        self.input = Linear(dim, 2 * inner, axes=('embed', 'mlp'), rngs=rngs)
        self.convs: Any = nnx.List([prelude(inner, rngs=rngs) for _ in range(2)])
        self.scans: Any = nnx.List([SelectiveScan(inner, **scan, rngs=rngs) for _ in range(2)])
        self.output = Linear(inner, dim, axes=('mlp', 'embed'), rngs=rngs)

    def __call__(self, x: Sequence, ctx: Context, state: None = None) -> tuple[Sequence, None]:
        x, z = jnp.split(self.input(x), 2, axis=-1)
        segments = ctx.segments
        forwards = self.scans[0](self.convs[0](x, segments)[0], segments)
        segments = None if segments is None else segments[:, ::-1]
        backwards = self.scans[1](self.convs[1](x[:, ::-1], segments)[0], segments)[:, ::-1]
        return self.output(gated(forwards + backwards, z) / 2), None


class CrossScan(Module):
    """The sum of four scans of an image, `sum_d unscan_d(SelectiveScan_d(scan_d(x)))`.

    `scan_d` puts the tokens in an order: along rows, along columns, and both from the end (`attnlab.nn.orders`). Every
    direction has parameters of its own. Liu et al. 2024, https://arxiv.org/abs/2401.10166.
    """

    def __init__(
        self,
        inner: int,
        *,
        state: int,
        dt_rank: int,
        orders: Orders = Raster(),
        implementation: str | None,
        rngs: nnx.Rngs,
    ):
        scan: dict[str, Any] = {'state': state, 'dt_rank': dt_rank, 'implementation': implementation}
        self.orders = orders
        self.directions: Any = nnx.List([SelectiveScan(inner, **scan, rngs=rngs) for _ in range(4)])

    def __call__(self, x: Sequence, grid: Grid) -> Sequence:
        orders = zip(self.directions, self.orders.four(grid), strict=True)
        first, *others = (taken(scan(taken(x, order, 1), None), np.argsort(order), 1) for scan, order in orders)
        return sum(others, first)


class CrossScanSSM(TwoSided):
    """VMamba's SS2D: four scans of an image (`CrossScan`) behind a convolution, gated.

        x, z = split(u W_in)    y = CrossScan(silu(conv(x)))    out = (norm(y) silu(z)) W_out

    `conv` is depthwise, 3 x 3. Liu et al. 2024, https://arxiv.org/abs/2401.10166; in orders of neighbours, Fu, Chen and
    Yu 2024, https://arxiv.org/abs/2408.02615.

    Raises `UserError` without a grid of two axes.

    Args:
      dim: model width.
      expand: inner width over model width.
      state: states a channel.
      dt_rank: width of the bottleneck that step sizes are read through; `None`: `dim / 16`, rounded up.
      orders: in which the scans read the image.
      conv: made as `conv(inner, rngs=rngs)`.
      implementation: of the core; `None`: the default of the platform.
      rngs: draws the parameters.
    """

    convolves = True

    def __init__(
        self,
        dim: int,
        *,
        expand: int = 2,
        state: int = 16,
        dt_rank: int | None = None,
        orders: Orders = Raster(),
        conv: Callable[..., nnx.Module] = DepthwiseConv,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        inner, dt_rank = expand * dim, default_rank(dim, dt_rank)
        self.input = Linear(dim, 2 * inner, axes=('embed', 'mlp'), rngs=rngs)
        self.conv: Any = conv(inner, rngs=rngs)
        self.scans = CrossScan(
            inner, state=state, dt_rank=dt_rank, orders=orders, implementation=implementation, rngs=rngs
        )
        self.norm = LayerNorm(inner, rngs=rngs)
        self.output = Linear(inner, dim, axes=('mlp', 'embed'), rngs=rngs)

    def __call__(self, x: Sequence, ctx: Context, state: None = None) -> tuple[Sequence, None]:
        grid = required_grid(ctx, type(self).__name__, axes=2)
        x, z = jnp.split(self.input(x), 2, axis=-1)
        x = jax.nn.silu(flatten(self.conv(unflatten(x, grid)), grid))
        return self.output(gated(self.norm(self.scans(x, grid)), z)), None
