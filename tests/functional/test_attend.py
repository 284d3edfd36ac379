"""One read, stateless or from a cache, by the core or by whole rows: they agree."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional.attend import attend, identity_values, look
from attnlab.functional.cache import Entries, ForgettingEntries, KeyValueCache, empty_cache
from attnlab.functional.dense import softmax
from attnlab.functional.penalty import Penalised
from attnlab.functional.reach import Reach
from attnlab.nn.penalties import RowPenalty
from attnlab.testing.noise import noise
from attnlab.testing.tolerances import assert_close
from pallas_kernels import Relu

T, HEADS, GROUPS, K = 9, 4, 2, 3


def whole_rows(rows, key):
    return softmax(rows.scores, rows.visible)


@functools.cache
def operands() -> tuple[jax.Array, ...]:
    return noise(2, T, HEADS, K), noise(2, T, GROUPS, K, seed=1), noise(2, T, GROUPS, K, seed=2)


def entries(k: jax.Array, v: jax.Array) -> Entries:
    return Entries(k, v, jnp.ones(k.shape[:2], jnp.int32))


def read(reach: Reach, **terms) -> jax.Array:
    q, k, v = operands()
    return attend(q, k, v, look(entries(k, v), Context.full(2, T), reach), **terms)


@pytest.mark.parametrize('causal', [True, False])
@pytest.mark.parametrize(('window', 'sinks'), [(None, 0), (2, 0), (2, 5)])
@pytest.mark.parametrize('slopes', [None, (0.5, 0.25, 0.1, 0.01)])
def test_whole_rows_see_what_the_core_sees(causal, window, sinks, slopes):
    reach = Reach(causal, window, sinks)
    slopes = None if slopes is None else jnp.array(slopes)
    actual, expected = read(reach, slopes=slopes, weights=whole_rows), read(reach, slopes=slopes)
    assert_close(actual, expected, dtype=jnp.float32, reduction=T, what=str(reach))


def test_scores_of_16_bits_are_not_rounded_to_them():
    q, k, v = operands()
    q, k = (4 * x.astype(jnp.bfloat16) for x in (q, k))
    view = look(entries(k, v), Context.full(2, T), Reach())
    expected = attend(*(x.astype(jnp.float32) for x in (q, k)), v, view)
    assert_close(attend(q, k, v, view, weights=whole_rows), expected, dtype=jnp.float32, reduction=T, what='y')


def test_a_key_in_the_direction_of_the_query_is_at_its_limit_wherever_it_is():
    found = []

    def rows(rows, key):
        found.append(rows)
        return whole_rows(rows, key)

    q, _, v = operands()
    same, slopes = jnp.broadcast_to(q[:, :1, :GROUPS], (2, T, GROUPS, K)), jnp.array([0.5, 0.25])
    attend(same, same, v, look(entries(same, v), Context.full(2, T), Reach(causal=False)), weights=rows, slopes=slopes)
    assert_close(found[0].limits, found[0].scores, dtype=jnp.float32, reduction=K, what='limits')


@pytest.mark.parametrize('name', ['mosaic_gpu', 'two_pass', 'cudnn'])
def test_whole_rows_have_no_kernel(name):
    with pytest.raises(UserError, match=f"function needs whole rows and has no form '{name}'"):
        read(Reach(), weights=whole_rows, implementation=name)
    read(Reach(), weights=whole_rows, implementation='xla')


def test_whole_rows_take_no_scale_gates_or_sinks():
    q, k, v = operands()
    gated = look(entries(k, v), Context.full(2, T), Reach(), log_forget=-jnp.ones((2, T, HEADS)))
    with pytest.raises(UserError, match='function needs whole rows and takes no scale, scores of a sink; leave them'):
        read(Reach(), weights=whole_rows, scale=0.5, sink_scores=jnp.zeros(HEADS))
    with pytest.raises(UserError, match='takes no forget gates; leave'):
        attend(q, k, v, gated, weights=whole_rows)


@pytest.mark.parametrize('weights', [{}, {'weights': whole_rows}], ids=['core', 'whole_rows'])
@pytest.mark.parametrize('reach', [Reach(), Reach(window=2, sinks=1)], ids=str)
def test_a_cache_that_is_too_short_gives_nan_once(reach, weights):
    """Four tokens at a time into six slots, or into a ring, which never fills."""
    q, k, v = operands()
    cache = empty_cache(2, 6, kv_heads=GROUPS, key_dim=K, value_dim=K, dtype=q.dtype, reach=reach)
    expected = read(reach, **weights)
    for start in (0, 4):
        part = slice(start, start + 4)
        view = look(entries(k[:, part], v[:, part]), Context.full(2, 4, start=start), reach, cache)
        y, cache = attend(q[:, part], view.entries.keys, view.entries.values, view, **weights), view.cache
        if start and reach.ring is None:
            assert np.isnan(y).all()
        else:
            assert_close(y, expected[:, part], dtype=q.dtype, reduction=T, what=f'from {start}')


@pytest.mark.parametrize('reach', [Reach(), Reach(window=4)], ids=str)
def test_gates_far_into_a_prompt_have_their_digits(reach):
    """After sums of 5e4, in float32, of which neighbours differ by multiples of 4e-3; also of what is kept of them."""
    length, prompt = 24, 20
    q, k, v = (noise(1, length, HEADS, K, seed=seed) for seed in range(3))
    gates = jax.nn.log_sigmoid(noise(1, length, HEADS, seed=3)).at[:, 1].set(-5e4 - 0.123)

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def gated(start: int, stop: int, cache: KeyValueCache | None) -> tuple[jax.Array, KeyValueCache | None]:
        queries, keys, values, log_forget = (x[:, start:stop] for x in (q, k, v, gates))
        ctx = Context.full(1, stop - start, start=start)
        view = look(entries(keys, values), ctx, reach, cache, log_forget=log_forget)
        return attend(queries, view.entries.keys, view.entries.values, view), view.cache

    cache = empty_cache(1, length, kv_heads=HEADS, key_dim=K, value_dim=K, dtype=q.dtype, reach=reach)
    forgotten = jnp.zeros((*cache.entries.segments.shape, HEADS))
    cache = cache._replace(entries=ForgettingEntries(*cache.entries, forgotten))
    expected, _ = gated(0, length, None)
    y, cache = gated(0, prompt, cache)
    np.testing.assert_allclose(y, expected[:, :prompt], atol=1e-5)
    y, _ = gated(prompt, length, cache)
    np.testing.assert_allclose(y, expected[:, prompt:], atol=1e-5)


def test_values_of_the_identity_read_weights():
    q, k, v = operands()
    view = look(entries(k, v), Context.full(2, T), Reach())
    weights = attend(q, k, identity_values(k), view)
    read = jnp.einsum('bthgs,bsgv->bthgv', jnp.stack([weights] * GROUPS, axis=3), v)
    expected = jnp.concatenate([read[:, :, :2, 0], read[:, :, 2:, 1]], axis=2)
    assert_close(attend(q, k, v, view), expected, dtype=q.dtype, reduction=T, what='y')


def test_a_penalty_refuses_what_it_would_not_see():
    with pytest.raises(UserError, match='products of queries and keys alone; there is also slopes'):
        read(Reach(), slopes=jnp.ones(HEADS), weights=Penalised(Relu(), RowPenalty()))


def test_a_step_writes_its_cache_in_place():
    """XLA wrote once more for each product that reads the cache, into a copy of all of it."""
    slots = 512

    def step(q, k, v, cache):
        view = look(entries(k, v), Context.full(1, 1), Reach(), cache)
        return attend(q, view.entries.keys, view.entries.values, view), view.cache

    cache = empty_cache(1, slots, kv_heads=GROUPS, key_dim=K, value_dim=K, dtype=jnp.float32)
    q, k, v = (x[:1, :1] for x in operands())
    text = jax.jit(step, donate_argnums=3).lower(q, k, v, cache).compile().as_text()
    assert re.search(rf'= f32\[1,{GROUPS},{slots},{K}\]\S* fusion\(', text)
    assert not re.search(rf'= f32\[[0-9,]*{slots},{K}\]\S* copy\(', text)
