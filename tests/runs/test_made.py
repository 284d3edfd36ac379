"""Runs made of runs: what an interrupted command has left is not taken for what another makes."""

import dataclasses

import jax
import numpy as np
import pytest
from rich.console import Console

from attnlab.configuration import config_of
from attnlab.errors import UserError
from attnlab.runs import made
from attnlab.runs.loading import Loaded, load_run
from attnlab.train import run
from attnlab.train.fork import Fork
from attnlab.train.launch import launch
from attnlab.train.setup import prepare
from attnlab.train.state import joined, split
from tests.compare.conftest import CONFIGS


@pytest.fixture(scope='module')
def source(tmp_path_factory):
    """The folder of a run, and its model."""
    config = config_of(CONFIGS / 'recall.py', 'task=mqar')
    with config.unlocked():
        config.batch_size, config.length, config.evals = 2, 32, ()
        config.model.dim, config.model.stack.depth = 8, 1
    setup = prepare(config)
    state = setup.initialize()
    folder = tmp_path_factory.mktemp('source') / 'run'
    run.claim(folder, config)
    return folder, Loaded(setup, joined(state.params, state.buffers), 4)


def moved(loaded, by, step=4):
    _, params, buffers = split(loaded.model())
    params = jax.tree.map(lambda leaf: leaf + by, params)
    return dataclasses.replace(loaded, variables=joined(params, buffers), step=step)


def interrupted(monkeypatch, folder, loaded, changed, out, facts):
    def stopped(one):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(made, 'evaluated', stopped)
        made.write_made(folder, loaded, changed, out, facts)


def test_an_interrupted_command_leaves_no_parameters_to_another(source, tmp_path, monkeypatch):
    folder, loaded = source
    out = tmp_path / 'out'
    # Of a later step, the newest that would be there.
    interrupted(monkeypatch, folder, loaded, moved(loaded, 1.0, step=9), out, {'edited': {'answer': 'x'}})
    wanted = moved(loaded, 2.0)
    made.write_made(folder, loaded, wanted, out, {'edited': {'answer': 'y'}})
    found = load_run(out)
    assert found.step == 4 and run.starts(out)[-1]['edited'] == {'answer': 'y'}
    for one, other in zip(jax.tree.leaves(found.variables), jax.tree.leaves(wanted.variables), strict=True):
        np.testing.assert_array_equal(one, other)
    # It is not trained further, here or in another folder.
    config = run.saved_config(out)
    for folder, fork in ((out, None), (tmp_path / 'fork', Fork(out, 4, True))):
        with pytest.raises(UserError, match=f'{out} holds a run derived from other runs .edited.'):
            launch(config, folder, console=Console(quiet=True), fork=fork)
    # What is made of that says so.
    again = tmp_path / 'again'
    made.write_made(out, found, moved(found, 1.0), again, {'quantized': {'step': 4}})
    assert run.makings(run.starts(again)[-1]) == [['edited', {'answer': 'y'}], ['quantized', {'step': 4}]]


def test_checkpoints_of_training_are_left_alone(source, tmp_path, monkeypatch):
    folder, loaded = source
    trained = tmp_path / 'trained'
    interrupted(monkeypatch, folder, loaded, loaded, trained, {})
    for call in (
        lambda: made.check_new(folder, trained, '--out'),
        lambda: made.write_made(folder, loaded, moved(loaded, 1.0), trained, {'edited': {'answer': 'x'}}),
    ):
        with pytest.raises(UserError, match='holds a run already'):
            call()
    assert load_run(trained).step == 4
