"""The plan of `experiments/recall_by_state`: the argument of a study is that of the mixer whose state it sizes."""

import pathlib

import pytest

from attnlab.experiment.experiment import Experiment
from attnlab.sweep.sweep import read
from attnlab.train.cost import state_bytes
from attnlab.train.setup import prepare

FOLDER = pathlib.Path(__file__).parents[2] / 'experiments' / 'recall_by_state'


@pytest.mark.parametrize(
    ('small', 'large'),
    [
        ('based-key_dim=8', 'based-key_dim=64'),
        ('taylorshift-key_dim=8', 'taylorshift-key_dim=64'),
        ('lizard-heads=8', 'lizard-heads=1'),
        ('rg_lru-width=64', 'rg_lru-width=512'),
        ('al_rnn-width=64', 'al_rnn-width=512'),
        ('lru-state=64', 'lru-state=512'),
        ('mlstm_block-heads=8', 'mlstm_block-heads=1'),
        ('s4-state=8', 's4-state=64'),
    ],
)
def test_the_argument_sizes_the_state(small, large):
    """That of the layer behind the short convolution."""
    studies = Experiment(FOLDER, 'full').studies()['recall']
    bases = [read(studies[label]).base for label in (small, large)]
    mixers = [[block.mixer for block in base.model.stack.blocks] for base in bases]
    changed = [i for i, pair in enumerate(zip(*mixers, strict=True)) if pair[0] != pair[1]]
    assert changed == [1]
    less, more = (prepare(base) for base in bases)
    assert state_bytes(less, less.length) < state_bytes(more, more.length)
