"""Attention to some of the keys, for callers that combine the rows of several calls, such as a ring of devices."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import arguments, cost, dispatch, target
from pallas_kernels.attention import problem, survey, vjp, xla
from pallas_kernels.attention.api import CORE, KERNELS
from pallas_kernels.attention.maps import Statistics, WeightMap


class Part(NamedTuple):
    """What queries read of some of the keys.

    Attributes:
      output: `b t h v`, in the type of the values; where the caller has yet to multiply it by a factor that depends on
        the number of keys, some forms give it in the type of accumulators.
      statistics: of the weight map, `b t h` each; `weights.merge` combines those of several parts.
    """

    output: jax.Array
    statistics: Statistics


class PartGradients(NamedTuple):
    """Gradients of the arguments of `attention_part`, like them."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    query_terms: jax.Array | None
    key_terms: jax.Array | None


def attention_part(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    weights: WeightMap,
    scale: float | None = None,
    causal: bool,
    segments: tuple[jax.Array, jax.Array] | None = None,
    query_terms: jax.Array | None = None,
    key_terms: jax.Array | None = None,
    rests: tuple[jax.Array, jax.Array] | None = None,
    implementation: str | None = None,
) -> Part:
    """Attention to some of the keys of a row, with the statistics that combine it with attention to the others.

    `o_i = sum_j w_ij v_j` as in `attention`, of the scores `scale q_i . k_j + query_terms_i - key_terms_j`. Factors of
    the map that depend on the number of keys are left to the caller, who knows it. Not differentiable: see
    `attention_part_gradients`.

    Args:
      q: queries, `b t h k`.
      k: keys, `b s g k`.
      v: values, `b s g v`.
      weights: a map that `merges`.
      scale: factor of the products; `None`: one over the square root of the key channels.
      causal: whether query i sees keys up to `i + s - t` only.
      segments: documents of queries and keys, integers `b t` and `b s`.
      query_terms: added to the scores of a query, `b t h`; given together with `key_terms`.
      key_terms: subtracted from the scores of a key, `b s h`.
      rests: what rounding took from both terms, in that order, without gradients; given with them. Kernels do without.
      implementation: `None` chooses; see `dispatch.select`.

    Raises:
      ValueError: for shapes that do not fit, or weights that do not merge.
      NotImplementedError: for a named implementation that cannot serve the call.
    """
    rule, operands = _problem(q, k, v, weights, scale, causal, segments, query_terms, key_terms, rests)
    passes = _passes(rule, operands, implementation)
    kept = passes.forward(rule, operands, survey.statistics(rule, operands, exact=passes.exact))
    return Part(problem.join_heads(kept.output), tuple(problem.join_heads(row)[..., 0] for row in kept.statistics))


def attention_part_gradients(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    part: Part,
    doutput: jax.Array,
    *,
    weights: WeightMap,
    scale: float | None = None,
    causal: bool,
    segments: tuple[jax.Array, jax.Array] | None = None,
    query_terms: jax.Array | None = None,
    key_terms: jax.Array | None = None,
    rests: tuple[jax.Array, jax.Array] | None = None,
    implementation: str | None = None,
) -> PartGradients:
    """The share of these keys in the gradients of attention to all keys.

    Args:
      q: as for `attention_part`, as are all others that are not listed.
      k: keys.
      v: values.
      part: the output and the statistics over all keys of the row.
      doutput: the gradient of that output.

    Returns:
      The gradients of q, k, v and, where given, the terms; those of q and `query_terms` add up over all parts.
    """
    rule, operands = _problem(q, k, v, weights, scale, causal, segments, query_terms, key_terms, rests)
    g = k.shape[2]
    statistics = tuple(problem.split_heads(row[..., None], g) for row in part.statistics)
    kept = vjp.Residuals(problem.split_heads(part.output, g), statistics)
    found = _passes(rule, operands, implementation).backward(rule, operands, kept, problem.split_heads(doutput, g))
    terms = [
        None if array is None else problem.join_heads(array)[..., 0]
        for array in (found.query_forget, None if found.key_forget is None else found.key_forget.swapaxes(3, 4))
    ]
    return PartGradients(problem.join_heads(found.q), *(jnp.moveaxis(x, 1, 2) for x in (found.k, found.v)), *terms)


def _problem(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    weights: WeightMap,
    scale: float | None,
    causal: bool,
    segments: tuple[jax.Array, jax.Array] | None,
    query_terms: jax.Array | None,
    key_terms: jax.Array | None,
    rests: tuple[jax.Array, jax.Array] | None,
) -> tuple[problem.Rule, problem.Operands]:
    sizes = arguments.match(CORE, {}, q=(q, 'b t h k'), k=(k, 'b s g k'), v=(v, 'b s g v'))
    arguments.check_channels(CORE, sizes['k'])
    arguments.check_multiple(CORE, 'k', sizes['g'], sizes['h'], 'q')
    if segments is not None:
        arguments.match(CORE, sizes, **{'segments[0]': (segments[0], 'b t'), 'segments[1]': (segments[1], 'b s')})
    arguments.match(CORE, sizes, query_terms=(query_terms, 'b t h'), key_terms=(key_terms, 'b s h'))
    if rests is not None:
        arguments.match(CORE, sizes, **{'rests[0]': (rests[0], 'b t h'), 'rests[1]': (rests[1], 'b s h')})
    if (query_terms is None) != (key_terms is None):
        given, lacks = ('key', 'query') if query_terms is None else ('query', 'key')
        raise ValueError(f'{CORE}: {given}_terms were given without {lacks}_terms; expected both, or neither')
    if not weights.merges:
        raise ValueError(f'{CORE}: the rows of {type(weights).__name__} over some of the keys do not combine')
    operands = problem.canonical(q, k, v, None, None, None, segments)
    if query_terms is not None and key_terms is not None:
        rows, columns = (problem.split_heads(terms[..., None], sizes['g']) for terms in (query_terms, key_terms))
        operands = operands.replace(query_forget=rows, key_forget=columns.swapaxes(3, 4))
        if rests is not None:
            rows, columns = (problem.split_heads(rest[..., None], sizes['g']) for rest in rests)
            operands = operands.replace(query_rest=rows, key_rest=columns.swapaxes(3, 4))
    return problem.Rule(weights, sizes['k'] ** -0.5 if scale is None else scale, causal, None, 0), operands


def _passes(rule: problem.Rule, operands: problem.Operands, implementation: str | None) -> vjp.Passes:
    """The passes of the form that serves a call."""
    here = target.current()
    b, g, r, t, k = operands.q.shape
    s, v = operands.v.shape[2:]
    candidates = {
        'xla': dispatch.Candidate(xla.passes),
        **{name: dispatch.kernel(CORE, name, here, rule, operands, made_by='in_passes') for name in KERNELS},
    }
    size = functools.partial(
        cost.attention,
        b=b,
        t=t,
        s=s,
        h=g * r,
        g=g,
        k=k,
        v=v,
        causal=rule.causal,
        itemsize=operands.v.dtype.itemsize,
    )
    return dispatch.select(CORE, implementation, candidates, size)
