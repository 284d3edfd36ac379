"""The cost of a call of a core, from its shapes alone: operations, bytes and exponentials, forward and backward.

A multiplication and an addition count as two operations. Model costs are those of the definition, whichever form
runs: matrix products over the pairs of queries and keys that are visible by position, the steps of a recurrence as in
its equation. Bytes are those of arguments and results, each moved once; in the backward pass of arguments, or of
results where these serve, and of the gradients of both. Arrays count whole, of one type, states and decays in float32:
heads that share keys and decays that are constant take less. What may be kept is not computed again.

Executed costs are those of a form, including recomputation in the backward pass and, where it works in chunks, the
products within them. Documents, which hide more, are known only when a call runs, and are ignored.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.experimental.pallas as pl

from pallas_kernels import target, tiling

IN_CHUNKS = {'mosaic_gpu': 64}
"""Steps of a chunk of `linear_attention` and `delta_rule`, for forms where it does not depend on the call."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one pass.

    Attributes:
      flops: floating-point operations.
      bytes: bytes of arguments and results.
      exponentials: transcendental functions.
    """

    flops: int = 0
    bytes: int = 0
    exponentials: int = 0

    def __add__(self, other: 'Cost') -> 'Cost':
        return Cost(self.flops + other.flops, self.bytes + other.bytes, self.exponentials + other.exponentials)

    def __mul__(self, times: int) -> 'Cost':
        return Cost(self.flops * times, self.bytes * times, self.exponentials * times)

    def estimate(self, *arrays: Any) -> pl.CostEstimate:
        """The cost estimate for the compiler of a kernel that moves these arrays, or trees of them, once."""
        moved = sum(math.prod(array.shape) * array.dtype.itemsize for array in jax.tree.leaves(arrays))
        return pl.CostEstimate(flops=self.flops, bytes_accessed=moved, transcendentals=self.exponentials)


@dataclasses.dataclass(frozen=True)
class Passes:
    """The costs of both passes."""

    forward: Cost
    backward: Cost

    def __add__(self, other: 'Passes') -> 'Passes':
        return Passes(self.forward + other.forward, self.backward + other.backward)


@dataclasses.dataclass(frozen=True)
class CallCost:
    """The cost of a call: of its definition (`model`), and of the implementation that runs (`executed`)."""

    model: Passes
    executed: Passes


def visible_pairs(t: int, s: int, *, causal: bool, window: int | None = None, sinks: int = 0) -> int:
    """The number of pairs of a query and a key visible by position; query i is at `i + s - t` of the keys."""
    first = s - t
    if window is None:
        return _clipped(first + 1, t, s) if causal else t * s
    sinks = min(sinks, s)
    far = first + 1 if causal else first + window
    near = first - window + 1
    pairs = _clipped(far, t, s) - _clipped(near, t, s) + _clipped(near, t, sinks)
    return pairs if causal else pairs + t * sinks - _clipped(far, t, sinks)


def computed_scores(t: int, s: int, tile: tiling.AttentionTile, *, causal: bool, window: int | None, sinks: int) -> int:
    """The scores of all tiles that have a visible pair, hidden ones and padding among them."""
    if s == 0:
        return 0
    tiles = tiling.visible_tiles(t, s, tile, causal=causal, window=window, sinks=sinks)
    return tile.queries * tile.keys * sum(len(part) for parts in tiles for part in parts)


def _clipped(first: int, count: int, most: int) -> int:
    """The sum of `count` consecutive integers from `first` on, each clipped to the range from 0 to `most`."""

    def up_to(last: int) -> int:
        rising = max(min(last, most), 0)
        return rising * (rising + 1) // 2 + max(last - most, 0) * most

    return up_to(first + count - 1) - up_to(first - 1)


def attention(
    *,
    b: int,
    t: int,
    s: int,
    h: int,
    g: int,
    k: int,
    v: int,
    causal: bool = True,
    window: int | None = None,
    sinks: int = 0,
    itemsize: int = 2,
    implementation: str = 'reference',
) -> CallCost:
    """Two products forward, four backward; forms recompute the scores, those for GPUs and TPUs twice.

    Forms compute whole tiles of scores. The tiles for GPUs are those of a softmax without biases, by rule.
    """
    pairs = b * h * visible_pairs(t, s, causal=causal, window=window, sinks=sinks)
    arrays = itemsize * b * (t * h * (k + v) + s * g * (k + v))
    model = Passes(Cost(2 * pairs * (k + v), arrays, pairs), Cost(4 * pairs * (k + v), 2 * arrays))

    def computed(queries: int, keys: int) -> int:
        tile = tiling.AttentionTile(queries, keys)
        return b * h * computed_scores(t, s, tile, causal=causal, window=window, sinks=sinks)

    # What is computed forward, for the gradients of queries, and for those of keys and values.
    done = of_queries = of_keys = pairs
    # Passes over the scores for the gradients of keys and of values.
    turns = 1
    match implementation:
        case 'reference' | 'xla':
            tile = tiling.attention(t, s) if implementation == 'xla' else None
            done = b * h * t * s if tile is None else computed(tile.queries, tile.keys)
        case 'mosaic_tpu':
            tile = tiling.attention_tpu(t, s)
            done = of_queries = of_keys = computed(tile.queries, tile.keys)
        case 'mosaic_gpu':
            steps = _hopper_steps(k, v, h // g)
            done, of_queries = computed(128, steps.forward), computed(128, steps.query_gradients)
            of_keys, turns = computed(steps.key_gradients, 128), 1 if steps.together else 2
    # The portable form keeps few weights, and computes many again.
    kept = implementation == 'xla' and tiling.attention(t, s) is None and tiling.keeps_weights(b * h * t * s)
    match implementation:
        case 'reference' | 'xla' if kept or implementation == 'reference':
            back = Cost(4 * done * (k + v), model.backward.bytes)
        case 'mosaic_gpu' | 'mosaic_tpu':
            products = of_queries * (2 * k + v) + of_keys * ((1 + turns) * k + 2 * v)
            back = Cost(2 * products, model.backward.bytes, of_queries + turns * of_keys)
        case _:
            back = Cost(2 * done * (3 * k + 2 * v), model.backward.bytes, done)
    return CallCost(model, Passes(Cost(2 * done * (k + v), arrays, done), back))


def _hopper_steps(k: int, v: int, r: int) -> tiling.HopperAttentionTile:
    """Raises ValueError for heads that the kernels do not take."""
    padded = -(-k // 64) * 64, -(-v // 64) * 64
    # Of each query the backward pass knows both statistics of the softmax, and what its gradients have in common.
    found = tiling.attention_hopper(*padded, r, vectors=0, numbers=3, bias=False)
    if found is None:
        raise ValueError(f'attention: k={k} and v={v} at {r} query heads a group; expected heads that mosaic_gpu takes')
    return found


def linear_attention(
    *,
    b: int,
    t: int,
    h: int,
    k: int,
    v: int,
    decay: str | None = None,
    itemsize: int = 2,
    implementation: str = 'reference',
) -> CallCost:
    """A step decays the state, `k v` operations, and writes and reads it, `2 k v` each; backward twice that.

    `decay` is `None`, 'scalar' or 'vector'. In chunks of c steps each also has products with the others,
    `c (k + v)` twice, and the state decays once a chunk.
    """
    steps, state = b * t * h, k * v
    numbers = {None: 0, 'scalar': 1, 'vector': k}[decay]
    taken = steps * (itemsize * (2 * k + v) + 4 * numbers) + 4 * b * h * state
    moved, moved_back = _moved(taken, steps * itemsize * v + 4 * b * h * state)
    per_step = (4 + (decay is not None)) * state
    # For the decays, which scale the gradient of the state, and whose gradient is a sum over the state times that.
    per_step_back = 8 * state + 3 * state * (decay is not None)
    model = Passes(Cost(steps * per_step, moved, steps * numbers), Cost(steps * per_step_back, moved_back))
    if implementation == 'reference':
        return CallCost(model, model)
    if implementation == 'mosaic_gpu':
        return _of_steps(model, _linear_attention_on_hopper(k, v, decay), steps)
    c = _chunk('linear_attention', implementation, b, t, h, k, v, decay)
    exponentials = _exponentials('linear_attention', implementation, c, decay, k)
    if implementation == 'mosaic_tpu' and decay == 'vector':
        # Where decays are moderate, with one product for scores. Sums of decays are products too, in three parts.
        ahead = Cost(steps * (4 * state + 2 * c * (7 * k + v)), moved, steps * exponentials[0])
        back = steps * (10 * state + 2 * c * (24 * k + 2 * v))
    else:
        ahead = Cost(steps * (4 * state + 2 * c * (k + v)), moved, steps * exponentials[0])
        back = 3 * ahead.flops
        if implementation == 'mosaic_tpu':
            # Of states what is written is made again, and not what is read. Gradients of decays take a product `c c`.
            back = steps * (10 * state + 2 * c * (3 * k + 2 * v + (c if decay is not None else 0)))
    return CallCost(model, Passes(ahead, Cost(back, moved_back, steps * exponentials[1])))


def _linear_attention_on_hopper(k: int, v: int, decay: str | None) -> Passes:
    """What the kernels compute a step; backward the states again, their gradients, and those of arguments."""
    c, state = IN_CHUNKS['mosaic_gpu'], k * v
    if decay == 'vector':
        found, pulled = halved_products()
        return Passes(
            Cost(4 * state + 2 * c * (found * k + v), 0, _halved_exponentials(k)),
            Cost(10 * state + 2 * c * ((found + pulled) * k + 2 * v), 0, 2 * _halved_exponentials(k)),
        )
    # Scores, and their gradients, are computed for every tile of the channels of a result.
    of_keys, of_values = -(-k // c), -(-v // c)
    if k <= 2 * c:
        # Gradients of keys and values in one kernel, for up to two tiles of values at a time.
        turns = of_values if of_values % 2 else of_values // 2
        pulled, exponentials = (3 + turns) * k + (2 + of_keys) * v, of_keys + turns
    else:
        pulled, exponentials = (4 + of_values) * k + (1 + 2 * of_keys) * v, 2 * of_keys + of_values
    alone = 1 if decay == 'scalar' else 0
    return Passes(
        Cost(4 * state + 2 * c * (of_values * k + v), 0, c * of_values + alone),
        Cost(10 * state + 2 * c * pulled, 0, c * exponentials + 2 * alone),
    )


def delta_rule(
    *,
    b: int,
    t: int,
    h: int,
    k: int,
    v: int,
    decay: str | None = None,
    erase: bool = False,
    itemsize: int = 2,
    implementation: str = 'reference',
) -> CallCost:
    """A step decays the state, `k v` operations, reads it for its key, writes, and reads it for its query, `2 k v`
    each.

    `erase` are keys of their own that the state is read for. In chunks of c steps each also has the products with the
    others and its part of a triangular inverse.
    """
    steps, state = b * t * h, k * v
    numbers = {None: 0, 'scalar': 1, 'vector': k}[decay]
    taken = steps * (itemsize * ((2 + erase) * k + v) + 4 * (1 + numbers)) + 4 * b * h * state
    moved, moved_back = _moved(taken, steps * itemsize * v + 4 * b * h * state)
    per_step = (6 + (decay is not None)) * state + 2 * v
    per_step_back = 12 * state + 3 * state * (decay is not None) + 6 * v
    model = Passes(Cost(steps * per_step, moved, steps * numbers), Cost(steps * per_step_back, moved_back))
    if implementation == 'reference':
        return CallCost(model, model)
    if implementation == 'mosaic_gpu' and not erase:
        return _of_steps(model, _delta_rule_on_hopper(k, v, decay), steps)
    c = _chunk('delta_rule', implementation, b, t, h, k, v, decay)
    within = 2 * c * ((2 * _products(implementation, c, decay) + 1) * k + 2 * v)
    # Kernels serve keys that erase by those of `diagonal_low_rank`.
    kernels = 'diagonal_low_rank' if erase and implementation != 'xla' else 'delta_rule'
    exponentials = _exponentials(kernels, implementation, c, decay, k)
    return _of_steps(model, _solved(6 * state + within, _inverse(c, implementation), exponentials), steps)


def _delta_rule_on_hopper(k: int, v: int, decay: str | None) -> Passes:
    """What the kernels compute a step; backward chunks and states again, their gradients, and those of arguments."""
    c, state = IN_CHUNKS['mosaic_gpu'], k * v
    # A factor of what the inverse is multiplied with is in two parts; its gradient is one of its products.
    inverse, _ = _inverse(c, 'mosaic_gpu')
    if decay == 'vector':
        found, pulled = halved_products(erases=True)
        return Passes(
            Cost(6 * state + 2 * c * ((found + 2) * k + 3 * v) + inverse, 0, _halved_exponentials(k)),
            Cost(16 * state + 2 * c * ((found + pulled + 2) * k + 7 * v) + inverse, 0, 2 * _halved_exponentials(k)),
        )
    # Scores, and their gradients, are computed for every tile of the channels of a result.
    of_keys, of_values = -(-k // c), -(-v // c)
    alone = 1 if decay == 'scalar' else 0
    return Passes(
        Cost(6 * state + 2 * c * ((3 + of_values) * k + 3 * v) + inverse, 0, c * (1 + of_values) + alone),
        Cost(16 * state + 2 * c * (10 * k + (5 + 3 * of_keys) * v) + inverse, 0, c * (2 + 3 * of_keys) + 2 * alone),
    )


def diagonal_low_rank(
    *,
    b: int,
    t: int,
    h: int,
    k: int,
    v: int,
    keys: int = 1,
    decay: str | None = None,
    itemsize: int = 2,
    implementation: str = 'reference',
) -> CallCost:
    """A step decays the state, `k v` operations, reads it twice and writes it under one or two `keys`, `2 k v` each.

    In chunks of c steps each also has the products with the others and its part of a triangular inverse.
    """
    steps, state = b * t * h, k * v
    numbers = {None: 0, 'scalar': 1, 'vector': k}[decay]
    taken = steps * (itemsize * ((2 + keys) * k + v) + 4 * numbers) + 4 * b * h * state
    moved, moved_back = _moved(taken, steps * itemsize * v + 4 * b * h * state)
    per_step = (4 + 2 * keys + (decay is not None)) * state + (2 - keys) * v
    per_step_back = (8 + 4 * keys + 3 * (decay is not None)) * state + (2 - keys) * 2 * v
    model = Passes(Cost(steps * per_step, moved, steps * numbers), Cost(steps * per_step_back, moved_back))
    if implementation == 'reference':
        return CallCost(model, model)
    c = _chunk('delta_rule', implementation, b, t, h, k, v, decay)
    products = 2 * keys * _products(implementation, c, decay)
    within = 2 * c * ((products + 1) * k + (2 * keys) * v)
    exponentials = _exponentials('diagonal_low_rank', implementation, c, decay, k, keys)
    others = (4 + 2 * keys) * state + within
    return _of_steps(model, _solved(others, _inverse(c, implementation), exponentials), steps)


def _solved(others: int, inverse: tuple[int, int], exponentials: tuple[int, int]) -> Passes:
    """A step of chunks that are solved: a triangular inverse in either pass, and other products, thrice backward."""
    return Passes(
        Cost(others + inverse[0], 0, exponentials[0]),
        Cost(3 * others + inverse[1], 0, exponentials[1]),
    )


def _of_steps(model: Passes, step: Passes, steps: int) -> CallCost:
    """The cost of a form that computes so much a step, and moves what its definition does."""
    return CallCost(
        model,
        Passes(
            step.forward * steps + Cost(0, model.forward.bytes), step.backward * steps + Cost(0, model.backward.bytes)
        ),
    )


def _products(implementation: str, c: int, decay: str | None) -> int:
    """Products with the steps of a chunk of c that what reads takes for a key: by halves where channels have decays."""
    if implementation == 'xla' or decay != 'vector':
        return 1
    return halved_products()[0] if implementation == 'mosaic_gpu' else c.bit_length() - 1


def halved_products(*, erases: bool = False) -> tuple[int, int]:
    """Products with the steps of a chunk that a step and key channel takes on Hopper at most, with a decay of its own.

    In the kernel of weights, and in that of their gradients: for every size of halves and within blocks, read by
    queries and, if they erase, by keys; and the sums of log decays, there and to both ends, in two parts, as products
    too. The gradients of log decays are two such sums, and what a step reads of itself is apart.
    """
    sums, reads = 2 * (tiling.HALVES + 3), (tiling.HALVES + 1) * (1 + erases)
    return sums + reads, sums + 2 * reads + 6


def _halved_exponentials(k: int) -> int:
    """Those of a step in either kernel: for every size of halves, to both ends, and within blocks both ways."""
    return k * (tiling.HALVES + 4)


def _moved(taken: int, given: int) -> tuple[int, int]:
    """The bytes of both passes, from those of arguments and of results: backward the gradients of both come to them."""
    return taken + given, 2 * taken + given


PORTABLE_EXPONENTIALS = {
    'linear_attention': (1, 1, 3, 5),
    'delta_rule': (1, 2, 1, 1),
    'diagonal_low_rank': (2, 3, 1, 1),
}
"""Exponentials of a step of portable forms: for each other step of its chunk, and alone, where decays are numbers; for
each channel where they are vectors that decay moderately, forward and backward."""


def _exponentials(core: str, implementation: str, c: int, decay: str | None, k: int, keys: int = 1) -> tuple[int, int]:
    """The exponentials of a step in chunks of `c`, forward and backward, where it writes under so many keys."""
    others, alone, channels, channels_back = PORTABLE_EXPONENTIALS[core]
    if implementation == 'xla':
        within = others * c + alone
        return {None: (0, 0), 'scalar': (within, within), 'vector': (channels * k, channels_back * k)}[decay]
    if implementation == 'mosaic_tpu':
        return _exponentials_on_tpus(core, c, decay, k, keys)
    # Kernels of `diagonal_low_rank` on Hopper: queries and what else reads by themselves.
    within = {None: c, 'scalar': c + 3, 'vector': 2 * keys * _halved_exponentials(k)}[decay]
    return within, 2 * within


def _exponentials_on_tpus(core: str, c: int, decay: str | None, k: int, keys: int) -> tuple[int, int]:
    """Those of the kernels for TPUs."""
    if core == 'linear_attention':
        if decay != 'vector':
            return c, c
        # From the middle of a chunk and back, and to both ends; backward once more for the states.
        return 4 * k, 5 * k
    # What reads before the state decays in its step has sums of its own.
    apart = core == 'diagonal_low_rank'
    if decay != 'vector':
        within = (2 * c + 3 if apart else c + 2) if decay == 'scalar' else 0
        return within, 2 * within
    # For every size of halves those of what reads and of keys, and to both ends; backward once more without queries.
    sizes = c.bit_length() - 1
    within = (2 + keys) * sizes + 2 + apart
    return k * within, k * (2 * within - sizes - apart)


def _inverse(c: int, implementation: str) -> tuple[int, int]:
    """A step's part of the inverse of a chunk, forward and backward, where it is computed again before its gradient.

    In kernels by blocks, two products a size, each in three of 16 bits; the gradient is two products.
    """
    if c == 1:
        return 0, 0
    two = 4 * c * c * (1 if implementation == 'xla' else 3)
    ahead = 2 * c * c // 3 if implementation == 'xla' else two * max(c.bit_length() - 2, 0)
    return ahead, ahead + two


def _chunk(core: str, implementation: str, b: int, t: int, h: int, k: int, v: int, decay: str | None) -> int:
    """The steps of a chunk."""
    vector = decay == 'vector'
    if implementation in IN_CHUNKS or t == 0:
        return IN_CHUNKS.get(implementation, 1)
    if core == 'linear_attention':
        if implementation == 'mosaic_tpu':
            return tiling.linear_attention_tpu(t, k, v, vector=vector).steps
        return tiling.linear_attention(b, t, h * max(k, v), target.current().platform, vector=vector).steps
    if implementation == 'mosaic_tpu':
        return tiling.delta_rule_tpu(t, k, v).steps
    return tiling.delta_rule(b, t, h * max(k, v), target.current().platform).steps


def linear_scan(
    *, b: int, t: int, d: int, is_complex: bool = False, itemsize: int = 2, implementation: str = 'reference'
) -> CallCost:
    """A multiplication and an addition a step and channel; backward one more multiplication, for the decays."""
    numbers, size = b * t * d, itemsize * (2 if is_complex else 1)
    state = 4 * b * d * (2 if is_complex else 1)
    forward, backward = (8, 14) if is_complex else (2, 3)
    moved, moved_back = 3 * size * numbers + 2 * state, 5 * size * numbers + 3 * state
    model = Passes(Cost(forward * numbers, moved), Cost(backward * numbers, moved_back))
    return CallCost(model, model)


def selective_scan(
    *, b: int, t: int, d: int, n: int, skip: bool = False, itemsize: int = 2, implementation: str = 'reference'
) -> CallCost:
    """Six operations for every number of the state at every step forward, fifteen backward; forms rerun the former.

    On a GPU states are computed again, with four operations a number, for the spans that another follows, in both
    passes, and in the backward pass twice but for the last group of a tile.
    """
    numbers = b * t * d * n
    taken = itemsize * b * t * (2 * d + 2 * n) + 4 * (d * n + skip * d + b * d * n)
    moved, moved_back = _moved(taken, itemsize * b * t * d + 4 * b * d * n)
    forward = Cost(6 * numbers + (1 + 2 * skip) * b * t * d, moved, numbers)
    backward = Cost(15 * numbers + (2 + 4 * skip) * b * t * d, moved_back)
    model = Passes(forward, backward)
    if implementation == 'reference':
        return CallCost(model, model)
    if implementation == 'mosaic_gpu':
        n = -(-n // 16) * 16
        tile = tiling.selective_scan_gpu(b, t, -(-d // 64), n, itemsize, itemsize)
        ahead = numbers - numbers // tile.spans
        states = ahead + 2 * numbers - numbers * tiling.selective_scan_gpu_group(n) // tile.rows
        more = Passes(Cost(4 * ahead, 0, ahead), Cost(4 * states, 0, states))
        return CallCost(model, model + more)
    again = Cost(backward.flops + forward.flops, backward.bytes, 2 * numbers)
    return CallCost(model, Passes(forward, again))


def long_conv(
    *,
    b: int,
    t: int,
    d: int,
    w: int,
    packed: bool = False,
    itemsize: int = 2,
    result: int | None = None,
    in_parts: bool = False,
    implementation: str = 'reference',
) -> CallCost:
    """A product and a sum for every token and tap that meet, or Fourier transforms where these take less.

    Backward as much for each of the two gradients. The reference takes no transforms, nor does the portable form for
    short rows or few taps; with documents it has transforms for every halving of the row. Backward makes them again.
    `result` is the size of a result's number, if not that of an input's. `in_parts` are taps that the kernel for TPUs
    multiplies as two numbers, beside x of bfloat16. Kernels count a row of documents as one.
    """
    pairs = visible_pairs(t, t, causal=True, window=w)
    direct, transforms = 2 * b * d * pairs, _transforms(b, 2 * t, d)
    moved, moved_back = _moved(itemsize * (b * t * d + min(w, t) * d), (result or itemsize) * b * t * d)
    least = min(direct, transforms)
    model = Passes(Cost(least, moved), Cost(2 * least, moved_back))
    if implementation == 'reference':
        return CallCost(model, Passes(Cost(direct, moved), Cost(2 * direct, moved_back)))
    if implementation == 'mosaic_tpu':
        executed = _long_conv_tpu(b=b, t=t, d=d, w=w, packed=packed, parts=2 if in_parts else 1)
        return CallCost(model, executed + Passes(Cost(0, moved), Cost(0, moved_back)))
    if implementation == 'mosaic_gpu':
        executed = _long_conv_hopper(b=b, t=t, d=d, w=w, packed=packed)
        return CallCost(model, executed + Passes(Cost(0, moved), Cost(0, moved_back)))
    if w <= tiling.SHIFTS and t > tiling.TOEPLITZ:
        done = 2 * b * t * d * w
        return CallCost(model, Passes(Cost(done, moved), Cost(2 * done, moved_back)))
    halves = [1 << level for level in range(max(0, t - 1).bit_length())]
    if packed:
        blocks = [-(-t // (2 * half)) for half in halves]
        done = 2 * b * t * d + sum(
            2 * b * count * d * half**2 if half <= tiling.TOEPLITZ else _transforms(b * count, 2 * half, d)
            for half, count in zip(halves, blocks, strict=True)
        )
    else:
        done = 2 * b * d * t**2 if t <= tiling.TOEPLITZ else transforms
    return CallCost(model, Passes(Cost(done, moved), Cost(3 * done, moved_back)))


def _long_conv_tpu(*, b: int, t: int, d: int, w: int, packed: bool, parts: int) -> Passes:
    """Products of whole lines with every part of matrices of taps; for the gradient of taps one of blocks."""
    tile = tiling.long_conv_tpu(t, w, d, packed=packed)
    assert tile is not None
    # Within blocks documents take a product for each bit of a place, and one for the diagonal.
    lines = tile.multiplied + packed * tile.blocks * tiling.SUBLANES * tiling.LANES.bit_length()
    product = -(-b // tiling.SUBLANES) * d * lines * 2 * tiling.LANES**2
    return Passes(Cost(parts * product, 0), Cost((parts + 1) * product, 0))


def _long_conv_hopper(*, b: int, t: int, d: int, w: int, packed: bool) -> Passes:
    """Products of 64 lines with every part of matrices of taps; for the gradient of taps of lines with lines."""
    cut = tiling.long_conv_hopper(b, t, w)
    product, tiles = 2 * d * 64**3, cut.lines // 64
    # Within blocks documents take a product for each bit of a place, and one for the diagonal.
    within = 7 * tiles if packed else tiles
    convolved = within + sum(tiles // cut.programs * cut.last(program) for program in range(cut.programs))
    summed = within + sum(tiles - b * lag // 64 for lag in range(1, cut.lags))
    forward = tiling.CONV_PARTS * convolved * product
    return Passes(Cost(forward, 0), Cost(forward + summed * product, 0))


def short_conv(
    *,
    b: int,
    t: int,
    d: int,
    w: int,
    bias: bool = False,
    activation: str = 'identity',
    itemsize: int = 2,
    implementation: str = 'reference',
) -> CallCost:
    """A product and a sum for every token and tap, a sum for the bias; backward as many for each of the gradients.

    A `silu` takes an exponential, a sum and a division; backward it is computed again, of sums that no result has,
    and its slope takes five operations more. On Hopper tiles are whole, the last of channels shares some with the one
    before, and what a tile's end gives to the inputs before it is computed once more backward.
    """
    numbers, products = b * t * d, 2 * w + bias
    once, slope = (2, 5) if activation == 'silu' else (0, 0)
    again = products + once if slope else 0
    taken, given = itemsize * (numbers + (w + bias) * d), itemsize * numbers
    exponentials = numbers if once else 0
    model = Passes(
        Cost(numbers * (products + once), taken + given, exponentials),
        Cost(numbers * (again + slope + 4 * w + bias), 2 * taken + given, exponentials),
    )
    if implementation != 'mosaic_gpu':
        return CallCost(model, model)
    tile = tiling.short_conv(d)
    tiles, channels = -(-t // tile.steps), -(-d // tile.channels) * tile.channels
    done, twice = b * tiles * tile.steps * channels, b * tiles * (w - 1) * channels
    backward = done * (again + slope + 4 * w + bias) + twice * (again + slope + 2 * w)
    executed = Passes(
        Cost(done * (products + once), model.forward.bytes, done if once else 0),
        Cost(backward, model.backward.bytes, done + twice if once else 0),
    )
    return CallCost(model, executed)


def _transforms(b: int, length: int, d: int) -> int:
    """The operations of `b d` cyclic convolutions over the power of two from `length` on: three transforms."""
    size = 1 << max(0, length - 1).bit_length()
    return (2 * b + 1) * d * (5 * size * max(1, size.bit_length() - 1) // 2) + 3 * b * d * size


def softmax(*, n: int, o: int, itemsize: int = 2, implementation: str = 'reference') -> CallCost:
    """Rows `n`, entries `o`: a subtraction, an exponential, a sum and a division each.

    In two passes all is read, and its exponential computed, twice. Kernels compute it twice as well, and keep no terms.
    """
    numbers = n * o
    model = Passes(Cost(3 * numbers, 2 * itemsize * numbers, numbers), Cost(4 * numbers, 3 * itemsize * numbers))
    if implementation in ('reference', 'xla'):
        return CallCost(model, model)
    readings = 2 if implementation == 'two_pass' else 1
    forward = Cost(model.forward.flops, (readings + 1) * itemsize * numbers, 2 * numbers)
    return CallCost(model, Passes(forward, model.backward))


def softmax_topk(*, n: int, o: int, k: int, itemsize: int = 2, implementation: str = 'reference') -> CallCost:
    """The sum of a row's exponentials, k divisions; backward all of its weights again, times a number of the row.

    Finding the largest is not counted.
    """
    numbers = n * o
    small = n * k * (itemsize + 4)
    forward = Cost(2 * numbers + n * k, itemsize * numbers + small, numbers)
    model = Passes(forward, Cost(2 * numbers + 4 * n * k, 2 * itemsize * numbers + small, numbers))
    return CallCost(model, model)


def cross_entropy(*, n: int, d: int, o: int, itemsize: int = 2, implementation: str = 'reference') -> CallCost:
    """The logits, a product; two for their gradients. Forms in parts recompute the logits, those for TPUs twice."""
    product, (moved, moved_back) = 2 * n * d * o, _moved(itemsize * (n * d + o * d), 8 * n)
    model = Passes(Cost(product, moved, n * o), Cost(2 * product, moved_back))
    whole = implementation == 'reference' or (implementation == 'xla' and tiling.cross_entropy(n, o) is None)
    products = 2 if whole else 4 if implementation == 'mosaic_tpu' else 3
    back = Cost(products * product, moved_back, (products - 2) * n * o)
    return CallCost(model, Passes(model.forward, back))
