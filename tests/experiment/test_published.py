"""The verdict on published numbers is computed: what agrees, what differs and by how much, what is not comparable."""

import dataclasses
import hashlib
import json
import pathlib

import pytest

from attnlab.config import build, spec
from attnlab.data.series.drawn import DrawnSeries
from attnlab.errors import UserError
from attnlab.evals.measured import SHARE, of_seeds
from attnlab.experiment.experiment import SIZES, Experiment, module_of
from attnlab.experiment.published import Published, PublishedPlot, claims_of, measured, published_table, verdict
from attnlab.experiment.results import markdown
from attnlab.experiment.runs import check_results, train_and_measure
from attnlab.train.programs import Programs
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
        ({}, (1.88,), 'agrees'),
        ({}, (1.89,), 'not comparable: 1 seed has no interval; the difference is +0.01'),
        ({'spread': 0.01}, (1.885,), 'not comparable: 1 seed has no interval; the difference is +0.005'),
        ({'direction': 'at least'}, (1.9,), 'not comparable: 1 seed has no interval; the difference is +0.02'),
        ({'direction': 'at least'}, (1.5,), 'not comparable: 1 seed has no interval; the difference is -0.38'),
        ({}, (1.87, 1.90), 'not comparable: 2 seeds have no interval; the difference is +0.005'),
        ({}, (1.75, 2.01), 'not comparable: 2 seeds have no interval; the difference is +0'),
        ({}, (1.88, 1.88), 'agrees'),
        (
            {'direction': 'at least', 'spread': 0.01},
            (1.875, 1.876),
            'not comparable: 2 seeds have no interval; the difference is -0.0045',
        ),
        ({'direction': 'at most'}, (1.5, 1.6, 1.7), 'agrees'),
        ({'direction': 'at least'}, (1.5, 1.5, 1.5), 'differs: by -0.38'),
        ({'direction': 'at least'}, (1.0, 2.0, 3.0), 'not comparable: our interval reaches across the bound'),
        (
            {'direction': 'at least', 'spread': 0.05},
            (1.78, 1.83, 1.80),
            'not comparable: our interval reaches across the bound',
        ),
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
    assert published_table(claims_of(claim), [{'value': value} for value in values])[1][-1] == said


def test_several_numbers_of_one_protocol_have_a_row_and_a_panel_each():
    claims = {'wide': CLAIM, 'wide_deep': dataclasses.replace(CLAIM, value=1.5), 'not run': CLAIM}
    found = {'wide-seed0': 1.87, 'wide-seed1': 1.88, 'wide-seed2': 1.90, 'wide_deep-seed0': 1.6}
    rows = [{'label': label, 'value': value} for label, value in found.items()]
    _, *lines = published_table(claims, rows)
    assert [line[0] for line in lines] == ['wide: validation loss', 'wide_deep: validation loss']
    assert [line[3] for line in lines] == ['1.8700, 1.8800, 1.9000', '1.6000']
    assert [line[2] for line in lines] == ['1.8833 [1.8454, 1.9213]', '1.6000']
    assert [line[-1] for line in lines] == ['agrees', 'not comparable: 1 seed has no interval; the difference is +0.1']
    assert [len(axes.lines[0].get_xdata()) for axes in PublishedPlot(claims).figure(rows).axes] == [3, 1]
    _, line = published_table(claims_of(CLAIM), rows[:2])
    assert line[2] == '1.8750 (1.8700 to 1.8800)'


def test_seeds_that_are_left_where_others_failed_have_no_interval_and_no_verdict():
    """Two of five diverged: that the other three agree says nothing of the method."""
    claims = {'wide': CLAIM, 'deep': CLAIM, 'step': dataclasses.replace(CLAIM, key='over_step')}
    rows = [{'label': f'{name}-{n}', 'value': 1.87 + n / 100, 'over_step': 1.0} for name in claims for n in range(3)]
    plot = PublishedPlot(claims, ['wide-3', 'wide-4'])
    _, wide, deep, step = plot.table(rows)
    assert wide[2:4] == ['1.8800', '1.8700, 1.8800, 1.8900']
    assert wide[-1] == 'not comparable: 2 of 5 seeds did not come to their end'
    assert deep[-1] == 'agrees' and '[' in deep[2]
    assert step[-1] == 'not comparable: 2 of 11 seeds did not come to their end'
    figure = plot.figure(rows)
    assert [len(axes.patches) for axes in figure.axes] == [0, 1, 0]
    # Beside the panels, where its marker is no seed, and of what is in any of them.
    assert [axes.get_legend() for axes in figure.axes] == [None] * 3
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ['ours', 'published', 'mean of ours, 95 %']


def test_a_value_that_is_not_finite_is_said():
    rows = [{'label': f'-{n}', 'value': value} for n, value in enumerate([1.9, None, 1.8])]
    plot = PublishedPlot({'': CLAIM}, [])
    (_, line), figure = plot.table(rows), plot.figure(rows)
    assert line[2:4] == ['nan', '1.9000, nan, 1.8000'] and line[4].startswith(
        'not comparable: 3 seeds have no interval'
    )
    assert len(figure.axes) == 1


def test_two_numbers_of_the_same_runs_have_a_row_each():
    """The noise is that of `value`, and no part of the interval of the other."""
    claims = {'': CLAIM, 'step': dataclasses.replace(CLAIM, value=0.5, metric='over a step', key='over_step')}
    rows = [{'label': f'seed{n}', 'value': 1.88, 'over_step': 0.6 + n / 100, 'noise': 0.01} for n in range(3)]
    _, first, second = published_table(claims, rows)
    assert first[:2] == ['validation loss', '1.88'] and first[2] == '1.8800 [1.8604, 1.8996]'
    assert second[:4] == ['step: over a step', '0.5', '0.6100 [0.5852, 0.6348]', '0.6000, 0.6100, 0.6200']
    assert second[-1] == 'differs: by +0.11'
    assert [len(axes.lines[0].get_xdata()) for axes in PublishedPlot(claims).figure(rows).axes] == [3, 3]


def test_the_noise_of_the_test_set_is_in_the_interval():
    """Three seeds that agree on a test set of which the noise is 0.01 know their number to within 0.02."""
    rows = [{'label': f'seed{seed}', 'value': 1.90, 'noise': 0.01} for seed in range(3)]
    assert measured(rows).half_width == pytest.approx(1.96 * 0.01, rel=1e-4)
    assert str(verdict(CLAIM, measured(rows))) == 'differs: by +0.02'
    assert str(verdict(CLAIM, measured([row | {'noise': 0.02} for row in rows]))) == 'agrees'
    assert measured([row | {'noise': None} for row in rows]).half_width == pytest.approx(0, abs=1e-9)
    assert measured([*rows[:2], rows[2] | {'noise': float('nan')}]).half_width == pytest.approx(1.96 * 0.01, rel=1e-4)


def test_the_interval_of_an_accuracy_ends_at_one():
    claim = dataclasses.replace(CLAIM, value=0.98, direction='at least', bounds=SHARE)
    rows = [{'value': value} for value in (0.986, 0.986, 0.994)]
    (_, line) = published_table(claims_of(claim), rows)
    assert line[2] == '0.9887 [0.9772, 1.0000]'
    assert max(PublishedPlot(claims_of(claim)).figure(rows).axes[0].get_ylim()) < 1.01


def test_a_spread_below_zero_is_refused():
    with pytest.raises(UserError, match='spread of Published is -1'):
        dataclasses.replace(CLAIM, spread=-1.0)


@pytest.mark.parametrize('folder', FOLDERS, ids=lambda folder: folder.name)
def test_a_folder_is_a_protocol_that_builds_and_says_what_was_run(folder):
    readme = (folder / 'README.md').read_text()
    for size in SIZES:
        claims = claims_of(module_of(folder / 'sweep.py').published(size))
        for claim in claims.values():
            assert claim.source in readme and all(change in readme for change in claim.changed)
        for run in Experiment(folder, size).runs()[:1]:
            prepare(run.config)
        path = folder / 'results' / f'{size}.json'
        if path.exists():
            results = json.loads(path.read_text())
            rows = results['runs']
            assert results['command'] == f'attnlab experiment published/{folder.name} --size={size}'
            assert f'`{results["command"]}`' in readme
            check_results(Experiment(folder, size), rows)
            assert markdown(published_table(claims, rows)) in readme
        else:
            assert f'Not run yet: `make experiment NAME=published/{folder.name} SIZE={size}`' in readme


def test_shakespeare_has_the_two_settings_of_nanogpt():
    """As its README and `config/train_shakespeare_char.py` say them, with a number each."""
    sweep = module_of(FOLDERS[0].parent / 'shakespeare' / 'sweep.py')
    for size, value, sizes in (
        ('cpu', 1.88, (4, 4, 128, 64, 12, 2000, 0.0)),
        ('full', 1.4697, (6, 6, 384, 256, 64, 5000, 0.2)),
    ):
        config = sweep.config(size, 0)
        stack, (block,), claim = config.model.stack, config.model.stack.blocks, sweep.published(size)
        run = (config.model.dim, config.length, config.batch_size, config.steps, block.dropout)
        assert (stack.depth, block.mixer.heads, *run) == sizes
        optimizer, steps = config.optimizer, config.steps
        assert (optimizer.peak_lr, optimizer.b1, optimizer.b2, optimizer.weight_decay) == (1e-3, 0.9, 0.99, 0.1)
        schedule = build(optimizer.schedule)(steps, optimizer.peak_lr)
        assert [float(schedule(step)) for step in (0, 99, steps - 1)] == pytest.approx([1e-5, 1e-3, 1e-4])
        assert (claim.value, claim.direction) == (value, 'equal') and claim.changed


def test_another_shakespeare_is_refused(tmp_path, monkeypatch):
    folder = FOLDERS[0].parent / 'shakespeare'
    sweep = module_of(folder / 'sweep.py')
    assert f'SHA-256 {sweep.SHA256}' in (folder / 'README.md').read_text()
    monkeypatch.chdir(tmp_path)
    train, valid = map(pathlib.Path, sweep.TEXTS)
    train.parent.mkdir()
    train.write_text('To be, ')
    assert len(sweep.runs('cpu')) == 3
    valid.write_text('or not to be')
    with pytest.raises(
        UserError, match=r'sweep.py, line \d+: ./shakespeare/train.txt and .* are not the text of the pub'
    ):
        Experiment(folder, 'cpu').runs()
    monkeypatch.setattr(sweep, 'SHA256', hashlib.sha256(b'To be, or not to be').hexdigest())
    monkeypatch.setattr(sweep, 'TRAIN', 7)
    assert len(sweep.runs('cpu')) == 3
    # The text is whole, and cut elsewhere.
    train.write_text('To be, or'), valid.write_text(' not to be')
    with pytest.raises(UserError, match='are not the text of the published result'):
        sweep.runs('cpu')


@pytest.mark.slow
@pytest.mark.parametrize('folder', FOLDERS, ids=lambda folder: folder.name)
def test_what_a_run_leaves_is_what_is_measured(folder, tmp_path, monkeypatch):
    """The first run of each protocol, cut to two steps and few examples, has a number at its end."""
    monkeypatch.chdir(tmp_path)
    experiment = Experiment(folder, 'cpu')
    each = experiment.runs()[0]
    (tmp_path / 'shakespeare').mkdir()
    for split in ('train', 'valid'):
        (tmp_path / 'shakespeare' / f'{split}.txt').write_text('To be, or not to be. ' * 100)
    with each.config.unlocked():
        each.config.steps = each.config.checkpoint.every = each.config.report.every = 2
        each.config.batch_size = min(each.config.batch_size, 4)
        for evaluator in each.config.evals:
            evaluator.cadence.n = 2
            if 'examples' in evaluator:
                evaluator.examples = 4
        if folder.name == 'ltsf_linear':
            # Of as many columns, and nothing to download.
            each.config.task.data = spec(DrawnSeries, copies=7)
    measured = train_and_measure(experiment, each, tmp_path / each.label, Programs())
    assert 'failed' not in measured
    for claim in claims_of(module_of(folder / 'sweep.py').published('cpu')).values():
        assert isinstance(measured[claim.key], float)
