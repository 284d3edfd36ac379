"""The source of known rank, and the divergence from it."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.data.synthetic.ranked import RankedTransitions
from attnlab.errors import UserError
from attnlab.tasks.transitions import Transitions, cross_entropies

TABLE = RankedTransitions(tokens=12, rank=4, seed=3)


def rows(table=TABLE):
    source = Transitions(table).source('train', 1)
    return {name: np.stack([source[index][name] for index in range(len(source))]) for name in source[0]}


def test_log_probabilities_have_the_rank():
    logarithms = np.log(rows()['probabilities'].astype(np.float64))
    values = np.linalg.svd(logarithms, compute_uv=False)
    assert values[3] > 0.1 > 1e-4 > values[4]
    np.testing.assert_allclose(rows()['probabilities'].sum(axis=1), 1, rtol=1e-6)
    assert not np.array_equal(rows(dataclasses.replace(TABLE, seed=4))['probabilities'], rows()['probabilities'])


def test_the_divergence_of_the_source_is_zero_and_of_uniform_what_entropy_lacks():
    chances = rows()['probabilities']
    losses, entropies = cross_entropies(jnp.asarray(TABLE.logits(), jnp.float32), jnp.asarray(chances))
    np.testing.assert_allclose(losses, entropies, rtol=1e-5)
    expected = -np.sum(chances * np.log(chances), axis=1)
    np.testing.assert_allclose(entropies, expected, rtol=1e-5)
    losses, _ = cross_entropies(jnp.zeros((12, 12)), jnp.asarray(chances))
    np.testing.assert_allclose(losses, np.log(12), rtol=1e-5)


MISTAKES = {
    'no rank': (lambda: RankedTransitions(rank=1), 'rank of RankedTransitions is 1; it must be from 2'),
    'a rank beyond the tokens': (lambda: RankedTransitions(tokens=8, rank=9), 'it must be from 2 to its tokens, 8'),
    'no spread': (lambda: RankedTransitions(spread=0.0), 'spread of RankedTransitions is 0.0; it must be positive'),
    'a seed below zero': (lambda: RankedTransitions(seed=-1), 'seed of RankedTransitions is -1'),
    'two tokens': (lambda: Transitions().source('train', 2), 'config.length is 2; a context is 1 token'),
    'another split': (lambda: Transitions().source('tset', 1), "RankedTransitions has no split 'tset'"),
}


@pytest.mark.parametrize('case', MISTAKES)
def test_mistakes_are_named_in_one_line(case):
    call, sentence = MISTAKES[case]
    with pytest.raises(UserError, match=sentence) as caught:
        call()
    assert '\n' not in str(caught.value)
