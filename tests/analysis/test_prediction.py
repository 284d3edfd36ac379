"""What is said of a head's predictions, from hidden states and tokens that are known."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.analysis import output_head
from attnlab.analysis.prediction import HeadCalls, _examined, matrix_of
from attnlab.models.heads.classification import ClassificationHead
from attnlab.models.heads.language import LanguageHead
from attnlab.quantize.formats import Symmetric
from attnlab.quantize.layers import Quantization, ShiftedLinear
from attnlab.quantize.training import Rounded

TOKENS, WIDTH = 5, 3


@pytest.fixture(scope='module')
def rows():
    """Two rows that differ, of hidden states with a mean far from zero."""
    rng = np.random.default_rng(0)

    def row(shift):
        hidden = (rng.standard_normal((40, WIDTH)) + shift).astype(np.float32)
        contexts, targets = (rng.integers(0, TOKENS, 40).astype(np.int32) for _ in range(2))
        return HeadCalls(hidden, np.zeros((40, TOKENS)), rng.uniform(1, 2, 40), targets, contexts, np.ones(40, bool))

    return [row(3.0), row(4.0)]


@pytest.fixture(scope='module')
def head():
    return LanguageHead(WIDTH, TOKENS, rngs=nnx.Rngs(0))


@pytest.fixture(scope='module')
def examined(head, rows):
    return _examined(head, rows, 2, (1, WIDTH))


def test_anisotropy_is_said_with_the_mean_of_states_and_without(rows, examined):
    hidden = np.concatenate([row.hidden for row in rows]).astype(np.float64)
    for name, states in (('anisotropy', hidden), ('anisotropy_centred', hidden - hidden.mean(axis=0))):
        directions = states / np.linalg.norm(states, axis=1, keepdims=True)
        expected = (directions @ directions.T)[~np.eye(80, dtype=bool)].mean()
        np.testing.assert_allclose(examined.numbers[name], expected, rtol=1e-4)
    assert examined.numbers['anisotropy'] > 0.8 > 0.1 > examined.numbers['anisotropy_centred']


def test_the_spectrum_is_of_log_probabilities_less_their_mean_over_targets(rows, examined):
    counts = np.ones((TOKENS, TOKENS))
    for row in rows:
        np.add.at(counts, (row.tokens, row.targets), 1)
    matrix = np.log(counts / counts.sum(axis=1, keepdims=True))
    matrix -= matrix.mean(axis=1, keepdims=True)
    values = np.linalg.svd(matrix, compute_uv=False)
    shares = values[:-1] / values.sum()
    # Less the mean one direction of five is gone.
    assert values[-1] < 1e-12
    np.testing.assert_allclose(examined.numbers['rank_log_probabilities'], np.exp(-np.sum(shares * np.log(shares))))


def test_heads_are_refitted_to_one_half_and_measured_on_the_other(head, rows, examined):
    fitted, other = (output_head.Predictions(row.hidden, row.targets) for row in rows)
    for held_out, same in ((other, True), (fitted, False)):
        found = output_head.refits(np.asarray(head.weight[...]), fitted, held_out, (1, WIDTH))
        np.testing.assert_allclose([each.fitted for each in found], [each.fitted for each in examined.refits])
        losses = ([each.held_out for each in refits] for refits in (found, examined.refits))
        assert np.allclose(*losses, rtol=1e-4) == same
    np.testing.assert_allclose(examined.loss, rows[1].losses.mean())


def shifted(head):
    head.linear = ShiftedLinear(head.linear, jnp.asarray([0, -2, -1], jnp.int8))
    return head


@pytest.mark.parametrize('changed', [Quantization(Symmetric(8)), Rounded(Symmetric(8)), shifted, None])
def test_the_matrix_of_classes_is_what_the_head_multiplies_with(changed):
    head = ClassificationHead(WIDTH, 1, classes=4, rngs=nnx.Rngs(0))
    plain = np.asarray(head.linear.weight[...]).T
    found = matrix_of(head if changed is None else changed(head))
    np.testing.assert_allclose(found, plain, atol=2 / 127 * np.abs(plain).max())
    assert found.shape == (4, WIDTH) and (changed in (shifted, None)) == np.array_equal(found, plain)
    hidden = jnp.asarray(np.random.default_rng(0).standard_normal((5, WIDTH)), jnp.float32)
    np.testing.assert_allclose(head.logits(hidden) - head.logits(jnp.zeros_like(hidden)), hidden @ found.T, atol=1e-5)
