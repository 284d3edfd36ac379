"""Experiments that keep pictures: where runs leave them is where reports look for them."""

import pathlib

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from attnlab.evals.cadence import AtEnd
from attnlab.evals.drawn import Drawings
from attnlab.experiment.experiment import Experiment, module_of
from attnlab.experiment.results import kept_pictures, written_results
from attnlab.experiment.studies import report_studies
from attnlab.runs.loading import Loaded
from attnlab.sweep.sweep import read
from attnlab.train.setup import prepare

EXPERIMENTS = pathlib.Path(__file__).parents[2] / 'experiments'


def pictures(name, key):
    folder = EXPERIMENTS / name
    return module_of(folder / 'plot.py').pictures(written_results(Experiment(folder, 'cpu'))[key])


def test_drawn_images_are_left_where_they_are_looked_for(tmp_path):
    pytest.importorskip('sklearn')
    sweep = module_of(EXPERIMENTS / 'small_diffusion' / 'sweep.py')
    setup, images = prepare(sweep.drawing('mha', 'low', 0, 'cpu')), np.zeros((4, 64, 1), np.float32)
    for name in (sweep.ALL, *(sweep.few_keys(0.125, kept) for kept in sweep.KEPT)):
        sweep.keep(tmp_path, setup, Drawings(AtEnd(), count=4), images, name)
    named = pictures('small_diffusion', 'runs')
    assert list(named) == ['mha', *(f'mha-{sweep.few_keys(0.125, kept)}' for kept in sweep.KEPT), 'lamamba', 'gla']
    labels = {run.label for run in sweep.runs('cpu')}
    for name, path in named.items():
        label, _, left = path.partition('/')
        assert label in labels and label.startswith(name.partition('-')[0]) and (tmp_path / left).exists()


def test_what_tokens_see_at_another_resolution_is_left_where_it_is_looked_for(tmp_path):
    """The digits of 16 and of 48 pixels, of one untrained model; a neighbourhood sees as many pixels of both."""
    pytest.importorskip('sklearn')
    sweep = module_of(EXPERIMENTS / 'resolution' / 'sweep.py')
    setup = prepare(sweep.config('neighbourhood', 'low', 0, 'cpu'))
    loaded, seen = Loaded(setup, setup.initialize().variables, 0), {}
    for size in sweep.PICTURED['cpu']:
        sweep.draw_seen(loaded, size, tmp_path / 'seen' / str(size))
        bright = np.asarray(Image.open(tmp_path / 'seen' / str(size) / 'receptive_field.png'))[..., 0]
        seen[size] = np.count_nonzero(bright) * (size / len(bright)) ** 2
    # Two layers of 3 x 3 tokens of 2 x 2 pixels: 10 x 10 at the most.
    assert 0 < seen[16] <= 100 and 0 < seen[48] <= 100
    named = pictures('resolution', 'runs')
    labels = {run.label for run in sweep.runs('cpu')}
    for name, path in named.items():
        label, _, left = path.partition('/')
        assert label in labels and label.startswith(name.partition('-')[0]) and label.endswith('-0')
        assert (tmp_path / left).exists()


def test_what_tokens_have_seen_is_drawn_and_kept(tmp_path):
    """Of the first fresh seed of every mixer, on one of the tasks."""
    studies = Experiment(EXPERIMENTS / 'local_or_global', 'cpu').studies()
    for report in studies:
        kinds = [each.target.rpartition('.')[2] for each in read(studies[report]['mha']).base.evals]
        assert ('ReceptiveField' in kinds) == report.startswith('count')
    named = pictures('local_or_global', 'studies')
    segmented = [name for name in named if name.startswith('segments_')]
    assert set(named) == {*studies['count'], *segmented} and segmented
    readme = (EXPERIMENTS / 'local_or_global' / 'README.md').read_text()
    for name in segmented:
        workdir, _, left = named[name].partition('/figures/')
        assert left == 'segmented.png' and f'--workdir=runs/experiments/local_or_global/cpu/{workdir}' in readme
    assert named['swin'] == 'count/swin/confirm/trials/0000/figures/receptive_field.png'
    folder = tmp_path / 'experiments' / 'local_or_global'
    for name in ('sweep.py', 'plot.py', 'README.md', 'results/cpu.json', 'results/cpu/swin.png'):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        here = EXPERIMENTS / 'local_or_global' / name
        (folder / name).write_bytes(here.read_bytes() if here.exists() else b'picture')
    (tmp_path / 'configs').symlink_to(EXPERIMENTS.parent / 'configs')
    experiment = Experiment(folder, 'cpu')
    report_studies(experiment, tmp_path / 'runs', 'command', Console(quiet=True))
    assert '![swin](results/cpu/swin.png)' in (folder / 'README.md').read_text()
    root = tmp_path / 'runs'
    (root / named['mha']).parent.mkdir(parents=True)
    (root / named['mha']).write_bytes(b'another')
    rows = written_results(experiment)['studies']
    shown = kept_pictures(experiment, module_of(folder / 'plot.py'), rows, root)
    assert (folder / 'results' / 'cpu' / 'mha.png').read_bytes() == b'another'
    assert '![mha](results/cpu/mha.png) |' in shown and '![swin]' in shown


def test_a_row_of_a_readme_holds_three_pictures(tmp_path):
    class Plot:
        @staticmethod
        def pictures(rows):
            return {row['name']: f'{row["name"]}.png' for row in rows}

    for name in 'abcde':
        (tmp_path / f'{name}.png').write_bytes(b'picture')
    (tmp_path / 'asked').mkdir()
    (tmp_path / 'asked' / 'sweep.py').write_text('')
    asked, rows = Experiment(tmp_path / 'asked', 'cpu'), [{'name': name} for name in 'abcde']
    shown = kept_pictures(asked, Plot, rows, tmp_path)
    assert [line.count('![') for line in shown.splitlines()] == [0, 0, 3, 0, 0, 0, 2]
    assert kept_pictures(asked, Plot, [], tmp_path) == ''
