"""The Pallas form of `delta_rule` for Hopper GPUs: what waits for the state is one kernel, for both directions.

All that a chunk of 64 steps does by itself, its triangular inverse above all, is found outside, for all chunks at once,
in float32, the products of which have tf32's 10 bits on a GPU. `_sweep` then runs over the chunks of a sequence in
order and writes down the state at each and the values that its steps write; these are read as in `linear_attention`.

Kept for the backward pass are the arguments alone. It sweeps once more for the states, `t / 64 * k * v` numbers a head
in the 16-bit type that products want, and from the last chunk to the first for their gradients; with both at hand, the
gradients of a chunk are those that JAX finds of what it does, all chunks at once, all but the states computed again.

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
from pallas_kernels.linear_attention import rows
from pallas_kernels.linear_attention.mosaic_gpu import TILE
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
    """A call in whole chunks and tiles, float32, `b h l c` and channels, of which beta and decay have one.

    Attributes:
      q, k: of all heads.
      v: of all heads.
      beta: zero where time is filled up.
      log_decay: zero there; or `None`.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    beta: jax.Array
    log_decay: jax.Array | None


class Solved(NamedTuple):
    """What chunks do once their inverse is known.

    Attributes:
      does: their weights.
      written: the values they would write on an empty state, `... c v`.
      erases: what these lack for each number of the state before, `... c k`.
    """

    does: Weights
    written: jax.Array
    erases: jax.Array


def _solve(here: Target, steps: Steps, runs: jax.Array | None) -> Solved:
    does = weights(Chunk(steps.q, steps.k, steps.beta, steps.log_decay, runs), _FORM)
    solved = inverse(does.erased, here.platform)
    return Solved(
        does=does,
        written=multiply(solved, steps.beta * steps.v, 'nn', _FORM),
        erases=multiply(solved, steps.beta * does.k, 'nn', _FORM),
    )


def _outputs(
    here: Target, runs: jax.Array | None, state: jax.Array, scale: float, steps: Steps
) -> tuple[jax.Array, jax.Array]:
    """What the steps of all chunks read, given the states before them, `b h l k v`, and the states after them."""
    does, written, erases = _solve(here, steps, runs)
    values = written - multiply(erases, state, 'nn', _FORM)
    o = multiply(does.q, state, 'nn', _FORM) + multiply(does.among, values, 'nn', _FORM)
    return scale * o, does.factor * state + multiply(does.writes, values, 'tn', _FORM)


def _forward(here: Target, arrays: vjp.Arrays, scale: float, keep: bool) -> tuple[vjp.Outputs, None]:
    steps, runs, numbers = _inputs(arrays)
    states, values, final = _forward_sweep(here, arrays, numbers, _solve(here, steps, runs))
    q, k = linear.fill((scale * arrays.q.astype(jnp.float32)).astype(arrays.q.dtype)), linear.fill(arrays.k)
    o = linear.read(here, linear.FORWARD, q, k, values, states, numbers, values.dtype)
    t, (key_size, value_size) = arrays.q.shape[2], arrays.state.shape[2:]
    return (o[:, :, :t, :value_size], final[:, :, :key_size, :value_size]), None


def _backward(here: Target, arrays: vjp.Arrays, scale: float, kept: None, gradients: vjp.Outputs) -> vjp.Arrays:
    steps, runs, numbers = _inputs(arrays)
    dtype = arrays.q.dtype
    do, dfinal = (linear.fill(gradient) for gradient in gradients)
    do = _cut(do.astype(jnp.float32))
    solved = _solve(here, steps, runs)
    does = solved.does
    states, _, _ = _forward_sweep(here, arrays, numbers, solved)
    dstates, _, dstate = _sweep(
        here,
        Sweep(
            reads=_join(does.writes, dtype),
            adds=_join(-solved.erases, dtype),
            values=_join(scale * multiply(does.among, do, 'tn', _FORM), dtype),
            more=(_join(scale * does.q, dtype), _join(do, dtype)),
        ),
        numbers,
        dfinal,
        backward=True,
    )
    outputs = functools.partial(_outputs, here, runs, states.astype(jnp.float32), scale)
    found = jax.vjp(outputs, steps)[1]((do, dstates.astype(jnp.float32)))[0]
    t, (key_size, value_size) = arrays.q.shape[2], arrays.state.shape[2:]

    def joined(gradient: jax.Array, channels: int) -> jax.Array:
        return _join(gradient, jnp.float32)[:, :, :t, :channels]

    return vjp.Arrays(
        q=joined(found.q, key_size),
        k=joined(found.k, key_size),
        v=joined(found.v, value_size),
        beta=joined(found.beta, 1)[..., 0],
        log_decay=None if found.log_decay is None else joined(found.log_decay, 1),
        state=dstate[:, :, :key_size, :value_size],
        starts=None,
    )


def _inputs(arrays: vjp.Arrays) -> tuple[Steps, jax.Array | None, jax.Array]:
    """The steps; how often their chunk has forgotten the past, `b 1 l c 1` or `None`; and `rows`, `b h l 8 c`."""
    b, h = arrays.state.shape[:2]
    t = arrays.q.shape[2]

    def of_heads(array: jax.Array) -> jax.Array:
        return _cut(linear.fill(jnp.repeat(array, h // array.shape[1], axis=1)).astype(jnp.float32))

    def numbers(array: jax.Array) -> jax.Array:
        return _cut(jnp.pad(array, ((0, 0), (0, 0), (0, -t % TILE), (0, 0))))

    decay, starts = arrays.log_decay, arrays.starts
    steps = Steps(
        q=of_heads(arrays.q),
        k=of_heads(arrays.k),
        v=of_heads(arrays.v),
        beta=numbers(arrays.beta[..., None]),
        log_decay=None if decay is None else numbers(jnp.broadcast_to(decay, (b, h, t, 1))),
    )
    runs = None if starts is None else jnp.cumsum(numbers(starts[:, None, :, None]), axis=3, dtype=jnp.int32)
    found = rows.rows(decay, starts, pl.cdiv(t, TILE) * TILE, TILE)
    return steps, runs, jnp.broadcast_to(found, (b, h, *found.shape[2:]))


def _cut(array: jax.Array) -> jax.Array:
    """`b h t k` as `b h l c k`."""
    b, h, t, k = array.shape
    return array.reshape(b, h, t // TILE, TILE, k)


def _join(array: jax.Array, dtype: Any) -> jax.Array:
    """`b h l c k` as `b h t k`."""
    b, h, l, c, k = array.shape
    return array.reshape(b, h, l * c, k).astype(dtype)


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


def _forward_sweep(
    here: Target, arrays: vjp.Arrays, numbers: jax.Array, solved: Solved
) -> tuple[jax.Array, jax.Array, jax.Array]:
    dtype = arrays.q.dtype
    given = Sweep(
        reads=_join(-solved.erases, dtype),
        adds=_join(solved.does.writes, dtype),
        values=_join(solved.written, dtype),
        more=(),
    )
    return _sweep(here, given, numbers, linear.fill(arrays.state), backward=False)


def _sweep(
    here: Target, given: Sweep, numbers: jax.Array, state: jax.Array, *, backward: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The state, `b h l k v`, at every chunk before it is gone through, the sums, `b h t v`, and the last state.

    `sums = values + reads S`, `S = factor S + adds^T sums`, and what there is more. A program carries a column of tiles
    of the state, all its key channels, in float32 registers, through all chunks.
    """
    b, h, k, v = state.shape
    dtype, parts = given.values.dtype, k // TILE
    count = given.values.shape[2] // TILE
    stages = tiling.delta_rule_hopper(k)
    assert stages is not None

    def body(reads_ref: Any, adds_ref: Any, values_ref: Any, *others: Any) -> None:
        more_refs, (rows_ref, state_ref, states_ref, sums_ref, final_ref) = others[:-5], others[-5:]
        at, head, column = (jax.lax.axis_index(name) for name in ('b', 'h', 'column'))
        channels = pl.ds(column * TILE, TILE)

        def place(turn: Any) -> Any:
            return count - 1 - turn if backward else turn

        def tiles(ref: Any, index: Any) -> tuple[Any, plgpu.BlockSpec]:
            transforms = linear.swizzled(dtype)
            spec = plgpu.BlockSpec((TILE, TILE), lambda turn: (place(turn), index), transforms=transforms)
            return ref.at[at, head], spec

        def tile_of(part: int) -> tuple[Any, Any]:
            return pl.ds(part * TILE, TILE), channels

        def run(kept: Any, sums_tile: Any, final: Any) -> None:
            def step(turn: Any, numbers: Any, values: Any, *rest: Any) -> tuple[jax.Array, ...]:
                *keys, state = rest
                reads, adds, more = keys[:parts], keys[parts : 2 * parts], keys[2 * parts :]
                chunk = place(turn[0])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for part in range(parts):
                    kept[part][...] = state[part].astype(dtype)
                plgpu.commit_smem()
                sums = linear.load(values)
                for part in range(parts):
                    channel = pl.ds(chunk * k + part * TILE, TILE)
                    plgpu.copy_smem_to_gmem(kept[part], states_ref.at[at, head, channel, channels])
                    sums = mosaic_gpu.multiply(here, reads[part], kept[part], sums)
                sums_tile[...] = sums.astype(dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(sums_tile, sums_ref.at[at, head, pl.ds(chunk * TILE, TILE), channels])
                factor = linear.along(numbers.at[0], rows.FACTOR, 0)
                after = []
                for part in range(parts):
                    held = mosaic_gpu.multiply(here, adds[part].transpose((1, 0)), sums_tile, state[part] * factor)
                    if more:
                        held = mosaic_gpu.multiply(here, more[part].transpose((1, 0)), more[parts], held)
                    after.append(held)
                return tuple(after)

            sources = [
                (rows_ref.at[at, head], plgpu.BlockSpec((1, rows.COUNT, TILE), lambda turn: (place(turn), 0, 0))),
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
                linear.write(final, final_ref.at[at, head, *tile_of(part)])

        pl.run_scoped(
            run, [linear.shared_tile(dtype)] * parts, linear.shared_tile(dtype), linear.shared_tile(jnp.float32)
        )

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
        compiler_params=linear.NAMED_LAYOUTS,
    )(given.reads, given.adds, given.values, *given.more, numbers, state)
    return states.reshape(b, h, count, k, v), sums, final
