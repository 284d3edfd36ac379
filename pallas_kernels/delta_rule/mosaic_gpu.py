"""The Pallas form of `delta_rule` for Hopper GPUs: what waits for the state is one kernel, for both directions.

All that a chunk of 64 steps does by itself, its triangular inverse above all, is found outside, for all chunks at once,
in float32, the products of which have tf32's 10 bits on a GPU. What depends on decays of key channels is found by the
kernels of `linear_attention.mosaic_gpu_weights`. `_sweep` then runs over the chunks of a sequence in order and writes
down the state at each and the values that its steps write; these are read as in `linear_attention`.

Kept for the backward pass are the arguments alone. It sweeps once more for the states, `t / 64 * k * v` numbers a head
in the 16-bit type that products want, and the values; from the last chunk to the first for the gradients of both. The
gradients of what a chunk does by itself are products of these, 16-bit too, and the rest of them is JAX's.

Decays are put on numbers before they are rounded for a product: in float16 what decays below 6e-8 is zero there, and a
state above 65504 overflows.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import mosaic_gpu, tiling
from pallas_kernels.delta_rule import vjp
from pallas_kernels.delta_rule.chunk import Chunk, Weights, inverse, weights
from pallas_kernels.delta_rule.products import Form, multiply
from pallas_kernels.linear_attention import mosaic_gpu as linear
from pallas_kernels.linear_attention import mosaic_gpu_weights as by_channel
from pallas_kernels.linear_attention import rows
from pallas_kernels.linear_attention.mosaic_gpu_tiles import (
    NAMED_LAYOUTS,
    TILE,
    along,
    fill,
    load,
    shared_tile,
    swizzled,
    write,
)
from pallas_kernels.target import Target

_FORM = Form(jnp.float32, jnp.float32)


def refusal(
    here: Target, q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array | None, state: jax.Array
) -> str | None:
    """Why the call cannot be served; `None`: it can."""
    if tiling.delta_rule_hopper(state.shape[2]) is None:
        return f'q and k have {state.shape[2]} channels; expected at most 256, as one program holds a whole column'
    return linear.refusal(here, q, k, v, log_decay, state)


@functools.lru_cache
def form(here: Target) -> Callable[..., vjp.Outputs]:
    """The differentiable form on a device."""
    return vjp.differentiable(functools.partial(_forward, here), functools.partial(_backward, here))


class Steps(NamedTuple):
    """A call in whole chunks and tiles.

    Attributes:
      q: `b hq t k`.
      k: `b hk t k`.
      v: `b hv t v`.
      beta: float32, `b h l c 1`, zero where time is filled up.
      log_decay: float32, zero there: `b h l c 1`, or `b h t k` where key channels have their own; or `None`.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    beta: jax.Array
    log_decay: jax.Array | None


class Documents(NamedTuple):
    """Where chunks forget the past.

    Attributes:
      runs: how often, up to each step, `b 1 l c 1`; or `None`: never.
      rows: `b h l 8 c`, see there; with the decays, where these are one for all key channels.
    """

    runs: jax.Array | None
    rows: jax.Array


class Solved(NamedTuple):
    """What chunks do once their inverse is known, in the type of q but for the factor.

    Attributes:
      among: what a step reads for its query of what a step writes, `b h l c c`.
      q: what queries read of the state before the chunk, `b h l c k`.
      writes: the keys under which values are in the state after the chunk, `b h l c k`.
      factor: what the state before the chunk counts in it, `b h l 1 k` or `b h l 1 1`, float32.
      written: the values that steps would write on an empty state, `b h l c v`.
      erases: what these lack for each number of the state before, `b h l c k`.
    """

    among: jax.Array
    q: jax.Array
    writes: jax.Array
    factor: jax.Array
    written: jax.Array
    erases: jax.Array


def _solve(here: Target, documents: Documents, steps: Steps) -> Solved:
    does = _weights(here, documents, steps)
    solved = inverse(does.erased, here.platform)
    written = multiply(solved, steps.beta * _of_heads(steps, steps.v), 'nn', _FORM)
    erases = multiply(solved, steps.beta * does.k, 'nn', _FORM)
    found = Solved(does.among, does.q, does.writes, does.factor, written, erases)
    return jax.tree.map(lambda array: array.astype(steps.q.dtype), found)._replace(factor=does.factor)


def _weights(here: Target, documents: Documents, steps: Steps) -> Weights:
    decay = steps.log_decay
    if decay is None or decay.ndim == 5:
        q, k = _of_heads(steps, steps.q), _of_heads(steps, steps.k)
        return weights(Chunk(q, k, steps.beta, decay, documents.runs), _FORM)
    given = by_channel.Steps(steps.q, steps.k, decay, documents.rows)
    found = by_channel.weights(here, True, given)
    return Weights(
        among=_cut(found.among),
        erased=steps.beta * _cut(found.erased),
        q=_cut(found.q),
        k=_cut(found.k),
        writes=_cut(found.writes),
        factor=by_channel.factor(given)[:, :, :, None],
    )


def _of_heads(steps: Steps, array: jax.Array) -> jax.Array:
    """What heads may share, for all of them, `b h l c k`, float32."""
    h = steps.beta.shape[1]
    return _cut(jnp.repeat(array.astype(jnp.float32), h // array.shape[1], axis=1))


def _forward(here: Target, arrays: vjp.Arrays, scale: float, keep: bool) -> tuple[vjp.Outputs, None]:
    steps, documents = _inputs(arrays)
    steps = steps._replace(q=(scale * steps.q.astype(jnp.float32)).astype(steps.q.dtype))
    solved = _solve(here, documents, steps)
    states, values, final = _forward_sweep(here, arrays, solved)
    if arrays.log_decay is not None and arrays.log_decay.shape[3] > 1:
        among, q = _join(solved.among), _join(solved.q)
        o = linear.read_weighed(here, linear.FORWARD, among, values, q, states, values.dtype)
    else:
        o = linear.read(here, linear.FORWARD, steps.q, steps.k, values, states, documents.rows, values.dtype)
    t, (key_size, value_size) = arrays.q.shape[2], arrays.state.shape[2:]
    return (o[:, :, :t, :value_size], final[:, :, :key_size, :value_size]), None


def _backward(here: Target, arrays: vjp.Arrays, scale: float, kept: None, gradients: vjp.Outputs) -> vjp.Arrays:
    steps, documents = _inputs(arrays)
    dtype = arrays.q.dtype
    do = _cut((scale * fill(gradients[0]).astype(jnp.float32)).astype(dtype))
    solved, pull = jax.vjp(functools.partial(_solve, here, documents), steps)
    states, values, _ = _forward_sweep(here, arrays, solved)

    def product(letters: str, left: jax.Array, right: jax.Array) -> jax.Array:
        return jnp.einsum(letters, left, right, preferred_element_type=dtype)

    dstates, dvalues, dstate = _sweep(
        here,
        Sweep(
            reads=_join(solved.writes),
            adds=_join(-solved.erases),
            values=_join(product('bhlts,bhltv->bhlsv', solved.among, do)),
            more=(_join(solved.q), _join(do)),
        ),
        solved.factor,
        fill(gradients[1]),
        backward=True,
    )
    values, dvalues = _cut(values), _cut(dvalues)
    held = jnp.einsum('bhlkv,bhlkv->bhlk', states, dstates, preferred_element_type=jnp.float32)[:, :, :, None]
    dsolved = Solved(
        among=product('bhltv,bhlsv->bhlts', do, values),
        q=product('bhltv,bhlkv->bhltk', do, states),
        writes=product('bhlsv,bhlkv->bhlsk', values, dstates),
        factor=held if solved.factor.shape == held.shape else jnp.sum(held, axis=-1, keepdims=True),
        written=dvalues,
        erases=-product('bhlsv,bhlkv->bhlsk', dvalues, states),
    )
    (found,) = pull(dsolved)
    b, h, t, (key_size, value_size) = *arrays.state.shape[:2], arrays.q.shape[2], arrays.state.shape[2:]

    def cropped(gradient: jax.Array, channels: int) -> jax.Array:
        return gradient[:, :, :t, :channels]

    dlog_decay = found.log_decay
    if dlog_decay is not None:
        channels = key_size if dlog_decay.ndim == 4 else 1
        dlog_decay = cropped(dlog_decay.reshape(b, h, -1, dlog_decay.shape[-1]), channels)
    return vjp.Arrays(
        q=cropped(found.q, key_size),
        k=cropped(found.k, key_size),
        v=cropped(found.v, value_size),
        beta=found.beta.reshape(b, h, -1)[:, :, :t],
        log_decay=dlog_decay,
        state=dstate[:, :, :key_size, :value_size],
        starts=None,
    )


def _inputs(arrays: vjp.Arrays) -> tuple[Steps, Documents]:
    b, h = arrays.state.shape[:2]
    t = arrays.q.shape[2]

    def numbers(array: jax.Array) -> jax.Array:
        return _cut(jnp.pad(array, ((0, 0), (0, 0), (0, -t % TILE), (0, 0))))

    decay, starts = arrays.log_decay, arrays.starts
    shared = decay is not None and decay.shape[3] == 1
    if decay is not None:
        decay = jnp.broadcast_to(decay, (b, h, t, decay.shape[3]))
        decay = numbers(decay) if shared else fill(decay)
    steps = Steps(fill(arrays.q), fill(arrays.k), fill(arrays.v), numbers(arrays.beta[..., None]), decay)
    found = rows.rows(arrays.log_decay if shared else None, starts, pl.cdiv(t, TILE) * TILE, TILE)
    return steps, Documents(
        runs=None if starts is None else jnp.cumsum(numbers(starts[:, None, :, None]), axis=3, dtype=jnp.int32),
        rows=jnp.broadcast_to(found, (b, h, *found.shape[2:])),
    )


def _cut(array: jax.Array) -> jax.Array:
    """`b h t k` as `b h l c k`."""
    b, h, t, k = array.shape
    return array.reshape(b, h, t // TILE, TILE, k)


def _join(array: jax.Array) -> jax.Array:
    """`b h l c k` as `b h t k`."""
    b, h, l, c, k = array.shape
    return array.reshape(b, h, l * c, k)


class Sweep(NamedTuple):
    """What the chunks of one sweep bring, 16-bit.

    Attributes:
      reads: what is multiplied with the state and added to the values, `b h t k`.
      adds: the keys under which these sums are added to the state, `b h t k`.
      values: `b h t v`.
      more: other keys, `b h t k`, and values, `b h t v`, added to the state; or nothing.
    """

    reads: jax.Array
    adds: jax.Array
    values: jax.Array
    more: tuple[jax.Array, ...]


def _forward_sweep(here: Target, arrays: vjp.Arrays, solved: Solved) -> tuple[jax.Array, jax.Array, jax.Array]:
    given = Sweep(reads=_join(-solved.erases), adds=_join(solved.writes), values=_join(solved.written), more=())
    return _sweep(here, given, solved.factor, fill(arrays.state), backward=False)


def _sweep(
    here: Target, given: Sweep, factor: jax.Array, state: jax.Array, *, backward: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The state, `b h l k v`, at every chunk before it is gone through, the sums, `b h t v`, and the last state.

    `sums = values + reads S`, `S = factor S + adds^T sums`, and what there is more; `factor` is `b h l 1 k` or, for all
    key channels, `b h l 1 1`. A program carries a column of tiles
    of the state, all its key channels, in float32 registers, through all chunks.
    """
    b, h, k, v = state.shape
    dtype, parts = given.values.dtype, k // TILE
    count = given.values.shape[2] // TILE
    stages = tiling.delta_rule_hopper(k)
    assert stages is not None
    factors = jnp.broadcast_to(factor, (b, h, count, 1, k)).reshape(b, h, count, parts, TILE)

    def body(reads_ref: Any, adds_ref: Any, values_ref: Any, *others: Any) -> None:
        more_refs, (factors_ref, state_ref, states_ref, sums_ref, final_ref) = others[:-5], others[-5:]
        at, head, column = (jax.lax.axis_index(name) for name in ('b', 'h', 'column'))
        channels = pl.ds(column * TILE, TILE)

        def place(turn: Any) -> Any:
            return count - 1 - turn if backward else turn

        def tiles(ref: Any, index: Any) -> tuple[Any, plgpu.BlockSpec]:
            transforms = swizzled(dtype)
            spec = plgpu.BlockSpec((TILE, TILE), lambda turn: (place(turn), index), transforms=transforms)
            return ref.at[at, head], spec

        def tile_of(part: int) -> tuple[Any, Any]:
            return pl.ds(part * TILE, TILE), channels

        def run(kept: Any, sums_tile: Any, final: Any) -> None:
            def step(turn: Any, factors: Any, values: Any, *rest: Any) -> tuple[jax.Array, ...]:
                *keys, state = rest
                reads, adds, more = keys[:parts], keys[parts : 2 * parts], keys[2 * parts :]
                chunk = place(turn[0])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for part in range(parts):
                    kept[part][...] = state[part].astype(dtype)
                plgpu.commit_smem()
                sums = load(values)
                for part in range(parts):
                    channel = pl.ds(chunk * k + part * TILE, TILE)
                    plgpu.copy_smem_to_gmem(kept[part], states_ref.at[at, head, channel, channels])
                    sums = mosaic_gpu.multiply(here, reads[part], kept[part], sums)
                sums_tile[...] = sums.astype(dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(sums_tile, sums_ref.at[at, head, pl.ds(chunk * TILE, TILE), channels])
                after = []
                for part in range(parts):
                    held = state[part] * along(factors.at[0], part, 0)
                    held = mosaic_gpu.multiply(here, adds[part].transpose((1, 0)), sums_tile, held)
                    if more:
                        held = mosaic_gpu.multiply(here, more[part].transpose((1, 0)), more[parts], held)
                    after.append(held)
                return tuple(after)

            sources = [
                (factors_ref.at[at, head], plgpu.BlockSpec((1, parts, TILE), lambda turn: (place(turn), 0, 0))),
                tiles(values_ref, column),
                *(tiles(ref, part) for ref in (reads_ref, adds_ref, *more_refs[:1]) for part in range(parts)),
                *(tiles(ref, column) for ref in more_refs[1:]),
            ]
            last = plgpu.emit_pipeline(
                step,
                grid=(count,),
                in_specs=[spec for _, spec in sources],
                max_concurrent_steps=min(stages, count),
                init_carry=tuple(
                    plgpu.load(state_ref.at[at, head, *tile_of(part)], layout=plgpu.Layout.WGMMA, optimized=False)
                    for part in range(parts)
                ),
            )(*(ref for ref, _ in sources))
            for part in range(parts):
                final[...] = last[part]
                write(final, final_ref.at[at, head, *tile_of(part)])

        pl.run_scoped(run, [shared_tile(dtype)] * parts, shared_tile(dtype), shared_tile(jnp.float32))

    states, sums, final = mosaic_gpu.kernel(
        body,
        here,
        out_type=(
            jax.ShapeDtypeStruct((b, h, count * k, v), dtype),
            jax.ShapeDtypeStruct((b, h, count * TILE, v), dtype),
            jax.ShapeDtypeStruct(state.shape, jnp.float32),
        ),
        grid=(b, h, v // TILE),
        grid_names=('b', 'h', 'column'),
        compiler_params=NAMED_LAYOUTS,
    )(given.reads, given.adds, given.values, *given.more, factors, state)
    return states.reshape(b, h, count, k, v), sums, final
