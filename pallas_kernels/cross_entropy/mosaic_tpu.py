"""The Pallas form of `cross_entropy` for TPUs: tiles of logits, classes by tokens, that never leave VMEM.

Per-token numbers are then rows, and sums over classes run along sublanes. The forward pass takes the classes in order
for each tile of tokens. The backward pass computes the logits twice, once per factor: in order of classes for the
gradient of a tile of hidden, in order of tokens for that of a tile of embedding.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tiling
from pallas_kernels.cost import Cost
from pallas_kernels.cross_entropy import vjp
from pallas_kernels.mosaic_tpu import launch
from pallas_kernels.target import Target


def refusal(here: Target, hidden: jax.Array, embedding: jax.Array) -> str | None:
    """The reason why the call cannot be served, or `None`."""
    (n, d), o = hidden.shape, embedding.shape[0]
    dtype = jnp.result_type(hidden, embedding)
    if 0 in (n, d, o):
        return f'hidden has shape {hidden.shape} and embedding {embedding.shape}; expected arrays with entries'
    if dtype.itemsize > 4:
        return f'logits are computed in {dtype}; expected arguments of at most float32'
    if tiling.cross_entropy_tpu(n, d, o, launch.factor_type(hidden, embedding).itemsize) is None:
        return f'd is {d}, and VMEM cannot hold two tiles of 128 rows; expected less'
    return launch.generation_refusal(here)


@functools.lru_cache
def form(here: Target) -> Callable[..., vjp.Statistics]:
    """The differentiable form for a device."""
    return vjp.differentiable(functools.partial(_statistics, here), functools.partial(_gradients, here))


@dataclasses.dataclass(frozen=True)
class Plan:
    """A call divided into tiles: the grid has tokens first and classes second, or with `swapped` the reverse."""

    o: int
    tokens: int
    classes: int
    tile: tiling.HeadTile
    soft_cap: float | None
    swapped: bool = False

    @property
    def grid(self) -> tuple[int, int]:
        return (self.classes, self.tokens) if self.swapped else (self.tokens, self.classes)

    def token(self, *place: Any) -> Any:
        """The tile of tokens at a position of the grid."""
        return place[self.swapped]

    def classes_of(self, *place: Any) -> Any:
        """The tile of classes at a position of the grid."""
        return place[not self.swapped]

    def by_token(self) -> pl.BlockSpec:
        """A number for each token."""
        return pl.BlockSpec((1, self.tile.tokens), lambda *place: (0, self.token(*place)))

    def hidden(self, d: int) -> pl.BlockSpec:
        return pl.BlockSpec((self.tile.tokens, d), lambda *place: (self.token(*place), 0))

    def embedding(self, d: int) -> pl.BlockSpec:
        return pl.BlockSpec((self.tile.classes, d), lambda *place: (self.classes_of(*place), 0))


def _statistics(
    here: Target, soft_cap: float | None, hidden: jax.Array, embedding: jax.Array, labels: jax.Array
) -> vjp.Statistics:
    plan, matrices = _cut(soft_cap, hidden, embedding)
    found = _run(
        here,
        _forward,
        plan,
        (*matrices, *_rows(plan, labels)),
        results=(jax.ShapeDtypeStruct((1, plan.tokens * plan.tile.tokens), jnp.float32),) * 2,
        specs=(plan.by_token(),) * 2,
        sums=[(1, plan.tile.tokens)] * 3,
    )
    log_normalizers, chosen = (array[0, : hidden.shape[0]] for array in found)
    return log_normalizers, chosen


def _gradients(
    here: Target, soft_cap: float | None, hidden: jax.Array, embedding: jax.Array, known: vjp.Known
) -> vjp.Gradients:
    plan, matrices = _cut(soft_cap, hidden, embedding)
    arrays = (*matrices, *_rows(plan, *known))
    d = matrices[0].shape[1]

    def gradient(body: Callable[..., None], plan: Plan, like: jax.Array, spec: pl.BlockSpec) -> jax.Array:
        result = jax.ShapeDtypeStruct(like.shape, like.dtype)
        (found,) = _run(here, body, plan, arrays, results=(result,), specs=(spec,), sums=[spec.block_shape])
        return found

    dhidden = gradient(_hidden_gradients, plan, matrices[0], plan.hidden(d))
    plan = dataclasses.replace(plan, swapped=True)
    dembedding = gradient(_embedding_gradients, plan, matrices[1], plan.embedding(d))
    return (
        dhidden[: hidden.shape[0]].astype(hidden.dtype),
        dembedding[: embedding.shape[0]].astype(embedding.dtype),
    )


def _cut(soft_cap: float | None, hidden: jax.Array, embedding: jax.Array) -> tuple[Plan, tuple[jax.Array, jax.Array]]:
    """The plan, and both matrices in one type padded with zeros to whole tiles."""
    dtype = launch.factor_type(hidden, embedding)
    (n, d), o = hidden.shape, embedding.shape[0]
    tile = tiling.cross_entropy_tpu(n, d, o, dtype.itemsize)
    assert tile is not None
    plan = Plan(o, pl.cdiv(n, tile.tokens), pl.cdiv(o, tile.classes), tile, soft_cap)
    matrices = (
        jnp.pad(hidden.astype(dtype), ((0, plan.tokens * tile.tokens - n), (0, 0))),
        jnp.pad(embedding.astype(dtype), ((0, plan.classes * tile.classes - o), (0, 0))),
    )
    return plan, matrices


def _rows(plan: Plan, *vectors: jax.Array) -> tuple[jax.Array, ...]:
    """Numbers of tokens as rows; tokens of the padding have zeros."""
    return tuple(jnp.pad(vector, (0, plan.tokens * plan.tile.tokens - vector.shape[0]))[None] for vector in vectors)


def _run(
    here: Target,
    body: Callable[..., None],
    plan: Plan,
    arrays: tuple[jax.Array, ...],
    *,
    results: tuple[jax.ShapeDtypeStruct, ...],
    specs: tuple[pl.BlockSpec, ...],
    sums: Any,
) -> Any:
    n, d = arrays[0].shape
    # The logits, and for a gradient its own product.
    products = 1 if body is _forward else 2
    return launch.call(
        functools.partial(body, plan),
        here,
        name='cross_entropy' + body.__name__,
        cost=Cost(flops=2 * products * n * d * plan.o, exponentials=n * plan.o),
        grid=plan.grid,
        in_specs=[plan.hidden(d), plan.embedding(d), *[plan.by_token()] * (len(arrays) - 2)],
        out_specs=specs,
        out_shape=results,
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in sums],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=('parallel', 'arbitrary'), vmem_limit_bytes=tiling.VMEM
        ),
    )(*arrays)


def _dot(left: jax.Array, right: jax.Array, over_left: int, over_right: int) -> jax.Array:
    """The product of two matrices of one type over one dimension of each, summed in float32.

    At default precision a TPU rounds factors of float32 to bfloat16.
    """
    return jax.lax.dot_general(
        left,
        right,
        (((over_left,), (over_right,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def _logits(plan: Plan, hidden: Any, embedding: Any) -> tuple[jax.Array, jax.Array, jax.Array | float]:
    """The logits of a tile, classes by tokens, the class of each, and the derivative of the cap."""
    logits = _dot(embedding[...], hidden[...], 1, 1)
    logits, slope = vjp.capped(logits, plan.soft_cap)
    first = plan.classes_of(pl.program_id(0), pl.program_id(1)) * plan.tile.classes
    classes = first + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 0)
    if plan.o % plan.tile.classes:
        logits = jnp.where(classes < plan.o, logits, -math.inf)
    return logits, classes, slope


def _forward(plan: Plan, hidden: Any, embedding: Any, labels: Any, result: Any, choice: Any, *sums: Any) -> None:
    highest, total, chosen = sums

    @pl.when(pl.program_id(1) == 0)
    def start() -> None:
        highest[...] = jnp.full_like(highest, -math.inf)
        total[...] = jnp.zeros_like(total)
        chosen[...] = jnp.zeros_like(chosen)

    logits, classes, _ = _logits(plan, hidden, embedding)
    before = highest[...]
    # Every tile has classes, so that this is finite.
    highest[...] = jnp.maximum(before, jnp.max(logits, axis=0, keepdims=True))
    terms = jnp.exp(logits - highest[...])
    total[...] = total[...] * jnp.exp(before - highest[...]) + jnp.sum(terms, axis=0, keepdims=True)
    chosen[...] += jnp.sum(jnp.where(classes == labels[...], logits, 0), axis=0, keepdims=True)

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def finish() -> None:
        result[...] = highest[...] + jnp.log(total[...])
        choice[...] = chosen[...]


def _hidden_gradients(plan: Plan, hidden: Any, embedding: Any, *refs: Any) -> None:
    *known, result, total = refs
    dlogits = _dlogits(plan, hidden, embedding, vjp.Known(*known))
    _accumulate(_dot(dlogits, embedding[...], 0, 0), result, total)


def _embedding_gradients(plan: Plan, hidden: Any, embedding: Any, *refs: Any) -> None:
    *known, result, total = refs
    dlogits = _dlogits(plan, hidden, embedding, vjp.Known(*known))
    _accumulate(_dot(dlogits, hidden[...], 1, 0), result, total)


def _dlogits(plan: Plan, hidden: Any, embedding: Any, known: vjp.Known) -> jax.Array:
    """The gradient of a tile of logits, in the type of the product that it goes into."""
    logits, classes, slope = _logits(plan, hidden, embedding)
    weights = known.scale[...] * jnp.exp(logits - known.log_normalizers[...])
    dlogits = slope * jnp.where(classes == known.labels[...], weights - known.dlosses[...], weights)
    return dlogits.astype(hidden.dtype)


def _accumulate(part: jax.Array, result: Any, total: Any) -> None:
    """Adds a part along the second axis of the grid."""

    @pl.when(pl.program_id(1) == 0)
    def start() -> None:
        total[...] = jnp.zeros_like(total)

    total[...] += part

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def finish() -> None:
        result[...] = total[...].astype(result.dtype)
