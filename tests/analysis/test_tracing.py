"""Traces: what has to come back where, prompts of rows, and a run."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.analysis.asked import Query, prompts
from attnlab.analysis.interventions import causal_trace
from attnlab.cli import main
from attnlab.config import build
from attnlab.context import Context
from attnlab.errors import UserError
from configs import language
from tests.analysis.test_parts import made
from tests.bad_inputs.conftest import originals

__all__ = ['originals']


def test_all_comes_back_at_the_token_that_is_asked_and_nothing_where_prompts_agree():
    model = made('nope', heads=2)
    tokens = jnp.asarray([[3, 1, 4, 1], [2, 5, 0, 6]])
    others = tokens.at[:, 1].set(jnp.asarray([6, 3]))
    asked = Query(np.asarray(tokens), np.asarray([3, 3]), np.asarray([2, 0]), Context.full(2, 4))
    corrupted = model.embed(others, asked.ctx)
    run = jax.jit(lambda: causal_trace(model, tokens, asked.ctx, corrupted, asked.score(model)))
    maps, clean, corrupted = run()
    logits = jax.nn.softmax(model.logits(model.hidden(tokens, Context.full(2, 4))[0][:, 3]))
    np.testing.assert_allclose(clean, np.mean([logits[0, 2], logits[1, 0]]), rtol=1e-4)
    assert abs(float(clean - corrupted)) > 1e-5
    # After the last layer the token asked is all there is; before the token that differs nothing does.
    np.testing.assert_allclose(maps[1, 3], clean, rtol=1e-4)
    np.testing.assert_allclose(maps[1, :3], corrupted, rtol=1e-4)
    np.testing.assert_allclose(maps[0, 0], corrupted, rtol=1e-4)
    assert float(jnp.abs(maps[0, 1] - corrupted)) > 1e-6


def test_prompts_are_asked_at_their_last_label():
    batch = {
        'tokens': np.arange(8).reshape(2, 4),
        'segments': np.ones((2, 4), np.int32),
        'positions': np.tile(np.arange(4), (2, 1)),
        'at': np.array([[0, 2], [1, 3]]),
        'targets': np.array([[7, 8], [9, 5]]),
        'weights': np.array([[1.0, 1.0], [1.0, 0.0]]),
    }
    task = build(language.get_config('zoo=mingru').task)
    _, asked, answers = prompts(batch, task)
    assert asked.tolist() == [2, 1] and answers.tolist() == [8, 9]
    texts = {name: value for name, value in batch.items() if name != 'at'}
    assert prompts(texts, task)[1].tolist() == [1, 0]
    with pytest.raises(UserError, match='row 1 asks for no token'):
        prompts({**batch, 'weights': np.array([[1.0, 1.0], [0.0, 0.0]])}, task)
    with pytest.raises(UserError, match='row 0 holds several documents'):
        prompts({**batch, 'segments': np.array([[1, 1, 2, 2], [1, 1, 1, 0]])}, task)
    with pytest.raises(UserError, match='asked for are answers that are tokens'):
        prompts({**batch, 'tokens': np.zeros((2, 4, 1))}, task)


def test_a_run_is_traced(originals, capsys):
    run = originals / 'run'
    assert main(['analyse', f'--workdir={run}', '--trace', '--rows=2', '--compilation_cache=']) == 0
    assert 'what comes back' in capsys.readouterr().out
    record = json.loads((run / 'analysis' / '4-trace.json').read_text())
    assert set(record['maps']) == {'residual', 'mixer.output', 'mlp.output'}
    # One layer: the stream after it at the last token is the answer.
    assert record['maps']['residual'][0][-1] == pytest.approx(1, abs=1e-3)
    assert main(['analyse', f'--workdir={run}', '--trace', '--rows=1', '--compilation_cache=']) == 2
    assert 'every row is traced against another' in capsys.readouterr().err
