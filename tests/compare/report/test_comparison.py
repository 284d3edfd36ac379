"""Statistics against hand-computed values; heads of tables of studies that are matched and of such that are not."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
from ml_collections import ConfigDict
from rich.console import Console

from attnlab.cli import main
from attnlab.compare import intervals
from attnlab.compare.intervals import area, expected_best, over_trials, top_quarter
from attnlab.compare.measures import MEASURES
from attnlab.compare.report import comparison
from attnlab.compare.report.comparison import (
    Comparison,
    Point,
    StudyResult,
    compare,
    print_comparison,
    ranked_metric,
    study_table,
    tokens_of,
)
from attnlab.config import spec
from attnlab.configuration import config_of
from attnlab.errors import UserError
from attnlab.evals.measured import Measured
from attnlab.experiment.studies import _table
from attnlab.runs.record import Record
from attnlab.sweep.space import Zip
from attnlab.sweep.study import TrialState, confirmation, create_study, read_study
from attnlab.tables import Printer
from tests.sweep import tiny

VALUES = np.array([5.0, 1.0, 4.0, 2.0, 3.0, 9.0, 8.0, 7.0])
RATES = np.array([1e-3, 1e-2, 1e-3, 1e-1, 1e-2, 1e-1, 1e-1, 1e-1])


def test_statistics():
    assert top_quarter(RATES, VALUES) == 1.5
    assert top_quarter(RATES[:3], VALUES[:3]) == 1.0
    # Means of 4.5, 2 and 6.5 at rates a decade apart: trapezoids of 3.25 and 4.25, of equal width.
    assert area(RATES, VALUES) == pytest.approx(3.75, rel=1e-12)
    assert area(RATES[:1], VALUES[:1]) == 5.0


def test_the_expected_best_of_a_quarter_by_counting():
    """Of 8 trials the mean over all 28 pairs of the better one; of 4, the mean."""
    pairs = [min(pair) for pair in itertools.combinations(VALUES, 2)]
    assert expected_best(RATES, VALUES) == pytest.approx(np.mean(pairs))
    assert expected_best(RATES[:4], VALUES[:4]) == pytest.approx(VALUES[:4].mean())
    # The number of ways to draw a quarter of so many is beyond all floating-point numbers.
    many = np.arange(1600.0)
    assert expected_best(many, many) == pytest.approx((1600 + 1) / (400 + 1) - 1)


@pytest.mark.parametrize(
    ('statistic', 'least'),
    [
        (expected_best, 0.88),
        pytest.param(top_quarter, 0.86, marks=pytest.mark.slow),
        pytest.param(area, 0.9, marks=pytest.mark.slow),
    ],
)
def test_intervals_over_trials_cover_what_is_said(statistic, least):
    """Of 16 trials whose rate matters and which are noisy besides; by percentiles the top quarter has 0.89."""
    draws = np.random.default_rng(0)

    def trials(count):
        rates = draws.uniform(-1, 1, (count, 16))
        return np.exp(rates), rates**2 + 0.3 * draws.normal(size=(count, 16))

    truth = np.mean([statistic(*one) for one in zip(*trials(4000), strict=True)])
    runs = [over_trials(statistic, list(x), list(y)) for x, y in zip(*trials(200), strict=True)]
    covered = np.mean([one.low <= truth <= one.high for one in runs])
    assert least - 3 * math.sqrt(0.1 * 0.9 / 200) < covered
    assert over_trials(top_quarter, [1.0], [2.0]) == Measured(2.0, None, None, 1, 'one')


@pytest.mark.parametrize('statistic', [expected_best, top_quarter, area])
def test_intervals_over_trials_cover_what_another_test_set_would_say(statistic, monkeypatch):
    """Eight models that differ are asked the same 100 examples, which are hard for all alike."""
    monkeypatch.setattr(intervals, 'RESAMPLES', 100)
    draws, rates, asked = np.random.default_rng(0), np.geomspace(1e-4, 1e-2, 8), 100

    def trials():
        return 0.3 + 0.05 * draws.normal(size=8)

    def wrong(shares):
        """Shares of wrong answers: a threshold an example, and a little of a model's own."""
        limits = draws.uniform(size=asked) + 0.02 * draws.normal(size=(8, asked))
        return np.mean(limits < shares[:, None], axis=1)

    truth = np.mean([statistic(rates, trials()) for _ in range(2000)])
    covered = {True: 0, False: 0}
    for _ in range(200):
        values = wrong(trials())
        noise = np.sqrt(values * (1 - values) / asked)
        for known in covered:
            one = over_trials(statistic, list(rates), list(values), list(noise) if known else None)
            covered[known] += one.low <= truth <= one.high
    assert covered[True] / 200 > 0.93 - 3 * math.sqrt(0.07 * 0.93 / 200) and covered[False] / 200 < 0.8, covered


def test_failed_trials_count_as_the_worst_whatever_the_goal():
    points = (Point(1e-3, 0, 'done', 0.5), Point(1e-2, 1, 'failed', None), Point(1e-1, 0, 'pruned', 0.9))
    least = StudyResult('a', 1.0, 1.0, points, 'min', (0.5, 0.7)).statistics
    assert least['best'].mean == 0.5 and least['area'].mean == pytest.approx((0.7 + 0.9) / 2)
    assert least['confirmed'].mean == pytest.approx(0.6) and least['confirmed'].kind == 'range'
    most = StudyResult('a', 1.0, 1.0, points, 'max', ()).statistics
    assert most['best'].mean == 0.5 and most['area'].mean == pytest.approx((0.5 + 0.7) / 2)
    assert most['expected best'].low <= most['expected best'].mean <= most['expected best'].high
    assert StudyResult('a', 1.0, 1.0, (Point(1.0, 0, 'failed', None),), 'min', ()).statistics == {}


def test_at_equal_steps_a_failed_trial_is_no_better_than_those_that_did_not_fail():
    points = (
        Point(1e-3, 0, 'done', 2.0, 40, 4.0),
        Point(1e-2, 0, 'pruned', 3.0, 10, 3.0),
        Point(1e-1, 0, 'failed', None, 10, 1.0),
    )
    row = StudyResult('a', 1.0, 1.0, points, 'min', ())
    assert row.statistics['area'].mean == pytest.approx((3.5 + 3.5) / 2)
    assert row.statistics['top quarter'].mean == 2.0


def test_shares_end_at_one_by_what_they_are_of():
    points = (Point(1e-3, 0, 'done', 0.9), Point(1e-2, 1, 'done', 0.99), Point(1e-1, 0, 'done', 0.98))
    of_loss = StudyResult('a', 1.0, 1.0, points, 'max', (0.9, 1.4, 1.5), metric='valid/accuracy', score='test/gain')
    assert of_loss.statistics['confirmed'].high > 1.5
    of_share = StudyResult('a', 1.0, 1.0, points, 'max', (0.7, 0.99, 1.0), metric='valid/gain', score='test/accuracy')
    assert of_share.statistics['confirmed'].high == 1.0
    assert ranked_metric([of_share], 'valid/gain', 'test/accuracy') == 'test/accuracy'
    assert ranked_metric([dataclasses.replace(of_share, confirmed=())], 'valid/gain', 'a/b') == 'valid/gain'


@pytest.mark.parametrize(('confirmed', 'column', 'guessed'), [((), 'best', '1'), ((0.7, 0.8), 'confirmed', '2')])
def test_baselines_are_of_the_metric_that_ranks(study, tmp_path, monkeypatch, capsys, confirmed, column, guessed):
    """They stand in its column."""
    guesses = {'valid/loss': {'guess': 1.0}, 'test/loss': {'guess': 2.0}}
    monkeypatch.setattr(comparison, 'trivial_scores', lambda base, metric: guesses[metric])
    monkeypatch.setitem(MEASURES, 'train_flops', lambda setup: 1e3)
    study('one', reported='test/loss')
    row = comparison._row
    monkeypatch.setattr(comparison, '_row', lambda *given: dataclasses.replace(row(*given), confirmed=confirmed))
    found = compare([tmp_path / 'one'], 'params', 0.01)
    table = study_table(found)
    assert {each.name: cell for each, cell in zip(table.columns, table.text()[-1], strict=True) if cell} == {
        'study': '(guess)',
        column: guessed,
    }
    print_comparison(found, Printer(Console(width=300, force_terminal=True, color_system=None)))
    printed = capsys.readouterr().out
    assert 'valid/loss, confirmed runs by test/loss; tokens' in printed
    (cells,) = [line.split() for line in printed.splitlines() if line.startswith('(guess)')]
    assert cells[-1] == guessed


def test_areas_are_of_values_at_equal_steps_and_seeds_have_the_noise_of_the_test_set():
    """A trial that was pruned early is not held against one that ran on."""
    points = (Point(1e-3, 0, 'pruned', 2.0, 10, 2.0), Point(1e-2, 0, 'done', 1.0, 40, 2.0))
    row = StudyResult('a', 1.0, 1.0, points, 'min', (1.0, 1.1, 1.2), noise=0.5)
    assert row.statistics['area'].mean == pytest.approx(2.0) and row.statistics['best'].mean == 1.0
    assert row.statistics['confirmed'].half_width > 1.96 * 0.5


@pytest.mark.parametrize(('first', 'even'), [(6, 24.0), (12, math.nan)])
def test_areas_are_left_out_where_a_trial_has_no_value_at_the_step_of_all(tmp_path, monkeypatch, first, even):
    """One of two was pruned after 6 steps; the other, which took 24, may have reported nothing by then."""
    monkeypatch.setitem(MEASURES, 'train_flops', lambda setup: 1e3)
    opened = create_study(tmp_path / 'one', tiny.get_config('trials=2'))
    for state, begun, steps in ((TrialState.COMPLETE, first, 24), (TrialState.PRUNED, 6, 6)):
        claim = opened.claim()
        for step in range(begun, steps + 1, 6):
            claim.trial.report(30.0 - step, step)
        opened.tell(claim, state, 30.0 - steps if state == TrialState.COMPLETE else None)
        claim.release()
    (row,) = compare([tmp_path / 'one'], 'params', 0.01).rows
    assert [point.even for point in row.points] == pytest.approx([even, 24.0], nan_ok=True)
    assert ('area' in row.statistics) == (first == 6) and 'best' in row.statistics


def ranked(name, *trials, metric='valid/loss', goal='min'):
    points = tuple(Point(rate, 0, 'failed' if value is None else 'done', value) for rate, value in trials)
    return StudyResult(name, 1.0, 1.0, points, goal, (), metric=metric)


def test_studies_that_are_best_at_an_end_of_the_rates_are_named(capsys):
    inside = ranked('inside', (1e-3, 2.0), (1e-2, 1.0), (1e-1, 3.0))
    failed = ranked('failed above', (1e-3, 2.0), (1e-2, 1.0), (1e-1, None))
    alike = ranked('as good inside', (1e-3, 1.0), (1e-2, 1.0), (1e-1, 3.0))
    whole = ranked('all', (1e-3, 1.0), (1e-2, 0.5), metric='test/accuracy', goal='max')
    low, high = ranked('low', (1e-3, 1.0), (1e-2, 2.0)), ranked('high', (1e-3, 0.5), (1e-2, 0.7), goal='max')
    others = (inside, failed, alike, whole, ranked('one', (1e-3, 1.0)), ranked('none', (1e-3, None), (1e-2, None)))
    assert not Comparison('valid/loss', 'params', 0.01, others, ()).at_an_end
    some = Comparison('valid/loss', 'params', 0.01, (low, *others, high), ())
    assert some.at_an_end == 'Best at an end of the rates tried, beyond which there may be better: low, high.'
    both = Comparison('valid/loss', 'params', 0.01, (low, high), ())
    assert both.at_an_end == 'Best at an end of the rates tried, beyond which there may be better: every study.'
    assert _table('recall', some).endswith(some.at_an_end)
    print_comparison(some, Printer(Console(width=300)))
    assert some.at_an_end in capsys.readouterr().out


TRIED = tuple(Point(10.0**-place, 0, 'done', 0.5 + 0.1 * place, noise=0.03) for place in (1, 2, 3))


def test_trials_have_the_noise_of_the_test_set_where_it_is_known_of_all_that_did_not_fail():
    row = StudyResult('a', 1.0, 1.0, (*TRIED, Point(1.0, 0, 'failed', None)), 'max', (), metric='test/accuracy')
    unknown = dataclasses.replace(row, points=(dataclasses.replace(TRIED[0], noise=None), *row.points[1:]))
    for name in ('expected best', 'top quarter', 'area'):
        wide, narrow = row.statistics[name], unknown.statistics[name]
        # Noise that is one for all moves a statistic of values by as much.
        assert wide.noise == pytest.approx(0.03) and narrow.noise is None and wide.mean == narrow.mean
    wide, narrow = (dataclasses.replace(one, metric='test/gain').statistics['area'] for one in (row, unknown))
    assert wide.half_width == pytest.approx(math.hypot(narrow.half_width, 1.959964 * 0.03))


@pytest.mark.parametrize(
    ('noise', 'counted', 'said'),
    [
        (0.03, True, ''),
        (None, True, 'Intervals of expected best, top quarter and area are over trials alone'),
        (None, False, 'Intervals of expected best and top quarter are over trials alone'),
    ],
)
def test_what_intervals_over_trials_leave_out_is_said(noise, counted, said):
    points = tuple(dataclasses.replace(point, rate=1.0, noise=noise) for point in TRIED)
    rows = tuple(StudyResult(name, 1.0, 1.0, points, 'max', (), counted=counted) for name in 'ab')
    found = Comparison('test/accuracy', 'params', 0.01, rows, ())
    assert found.left_out.startswith(said) and bool(found.left_out) == bool(said)
    assert _table('recall', found).endswith(found.left_out or '|')


def records(monkeypatch, base, noises):
    """Runs by their directory that leave a loss, whose noise is given, and what else a comparison reads."""
    monkeypatch.setitem(MEASURES, 'train_flops', lambda setup: 1e3)
    facts = {'parameters': 1, 'flops_per_token': 1.0, 'state_bytes_per_sequence': {}, 'data': {}}

    def read(run):
        width = 1.959964 * noises[run]
        last = {'valid/loss': 2.0, 'valid/loss_low': 2.0 - width, 'valid/loss_high': 2.0 + width}
        return Record(run, base, 24, last, facts, None)

    for run in noises:
        run.mkdir(parents=True)
        (run / 'run.json').write_text('{}')
    monkeypatch.setattr(comparison, 'read_record', read)


def test_the_noise_of_a_trial_is_what_its_run_wrote_down(study, tmp_path, monkeypatch):
    opened = study('one')
    records(monkeypatch, opened.sweep.base, {opened.workdir(0): 0.25})
    first, second, *_ = compare([tmp_path / 'one'], 'params', 0.01).rows[0].points
    assert first.noise == pytest.approx(0.25) and second.noise is None


@pytest.mark.parametrize(('kept', 'noise'), [(3, math.sqrt((9 + 1 + 4) / 3)), (1, 3.0), (0, 0.1)])
def test_a_confirmation_has_the_noise_of_the_runs_that_confirm(study, tmp_path, monkeypatch, kept, noise):
    """That of the best trial serves where none of them left a record."""
    opened = study('one', confirm=3)
    confirmed(opened, (0.9, 0.902, 0.901))
    confirming = {confirmation(opened, None).workdir(number): found for number, found in enumerate((3.0, 1.0, 2.0))}
    records(
        monkeypatch,
        opened.sweep.base,
        {opened.workdir(opened.best().number): 0.1, **dict(list(confirming.items())[:kept])},
    )
    (row,) = compare([tmp_path / 'one'], 'params', 0.01).rows
    assert row.noise == pytest.approx(noise) and row.statistics['confirmed'].noise == row.noise


@pytest.mark.parametrize(
    ('spent', 'counted', 'said'),
    [
        ((2_000_000, 2_000_000), True, 'same space, trials, seeds and tokens'),
        ((1_230_000, 2_000_000), True, 'same space, trials and seeds, but 1.23e+06 to 2e+06 tokens spent'),
        ((0, 0), False, 'same space, trials and seeds; tokens spent are not known'),
    ],
)
def test_the_heading_says_what_tokens_were_spent(spent, counted, said):
    rows = tuple(StudyResult(f'of {n}', 1.0, 1.0, (), 'min', (), tokens=n, counted=counted) for n in spent)
    assert Comparison('valid/loss', 'params', 0.01, rows, ()).head == f'matched by params within ±1.0%; {said}'


def test_trials_are_counted_by_the_steps_they_took(tmp_path, monkeypatch):
    """One of two trials of 24 steps was pruned after 6: a quarter of its tokens were spent."""
    monkeypatch.setitem(MEASURES, 'train_flops', lambda setup: 1e3)
    opened = create_study(tmp_path / 'one', tiny.get_config('trials=2'))
    for state, steps in ((TrialState.COMPLETE, 24), (TrialState.PRUNED, 6)):
        claim = opened.claim()
        for step in range(6, steps + 1, 6):
            claim.trial.report(30.0 - step, step)
        opened.tell(claim, state, 30.0 - steps if state == TrialState.COMPLETE else None)
        claim.release()
    (row,) = compare([tmp_path / 'one'], 'params', 0.01).rows
    base = opened.sweep.base
    assert [point.steps for point in row.points] == [base.steps, 6]
    assert row.tokens == (base.steps + 6) * base.batch_size * base.length and row.flops == 1e3 * row.tokens
    assert [point.even for point in row.points] == [24.0, 24.0] and row.statistics['area'].mean == 24.0


def test_trials_are_counted_by_what_they_set(tmp_path, monkeypatch):
    """Two trials of other batches, steps and widths: the operations of each are those that it recorded."""
    monkeypatch.setitem(MEASURES, 'train_flops', lambda setup: 1e3)
    config = tiny.get_config('sampler=grid')
    rows = ((4, 24, 16), (8, 12, 32), (8, 48, 16))
    with config.unlocked():
        config.seeds = (0,)
        size = spec(Zip, together=('batch_size', 'steps', 'length'), rows=rows)
        config.space = ConfigDict({'size': size}, convert_dict=False)
    opened = create_study(tmp_path / 'one', config)
    records = {}
    while (claim := opened.claim()) is not None:
        workdir, facts = opened.workdir(claim.number), {'flops_per_token': 100.0 * (claim.number + 1)}
        records[workdir] = Record(workdir, config.base, 0, {}, facts, None)
        opened.tell(claim, TrialState.COMPLETE, 1.0 - claim.number)
        claim.release()
    monkeypatch.setattr(comparison, 'recorded', lambda workdir: records.get(workdir))
    monkeypatch.setattr(comparison, 'shown_record', lambda study: None)
    (row,) = compare([tmp_path / 'one'], 'params', 0.01).rows
    spent = [batch * steps * length for batch, steps, length in rows]
    assert [point.steps for point in row.points] == [24, 12, 48]
    assert row.tokens == sum(spent) and row.flops == sum(100 * n * count for n, count in enumerate(spent, 1))
    assert tokens_of(opened) == spent[2] and opened.sweep.steps == 48


@pytest.fixture
def study(tmp_path):
    """Makes a study whose trials are all told their rate as value."""

    def made(name, **changes):
        config = tiny.get_config('trials=3')
        with config.unlocked():
            for key, value in changes.items():
                config[key] = value
        opened = create_study(tmp_path / name, config)
        while (claim := opened.claim()) is not None:
            opened.tell(claim, TrialState.COMPLETE, claim.drawn['rate'])
            claim.release()
        return opened

    return made


def test_a_study_that_cannot_be_written_to_is_shown_compared_and_reported_and_stays_as_it_is(
    study, tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(MEASURES, 'train_flops', lambda setup: 1e3)
    opened = study('one', confirm=1)
    confirming = confirmation(opened, None)
    claim = confirming.claim()
    confirming.tell(claim, TrialState.COMPLETE, 0.25)
    claim.release()
    journal = opened.folder / 'journal.log'
    journal.write_bytes(journal.read_bytes() + b'{"op_code":8,"worker_id":"cut sho')
    paths = sorted([opened.folder, *opened.folder.rglob('*')])
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)

    def state():
        assert sorted([opened.folder, *opened.folder.rglob('*')]) == paths
        return [
            (path.stat().st_mtime_ns, path.stat().st_ctime_ns, path.is_dir() or path.read_bytes()) for path in paths
        ]

    before = state()
    folder = str(opened.folder)
    try:
        assert main(['sweep', 'status', f'--study={folder}']) == 0
        assert str(opened.folder / 'confirm') in capsys.readouterr().out
        assert main(['compare', folder]) == 0
        assert main(['report', folder, f'--out={tmp_path / "page"}', '--nomeasure', '--compilation_cache=']) == 0
    finally:
        after = state()
        for path in paths:
            path.chmod(0o755 if path.is_dir() else 0o644)
    assert after == before and (tmp_path / 'page' / 'index.html').exists()


def test_a_study_that_no_worker_has_opened_has_not_begun(study, tmp_path):
    opened = study('one', confirm=1)
    (opened.folder / 'journal.log').unlink()
    with pytest.raises(UserError, match='one has not begun: no worker has opened it'):
        read_study(opened.folder)
    assert not (opened.folder / 'journal.log').exists()


def confirmed(opened, values):
    """Ends confirming runs of a study with values, `None` being a failure."""
    confirming = confirmation(opened, None)
    for value in values:
        claim = confirming.claim()
        confirming.tell(claim, TrialState.FAIL if value is None else TrialState.COMPLETE, value)
        claim.release()


def test_a_confirmation_of_which_a_run_failed_is_no_winner_and_no_match(study, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(MEASURES, 'train_flops', lambda setup: 1e3)
    confirmed(study('brittle', confirm=5), (0.90, 0.91, 0.90, None, None))
    confirmed(study('stable', confirm=5), (1.00, 1.01, 1.00, 1.01, 1.00))
    found = compare([tmp_path / 'brittle', tmp_path / 'stable'], 'params', 0.01)
    assert found.reasons == ('brittle: 3 of 5 confirming runs are done (2 failed, 0 not finished)',)
    brittle, stable = (row.statistics['confirmed'] for row in found.rows)
    assert (brittle.kind, brittle.n, brittle.low) == ('survivors', 3, None) and brittle.mean == pytest.approx(0.9033333)
    assert (stable.kind, stable.n) == ('seeds', 5)
    assert ': 0.9033 (3 seeds, without those that failed); ' in found.sentence
    assert '; a mean that leaves out failed seeds cannot separate it from stable (1.0040 ±' in found.sentence
    print_comparison(found, Printer(Console(width=300)))
    assert '0.9033 (n=3, others failed)' in capsys.readouterr().out
    with pytest.raises(UserError, match=r'not matched: brittle: 3 of 5 confirming runs'):
        print_comparison(found, Printer(Console()), strict=True)


@pytest.mark.parametrize(
    ('values', 'done'),
    [
        ((), '0 of 3 confirming runs are done (0 failed, 3 not'),
        ((0.9, None), '1 of 3 confirming runs are done (1 failed, 1 not'),
    ],
)
def test_confirming_runs_that_are_missing_are_said(study, tmp_path, monkeypatch, values, done):
    monkeypatch.setitem(MEASURES, 'train_flops', lambda setup: 1e3)
    confirmed(study('one', confirm=3), values)
    (reason,) = compare([tmp_path / 'one'], 'params', 0.01).reasons
    assert reason == f'one: {done} finished)'


def wider(steps=24):
    config = tiny.base(steps)
    with config.unlocked():
        config.model.dim = 16
    return config


def test_rows_that_are_not_matched_are_said_so_and_refused_when_strict(study, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(MEASURES, 'train_flops', lambda setup: 1e3)
    study('one'), study('two'), study('wide', base=wider()), study('more', seeds=(0, 1, 2))
    other = tiny.get_config('trials=3').space.unlock()
    other.rate.high = 1.0
    study('space', space=other)
    fair = compare([tmp_path / 'one', tmp_path / 'two'], 'params', 0.01)
    assert not fair.reasons and fair.head.startswith('matched by params within ±1.0%')
    print_comparison(fair, Printer(Console(width=80, force_terminal=True, color_system=None)), strict=True)
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80 and 'confirmed' in printed
    printer = Printer(Console(), 'json')
    print_comparison(fair, printer)
    printer.close()
    (first, *_) = json.loads(capsys.readouterr().out)['studies']
    assert (
        first['params'] == fair.rows[0].size and first['expected best'] == fair.rows[0].statistics['expected best'].mean
    )
    assert 'matched by params' in printed and 'two' in printed
    assert fair.rows[0].statistics['best'].mean == min(point.rate for point in fair.rows[0].points)
    for name, reason in (
        ('wide', 'params differs by more than 1.0%'),
        ('more', 'more has another sweep than one: seeds'),
        ('space', 'space has another sweep than one: space.rate.high: 0.01 there, 1.0 here'),
    ):
        unfair = compare([tmp_path / 'one', tmp_path / name], 'params', 0.01)
        assert unfair.head.startswith('NOT MATCHED') and reason in unfair.head, unfair.head
        print_comparison(unfair, Printer(Console(width=200)))
        assert 'NOT MATCHED' in capsys.readouterr().out
        with pytest.raises(UserError, match='the studies are not matched'):
            print_comparison(unfair, Printer(Console()), strict=True)
    with pytest.raises(UserError, match='called the same'):
        compare([tmp_path / 'one', tmp_path / 'one'], 'params', 0.01)


def test_the_metric_of_every_column_is_named(capsys):
    row = StudyResult('a', 1.0, 1.0, (Point(1e-3, 0, 'done', 0.5),), 'min', (0.6, 0.7), score='test/loss')
    one = Comparison('valid/loss', 'params', 0.01, (row,), ())
    for found, line in (
        (one, 'valid/loss; tokens'),
        (dataclasses.replace(one, reported='test/loss'), 'valid/loss, confirmed runs by test/loss; tokens'),
    ):
        print_comparison(found, Printer(Console(width=500)))
        assert any(each.startswith(line) for each in capsys.readouterr().out.splitlines())


def test_an_unfinished_study_is_said_to_be_one(tmp_path, monkeypatch):
    monkeypatch.setitem(MEASURES, 'train_flops', lambda setup: 1e3)
    create_study(tmp_path / 'begun', config_of(tiny.LANGUAGE.parent / 'sweeps' / 'language.py', 'zoo=mingru'))
    found = compare([tmp_path / 'begun'], 'params', 0.01)
    assert isinstance(found, Comparison) and 'begun is not finished' in found.head
