"""The division of a call for TPUs: a grid over batch, heads and groups of chunks, the groups in order.

A program has several heads: a chunk is a chain of products, each of which waits for the one before, and the products of
other heads take the turns of the matrix units in between.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tiling
from pallas_kernels.cost import CallCost, Passes
from pallas_kernels.matrix_state.differentiation import Arrays
from pallas_kernels.mosaic_tpu import launch
from pallas_kernels.target import Target

LARGEST_STATE = 2**18
"""Numbers of a state, several of which must fit in VMEM."""

MOST = 2**12
"""Channels of keys, and of values: VMEM holds a chunk of each, its gradients, and what they are made of.

In float32 with 8,192 the compiler for v5e needs 65 MiB for the backward pass of `linear_attention`.
"""

VECTOR_MOST = 2**11
"""Channels of keys with decays of their own, of which `linear_attention` makes a dozen arrays of a chunk.

In float32 with 4,096, and 64 of values, the compiler for v5e has no room for the backward pass.
"""

SOLVED_MOST = 2**10
"""Channels of keys of cores with a triangular inverse, whose gradients JAX computes of all that a chunk made.

With 4,096 and their decays the compiler for v5e needs 94 MiB for the backward pass of `delta_rule`.
"""

IN_ORDER = pltpu.CompilerParams(dimension_semantics=('parallel', 'parallel', 'arbitrary'), vmem_limit_bytes=tiling.VMEM)


def refusal(here: Target, k: jax.Array, v: jax.Array, state: jax.Array, *, keys: int = MOST) -> str | None:
    """The reason why the call cannot be served, or `None`; `keys` are the most channels of these."""
    if state.dtype != jnp.float32:
        return f'the state is computed in {state.dtype}; expected arguments of at most float32'
    for given, channels, most in (('q and k have', k.shape[3], keys), ('v has', v.shape[3], MOST)):
        if channels > most:
            return f'{given} {channels} channels; expected at most {most}, chunks of which VMEM holds'
    if k.shape[3] * v.shape[3] > LARGEST_STATE:
        return f'a state has {k.shape[3]} x {v.shape[3]} numbers; expected at most {LARGEST_STATE}, which VMEM holds'
    return launch.generation_refusal(here)


def solved_refusal(here: Target, k: jax.Array, v: jax.Array, state: jax.Array) -> str | None:
    """The same for a core with a triangular inverse."""
    return refusal(here, k, v, state, keys=SOLVED_MOST)


def operands(dtype: jnp.dtype) -> jnp.dtype:
    """The type that matrix units multiply: float16 is computed in float32."""
    return jnp.dtype(jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32)


def head_counts(arrays: Arrays) -> set[int]:
    """Of how many heads the arrays of a call are, `b h t ...`."""
    given = arrays.q, arrays.k, arrays.v, arrays.vectors, arrays.numbers, arrays.log_decay
    return {array.shape[1] for array in jax.tree.leaves(given)}


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of a call and of its parts. The groups run backward in the backward pass.

    `together` is the number of heads of a program. An array that fewer heads have has one for all of them. With
    `documents` some steps forget the past.
    """

    b: int
    t: int
    h: int
    k: int
    v: int
    tile: tiling.ChunkTile
    dtype: Any
    is_vector: bool
    documents: bool
    together: int

    @property
    def groups(self) -> int:
        return pl.cdiv(self.t, self.tile.group)

    @property
    def length(self) -> int:
        return self.groups * self.tile.group

    @property
    def chunks(self) -> int:
        """Of a group."""
        return self.tile.group // self.tile.steps

    def cost(self, of: Callable[..., CallCost], decays: bool) -> Passes:
        """The cost of both kernels, from the cost of the core."""
        decay = None if not decays else 'vector' if self.is_vector else 'scalar'
        sizes = {'b': self.b, 't': self.length, 'h': self.h, 'k': self.k, 'v': self.v}
        return of(**sizes, decay=decay, implementation='mosaic_tpu').executed

    @property
    def grid(self) -> tuple[int, int, int]:
        """Sequences, parts of their heads, and groups."""
        return self.b, self.h // self.together, self.groups

    def group(self, shape: tuple[int, ...], size: int, *, backward: bool = False) -> pl.BlockSpec:
        """The part of an array that belongs to a group, `size` long along its third axis."""
        batch, heads, _, *rest = shape

        def index(b: Any, h: Any, group: Any) -> tuple[Any, ...]:
            place = self.groups - 1 - group if backward else group
            own = h if heads == self.h else jax.lax.div(h * self.together, self.h // heads)
            return (b if batch > 1 else 0, own, place, *(0 for _ in rest))

        return pl.BlockSpec((None, self.together if heads == self.h else 1, size, *rest), index)

    def whole(self, shape: tuple[int, ...]) -> pl.BlockSpec:
        """The part of an array that belongs to the heads of a program."""
        return pl.BlockSpec((None, self.together, *shape[2:]), lambda b, h, group: (b, h, *(0 for _ in shape[2:])))

    def fill(self, array: jax.Array) -> jax.Array:
        """Pads time with steps that neither write nor decay."""
        return jnp.pad(array, ((0, 0), (0, 0), (0, self.length - array.shape[2]), (0, 0)))

    def steps_of(self, place: Any) -> Any:
        """The steps of a chunk of a group."""
        return pl.ds(place * self.tile.steps, self.tile.steps)

    def of_heads(self, array: jax.Array) -> jax.Array:
        """The part of an array as every head of the program has it."""
        return jnp.broadcast_to(array, (self.together, *array.shape[1:]))

    def specs(self, inputs: Any, *, backward: bool = False) -> Any:
        """The block specs of a structure of arrays; `inputs.rows` has one row per chunk, the others one per step."""

        def spec(array: Any) -> pl.BlockSpec:
            size = self.chunks if array is inputs.rows else self.tile.group
            return self.group(array.shape, size, backward=backward)

        return jax.tree.map(spec, inputs)
