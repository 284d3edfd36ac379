"""Reads by level against their definition, token by token, in numpy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.functional import cores, levels
from attnlab.functional.levels import levels_of, no_levels, read_by_level
from attnlab.testing.noise import noise

SEGMENTS = np.asarray([[1] * 9, [1, 1, 1, 2, 2, 3, 3, 0, 0]])


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def arrays(count: int = 5):
    q, k, v = (noise(2, 9, 2, 4, seed=seed, dtype=jnp.float64) for seed in range(3))
    log_decay = -jnp.abs(noise(2, 9, 2, seed=3, dtype=jnp.float64))
    strength = jax.nn.sigmoid(noise(2, 9, 2, seed=4, dtype=jnp.float64))
    weights = jax.nn.softplus(noise(2, 9, 2, count, seed=5, dtype=jnp.float64))
    return q, k / jnp.linalg.norm(k, axis=-1, keepdims=True), v, log_decay, strength, weights


def delta(q, k, log_decay, strength):
    return lambda v, **given: cores.delta_rule(q, k, v, strength, log_decay, **given)


def effective_weights(q, k, log_decay, strength) -> np.ndarray:
    """What queries have of every value in the gated delta rule, of one head of one document, `t s`."""
    weights = np.zeros((len(q), len(q)))
    for s in range(len(q)):
        key = strength[s] * k[s]
        for t in range(s, len(q)):
            if t > s:
                key = np.exp(log_decay[t]) * (key - strength[t] * k[t] * (k[t] @ key))
            weights[t, s] = q[t] @ key / np.sqrt(q.shape[-1])
    return weights


@pytest.mark.parametrize('near', [1, 2, 4, 64])
def test_every_level_has_its_weight_and_pieces_equal_one_pass(near, monkeypatch):
    monkeypatch.setattr(levels, 'NEAR', near)
    q, k, v, log_decay, strength, weights = arrays()
    segments = jnp.asarray(SEGMENTS)
    y, _ = read_by_level(delta(q, k, log_decay, strength), v, weights, segments=segments)
    for row in range(2):
        for document in np.unique(SEGMENTS[row]):
            where = SEGMENTS[row] == document
            level = np.array([[(t ^ s).bit_length() for s in range(where.sum())] for t in range(where.sum())])
            for h in range(2):
                parts = (np.asarray(each[row, :, h])[where] for each in (q, k, log_decay, strength))
                by_level = np.take_along_axis(np.asarray(weights[row, :, h])[where], level, axis=1)
                expected = (by_level * effective_weights(*parts)) @ np.asarray(v[row, :, h])[where]
                np.testing.assert_allclose(y[row, :, h][where], expected, rtol=1e-10, atol=1e-12)
    state, last, pieces = no_levels(2, levels_of(9), (2, 4, 4), jnp.float64), jnp.full(2, -1), []
    for start, end in ((0, 3), (3, 4), (4, 9)):
        part = [each[:, start:end] for each in (q, k, log_decay, strength)]
        given = {'state': state, 'last': last, 'segments': segments[:, start:end]}
        piece, state = read_by_level(delta(*part), v[:, start:end], weights[:, start:end], **given)
        last = segments[:, end - 1]
        pieces.append(piece)
    np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), y, rtol=1e-10, atol=1e-12)


def test_with_weights_of_one_it_is_what_it_divides():
    q, k, v, log_decay, strength, weights = arrays()
    segments = jnp.asarray(SEGMENTS)
    run = delta(q, k, log_decay, strength)
    y, _ = read_by_level(run, v, jnp.ones_like(weights), segments=segments)
    np.testing.assert_allclose(y, run(v, segments=segments, state=None)[0], rtol=1e-10, atol=1e-12)


def test_without_weights_above_it_sees_its_block_alone():
    q, k, v, _, _, weights = arrays()
    y, _ = read_by_level(
        lambda v, **given: cores.linear_attention(q, k, v, **given), v, (weights * 0).at[..., :3].set(1)
    )
    blocks = jnp.broadcast_to(jnp.arange(9)[None] // 4, (2, 9))
    expected, _ = cores.linear_attention(q, k, v, segments=blocks)
    np.testing.assert_allclose(y, expected, rtol=1e-10, atol=1e-12)


def test_tokens_that_no_level_reaches_are_not_numbers():
    q, k, v, log_decay, strength, weights = arrays(count=4)
    y, _ = read_by_level(delta(q, k, log_decay, strength), v, weights)
    assert jnp.all(jnp.isfinite(y[:, :8])) and jnp.all(jnp.isnan(y[:, 8]))


@pytest.mark.parametrize(('length', 'count'), [(0, 0), (1, 0), (2, 1), (8, 3), (9, 4), (16384, 14)])
def test_levels_are_the_logarithm_of_the_length(length, count):
    assert levels_of(length) == count


LENGTH = 65_536


@pytest.mark.slow
@pytest.mark.parametrize('strength', [1e-3, 10.0])
@pytest.mark.parametrize('core', ['linear_attention', 'delta_rule'])
def test_long_sequences_stay_finite_and_near_float64(core, strength):
    """Decays weak and strong, every token with weights of its own."""

    def read(dtype):
        wide = jnp.promote_types(dtype, jnp.float32)
        q, k, v = (noise(1, LENGTH, 1, 8, seed=seed, dtype=jnp.bfloat16).astype(dtype) for seed in range(3))
        log_decay = -strength * jnp.abs(noise(1, LENGTH, 1, seed=3).astype(wide))
        weights = jax.nn.softplus(noise(1, LENGTH, 1, 17, seed=5).astype(wide))
        if core == 'delta_rule':
            unit = (k.astype(wide) / jnp.linalg.norm(k.astype(wide), axis=-1, keepdims=True)).astype(jnp.bfloat16)
            run = delta(q, unit.astype(dtype), log_decay, jax.nn.sigmoid(noise(1, LENGTH, 1, seed=4).astype(wide)))
        else:
            run = lambda v, **given: cores.linear_attention(q, k, v, log_decay, **given)  # noqa: E731
        return jax.jit(lambda v: read_by_level(run, v, weights)[0])(v)

    expected = read(jnp.float64)
    with jax.enable_x64(False):
        found = read(jnp.bfloat16)
    assert jnp.all(jnp.isfinite(found))
    np.testing.assert_allclose(
        np.asarray(found, np.float64), expected, rtol=0, atol=0.02 * float(jnp.abs(expected).max())
    )
