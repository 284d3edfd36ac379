"""The separators of experiments/separation: as many parameters, and what each of them sees."""

import pathlib

import pytest

from attnlab.compare.equality import unmatched
from attnlab.experiment.experiment import SIZES, module_of
from attnlab.train.cost import parameters
from attnlab.train.setup import prepare

SWEEP = module_of(pathlib.Path(__file__).parents[2] / 'experiments' / 'separation' / 'sweep.py')
SEEN = {'cpu': (25, 37, 57, 91, 251, 251), 'full': (49, 73, 113, 181, 505, 4001)}
"""Frames, by the number of blocks after which dilations begin again."""


@pytest.mark.parametrize('size', [pytest.param(size, marks=[pytest.mark.slow] * (size == 'full')) for size in SIZES])
def test_separators_are_matched_and_see_what_the_page_says(size):
    setups = {system: prepare(SWEEP.config(size, system, 'low', 0)) for system in SWEEP.SYSTEMS}
    sizes = {system: parameters(setup) for system, setup in setups.items()}
    assert not unmatched(list(sizes.values()), 0.01), sizes
    assert len({sizes[f'tcn{cycle}'] for cycle in SWEEP.CYCLES}) == 1
    for cycle, seen in zip(SWEEP.CYCLES, SEEN[size], strict=True):
        setup = setups[f'tcn{cycle}']
        assert SWEEP.frames_seen(setup.model, setup.model.frames(setup.length)) == seen
    everything = setups['mamba'].model.frames(setups['mamba'].length)
    assert SWEEP.frames_seen(setups['gla'].model, everything) == everything
