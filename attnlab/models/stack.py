"""A stack of blocks in a repeating pattern, its parameters stacked over the repeats."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike
from ml_collections import ConfigDict

from attnlab.blocks.block import Block
from attnlab.blocks.layer import Layer, MixerAndMLP
from attnlab.config import spec
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.mixers.mixer import Mixer
from attnlab.typing import Sequence, State
from pallas_kernels import target

LOOPS = ('auto', 'scan', 'unroll')


class Stack(nnx.Module):
    """`depth` blocks, layer `i` built by `blocks[i % len(blocks)]`; obeys the contract of a mixer.

    The parameters of one place in the pattern are stacked over its repeats, whether the layers are then scanned or
    unrolled: a checkpoint does not depend on the choice.

    Args:
      dim: model width.
      depth: number of blocks.
      blocks: the pattern; each makes a block, as `block(dim, rngs=rngs)`, or what is whole residual blocks by itself.
      loop: 'scan' over the repeats (compiles once per pattern), 'unroll' (faster on CPU), or 'auto' (unrolls
        where the program is compiled for a CPU: see `pallas_kernels.target`).
      remat: recompute each block's activations in the backward pass instead of keeping them.

    Raises `UserError` for a depth below 1, an empty pattern, or an unknown loop.
    """

    def __init__(
        self,
        dim: int,
        *,
        depth: int,
        blocks: tuple[Callable[..., Block | Mixer], ...],
        loop: str = 'auto',
        remat: bool = False,
        rngs: nnx.Rngs,
    ):
        if depth < 1 or not blocks or loop not in LOOPS:
            raise UserError(
                f'a stack wants depth >= 1, blocks, and loop in {LOOPS}; got {depth}, {len(blocks)} blocks, {loop!r}'
            )
        pattern = blocks[:depth]
        self.depth = depth
        self.loop = loop
        self.remat = remat
        self.blocks = nnx.List(
            [_stacked(block, dim, len(range(place, depth, len(pattern))), rngs) for place, block in enumerate(pattern)]
        )

    def __call__(self, x: Sequence, ctx: Context, state: State | None = None) -> tuple[Sequence, State | None]:
        """Returns `(x, state)`; the state is a tuple with one entry a layer, and with one the layers are unrolled."""
        if state is not None:
            advanced = []
            for index, layer in enumerate(self.layers()):
                x, layer_state = layer(x, ctx.fold_in(index), state[index])
                advanced.append(layer_state)
            return x, tuple(advanced)
        periods = self.depth // len(self.blocks) if self._scans() else 0
        if periods:
            x = self._scanned(x, ctx, periods)
        for index, layer in enumerate(self.layers()):
            if index >= periods * len(self.blocks):
                x = self._apply(*nnx.split(layer), x, ctx.fold_in(index))
        return x, None

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> State:
        """One state a layer, in order."""
        return tuple(layer.init_state(batch, length, dtype) for layer in self.layers())

    def layers(self) -> Iterator[Block | Mixer]:
        """The blocks in order, each with its own slice of the stacked parameters."""
        split = [nnx.split(block) for block in self.blocks]
        sliced = [_unstack(state) for _, state in split]
        for index in range(self.depth):
            place = index % len(self.blocks)
            yield nnx.merge(split[place][0], sliced[place][index // len(self.blocks)])

    def _scans(self) -> bool:
        device = target.current()
        return self.loop == 'scan' or (self.loop == 'auto' and device.platform != 'cpu' and not device.interpret)

    def _apply(self, graphdef: Any, params: Any, x: Sequence, ctx: Context) -> Sequence:
        def apply(params: Any, x: Sequence, ctx: Context) -> Sequence:
            return nnx.merge(graphdef, params)(x, ctx)[0]

        return (jax.checkpoint(apply) if self.remat else apply)(params, x, ctx)

    def _scanned(self, x: Sequence, ctx: Context, periods: int) -> Sequence:
        split = [nnx.split(block) for block in self.blocks]
        stacked = [jax.tree.map(lambda leaf: leaf[:periods], state) for _, state in split]

        def period(carry: tuple[Sequence, jax.Array], params: list[Any]) -> tuple[tuple[Sequence, jax.Array], None]:
            x, index = carry
            for place, ((graphdef, _), layer) in enumerate(zip(split, params, strict=True)):
                x = self._apply(graphdef, layer, x, ctx.fold_in(index + place))
            return (x, index + len(split)), None

        (x, _), _ = jax.lax.scan(period, (x, jax.numpy.int32(0)), stacked)
        return x


def stack_spec(
    mixers: tuple[ConfigDict, ...], *, layer: Layer = MixerAndMLP(), depth: int, mlp: ConfigDict | None
) -> ConfigDict:
    """Returns the config of a stack of `depth` layers; how many blocks those are, and of what, `layer` says."""
    pattern = layer.pattern(mixers, depth=depth, mlp=mlp)
    return spec(Stack, depth=pattern.depth, blocks=pattern.blocks)


def _stacked(block: Callable[..., Block | Mixer], dim: int, count: int, rngs: nnx.Rngs) -> Block | Mixer:
    """`count` blocks as one, every parameter with a leading dimension over them."""
    keys = jax.random.split(rngs.params(), count)
    return nnx.vmap(lambda key: block(dim, rngs=nnx.Rngs(params=key)))(keys)


def _unstack(state: nnx.State) -> list[nnx.State]:
    """The slices along the leading dimension. `lax.split` is used because its gradient is one concatenation."""
    leaves, tree = jax.tree.flatten(state)
    columns = [[part[0] for part in jax.lax.split(leaf, (1,) * leaf.shape[0])] for leaf in leaves]
    return [jax.tree.unflatten(tree, row) for row in zip(*columns, strict=True)]
