"""A study: the state of a sweep, shared by any number of workers, any of which may die at any time.

    STUDY/sweep.json     the sweep's config, complete
          journal.log    Optuna's, unless the study is in a database
          trials/0007/   the run of trial 7, an ordinary run directory
          logs/0007.txt  its console output
          locks/0007     held by the process that runs it
          lock           held while a worker looks for a trial
          home           an identifier that distinguishes this folder from that of another host
          confirm/       the study of the winner, with fresh seeds
          jobs/          submitit's, where workers are jobs of a cluster

A trial is RUNNING in Optuna from its creation to its end. The process that runs it holds a file lock, which the kernel
releases when the process dies; Optuna's heartbeat needs a database and a timeout. A worker first resumes trials whose
lock is free, then creates a new one, holding `lock` meanwhile. A trial belongs to the `home` it was created in: a host
that cannot access that folder has access to neither the lock nor the checkpoints, and leaves the trial alone.
"""

import dataclasses
import pathlib
import sys
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import optuna
from ml_collections import ConfigDict
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from attnlab import config as configs
from attnlab import files
from attnlab.config import from_plain, plain, save, value_at
from attnlab.errors import UserError
from attnlab.locks import Lock
from attnlab.sweep.database import open_database
from attnlab.sweep.lock import JournalLock
from attnlab.sweep.search import Whole
from attnlab.sweep.space import Drawn, Space
from attnlab.sweep.sweep import Sweep, read
from attnlab.train.run import differences, listed

HOME = 'home'
JOURNAL = 'journal.log'
SWEEP = 'sweep'
"""The note of a study's sweep."""
POINT = 'point'
"""The note of a trial's point: all of what was drawn, in one write."""
SURPLUS = 'one more than the sweep has: another host made the last trial at the same time'
OWN = (JOURNAL, 'trials', 'logs', 'locks', 'confirm', 'jobs')
"""What a study is written to below its folder, besides files that are replaced or locked."""
NOTES: dict[str, Callable[[Any], bool]] = {
    HOME: lambda found: isinstance(found, str),
    POINT: lambda found: isinstance(found, dict),
    'starts': lambda found: isinstance(found, list) and all(type(step) is int for step in found),
    'pruned_at': lambda found: type(found) is int,
    'reason': lambda found: isinstance(found, str),
    'seconds': lambda found: _is_number(found) and found >= 0,
}
"""The notes of trials, and what their values are."""
UNREADABLE = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What Optuna raises for a journal that it did not write."""
DATABASE = 'database'
"""The file that marks a study whose trials are stored in a database."""


@dataclasses.dataclass(frozen=True)
class Claim:
    """The exclusive right to run a trial, until `release`.

    Attributes:
      trial: Optuna's trial.
      number: of the trial.
      drawn: its point of the space.
      lock: the lock of the trial, held.
    """

    trial: optuna.Trial
    number: int
    drawn: dict[str, Drawn]
    lock: Lock

    @property
    def notes(self) -> dict[str, Any]:
        """The notes of earlier attempts."""
        return self.trial.user_attrs

    def note(self, name: str, value: Any) -> None:
        """Stores a note in the study, where it survives this process."""
        self.trial.set_user_attr(name, value)

    def release(self) -> None:
        """Releases the lock, so that another process may run the trial."""
        self.lock.release()


class Study:
    """An open study; see `create_study`, `open_study`, and `read_study` for those that are only looked at."""

    def __init__(self, folder: pathlib.Path, sweep: Sweep, storage: BaseStorage, name: str, home: str):
        self.folder = folder
        self.sweep = sweep
        self._storage = storage
        self._name = name
        self._home = home
        self._id = storage.get_study_id_from_name(name)

    @property
    def storage(self) -> BaseStorage:
        """Optuna's storage, which the confirmation study shares if it is a database."""
        return self._storage

    @property
    def name(self) -> str:
        """The study's name in the storage."""
        return self._name

    def trials(self) -> list[FrozenTrial]:
        """All trials so far, by number."""
        every = self._storage.get_all_trials(self._id, deepcopy=False)
        return [trial for trial in every if trial.number < self.sweep.trials]

    def finished(self) -> bool:
        """Whether every trial has ended."""
        trials = self.trials()
        return len(trials) == self.sweep.trials and all(trial.state.is_finished() for trial in trials)

    def best(self) -> FrozenTrial | None:
        """The completed trial with the best value; on a tie, the first."""
        best: FrozenTrial | None = None
        for trial in self.trials():
            if trial.state == TrialState.COMPLETE and (best is None or self.sweep.better(_value(trial), _value(best))):
                best = trial
        return best

    def drawn(self, trial: FrozenTrial) -> dict[str, Drawn]:
        """A trial's point of the space; empty while it is being drawn."""
        complete = trial.params.keys() == self.sweep.space.keys()
        return dict(trial.params) if complete else {}

    def settings(self, trial: FrozenTrial) -> dict[str, Any]:
        """The config keys that a trial sets, with their values."""
        drawn = self.drawn(trial)
        return self.sweep.settings(drawn) if len(drawn) == len(self.sweep.space) else {}

    def setting(self, trial: FrozenTrial, key: str) -> Any:
        """What a key of a trial's run config is, set by the trial or by the base."""
        return self.settings(trial).get(key, value_at(self.sweep.base, key))

    def workdir(self, number: int) -> pathlib.Path:
        """The run directory of a trial."""
        return workdir(self.folder, number)

    def log(self, number: int) -> pathlib.Path:
        """The file of a trial's console output."""
        return self.folder / 'logs' / f'{number:04}.txt'

    def taken(self, trial: FrozenTrial) -> bool:
        """Whether some process runs the trial, as far as this folder shows."""
        return trial.user_attrs.get(HOME) != self._home or self._trial_lock(trial.number).taken()

    def claim(self) -> Claim | None:
        """Claims a trial that no process runs, or creates one; `None` where none is left."""
        with Lock(self.folder / 'lock').held():
            for trial in self.trials():
                if trial.state == TrialState.RUNNING and trial.user_attrs[HOME] == self._home:
                    lock = self._trial_lock(trial.number)
                    if not lock.acquire(wait=False):
                        continue
                    trial_id = self._storage.get_trial_id_from_study_id_trial_number(self._id, trial.number)
                    if self._storage.get_trial(trial_id).state == TrialState.RUNNING:
                        return self._claim(trial_id, trial.number, lock)
                    lock.release()
            return self._create()

    def tell(self, claim: Claim, state: TrialState, value: float | None = None, reason: str | None = None) -> None:
        """Records the end of a trial."""
        if reason is not None:
            claim.note('reason', reason)
        self._optuna(claim.number).tell(claim.trial, value, state)

    def _create(self) -> Claim | None:
        if len(self.trials()) >= self.sweep.trials:
            return None
        made = create_trial(state=TrialState.RUNNING, user_attrs={HOME: self._home})
        trial_id = self._storage.create_new_trial(self._id, made)
        number = self._storage.get_trial_number_from_id(trial_id)
        if number >= self.sweep.trials:
            self._storage.set_trial_user_attr(trial_id, 'reason', SURPLUS)
            self._storage.set_trial_state_values(trial_id, TrialState.FAIL)
            return None
        lock = self._trial_lock(number)
        lock.acquire()
        return self._claim(trial_id, number, lock)

    def _claim(self, trial_id: int, number: int, lock: Lock) -> Claim:
        """Claims a trial whose lock is held; the lock is released again where that fails."""
        try:
            trial = optuna.Trial(self._optuna(number), trial_id)
            return Claim(trial, number, self._point(trial, trial_id, number), lock)
        except BaseException:
            lock.release()
            raise

    def _point(self, trial: optuna.Trial, trial_id: int, number: int) -> dict[str, Drawn]:
        """The point of a trial, drawn and written unless an earlier attempt wrote it."""
        drawn, known = trial.user_attrs.get(POINT), trial.params
        if drawn is None:
            drawn = {**self.sweep.fixed(number), **trial.relative_params, **known}
            trial.set_user_attr(POINT, drawn)
        for name in sorted(drawn.keys() - known.keys()):
            kind = self.sweep.space[name].distribution
            self._storage.set_trial_param(trial_id, name, kind.to_internal_repr(drawn[name]), kind)
        return drawn

    def _optuna(self, number: int) -> optuna.Study:
        pruner, fixed = self.sweep.pruner, self.sweep.fixed(number)
        free = {name: self.sweep.space[name].distribution for name in self.sweep.space.keys() - fixed.keys()}
        return optuna.load_study(
            study_name=self._name,
            storage=self._storage,
            sampler=Whole(self.sweep.sampler.optuna(number), free),
            pruner=optuna.pruners.NopPruner() if pruner is None else pruner.optuna(self.sweep.steps),
        )

    def _trial_lock(self, number: int) -> Lock:
        return Lock(self.folder / 'locks' / f'{number:04}')


STATES = {TrialState.COMPLETE: 'done', TrialState.PRUNED: 'pruned', TrialState.FAIL: 'failed'}
"""What the states of trials that have ended are called."""


def workdir(folder: pathlib.Path, number: int) -> pathlib.Path:
    """The run directory of a trial of the study in a folder."""
    return folder / 'trials' / f'{number:04}'


def create_study(folder: pathlib.Path, config: ConfigDict, storage: str | None = None) -> Study:
    """Opens the study of a sweep in a folder, creating it where there is none.

    `storage` is the address of a database; without one, trials are kept in the folder. Raises `UserError` where the
    folder belongs to another sweep, naming the keys that differ.
    """
    sweep = read(config)
    if not (folder / 'sweep.json').exists():
        sweep.check_values()
    _claim_folder(folder, config, storage)
    return open_study(folder, storage)


def _claim_folder(folder: pathlib.Path, config: ConfigDict, storage: str | None) -> None:
    path = folder / 'sweep.json'
    # Another process may be claiming it at this moment, or may have died while it did.
    ours = ('lock', HOME, DATABASE, path.name)
    if (
        not path.exists()
        and folder.exists()
        and any(child.name not in ours and not files.is_temporary(child) for child in folder.iterdir())
    ):
        raise UserError(f'{folder} is not empty and holds no sweep.json, so it is not a study: choose another --study')
    with Lock(folder / 'lock').held():
        if path.exists():
            differing = differences(configs.load(path), config)
            if differing:
                raise UserError(
                    f'{folder} holds a study of another sweep ({listed(differing)}): choose another --study'
                )
        else:
            if storage is not None:
                files.write(folder / DATABASE, 'trials are in a database: give --storage\n')
            files.write(folder / HOME, f'{uuid.uuid4()}\n')
            save(config, path)


def open_study(folder: pathlib.Path, storage: str | None = None, within: Study | None = None) -> Study:
    """Opens an existing study to run its trials; with `within`, uses the storage of that study if it is a database.

    Raises `UserError` where there is none, it is stored in a database and no address is given, or it has links where it
    is written to.
    """
    config = _config(folder, storage)
    files.check_own(folder, OWN)
    sweep = read(config)
    opened = _storage(folder, storage, within, lambda path: JournalFileBackend(path, JournalLock(folder / JOURNAL)))
    name, begun = _name(folder, opened, storage, within)
    if not begun:
        direction = StudyDirection.MINIMIZE if sweep.goal == 'min' else StudyDirection.MAXIMIZE
        optuna.create_study(storage=opened, study_name=name, direction=direction, load_if_exists=True)
    number = opened.get_study_id_from_name(name)
    if SWEEP not in opened.get_study_user_attrs(number):
        opened.set_study_user_attr(number, SWEEP, plain(config))
    return _checked(folder, config, opened, name)


def read_study(folder: pathlib.Path, storage: str | None = None) -> Study:
    """Opens a study to look at: takes no lock and changes nothing in the folder, which need not be writable.

    Raises `UserError` where there is none, it has not begun, or it is stored in a database and no address is given.
    """
    study = _begun(folder, storage, None)
    if study is None:
        raise UserError(
            f'{folder} has not begun: no worker has opened it; attnlab sweep with the same --study begins it'
        )
    return study


def read_confirmation(study: Study, storage: str | None) -> Study | None:
    """Opens the confirmation of a study to look at, as `read_study` does; `None` where it has not begun."""
    folder = study.folder / 'confirm'
    return _begun(folder, storage, study) if (folder / 'sweep.json').exists() else None


def _begun(folder: pathlib.Path, storage: str | None, within: Study | None) -> Study | None:
    """A study to look at; `None` where nothing is stored of it yet."""
    config = _config(folder, storage)
    if storage is None and not (folder / JOURNAL).exists():
        return None
    opened = _storage(folder, storage, within, JournalFileBackend)
    name, begun = _name(folder, opened, storage, within)
    return _checked(folder, config, opened, name) if begun else None


def _config(folder: pathlib.Path, storage: str | None) -> ConfigDict:
    """The sweep of a study. Raises `UserError` where there is none, or it is not stored as `storage` says."""
    path = folder / 'sweep.json'
    if not path.exists():
        raise UserError(f'{folder} is not a study: it holds no sweep.json')
    config = configs.load(path)
    if (folder / DATABASE).exists() != (storage is not None):
        hint = 'is in a database: name it with --storage' if storage is None else 'has its trials in a journal'
        raise UserError(f'{folder} {hint}')
    return config


def _storage(
    folder: pathlib.Path,
    storage: str | None,
    within: Study | None,
    backend: Callable[[str], JournalFileBackend],
) -> BaseStorage:
    """Optuna's storage; that of a journal is opened by `backend`. Raises `UserError` where the journal is damaged."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if storage is not None:
        return open_database(storage) if within is None else within.storage
    path = folder / JOURNAL
    if path.exists():
        files.reading(path).close()
    try:
        return JournalStorage(backend(str(path)))
    except UNREADABLE as error:
        raise UserError(
            f'{path} is damaged: {type(error).__name__}: {error}; remove lines that are not JSON, or put back a copy'
        ) from error


def _name(folder: pathlib.Path, opened: BaseStorage, storage: str | None, within: Study | None) -> tuple[str, bool]:
    """The name of a study in its storage, and whether it is there."""
    name = folder.absolute().name if within is None else f'{within.name}/{folder.name}'
    known = [study.study_name for study in opened.get_all_studies()]
    if storage is None and known:
        # A folder may be copied or renamed; its journal holds one study.
        if len(known) > 1 or not isinstance(known[0], str):
            raise UserError(f'{folder / JOURNAL} is damaged: it has studies {known!r:.80}, not one; put back a copy')
        (name,) = known
    elif name not in known and (folder / 'trials').exists():
        raise UserError(
            f'{folder} holds trials, and the database has no study {name!r}: if the folder was renamed, rename it back'
        )
    return name, name in known


def _checked(folder: pathlib.Path, config: ConfigDict, opened: BaseStorage, name: str) -> Study:
    """The study. Raises `UserError` where what is stored is of another sweep, or the folder is a part of one."""
    known = opened.get_study_user_attrs(opened.get_study_id_from_name(name))
    if SWEEP in known and (differing := differences(from_plain(known[SWEEP]), config)):
        raise UserError(f'the database has a study {name} of another sweep ({differing[0]}): choose another --study')
    if not (folder / HOME).exists():
        raise UserError(f'{folder} lacks its file {HOME!r}: it was not copied completely; copy all of the study')
    try:
        home = files.read_text(folder / HOME).strip()
    except UnicodeDecodeError as error:
        raise UserError(f'{folder / HOME} is damaged: {error}; put back a copy of it') from error
    study = Study(folder, read(config), opened, name, home)
    for trial in study.trials():
        if (damage := _damage(trial, study.sweep.space)) is not None:
            where = folder / JOURNAL if (folder / JOURNAL).exists() else f'the database of {folder}'
            raise UserError(f'{where} is damaged: {damage}; put back a copy')
    return study


def _damage(trial: FrozenTrial, space: Space) -> str | None:
    """What a trial has that no worker writes, in words; `None` where there is nothing."""
    notes, points, reports = trial.user_attrs, [trial.params], trial.intermediate_values
    points += [notes[POINT]] if isinstance(notes.get(POINT), dict) else []
    values = [] if trial.values is None else trial.values
    checked = [
        *((name, notes[name], right(notes[name])) for name, right in NOTES.items() if name in notes),
        (HOME, None, HOME in notes or trial.state.is_finished()),
        *((POINT, point, _holds(space, point)) for point in points),
        *(('a report', value, type(step) is int and _is_number(value)) for step, value in reports.items()),
        ('the value', values, len(values) <= 1 and all(map(_is_number, values))),
        ('the value', values, len(values) == 1 or trial.state != TrialState.COMPLETE),
    ]
    wrong = next(((name, found) for name, found, right in checked if not right), None)
    return None if wrong is None else f'{wrong[0]} of trial {trial.number} is {wrong[1]!r:.60}'


def _holds(space: Space, point: Mapping[str, Any]) -> bool:
    """Whether a point, or as much of it as is drawn, lies in the space."""
    return all(name in space and space[name].holds(drawn) for name, drawn in point.items())


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def confirmation(study: Study, storage: str | None) -> Study | None:
    """Opens the study of the best point with new seeds; `None` where none is configured, or no trial completed."""
    best = study.best()
    if study.sweep.confirm == 0 or best is None:
        return None
    folder = study.folder / 'confirm'
    _claim_folder(folder, study.sweep.confirmation(study.drawn(best)), storage)
    return open_study(folder, storage, study)


class Parts:
    """A study and its confirmation, which is opened once, when it has begun; both are only looked at."""

    def __init__(self, study: Study, storage: str | None):
        self._studies = [study]
        self._storage = storage

    def studies(self) -> list[Study]:
        """The study and, once it has begun, its confirmation."""
        study, *confirming = self._studies
        if not confirming and (found := read_confirmation(study, self._storage)) is not None:
            self._studies.append(found)
        return self._studies

    def finished(self) -> bool:
        """Whether all trials have ended, those of the confirmation that is due too."""
        study, *confirming = self.studies()
        due = study.sweep.confirm > 0 and study.best() is not None
        return study.finished() and len(confirming) >= due and all(one.finished() for one in confirming)


def _value(trial: FrozenTrial) -> float:
    assert trial.value is not None
    return trial.value
