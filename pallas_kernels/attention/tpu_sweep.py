"""How the kernels of `attention` for TPUs go over a call: tile by tile, and only where a query may see a key.

In a block keys run down and queries across, `s t`. What belongs to a query, such as its pivot or its statistics, then
lies along the lanes, `1 t`, dense in memory, and keys are summed over sublanes. Queries and outputs lie likewise,
`k t` and `v t`; keys and values as they come, `s k` and `s v`.

A kernel visits a list of pairs of tiles: what a mask hides costs neither time nor copies. Sums over tiles are held in
scratch memory, and run in the order of the list.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import mosaic_tpu, tiling
from pallas_kernels.attention.problem import Operands, Rule
from pallas_kernels.target import Target

Pairs = list[tuple[int, int]]
Arrays = dict[str, Any]

MEMORY = 64 * 2**20
"""The vector memory a kernel may use, in bytes."""


class Part(NamedTuple):
    """An array of which a kernel sees a tile at a time, and what its dimensions are.

    Of `b`, `g` and `r` a kernel sees one index, the only one where the size is 1; of `t` and `s` one tile, of every
    other dimension, `.`, all.
    """

    letters: str
    array: Any


Parts = dict[str, Part]


@dataclasses.dataclass(frozen=True)
class Call:
    """What is fixed about a call.

    Attributes:
      sizes: of `b`, `g`, `r`, `t` and `s`.
      tile: queries and keys of a block.
    """

    here: Target
    rule: Rule
    sizes: dict[str, int]
    tile: tiling.AttentionTile

    def cut(self) -> dict[str, int]:
        """The size of the tiles of `t` and `s`."""
        return {'t': self.tile.queries, 's': self.tile.keys}

    def pad(self, letters: str, array: jax.Array) -> Part:
        """An array with zeros behind its queries and its keys, up to whole tiles."""
        cut = self.cut()
        behind = [-n % cut.get(letter, 1) for letter, n in zip(letters, array.shape, strict=True)]
        return Part(letters, jnp.pad(array, [(0, n) for n in behind]))

    def visible(self) -> list[list[int]]:
        """For every tile of queries the tiles of keys in which some of them may see some key."""
        t, s = self.sizes['t'], self.sizes['s']
        found = []
        for first in range(s - t, s, self.tile.queries):
            last = min(first + self.tile.queries, s) - 1
            reach = s if self.rule.window is None else self.rule.window - 1
            end = min(s, last + 1 if self.rule.causal else last + reach + 1)
            near = range(max(0, first - reach) // self.tile.keys, -(-max(0, end) // self.tile.keys))
            last_sink = min(self.rule.sinks, last + 1 if self.rule.causal else s, s)
            sinks = range(-(-max(0, last_sink) // self.tile.keys))
            found.append(sorted({*sinks, *near}))
        return found

    def by_queries(self) -> Pairs:
        """The pairs of tiles with something visible, and one at least for every tile of queries, in their order."""
        return [(i, j) for i, tiles in enumerate(self.visible()) for j in tiles or [0]]

    def by_keys(self) -> Pairs:
        """The pairs of tiles with something visible, and one at least for every tile of keys, in their order."""
        queries: list[list[int]] = [[] for _ in range(0, self.sizes['s'], self.tile.keys)]
        for i, tiles in enumerate(self.visible()):
            for j in tiles:
                queries[j].append(i)
        return [(i, j) for j, tiles in enumerate(queries) for i in tiles or [0]]


def call(here: Target, rule: Rule, operands: Operands) -> Call:
    """The sizes and tiles of a call."""
    b, g, r, t, _ = operands.q.shape
    s = operands.k.shape[2]
    return Call(here, rule, {'b': b, 'g': g, 'r': r, 't': t, 's': s}, tiling.attention_tpu(t, s))


class Step(NamedTuple):
    """Where in its sweep a kernel is.

    Attributes:
      rows: positions of the queries among the keys, `1 t`.
      columns: positions of the keys, `s 1`.
      real: which keys and queries are not padding, to be broadcast; all of these must hold.
      enters: whether the list has come to other sums.
      first: whether the step is the first of its sums, by every axis of the grid.
      last: whether it is the last of them.
      head: the index in the group.
    """

    rows: jax.Array
    columns: jax.Array
    real: tuple[jax.Array, ...]
    enters: jax.Array
    first: jax.Array
    last: jax.Array
    head: jax.Array


Body = Callable[[Step, Arrays, Arrays, Arrays], None]
"""One step of a kernel: given its inputs, and references to its outputs and its scratch memory."""


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The order in which a kernel visits the blocks of a call.

    Attributes:
      axes: of the grid, the slowest first: `b`, `g`, `r`, and `p` for the pairs of tiles. Sums run over the axes behind
        `p`, and over successive pairs that have the tiles named in `still` in common.
      still: which of `t` and `s` sums do not run over.
      pairs: tiles of queries and of keys.
    """

    call: Call
    axes: str
    still: str
    pairs: Pairs

    def run(self, body: Body, inputs: Parts, outputs: Parts, scratch: dict[str, tuple[int, int]]) -> Arrays:
        """Runs a kernel; `outputs` have shapes and types in place of arrays, scratch memory is float32."""

        def kernel(queries: Any, keys: Any, sources: Arrays, results: Arrays, memory: Arrays) -> None:
            values = {name: upright(part.letters, sources[name][...]) for name, part in inputs.items()}
            body(self.step(queries, keys), values, results, memory)

        apart = self.axes.index('p')
        run = mosaic_tpu.call(
            kernel,
            self.call.here,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=tuple(len(self.pairs) if axis == 'p' else self.call.sizes[axis] for axis in self.axes),
                in_specs=({name: self.spec(part) for name, part in inputs.items()},),
                out_specs=({name: self.spec(part) for name, part in outputs.items()},),
                scratch_shapes=({name: pltpu.VMEM(shape, jnp.float32) for name, shape in scratch.items()},),
            ),
            out_shape=({name: part.array for name, part in outputs.items()},),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=('parallel',) * apart + ('arbitrary',) * (len(self.axes) - apart),
                vmem_limit_bytes=MEMORY,
            ),
        )
        lists = [jnp.array(tiles, jnp.int32) for tiles in zip(*self.pairs, strict=True)]
        return run(*lists, {name: part.array for name, part in inputs.items()})[0]

    def spec(self, part: Part) -> pl.BlockSpec:
        """How the tiles of an array are found."""
        letters, shape = part.letters, part.array.shape
        sizes = {'b': None, 'g': None, 'r': None, **self.call.cut()}

        def place(*places: Any) -> tuple[Any, ...]:
            *grid, queries, keys = places
            at = dict(zip(self.axes, grid, strict=True))
            at |= {'t': queries[at['p']], 's': keys[at['p']], '.': 0}
            return tuple(0 if n == 1 else at[letter] for letter, n in zip(letters, shape, strict=True))

        return pl.BlockSpec(tuple(sizes.get(letter, n) for letter, n in zip(letters, shape, strict=True)), place)

    def step(self, queries: Any, keys: Any) -> Step:
        """Where a kernel is, given references to the tiles of queries and of keys in the list."""
        at = {axis: pl.program_id(place) for place, axis in enumerate(self.axes)}
        p, end = at['p'], len(self.pairs) - 1
        enters, leaves = p == 0, p == end
        for letter, tiles in (('t', queries), ('s', keys)):
            if letter in self.still:
                enters |= tiles[p] != tiles[jnp.maximum(p - 1, 0)]
                leaves |= tiles[p] != tiles[jnp.minimum(p + 1, end)]
        first, last = enters, leaves
        for axis in self.axes[self.axes.index('p') + 1 :]:
            first &= at[axis] == 0
            last &= at[axis] == self.call.sizes[axis] - 1

        t, s, tile = self.call.sizes['t'], self.call.sizes['s'], self.call.tile
        index = queries[p] * tile.queries + jax.lax.broadcasted_iota(jnp.int32, (1, tile.queries), 1)
        columns = keys[p] * tile.keys + jax.lax.broadcasted_iota(jnp.int32, (tile.keys, 1), 0)
        real = ((index < t,) if t % tile.queries else ()) + ((columns < s,) if s % tile.keys else ())
        return Step(index + (s - t), columns, real, enters, first, last, at['r'])


def upright(letters: str, block: jax.Array) -> jax.Array:
    """Turns the block of an array that has keys across, and back."""
    if letters[-1] != 's':
        return block
    floating = jnp.issubdtype(block.dtype, jnp.floating)
    return (block.astype(jnp.float32) if floating else block).T
