"""The verdict on published numbers is computed: what agrees, what differs and by how much, what is not comparable."""

import dataclasses
import json
import pathlib

import pytest

from attnlab.errors import UserError
from attnlab.evals.measured import of_seeds
from attnlab.experiment.experiment import SIZES, Experiment, load_module
from attnlab.experiment.published import Published, published_table, verdict
from attnlab.train.setup import prepare

CLAIM = Published(value=1.88, metric='validation loss', source='a paper, table 1')
FOLDERS = sorted(path.parent for path in pathlib.Path(__file__).parents[2].glob('experiments/published/*/sweep.py'))


@pytest.mark.parametrize(
    ('change', 'values', 'said'),
    [
        ({}, (1.87, 1.88, 1.90), 'agrees'),
        ({}, (1.95, 1.96, 1.97), 'differs: by +0.08'),
        ({'guess': 'bytes'}, (1.95, 1.96, 1.97), 'differs: by +0.08; best guess: bytes'),
        ({'spread': 0.1}, (1.95, 1.96, 1.97), 'agrees'),
        ({}, (1.89,), 'differs: by +0.01'),
        ({'direction': 'at most'}, (1.5, 1.6, 1.7), 'agrees'),
        ({'direction': 'at least'}, (1.5, 1.5, 1.5), 'differs: by -0.38'),
        ({'direction': 'at least'}, (1.0, 2.0, 3.0), 'not comparable: our interval reaches across the bound'),
        (
            {'changed': ('one seed', 'fewer steps')},
            (1.88, 1.88, 1.88),
            'not comparable: changed: one seed; fewer steps',
        ),
    ],
)
def test_verdicts(change, values, said):
    claim = dataclasses.replace(CLAIM, **change)
    assert str(verdict(claim, of_seeds(values))) == said
    assert published_table(claim, [{'value': value} for value in values])[1][-1] == said


def test_a_spread_below_zero_is_refused():
    with pytest.raises(UserError, match='spread of Published is -1'):
        dataclasses.replace(CLAIM, spread=-1.0)


@pytest.mark.parametrize('folder', FOLDERS, ids=lambda folder: folder.name)
def test_a_folder_is_a_protocol_that_builds_and_says_what_was_run(folder):
    readme = (folder / 'README.md').read_text()
    for size in SIZES:
        claim = load_module(folder / 'sweep.py').published(size)
        assert claim.source in readme and all(change in readme for change in claim.changed)
        for run in Experiment(folder, size).runs()[:1]:
            prepare(run.config)
        path = folder / 'results' / f'{size}.json'
        if path.exists():
            rows = json.loads(path.read_text())['runs']
            assert published_table(claim, rows)[1][-1] in readme
        else:
            assert f'Not run yet: `make experiment NAME=published/{folder.name} SIZE={size}`' in readme
