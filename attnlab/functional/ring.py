"""Attention with time divided over the devices of a mesh axis, keys and values passed around in a ring.

Each device keeps its queries and receives the keys and values of every other in turn (Liu et al., 2023, arXiv
2310.01889). What a query has read is combined by the statistics of the weight map (`WeightMap.merge`). The backward
pass goes round once more, and the gradients of keys and values travel with them. No device ever holds the keys of more
than two.

A causal row is dealt out in zig-zag: of 2n pieces, device i of n has pieces i and 2n - 1 - i. At every turn but the
first it then has exactly two pairs of pieces to work on, all of whose queries see all of whose keys, and at the first
its own: equal work for all devices, and none of it hidden. The devices hold the row in order outside of attention, so
pieces are exchanged before and after.

Where the keys and values of the whole row are few, all are gathered at the start instead and each turn takes those that
a ring would have brought: the work is the same, and neither keys and values nor their gradients are dealt out.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

import pallas_kernels
from attnlab.functional.precision import wide_dtype
from pallas_kernels import Part, WeightMap

UNROLLED = 4
"""Rings of at most this many devices are unrolled, which saves the last turn of keys that nobody reads any more."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """The static parameters of a call; see `pallas_kernels.attention`.

    `gathers`: all keys at once, in no ring. `wide`: the output is not rounded, for a caller that multiplies it first.
    """

    axis: str
    weights: WeightMap
    scale: float | None
    causal: bool
    implementation: str | None
    gathers: bool = False
    wide: bool = False


class Floats(NamedTuple):
    """The differentiable arrays of one device; leading axis: pieces, two when causal, one otherwise.

    Attributes:
      q: `p b t h k`.
      k: `p b t g k`; gathered `n p b t g k`, those of all devices.
      v: `p b t g v`, likewise.
      forget: logarithms of the forget gates, summed from the start of each document, `p b t h`, or `None`.
      slopes: of the distance, `h`, or `None`; the same on every device.
      sink_scores: of one more key, `h`, or `None`; the same on every device.
    """

    q: Array
    k: Array
    v: Array
    forget: Array | None = None
    slopes: Array | None = None
    sink_scores: Array | None = None


class Known(NamedTuple):
    """What the pieces of one device are: documents, `p b t` or `None`, and the position of the first token, `p`.

    Of all devices: `n p b t` and `n p`. `rest` is what rounding took from the sums of forget gates, `p b t h`, or
    `None`.
    """

    segments: Array | None
    start: Array
    rest: Array | None = None


class Keys(NamedTuple):
    """What travels: keys and values, and their gates, documents and positions."""

    k: Array
    v: Array
    forget: Array | None
    known: Known


class _Total(NamedTuple):
    """Gradients so far: those of this device's arrays, but `k` and `v`, and `key_forget`, those of the keys here."""

    floats: Floats
    key_forget: Array | None


def attention(
    rule: Rule,
    q: Array,
    k: Array,
    v: Array,
    *,
    segments: Array | None = None,
    forget: Array | None = None,
    rest: Array | None = None,
    slopes: Array | None = None,
    sink_scores: Array | None = None,
) -> Array:
    """Attention to the keys of all devices, `b t h v`; every device has as many queries as keys.

    Args:
      rule: its static parameters; the map `merges`, and factors of the number of keys are left to the caller. One that
        gathers takes no forget gates.
      q: this device's queries, `b t h k`.
      k: its keys, `b t g k`.
      v: its values, `b t g v`.
      segments: documents of its tokens, `b t`.
      forget: logarithms of the forget gates, summed from the start of each document, `b t h`; causal alone.
      rest: what rounding took from these sums, `b t h`, without a gradient; given with `forget`.
      slopes: bias linear in the distance, `h`; causal alone.
      sink_scores: the score of one more key, `h`.
    """
    deal = _Deal(rule.axis, q.shape[1]) if rule.causal else _Whole(rule.axis, q.shape[1])
    gates = None if forget is None else deal.out(forget)
    keys = deal.gathered if rule.gathers else deal.out
    floats = Floats(deal.out(q), keys(k), keys(v), gates, slopes, sink_scores)
    documents, lost = (None if each is None else deal.out(each) for each in (segments, rest))
    known = Known(documents, deal.starts(), lost)
    every = Known(None if segments is None else deal.gathered(segments), deal.all_starts()) if rule.gathers else None
    return deal.back(_ring(rule, floats, known, every))


class _Whole:
    """Every device keeps its tokens, as one piece."""

    def __init__(self, axis: str, length: int):
        self.axis, self.length = axis, length
        self.here, self.count = jax.lax.axis_index(axis), jax.lax.axis_size(axis)

    def starts(self) -> Array:
        return (self.here * self.length)[None]

    def all_starts(self) -> Array:
        return jnp.arange(self.count)[:, None] * self.length

    def gathered(self, x: Array) -> Array:
        """The pieces of all devices, `n p b t ...`."""
        return jax.lax.all_gather(x, self.axis)[:, None]

    def out(self, x: Array) -> Array:
        """The pieces of this device, `p b t ...`."""
        return x[None]

    def back(self, x: Array) -> Array:
        return x[0]


class _Deal(_Whole):
    """Device i has pieces i and 2n - 1 - i; at home it has 2i and 2i + 1, one of which is even in either case."""

    def starts(self) -> Array:
        return jnp.stack([self.here, 2 * self.count - 1 - self.here]) * (self.length // 2)

    def all_starts(self) -> Array:
        pieces = jnp.arange(2 * self.count) * (self.length // 2)
        return jnp.stack([pieces[: self.count], pieces[: self.count - 1 : -1]], axis=1)

    def gathered(self, x: Array) -> Array:
        pieces = jax.lax.all_gather(jnp.stack(jnp.split(x, 2, axis=1)), self.axis, tiled=True)
        return jnp.stack([pieces[: self.count], pieces[: self.count - 1 : -1]], axis=1)

    def out(self, x: Array) -> Array:
        even, odd = (
            jax.lax.ppermute(half, self.axis, moves)
            for half, moves in zip(jnp.split(x, 2, axis=1), self._moves(), strict=True)
        )
        return jnp.where(self.here % 2 == 0, jnp.stack([even, odd]), jnp.stack([odd, even]))

    def back(self, x: Array) -> Array:
        halves = jnp.where(self.here % 2 == 0, x, x[::-1])
        return jnp.concatenate(
            [
                jax.lax.ppermute(half, self.axis, [(there, home) for home, there in moves])
                for half, moves in zip(halves, self._moves(), strict=True)
            ],
            axis=1,
        )

    def _moves(self) -> list[list[tuple[int, int]]]:
        """From which device to which the first halves go, the even pieces, and the second ones."""
        return [
            [(i, piece if piece < self.count else 2 * self.count - 1 - piece) for i, piece in enumerate(pieces)]
            for pieces in (range(0, 2 * self.count, 2), range(1, 2 * self.count, 2))
        ]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(rule: Rule, floats: Floats, known: Known, every: Known | None) -> Array:
    return _save(rule, floats, known, every)[0]


def _save(rule: Rule, floats: Floats, known: Known, every: Known | None) -> tuple[Array, Any]:
    """The output, and what the backward pass needs."""
    keys = _own_keys(rule, floats, known, every)
    read = functools.partial(_read, rule, floats, known)
    found = read(keys, None)

    def turn(carry: tuple[Keys, Part], distance: Array) -> tuple[tuple[Keys, Part], None]:
        keys, found = carry
        return (_next_keys(rule, floats, every, keys, distance), read(keys, found, distance)), None

    count = jax.lax.axis_size(rule.axis)
    (_, found), _ = jax.lax.scan(
        turn,
        (_next_keys(rule, floats, every, keys, 0), found),
        jnp.arange(1, count),
        unroll=count <= UNROLLED or 1,
    )
    output, statistics, sink_weight = found.output, found.statistics, None
    if floats.sink_scores is not None:
        sink = floats.sink_scores.astype(output.dtype)[None, None, None]
        statistics, share, sink_weight = rule.weights.merge_sink(statistics, sink)
        output = output * share[..., None]
    if not rule.wide:
        output = output.astype(floats.v.dtype)
    return output, (floats, known, every, Part(output, statistics), sink_weight)


def _pull(rule: Rule, saved: Any, doutput: Array) -> tuple[Floats, None, None]:
    """The gradients of the differentiable arrays."""
    floats, known, every, found, sink_weight = jax.lax.optimization_barrier(saved)
    keys = _own_keys(rule, floats, known, every)
    pull = functools.partial(_pull_pairs, rule, floats, known, found, doutput)
    wide = wide_dtype(floats.q.dtype)
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, wide), floats._replace(sink_scores=None))

    def pulled(keys: Keys, total: _Total, distance: Any) -> _Total:
        if not rule.gathers:
            return _with_keys_passed_on(rule, pull(keys, total, distance))
        device = _device(rule, 0 if distance is None else distance)
        one = total.floats._replace(k=jnp.zeros(keys.k.shape, wide), v=jnp.zeros(keys.v.shape, wide))
        new = pull(keys, _Total(one, None), distance).floats
        k, v = _put(total.floats.k, device, new.k), _put(total.floats.v, device, new.v)
        return _Total(new._replace(k=k, v=v), None)

    def turn(carry: tuple[Keys, _Total], distance: Array) -> tuple[tuple[Keys, _Total], None]:
        keys, total = carry
        return (_next_keys(rule, floats, every, keys, distance), pulled(keys, total, distance)), None

    # The gates of keys have gradients as keys and as queries; those of the keys travel.
    first = pulled(keys, _Total(nothing, nothing.forget), None)
    count = jax.lax.axis_size(rule.axis)
    (_, total), _ = jax.lax.scan(
        turn,
        (_next_keys(rule, floats, every, keys, 0), first),
        jnp.arange(1, count),
        unroll=count <= UNROLLED or 1,
    )
    gradients = total.floats
    if gradients.forget is not None and total.key_forget is not None:
        gradients = gradients._replace(forget=gradients.forget + total.key_forget)
    if sink_weight is not None:
        delta = jnp.sum(found.output.astype(wide) * doutput.astype(wide), axis=-1)
        dsink = -jnp.sum(sink_weight * delta, axis=tuple(range(delta.ndim - 1)))
        gradients = gradients._replace(sink_scores=dsink)
    return jax.tree.map(lambda gradient, x: gradient.astype(x.dtype), gradients, floats), None, None


_ring.defvjp(_save, _pull)


class _Pair(NamedTuple):
    """Pieces of queries and of keys that see each other: places among a device's own, numbers or traced."""

    query: Any
    key: Any


def _pairs(rule: Rule, distance: Array | None) -> list[tuple[bool, list[_Pair]]]:
    """The pairs of a turn, in calls of equal shape, and whether the calls have a causal mask.

    Args:
      distance: how many devices the keys have travelled; `None`: this device's own.
    """
    if not rule.causal:
        return [(False, [_Pair(0, 0)])]
    if distance is None:
        return [(True, [_Pair(0, 0), _Pair(1, 1)]), (False, [_Pair(1, 0)])]
    # Keys from a device before this one: both pieces of queries see the first of keys. From one after it: the second
    # piece of queries sees both of keys. The second piece of queries sees the first of keys in either case.
    before = distance <= jax.lax.axis_index(rule.axis)
    return [(False, [_Pair(1, 0), _Pair(jnp.where(before, 0, 1), jnp.where(before, 0, 1))])]


def _read(
    rule: Rule, floats: Floats, known: Known, keys: Keys, found: Part | None, distance: Array | None = None
) -> Part:
    """What the queries have read with the keys that are here, in float32 or wider."""
    for causal, pairs in _pairs(rule, distance):
        arguments = _arguments([pair.query for pair in pairs], [pair.key for pair in pairs], known, keys.known)
        given, rests = arguments(floats.q, keys.k, keys.v, floats.forget, keys.forget, floats.slopes)
        part = pallas_kernels.attention_part(
            **given,
            rests=rests,
            segments=_segments(pairs, known, keys.known),
            **_options(rule, causal),
        )
        wide = wide_dtype(part.output.dtype)
        part = Part(part.output.astype(wide), part.statistics)
        split = jax.tree.map(functools.partial(_split, len(pairs)), part)
        if found is None:
            found = split
            continue
        for place, pair in enumerate(pairs):
            found = _merged(rule, found, pair.query, jax.tree.map(lambda x, place=place: x[place], split))
    assert found is not None
    return found


def _merged(rule: Rule, found: Part, piece: Any, part: Part) -> Part:
    """What was found, with what one piece of queries read of further keys."""
    before = jax.tree.map(lambda x: _at(x, piece), found)
    statistics, old, new = rule.weights.merge(before.statistics, part.statistics)
    old, new = (factor[..., None] if factor.ndim else factor for factor in (old, new))
    output = old * before.output + new * part.output
    return jax.tree.map(lambda x, one: _put(x, piece, one), found, Part(output, statistics))


def _pull_pairs(
    rule: Rule, floats: Floats, known: Known, found: Part, doutput: Array, keys: Keys, total: _Total, distance: Any
) -> _Total:
    """The gradients so far, with those of the pairs of one turn."""
    for causal, pairs in _pairs(rule, distance):
        queries, columns = [pair.query for pair in pairs], [pair.key for pair in pairs]
        arguments = _arguments(queries, columns, known, keys.known)
        traced = floats.q, keys.k, keys.v, floats.forget, keys.forget, floats.slopes
        given, pull, rests = jax.vjp(arguments, *traced, has_aux=True)
        gradients = pallas_kernels.attention_part_gradients(
            **given,
            rests=rests,
            part=jax.tree.map(lambda x, queries=queries: _taken(x, queries), found),
            doutput=_taken(doutput, queries),
            segments=_segments(pairs, known, keys.known),
            **_options(rule, causal),
        )
        given_gradients = {name: gradient for name, gradient in gradients._asdict().items() if name in given}
        q, k, v, forget, key_forget, slopes = pull(
            {name: gradient.astype(given[name].dtype) for name, gradient in given_gradients.items()}
        )
        new = _Total(Floats(q, k, v, forget, slopes), key_forget)
        total = jax.tree.map(jnp.add, total, new)
    return total


def _options(rule: Rule, causal: bool) -> dict[str, Any]:
    return {
        'weights': rule.weights,
        'scale': rule.scale,
        'causal': causal,
        'implementation': rule.implementation,
    }


def _arguments(
    queries: list[Any], columns: list[Any], known: Known, keys_known: Known
) -> Callable[..., tuple[dict[str, Any], tuple[Array, Array] | None]]:
    """A function of the differentiable arrays to those of a call for pairs of pieces, stacked along the rows.

    And what rounding took from the terms, where these are sums of gates.
    """

    def of(
        q: Array, k: Array, v: Array, forget: Array | None, key_forget: Array | None, slopes: Array | None
    ) -> tuple[dict[str, Any], tuple[Array, Array] | None]:
        found = {'q': _taken(q, queries), 'k': _taken(k, columns), 'v': _taken(v, columns)}
        terms: list[Array] = [jnp.zeros((1, 1, 1))] * 2
        rests: tuple[Array, Array] | None = None
        if forget is not None and key_forget is not None:
            # Sums are counted from the first query of a pair, so that those of near keys have all of their digits.
            first = _First(
                jax.lax.stop_gradient(_taken(forget[:, :, :1], queries)),
                None if known.segments is None else _taken(known.segments[:, :, :1], queries),
            )
            of_queries = first.since(forget, known, queries)
            of_keys = first.since(key_forget, keys_known, columns)
            terms, rests = [of_queries[0], of_keys[0]], (of_queries[1], of_keys[1])
        if slopes is not None:
            # Distances are counted from the first query of a pair, so that those of near keys are exact.
            here = jnp.arange(q.shape[2])[None]
            gaps = jnp.stack(
                [keys_known.start[key] - known.start[query] for query, key in zip(queries, columns, strict=True)]
            )
            for place, positions in enumerate((jnp.zeros_like(gaps)[:, None] + here, gaps[:, None] + here)):
                # Slopes of 16 bits would round positions to their digits.
                rows = jnp.repeat(positions, q.shape[1], axis=0).astype(wide_dtype(slopes.dtype))
                terms[place] = terms[place] - rows[..., None] * slopes[None, None]
        if forget is not None or slopes is not None:
            found |= {'query_terms': terms[0], 'key_terms': terms[1]}
        return found, rests

    return of


class _First(NamedTuple):
    """The first queries of pairs: the sums of the gates up to them, `b 1 h`, and their documents, `b 1` or `None`."""

    forget: Array
    segments: Array | None

    def since(self, forget: Array, known: Known, pieces: list[Any]) -> tuple[Array, Array]:
        """The sums less those up to these queries, `b t h`, and what rounding took from them, which has no gradient.

        Sums of other documents are left as they are: they begin later. No other document than that of its first query
        is in two pieces of a pair, unless both are the same one.
        """
        begun = self.forget
        if self.segments is not None and known.segments is not None:
            begun = jnp.where((_taken(known.segments, pieces) == self.segments)[..., None], begun, 0)
        sums = _taken(forget, pieces)
        near = sums - begun
        # What the difference of two numbers lost is a number too (Knuth's sum of two).
        back = near - sums
        lost = jax.lax.stop_gradient((sums - (near - back)) - (begun + back))
        if known.rest is not None:
            lost = lost + _taken(known.rest, pieces)
        whole = near + lost
        return whole, jax.lax.stop_gradient(near - whole) + lost


def _segments(pairs: list[_Pair], known: Known, keys_known: Known) -> tuple[Array, Array] | None:
    if known.segments is None or keys_known.segments is None:
        return None
    return (
        _taken(known.segments, [pair.query for pair in pairs]),
        _taken(keys_known.segments, [pair.key for pair in pairs]),
    )


def _taken(x: Array, pieces: list[Any]) -> Array:
    """Pieces of an array `p b ...`, behind each other along the rows."""
    return jnp.concatenate([_at(x, piece) for piece in pieces])


def _split(pieces: int, x: Array) -> Array:
    return x.reshape(pieces, -1, *x.shape[1:])


def _at(x: Array, piece: Any) -> Array:
    return x[piece] if isinstance(piece, int) else jax.lax.dynamic_index_in_dim(x, piece, keepdims=False)


def _put(x: Array, piece: Any, one: Array) -> Array:
    return jax.lax.dynamic_update_index_in_dim(x, one.astype(x.dtype), piece, 0)


def _device(rule: Rule, distance: Any) -> Array:
    """The device so far before this one, around the ring."""
    return (jax.lax.axis_index(rule.axis) - distance) % jax.lax.axis_size(rule.axis)


def _own_keys(rule: Rule, floats: Floats, known: Known, every: Known | None) -> Keys:
    """The keys of this device."""
    return _gathered_keys(rule, floats, every, 0) if rule.gathers else Keys(floats.k, floats.v, floats.forget, known)


def _next_keys(rule: Rule, floats: Floats, every: Known | None, keys: Keys, distance: Any) -> Keys:
    """The keys of the turn after that of `distance`, in which `keys` are here."""
    return _gathered_keys(rule, floats, every, distance + 1) if rule.gathers else _passed_on(rule, keys)


def _gathered_keys(rule: Rule, floats: Floats, every: Known | None, distance: Any) -> Keys:
    """The keys, of all that are held, of the device `distance` before this one."""
    assert every is not None
    device = _device(rule, distance)
    return jax.tree.map(lambda x: _at(x, device), Keys(floats.k, floats.v, None, every))


def _passed_on(rule: Rule, tree: Any) -> Any:
    """What the device before this one holds."""
    count = jax.lax.axis_size(rule.axis)
    return jax.tree.map(
        lambda x: jax.lax.ppermute(x, rule.axis, [(place, (place + 1) % count) for place in range(count)]), tree
    )


def _with_keys_passed_on(rule: Rule, total: _Total) -> _Total:
    """The gradients so far, those of the keys handed on with them."""
    k, v, forget = _passed_on(rule, (total.floats.k, total.floats.v, total.key_forget))
    return _Total(total.floats._replace(k=k, v=v), forget)
