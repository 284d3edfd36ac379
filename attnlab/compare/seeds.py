"""Runs that differ only in seed, as one result: the mean of their scores with an interval over the seeds."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from attnlab.compare.runs import RunResult, common_beginning
from attnlab.config import plain
from attnlab.evals.measured import of_seeds
from attnlab.runs.record import Record
from attnlab.train.run import QUANTIZATION, data_hashes, makings
from attnlab.train.setup import TRACELESS

Curve = Sequence[tuple[int, float]]

FREE = ('seed', *TRACELESS)
"""Keys of a config in which runs of one group may differ: the seed, and what leaves no trace in the numbers."""

OF_ONE = ('from', 'allocation')
"""What runs that are made alike may differ in: the run that they are made of, and what was measured on it."""

MEASURED = ('thresholds', 'scale', 'zero')
"""Keys of the few bits of a config that are measured on rows of training: of `Quantization`, `Fixed`, `FixedFloating`.
What was asked for, by which they were found, stands in the record of how the run was made."""

SEED = re.compile(r'((^|[-_/. ]+)(seed|s)?[-_=]?|seed[-_=]?)?\d*$')
"""How the part that names of a group share may end before what differs: `mha-seed1` and `mha-seed2` are `mha`.

An `s` is a mark where something parts it from what is before, since recipes end in one: `window_sinks-0` is not of
`window_sink`."""


def seed_groups(records: Sequence[Record]) -> list[list[int]]:
    """The places of runs that differ only in seed, in the order in which groups first come.

    Runs on different devices, of other data under the same names, or at different steps are not of one group. Those of
    one config and one seed stay apart: they are repeats, or differ in what their configs do not say, such as the code,
    so that they are no sample of seeds. Runs that are made of others are of one group only if they are made alike.
    """
    groups: dict[str, list[int]] = {}
    for place, record in enumerate(records):
        groups.setdefault(_conditions(record), []).append(place)
    found = []
    for places in groups.values():
        distinct = len({records[place].config.seed for place in places}) == len(places)
        found += [places] if distinct else [[place] for place in places]
    return sorted(found)


def _conditions(record: Record) -> str:
    """Everything that runs of one group have in common."""
    kept = {key: value for key, value in plain(record.config).items() if key not in FREE}
    facts = record.facts
    # Configs do not say how far a run came, nor that it was edited, merged, or quantized with feedback.
    made = [[name, _alike(making)] for name, making in makings(facts)]
    if QUANTIZATION in kept and any(name == 'quantized' for name, _ in made):
        kept[QUANTIZATION] = _asked(kept[QUANTIZATION])
    return json.dumps(
        [kept, record.step, facts['device_kind'], facts['device_count'], made, data_hashes(facts['data'])],
        sort_keys=True,
    )


def _alike(making: Any) -> Any:
    """What records of runs that were made alike have in common.

    Merged runs name those that they are made of, and stay apart: two of them may be made of the same.
    """
    return {key: making[key] for key in making if key not in OF_ONE} if isinstance(making, Mapping) else making


def _asked(few_bits: Any) -> Any:
    """A config of few bits without what was measured; `None` stays, for it says that nothing was."""
    if isinstance(few_bits, Mapping):
        return {name: _asked(value) for name, value in few_bits.items() if name not in MEASURED or value is None}
    return [_asked(value) for value in few_bits] if isinstance(few_bits, list | tuple) else few_bits


def over_seeds(results: Sequence[RunResult], groups: Sequence[Sequence[int]]) -> list[RunResult]:
    """The results of runs by groups of `seed_groups`: one result a group, named by what its runs' names share."""
    taken = [[results[place] for place in group] for group in groups]
    names = [shared_name([one.name for one in group]) for group in taken]
    keys = list(zip([group[0].task for group in taken], names, strict=True))
    return [
        merged(name if name and keys.count(key) == 1 else f'{group[0].name} and {len(group) - 1} more', group)
        if len(group) > 1
        else group[0]
        for key, name, group in zip(keys, names, taken, strict=True)
    ]


def shared_name(names: Sequence[str]) -> str:
    """What names begin with alike, without a seed's mark at its end; all of it where there is one name."""
    if len(names) == 1:
        return names[0]
    return SEED.sub('', common_beginning(names))


def merged(name: str, results: Sequence[RunResult]) -> RunResult:
    """One result for runs that differ only in seed: the mean score with its interval by Student's t.

    The noise of the test set, on which all seeds are evaluated, is the root mean square of that of the runs where it is
    known. The seeds of the settings are listed together, in order, so that groups with the same ones count as equal.
    """
    first = results[0]
    scores = tuple(one.score for one in results)
    noises = [one.noise for one in results]
    known = [value for value in noises if value is not None]
    noise = float(np.sqrt(np.mean(np.square(known)))) if any(known) else None
    measured = of_seeds(scores, noise)
    measured = measured.within(0.0, 1.0) if first.share else measured
    speeds = [one.tokens_per_second for one in results if one.tokens_per_second is not None]
    seeds = '/'.join(map(str, sorted(one.settings['seed'] for one in results))) if 'seed' in first.settings else None
    return dataclasses.replace(
        first,
        name=name,
        score=measured.mean,
        low=measured.low,
        high=measured.high,
        noise=noise,
        scores=scores,
        tokens_per_second=float(np.median(speeds)) if speeds else None,
        finished=all(one.finished for one in results),
        settings={**first.settings, 'seed': seeds} if seeds is not None else first.settings,
    )


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """The mean over runs, at the steps that all of them have."""
    values = [dict(curve) for curve in curves]
    steps = sorted(set(values[0]).intersection(*values[1:]))
    return [(step, float(np.mean([value[step] for value in values]))) for step in steps]


def mean_curves(runs: Sequence[Mapping[str, Curve]]) -> dict[str, Curve]:
    """`mean_curve` of every metric that all runs have, where more than one step is left."""
    names = [name for name in runs[0] if all(name in run for run in runs)]
    found = {name: mean_curve([run[name] for run in runs]) for name in names}
    return {name: curve for name, curve in found.items() if len(curve) > 1}
