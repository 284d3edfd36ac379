"""What a page of studies shows, gathered from their folders as plain data: all the reading, so that drawing is pure."""

import dataclasses
import math
import os
import pathlib
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from ml_collections import ConfigDict
from optuna.trial import FrozenTrial, TrialState

from attnlab import config as configs
from attnlab.compare import equality
from attnlab.compare.costs import COSTS, WEIGHTS, matched_cost, pareto
from attnlab.compare.equality import Equality, differing, of_conditions, of_kinds, of_measure
from attnlab.compare.report.comparison import (
    Comparison,
    StudyResult,
    compare_studies,
    measured_by,
    name_of,
    open_studies,
    recorded,
    scored,
    shown_config,
    shown_record,
    tokens_of,
)
from attnlab.compare.report.measured import DeviceCost, costing, measure_here, read_measured, shared_device
from attnlab.compare.runs import curves
from attnlab.config import flatten
from attnlab.errors import UserError
from attnlab.quantize.training import packed_bytes
from attnlab.runs.record import Record
from attnlab.sweep.study import STATES, Study, read_confirmation, workdir
from attnlab.train.average import SUFFIX
from attnlab.train.cost import LayerCore
from attnlab.train.setup import ROUNDING

COMPANIONS = {'accuracy': ('loss', 'min'), 'exact_match': ('loss', 'min'), 'loss': ('accuracy', 'max')}
"""By the ending of a metric, the second metric of the same evaluation that is shown as well, and its goal."""

CONDITIONS = {
    'search space': ('space',),
    'search': ('sampler', 'pruner', 'trials', 'seeds', 'confirm'),
    'metric': ('metric', 'goal', 'reported'),
    **{name: tuple(f'base.{start}' for start in starts) for name, starts in equality.CONDITIONS.items()},
}
"""The conditions that studies should share besides size, and the prefixes of the sweep keys of each."""


@dataclasses.dataclass(frozen=True)
class Costs:
    """What the model of a study costs; `None` for what is not known.

    Attributes:
      parameters: numbers trained.
      state_bytes: that decoding one sequence keeps, at the training length.
      state_bytes_8x: the same at eight times that length.
      flops: floating-point operations of the training of one trial.
      tokens_per_second: of training, the median over trials.
      decode_ms: milliseconds of decoding one token.
      peak_bytes: of the training step.
      weight_bytes: of parameters and buffers, as `attnlab quantize` stores them; `None` where no study was trained with
        few bits.
      bits: of these for a parameter, on average.
    """

    parameters: float
    state_bytes: float
    state_bytes_8x: float
    flops: float
    tokens_per_second: float | None
    decode_ms: float | None
    peak_bytes: float | None
    weight_bytes: float | None = None
    bits: float | None = None


@dataclasses.dataclass(frozen=True)
class Trial:
    """One run of a study.

    Attributes:
      number: in the study.
      state: 'done', 'pruned', 'failed' or 'not finished'.
      confirms: whether it is one of those that run the winner with fresh seeds.
      best: whether it is the study's best.
      settings: what it sets, by key.
      seed: of the run.
      value: of the metric; `None` where there is none.
      reason: why it failed.
      link: from the page to the directory of the run; `None` where that is not there.
      lengths: the metric of confirmed runs, of all runs, by multiple of the length trained on.
      slices: the same by slice of the examples, such as `all` or `steps>=15`.
      tokens_per_second: of its training.
      device: what it ran on; `None` for a run that never started.
    """

    number: int
    state: str
    confirms: bool
    best: bool
    settings: Mapping[str, Any]
    seed: int
    value: float | None
    reason: str
    link: str | None
    lengths: Mapping[int, float]
    slices: Mapping[str, float]
    tokens_per_second: float | None
    device: str | None


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What a layer ran in trials of a study, and on what device."""

    ran: LayerCore
    device: str


@dataclasses.dataclass(frozen=True)
class StudyContents:
    """One study.

    Attributes:
      row: its line of the comparison.
      companion: the same by the second metric; `None` where there is none.
      costs: of its model.
      trials: all of them, those of the confirmation after the others.
      kernels: that ran, and in how many trials.
      measured: what was measured of it, by kind of device.
      settings: the config of its sweep, by key.
      curves: of its best trial by metric, steps with values.
    """

    row: StudyResult
    companion: StudyResult | None
    costs: Costs
    trials: tuple[Trial, ...]
    kernels: tuple[tuple[Kernel, int], ...]
    measured: Mapping[str, DeviceCost]
    settings: Mapping[str, Any]
    curves: Mapping[str, Sequence[tuple[int, float]]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Contents:
    """Everything on a page.

    Attributes:
      comparison: the rows, and why they are not equal.
      companion: the name of the second metric; `None` where there is none.
      studies: in the order of the rows.
      length: that was trained on, of the first study.
      device: the kind that decoding and memory are shown for; `None` where nothing was measured.
      equalities: what was matched, and what was not.
      notices: what a reader must know before comparing.
      within: from the page to the folder with which it can be moved without breaking links.
    """

    comparison: Comparison
    companion: str | None
    studies: tuple[StudyContents, ...]
    length: int
    device: str | None
    equalities: tuple[Equality, ...]
    notices: tuple[str, ...]
    within: str


def gather(
    folders: Sequence[pathlib.Path],
    out: pathlib.Path,
    *,
    by: str,
    tolerance: float,
    storage: str | None = None,
    measure: bool | None = None,
    strict: bool = False,
) -> Contents:
    """Reads studies for a page in `out`; measures those that never were, or here of another config, with `measure` all.

    Without `measure` it measures none.

    Raises `UserError` for a folder that is no study, two of one name and, when `strict`, what is not matched.
    """
    studies = open_studies(folders, storage)
    comparison = compare_studies(studies, by, tolerance, storage)
    if strict and comparison.reasons:
        raise UserError(f'the studies are not matched: {"; ".join(comparison.reasons)}')
    refusals = _measure(studies, measure)
    trials = [_trials(study, storage, out) for study in studies]
    ran_on = Counter(trial.device for found in trials for trial in found if trial.device is not None)
    kept = [_current(study) for study in studies]
    device = shared_device(list(kept), ran_on)
    companion = _companion(studies)
    weighed = any(ROUNDING in shown_config(study) for study in studies)
    shown = tuple(
        StudyContents(
            row=row,
            companion=None if companion is None else _companion_row(study, row, *companion),
            costs=dataclasses.replace(_costs(study, found, measured, device), **(_weights(study) if weighed else {})),
            trials=found,
            kernels=_kernels(study, found),
            measured=measured,
            settings=flatten(configs.load(study.folder / 'sweep.json')),
            curves=_curves(study),
        )
        for study, row, found, measured in zip(studies, comparison.rows, trials, kept, strict=True)
    )
    return Contents(
        comparison=comparison,
        companion=None if companion is None else companion[0],
        studies=shown,
        length=shown_config(studies[0]).length,
        device=device,
        equalities=tuple(_equalities(shown, by, tolerance)),
        notices=(*filter(None, [comparison.on_the_same]), *refusals, *_outdated(studies), *_notices(shown, device)),
        within=_within([study.folder for study in studies], out),
    )


def _curves(study: Study) -> dict[str, Sequence[tuple[int, float]]]:
    """The metric and the training loss of the study's best trial over steps."""
    best = study.best()
    record = None if best is None else recorded(study.workdir(best.number))
    return {} if record is None else curves(record, study.sweep.metric)


def paid(costs: Costs, cost: str) -> float | None:
    """One of the costs; `None` where it is not known, or there is none: what does not stream has no state."""
    value: float | None = getattr(costs, cost)
    return None if cost.startswith('state_bytes') and not value else value


def frontier(contents: Contents, cost: str, rows: Sequence[StudyResult]) -> list[bool]:
    """Which studies are Pareto-optimal in a cost and the score of their rows: none in a cost that was matched, or that
    it does not have.

    The score is the confirmed one where every study has one, else the best trial of each.
    """
    if cost == matched_cost(contents.comparison.by, contents.length):
        return [False] * len(rows)
    studies, score = contents.studies, scored(rows)
    points: list[tuple[float, float] | None] = []
    for study, row in zip(studies, rows, strict=True):
        value = paid(study.costs, cost)
        sign = 1.0 if row.goal == 'min' else -1.0
        more = -1.0 if COSTS[cost].more_is_better else 1.0
        if value is None or not row.statistics:
            points.append(None)
        else:
            points.append((more * value, sign * row.statistics[score].mean))
    return pareto(points)


def _measure(studies: Sequence[Study], measure: bool | None) -> list[str]:
    """Measures what is to be measured; returns why some could not be."""
    refusals = []
    for study in studies:
        if measure or (measure is None and _due(study)):
            try:
                measure_here(study.folder, shown_config(study))
            except (UserError, OSError) as error:
                refusals.append(f'{name_of(study)} could not be measured here: {error}')
    return refusals


def _due(study: Study) -> bool:
    """Whether a study was never measured or, on the kind of device at hand, of another config."""
    kept = read_measured(study.folder)
    others = kept.keys() - _current(study).keys()
    return not kept or (bool(others) and jax.devices()[0].device_kind in others)


def _current(study: Study) -> dict[str, DeviceCost]:
    """What was measured of the config that represents the study, by the kind of device."""
    config = costing(shown_config(study))
    return {device: one for device, one in read_measured(study.folder).items() if one.config == config}


def _outdated(studies: Sequence[Study]) -> list[str]:
    """What of the measurements is left out, as they are of another config."""
    notices = []
    for study in studies:
        others = sorted(read_measured(study.folder).keys() - _current(study).keys())
        if others:
            notices.append(
                f'What was measured of {name_of(study)} on {", ".join(others)} is left out: it is of another config '
                'than that of its best trial, or does not say of which; a report with --measure, made there, measures '
                'it again.'
            )
    return notices


def _trials(study: Study, storage: str | None, out: pathlib.Path) -> tuple[Trial, ...]:
    found = [_trial(study, trial, out, confirms=False) for trial in study.trials()]
    confirmation = read_confirmation(study, storage)
    if confirmation is not None:
        settings = _fixed_settings(study, confirmation)
        confirmed = [_trial(confirmation, trial, out, confirms=True) for trial in confirmation.trials()]
        found += [dataclasses.replace(trial, settings=settings) for trial in confirmed]
    return tuple(found)


def _fixed_settings(study: Study, confirmation: Study) -> dict[str, Any]:
    """What the trials of a confirmation have of the keys that its study varies."""
    base = flatten(confirmation.sweep.base)
    keys = sorted(key for dimension in study.sweep.space.values() for key in dimension.keys)
    return {key: base[key] for key in keys if key in base}


def _trial(study: Study, trial: FrozenTrial, out: pathlib.Path, *, confirms: bool) -> Trial:
    folder = study.workdir(trial.number)
    record = recorded(folder)
    best = study.best()
    notes, complete = trial.user_attrs, trial.state == TrialState.COMPLETE
    return Trial(
        number=trial.number,
        state=STATES.get(trial.state, 'not finished'),
        confirms=confirms,
        best=not confirms and best is not None and best.number == trial.number,
        settings=study.settings(trial),
        seed=study.sweep.seed(trial.number),
        value=trial.value,
        reason=notes.get('reason', ''),
        link=_relative(folder, out) if folder.is_dir() else None,
        lengths={} if record is None or not complete else lengths(record, study.sweep.score),
        slices={} if record is None or not complete else slices(record, study.sweep.score),
        tokens_per_second=None if record is None else record.tokens_per_second,
        device=None if record is None else record.facts['device_kind'],
    )


def slices(record: Record, metric: str) -> dict[str, float]:
    """A metric by slice, from the names of a run's last metrics, `test/SLICE/accuracy`; empty of other evaluations."""
    evaluator, _, name = metric.partition('/')
    known, slash, ending = name.rpartition('/')
    if not slash or re.fullmatch(r'\d+x', known):
        return {}
    pattern = re.compile(rf'{re.escape(evaluator)}/(.+)/{re.escape(ending)}')
    found = {match[1]: value for key, value in record.last.items() if (match := pattern.fullmatch(key))}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def lengths(record: Record, metric: str) -> dict[int, float]:
    """A metric by the multiple of the length trained on, from the names of a run's last metrics.

    They are `test/1x/accuracy`, `test/2x/accuracy` of an evaluation by slices, and `valid/loss`, `valid/loss@2x` of one
    of held-out text, where the name without a multiple is that of the first of the evaluator's `multiples`.
    """
    evaluator, _, name = metric.partition('/')
    sliced = re.fullmatch(r'(\d+)x/(.+)', name)
    if sliced:
        pattern = re.compile(rf'{re.escape(evaluator)}/(\d+)x/{re.escape(sliced[2])}')
        found = {int(match[1]): value for key, value in record.last.items() if (match := pattern.fullmatch(key))}
    else:
        plain = name.partition('@')[0]
        pattern = re.compile(rf'{re.escape(evaluator)}/{re.escape(plain)}@(\d+)x')
        found = {int(match[1]): value for key, value in record.last.items() if (match := pattern.fullmatch(key))}
        if f'{evaluator}/{plain}' in record.last:
            found[_first_multiple(record.config, evaluator)] = record.last[f'{evaluator}/{plain}']
    known = {multiple: found[multiple] for multiple in sorted(found) if math.isfinite(found[multiple])}
    return known if len(known) > 1 else {}


def _first_multiple(config: ConfigDict, evaluator: str) -> int:
    name = evaluator.removesuffix(SUFFIX)
    for one in config.evals:
        if one.name == name and 'multiples' in one:
            return one.multiples[0]
    return 1


def _costs(study: Study, trials: Sequence[Trial], measured: Mapping[str, DeviceCost], device: str | None) -> Costs:
    record = shown_record(study)
    length = shown_config(study).length
    speeds = [trial.tokens_per_second for trial in trials if trial.tokens_per_second is not None]
    here = None if device is None else measured.get(device)
    return Costs(
        parameters=measured_by(study, record, 'params'),
        state_bytes=measured_by(study, record, f'state_bytes@{length}'),
        state_bytes_8x=measured_by(study, record, f'state_bytes@{8 * length}'),
        flops=measured_by(study, record, 'train_flops') * tokens_of(study),
        tokens_per_second=statistics.median(speeds) if speeds else None,
        decode_ms=None if here is None else here.decode_ms,
        peak_bytes=None if here is None or here.peak_bytes is None else float(here.peak_bytes),
    )


def _weights(study: Study) -> dict[str, float]:
    """Bytes of weights and bits a parameter, of what was trained with few bits as it is packed after training."""
    size = packed_bytes(shown_config(study))
    return {'weight_bytes': float(size), 'bits': 8 * size / measured_by(study, shown_record(study), 'params')}


def costs_of(contents: Contents) -> list[str]:
    """The costs that studies are compared by."""
    known = [cost for cost in WEIGHTS if any(getattr(study.costs, cost) is not None for study in contents.studies)]
    return [cost for cost in COSTS if cost not in WEIGHTS or cost in known]


def _companion(studies: Sequence[Study]) -> tuple[str, str] | None:
    """The second metric of the studies, and its goal, where every study has recorded it."""
    head, slash, name = studies[0].sweep.metric.rpartition('/')
    if name not in COMPANIONS:
        return None
    other, goal = COMPANIONS[name]
    records = [shown_record(study) for study in studies]
    metric = f'{head}{slash}{other}'
    return (metric, goal) if all(record is not None and metric in record.last for record in records) else None


def _companion_row(study: Study, row: StudyResult, metric: str, goal: str) -> StudyResult:
    """The row by another metric, as the finished trials recorded it at their ends."""
    finished = [trial for trial in study.trials() if trial.state.is_finished()]
    points = []
    for trial, point in zip(finished, row.points, strict=True):
        record = recorded(study.workdir(trial.number))
        if record is not None and metric in record.last and math.isfinite(record.last[metric]):
            found = record.measured(metric)
            points.append(dataclasses.replace(point, value=found.mean, even=None, noise=found.noise))
        else:
            points.append(dataclasses.replace(point, value=None, even=None, noise=None))
    return dataclasses.replace(row, points=tuple(points), goal=goal, metric=metric, confirmed=())


def _kernels(study: Study, trials: Sequence[Trial]) -> tuple[tuple[Kernel, int], ...]:
    """What ran, most trials first."""
    counts: Counter[Kernel] = Counter()
    for trial in trials:
        parent = study.folder / 'confirm' if trial.confirms else study.folder
        record = recorded(workdir(parent, trial.number))
        if record is not None:
            path = record.folder / 'run.json'
            ran = (LayerCore.described(entry, path) for entry in record.implementations)
            counts.update(Kernel(one, record.facts['device_kind']) for one in ran)
    return tuple(
        sorted(counts.items(), key=lambda item: (-item[1], item[0].ran.layers, item[0].ran.core, item[0].device))
    )


def _equalities(studies: Sequence[StudyContents], by: str, tolerance: float) -> list[Equality]:
    """What was matched, the other costs, then the conditions."""
    names = [study.row.name for study in studies]
    found = [of_measure(by, names, [study.row.size for study in studies], tolerance, required=True)]
    for cost in COSTS:
        values = [getattr(study.costs, cost) for study in studies]
        if any(value is not None for value in values) and (cost, by) != ('parameters', 'params'):
            found.append(of_measure(cost, names, values, tolerance, required=False))
    found += of_conditions(CONDITIONS, differing([study.settings for study in studies]))
    devices = [trial.device for study in studies for trial in study.trials if trial.device is not None]
    return [*found, of_kinds('device of the trials', devices)]


def _notices(studies: Sequence[StudyContents], device: str | None) -> list[str]:
    """What of devices and missing directories a reader must know."""
    notices = []
    ran = {
        study.row.name: sorted({trial.device for trial in study.trials if trial.device is not None})
        for study in studies
    }
    if len({one for found in ran.values() for one in found}) > 1:
        where = '; '.join(f'{name}: {", ".join(found) or "nothing"}' for name, found in ran.items())
        notices.append(
            f'The trials ran on several kinds of device, so their tokens per second do not compare ({where}).'
        )
    for study in studies:
        name = study.row.name
        if device is not None and device not in study.measured:
            had = (
                f'it was measured on {", ".join(study.measured)}'
                if study.measured
                else 'nothing was measured of its config'
            )
            notices.append(
                f'{name} has no decoding time and memory on {device}: {had}; a report with --measure measures every '
                'study on the device at hand, and keeps what others measured.'
            )
        elif device is not None and ran[name] and device not in ran[name]:
            notices.append(
                f'Decoding time and memory of {name} were measured on {device}, while its trials ran on '
                f'{", ".join(ran[name])}.'
            )
        missing = sum(trial.link is None for trial in study.trials)
        if missing:
            notices.append(f'{missing} of the run directories of {name} are not there, and have no link.')
    return notices


def _relative(path: pathlib.Path, out: pathlib.Path) -> str:
    return pathlib.PurePath(os.path.relpath(path.absolute(), out.absolute())).as_posix()


def _within(folders: Sequence[pathlib.Path], out: pathlib.Path) -> str:
    """From `out` to the innermost folder that holds it and the studies."""
    shared = os.path.commonpath([os.path.abspath(folder) for folder in (*folders, out)])
    return _relative(pathlib.Path(shared), out)
