"""How a program goes over the heads of a group and, for each, over the channels of the state."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu

from pallas_kernels.matrix_state.decays import COUNT
from pallas_kernels.matrix_state.mosaic_gpu.tiles import TILE, TIME_FIRST, swizzled


@dataclasses.dataclass(frozen=True)
class Turns:
    """A turn for every head of a group and every `width` channels of the state; arrays of steps are `b t h k`.

    Attributes:
      heads: of all groups.
      members: heads of a group.
      channels: those of the state that turns go over.
      dtype: of the tiles.
    """

    heads: int
    members: int
    channels: int
    dtype: Any

    @property
    def width(self) -> int:
        return 2 * TILE if self.channels % (2 * TILE) == 0 else TILE

    @property
    def per_head(self) -> int:
        """The turns of a head."""
        return self.channels // self.width

    @property
    def count(self) -> int:
        return self.members * self.per_head

    def head(self, group: Any, member: Any) -> Any:
        return group * self.members + member

    def of_steps(
        self,
        array: jax.Array,
        group: Any,
        chunk: Any,
        part: Callable[[Any], Any] = lambda turn: turn,
        width: int | None = None,
    ) -> plgpu.BlockSpec:
        """The channels `part(turn)` of the steps of a chunk, of one head after the other or of the group it is in."""
        width, shared = width or self.width, self.heads // array.shape[TIME_FIRST.heads]
        return plgpu.BlockSpec(
            (TILE, None, width),
            lambda member, turn: (chunk, jax.lax.div(self.head(group, member), shared), part(turn)),
            transforms=swizzled(self.dtype),
        )

    def of_states(self, group: Any, chunk: Any, row: Any, rows: int) -> plgpu.BlockSpec:
        """The channels of a turn in states `h l k v`, of the `row`-th `rows` key channels."""
        return plgpu.BlockSpec(
            (None, None, rows, self.width),
            lambda member, turn: (self.head(group, member), chunk, row, turn),
            transforms=swizzled(self.dtype),
        )

    def of_decays(self, group: Any, chunk: Any) -> plgpu.BlockSpec:
        """The rows of decays of a chunk."""
        return plgpu.BlockSpec((None, None, COUNT, TILE), lambda member, turn: (self.head(group, member), chunk, 0, 0))

    def run(
        self, step: Callable[..., Any], specs: Sequence[plgpu.BlockSpec], refs: Sequence[Any], start: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """Returns what `step` carries from turn to turn, from `start` on."""
        return plgpu.emit_pipeline(
            step,
            grid=(self.members, self.per_head),
            in_specs=specs,
            max_concurrent_steps=2 if self.count > 1 and self.width == TILE else 1,
            init_carry=start,
        )(*refs)

    def carried(
        self, turn: Any, carry: tuple[Any, ...], end: Callable[..., Any], nothing: Callable[[], tuple[Any, ...]]
    ) -> tuple[Any, ...]:
        """What the next turn gets: the carry or, after the last turn of a head, `end` of it, followed by `nothing`."""
        if self.per_head == 1:
            return (end(*carry),)
        return jax.lax.cond(
            turn == self.per_head - 1, lambda *carry: (end(*carry), *nothing()), lambda *carry: carry, *carry
        )
