"""Kernelised hashes against their definition in numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.nn import hashing
from attnlab.nn.hashing import Clipped, DocumentHash, KernelHash, Signs
from attnlab.testing.noise import noise

HEADS, BITS, ANCHORS, TOKENS = 2, 3, 5, 12


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@functools.cache
def made(kind=KernelHash):
    return kind(4, heads=HEADS, bits=BITS, anchors=ANCHORS, rngs=nnx.Rngs(0))


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


@functools.cache
def vectors():
    x = np.array(noise(2, TOKENS, HEADS, 4, dtype=jnp.float32), np.float64)
    return unit(x)


SEEN = np.array([[True] * TOKENS, [True] * 9 + [False] * 3])


def kernels(x, anchors, spread):
    return np.exp(-((x[:, None] - anchors[None]) ** 2).sum(-1) / (2 * spread))


def test_codes_are_signs_of_centred_kernels():
    subject, x = made(), vectors()
    anchors, spread, means, directions = (
        np.asarray(getattr(subject, name)[...], np.float64) for name in ('anchors', 'spread', 'means', 'directions')
    )
    found = subject(jnp.asarray(x))
    for head in range(HEADS):
        z = (kernels(x[0, :, head], anchors[head], spread[head]) - means[head]) @ directions[head].T
        np.testing.assert_array_equal(found[0, :, head], np.where(z > 0, 1, -1))
        assert abs(z).min() > 1e-6


def test_the_gradient_of_signs_is_that_of_clipped_numbers():
    z, weights = jnp.asarray([-2.0, -0.5, 0.0, 0.3, 1.5]), jnp.arange(1.0, 6.0)
    hard, soft = (jax.grad(lambda z, of=of: jnp.vdot(weights, of(z)))(z) for of in (Signs(), Clipped()))
    np.testing.assert_array_equal(hard, soft)
    np.testing.assert_array_equal(hard, [0, 2, 3, 4, 0])
    np.testing.assert_array_equal(Signs()(z), [-1, -1, -1, 1, 1])


def targets(x, seen):
    near = hashing.NEAREST if TOKENS // 2 > hashing.NEAREST else TOKENS // 2
    found = np.zeros((TOKENS, TOKENS))
    places = np.flatnonzero(seen)
    for t in places:
        order = places[np.argsort(x[places] @ x[t], kind='stable')]
        found[t, order[-near:]] += 1
        found[t, order[:near]] -= 1
    return found


@pytest.mark.parametrize('kind', [KernelHash, DocumentHash])
def test_the_fit_is_that_of_the_paper(kind):
    """Bit by bit, by descent with Nesterov's momentum on the soft codes, kept where the hard ones do better.

    In the released code kernels have the spread of their row.
    """
    subject, x, key = made(kind), vectors(), jax.random.key(3)
    found = subject.learned(jnp.asarray(x), jnp.asarray(SEEN, jnp.int32), key)
    anchors = np.asarray(found.anchors)
    # Anchors are tokens of the first row, the same ones for every head, none twice.
    places = [int(np.argmin(((x[0, :, 0] - anchor) ** 2).sum(-1))) for anchor in anchors[0]]
    assert len(set(places)) == ANCHORS
    for head in range(HEADS):
        np.testing.assert_allclose(anchors[head], x[0, places, head])
    all_kernels = np.zeros((HEADS, 2, TOKENS, ANCHORS))
    goals = np.zeros((HEADS, 2, TOKENS, TOKENS))
    for head in range(HEADS):
        tokens = np.concatenate([x[row, SEEN[row], head] for row in range(2)])
        spread = ((tokens[:, None] - anchors[head][None]) ** 2).sum(-1).mean()
        spreads = [spread, spread]
        if kind is DocumentHash:
            spreads = [((x[row, SEEN[row], None, head] - anchors[head][None]) ** 2).sum(-1).mean() for row in range(2)]
        parts = [kernels(x[row, SEEN[row], head], anchors[head], spreads[row]) for row in range(2)]
        means = np.concatenate(parts).mean(0)
        np.testing.assert_allclose(found.spread[head], spread)
        np.testing.assert_allclose(found.means[head], means)
        for row in range(2):
            centred = kernels(x[row, :, head], anchors[head], spreads[row]) - means
            all_kernels[head, row] = np.where(SEEN[row][:, None], centred, 0)
            goals[head, row] = BITS * targets(x[row, :, head], SEEN[row])
    starts, sizes = np.asarray(subject.directions[...], np.float64), BITS * SEEN.sum(axis=1)

    def loss(codes):
        return -(np.einsum('hbt,hbts,hbs->hb', codes, goals, codes) / sizes).mean()

    for bit in range(BITS):
        direction, velocity = starts[:, bit].copy(), np.zeros((HEADS, ANCHORS))
        for _ in range(hashing.STEPS):
            soft = np.tanh(np.einsum('hbtm,hm->hbt', all_kernels, direction) / 2)
            both = np.einsum('hbts,hbs->hbt', goals + goals.swapaxes(2, 3), soft)
            slopes = (1 - soft**2) / 2 / sizes[None, :, None]
            gradient = -np.einsum('hbt,hbt,hbtm->hm', both, slopes, all_kernels) / (HEADS * 2)
            velocity = hashing.MOMENTUM * velocity + gradient
            direction = direction - hashing.RATE * (gradient + hashing.MOMENTUM * velocity)
        before, after = (
            np.where(SEEN[None], np.where(np.einsum('hbtm,hm->hbt', all_kernels, each) > 0, 1, -1), 0)
            for each in (starts[:, bit], direction)
        )
        kept, codes = (direction, after) if loss(after) < loss(before) else (starts[:, bit], before)
        np.testing.assert_allclose(found.directions[:, bit], kept, rtol=1e-8)
        goals = goals - np.einsum('hbt,hbs->hbts', codes, codes)


@pytest.mark.parametrize('tokens', [1, 6, 10, 12, 15, 20])
def test_padding_does_not_count_among_the_nearest_tokens(tokens):
    x = unit(np.array(noise(1, 40, 1, 4), np.float64))
    alone = hashing._targets(jnp.asarray(x[:, :tokens]), jnp.ones((1, tokens), bool))
    found = hashing._targets(jnp.asarray(x), jnp.arange(40)[None] < tokens)
    np.testing.assert_array_equal(found[:, :, :tokens, :tokens], alone)
    assert not found[:, :, tokens:].any() and not found[:, :, :, tokens:].any()
    assert tokens == 1 or (np.sum(np.asarray(alone) > 0, axis=-1) == max(1, min(10, tokens // 2))).all()


def test_a_fit_is_kept():
    subject = KernelHash(4, heads=HEADS, bits=BITS, anchors=ANCHORS, rngs=nnx.Rngs(0))
    x, seen = jnp.asarray(vectors()), jnp.asarray(SEEN, jnp.int32)
    expected = subject.learned(x, seen, jax.random.key(3))
    assert not subject.fitted[...]
    subject.fit(x, seen, jax.random.key(3))
    assert subject.fitted[...]
    np.testing.assert_allclose(subject.anchors[...], expected.anchors, rtol=1e-6)
    before = np.asarray(subject.anchors[...])
    subject.fit(x, seen, jax.random.key(4))
    np.testing.assert_array_equal(subject.anchors[...], before)


def test_anchors_are_repeated_where_tokens_are_few():
    subject = made()
    seen = jnp.asarray([[1] * 3 + [0] * 9] * 2)
    anchors = subject.learned(jnp.asarray(vectors()), seen, jax.random.key(0)).anchors[0]
    assert len(np.unique(np.round(anchors, 9), axis=0)) == 3 and np.isfinite(anchors).all()
