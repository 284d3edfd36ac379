"""Claims, ends and failures of trials, in one process."""

import json
import time

import jax
import numpy as np
import optuna
import pytest
from ml_collections import ConfigDict
from optuna.trial import TrialState
from rich.console import Console

from attnlab import config as configs
from attnlab.config import from_plain, plain, spec
from attnlab.errors import UserError
from attnlab.sweep import trial as trials
from attnlab.sweep.space import Grid
from attnlab.sweep.status import _titles, seconds_left, show_status, statuses
from attnlab.sweep.study import create_study, open_study
from attnlab.sweep.sweep import Sweep
from attnlab.sweep.trial import STARTS, Outcome, run_trial
from attnlab.tables import Printer
from attnlab.train import launch
from attnlab.train.programs import Programs
from attnlab.train.run import newest_checkpoint


def finish(study, claim, value):
    study.tell(claim, TrialState.COMPLETE, value)
    claim.release()


def test_a_trial_is_run_by_one_at_a_time_and_goes_on_where_it_was_left(make):
    one, other = make(), make()
    first, second = one.claim(), other.claim()
    assert (first.number, second.number) == (0, 1)
    assert one.taken(one.trials()[0]) and first.drawn != second.drawn
    first.release()
    assert not one.taken(one.trials()[0])
    again = other.claim()
    assert again.number == 0 and again.drawn == first.drawn
    finish(other, again, 1.0)
    claims = [one.claim() for _ in range(3)]
    assert [claim and claim.number for claim in claims] == [2, 3, None]
    assert not one.finished()
    for claim in (second, *claims[:2]):
        finish(one, claim, float(claim.number) / 2)
    assert other.finished() and other.claim() is None and len(other.trials()) == 4
    assert other.best().number == 1
    assert [row.state for row in statuses(other)] == ['done'] * 4


@pytest.mark.parametrize(
    'sampler', ['quasi', 'tpe', *(pytest.param(name, marks=pytest.mark.slow) for name in ('random', 'grid'))]
)
def test_what_is_drawn_does_not_depend_on_the_order_or_on_deaths(make, sampler):
    straight, broken = make(f'sampler={sampler}', 'straight'), make(f'sampler={sampler}', 'broken')
    wanted = [straight.claim().drawn for _ in range(4)]
    for claim in [broken.claim() for _ in range(4)]:
        claim.release()
    assert [broken.claim().drawn for _ in range(4)] == wanted


class Killed(BaseException):
    """The end of a worker between two writes."""


def die_at(monkeypatch, storage, write):
    """Has a worker die before its write number `write` of a point and its notes; all writes before it are kept."""
    left = iter(range(write))

    def dying(function):
        def called(*arguments, **named):
            if next(left, None) is None:
                raise Killed
            return function(*arguments, **named)

        return called

    for name in ('set_trial_param', 'set_trial_user_attr'):
        monkeypatch.setattr(storage, name, dying(getattr(storage, name)))


@pytest.mark.parametrize('write', [0, 1, 2])
@pytest.mark.parametrize('sampler', ['random', 'quasi', 'tpe', 'grid'])
def test_a_worker_that_dies_between_two_draws_leaves_its_trial_the_point_it_was_due(make, monkeypatch, sampler, write):
    undisturbed = make(f'sampler={sampler}', 'straight').claim()
    dying = make(f'sampler={sampler}', 'broken')
    with monkeypatch.context() as patch, pytest.raises(Killed):
        die_at(patch, dying.storage, write)
        dying.claim()
    again = make(f'sampler={sampler}', 'broken').claim()
    assert (again.number, again.drawn) == (0, undisturbed.drawn)
    (trial,) = make(f'sampler={sampler}', 'broken').trials()
    assert trial.params == undisturbed.drawn


def test_a_point_that_was_estimated_stays_whatever_other_trials_show_meanwhile(make, monkeypatch):
    """`Tpe` draws from the trials so far: what was written stands, though a worker died before all of it was set."""
    arg = 'sampler=tpe,startup=2,trials=9'
    study = make(arg)
    claims = [study.claim() for _ in range(7)]
    for claim in claims[:5]:
        finish(study, claim, float(claim.number % 3))
    with monkeypatch.context() as patch, pytest.raises(Killed):
        die_at(patch, study.storage, 2)
        study.claim()
    (interrupted,) = [trial for trial in study.trials() if trial.number == 7]
    assert len(interrupted.params) == 1
    for claim in claims[5:]:
        finish(study, claim, -1.0)
    again = make(arg).claim()
    assert again.number == 7 and again.drawn == interrupted.user_attrs['point']


def test_a_journal_whose_writer_died_in_the_middle_of_a_line(make):
    study = make()
    study.claim()
    journal = study.folder / 'journal.log'
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"op_code":8,"worker_id":"cut sho')
    study.claim()
    assert journal.read_bytes().startswith(whole)
    assert [json.loads(line) for line in journal.read_text().splitlines()]
    assert len(make().trials()) == 2


def test_a_folder_belongs_to_its_sweep(make, tmp_path):
    make()
    with pytest.raises(UserError, match=r'another sweep .trials: 4 there, 5 here'):
        make('trials=5')
    (tmp_path / 'thesis').mkdir()
    (tmp_path / 'thesis' / 'thesis.tex').write_text('precious')
    with pytest.raises(UserError, match=r'is not empty and holds no sweep\.json'):
        make(folder='thesis')
    with pytest.raises(UserError, match='is not a study'):
        open_study(tmp_path)


def test_a_folder_that_another_process_is_claiming_can_be_claimed(make, tmp_path):
    """As it looks to one of two workers that start at once, or where the first was killed."""
    folder = tmp_path / 'study'
    folder.mkdir()
    for name in ('lock', 'home', '.sweep.json.0123.tmp'):
        (folder / name).write_text('')
    assert make().trials() == []


def test_hosts_that_share_a_database_but_no_folder(make, tmp_path):
    address = f'sqlite:///{tmp_path}/trials.db'
    one, other = make('trials=2', 'one/study', address), make('trials=2', 'two/study', address)
    first, second = one.claim(), other.claim()
    assert (first.number, second.number) == (0, 1)
    first.release()
    assert other.claim() is None and one.claim().number == 0
    with pytest.raises(UserError, match='is in a database: name it with --storage'):
        open_study(tmp_path / 'one' / 'study')
    with pytest.raises(UserError, match=r'the database has a study study of another sweep .trials'):
        make('trials=3', 'three/study', address)


def test_a_trial_is_the_run_that_training_makes(unbroken, tmp_path):
    """Programs shared between trials, and scalars that are arguments, change no bit."""
    workdir = unbroken.workdir(3)
    config = configs.load(workdir / 'config.json')
    assert config.seed == 1 and config.optimizer.peak_lr == unbroken.trials()[3].params['rate']
    launch.launch(config, tmp_path / 'run', console=Console(quiet=True))
    assert (tmp_path / 'run' / 'metrics.jsonl').read_bytes() == (workdir / 'metrics.jsonl').read_bytes()
    last = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()][-1]
    assert last['valid/loss'] == unbroken.trials()[3].value


@pytest.fixture
def compiled():
    """The names of what JAX measures meanwhile, each compilation among them."""
    names = []

    def listen(name, seconds, **_):
        names.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


def test_trials_that_differ_in_scalars_compile_nothing_and_cost_little(unbroken, programs, make, monkeypatch, compiled):
    (setup, _), *rest = programs._made.values()
    assert not rest and setup.compiled.program._cache_size() == setup.compiled.initialization._cache_size() == 1
    study, inside, train = make('trials=1,high=3e-2'), [], launch.train

    def timed(*arguments, **named):
        began = time.process_time()
        try:
            return train(*arguments, **named)
        finally:
            inside.append(time.process_time() - began)

    monkeypatch.setattr(launch, 'train', timed)
    began = time.process_time()
    assert run_trial(study, study.claim(), programs) == Outcome.DONE
    assert time.process_time() - began - inside[0] < 2.0
    assert setup.compiled.program._cache_size() == 1 and not any('backend_compile' in name for name in compiled)


def test_failures_are_recorded_with_their_reasons_and_the_study_goes_on(make, programs):
    sweep = plain(configs.load(make().folder / 'sweep.json'))
    keys = ['optimizer.peak_lr', 'model.dim', 'accumulate']
    points = [[1e30, 8, 1], [1e-3, 8, 3], [1e-3, 8, 1], [1e-3, 2**20, 1]]
    space = {'point': {'target': 'attnlab.sweep.space.Zip', 'together': keys, 'rows': points}}
    grid = {'target': 'attnlab.sweep.search.GridSearch', 'seed': 0}
    sweep |= {'space': space, 'sampler': grid, 'seeds': [0], 'trials': None}
    study = create_study(make().folder.parent / 'failing', from_plain(sweep))
    while (claim := study.claim()) is not None:
        run_trial(study, claim, programs if claim.number < 3 else Programs())
        claim.release()
    nonfinite, invalid, good, memory = statuses(study)
    assert [row.state for row in (nonfinite, invalid, good, memory)] == ['failed', 'failed', 'done', 'failed']
    assert 'step 2: loss' in nonfinite.reason and 'the first that is not finite' in nonfinite.reason
    assert memory.reason.startswith('out of memory: ')
    assert 'does not divide into config.accumulate=3' in invalid.reason and not study.workdir(1).exists()


def test_a_point_that_does_not_fit_fails_its_trial(make, programs, monkeypatch):
    """In a study that was made before all values were looked at; the next trials are not kept waiting by it."""
    config = configs.load(make('sampler=grid').folder / 'sweep.json')
    widths = spec(Grid, key='model.dim', values=(8, 2.5, 8))
    with config.unlocked():
        config.seeds, config.space = (0,), ConfigDict({'width': widths}, convert_dict=False)
    with monkeypatch.context() as patch:
        patch.setattr(Sweep, 'check_values', lambda sweep: None)
        study = create_study(make('sampler=grid').folder.parent / 'before', config)
    while (claim := create_study(study.folder, config).claim()) is not None:
        run_trial(study, claim, programs)
        claim.release()
    assert [row.state for row in statuses(study)] == ['done', 'failed', 'done']
    assert statuses(study)[1].reason.startswith('the space sets model.dim to 2.5')


def test_a_run_that_dies_again_and_again_is_given_up(make, programs):
    study = make('trials=1')
    for start in range(STARTS):
        claim = study.claim()
        trials._check_starts(claim, 0 if start < 5 else 6)
        claim.release()
    for _ in range(STARTS - 5):
        claim = study.claim()
        trials._check_starts(claim, 6)
        claim.release()
    assert run_trial(study, study.claim(), programs) == Outcome.DONE
    study = make('trials=1', 'doomed')
    for _ in range(STARTS):
        claim = study.claim()
        trials._check_starts(claim, 0)
        claim.release()
    assert run_trial(study, study.claim(), programs) == Outcome.FAILED
    assert 'died 10 times after step 0' in statuses(study)[0].reason


def test_what_is_wrong_with_the_machine_does_not_fail_the_trial(make, programs, monkeypatch):
    study = make('trials=1')

    def full(*_, **__):
        raise UserError('no space left on device')

    monkeypatch.setattr(launch, 'train', full)
    claim = study.claim()
    with pytest.raises(UserError, match='no space left'):
        run_trial(study, claim, programs)
    claim.release()
    monkeypatch.undo()
    again = study.claim()
    assert again.number == 0 and run_trial(study, again, programs) == Outcome.DONE


class Unmounted(Programs):
    """Where the data cannot be loaded."""

    def __init__(self, error):
        super().__init__()
        self._error = error

    def prepare(self, config):
        raise self._error


@pytest.mark.parametrize('error', [UserError('there is no /data'), FileNotFoundError('/data')])
def test_data_that_are_not_there_fail_no_trial_however_often(make, error):
    study = make('trials=1')
    for _ in range(STARTS + 2):
        claim = study.claim()
        with pytest.raises(type(error), match='/data'):
            run_trial(study, claim, Unmounted(error))
        claim.release()
    assert statuses(study)[0].state == 'interrupted' and study.claim().notes['starts'] == []


def test_a_metric_that_nothing_evaluates_stops_the_worker(make, programs):
    for name, message in (('test/loss', 'no evaluator test; valid names: valid'), ('valid/los', "'valid/loss'")):
        sweep = configs.load(make().folder / 'sweep.json')
        with sweep.unlocked():
            sweep.metric = name
        study = create_study(make().folder.parent / name.replace('/', '-'), sweep)
        with pytest.raises(UserError, match=message):
            run_trial(study, study.claim(), programs)


def test_a_metric_to_report_that_nothing_evaluates_stops_the_first_trial_and_not_those_that_confirm(make, programs):
    sweep = configs.load(make('confirm=1').folder / 'sweep.json')
    with sweep.unlocked():
        sweep.reported = 'valid/los'
    study = create_study(make('confirm=1').folder.parent / 'reported', sweep)
    with pytest.raises(UserError, match=r"config\.reported is valid/los, which is not evaluated; .*'valid/loss'"):
        run_trial(study, study.claim(), programs)


def test_pruning_saves_the_run_and_survives_a_death_at_any_moment(make, programs, monkeypatch):
    """The second of two trials is worse at the first rung; it dies after the decision, and after the saving."""
    study = make('pruner=asha,trials=3,sampler=quasi')
    first = study.claim()
    first.trial.report(0.0, 6)
    assert not first.trial.should_prune()
    finish(study, first, 0.0)

    class Dead(BaseException):
        pass

    def dies(*_, **__):
        raise Dead

    claim = study.claim()
    note = type(claim).note
    monkeypatch.setattr(
        type(claim), 'note', lambda self, name, value: note(self, name, value) or (name == 'pruned_at' and dies())
    )
    with pytest.raises(Dead):
        run_trial(study, claim, programs)
    claim.release()
    monkeypatch.undo()
    assert newest_checkpoint(study.workdir(1)) == 0
    claim = study.claim()
    monkeypatch.setattr(study, 'tell', dies)
    with pytest.raises(Dead):
        run_trial(study, claim, programs)
    claim.release()
    monkeypatch.undo()
    assert newest_checkpoint(study.workdir(1)) == 6
    claim = study.claim()
    assert claim.number == 1 and run_trial(study, claim, programs) == Outcome.PRUNED
    pruned = study.trials()[1]
    assert pruned.state == TrialState.PRUNED and pruned.value == pruned.intermediate_values[6] > 0
    assert list(pruned.intermediate_values) == [6]


def test_settings_of_one_last_name_have_a_column_each():
    assert _titles(['groups.dynamics.lr', 'groups.matrix.lr', 'model.dim']) == [
        'groups.dynamics.lr',
        'groups.matrix.lr',
        'dim',
    ]


def test_status(unbroken, capsys, make):
    show_status(unbroken.folder, None, Printer(Console(width=80, force_terminal=True, color_system=None)))
    printed = capsys.readouterr().out
    assert all(len(line) <= 80 for line in printed.splitlines() if ' ' in line) and 'valid/loss' in printed.split()
    printer = Printer(Console(), 'json')
    show_status(unbroken.folder, None, printer)
    printer.close()
    listed = json.loads(capsys.readouterr().out)['trials']
    assert [trial['valid/loss'] for trial in listed] == [trial.value for trial in unbroken.trials()]
    best = min(unbroken.trials(), key=lambda trial: trial.value)
    assert f'4 done; best: trial {best.number}, valid/loss {best.value:.5g}' in printed
    study = make()
    study.claim()
    assert [row.state for row in statuses(study)] == ['running']
    claim = study.claim()
    claim.note('seconds', 10.0)
    finish(study, claim, 1.0)
    # One runs and is at its beginning, two are to come: three times ten seconds for the one worker there is.
    assert seconds_left(study, statuses(study)) == pytest.approx(30.0)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    assert np.isfinite(statuses(unbroken)[0].seconds)


def test_the_time_left_is_of_the_steps_that_trials_take(make):
    sweep = configs.load(make('sampler=grid').folder / 'sweep.json')
    with sweep.unlocked():
        sweep.seeds, sweep.space = (0,), ConfigDict({'steps': spec(Grid, key='steps', values=(24, 48))}, False)
    study = create_study(make('sampler=grid').folder.parent / 'steps', sweep)
    first, _ = study.claim(), study.claim()
    first.note('seconds', 10.0)
    finish(study, first, 1.0)
    assert seconds_left(study, statuses(study)) == pytest.approx(20.0)
