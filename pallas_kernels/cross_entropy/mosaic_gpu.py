"""The Pallas form of `cross_entropy` for Hopper: tiles of logits, 128 tokens by 256 classes, made by matrix units.

A block of threads has two warpgroups, each with 64 of the tokens, and one that copies ahead of them. The forward pass
keeps three numbers for every token and tile. The backward pass recomputes the logits of some classes at a time, the
number given by `tiling.cross_entropy_hopper`, and stores their gradients for the following products with both factors,
whose sums do not fit in registers.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import tiling
from pallas_kernels.cost import Cost
from pallas_kernels.cross_entropy import vjp
from pallas_kernels.mosaic_gpu import launch
from pallas_kernels.mosaic_gpu.padding import to_multiples
from pallas_kernels.mosaic_gpu.products_sm90 import arrived
from pallas_kernels.target import Target

ROWS = 64
"""The tokens of a warpgroup."""

TOKENS = 2 * ROWS
CLASSES = 256
STEP = 64
"""Part of the width d per stage; `STAGES` stages are in shared memory at a time, 48 KiB each."""

STAGES = 4
STRIP = 64
"""The classes of a finished tile that are processed at once; their gradients take 16 KiB."""

STRIPS = range(0, CLASSES, STRIP)

BAND = 16
"""The tiles of tokens that blocks run through before they go on to other classes."""

SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
"""The layout of 16-bit matrices in shared memory: 64 numbers of a row together."""


def refusal(here: Target, hidden: jax.Array, embedding: jax.Array) -> str | None:
    """The reason why the call cannot be served, or `None`."""
    (n, d), o = hidden.shape, embedding.shape[0]
    if 0 in (n, d, o):
        return f'hidden has shape {hidden.shape} and embedding {embedding.shape}; expected arrays with entries'
    dtype = jnp.result_type(hidden, embedding)
    if dtype.itemsize != 2:
        return f'products are in {dtype}, of which matrix units keep 10 bits; expected bfloat16 or float16 arguments'
    return launch.capability_refusal(here)


@functools.lru_cache
def form(here: Target) -> Callable[..., vjp.Statistics]:
    """The differentiable form for a device."""
    return vjp.differentiable(functools.partial(_statistics, here), functools.partial(_gradients, here))


@dataclasses.dataclass(frozen=True)
class Place:
    """The part of a tile of logits that belongs to a warpgroup.

    Attributes:
      warpgroup: 0 or 1.
      tokens: a slice of all tokens.
      tile: number of the tile among those of the classes at hand.
      first: the first class of the tile, among all classes.
    """

    warpgroup: Any
    tokens: Any
    tile: Any
    first: Any

    def classes(self, start: int) -> jax.Array:
        """The class of every logit of the strip that begins at a column of the tile."""
        return self.first + start + plgpu.broadcasted_iota(jnp.int32, (ROWS, STRIP), 1, layout=plgpu.Layout.WGMMA)

    def read(self, ref: Any) -> jax.Array:
        """A number of every token, repeated for the classes of a strip."""
        numbers = plgpu.load(ref.at[self.tokens], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
        return _across(numbers)


def _statistics(
    here: Target, soft_cap: float | None, hidden: jax.Array, embedding: jax.Array, labels: jax.Array
) -> vjp.Statistics:
    n, o = hidden.shape[0], embedding.shape[0]
    dtype = jnp.result_type(hidden, embedding)
    hidden = to_multiples(hidden.astype(dtype), (TOKENS, STEP))
    embedding = to_multiples(embedding.astype(dtype), (CLASSES, STEP))

    def finish(place: Place, logits: jax.Array, labels: Any, result: Any, shared: Any) -> None:
        strips = []
        for start in STRIPS:
            strip, _ = vjp.capped(logits[:, start : start + STRIP], soft_cap)
            strips.append(jnp.where(place.classes(start) < o, strip, -math.inf))
        # Every tile has classes, so that this is finite.
        highest = functools.reduce(jnp.maximum, [jnp.max(strip, axis=1) for strip in strips])
        total = sum(jnp.sum(jnp.exp(strip - _across(highest)), axis=1) for strip in strips)
        label = place.read(labels)
        chosen = sum(
            jnp.sum(jnp.where(place.classes(start) == label, strip, 0.0), axis=1)
            for start, strip in zip(STRIPS, strips, strict=True)
        )
        for number, statistic in enumerate((highest, total, chosen)):
            shared[place.warpgroup, number] = statistic
        plgpu.commit_smem()
        for number in range(3):
            target = result.at[number, place.tile, place.tokens]
            plgpu.copy_smem_to_gmem(shared.at[place.warpgroup, number], target)
        plgpu.wait_smem_to_gmem(0)

    highest, total, chosen = _over_tiles(
        here,
        finish,
        hidden,
        embedding,
        jnp.zeros(1, jnp.int32),
        (to_multiples(labels, (TOKENS,)),),
        name='cross_entropy_statistics',
        result=jax.ShapeDtypeStruct((3, embedding.shape[0] // CLASSES, hidden.shape[0]), jnp.float32),
        shared=plgpu.SMEM((2, 3, ROWS), jnp.float32),
    )
    log_normalizers = jax.nn.logsumexp(highest + jnp.log(total), axis=0)
    return log_normalizers[:n], jnp.sum(chosen, axis=0)[:n]


def _gradients(
    here: Target, soft_cap: float | None, hidden: jax.Array, embedding: jax.Array, known: vjp.Known
) -> vjp.Gradients:
    (n, d), o = hidden.shape, embedding.shape[0]
    dtype = jnp.result_type(hidden, embedding)
    known, unit = vjp.in_units(known, dtype)
    at_once = tiling.cross_entropy_hopper(n, o)
    tokens = to_multiples(hidden.astype(dtype), (TOKENS, STEP))
    parts = to_multiples(embedding.astype(dtype), (at_once, STEP)).reshape(-1, at_once, tokens.shape[1])

    def finish(place: Place, logits: jax.Array, *refs: Any) -> None:
        *known_refs, result, shared = refs
        numbers = vjp.Known(*(place.read(ref) for ref in known_refs))
        strip = shared.at[place.warpgroup]
        for start in STRIPS:
            part, slope = vjp.capped(logits[:, start : start + STRIP], soft_cap)
            classes = place.classes(start)
            weights = numbers.scale * jnp.exp(part - numbers.log_normalizers)
            dlogits = slope * jnp.where(classes == numbers.labels, weights - numbers.dlosses, weights)
            strip[...] = jnp.where(classes < o, dlogits, 0.0).astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(strip, result.at[place.tokens, pl.ds(place.tile * CLASSES + start, STRIP)])
            plgpu.wait_smem_to_gmem(0)

    def of_classes(dhidden: jax.Array, given: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        embedding, first = given
        dlogits = _over_tiles(
            here,
            finish,
            tokens,
            embedding,
            first,
            tuple(to_multiples(array, (TOKENS,)) for array in known),
            name='cross_entropy_gradients',
            result=jax.ShapeDtypeStruct((tokens.shape[0], at_once), dtype),
            shared=plgpu.SMEM((2, ROWS, STRIP), dtype, transforms=SWIZZLED),
        )
        dhidden += jnp.einsum('no,od->nd', dlogits, embedding, preferred_element_type=jnp.float32)
        dembedding = jnp.einsum('no,nd->od', dlogits, tokens, preferred_element_type=jnp.float32)
        return dhidden, (unit * dembedding).astype(dtype)

    firsts = jnp.arange(0, parts.shape[0] * at_once, at_once, dtype=jnp.int32)[:, None]
    dhidden, dembedding = jax.lax.scan(of_classes, jnp.zeros(tokens.shape, jnp.float32), (parts, firsts))
    dembedding = dembedding.reshape(-1, tokens.shape[1])[:o, :d]
    return (unit * dhidden[:n, :d]).astype(hidden.dtype), dembedding.astype(embedding.dtype)


def _over_tiles(
    here: Target,
    finish: Callable[..., None],
    hidden: jax.Array,
    embedding: jax.Array,
    first: jax.Array,
    vectors: tuple[jax.Array, ...],
    *,
    name: str,
    result: jax.ShapeDtypeStruct,
    shared: Any,
) -> jax.Array:
    """Computes all logits, of classes from `first[0]` on, and has each warpgroup `finish` its part of every tile."""
    n, d = hidden.shape
    tiles = (n // TOKENS, embedding.shape[0] // CLASSES)

    def body(hidden: Any, embedding: Any, first: Any, *refs: Any) -> None:
        warpgroup = jax.lax.axis_index('warpgroup')
        # Blocks that run together share tiles of both factors, which are then in the cache.
        i, j = plgpu.planar_snake(jax.lax.axis_index('tile'), tiles, 0, BAND)
        mine = pl.ds(pl.multiple_of(warpgroup * ROWS, ROWS), ROWS)

        def around(loop: Callable[[Any], Any]) -> None:
            def with_sums(sums: Any) -> None:
                loop(sums)
                tokens = pl.ds(i * TOKENS + warpgroup * ROWS, ROWS)
                place = Place(warpgroup, tokens, j, first[0] + j * CLASSES)
                finish(place, arrived(sums[...]), *refs)

            pl.run_scoped(with_sums, plgpu.ACC((ROWS, CLASSES), jnp.float32))

        def step(_: Any, hidden: Any, embedding: Any, sums: Any) -> Any:
            plgpu.wgmma(sums, hidden.at[mine], embedding.transpose((1, 0)))
            plgpu.wgmma_wait(0)
            return sums

        plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(d // STEP,),
            in_specs=[
                plgpu.BlockSpec((TOKENS, STEP), lambda k: (i, k), transforms=SWIZZLED),
                plgpu.BlockSpec((CLASSES, STEP), lambda k: (j, k), transforms=SWIZZLED),
            ],
            memory_registers=launch.COPYING_REGISTERS,
            wg_axis='warpgroup',
            num_compute_wgs=2,
            max_concurrent_steps=STAGES,
            compute_context=around,
        )(hidden, embedding)

    return launch.kernel_of_warpgroups(
        body,
        here,
        computing=2,
        name=name,
        cost=Cost(flops=2 * n * d * embedding.shape[0], exponentials=n * embedding.shape[0]),
        out_type=result,
        grid=(tiles[0] * tiles[1],),
        grid_names=('tile',),
        scratch_types=(shared,),
    )(hidden, embedding, first, *vectors)


def _across(numbers: jax.Array) -> jax.Array:
    """Repeats a number of each token for all classes of a strip."""
    return jax.lax.broadcast_in_dim(numbers, (ROWS, STRIP), (0,))
