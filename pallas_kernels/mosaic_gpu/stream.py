"""Tiles of arrays streamed through shared memory by a Mosaic GPU kernel, read ahead and written behind."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu

SLOTS = 2
"""The tiles of each output that shared memory holds: one being filled, one being copied out."""


ALIGNMENT = 128
"""The bytes at whose multiples a copy to shared memory may begin."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """An array in global memory, the shape of its tiles, and which tile belongs to a step, in tiles.

    Several tiles lie behind one another in shared memory, so each takes a multiple of `ALIGNMENT` bytes.
    """

    ref: Any
    shape: tuple[int, ...]
    place: Callable[[Any], tuple[Any, ...]]

    def __post_init__(self) -> None:
        size = math.prod(self.shape) * self.ref.dtype.itemsize
        if size % ALIGNMENT:
            raise AssertionError(
                f'a tile {self.shape} of {self.ref.dtype} takes {size} bytes, no multiple of {ALIGNMENT}'
            )

    def at(self, step: Any) -> Any:
        """The tile of a step, in global memory."""
        starts = zip(self.place(step), self.shape, strict=True)
        return self.ref.at[tuple(pl.ds(start * size, size) for start, size in starts)]


def stream[Carry](
    body: Callable[[Any, Any, Any, Carry], Carry], steps: int, inputs: Any, outputs: Any, carry: Carry, *, stages: int
) -> Carry:
    """Runs `carry = body(step, tiles, results, carry)` for every step in order, and returns the last carry.

    `inputs` and `outputs` are structures of `Tiles`; the body gets the same structures of references to shared memory,
    the first filled, the second to be filled. `stages` tiles of every input are in flight at a time.
    """
    read, structure_read = jax.tree.flatten(inputs)
    written, structure_written = jax.tree.flatten(outputs)

    def run(*buffers: Any) -> Carry:
        def turn(indices: tuple[Any], *rest: Any) -> Carry:
            (step,) = indices
            *tiles, carry = rest
            results = [buffer.at[step % SLOTS] for buffer in buffers]
            if results:
                plgpu.wait_smem_to_gmem(SLOTS - 1, wait_read_only=True)
            carry = body(
                step, jax.tree.unflatten(structure_read, tiles), jax.tree.unflatten(structure_written, results), carry
            )
            # Also keeps the next tiles from arriving before every thread has read these.
            plgpu.commit_smem()
            for result, tile in zip(results, written, strict=True):
                plgpu.copy_smem_to_gmem(result, tile.at(step), commit_group=tile is written[-1])
            return carry

        pipeline = plgpu.emit_pipeline(
            turn,
            grid=(steps,),
            in_specs=[plgpu.BlockSpec(tile.shape, tile.place) for tile in read],
            max_concurrent_steps=min(stages, steps),
            init_carry=carry,
        )
        last = pipeline(*(tile.ref for tile in read))
        plgpu.wait_smem_to_gmem(0)
        return last

    return pl.run_scoped(run, *(plgpu.SMEM((SLOTS, *tile.shape), tile.ref.dtype) for tile in written))
