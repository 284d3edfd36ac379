"""Hashed attention against its weights, in numpy float64."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from attnlab.errors import UserError
from attnlab.mixers.linear import hashed as module
from attnlab.mixers.linear.hashed import HashedAttention
from attnlab.nn.hashing import DocumentHash
from attnlab.nn.preludes import Canon
from attnlab.testing.contract import Subject
from attnlab.testing.contract.streaming import check_decoding
from tests.mixers.linear.equations import DIM, HEADS, apply, batch, check_layer, heads

SIZES = {'bits': 6, 'anchors': 7}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def hashed(mixer: HashedAttention, x: np.ndarray, causal: bool = True) -> np.ndarray:
    q, v = (heads(apply(linear, x)) for linear in (mixer.query, mixer.value))
    q, out = q / np.linalg.norm(q, axis=-1, keepdims=True), np.zeros_like(v)
    for h in range(HEADS):
        anchors, means, directions = (
            np.asarray(getattr(mixer.hash, name)[...], np.float64)[h] for name in ('anchors', 'means', 'directions')
        )
        distances = ((q[:, None, h] - anchors[None]) ** 2).sum(-1)
        # In the released code the spread is that of the row at hand.
        spread = distances.mean() if isinstance(mixer.hash, DocumentHash) else float(mixer.hash.spread[...][h])
        kernels = np.exp(-distances / (2 * spread)) - means
        codes = np.where(kernels @ directions.T > 0, 1, -1)
        shared = (codes[:, None] == codes[None]).sum(-1)
        weights = 2 * shared - SIZES['bits'] + SIZES['bits'] + 1.0
        weights = np.tril(weights) if causal else weights
        assert weights[0, 0] == 2 * SIZES['bits'] + 1
        sums = weights @ v[:, h]
        if mixer.shift == 'own':
            # As in its `linear_attention_bias`: the own value for those of all keys.
            shift = SIZES['bits'] + 1
            seen = np.tri(len(x)) if causal else np.ones_like(weights)
            sums = sums - shift * seen @ v[:, h] + shift * v[:, h]
        out[:, h] = sums / weights.sum(1, keepdims=True)
    return apply(mixer.output, out.reshape(len(x), -1))


@pytest.mark.parametrize('causal', [True, False])
def test_the_layer_weighs_keys_by_the_bits_they_share(causal):
    check_layer('ecoformer', lambda mixer, x: hashed(mixer, x, causal), causal=causal, **SIZES)


@pytest.mark.parametrize(
    'options',
    [{'causal': True, 'shift': 'own'}, {'causal': False, 'shift': 'own', 'spread': 'document'}],
    ids=['causal', 'both ways'],
)
def test_the_released_code_adds_to_the_own_value_and_spreads_kernels_by_row(options):
    check_layer('ecoformer', lambda mixer, x: hashed(mixer, x, options['causal']), **options, **SIZES)


def test_the_own_value_streams():
    """Token by token as in one pass."""
    with jax.enable_x64(False):
        make = functools.partial(HashedAttention, heads=4, shift='own', **SIZES)
        check_decoding(Subject(make, causal=True))


def test_the_spread_of_a_document_is_not_causal():
    with pytest.raises(UserError, match="spread of HashedAttention is 'document', which looks ahead"):
        HashedAttention(DIM, heads=HEADS, spread='document', rngs=nnx.Rngs(0))


def test_hashes_are_fitted_to_queries_behind_their_prelude(monkeypatch):
    """Of some tokens of the row, whose neighbours the convolution reads all the same; anchors are queries of it."""
    monkeypatch.setattr(module, 'SAMPLED', 7)
    mixer = HashedAttention(DIM, heads=HEADS, bits=3, anchors=5, prelude=Canon, rngs=nnx.Rngs(0))
    x, ctx = batch(np.ones((1, 21), int))
    mixer.fit(x, ctx, jax.random.key(0))
    queries = np.moveaxis(np.asarray(mixer.hashed(x, ctx.segments))[0], 1, 0)
    for anchors, own in zip(np.asarray(mixer.hash.anchors[...]), queries, strict=True):
        assert np.abs(anchors[:, None] - own[None]).max(axis=-1).min(axis=1).max() < 1e-6
