"""Attention to the tokens of the call or of a cache, by a kernel or by full rows of weights."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int, Shaped

from attnlab.context import IN_MIXER, PADDING, Context
from attnlab.errors import UserError
from attnlab.functional import cores
from attnlab.functional.cache import Entries, ForgettingEntries, KeyValueCache, extend, overflown
from attnlab.functional.dense import DenseMap, dense_attention
from attnlab.functional.needed import needing
from attnlab.functional.penalty import Penalised, penalised
from attnlab.functional.precision import wide_dtype
from attnlab.functional.reach import Placed, Reach
from attnlab.typing import Heads, Keys, Queries, Segments, Values
from pallas_kernels import Softmax, WeightMap
from pallas_kernels.attention.problem import rounded_off
from pallas_kernels.cost import Cost, Passes, visible_pairs


@dataclasses.dataclass(frozen=True)
class View:
    """The tokens that the queries of a call attend to: those of the call, or of a cache to which they were appended.

    Attributes:
      entries: their keys, values and segments, as given to `look`; time comes before heads.
      queries: places of the queries.
      keys: places of the entries.
      reach: which entries a query sees.
      ctx: the context of the call.
      log_forget: logarithms of the forget gates of the call, `b t h`, or `None`.
      cache: the cache after the call; `None` without one.
    """

    entries: Any
    queries: Placed
    keys: Placed
    reach: Reach
    ctx: Context
    log_forget: Float[Array, 'b t h'] | None
    cache: KeyValueCache | None

    def visible(self) -> Bool[Array, 'b t s']:
        """Returns which entries each query sees."""
        seen = self.reach.visible(self.queries, self.keys)
        return seen if self.ctx.cut is None else seen & ~self.ctx.cut

    def counts(self) -> Shaped[Array, 'b t']:
        """Returns how many entries each query sees."""
        return self.reach.counts(self.ctx.positions, self.ctx.segments)

    def pairs(self, heads: int) -> int:
        """Returns how many pairs of a query and a key are visible by position, of so many heads of all rows."""
        (batch, t), s = self.queries.segments.shape, self.keys.segments.shape[1]
        reach = self.reach
        return batch * heads * visible_pairs(t, s, causal=reach.causal, window=reach.window, sinks=reach.sinks)

    def or_nan(self, y: Float[Array, 'b t ...']) -> Float[Array, 'b t ...']:
        """Returns the output, or NaN where more tokens came than the cache holds."""
        return y if self.cache is None else jnp.where(overflown(self.cache, self.reach), jnp.nan, y)


def look(
    new: Any,
    ctx: Context,
    reach: Reach,
    cache: KeyValueCache | None = None,
    *,
    log_forget: Float[Array, 'b t h'] | None = None,
) -> View:
    """Returns what the queries of a call attend to: the new entries, or a cache to which they are appended first.

    `new` is `Entries`, or another tuple of arrays that has `segments`, as `extend` takes them. With forget gates it is
    `Entries`, and the cache one of `ForgettingEntries`.
    Raises `UserError` for sinks together with segments, a call too long for the cache, and a cut context with a cache.
    """
    reach.check_segments(ctx.segments)
    if ctx.cut is not None and cache is not None:
        raise UserError('cut of Context is given in a call with a state; scores are cut in calls without one')
    places = jnp.arange(new.segments.shape[1], dtype=jnp.int32)
    if cache is None:
        here = Placed(places, new.segments)
        return View(new, here, here, reach, ctx, log_forget, None)
    queries = Placed(cache.consumed + places, new.segments)
    if log_forget is None:
        entries, kept, cache = extend(cache, new, reach)
    else:
        entries, kept, cache = _extend_gated(cache, new, log_forget, reach)
    return View(entries, queries, Placed(kept, entries.segments), reach, ctx, log_forget, cache)


class _Gated(NamedTuple):
    """The entries of a call with forget gates, of its own tokens and of those before.

    Attributes:
      keys: as in `Entries`, with the other two.
      values: likewise.
      segments: likewise.
      forgotten: what is added to a key's scores besides the gates of the call up to the query.
      rest: what rounding took from it.
      later: `forgotten` of `ForgettingEntries` after the call.
    """

    keys: Keys
    values: Values
    segments: Segments
    forgotten: Float[Array, 'b s h']
    rest: Float[Array, 'b s h']
    later: Float[Array, 'b s h']


def _extend_gated(
    cache: KeyValueCache, new: Entries, log_forget: Float[Array, 'b t h'], reach: Reach
) -> tuple[_Gated, Int[Array, 's'], KeyValueCache]:
    """Appends tokens with forget gates, as `extend` does."""
    keys, values, segments, forgotten = cache.entries
    after = forgotten + jnp.sum(log_forget, axis=1, keepdims=True)
    old = _Gated(keys, values, segments, forgotten, jnp.zeros_like(forgotten), after)
    since, rest = _sums(log_forget)
    # Of the tokens after each: shifted, since a large gate taken away again would leave its rounding.
    later = jnp.pad(jax.lax.cumsum(log_forget, axis=1, reverse=True), ((0, 0), (0, 1), (0, 0)))[:, 1:]
    entries, kept, cache = extend(cache._replace(entries=old), _Gated(*new, -since, -rest, later), reach)
    keys, values, segments, *_, later = cache.entries
    return entries, kept, cache._replace(entries=ForgettingEntries(keys, values, segments, later))


def _sums(log_forget: Float[Array, 'b t h']) -> tuple[Float[Array, 'b t h'], Float[Array, 'b t h']]:
    """The sums of the gates of a call up to each token, and what rounding took from them."""
    total = jnp.cumsum(log_forget, axis=1)
    return total, rounded_off(log_forget, total, jnp.zeros((*log_forget.shape[:2], 1), bool))


def attend(
    q: Queries,
    k: Keys,
    v: Values,
    view: View,
    *,
    weights: WeightMap | Penalised | DenseMap = Softmax(),
    scale: float | None = None,
    slopes: Float[Array, 'h'] | None = None,
    bias: Float[Array, '#b #h t s'] | None = None,
    temperature: Float[Array, 'b t h'] | None = None,
    sink_scores: Float[Array, 'h'] | None = None,
    implementation: str | None = None,
) -> Heads:
    """Returns `o_i = sum_j w_ij v_j` over the entries of a view, the row `w_i` being the weight map of the scores.

    Scores are those of `pallas_kernels.attention`, which serves its own maps; other maps are given full rows. A
    penalised map adds the mean of its penalty over real queries to the gradient, in training and without a cache.

    Args:
      q: queries, `b t h k`.
      k: keys of the view's entries, `b s g k`.
      v: their values, `b s g v`.
      view: from `look`.
      weights: the map from scores to weights.
      scale: factor of the products; `None`: one over the square root of the key channels.
      slopes: subtracted from a score per step of distance, by head.
      bias: added to the scores.
      temperature: factor of the products of each query.
      sink_scores: the score of one more key for every head, without a value.
      implementation: of the core; `None`: the default of the platform.

    Returns:
      o, `b t h v`; NaN where more tokens came than the cache holds.

    Raises:
      UserError: for an argument that the weight map does not support, such as the name of a kernel for whole rows.
    """
    if isinstance(weights, Penalised):
        weights.check(scale=scale, slopes=slopes, bias=bias, log_forget=view.log_forget, sink_scores=sink_scores)
    weigh = weights.weights if isinstance(weights, Penalised) else weights
    if not isinstance(weigh, WeightMap):
        terms = {'scale': scale, 'forget gates': view.log_forget, 'scores of a sink': sink_scores}
        _check_whole_rows(weigh, terms, implementation)
        rows = functools.partial(
            dense_attention,
            weigh,
            visible=view.visible(),
            own=jnp.argmax(view.queries.places[:, None] == view.keys.places[None, :], axis=1),
            key=None if view.ctx.deterministic else view.ctx.fold_in(IN_MIXER).dropout_key,
        )
        y = _counted(rows, q, k, v, view)(q, k, v, bias=_with_distance(bias, slopes, view), temperature=temperature)
    elif view.cache is None:
        y = cores.attention(
            q,
            k,
            v,
            weights=weigh,
            scale=scale,
            causal=view.reach.causal,
            window=view.reach.window,
            sinks=view.reach.sinks,
            segments=view.ctx.segments,
            slopes=slopes,
            log_forget=view.log_forget,
            bias=_with_cut(bias, view, q),
            temperature=temperature,
            sink_scores=sink_scores,
            implementation=implementation,
        )
    else:
        y = cores.attention(
            q,
            k,
            v,
            weights=weigh,
            scale=scale,
            causal=False,
            segments=(view.queries.segments, view.keys.segments),
            bias=_cache_bias(_with_distance(bias, slopes, view), view, q),
            temperature=temperature,
            sink_scores=sink_scores,
            implementation=implementation,
        )
    if isinstance(weights, Penalised) and view.cache is None and not view.ctx.deterministic:
        tokens = jnp.sum(view.ctx.segments_or_ones() != PADDING)
        y = penalised(y, _penalty(weights, q, k, view, temperature), tokens, view.ctx.labels)
    return view.or_nan(y)


def _check_whole_rows(weigh: DenseMap, terms: Mapping[str, Any], implementation: str | None) -> None:
    """Raises `UserError` for terms of scores, and forms, that a map of whole rows does not have."""
    name = type(weigh).__name__
    given = [term for term, value in terms.items() if value is not None]
    if given:
        raise UserError(f'{name} needs whole rows and takes no {", ".join(given)}; leave them out')
    if implementation not in (None, 'reference', 'xla'):
        raise UserError(
            f'{name} needs whole rows and has no form {implementation!r}; implementation is to be None, '
            "'reference' or 'xla'"
        )


def _counted[**P](rows: Callable[P, Heads], q: Queries, k: Keys, v: Values, view: View) -> Callable[P, Heads]:
    """What computes full rows; counted, it is needed for the pairs that are visible by position, as cores are."""
    b, t, h, channels = q.shape
    each = 2 * (channels + v.shape[-1])
    counts = (view.pairs(h), b * h * t * k.shape[1])
    model, executed = (Passes(Cost(each * count), Cost(2 * each * count)) for count in counts)
    return needing(rows, 'dense_attention', model=model, executed=executed)


def identity_values(k: Keys) -> Float[Array, 'b s g s']:
    """Returns the rows of the identity as values: the output of a query is then its weights."""
    batch, length, groups, _ = k.shape
    return jnp.broadcast_to(jnp.eye(length, dtype=k.dtype)[None, :, None], (batch, length, groups, length))


def _penalty(
    weights: Penalised, q: Queries, k: Keys, view: View, temperature: Float[Array, 'b t h'] | None
) -> Float[Array, '']:
    warm = q if temperature is None else q * temperature[..., None].astype(q.dtype)
    return weights.penalty(warm, k, view.counts().astype(wide_dtype(q.dtype)), view.ctx.segments, view.reach)


def _cache_bias(bias: Float[Array, '#b #h t s'] | None, view: View, q: Queries) -> Float[Array, '#b #h t s']:
    """The bias of the scores of a cache: minus infinity out of reach, so that every weight map applies."""
    if view.log_forget is not None:
        since, rest = (jnp.moveaxis(each, 1, 2)[..., None] for each in _sums(view.log_forget))
        forgotten, lost = (jnp.moveaxis(each, 1, 2)[:, :, None] for each in (view.entries.forgotten, view.entries.rest))
        between = (since + forgotten) + (rest + lost)
        bias = between if bias is None else bias + between
    if bias is None:
        bias = jnp.zeros((1, 1, 1, 1), wide_dtype(q.dtype))
    return jnp.where(view.reach.within(view.queries.places, view.keys.places)[None, None], bias, -jnp.inf)


def _with_cut(bias: Float[Array, '#b #h t s'] | None, view: View, q: Queries) -> Float[Array, '#b #h t s'] | None:
    """The bias of the scores of a call: minus infinity where queries are kept from keys."""
    if view.ctx.cut is None:
        return bias
    base = jnp.zeros((1, 1, 1, 1), wide_dtype(q.dtype)) if bias is None else bias
    return jnp.where(view.ctx.cut[:, None], -jnp.inf, base)


def _with_distance(
    bias: Float[Array, '#b #h t s'] | None, slopes: Float[Array, 'h'] | None, view: View
) -> Float[Array, '#b #h t s'] | None:
    """The bias with the distance penalty of the slopes."""
    if slopes is None:
        return bias
    distance = jnp.abs(view.queries.places[:, None] - view.keys.places[None, :])
    loss = slopes[None, :, None, None] * distance[None, None].astype(slopes.dtype)
    return -loss if bias is None else bias - loss
