"""The plan of `experiments/local_or_global`: what is smaller at CPU size, and that what is compared is not."""

import pathlib

import pytest

from attnlab.data.vision.shapes import Connected, Count, SameDifferent
from attnlab.experiment.experiment import Experiment
from attnlab.sweep.sweep import read
from attnlab.train.setup import prepare

FOLDER = pathlib.Path(__file__).parents[2] / 'experiments' / 'local_or_global'
USUAL = {'count': Count(), 'same_different': SameDifferent(), 'connected': Connected()}


@pytest.mark.parametrize('task', ['count', 'same_different'])
def test_images_of_cpu_size_are_of_8_x_8_patches_that_cut_what_is_drawn_alike(task):
    base = read(Experiment(FOLDER, 'cpu').studies()[task]['mha']).base
    patch, setup = base.model.inputs.patch, prepare(base)
    size = setup.task.data.of.size
    assert size // patch == 8 and base.model.inputs.size == (size, size) and setup.length == size**2
    assert {found.cadence.n for found in setup.evals} == {setup.steps}
    if task == 'same_different':
        assert setup.task.data.of.step % patch == 0 and 2 * setup.task.data.of.cells == patch


def test_the_small_size_counts_at_equal_operations_too_and_leaves_paths_out():
    assert list(Experiment(FOLDER, 'cpu').studies()) == ['count', 'same_different', 'count_equal_flops']
    assert list(Experiment(FOLDER, 'full').studies()) == [*USUAL, *(f'{task}_equal_flops' for task in USUAL)]


@pytest.mark.parametrize('task', USUAL)
def test_images_of_full_size_are_the_usual_ones(task):
    base = read(Experiment(FOLDER, 'full').studies()[task]['mha']).base
    assert prepare(base).task.data.of == USUAL[task] and base.model.inputs.patch == 2
