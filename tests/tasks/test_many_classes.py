"""Many classes near prototypes: frequencies, the best guess, slices, and what is measured when."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from attnlab.data.synthetic.prototypes import ZipfPrototypes
from attnlab.errors import UserError
from attnlab.tasks.many_classes import BANDS, ManyClasses

DATA = ZipfPrototypes(classes=40, dim=3, noise=0.4, seed=1)
TASK = ManyClasses(DATA, bounds=(2, 10), held_out=600)


def stacked(source):
    rows = [source[index] for index in range(len(source))]
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def test_classes_have_the_frequencies_of_zipf_and_points_the_noise():
    rows = stacked(DATA.rows('train', 4_000))
    expected = 1 / np.arange(1, 41)
    expected /= expected.sum()
    np.testing.assert_allclose(np.bincount(rows['label'], minlength=40) / 4_000, expected, atol=0.02)
    apart = rows['tokens'][:, 0] - DATA.prototypes()[rows['label']]
    np.testing.assert_allclose([apart.mean(), apart.std()], [0, 0.4], atol=0.01)
    assert not np.array_equal(stacked(DATA.rows('test', 50))['label'], rows['label'][:50])


def test_prototypes_have_a_stream_of_their_own():
    """NumPy fills seeds up with zeros, so that a shorter one is that of a training example; the change is told."""
    first = np.random.default_rng((DATA.seed, 0, 0)).standard_normal(3).astype(np.float32)
    assert not np.array_equal(DATA.prototypes()[0], first)
    assert TASK.describe()['data'] == f'{DATA!r}, edition 2'


def test_the_best_guess_is_that_of_the_densities():
    rows = stacked(DATA.rows('test', 300))
    x, labels = rows['tokens'][:, 0].astype(np.float64), rows['label']
    squares = np.sum(np.square(x[:, None] - DATA.prototypes()), axis=-1)
    expected = log_softmax(np.log(DATA.frequencies()) - squares / (2 * 0.4**2), axis=1)
    losses, right = DATA.posterior(rows['tokens'][:, 0], labels)
    np.testing.assert_allclose(losses, -expected[np.arange(300), labels], rtol=1e-3, atol=1e-3)
    np.testing.assert_array_equal(right, expected.argmax(axis=1) == labels)


def test_slices_are_bands_of_classes_that_add_up():
    parts = {name: stacked(part.source)['label'] for name, part in TASK.slices('test', 1, (1,), 600).items()}
    assert list(parts) == ['all', *BANDS] and sum(len(parts[band]) for band in BANDS) == len(parts['all']) == 600
    assert parts['frequent'].max() == 1 and 2 <= parts['middle'].min() <= parts['middle'].max() == 9
    assert parts['rare'].min() == 10
    guesses = TASK.trivial(TASK.slices('test', 1, (1,), 600)['all'])
    assert guesses['accuracy']['majority'] == np.mean(parts['all'] == 0) < guesses['accuracy']['posterior'] < 1
    assert guesses['loss']['posterior'] < guesses['loss']['frequencies']


class Known:
    """Has the scores of the best guess, and can be asked for all of them in evaluation alone."""

    streaming = decodes = False
    documents = outputs = 1

    def __init__(self, training):
        self.training = training

    def hidden(self, tokens, ctx):
        return tokens, None

    pooled = sample = init_state = stages = hidden

    def losses(self, hidden, labels, key):
        assert (key is not None) == self.training
        return jnp.ones(labels.shape)

    def logits(self, hidden):
        assert not self.training
        apart = hidden[:, None] - jnp.asarray(DATA.prototypes())[None]
        frequencies = jnp.asarray(DATA.frequencies(), jnp.float32)[None]
        return jnp.log(frequencies) - jnp.sum(apart**2, axis=-1) / (2 * 0.4**2)


def test_accuracy_is_of_evaluation():
    batch = {name: jnp.asarray(x) for name, x in stacked(DATA.rows('test', 300)).items()}
    assert set(TASK.measure(Known(training=True), batch, jax.random.key(0))) == {'loss'}
    found = TASK.measure(Known(training=False), batch, None)
    _, right = DATA.posterior(np.asarray(batch['tokens'][:, 0]), np.asarray(batch['label']))
    assert float(found['accuracy'].mean()) == pytest.approx(right.mean(), abs=0.004)


def test_rows_are_as_the_example_says():
    row, zeros = TASK.source('train', 1)[2**31 - 2], TASK.example(1)
    assert {name: (x.shape, x.dtype) for name, x in row.items()} == {n: (x.shape, x.dtype) for n, x in zeros.items()}


MISTAKES = {
    'one class': (lambda: ZipfPrototypes(classes=1), 'classes of ZipfPrototypes is 1; it must be at least 2'),
    'no noise': (lambda: ZipfPrototypes(noise=0.0), 'noise of ZipfPrototypes is 0.0; it must be positive'),
    'bounds beyond': (lambda: ManyClasses(DATA, bounds=(2, 40)), 'must rise between 0 and the classes, 40'),
    'two tokens': (lambda: TASK.source('train', 2), 'config.length is 2; a point is 1 token'),
    'another split': (lambda: TASK.source('tset', 1), "ZipfPrototypes has no split 'tset'; did you mean 'test'"),
}


@pytest.mark.parametrize('case', MISTAKES)
def test_mistakes_are_named_in_one_line(case):
    call, sentence = MISTAKES[case]
    with pytest.raises(UserError, match=sentence) as caught:
        call()
    assert '\n' not in str(caught.value)
