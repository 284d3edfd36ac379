"""Parts shared by the kernels of `attention` for Hopper: the operands of a call, its tiles, and the scores of one tile.

A block of threads has two warpgroups that compute, each with 64 rows of its own, and one that copies. The rows are
queries for sums over keys, and keys for sums over queries; `axis` says along which
dimension of a tile of scores the queries run: 0, or 1.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.attention.chosen import Lists
from pallas_kernels.attention.maps import Block, Scaled
from pallas_kernels.attention.problem import Rule
from pallas_kernels.cost import Cost, computed_scores
from pallas_kernels.mosaic_gpu import launch
from pallas_kernels.target import Target
from pallas_kernels.tiling import AttentionTile

ROWS = 64
"""The rows of a warpgroup: those of one matrix instruction."""

WARPGROUPS = 2
"""Warpgroups that compute; another one copies."""

PAD = ROWS * WARPGROUPS
"""Queries and keys are padded to a multiple of it."""

AXES = ('batch', 'head', 'turn', 'warpgroup')

STAGES = 2
"""The number of steps whose operands are in shared memory at a time."""

TILE = plgpu.Layout.WGMMA
DOWN = TILE.reduce(1)
"""The layout of one number for each row of a tile."""
ACROSS = TILE.reduce(0)
"""The layout of one number for each column of a tile."""

UNHIDDEN = -3e38
"""A bias of at most this counts as minus infinity."""


class Reach(NamedTuple):
    """Tiles of columns by the documents that they share with a block of rows, `b n` each.

    Attributes:
      low: for every block of rows, the first tile that may hold one of its documents.
      high: the first tile after all that may.
      alike_low: the first tile that holds one document only, the only one of the rows; or any, if there is none.
      alike_high: the first tile after it that does not.
    """

    low: Any
    high: Any
    alike_low: Any
    alike_high: Any


class Arrays(NamedTuple):
    """The operands, queries and keys padded to whole tiles; a dimension of vectors and bias may be 1 instead.

    Attributes:
      q: `b t h k`.
      k: `b s g k`.
      v: `b s g v`.
      queries: vectors `b h t` by name: 'forget', 'bias' and 'segments'.
      keys: vectors `b h s`, likewise.
      slopes: `h`, or `None`.
      bias: `b h t s` if it varies by query and by key, or `None`; `b h s t` where keys are the rows.
      reach: where documents are, or `None`: they may be anywhere, or there are none.
      words: what queries chose, `b g n t` for tiles of `PAD` keys, or `None`; where keys are the columns
        `b g n t/64 64`. The bit of every key is a vector of `keys`, 'bits'.
      lists: the tiles that hold something chosen, or `None`: all may.
    """

    q: Any
    k: Any
    v: Any
    queries: dict[str, Any]
    keys: dict[str, Any]
    slopes: Any = None
    bias: Any = None
    reach: Reach | None = None
    words: Any = None
    lists: Lists | None = None


@dataclasses.dataclass(frozen=True)
class Call:
    """The static parameters of a kernel.

    Attributes:
      t: queries, without padding.
      s: keys, likewise.
      axis: the axis of a tile along which queries run.
      step: the columns of a tile, processed in one step.
      hides: whether a bias or choices may hide any key.
      skips: whether tiles hidden by positions or segments are skipped.
    """

    here: Target
    rule: Rule
    t: int
    s: int
    axis: int
    step: int
    hides: bool
    skips: bool

    def swizzled(self, itemsize: int = 2) -> tuple[Any, ...]:
        """The layout of matrices in shared memory; products sum over whole rows of swizzled bytes."""
        width = min(128, self.step * itemsize)
        tiled = plgpu.TilingTransform((8, width // itemsize))  # type: ignore[abstract]
        return tiled, plgpu.SwizzleTransform(width)  # type: ignore[abstract]

    def position(self, query: Any) -> Any:
        """The position of a query among the keys."""
        return query + (self.s - self.t)

    def scores(self) -> int:
        """The scores that the kernel computes for a head, whole tiles, if documents and biases hide none."""
        if not self.skips:
            return -(-self.t // PAD) * PAD * -(-self.s // self.step) * self.step
        tile = AttentionTile(PAD, self.step) if self.axis == 0 else AttentionTile(self.step, PAD)
        rule = self.rule
        return computed_scores(self.t, self.s, tile, causal=rule.causal, window=rule.window, sinks=rule.sinks)

    def first(self, turn: Any) -> Any:
        """The first row of a block of threads; blocks with the most work run first."""
        if self.axis == 0 and self.rule.causal:
            return (-(-self.t // PAD) - 1 - turn) * PAD
        return turn * PAD

    def steps(self, first: Any, reach: tuple[Any, Any] | None = None) -> tuple[Any, Callable[[Any], Any]]:
        """The number of steps that the rows from `first` on need, and the tile of columns of each step."""
        tiles = -(-(self.s if self.axis == 0 else self.t) // self.step)
        if not self.skips:
            return _between(0, tiles)
        low, high = (0, tiles) if reach is None else reach
        return self._keys(first, low, high) if self.axis == 0 else self._queries(first, tiles, low, high)

    def _keys(self, first: Any, low: Any, high: Any) -> tuple[Any, Callable[[Any], Any]]:
        last = self.position(first + PAD - 1)
        if self.rule.causal:
            high = jnp.clip(last // self.step + 1, 0, high)
        if self.rule.window is None:
            return _between(low, high)
        # The keys that are always visible come first, then the window.
        sinks = jnp.minimum(-(-self.rule.sinks // self.step), high)
        sinks = jnp.where(low < sinks, sinks, 0)
        near = jnp.maximum(self.position(first) - self.rule.window + 1, 0) // self.step
        low = jnp.maximum(jnp.maximum(near, low), sinks)
        high = jnp.clip((last + self.rule.window - 1) // self.step + 1, 0, high)
        return sinks + jnp.maximum(high - low, 0), lambda step: jnp.where(step < sinks, step, step - sinks + low)

    def _queries(self, first: Any, tiles: int, low: Any, high: Any) -> tuple[Any, Callable[[Any], Any]]:
        shift = self.t - self.s
        if self.rule.causal:
            low = jnp.maximum(low, jnp.maximum(first + shift, 0) // self.step)
        if self.rule.window is not None:
            near = jnp.maximum(first + shift - self.rule.window + 1, 0) // self.step
            far = jnp.clip((first + PAD - 1 + shift + self.rule.window - 1) // self.step + 1, 0, tiles)
            stays = first < self.rule.sinks
            low = low if self.rule.causal else jnp.maximum(low, jnp.where(stays, 0, near))
            high = jnp.minimum(high, jnp.where(stays, tiles, far))
        return _between(low, high)

    def all_visible(self, place: 'Place', alike: Any) -> Any:
        """Whether every query of a tile sees every key of it; `alike`: whether all of them are of one document."""
        if self.hides or alike is False:
            return False
        query, key, queries, keys = place.query, place.key, *self._extent()
        first, last = self.position(query), self.position(query + queries - 1)
        known = [] if alike is True else [alike]
        if self.t % PAD:
            known.append(query + queries <= self.t)
        if self.s % PAD:
            known.append(key + keys <= self.s)
        if self.rule.causal:
            known.append(first >= key + keys - 1)
        if self.rule.window is not None:
            near = last - key < self.rule.window
            if not self.rule.causal:
                near &= key + keys - 1 - first < self.rule.window
            known.append(near | (key + keys <= self.rule.sinks))
        return functools.reduce(jnp.logical_and, known) if known else True

    def _extent(self) -> tuple[int, int]:
        """Queries and keys of a tile."""
        return (ROWS, self.step) if self.axis == 0 else (self.step, ROWS)

    def spread(self, vector: jax.Array, along: int) -> jax.Array:
        """One number for each query (`along=0`) or key (1), over the whole tile."""
        return jax.lax.broadcast_in_dim(vector, (ROWS, self.step), (along ^ self.axis,))

    def load(self, ref: Any, along: int) -> jax.Array:
        """Reads one number for each query (`along=0`) or key (1) of a tile."""
        return plgpu.load(ref, layout=DOWN if along == self.axis else ACROSS, optimized=False)


def _between(low: Any, high: Any) -> tuple[Any, Callable[[Any], Any]]:
    """The steps through the tiles from `low` to before `high`."""
    steps = high - low if isinstance(low, int) and isinstance(high, int) else jnp.maximum(high - low, 0)
    return steps, lambda step: step + low


def reach(call: Call, queries: jax.Array, keys: jax.Array) -> Reach:
    """Returns where the documents of rows are, for the segments `b t` and `b s`.

    For consecutive documents numbered in order, tiles from `low` to `high` are those that share one with the rows, and
    those from `alike_low` to `alike_high` all that hold nothing else. For other numberings some tiles are not excluded,
    or not known to be alike; masks hide their keys.
    """
    rows, columns = (queries, keys) if call.axis == 0 else (keys, queries)
    least, most = (extreme[:, :, None] for extreme in _extremes(rows, PAD))
    lowest, highest = (extreme[:, None, :] for extreme in _extremes(columns, call.step))
    low, high = _ends((least <= highest) & (lowest <= most))
    alike = (least == most) & (lowest == highest) & (least == lowest)
    alike_low, _ = _ends(alike)
    # A run: what is alike after a gap, as where a number comes twice, is not in it.
    alike_high, _ = _ends(~alike & (_tiles(alike) >= alike_low[:, :, None]))
    return Reach(low, high, alike_low, alike_high)


def _ends(chosen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first chosen tile of `b n tiles`, or their number, and the first one after the last, or 0."""
    tiles = _tiles(chosen)
    first = jnp.min(jnp.where(chosen, tiles, chosen.shape[2]), axis=2)
    return first, jnp.max(jnp.where(chosen, tiles + 1, 0), axis=2)


def _tiles(like: jax.Array) -> jax.Array:
    """The number of every tile of `b n tiles`."""
    return jax.lax.broadcasted_iota(jnp.int32, like.shape, 2)


def _extremes(segments: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """The minimum and the maximum of every tile, `b n`."""
    segments = segments.astype(jnp.int32)
    # The last number pads the end.
    padded = jnp.pad(segments, ((0, 0), (0, -segments.shape[1] % size)), mode='edge')
    tiles = padded.reshape(segments.shape[0], -1, size)
    return jnp.min(tiles, axis=2), jnp.max(tiles, axis=2)


class Place(NamedTuple):
    """The first query and the first key of a tile."""

    query: Any
    key: Any


class Parts(NamedTuple):
    """Biases and masks of a tile; see `Arrays`."""

    queries: Mapping[str, jax.Array]
    keys: Mapping[str, jax.Array]
    slope: jax.Array | None
    bias: jax.Array | None


class Scored(NamedTuple):
    """A tile of scores.

    Attributes:
      block: as maps take it.
      distance: of queries and keys.
      slope: derivative of the scores by the scaled products, where they are soft-capped; or `None`: one.
    """

    block: Block
    distance: jax.Array
    slope: jax.Array | None

    def pull(self, dscores: jax.Array) -> jax.Array:
        """The gradients of the scaled products from those of the scores."""
        return dscores if self.slope is None else dscores * self.slope


def score(call: Call, products: jax.Array, parts: Parts, place: Place, *, masked: bool) -> Scored:
    """Returns the scores of a tile from its products; if not `masked`, every key of it is visible."""
    rule = call.rule
    scores, slope = rule.scale * products, None
    if rule.weights.soft_cap is not None:
        bounded = jnp.tanh(scores / rule.weights.soft_cap)
        scores, slope = rule.weights.soft_cap * bounded, 1 - bounded * bounded

    queries = _iota(call, 0) + place.query
    columns = _iota(call, 1) + place.key
    distance = jnp.abs(call.position(queries) - columns)
    visible = _visible(call, queries, columns, parts) if masked else _everywhere(call)
    if parts.slope is not None:
        scores -= parts.slope * distance.astype(jnp.float32)
    if 'forget' in parts.queries:
        scores += call.spread(parts.queries['forget'], 0) - call.spread(parts.keys['forget'], 1)
    for bias in _biases(call, parts):
        scores += jnp.where(visible, bias, 0)
    plain = slope is None and parts.slope is None and 'forget' not in parts.queries and not _biases(call, parts)
    scaled = Scaled(products, rule.scale) if plain and rule.scale > 0 else None
    return Scored(Block(scores, visible, columns, scaled), distance, slope)


def _visible(call: Call, queries: jax.Array, columns: jax.Array, parts: Parts) -> jax.Array:
    rule, visible = call.rule, _everywhere(call)
    if call.t % PAD:
        visible &= queries < call.t
    if call.s % PAD:
        visible &= columns < call.s
    distance = call.position(queries) - columns
    if rule.causal:
        visible &= distance >= 0
    if rule.window is not None:
        near = jnp.abs(distance) < rule.window
        visible &= near | (columns < rule.sinks) if rule.sinks else near
    if 'words' in parts.queries:
        visible &= (call.spread(parts.queries['words'], 0) & call.spread(parts.keys['bits'], 1)) != 0
    if 'segments' in parts.queries:
        visible &= call.spread(parts.queries['segments'], 0) == call.spread(parts.keys['segments'], 1)
    for bias in _biases(call, parts):
        # A NaN, which is not equal to itself, is seen.
        visible &= (bias > UNHIDDEN) | (bias != bias)
    return visible


def _biases(call: Call, parts: Parts) -> list[jax.Array]:
    biases = [] if parts.bias is None else [parts.bias]
    biases += [call.spread(parts.queries['bias'], 0)] if 'bias' in parts.queries else []
    biases += [call.spread(parts.keys['bias'], 1)] if 'bias' in parts.keys else []
    return biases


def _everywhere(call: Call) -> jax.Array:
    return plgpu.layout_cast(jnp.full((ROWS, call.step), True), TILE)


def _iota(call: Call, along: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (ROWS, call.step), along ^ call.axis, layout=TILE)


def where_needed(call: Call, place: Place, alike: Any, compute: Callable[..., Any], *operands: Any) -> Any:
    """`compute(*operands, masked=)`, masked only in tiles that need it; see `Call.all_visible`."""
    visible = call.all_visible(place, alike)
    if isinstance(visible, bool):
        return compute(*operands, masked=not visible)
    return jax.lax.cond(
        visible,
        lambda *operands: compute(*operands, masked=False),
        lambda *operands: compute(*operands, masked=True),
        *operands,
    )


def at(ref: Any, batch: Any, head: Any) -> Any:
    """The part of a vector `b h t` or a bias that belongs to one head, where it varies by head at all."""
    return ref.at[batch if ref.shape[0] > 1 else 0, head if ref.shape[1] > 1 else 0]


def zeros(shape: tuple[int, ...], layout: Any) -> jax.Array:
    """Zeros in registers."""
    return full(shape, 0.0, layout)


def full(shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
    """One number everywhere, in registers."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


class Steps(NamedTuple):
    """The steps of a block of rows.

    Attributes:
      count: how many there are.
      column: the tile of columns of a step.
      alike: whether all rows and columns of a tile are of one document; `True` where there are no documents, `False`
        where it is never known.
    """

    count: Any
    column: Callable[[Any], Any]
    alike: Callable[[Any], Any]


def steps_of(call: Call, operands: Arrays, batch: Any, group: Any, first: Any) -> Steps:
    """The steps of the rows from `first` on."""
    if operands.lists is not None:
        steps, tiles = operands.lists
        block = (batch, group, first // PAD)
        return Steps(steps[block], lambda step: tiles[*block, step], lambda tile: False)
    if operands.reach is None:
        no_documents = 'segments' not in operands.queries
        return Steps(*call.steps(first), lambda tile: no_documents)
    low, high, alike_low, alike_high = (ends[batch, first // PAD] for ends in operands.reach)
    return Steps(*call.steps(first, (low, high)), lambda tile: (alike_low <= tile) & (tile < alike_high))


def row_parts(call: Call, operands: Arrays, batch: Any, head: Any, mine: Any) -> Parts:
    """The per-row operands of a warpgroup's scores, read once."""
    vectors = {
        name: call.load(at(ref, batch, head).at[mine], call.axis)
        for name, ref in (operands.queries if call.axis == 0 else operands.keys).items()
    }
    slope = None if operands.slopes is None else operands.slopes[head]
    return Parts(vectors, {}, slope, None) if call.axis == 0 else Parts({}, vectors, slope, None)


def column_parts(
    call: Call,
    operands: Arrays,
    batch: Any,
    head: Any,
    parts: Parts,
    vectors: Mapping[str, Any],
    place: Place,
    *,
    masked: bool,
) -> Parts:
    """Adds what the columns of a tile contribute, their vectors in shared memory, and the bias of the tile."""
    own = (
        call.load(vectors['words'].at[place.query % PAD // ROWS], 0) if call.axis == 0 and 'words' in vectors else None
    )
    read = {name: ref for name, ref in vectors.items() if masked or name != 'segments'}
    loaded = {name: call.load(ref, 1 - call.axis) for name, ref in read.items() if name != 'words' or own is None}
    if loaded:
        have_read()
    if own is not None:
        parts = parts._replace(queries={**parts.queries, 'words': own})
    if operands.bias is not None:
        down, across = (place.query, place.key) if call.axis == 0 else (place.key, place.query)
        tile = at(operands.bias, batch, head).at[rows_from(down), rows_from(across, call.step)]
        bias = plgpu.load(tile, layout=TILE, optimized=False).astype(jnp.float32)
        parts = parts._replace(bias=bias)
    return parts._replace(keys=loaded) if call.axis == 0 else parts._replace(queries=loaded)


def have_read() -> None:
    """Ensures that vectors of a step have been read before copies, by another proxy, overwrite them."""
    plgpu.commit_smem()


def give(array: jax.Array, shared: Any, result: Any) -> None:
    """Writes an array to global memory by way of shared memory; wait for it before the kernel ends."""
    shared[...] = array
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(shared, result)


def kernel(
    call: Call, body: Callable[..., None], *, name: str, products: int, heads: int, **options: Any
) -> Callable[..., Any]:
    """A kernel of two warpgroups that compute and one that copies.

    `products` is the number of channels of all products of a query and a key; `heads` counts those of all sequences.
    """
    scores = heads * call.scores()
    return launch.kernel_of_warpgroups(
        body,
        call.here,
        computing=WARPGROUPS,
        name=name,
        cost=Cost(flops=2 * scores * products, exponentials=scores),
        grid_names=AXES[:3],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **options,
    )


def over_columns(
    body: Callable[..., Any], around: Callable[..., None], grid: tuple[Any, ...], specs: tuple[Any, ...]
) -> Callable[..., None]:
    """A loop over tiles of columns, which the third warpgroup copies to shared memory ahead of it.

    `body(indices, *refs, carry)` is one step; `around(loop)` runs in the warpgroups that compute and calls `loop` once
    with the first carry, for the last.
    """
    return plgpu.emit_pipeline_warp_specialized(
        body,
        grid=grid,
        in_specs=specs,
        memory_registers=launch.COPYING_REGISTERS,
        wg_axis=AXES[3],
        num_compute_wgs=WARPGROUPS,
        max_concurrent_steps=STAGES,
        compute_context=around,
    )


def over_keys(
    body: Callable[..., Any],
    around: Callable[..., None],
    call: Call,
    operands: Arrays,
    steps: Steps,
    batch: Any,
    head: Any,
    group: Any,
    first: Any,
) -> None:
    """Runs the loop over the tiles of keys that the queries of a head need, from `first` on; see `over_columns`.

    `body(indices, keys, values, vectors, carry)` is one step; `group` is the head of the keys and values.
    """
    matrices = (matrix(call, ref.shape[3], steps.column) for ref in (operands.k, operands.v))
    specs = vectors(operands.keys, call.step, steps.column)
    refs = {name: at(ref, batch, head) for name, ref in operands.keys.items()}
    if operands.words is not None:
        specs['words'] = plgpu.BlockSpec(
            (None, WARPGROUPS, ROWS), lambda step: (steps.column(step) * call.step // PAD, first // PAD, 0)
        )
        refs['words'] = operands.words.at[batch, group]
    loop = over_columns(body, around, (steps.count,), (*matrices, specs))
    loop(operands.k.at[batch, :, group], operands.v.at[batch, :, group], refs)


def matrix(call: Call, channels: int, tile: Callable[..., Any]) -> Any:
    """The tiles of a matrix in shared memory; a step reads the one given by `tile`."""
    return plgpu.BlockSpec((call.step, channels), lambda *indices: (tile(*indices), 0), transforms=call.swizzled())


def vectors(refs: Mapping[str, Any], rows: int, tile: Callable[..., Any]) -> dict[str, Any]:
    """The tiles of vectors in shared memory."""
    return {name: plgpu.BlockSpec((rows,), lambda *indices: (tile(*indices),)) for name in refs}


def rows_from(start: Any, count: int = ROWS) -> Any:
    """A slice, as long as the rows of a warpgroup."""
    return pl.ds(start, count)
