"""The canonical form of a call of `attention`: heads before time, split into groups that share keys, `h = g r`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import precision
from pallas_kernels.attention.maps import WeightMap


@dataclasses.dataclass(frozen=True)
class Rule:
    """The static parameters of a call; see `api.attention`."""

    weights: WeightMap
    scale: float
    causal: bool
    window: int | None
    sinks: int
    block: int | None = None


MASKS = ('query_segments', 'key_segments', 'chosen', 'key_blocks')
"""The operands that hide keys and nothing else: they have no gradients, and keep their types."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """The arrays of a call, or of one block of it. Dimensions along which an operand is constant have size 1.

    Attributes:
      q: `b g r t k`.
      k: `b g s k`.
      v: `b g s v`.
      bias: `b g r t s`, or `None`.
      slopes: `1 g r 1 1`, or `None`.
      query_forget: the logarithms of the forget gates summed up to each query, `b g r t 1`, or `None`.
      key_forget: the same up to each key, `b g r 1 s`, or `None`.
      query_rest: what rounding took from `query_forget`, without gradients, or `None`; kernels do without.
      key_rest: likewise.
      query_segments: `b 1 1 t 1`, or `None`.
      key_segments: `b 1 1 1 s`, or `None`.
      chosen: whether a query reads each block of keys of its document, `b g 1 t n`, or `None`.
      key_blocks: the number of the block in which each key is, `b 1 1 1 s`, or `None`.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    bias: jax.Array | None = None
    slopes: jax.Array | None = None
    query_forget: jax.Array | None = None
    key_forget: jax.Array | None = None
    query_rest: jax.Array | None = None
    key_rest: jax.Array | None = None
    query_segments: jax.Array | None = None
    key_segments: jax.Array | None = None
    chosen: jax.Array | None = None
    key_blocks: jax.Array | None = None

    def dtype(self) -> jnp.dtype:
        """The type the call is computed in."""
        return precision.accumulator(self.q, self.k, self.v, self.bias, self.slopes, self.query_forget)

    def floating(self) -> 'Operands':
        """The operands that have gradients."""
        return self.replace(query_rest=None, key_rest=None, **dict.fromkeys(MASKS))

    def accumulating(self) -> 'Operands':
        """The same operands in the type the call is computed in."""
        masks = {name: getattr(self, name) for name in MASKS}
        cast = jax.tree.map(lambda array: array.astype(self.dtype()), self.replace(**dict.fromkeys(masks)))
        return cast.replace(**masks)

    def replace(self, **changes: Any) -> 'Operands':
        """The same operands with some replaced."""
        return dataclasses.replace(self, **changes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Extras:
    """The arrays of a call that only the reference sees.

    Attributes:
      temperature: factor of the products of every query, `b g r t 1`, or `None`.
      sink_scores: the score of a further key with the value zero, `1 g r 1 1`, or `None`.
    """

    temperature: jax.Array | None = None
    sink_scores: jax.Array | None = None


def canonical(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: jax.Array | None,
    slopes: jax.Array | None,
    log_forget: jax.Array | None,
    segments: tuple[jax.Array, jax.Array] | None,
    chosen: jax.Array | None = None,
    block: int | None = None,
) -> Operands:
    """Arranges the arguments of `api.attention`."""
    g, h = k.shape[2], q.shape[2]
    operands = Operands(split_heads(q, g), jnp.moveaxis(k, 2, 1), jnp.moveaxis(v, 2, 1))
    if bias is not None:
        b, heads, t, s = bias.shape
        groups = (1, 1) if heads == 1 else (g, h // g)
        operands = dataclasses.replace(operands, bias=bias.reshape(b, *groups, t, s))
    if slopes is not None:
        operands = dataclasses.replace(operands, slopes=slopes.reshape(1, g, h // g, 1, 1))
    if log_forget is not None:
        gates = log_forget.astype(precision.accumulator(q, k, v, log_forget))
        if segments is None:
            starts, total = jnp.zeros((*gates.shape[:2], 1), bool), jnp.cumsum(gates, axis=1)
        else:
            starts, runs, total = _by_run(segments[0], gates)
            segments = (runs, runs)
        forget, rest = (split_heads(array[..., None], g) for array in (total, rounded_off(gates, total, starts)))
        operands = operands.replace(query_forget=forget, key_forget=forget.swapaxes(3, 4))
        operands = operands.replace(query_rest=rest, key_rest=rest.swapaxes(3, 4))
    if chosen is not None and block is not None:
        segments, numbers = _by_block(segments, k.shape[1], block)
        operands = operands.replace(
            chosen=jnp.moveaxis(chosen, 1, 2)[:, :, None], key_blocks=numbers[:, None, None, None, :]
        )
    if segments is not None:
        operands = dataclasses.replace(
            operands,
            query_segments=segments[0][:, None, None, :, None],
            key_segments=segments[1][:, None, None, None, :],
        )
    return operands


def _by_run(segments: jax.Array, gates: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Marks where runs of equal segments start, `b t 1`, numbers them, `b t`, and sums up the gates of each, `b t h`.

    With sums over whole rows a gate would get a gradient, from rounding, from other documents.
    """
    starts = _run_starts(segments)

    def join(left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return jnp.where(right[1], right[0], left[0] + right[0]), left[1] | right[1]

    total, _ = jax.lax.associative_scan(join, (gates, starts[..., None]), axis=1)
    return starts[..., None], _run_numbers(starts), total


def _by_block(
    segments: tuple[jax.Array, jax.Array] | None, s: int, block: int
) -> tuple[tuple[jax.Array, jax.Array] | None, jax.Array]:
    """Numbers runs of equal segments, and the blocks of keys in each, `b s`, where there is one array of segments."""
    places = jnp.arange(s, dtype=jnp.int32)[None]
    if segments is None:
        return None, places // block
    starts = _run_starts(segments[0])
    runs = _run_numbers(starts)
    return (runs, runs), (places - jax.lax.cummax(jnp.where(starts, places, 0), axis=1)) // block


def _run_starts(segments: jax.Array) -> jax.Array:
    """Where runs of equal segments start, but for the first, `b t`."""
    return jnp.concatenate([jnp.zeros_like(segments[:, :1]), jnp.diff(segments, axis=1)], axis=1) != 0


def _run_numbers(starts: jax.Array) -> jax.Array:
    return jnp.cumsum(starts, axis=1, dtype=jnp.int32)


def rounded_off(gates: jax.Array, total: jax.Array, starts: jax.Array) -> jax.Array:
    """What rounding took from `total`, the sums of the gates of each run up to a token, `b t h`; it has no gradient.

    Sums of whole numbers are exact up to 2^24, and those of what is left stay below one half, so that the differences
    of neighbours far along a row have as many digits as its first.
    """

    def carried(whole: jax.Array, part: jax.Array) -> tuple[jax.Array, jax.Array]:
        carry = jnp.round(part)
        return whole + carry, part - carry

    def join(left: tuple[jax.Array, ...], right: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        sums = carried(left[0] + right[0], left[1] + right[1])
        return *(jnp.where(right[2], own, both) for own, both in zip(right, sums, strict=False)), left[2] | right[2]

    gates, total = jax.lax.stop_gradient((gates, total))
    whole, part, _ = jax.lax.associative_scan(join, (*carried(jnp.zeros_like(gates), gates), starts), axis=1)
    return (whole - total) + part


def segments_refusal(operands: Operands) -> str | None:
    """The reason why kernels, which compare the numbers of documents in 32 bits, cannot serve a call, or `None`."""
    for segments in (operands.query_segments, operands.key_segments):
        if segments is not None and segments.dtype.itemsize > 4:
            return f'segments have type {segments.dtype}; expected 32 bits at most'
    return None


def canonical_extras(temperature: jax.Array | None, sink_scores: jax.Array | None, h: int, g: int) -> Extras:
    """Arranges the arguments of `api.attention` that the forms do not see."""
    if temperature is not None:
        temperature = (
            temperature.reshape(1, g, h // g, 1, 1) if temperature.ndim == 1 else split_heads(temperature[..., None], g)
        )
    if sink_scores is not None:
        sink_scores = sink_scores.reshape(1, g, h // g, 1, 1)
    return Extras(temperature, sink_scores)


def split_heads(array: jax.Array, g: int) -> jax.Array:
    """`b t h k` as `b g r t k`."""
    b, t, h, k = array.shape
    return jnp.transpose(array.reshape(b, t, g, h // g, k), (0, 2, 3, 1, 4))


def join_heads(array: jax.Array) -> jax.Array:
    """`b g r t v` as `b t h v`."""
    b, g, r, t, v = array.shape
    return jnp.transpose(array, (0, 3, 1, 2, 4)).reshape(b, t, g * r, v)
