"""How the kernels of `attention` for TPUs go over a call: tile by tile, and only where a query may see a key.

In a block keys run along sublanes and queries along lanes, `s t`. Per-query numbers, such as pivots and statistics, are
then along lanes, `1 t`, dense in memory, and sums over keys are over sublanes. Queries and outputs are laid out
likewise, `k t` and `v t`; keys and values as given, `s k` and `s v`.

A kernel visits a list of pairs, of a tile and a few of the tiles that its sums run over, which a step of the grid takes
one after the other: what surrounds a step takes a third as long as a block. Those of them that are hidden are copied,
and cost no more; others are in no pair. Sums over tiles are held in scratch memory, and run in the order of the list.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tiling
from pallas_kernels.attention.problem import Operands, Rule
from pallas_kernels.cost import Cost
from pallas_kernels.mosaic_tpu import launch
from pallas_kernels.target import Target

Pairs = list[tuple[int, int]]
Arrays = dict[str, Any]

MEMORY = 64 * 2**20
"""The vector memory a kernel may use, in bytes."""


class Part(NamedTuple):
    """An array that a kernel sees tile by tile, and the letters of its dimensions.

    A kernel sees one index of `b`, `g` and `r`, the only one where the size is 1, one tile of `t` and `s`, the index
    `n` of a tile of `s`, and all of every other dimension, `.`.
    """

    letters: str
    array: Any


Parts = dict[str, Part]


class Visits(NamedTuple):
    """The pairs of tiles that a kernel visits, with something visible, and one at least for every tile of one letter.

    Attributes:
      pairs: of queries and of keys; of the letter that moves the index is of `together` tiles.
      moving: `t` or `s`.
    """

    pairs: Pairs
    moving: str
    together: int


@dataclasses.dataclass(frozen=True)
class Call:
    """The static parameters of a call.

    Attributes:
      sizes: of `b`, `g`, `r`, `t` and `s`.
      tile: queries and keys of a block.
      token: bytes of a key and a value, and of a query and the gradient of an output.
    """

    here: Target
    rule: Rule
    sizes: dict[str, int]
    tile: tiling.AttentionTile
    token: int

    @property
    def shift(self) -> int:
        """The position of the first query among the keys."""
        return self.sizes['s'] - self.sizes['t']

    def padded(self) -> bool:
        """Whether there are queries or keys that are padding."""
        return any(self.sizes[letter] % size for letter, size in self.cut().items())

    def cut(self) -> dict[str, int]:
        """The size of the tiles of `t` and `s`."""
        return {'t': self.tile.queries, 's': self.tile.keys}

    def pad(self, letters: str, array: jax.Array) -> Part:
        """An array with zeros behind its queries and its keys, up to whole tiles, as many as steps go over."""
        whole = {letter: size * self.together[letter] for letter, size in self.cut().items()}
        whole['n'] = self.together['s']
        behind = [-n % whole.get(letter, 1) for letter, n in zip(letters, array.shape, strict=True)]
        return Part(letters, jnp.pad(array, [(0, n) for n in behind]))

    def visible(self) -> list[list[int]]:
        """For every tile of queries the tiles of keys in which some of them may see some key."""
        rule, sizes = self.rule, self.sizes
        found = tiling.visible_tiles(
            sizes['t'], sizes['s'], self.tile, causal=rule.causal, window=rule.window, sinks=rule.sinks
        )
        return [[*sinks, *near] for sinks, near in found]

    def seen(self) -> list[list[int]]:
        """For every tile of keys the tiles of queries of which some may see some of them."""
        queries: list[list[int]] = [[] for _ in range(0, self.sizes['s'], self.tile.keys)]
        for i, tiles in enumerate(self.visible()):
            for j in tiles:
                queries[j].append(i)
        return queries

    @functools.cached_property
    def together(self) -> dict[str, int]:
        """Of how many tiles of `s`, and of `t`, a step goes over those that are visible from one tile of the other."""
        return {
            letter: tiling.attention_steps_tpu(max(map(len, found)), self.cut()[letter] * self.token)
            for letter, found in (('s', self.visible()), ('t', self.seen()))
        }

    def by_queries(self, *, together: bool = True) -> Visits:
        """The keys of every tile of queries, in their order."""
        n = self.together['s'] if together else 1
        return Visits([(i, j) for i, tiles in enumerate(self.visible()) for j in _several(tiles, n)], 's', n)

    def by_keys(self) -> Visits:
        """The queries of every tile of keys, in their order."""
        n = self.together['t']
        return Visits([(i, j) for j, tiles in enumerate(self.seen()) for i in _several(tiles, n)], 't', n)


def _several(tiles: list[int], n: int) -> list[int]:
    """In which of the first `n` tiles, the next `n` and so on there are some of a list, one at least."""
    return sorted({tile // n for tile in tiles}) or [0]


def call_of(here: Target, rule: Rule, operands: Operands) -> Call:
    """The sizes and tiles of a call."""
    b, g, r, t, k = operands.q.shape
    s, v = operands.v.shape[2:]
    sizes = {'b': b, 'g': g, 'r': r, 't': t, 's': s}
    return Call(here, rule, sizes, tiling.attention_tpu(t, s), (k + v) * launch.factor_type(operands.q).itemsize)


class Step(NamedTuple):
    """The position of a kernel in its sweep.

    Attributes:
      rows: positions of the queries among the keys, `1 t`.
      columns: positions of the keys, `s 1`.
      head: the index in the group.
      masked: whether some query of the block may not see some key; otherwise all see all.
      prepared: whether what a kernel makes of a block ahead of it is in scratch memory.
    """

    rows: jax.Array
    columns: jax.Array
    head: jax.Array
    masked: bool
    prepared: bool


Add = Callable[[Step, Arrays, Arrays], None]
"""What a kernel does for one block, given its inputs and references to its scratch memory."""

Prepare = Callable[[Step, Arrays], Arrays]
"""What a kernel makes of a block ahead of it, by the names of scratch memory, given its inputs."""

Finish = Callable[[Arrays, Arrays], None]
"""The end of a kernel, when sums are complete, given references to its scratch memory and to the outputs."""


class Sums(NamedTuple):
    """Scratch memory, float32, and its initial value, `None` for what is written before it is read."""

    shape: tuple[int, ...]
    start: float | None = 0.0


def write(memory: Arrays, results: Arrays) -> None:
    """Writes the sums out as they are."""
    for name, sums in memory.items():
        results[name][...] = sums[...].astype(results[name].dtype)


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The order in which a kernel visits the blocks of a call.

    Attributes:
      name: of the kernel.
      products: how many of its products of queries and keys have the channels of keys, and those of values.
      axes: of the grid, the slowest first: `b`, `g`, `r`, and `p` for the pairs of tiles. Sums run over the axes after
        `p`, and over successive pairs that have the tiles named in `still` in common.
      still: those of `t` and `s` that sums do not run over.
    """

    name: str
    products: tuple[int, int]
    call: Call
    axes: str
    still: str
    visits: Visits

    def run(
        self,
        add: Add,
        inputs: Parts,
        outputs: Parts,
        scratch: dict[str, Sums],
        finish: Finish = write,
        prepare: Prepare | None = None,
    ) -> Arrays:
        """Runs a kernel; `outputs` have shapes and types in place of arrays.

        What `prepare` makes of a block that is not masked is made along with such a block before it, where a step has
        one, so that products stand beside exponentials. Blocks that are masked are not prepared.
        """
        pairs, tile = self.visits.pairs, self.call.tile
        scores = sum(map(len, self.call.visible())) * tile.queries * tile.keys
        scores *= math.prod(self.call.sizes[axis] for axis in self.axes if axis != 'p')
        channels = sum(times * inputs[name].array.shape[3] for times, name in zip(self.products, 'qv', strict=True))
        apart = self.axes.index('p')
        semantics: list[Any] = ['parallel' if place < apart else 'arbitrary' for place in range(len(self.axes))]
        run = launch.call(
            functools.partial(self._step, add, prepare, finish, inputs, scratch),
            self.call.here,
            name=self.name,
            cost=Cost(flops=2 * scores * channels, exponentials=scores),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=tuple(len(pairs) if axis == 'p' else self.call.sizes[axis] for axis in self.axes),
                in_specs=({name: self._spec(part) for name, part in inputs.items()},),
                out_specs=({name: self._spec(part) for name, part in outputs.items()},),
                scratch_shapes=({name: pltpu.VMEM(sums.shape, jnp.float32) for name, sums in scratch.items()},),
            ),
            out_shape=({name: part.array for name, part in outputs.items()},),
            compiler_params=pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=MEMORY),
        )
        lists = [jnp.array(tiles, jnp.int32) for tiles in zip(*pairs, strict=True)]
        return run(*lists, {name: part.array for name, part in inputs.items()})[0]

    def _step(
        self,
        add: Add,
        prepare: Prepare | None,
        finish: Finish,
        inputs: Parts,
        scratch: dict[str, Sums],
        queries: Any,
        keys: Any,
        sources: Arrays,
        results: Arrays,
        memory: Arrays,
    ) -> None:
        """One step of the grid."""
        at = {axis: pl.program_id(place) for place, axis in enumerate(self.axes)}
        first, last = self._ends(at, queries, keys)

        @pl.when(first)
        def _() -> None:
            for name, sums in scratch.items():
                if sums.start is not None:
                    memory[name][...] = jnp.full(sums.shape, sums.start, jnp.float32)

        def block(place: Any) -> tuple[jax.Array, jax.Array, Arrays]:
            return self._block(place, queries[at['p']], keys[at['p']], inputs, sources)

        def inside(function: Callable[..., Any], place: Any, *others: Any, masked: bool, prepared: bool = False) -> Any:
            i, j, views = block(place)
            values = {name: upright(part.letters, views[name][...]) for name, part in inputs.items()}
            return function(self._position(at, i, j, masked, prepared), values, *others)

        def keep(prepared: Arrays) -> None:
            for name, array in prepared.items():
                memory[name][...] = array

        def whole(place: Any, prepared: Any) -> None:
            if prepare is None or self.visits.together == 1:
                inside(add, place, memory, masked=False)
                return
            pl.when(prepared == 0)(lambda: keep(inside(prepare, place, masked=False)))
            # Behind the last block of a step comes itself once more, which costs less than another program.
            behind = jnp.minimum(place + 1, self.visits.together - 1)
            following = inside(prepare, behind, masked=False)
            inside(add, place, memory, masked=False, prepared=True)
            keep(following)

        # A bias may hide any key, and so may choices; next to the six passes of a float32 product masks cost nothing.
        distinguishes = not {'bias', 'words'} & set(inputs) and inputs['q'].array.dtype != jnp.float32

        def visit(place: Any, prepared: Any) -> jax.Array:
            some, every = self.sight(*block(place))
            if distinguishes:
                pl.when(every)(functools.partial(whole, place, prepared))
                some &= ~every
            pl.when(some)(functools.partial(inside, add, place, memory, masked=True))
            return every.astype(jnp.int32)

        if self.visits.together == 1:
            visit(0, 0)
        else:
            jax.lax.fori_loop(0, self.visits.together, visit, jnp.int32(0))
        pl.when(last)(functools.partial(finish, memory, results))

    def _spec(self, part: Part) -> pl.BlockSpec:
        """How the tiles of an array are found."""
        letters, shape = part.letters, part.array.shape
        _, moving, together = self.visits
        cut = self.call.cut()
        cut[moving] *= together
        several = together if moving == 's' and together > 1 else None
        sizes = {'b': None, 'g': None, 'r': None, 'n': several, **cut}

        def place(*places: Any) -> tuple[Any, ...]:
            *grid, queries, keys = places
            at = dict(zip(self.axes, grid, strict=True))
            at |= {'t': queries[at['p']], 's': keys[at['p']], 'n': keys[at['p']], '.': 0}
            return tuple(0 if n == 1 else at[letter] for letter, n in zip(letters, shape, strict=True))

        return pl.BlockSpec(tuple(sizes.get(letter, n) for letter, n in zip(letters, shape, strict=True)), place)

    def _block(
        self, place: Any, queries: jax.Array, keys: jax.Array, inputs: Parts, sources: Arrays
    ) -> tuple[jax.Array, jax.Array, Arrays]:
        """The tiles of queries and of keys of one block of a step, and their parts of the inputs."""
        _, moving, together = self.visits
        if together == 1:
            return queries, keys, sources
        size = self.call.cut()[moving]
        steps = pl.ds(pl.multiple_of(place * size, size), size)
        views = {}
        for name, part in inputs.items():
            where: dict[str, Any] = {moving: steps} | ({'n': place} if moving == 's' else {})
            own = [letter for letter in part.letters if letter not in ('bgr' if moving == 's' else 'bgrn')]
            at = tuple(where.get(letter, slice(None)) for letter in own)
            views[name] = sources[name].at[at] if set(where) & set(own) else sources[name]
        i, j = (together * tile + place if letter == moving else tile for letter, tile in (('t', queries), ('s', keys)))
        return i, j, views

    def _ends(self, at: Arrays, queries: Any, keys: Any) -> tuple[jax.Array, jax.Array]:
        """Whether a step is the first of its sums, and whether it is the last of them."""
        p, end = at['p'], len(self.visits.pairs) - 1
        first, last = p == 0, p == end
        for letter, tiles in (('t', queries), ('s', keys)):
            if letter in self.still:
                first |= tiles[p] != tiles[jnp.maximum(p - 1, 0)]
                last |= tiles[p] != tiles[jnp.minimum(p + 1, end)]
        for axis in self.axes[self.axes.index('p') + 1 :]:
            first &= at[axis] == 0
            last &= at[axis] == self.call.sizes[axis] - 1
        return first, last

    def _position(self, at: Arrays, i: jax.Array, j: jax.Array, masked: bool, prepared: bool) -> Step:
        tile = self.call.tile
        rows = i * tile.queries + self.call.shift + jax.lax.broadcasted_iota(jnp.int32, (1, tile.queries), 1)
        columns = j * tile.keys + jax.lax.broadcasted_iota(jnp.int32, (tile.keys, 1), 0)
        return Step(rows, columns, at['r'], masked, prepared)

    def sight(self, i: jax.Array, j: jax.Array, sources: Arrays) -> tuple[jax.Array, jax.Array]:
        """Whether some query of a block may see some key, and whether every query sees every key, but for a bias."""
        rule, tile, s = self.call.rule, self.call.tile, self.call.sizes['s']
        first, start = i * tile.queries + self.call.shift, j * tile.keys
        last, end = first + tile.queries - 1, start + tile.keys - 1
        some, every = (first < s) & (start < s), (last < s) & (end < s)
        if rule.causal:
            some, every = some & (start <= last), every & (end <= first)
        if rule.window is not None:
            some &= ((start - last < rule.window) & (first - end < rule.window)) | (start < rule.sinks)
            every &= ((last - start < rule.window) & (end - first < rule.window)) | (end < rule.sinks)
        if 'query_segments' in sources:
            lowest, highest, least, most = (
                extreme(sources[name][...])
                for name in ('query_segments', 'key_segments')
                for extreme in (jnp.min, jnp.max)
            )
            some &= (lowest <= most) & (least <= highest)
            every &= (lowest == highest) & (least == most) & (lowest == least)
        if 'words' in sources:
            some &= jnp.max(sources['words'][...]) > 0
        return some, every


def upright(letters: str, block: jax.Array) -> jax.Array:
    """Transposes the block of an array that has keys along lanes, and back."""
    if letters[-1] != 's':
        return block
    floating = jnp.issubdtype(block.dtype, jnp.floating)
    return (block.astype(jnp.float32) if floating else block).T
