"""Cores with time divided over the devices of a mesh axis: each holds a contiguous part of every row, in order.

Call inside `jax.shard_map`, with a device's part of each argument. Time is axis 1; arguments without it are replicated.

A recurrence is run twice: first from zero, which gives the final state of a part, then from the combined final state
of the parts before it. A part acts on a state by `S -> D S + E`: `E` is its final state from zero, `D` its
total decay, or the matrix by which the delta rule multiplies the state. These are small and gathered; every device
combines those before its own. Gradients are those of automatic differentiation. Attention passes keys and values
around in a ring, or gathers them.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

import pallas_kernels
from attnlab.errors import UserError
from attnlab.functional import ring
from attnlab.functional.precision import wide_dtype
from pallas_kernels import Softmax, WeightMap, packing
from pallas_kernels.attention.problem import rounded_off
from pallas_kernels.ledger import Ledger

SEQUENCE = 'sequence'
"""The mesh axis."""

HIDDEN = jnp.iinfo(jnp.int32).min
"""The segment of keys that no query sees."""

Form = Callable[..., tuple[Array, Array]]
"""A recurrence: outputs, and the state it ends in."""

Map = Callable[[Array, Array], Array]
"""The action of a part's `D` on a state."""


class TimeDivision(NamedTuple):
    """How a call of a core has its time divided, and why so."""

    core: str
    how: str
    reason: str

    def __str__(self) -> str:
        return f'{self.core}: {self.how} ({self.reason})'


_CHOICES = Ledger[TimeDivision]('choices')


def choices() -> contextlib.AbstractContextManager[list[TimeDivision]]:
    """Collects a `TimeDivision` for every call of attention or a long convolution over divided time, in this thread."""
    return _CHOICES.collecting()


def divided() -> bool:
    """Whether the current trace is for a mesh that divides time."""
    mesh = jax.sharding.get_abstract_mesh()
    return SEQUENCE in mesh.axis_names and mesh.shape[SEQUENCE] > 1


def linear_scan(
    x: Array,
    decay: Array,
    *,
    state: Array | None = None,
    segments: Array | None = None,
    reverse: bool = False,
    **options: Any,
) -> tuple[Array, Array]:
    """See `pallas_kernels.linear_scan`."""
    run = functools.partial(pallas_kernels.linear_scan, x, decay, segments=segments, reverse=reverse, **options)
    decay = decay.astype(wide_dtype(decay.dtype)).reshape((1,) * (3 - decay.ndim) + decay.shape)
    total = decay[:, 0] ** x.shape[1] if decay.shape[1] == 1 else _product(decay)
    return _chained(run, total, jnp.multiply, state, segments, reverse=reverse)


def long_conv(x: Array, kernel: Array, *, segments: Array | None = None, **options: Any) -> Array:
    """See `pallas_kernels.long_conv`.

    A kernel as long as the row needs all tokens of a channel and no other channel: devices exchange a part of all
    channels for all of a part of them, and back, so that work and what is held are divided, and what is sent is what a
    device has. Channels that they do not divide are gathered, and every device keeps its own outputs.
    """
    count, t, channels = jax.lax.axis_size(SEQUENCE), x.shape[1], x.shape[2]
    run: Callable[..., Array] = functools.partial(pallas_kernels.long_conv, **options)
    if segments is not None:
        run = functools.partial(run, segments=jax.lax.all_gather(segments, SEQUENCE, axis=1, tiled=True))
    own, rest = divmod(channels, count)
    if rest:
        _CHOICES.record(
            TimeDivision('long_conv', 'tokens of all devices, gathered', f'{channels} channels over {count}')
        )
        y = run(jax.lax.all_gather(x, SEQUENCE, axis=1, tiled=True), kernel)
        return jax.lax.dynamic_slice_in_dim(y, jax.lax.axis_index(SEQUENCE) * t, t, axis=1)
    _CHOICES.record(
        TimeDivision('long_conv', 'whole rows of some channels in exchange for tokens', f'{own} channels a device')
    )
    kernel = jax.lax.dynamic_slice_in_dim(kernel, jax.lax.axis_index(SEQUENCE) * own, own, axis=1)
    y = run(jax.lax.all_to_all(x, SEQUENCE, split_axis=2, concat_axis=1, tiled=True), kernel)
    return jax.lax.all_to_all(y, SEQUENCE, split_axis=1, concat_axis=2, tiled=True)


def short_conv(
    x: Array, taps: Array, bias: Array | None = None, *, segments: Array | None = None, **options: Any
) -> Array:
    """See `pallas_kernels.short_conv`.

    A device is given the inputs that its first tokens reach back to, one less than there are taps, and their segments,
    and leaves their outputs out.
    """
    reach = taps.shape[0] - 1
    # Before the first device there are zeros, which give as much whatever document they are of.
    known = None if segments is None else _with_before(segments, reach)
    return pallas_kernels.short_conv(_with_before(x, reach), taps, bias, segments=known, **options)[:, reach:]


def _with_before(x: Array, reach: int) -> Array:
    """This device's tokens behind the `reach` before them, of as many devices as hold them; zeros before the first."""
    parts, count = [x], jax.lax.axis_size(SEQUENCE)
    while sum(part.shape[1] for part in parts) < reach + x.shape[1]:
        given = parts[-1][:, max(0, x.shape[1] - reach) :]
        parts.append(jax.lax.ppermute(given, SEQUENCE, [(i, i + 1) for i in range(count - 1)]))
    whole = jnp.concatenate(parts[::-1], axis=1)
    return whole[:, whole.shape[1] - reach - x.shape[1] :]


def selective_scan(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    D: Array | None = None,
    *,
    state: Array | None = None,
    segments: Array | None = None,
    **options: Any,
) -> tuple[Array, Array]:
    """See `pallas_kernels.selective_scan`."""
    run = functools.partial(pallas_kernels.selective_scan, x, dt, A, B, C, D, segments=segments, **options)
    wide = wide_dtype(dt.dtype)
    time = jnp.sum(dt.astype(wide), axis=1)
    return _chained(run, jnp.exp(time[..., None] * A.astype(wide)[None]), jnp.multiply, state, segments)


def linear_attention(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array | None = None,
    *,
    state: Array | None = None,
    segments: Array | None = None,
    **options: Any,
) -> tuple[Array, Array]:
    """See `pallas_kernels.linear_attention`."""
    run = functools.partial(pallas_kernels.linear_attention, q, k, v, log_decay, segments=segments, **options)
    return _chained(run, _total_decay(log_decay, q.shape[1]), jnp.multiply, state, segments)


def linear_attention_rows(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    *,
    state: Array | None = None,
    segments: Array | None = None,
    **options: Any,
) -> tuple[Array, Array]:
    """See `pallas_kernels.linear_attention_rows`."""
    run = functools.partial(pallas_kernels.linear_attention_rows, q, k, v, log_decay, segments=segments, **options)
    return _chained(run, _total_decay(log_decay, q.shape[1]), jnp.multiply, state, segments)


def linear_attention_sums(
    q: Array,
    k: Array,
    log_decay: Array | None = None,
    *,
    state: Array | None = None,
    segments: Array | None = None,
    **options: Any,
) -> tuple[Array, Array]:
    """See `pallas_kernels.linear_attention_sums`."""
    run = functools.partial(pallas_kernels.linear_attention_sums, q, k, log_decay, segments=segments, **options)
    return _chained(run, _total_decay(log_decay, q.shape[1])[..., 0], jnp.multiply, state, segments)


def delta_rule(
    q: Array,
    k: Array,
    v: Array,
    beta: Array,
    log_decay: Array | None = None,
    *,
    state: Array | None = None,
    segments: Array | None = None,
    **options: Any,
) -> tuple[Array, Array]:
    """See `pallas_kernels.delta_rule`."""
    core: Form = functools.partial(pallas_kernels.delta_rule, segments=segments, **options)
    batch, _, heads = beta.shape
    channels = k.shape[-1]
    # Applied to the columns of the identity, a part gives the matrix by which it multiplies a state.
    identity = jnp.broadcast_to(jnp.eye(channels)[None, None], (batch, heads, channels, channels))
    nothing = jnp.zeros((*v.shape[:-1], channels), v.dtype)
    _, matrix = core(q, k, nothing, beta, log_decay, state=identity)
    run = functools.partial(core, q, k, v, beta, log_decay)
    return _chained(run, matrix, functools.partial(jnp.matmul, precision='highest'), state, segments)


def diagonal_low_rank(
    q: Array,
    k: Array,
    v: Array,
    a: Array,
    b: Array | None = None,
    log_decay: Array | None = None,
    *,
    state: Array | None = None,
    segments: Array | None = None,
    **options: Any,
) -> tuple[Array, Array]:
    """See `pallas_kernels.diagonal_low_rank`."""
    core: Form = functools.partial(pallas_kernels.diagonal_low_rank, segments=segments, **options)
    channels = k.shape[-1]
    heads = max(array.shape[2] for array in (q, k, v))
    # As in `delta_rule`.
    identity = jnp.broadcast_to(jnp.eye(channels)[None, None], (k.shape[0], heads, channels, channels))
    nothing = jnp.zeros((*v.shape[:-1], channels), v.dtype)
    _, matrix = core(q, k, nothing, a, b, log_decay, state=identity)
    run = functools.partial(core, q, k, v, a, b, log_decay)
    return _chained(run, matrix, functools.partial(jnp.matmul, precision='highest'), state, segments)


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    weights: WeightMap = Softmax(),
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    sinks: int = 0,
    segments: Array | tuple[Array, Array] | None = None,
    slopes: Array | None = None,
    log_forget: Array | None = None,
    bias: Array | None = None,
    temperature: Array | None = None,
    sink_scores: Array | None = None,
    chosen: Array | None = None,
    block: int | None = None,
    implementation: str | None = None,
) -> Array:
    """See `pallas_kernels.attention`; as many keys as queries. A device holds `bias` for its own queries and all keys.

    Keys and values go around in a ring (`attnlab.functional.ring`), or are gathered for the same work where those of
    the whole row take fewer bytes than a device's own queries and outputs: few heads. Under a window that reaches
    fewer devices, each gets those of the devices that it sees. What neither serves gathers all of them: weights over
    some of the keys that do not combine, a bias, a pair of segments. `choices` says which, and why.

    Raises `UserError` for sinks, chosen blocks, a window or slopes that look ahead, and, where keys are gathered, for
    forget gates with other weights than a softmax without cap and sink; for forget gates that are not causal.
    """
    if sinks:
        raise UserError('attention with sinks has no form that divides time: config.mesh.sequence must be 1')
    if chosen is not None or block is not None:
        raise UserError('attention to chosen blocks has no form that divides time: config.mesh.sequence must be 1')
    if not causal and (window is not None or slopes is not None):
        raise UserError('attention to both sides of a window has no form that divides time: mesh.sequence must be 1')
    if log_forget is not None:
        if not causal or isinstance(segments, tuple):
            raise UserError('attention with forget gates is causal, and has one array of segments')
        # A document is a run of equal segments then, as gates are summed within it: a number may come again.
        segments = None if segments is None else _runs(segments)
    count, t = jax.lax.axis_size(SEQUENCE), q.shape[1]
    window = None if window is None or window >= count * t else window
    reached = count if window is None else min(count, 1 - (1 - window) // t)
    obstacle = _no_ring(t, weights, causal, window, segments, bias, implementation)
    if reached < count:
        _CHOICES.record(
            TimeDivision('attention', f'keys and values of the {reached - 1} devices before', f'a window of {window}')
        )
    elif obstacle is not None:
        _CHOICES.record(TimeDivision('attention', 'keys and values of all devices, gathered', obstacle))
    else:
        held, own = count * (_bytes(k) + _bytes(v)), _bytes(q) + _bytes(v) * q.shape[2] // v.shape[2]
        gathers = held < own and log_forget is None
        how = 'keys and values of all devices, gathered' if gathers else 'keys and values in a ring'
        reason = f'weights over some of the keys combine: {type(weights).__name__}'
        if gathers:
            reason = f'{held:,} bytes, own queries and outputs {own:,}'
        _CHOICES.record(
            TimeDivision('attention', how + (', causal work dealt out in zig-zag' if causal else ''), reason)
        )
        segments = segments[0] if isinstance(segments, tuple) else segments
        return _around(
            ring.Rule(SEQUENCE, weights, scale, causal, implementation, gathers),
            q,
            k,
            v,
            segments=segments,
            slopes=slopes,
            log_forget=log_forget,
            temperature=temperature,
            sink_scores=sink_scores,
        )
    return _gathered(
        q,
        k,
        v,
        reached,
        weights=weights,
        scale=scale,
        causal=causal,
        window=window,
        segments=segments,
        slopes=slopes,
        log_forget=log_forget,
        bias=bias,
        temperature=temperature,
        sink_scores=sink_scores,
        implementation=implementation,
    )


def _runs(segments: Int[Array, 'b t']) -> Int[Array, 'b t']:
    """This device's tokens by the runs of equal segments of the whole row."""
    t = segments.shape[1]
    whole = packing.runs(jax.lax.all_gather(segments, SEQUENCE, axis=1, tiled=True))
    return jax.lax.dynamic_slice_in_dim(whole, jax.lax.axis_index(SEQUENCE) * t, t, axis=1)


def _bytes(x: Array) -> int:
    return x.size * x.dtype.itemsize


def _no_ring(
    t: int,
    weights: WeightMap,
    causal: bool,
    window: int | None,
    segments: Array | tuple[Array, Array] | None,
    bias: Array | None,
    implementation: str | None,
) -> str | None:
    """Why a call does not go around in a ring; `None`: it does."""
    obstacles = {
        f'weights over some of the keys do not combine: {type(weights).__name__}': not weights.merges,
        'a bias for every query and key': bias is not None,
        f'a window of {window}, which reaches all devices': window is not None,
        f'{t} tokens a device have no halves': causal and t % 2 == 1,
        'queries and keys have segments of their own': isinstance(segments, tuple),
        f'implementation {implementation!r}, which has no statistics': implementation in ('reference', 'cudnn'),
    }
    return next((reason for reason, found in obstacles.items() if found), None)


def _around(
    rule: ring.Rule,
    q: Array,
    k: Array,
    v: Array,
    *,
    segments: Array | None,
    slopes: Array | None,
    log_forget: Array | None,
    temperature: Array | None,
    sink_scores: Array | None,
) -> Array:
    """Attention in a ring, or with few keys gathered, with the factors and the gates that are of whole rows."""
    counts = _counts(q.shape[0], q.shape[1], rule.causal, segments) if rule.weights.counts_keys else None
    factors = [None if counts is None else rule.weights.query_factor(counts), temperature]
    given = [x.reshape(*(1,) * (3 - x.ndim), *x.shape, 1) for x in factors if x is not None]
    if given:
        # As on one device: rounded once, and in the type of sums, which the gradients of the factors are.
        q = (q.astype(wide_dtype(q.dtype)) * functools.reduce(jnp.multiply, given)).astype(q.dtype)
    forget: Array | None = None
    rest: Array | None = None
    if log_forget is not None:
        wide = log_forget.astype(wide_dtype(log_forget.dtype))
        forget, _ = linear_scan(wide, jnp.ones(wide.shape[-1], wide.dtype), segments=segments)
        rest = _rounded_off(wide, forget, segments)
    after = None if counts is None else rule.weights.output_factor(counts)
    # Rounded only after the factor, which brings it into the range of 16 bits.
    rule = dataclasses.replace(rule, wide=after is not None)
    output = ring.attention(
        rule, q, k, v, segments=segments, forget=forget, rest=rest, slopes=slopes, sink_scores=sink_scores
    )
    return output if after is None else (output * after[..., None]).astype(v.dtype)


def _rounded_off(
    gates: Float[Array, 'b t h'], total: Float[Array, 'b t h'], segments: Int[Array, 'b t'] | None
) -> Float[Array, 'b t h']:
    """What rounding took from `total`, the sums of the gates from the start of each document to this device's tokens.

    `segments` are runs. It is what `rounded_off` finds of the whole row: before this device's tokens it is given, of
    every device that holds the beginning of their first document, the sum of its gates and what rounding took from it.
    """
    here, count = jax.lax.axis_index(SEQUENCE), jax.lax.axis_size(SEQUENCE)
    runs = jnp.zeros(gates.shape[:2], jnp.int32) if segments is None else segments
    ending = jnp.where((runs == runs[:, -1:])[..., None], gates, 0)
    sums = jnp.cumsum(ending, axis=1)
    own = jnp.stack([sums, rounded_off(ending, sums, jnp.zeros_like(runs, bool)[..., None])])[:, :, -1]
    last = jax.lax.all_gather(runs[:, -1], SEQUENCE)
    goes_on = (last == runs[None, :, 0]) & (jnp.arange(count) < here)[:, None]
    before = jnp.where(goes_on[:, None, :, None], jax.lax.all_gather(own, SEQUENCE), 0)
    before = jnp.moveaxis(before.reshape(2 * count, *gates.shape[::2]), 0, 1)
    spread = ((0, 0), (2 * count, 0), (0, 0))
    rows = jnp.concatenate([before, gates], axis=1), jnp.pad(total, spread)
    return rounded_off(*rows, jnp.pad(packing.starts(runs)[..., None], spread))[:, 2 * count :]


def _counts(batch: int, t: int, causal: bool, segments: Array | None) -> Array:
    """How many keys every query of this device sees, `b t 1`."""
    here, count = jax.lax.axis_index(SEQUENCE), jax.lax.axis_size(SEQUENCE)
    if segments is None:
        seen = here * t + 1 + jnp.arange(t) if causal else jnp.full(t, count * t)
        return jnp.broadcast_to(seen[None, :, None], (batch, t, 1)).astype(jnp.float32)
    every = jax.lax.all_gather(segments, SEQUENCE, axis=1, tiled=True)
    same = segments[:, :, None] == every[:, None, :]
    if causal:
        same &= (here * t + jnp.arange(t))[None, :, None] >= jnp.arange(count * t)[None, None, :]
    return jnp.sum(same, axis=-1, keepdims=True, dtype=jnp.float32)


def _gathered(
    q: Array,
    k: Array,
    v: Array,
    reached: int,
    *,
    weights: WeightMap,
    causal: bool,
    segments: Array | tuple[Array, Array] | None,
    slopes: Array | None,
    log_forget: Array | None,
    bias: Array | None,
    sink_scores: Array | None,
    **options: Any,
) -> Array:
    """Attention to the keys of the `reached` devices up to this one, which may be all, held at once.

    The parts of the keys are cyclically reordered so that a device's own is the last, which preserves distances within
    the row; parts of later tokens, which then come first, are masked. Where all keys are gathered every device
    therefore has the same work, of which half is wasted where an implementation does not skip masked keys.
    """
    shifts = isinstance(weights, Softmax) and weights.soft_cap is None and sink_scores is None
    if log_forget is not None and not shifts:
        raise UserError(
            'forget gates have a form that divides time for a softmax without cap or sink: mesh.sequence must be 1'
        )
    here, count = jax.lax.axis_index(SEQUENCE), jax.lax.axis_size(SEQUENCE)
    batch, t, *_ = q.shape
    order = (here + 1 - reached + jnp.arange(reached)) % count

    def reordered(x: Array, axis: int = 1) -> Array:
        """The parts of an array from the devices reached, in an order in which this device's own is the last."""
        if reached < count:
            parts = [x]
            for _ in range(reached - 1):
                parts.append(jax.lax.ppermute(parts[-1], SEQUENCE, [(i, (i + 1) % count) for i in range(count)]))
            return jnp.concatenate(parts[::-1], axis=axis)
        blocks = jax.lax.all_gather(x, SEQUENCE, axis=axis)
        blocks = jnp.take(blocks, order, axis=axis)
        return blocks.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])

    pair = segments if isinstance(segments, tuple) else (segments, segments)
    of_queries, of_keys = (jnp.ones((batch, t), jnp.int32) if each is None else each for each in pair)
    seen = reordered(of_keys)
    if causal:
        seen = jnp.where(jnp.repeat(order > here, t)[None], HIDDEN, seen)
    if bias is not None and bias.shape[-1] > 1:
        split = bias.reshape(*bias.shape[:3], count, t)
        bias = jnp.take(split, order, axis=3).reshape(*bias.shape[:3], reached * t)
    if log_forget is not None:
        forgotten = _forgotten(log_forget, here, order, reordered)
        bias = forgotten if bias is None else bias + forgotten
    return pallas_kernels.attention(
        q,
        reordered(k),
        reordered(v),
        weights=weights,
        causal=causal,
        segments=(of_queries, seen),
        slopes=slopes,
        bias=bias,
        sink_scores=sink_scores,
        **options,
    )


def _forgotten(log_forget: Array, here: Array, order: Int[Array, ' p'], reordered: Callable[[Array], Array]) -> Array:
    """The sum of log gates after every key, as a bias `b h 1 s`.

    Exact up to a constant of the row, which a softmax ignores: it counts from the first token of this device.
    """
    wide = log_forget.astype(wide_dtype(log_forget.dtype))
    totals = jax.lax.all_gather(jnp.sum(wide, axis=1), SEQUENCE)
    # Gates after a part and before this device's own.
    stretches = jnp.arange(totals.shape[0])
    between = (stretches[None] >= stretches[:, None]) & (stretches[None] < here)
    since = jnp.einsum('pn,nbh->pbh', between.astype(wide.dtype), totals, precision='highest')
    spread = jnp.repeat(jnp.moveaxis(since[order], 0, 1), log_forget.shape[1], axis=1)
    later = jnp.repeat(order > here, log_forget.shape[1])[None, :, None]
    return jnp.moveaxis(jnp.where(later, 0, spread - reordered(jnp.cumsum(wide, axis=1))), 1, 2)[:, :, None]


def _chained(
    run: Form,
    total: Array,
    act: Map,
    state: Array | None,
    segments: Int[Array, 'b t'] | None,
    *,
    reverse: bool = False,
) -> tuple[Array, Array]:
    """Runs a recurrence over all devices, from the state before the first device's tokens, or the last's when reversed.

    Args:
      run: the recurrence over this device's tokens, from `state`; returns outputs and the state it ends in.
      total: `D` of this device's tokens, ignoring documents.
      act: computes `D S`.
      state: the same on every device; `None`: zero.
      segments: of this device's tokens.
      reverse: whether states are passed to the previous device.
    """
    _, left = run()
    begins, ends = _edges(segments, left.shape[0], reverse=reverse)
    total = jnp.where(_over(ends | begins, total), 0, total)
    totals, lefts = map(_of_every_device, (jnp.broadcast_to(total, (left.shape[0], *total.shape[1:])), left))
    first = jnp.zeros_like(left) if state is None else state.astype(left.dtype)

    def add(before: Array, stretch: tuple[Array, Array]) -> tuple[Array, Array]:
        return act(stretch[0], before) + stretch[1], before

    last, starts = jax.lax.scan(add, first, (totals, lefts), reverse=reverse)
    start = jax.lax.dynamic_index_in_dim(starts, jax.lax.axis_index(SEQUENCE), keepdims=False)
    outputs, _ = run(state=jnp.where(_over(begins, start), 0, start))
    return outputs, last


def _of_every_device(array: Array) -> Array:
    """The arrays of all devices, one after the other; complex ones in parts, as TPUs add up no complex gradients."""
    gather = functools.partial(jax.lax.all_gather, axis_name=SEQUENCE)
    return jax.lax.complex(gather(array.real), gather(array.imag)) if jnp.iscomplexobj(array) else gather(array)


def _edges(
    segments: Int[Array, 'b t'] | None, batch: int, *, reverse: bool
) -> tuple[Bool[Array, ' b'], Bool[Array, ' b']]:
    """Whether this device's first token, in the recurrence's order, starts a document, and whether a later one does."""
    if segments is None:
        return jnp.zeros(batch, bool), jnp.zeros(batch, bool)
    segments = jnp.flip(segments, 1) if reverse else segments
    count, here = jax.lax.axis_size(SEQUENCE), jax.lax.axis_index(SEQUENCE)
    step = -1 if reverse else 1
    before = jax.lax.ppermute(segments[:, -1], SEQUENCE, [(i, (i + step) % count) for i in range(count)])
    first = here == (count - 1 if reverse else 0)
    return (segments[:, 0] != before) & ~first, jnp.any(segments[:, 1:] != segments[:, :-1], axis=1)


def _over(rows: Bool[Array, ' b'], like: Array) -> Array:
    """A flag per row, reshaped to broadcast over the other dimensions of an array."""
    return rows.reshape(-1, *(1,) * (like.ndim - 1))


def _total_decay(log_decay: Array | None, t: int) -> Array:
    """The product of all decays over time, shaped to broadcast to `b h k v`."""
    if log_decay is None:
        return jnp.ones((1, 1, 1, 1))
    wide = log_decay.astype(wide_dtype(log_decay.dtype))
    if wide.ndim == 1:
        return jnp.exp(t * wide)[None, :, None, None]
    total = jnp.exp(jnp.sum(wide, axis=1))
    return total[:, :, None, None] if total.ndim == 2 else total[..., None]


def _product(x: Array) -> Array:
    """The product over time, by recursive halving: its derivative needs no division."""
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        pairs = x[:, :half] * x[:, half : 2 * half]
        x = pairs if 2 * half == x.shape[1] else jnp.concatenate([pairs, x[:, -1:]], axis=1)
    return x[:, 0]
