"""A stack of blocks in a repeating pattern, its parameters stacked over the repeats."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Int, Shaped
from ml_collections import ConfigDict

from attnlab.blocks.alignment import Alignment
from attnlab.blocks.block import Block, PreNorm, Stage, mixer_of, stages
from attnlab.blocks.layer import ByLayer, Layer, MixerAndMLP
from attnlab.blocks.residual import Plain, Residual, Streams
from attnlab.config import set_value, spec, takes
from attnlab.context import Context, FirstValues
from attnlab.errors import UserError
from attnlab.mixers.combine import copied, within
from attnlab.mixers.mixer import Mixer
from attnlab.module import Module, modules_of
from attnlab.nn.bounds import RisingBound, rising_bounds
from attnlab.nn.initialization import Initialization
from attnlab.typing import Sequence, State
from pallas_kernels import target

LOOPS = ('auto', 'scan', 'unroll')
CONNECTIONS = 0x7E51D0A1
"""Folded into the keys of connections, to make them differ from those of their blocks."""
INITIALIZATION = 0x1A17
"""Folded into the keys of linear maps drawn anew, likewise."""


class Stack(Module):
    """`depth` blocks, layer `i` built by `blocks[i % len(blocks)]`; follows the contract of a mixer.

    The parameters of each block of the pattern are stacked over its repeats, whether layers are scanned or unrolled, so
    that checkpoints do not depend on that choice.

    Args:
      dim: model width.
      depth: number of blocks.
      blocks: the pattern; each makes a block, or a group of them, as `block(dim, rngs=rngs)`.
      residual: makes connections of branches and stream, as `residual(dim, branches=..., rngs=rngs)`.
      initialization: the initial distribution of linear maps, and the scaling by depth of the last of each branch.
      alignment: keeps the streams of successive layers alike in training; `None`: nothing does.
      loop: 'scan' over the repeats (compiles once per pattern), 'unroll' (faster on CPU), or 'auto' (unrolls
        where the program is compiled for a CPU: see `pallas_kernels.target`).
      remat: recompute the activations of each block in the backward pass instead of keeping them.

    Raises `UserError` for a depth below 1, an empty pattern, an unknown loop, another residual than the plain one for
    blocks that wire their own residual branches, or mixers within others that need the values of the first layer.
    """

    def __init__(
        self,
        dim: int,
        *,
        depth: int,
        blocks: tuple[Callable[..., PreNorm | Mixer], ...],
        residual: Callable[..., Residual] = Plain,
        initialization: Initialization = Initialization(),
        alignment: Alignment | None = None,
        loop: str = 'auto',
        remat: bool = False,
        rngs: nnx.Rngs,
    ):
        if depth < 1 or not blocks or loop not in LOOPS:
            raise UserError(
                f'a stack needs depth >= 1, blocks, and loop in {LOOPS}; got {depth}, {len(blocks)} blocks, {loop!r}'
            )
        pattern = blocks[:depth]
        self.dim = dim
        self.depth = depth
        self.alignment = alignment
        self.loop = loop
        self.remat = remat
        layers = _layers_of_pattern(depth, len(pattern))
        keys = [jax.random.split(rngs.params(), self.copies(len(each))) for each in layers]
        self.blocks = nnx.List([_stacked(block, dim, some) for block, some in zip(pattern, keys, strict=True)])
        firsts = _first_branches(self.blocks, depth)
        if initialization != Initialization():
            initialization.apply(self.blocks, firsts[-1], jax.random.fold_in(keys[0][0], INITIALIZATION))
        self.residual = residual(dim, branches=firsts[-1], rngs=rngs)
        self.settle()
        for block, each, some in zip(self.blocks, layers, keys, strict=True):
            _connect(block, self.residual, jnp.asarray([firsts[layer] for layer in each]), some)
            _check_values(block)

    def copies(self, repeats: int) -> int:
        """How many copies of a block of the pattern are made where it is repeated so often."""
        return repeats

    def settle(self) -> None:
        """Called after the blocks and the residual are made, before their connections are; does nothing here.

        A subclass may change what parameters of blocks start with, or refuse what it is made of.
        """

    def level(self, variable: nnx.Param) -> None:
        """Makes all layers start with one value of a parameter, where only a few are stored; does nothing here."""

    def check_own(self) -> None:
        """Raises `UserError` where layers share parameters, so that none can be changed alone; does nothing here."""

    def stacked(self) -> list[tuple[Any, nnx.State]]:
        """The blocks of the pattern, each its definition and its variables, stacked over its repeats.

        Bounds that rise from layer to layer are told there.
        """
        return self._raised([nnx.split(block) for block in self.blocks])

    def __call__(self, x: Sequence, ctx: Context, state: State | None = None) -> tuple[Sequence, State | None]:
        """Returns `(x, state)`; the state is a tuple with one entry per layer. With a state, layers are unrolled."""
        streams = self.residual.open(x)
        if state is not None:
            advanced = []
            for index, layer in enumerate(self.layers()):
                own, ctx = self.told(index, layer, streams, ctx, state[index])
                streams, layer_state = layer(streams, own.fold_in(index), state[index])
                advanced.append(layer_state)
            return self.residual.close(streams), tuple(advanced)
        scanned = self._in_loop()
        for index, layer in enumerate(self.layers()):
            if scanned and index == scanned.start:
                streams = self._scanned(streams, ctx, scanned)
            if index not in scanned:
                own, ctx = self.told(index, layer, streams, ctx)
                streams = self._apply(*nnx.split(layer), streams, own.fold_in(index))
        return self.residual.close(streams), None

    def told(
        self, index: int, layer: PreNorm | Mixer, streams: Streams, ctx: Context, state: State | None = None
    ) -> tuple[Context, Context]:
        """The context of layer `index`, which is called with these streams, and that of the layers after it.

        Both have its values where it is the first that mixes values; else they are the context that is given.
        """
        if index != self._tells() or not isinstance(layer, Block) or not ctx.positions.shape[1]:
            return ctx, ctx
        values = layer.values(streams, ctx, state)
        own, above = (dataclasses.replace(ctx, first_values=FirstValues(values, own)) for own in (True, False))
        return own, above

    def context(self, ctx: Context) -> Context:
        """The context of the output, which is that of the input."""
        return ctx

    @property
    def parts(self) -> list['Stack']:
        """The stacks of which it is made, here itself alone; a `Pyramid` has several."""
        return [self]

    def stacks(self, ctx: Context) -> list[tuple['Stack', Context]]:
        """Its parts, each with the context of its tokens."""
        return [(self, ctx)]

    def stages(self, x: Sequence, ctx: Context) -> Iterator[Stage]:
        """Every named intermediate value in order, lazily, layer by layer; the last is the output."""
        streams = self.residual.open(x)
        for index, layer in enumerate(self.layers()):
            own, ctx = self.told(index, layer, streams, ctx)
            for stage in stages(layer, streams, own):
                yield Stage(f'layers[{index}].{stage.name}', stage.value)
            streams = stage.value
        yield Stage('output', self.residual.close(streams))

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> State:
        """One state per layer, in order."""
        return tuple(layer.init_state(batch, length, dtype) for layer in self.layers())

    def layers(self) -> Iterator[PreNorm | Mixer]:
        """The blocks in order, each with its own slice of the stacked parameters."""
        split = self.stacked()
        sliced = [_unstack(state) for _, state in split]
        for place, repeat in map(self.place, range(self.depth)):
            yield nnx.merge(split[place][0], sliced[place][repeat])

    def place(self, layer: int) -> tuple[int, int]:
        """Which block of the pattern a layer is, and which of its repeats."""
        repeat, place = divmod(layer, len(self.blocks))
        return place, repeat

    def pattern(self) -> list[tuple[PreNorm | Mixer, range]]:
        """The blocks of the pattern as they are stored, each with the indices of its layers."""
        return list(zip(self.blocks, _layers_of_pattern(self.depth, len(self.blocks)), strict=True))

    def take_apart(self) -> None:
        """Gives every layer a block of its own, stacked over one repeat: the same function, in place.

        Layers may then differ in the shapes of what they hold. A scan over repeats has one step, of all layers.
        Raises `UserError` for layers without parameters of their own.
        """
        self.check_own()
        split = self.stacked()

        def alone(place: int, repeat: int) -> PreNorm | Mixer:
            graphdef, state = split[place]
            return nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf[repeat : repeat + 1], state))

        self.blocks = nnx.List([alone(*self.place(layer)) for layer in range(self.depth)])

    def _raised(self, found: list[tuple[Any, nnx.State]]) -> list[tuple[Any, nnx.State]]:
        """The blocks with the bounds of all layers that have one at the same place (`RisingBound`)."""
        for at in dict.fromkeys(path for block in self.blocks for path in _bounds_within(block)):
            own = [place for place, block in enumerate(self.blocks) if at in _bounds_within(block)]
            logits = jnp.concatenate([_value_at(found[place][1], (*at, 'logits')) for place in own])
            layers = [layer for place in own for layer in self.pattern()[place][1]]
            order = np.argsort(layers)
            bounds = rising_bounds(logits[order])[np.argsort(order)]
            ends = np.cumsum([len(self.pattern()[place][1]) for place in own])
            for place, some in zip(own, jnp.split(bounds, ends[:-1]), strict=True):
                graphdef, state = found[place]
                found[place] = graphdef, _with_value(state, (*at, 'bounds'), some)
        return found

    def _tells(self) -> int | None:
        """The first layer whose values those above mix into theirs."""
        mixers = (mixer_of(block) for block in self.blocks)
        return next((place for place, mixer in enumerate(mixers) if getattr(mixer, 'mixes_values', False)), None)

    def _in_loop(self) -> range:
        """The layers that a loop over repeats runs: whole periods, without the one in which values are told."""
        period = len(self.blocks)
        periods = self.depth // period if self._scans() else 0
        return range(0 if self._tells() is None or not periods else period, periods * period)

    def _scans(self) -> bool:
        device = target.current()
        return self.loop == 'scan' or (self.loop == 'auto' and device.platform != 'cpu' and not device.interpret)

    def _apply(self, graphdef: Any, params: Any, streams: Streams, ctx: Context) -> Streams:
        def apply(params: Any, streams: Streams, ctx: Context) -> Streams:
            after = nnx.merge(graphdef, params)(streams, ctx)[0]
            return after if self.alignment is None else self.alignment(streams, after, ctx)

        # In a loop the two computations are apart, and a barrier between them would copy what it stands before.
        again = functools.partial(jax.checkpoint, prevent_cse=not self._scans())
        return (again(apply) if self.remat else apply)(params, streams, ctx)

    def _scanned(self, streams: Streams, ctx: Context, among: range) -> Streams:
        split = self.stacked()
        first, last = among.start // len(split), among.stop // len(split)
        stacked = [jax.tree.map(lambda leaf: leaf[first:last], state) for _, state in split]

        def period(carry: tuple[Streams, jax.Array], params: list[Any]) -> tuple[tuple[Streams, jax.Array], None]:
            streams, index = carry
            for place, ((graphdef, _), layer) in enumerate(zip(split, params, strict=True)):
                streams = self._apply(graphdef, layer, streams, ctx.fold_in(index + place))
            return (streams, index + len(split)), None

        (streams, _), _ = jax.lax.scan(period, (streams, jnp.int32(among.start)), stacked)
        return streams


class LinearStack(Stack):
    """A stack whose parameters are linear in the place of a layer: learned are a base and a slope of each.

        theta_l = theta_B + (l / L) theta_A                  l = 0, ..., L - 1 among the L repeats of a block

    Parameters are stacked over these two. Slopes of matrices start as the matrices of another layer would, all others
    at zero. Xia et al. 2024, "Transformer as Linear Expansion of Learngene", https://arxiv.org/abs/2312.05614; layers
    are counted from 0, as in its code. `attnlab.convert.learngene.expanded` makes a stack of any depth of it.

    Raises `UserError` for a residual other than the plain one, whose connections belong to a layer.
    """

    def settle(self) -> None:
        """Has slopes of vectors start at zero. Raises `UserError` for connections that belong to a layer."""
        if type(self.residual) is not Plain:
            raise UserError(
                f'{type(self.residual).__name__} has a connection a layer; a LinearStack needs residual=Plain'
            )
        for block in self.blocks:
            for _, variable in nnx.iter_graph(block):
                if isinstance(variable, nnx.Param) and variable.get_metadata().get('group') != 'matrix':
                    self.level(variable)

    def level(self, variable: nnx.Param) -> None:
        """Sets the slope of a parameter to zero."""
        variable[...] = variable[...].at[1].set(0)

    def check_own(self) -> None:
        """Raises `UserError`: layers of a linear stack have no parameters of their own."""
        raise UserError(
            'layers of a LinearStack share two sets of parameters; attnlab.convert.learngene.expanded makes a model of '
            'it that has some of every layer, and learngene=RUN of configs/images.py a run'
        )

    def copies(self, repeats: int) -> int:
        """A base and a slope."""
        del repeats
        return 2

    def stacked(self) -> list[tuple[Any, nnx.State]]:
        """The blocks, their parameters as they are at every place; what is not a parameter is that of the base."""
        found = []
        for block, layers in self.pattern():
            graphdef, *states = nnx.split(block, nnx.Param, ...)
            laid_out = [
                jax.tree.map(functools.partial(layers_of, count=len(layers), learned=learned), state)
                for learned, state in zip((True, False), states, strict=True)
            ]
            found.append((graphdef, nnx.merge_state(*laid_out)))
        return self._raised(found)

    def apart(self, depth: int) -> Stack:
        """A plain stack of `depth` layers on the same line, each with parameters of its own.

        Raises `UserError` for a depth below that of the pattern.
        """
        if depth < len(self.blocks):
            raise UserError(f'depth is {depth}; the pattern of the stack has {len(self.blocks)} layers')
        like = nnx.clone(self)
        like.depth = depth
        like.blocks = nnx.List([nnx.merge(*each) for each in like.stacked()])
        # A plain stack with everything that this one has, as `nnx.merge` makes modules.
        made = object.__new__(Stack)
        vars(made).update(vars(like))
        return made


def linear_layers(pair: Shaped[Array, '2 ...'], count: int) -> Shaped[Array, 'l ...']:
    """The parameters of `count` layers from a base and a slope, `base + l / count * slope`."""
    places = (jnp.arange(count, dtype=pair.dtype) / count).reshape(-1, *(1,) * (pair.ndim - 1))
    return pair[:1] + places * pair[1:]


def layers_of(pair: Shaped[Array, '2 ...'], count: int, *, learned: bool) -> Shaped[Array, 'l ...']:
    """A variable of `count` layers: of what is learned that of their places, of all else that of the base."""
    return linear_layers(pair, count) if learned else jnp.repeat(pair[:1], count, axis=0)


def _layers_of_pattern(depth: int, period: int) -> list[range]:
    """The layers that each block of a pattern is."""
    return [range(place, depth, period) for place in range(period)]


def stack_spec(
    mixers: tuple[ConfigDict, ...],
    *,
    kind: type[Stack] = Stack,
    layer: Layer = MixerAndMLP(),
    depth: int,
    mlp: ConfigDict | None,
    residual: ConfigDict | None = None,
    initialization: ConfigDict | None = None,
    by_layer: ByLayer = MappingProxyType({}),
    below: int = 0,
    layers: int | None = None,
) -> ConfigDict:
    """Returns the config of a stack of `depth` layers; `layer` determines how many blocks these are.

    `residual` is plain and `initialization` is that of attnlab by default. With `by_layer` every layer, of one mixer,
    has a block of its own: these arguments of the mixers that take them, by keys such as `decay.depth`, are made of the
    number of layers below and that of all, where `below` and `layers` count those of other stacks of the model too.
    """
    pattern = layer.pattern(mixers, depth=depth, mlp=mlp)
    if by_layer:
        mixers = _laid_out(mixers, pattern.depth)
        for index, mixer in enumerate(mixers[: pattern.depth]):
            _set_by_layer(mixer, by_layer, below + index, layers or pattern.depth)
        pattern = layer.pattern(mixers, depth=depth, mlp=mlp)
    return spec(
        kind,
        depth=pattern.depth,
        blocks=pattern.blocks,
        residual=residual or spec(Plain),
        initialization=initialization or spec(Initialization),
    )


def _laid_out(mixers: tuple[ConfigDict, ...], depth: int) -> tuple[ConfigDict, ...]:
    """A mixer of its own for every layer, and for the rest of a pattern that is longer."""
    count = max(depth, len(mixers))
    return tuple(copied(mixers[layer % len(mixers)]) for layer in range(count))


def _set_by_layer(mixer: ConfigDict, by_layer: ByLayer, below: int, layers: int) -> None:
    """Sets the arguments that the mixer, or one within it, takes: convolutions between layers take none."""
    for each in within(mixer):
        for key, made in by_layer.items():
            if key.partition('.')[0] in takes(each):
                set_value(each, key, made(below, layers))


def missing_layers(stack: ConfigDict) -> list[str]:
    """The kinds of layers in the pattern of a stack that is too shallow to have one of them, in words."""
    present = {_mixer(block).target: _mixer(block) for block in stack.blocks[: stack.depth]}
    found = []
    for block in stack.blocks[stack.depth :]:
        if block in stack.blocks[: stack.depth]:
            continue
        mixer = _mixer(block)
        like = present.get(mixer.target, mixer)
        changed = [f'{name}={_short(value)}' for name, value in mixer.items() if like[name] != value]
        found.append(f'{_short(mixer)} with {", ".join(changed)}' if changed else _short(mixer))
    return list(dict.fromkeys(found))


def _mixer(block: ConfigDict) -> ConfigDict:
    """The mixer of a block, or the block that has none."""
    return block.mixer if 'mixer' in block else block


def _short(value: Any) -> Any:
    """The class of a part without its path; another value as it is."""
    return value.target.rpartition('.')[2] if isinstance(value, ConfigDict) else value


def _stacked(block: Callable[..., PreNorm | Mixer], dim: int, keys: Array) -> PreNorm | Mixer:
    """Blocks made from each of the keys, as one block with stacked parameters."""
    return nnx.vmap(lambda key: block(dim, rngs=nnx.Rngs(params=key)))(keys)


def _first_branches(blocks: nnx.List, depth: int) -> list[int]:
    """The index of the first branch of each layer, and finally the number of branches."""
    counts = [len(block.connections) if isinstance(block, Block) else 0 for block in blocks]
    return [0, *np.cumsum([counts[layer % len(counts)] for layer in range(depth)]).tolist()]


def _connect(block: PreNorm | Mixer, residual: Residual, firsts: Int[Array, 'l'], keys: Array) -> None:
    """Gives the branches of stacked blocks their connections; `firsts` are the indices of their first branches."""
    if type(residual) is Plain:
        return
    if not isinstance(block, Block):
        raise UserError(
            f'{type(block).__name__} wires its own residual branches; use residual=Plain, not {type(residual).__name__}'
        )

    def connections(key: Array, first: Array) -> nnx.List:
        rngs = nnx.Rngs(params=jax.random.fold_in(key, CONNECTIONS))
        return nnx.List([residual.connection(first + branch, rngs=rngs) for branch in range(len(block.connections))])

    block.connections = nnx.vmap(connections)(keys, firsts)


def _bounds_within(block: PreNorm | Mixer) -> list[tuple[Any, ...]]:
    """Where a block has bounds that rise."""
    return [path for path, module in nnx.iter_modules(block) if isinstance(module, RisingBound)]


def _value_at(state: nnx.State, path: tuple[Any, ...]) -> Array:
    return jnp.asarray(dict(nnx.to_flat_state(state))[path][...])


def _with_value(state: nnx.State, path: tuple[Any, ...], value: Array) -> nnx.State:
    """The same variables, one of which has another value."""
    flat = dict(nnx.to_flat_state(state))
    return nnx.from_flat_state({**flat, path: flat[path].replace(value)})


def _check_values(block: PreNorm | Mixer) -> None:
    """Raises `UserError` for a mixer that mixes values and is not that of a block."""
    for mixer in modules_of(block, Mixer):  # type: ignore[type-abstract]
        if mixer.mixes_values and not (isinstance(block, Block) and mixer is block.mixer):
            raise UserError(
                f'{type(mixer).__name__} mixes the values of the first layer into its own and stands within a '
                f'{type(mixer_of(block)).__name__}; only the mixers of blocks are told them'
            )


def _unstack(state: nnx.State) -> list[nnx.State]:
    """The slices along the leading dimension. `lax.split` is used because its gradient is one concatenation."""
    leaves, tree = jax.tree.flatten(state)
    columns = [[part[0] for part in jax.lax.split(leaf, (1,) * leaf.shape[0])] for leaf in leaves]
    return [jax.tree.unflatten(tree, row) for row in zip(*columns, strict=True)]
