"""Memory seen from the outside: of mixers whose decays are known beforehand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.analysis import memory
from attnlab.config import build
from attnlab.context import Context
from attnlab.zoo import ZOO

TARGETS = jnp.asarray([4, 7])


def fading(x):
    """`y_t = sum_s 2^(s - t) x_s`."""
    length = x.shape[1]
    back = np.subtract.outer(np.arange(length), np.arange(length))
    return jnp.einsum('ts,bsd->btd', jnp.asarray(np.where(back >= 0, 0.5 ** np.maximum(back, 0), 0), x.dtype), x)


def test_influence_of_a_memory_that_halves():
    x = jax.random.normal(jax.random.key(0), (2, 8, 3))
    squares = memory.influence(fading, x, TARGETS, jax.random.key(1))
    expected = [[3 * 0.25 ** (target - place) if place <= target else 0 for place in range(8)] for target in (4, 7)]
    np.testing.assert_allclose(squares[:, 0], expected, rtol=1e-5)
    np.testing.assert_allclose(squares[:, 1], expected, rtol=1e-5)
    found = memory.by_distance(squares, TARGETS, jnp.ones((2, 8), int), longest=4, two_sided=False)
    np.testing.assert_allclose(found.strengths(), np.sqrt(3) * 0.5 ** np.arange(4), rtol=1e-5)
    np.testing.assert_allclose(memory.mean_distance(found.strengths()), (0.5 + 2 / 4 + 3 / 8) / 1.875, rtol=1e-5)
    # 1, 1/2, 1/4, 1/8: eight fifteenths, twelve, fourteen, all.
    assert [memory.reach(found.strengths(), share) for share in (0.5, 12 / 15, 0.9, 1.0)] == [0, 1, 2, 3]


def test_influence_is_counted_inside_of_documents_and_on_both_sides_where_asked():
    squares = jnp.broadcast_to(jnp.arange(1.0, 9.0), (2, 1, 8))
    segments = jnp.asarray([[1, 1, 1, 2, 2, 2, 2, 0]])
    found = memory.by_distance(squares, TARGETS, segments, longest=3, two_sided=False)
    # Of token 4: itself and token 3, the first of the document; of token 7, padding, nothing.
    np.testing.assert_allclose(found.total, [5, 4, 0])
    np.testing.assert_allclose(found.pairs, [1, 1, 0])
    np.testing.assert_allclose(found.strengths(), [5**0.5, 2, 0], rtol=1e-6)
    both = memory.by_distance(squares, TARGETS, segments, longest=3, two_sided=True)
    np.testing.assert_allclose(both.total, [5, 4 + 6, 7])
    np.testing.assert_allclose(both.pairs, [1, 2, 1])


def carried(name, length=6, **options):
    config = ZOO[name].spec.copy_and_resolve_references()
    config.update(options)
    mixer = build(config)(16, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(3), (1, length, 16))
    found = jax.jit(lambda x: memory.carried(mixer, x, Context.full(1, length), jax.random.key(4)))(x)
    return mixer, x, found


def test_what_retention_keeps_is_its_decay():
    _, _, found = carried('retnet', heads=4)
    (state,) = [one for one in found.values() if one.kept.shape[2] == 4]
    # Before its first token there is nothing to keep.
    expected = np.where(np.arange(6)[:, None] > 0, 1 - 2.0 ** (-5 - np.arange(4)), 1)
    np.testing.assert_allclose(state.kept[0], expected, rtol=1e-5)
    np.testing.assert_allclose(
        memory.half_life(np.asarray(state.kept[0, 1:, 0])), np.log(0.5) / np.log(31 / 32), rtol=1e-4
    )


def test_norms_are_those_of_the_state_and_a_gate_is_found():
    mixer, x, found = carried('mingru')
    (state,) = found.values()
    _, advanced = mixer(x, Context.full(1, 6), mixer.init_state(1, 6, x.dtype))
    np.testing.assert_allclose(state.norms[0, -1], [jnp.linalg.norm(advanced.hidden)], rtol=1e-5)
    # By channel it keeps its gate, and of a drawn change something between the least of them and the largest.
    _, gates = mixer.gates(x, jnp.zeros((1, 6), bool))
    kept = np.asarray(state.kept[0, 1:, 0])
    assert np.all(np.asarray(gates.min(axis=-1))[0, 1:] < kept) and np.all(kept < np.asarray(gates.max(axis=-1))[0, 1:])


@pytest.mark.slow
def test_a_cache_forgets_nothing_and_has_no_half_life():
    _, _, found = carried('nope', heads=2)
    assert len(found) == 2, 'keys and values'
    for state in found.values():
        np.testing.assert_array_equal(state.kept, 1)
        assert memory.half_life(np.asarray(state.kept[0, 1:, 0])) is None
        assert np.all(np.diff(np.asarray(state.norms[0]), axis=0) > 0)


def test_half_lives():
    assert memory.half_life(np.ones(5)) is None
    assert memory.half_life(np.asarray([0.5, 0.0])) == 0
    np.testing.assert_allclose(memory.half_life(np.asarray([0.25, 1.0])), 1)


def test_tokens_that_go_on():
    found = memory.continued(jnp.asarray([[1, 1, 2, 2, 0, 0]]))
    np.testing.assert_array_equal(found, [[False, True, False, True, False, False]])
