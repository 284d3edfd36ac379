"""Continuous thoughts: partial sums by enumeration, what is read, and the sampler by its definition."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.context import Context
from attnlab.data.synthetic.mixture import Mixture
from attnlab.data.synthetic.problem import Examples
from attnlab.data.synthetic.sums import SignedSums
from attnlab.errors import UserError
from attnlab.functional.sampling import Sampling
from attnlab.models.sampling import generate
from attnlab.models.thoughts import check_thinks, thinking
from attnlab.tasks.thoughts import ContinuousThought, partial_sums
from tests.analysis.test_parts import made

PROBLEM = SignedSums(terms=3, largest=3)


def test_answers_and_partial_sums_are_those_of_enumeration():
    problem = SignedSums(terms=4, largest=5)
    for index in range(20):
        row = Examples(problem, 6)[index]
        numbers = row['tokens'][:4] + 1
        assert row['tokens'][4] == problem.largest and row['at'].tolist() == [4]
        totals = [np.dot(signs, numbers) for signs in itertools.product((1, -1), repeat=4)]
        assert row['targets'][0] == problem.token(int(min(total for total in totals if total >= 0)))
        found = np.asarray(partial_sums(problem, jnp.asarray(row['tokens'][None])))[0]
        for count in (1, 2, 3):
            expected = np.zeros(problem.vocab)
            for signs in itertools.product((1, -1), repeat=count):
                expected[problem.token(int(np.dot(signs, numbers[:count])))] += 2.0**-count
            np.testing.assert_allclose(found[count - 1], expected, atol=1e-6)
    with pytest.raises(UserError, match='terms of SignedSums is 1'):
        SignedSums(terms=1).check(5)
    with pytest.raises(UserError, match='largest of SignedSums is 2; it must be larger: of 3 numbers so small a split'):
        SignedSums(terms=3, largest=2).check(5)


def test_no_split_has_numbers_of_another_in_any_order():
    splits = {name: Examples(SignedSums(), 5, split=name) for name in ('train', 'valid', 'test')}
    numbers = {name: {tuple(sorted(rows[i]['tokens'][:4])) for i in range(2000)} for name, rows in splits.items()}
    assert not numbers['train'] & numbers['test'] and not numbers['train'] & numbers['valid']
    assert not numbers['valid'] & numbers['test']
    assert len(numbers['valid']) == len(numbers['test']) == 50 and 300 < len(numbers['train']) <= 395
    parts = Mixture((SignedSums(), SignedSums()), (5, 5), ('a', 'b'))
    tested = Examples(parts, 5, split='test')
    assert {tuple(sorted(tested[i]['tokens'][:4])) for i in range(100)} <= numbers['test']


def test_a_run_says_which_edition_its_numbers_are():
    assert ContinuousThought().describe()['problem'] == 'SignedSums(terms=4, largest=9), edition 2'


@pytest.fixture(scope='module')
def model():
    """Of as many tokens as the problem has, 23; that of other tests has seven."""
    return made('nope', vocab=PROBLEM.vocab, heads=2)


def test_the_loss_is_the_divergence_and_the_answers(model):
    task = ContinuousThought(PROBLEM)
    row = task.source('train', 4)[3]
    batch = {name: jnp.asarray(value)[None] for name, value in row.items()}
    found = task.measure(model, batch, None)
    wanted = np.asarray(partial_sums(PROBLEM, batch['tokens']))[0]
    table = np.asarray(model.embedding.weight[...])
    vectors = np.concatenate([table[row['tokens']], wanted @ table])[None]
    hidden, _ = model.stack(jnp.asarray(vectors, jnp.float32), Context.full(1, 6))
    logs = np.asarray(jax.nn.log_softmax(model.logits(model.norm(hidden))[0, 3:]), np.float64)
    divergence = sum(
        np.sum(each[each > 0] * (np.log(each[each > 0]) - log[each > 0]))
        for each, log in zip(wanted, logs, strict=False)
    )
    np.testing.assert_allclose(found['loss'].total, divergence - logs[2, row['targets'][0]], rtol=1e-4)
    np.testing.assert_allclose(found['answer_loss'].total, -logs[2, row['targets'][0]], rtol=1e-4)
    # In evaluation the model reads its own thoughts: the accuracy is of what it says after these.
    said = model.logits(thinking(model, batch['tokens'], 2)[0][:, -1])
    assert float(found['accuracy'].total) == float(jnp.argmax(said) == row['targets'][0])


def test_the_sampler_thinks_as_the_definition(model):
    prompt = np.array([0, 1, 0, 2])
    hidden, weights = thinking(model, jnp.asarray(prompt)[None], 2)
    assert weights.shape == (1, 2, PROBLEM.vocab)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)
    first = next(generate(model, prompt, 1, Sampling(0.0), thoughts=2))
    assert first == int(jnp.argmax(model.logits(hidden[:, -1])))
    # Without thoughts it is what the last token says; a thought that is sure of a token is that token.
    assert next(generate(model, prompt, 1, Sampling(0.0))) == int(jnp.argmax(model.logits(hidden[:, 0])))
    with pytest.raises(UserError, match='thoughts are mixtures of token vectors'):
        check_thinks(object())
    with pytest.raises(UserError, match='thoughts is -1; it must be at least 0'):
        next(generate(model, prompt, 1, thoughts=-1))
