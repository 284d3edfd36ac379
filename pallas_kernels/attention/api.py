"""Attention: every query reads a weighted mean of the values it may see."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import arguments, cost, dispatch, target
from pallas_kernels.attention import around, problem, reference, xla
from pallas_kernels.attention.maps import Softmax, WeightMap

CORE = 'attention'
KERNELS = ('mosaic_gpu', 'mosaic_tpu')


@arguments.checked
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    weights: WeightMap = Softmax(),
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    sinks: int = 0,
    segments: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    slopes: jax.Array | None = None,
    log_forget: jax.Array | None = None,
    bias: jax.Array | None = None,
    temperature: jax.Array | None = None,
    sink_scores: jax.Array | None = None,
    chosen: jax.Array | None = None,
    block: int | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Reads values by the match of queries and keys (Vaswani et al., 2017, arXiv 1706.03762).

    `o_i = sum_j w_ij v_j`, the row `w_i` being the weight map of the scores of visible keys,
    `s_ij = scale temperature_i q_i . k_j + bias_ij - slope |i - j| + sum_{j < l <= i} log_forget_l`.

    Query i is at position `i + s - t` of the keys, so that the last query is at the last key. A query that sees
    no key reads zeros, and passes no gradient.

    Args:
      q: queries, `b t h k`.
      k: keys, `b s g k`; `g` divides `h`, and query head i reads group `i // (h / g)`.
      v: values, `b s g v`.
      weights: how scores become weights.
      scale: factor of the products; `None`: one over the square root of the key channels.
      causal: whether a query sees only keys at or before its position.
      window: a query sees the `window` latest keys, its own position counted (Beltagy et al., 2020, arXiv 2004.05150);
        when not causal, as many to the other side. `None`: all keys.
      sinks: the first `sinks` keys of the row stay visible besides the window (Xiao et al., 2024, arXiv 2309.17453).
      segments: a query sees only keys of its own document: integers `b t`, or a pair of them, `b t` for the queries and
        `b s` for the keys. `None`: one document a row.
      slopes: bias linear in the distance, per head, `h` (ALiBi: Press et al., 2022, arXiv 2108.12409).
      log_forget: natural logarithm of the forget gates, at most 0 and finite, `b t h` (Lin et al., 2025, arXiv
        2503.02130); a causal call with as many queries as keys, and one array of segments, a run of equal ones being a
        document. One above 0 is an error inside of `checking_values`, and where the reference is named
        outside of `jax.jit`. Kernels take differences of float32 sums along a document, which are off by 6e-8 of the
        sums: by 0.6 % of a weight at most after 65,536 gates of standard normal logits.
      bias: added to the scores, each dimension that of `b h t s` or 1; minus infinity hides a key.
      temperature: factor of the products of each query, `b t h`, or of each head, `h`.
      sink_scores: the score of one more key for every head, `h`, that has the value zero and no scale (OpenAI, 2025,
        arXiv 2508.10925); zeros add one to the denominators, minus infinity adds nothing.
      chosen: a query sees only keys in blocks that it chose (Yuan et al., 2025, arXiv 2502.11089): truth values
        `b t g n` of `n = ceil(s / block)` blocks, the first of which begins with the first key of the document. Without
        gradient; for a causal call with as many queries as keys, and one array of segments, a run of equal ones being a
        document. Kernels pass by tiles of scores in which no query chose any key.
      block: keys of such a block.
      implementation: `None` chooses; see `dispatch.select`. 'cudnn' must be named; see `attention.cudnn`.

    Returns:
      o, `b t h v`, in the type of `v`.

    Raises:
      ValueError: for shapes that do not fit, a window below 1, sinks without a window, or forget gates, scores of a
        sink or chosen blocks where they are not defined.
      TypeError: for arrays that are not floating point, non-integer `segments`, `chosen` without truth values, or a
        traced `scale`.
      NotImplementedError: for a named implementation that cannot serve the call.
    """
    sizes = arguments.match(CORE, {}, q=(q, 'b t h k'), k=(k, 'b s g k'), v=(v, 'b s g v'))
    arguments.check_channels(CORE, sizes['k'])
    arguments.check_multiple(CORE, 'k', sizes['g'], sizes['h'], 'q')
    pair = _segment_pair(segments, sizes)
    arguments.match(CORE, sizes, slopes=(slopes, 'h'), log_forget=(log_forget, 'b t h'))
    arguments.match(CORE, sizes, sink_scores=(sink_scores, 'h'))
    if temperature is not None:
        arguments.match(CORE, sizes, temperature=(temperature, 'h' if temperature.ndim == 1 else 'b t h'))
    _check_bias(bias, sizes)
    arguments.check_floating(CORE, q=q, k=k, v=v, slopes=slopes, log_forget=log_forget, bias=bias)
    arguments.check_floating(CORE, temperature=temperature, sink_scores=sink_scores)
    if sink_scores is not None and not weights.takes_sink:
        raise ValueError(
            f'{CORE}: sink_scores were given and the weights are {type(weights).__name__}; expected a softmax'
        )
    window, sinks = _within(window, sinks, sizes)
    block = _block(chosen, block, sizes)
    for name, array in (('log_forget', log_forget), ('chosen', chosen)):
        if array is not None and not (causal and sizes['t'] == sizes['s']):
            raise ValueError(
                f'{CORE}: {name} needs a causal call with as many queries as keys; '
                f'causal is {causal}, t={sizes["t"]} and s={sizes["s"]}'
            )
        if array is not None and isinstance(segments, tuple):
            raise ValueError(f'{CORE}: {name} with a pair of segments; expected one array, for queries and keys alike')
    arguments.check_not_positive(CORE, implementation, log_forget=log_forget)

    operands = problem.canonical(q, k, v, bias, slopes, log_forget, pair, chosen, block)
    extras = problem.canonical_extras(temperature, sink_scores, sizes['h'], sizes['g'])
    rule = problem.Rule(weights, sizes['k'] ** -0.5 if scale is None else scale, causal, window, sinks, block)
    here = target.current()
    candidates = {
        'reference': dispatch.Candidate(reference.attention),
        'xla': dispatch.Candidate(xla.attention),
        **{name: dispatch.kernel(CORE, name, here, rule, operands) for name in KERNELS},
        'cudnn': dispatch.kernel(CORE, 'cudnn', here, rule, operands, extras),
    }
    size = functools.partial(
        cost.attention,
        b=sizes['b'],
        t=sizes['t'],
        s=sizes['s'],
        h=sizes['h'],
        g=sizes['g'],
        k=sizes['k'],
        v=sizes['v'],
        causal=causal,
        window=window,
        sinks=sinks,
        itemsize=v.dtype.itemsize,
    )
    return problem.join_heads(dispatch.select(CORE, implementation, candidates, size)(rule, operands, extras))


@arguments.checked
def visible_counts(
    t: int,
    s: int | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
    sinks: int = 0,
    segments: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    bias: jax.Array | None = None,
) -> jax.Array:
    """Returns how many keys every query of `attention` with these arguments sees.

    For temperatures that depend on it, such as the learned scale and offset of scalable softmax,
    `temperature_i = scale_h log(n_i) + offset_h` (Nakanishi, 2025, arXiv 2501.19399).

    Args:
      t: number of queries.
      s: number of keys; `None`: as many.
      causal, window, sinks, segments, bias: as for `attention`.

    Returns:
      n, float32, `b t h`, where `b` and `h` are 1 unless segments or bias vary along them.
    """
    s = t if s is None else s
    batch = 1 if segments is None else jax.tree.leaves(segments)[0].shape[0]
    if bias is not None:
        arguments.match(CORE, {}, bias=(bias, 'b h t s'))
        arguments.check_floating(CORE, bias=bias)
    batch, heads = (batch, 1) if bias is None else (max(batch, bias.shape[0]), bias.shape[1])
    pair = _segment_pair(segments, {'b': batch, 't': t, 's': s})
    _check_bias(bias, {'b': batch, 'h': heads, 't': t, 's': s})
    window, sinks = _within(window, sinks, {'t': t, 's': s})
    q, k = jnp.zeros((batch, t, heads, 1)), jnp.zeros((batch, s, 1, 1))
    operands = problem.canonical(q, k, k, bias, None, None, pair)
    rule = problem.Rule(Softmax(), 1.0, causal, window, sinks)
    return problem.join_heads(around.key_counts(rule, operands))[..., 0]


def _within(window: int | None, sinks: int, sizes: dict[str, int]) -> tuple[int | None, int]:
    """The window and the sinks, no larger than the rows: positions beyond would not fit into 32 bits."""
    if window is not None and window < 1:
        raise ValueError(f'{CORE}: window is {window}; expected at least 1, or None')
    if sinks < 0 or (sinks > 0 and window is None):
        raise ValueError(
            f'{CORE}: sinks is {sinks} and window {window}; expected no sinks, or a positive number and a window'
        )
    return None if window is None else min(window, max(sizes['t'], sizes['s'])), min(sinks, sizes['s'])


def _segment_pair(
    segments: jax.Array | tuple[jax.Array, jax.Array] | None, sizes: dict[str, int]
) -> tuple[jax.Array, jax.Array] | None:
    """The segments of the queries and of the keys."""
    if segments is None:
        return None
    pair = segments if isinstance(segments, tuple) else (segments, segments)
    names = ('segments[0]', 'segments[1]') if isinstance(segments, tuple) else ('segments', 'segments')
    for name, array, letters in zip(names, pair, ('b t', 'b s'), strict=True):
        arguments.match(CORE, sizes, **{name: (array, letters)})
        arguments.check_integer(CORE, **{name: array})
    return pair


def _block(chosen: jax.Array | None, block: int | None, sizes: dict[str, int]) -> int | None:
    """The size of blocks, no larger than the rows."""
    if (chosen is None) != (block is None):
        given, lacks = ('chosen', 'block') if block is None else ('block', 'chosen')
        raise ValueError(f'{CORE}: {given} was given without {lacks}; expected both, or neither')
    if chosen is None or block is None:
        return None
    if block < 1:
        raise ValueError(f'{CORE}: block is {block}; expected at least 1')
    arguments.match(CORE, sizes | {'n': -(-sizes['s'] // block)}, chosen=(chosen, 'b t g n'))
    arguments.check_bool(CORE, chosen=chosen)
    return min(block, max(1, sizes['s']))


def _check_bias(bias: jax.Array | None, sizes: dict[str, int]) -> None:
    if bias is None:
        return
    letters = ['1' if size == 1 else letter for letter, size in zip('bhts', bias.shape, strict=False)]
    full = ('b', 'h', 't', 's')[: len(letters)]
    if bias.ndim != 4 or any(letter not in ('1', name) for letter, name in zip(letters, full, strict=True)):
        raise ValueError(f'{CORE}: bias has shape {bias.shape}; expected four dimensions')
    arguments.match(CORE, sizes, bias=(bias, ' '.join(letters)))
