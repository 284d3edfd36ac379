"""Measures tiles against those of the rules: a case for every candidate, timed in turns with the rule's own.

Results of the two must agree. `table` makes the table of the device from the record.
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import target, tuning
from pallas_kernels.bench import measure, problems, table, timing
from pallas_kernels.target import Target
from scripts.session import lines
from scripts.session.cases import Case
from scripts.session.turn import Turn

SECONDS = 300.0
ROUNDS = 10
"""A candidate that is as fast as the rule is so in all of them once in 1,024 times: of 17 candidates, in 1.7 %."""

CALLS = (
    ('attention', 0, 128),
    ('attention', 0, 64),
    ('delta_rule', 1, 128),
    ('delta_rule', 1, 64),
    ('selective_scan', 0, 128),
    ('linear_scan', 0, 128),
    ('softmax', 0, 128),
)
"""Cores, problems of theirs by index, and channels of a head: calls that models make."""

SMALL = (('softmax', 0, 16),)
BOTH = measure.PASSES[1]
APART = {2: 4, 4: 64}
"""How many units in the last place of the largest number of a result the same number may differ by, by its bytes.

In float32 are gradients of parameters: spans add up thousands of steps in another order.
"""


def cases(small: bool) -> list[Case]:
    """Every candidate for every tile that the calls ask for, but the rule's own."""
    found = []
    here = target.interpreted('mosaic_gpu') if small else target.H100
    for core, place, k in SMALL if small else CALLS:
        numbers = itertools.count(1)
        for asked in asked_by(core, place, k, here):
            tiles = tuning.candidates(asked)[1 : 2 if small else None]
            found += [case(core, place, k, asked, next(numbers), tile) for tile in tiles]
    return found


def case(core: str, place: int, k: int, asked: tuning.Asked, number: int, tile: tuning.Tile) -> Case:
    """The case of a candidate, by its number among those of a call."""
    name = f'tune/{core}/{place}, k {k}/{asked.rule} {number}'
    return Case(name, 'tune', SECONDS, core, f'{place} {k}', what=BOTH, tile=tuning.entry_of(asked, tile))


def asked_by(core: str, place: int, k: int, here: Target) -> list[tuning.Asked]:
    """The tiles that a call asks for, forward and backward, found by tracing it for a device."""
    with target.compiling_for(here), tuning.recording() as found:
        jax.eval_shape(program(core, place, k, here))
    return list(dict.fromkeys(found))


def program(core: str, place: int, k: int, here: Target) -> Callable[[], Any]:
    """Both passes of a call, with its arrays drawn inside, so that tracing and compiling it make none."""

    def drawn_and_graded() -> Any:
        problem = _problem(core, place, k, here)
        ours = problem.contenders[problems.OURS]
        return measure.graded(ours)(problem.arrays, measure.cotangents(ours, problem.arrays))

    return drawn_and_graded


def run(case: Case, folder: pathlib.Path) -> dict[str, Any]:
    """Times the rule's tile and the candidate, and compares their results."""
    asked, candidate = tuning.entry('the case', case.tile)
    here = target.current()
    if here.platform == 'cpu':
        here = target.interpreted('mosaic_gpu')
    place, k = map(int, case.call.split())
    programs = {}
    with Turn(folder) as turn, turn.compiling(), target.compiling_for(here):
        problem = _problem(case.core, place, k, here)
        ours = problem.contenders[problems.OURS]
        jax.clear_caches()
        given = measure.cotangents(ours, problem.arrays)
        with tuning.trying(asked, tuning.candidates(asked)[0]):
            programs[tuning.HEURISTIC] = timing.compiled(measure.graded(ours), problem.arrays, given)
        # What was traced with one tile must not serve the other.
        jax.clear_caches()
        with tuning.trying(asked, candidate), tuning.recording() as found:
            programs['candidate'] = timing.compiled(measure.graded(ours), problem.arrays, given)
    if asked not in found:
        return {'status': 'failed', 'reason': f'the call did not ask for {asked.rule} of {dict(asked.call)}'}
    patience = timing.Patience(ROUNDS, 0.01 if here.interpret else 0.2)
    with Turn(folder) as turn, turn.alone():
        expected, results = (jax.tree.leaves(program.call()) for program in programs.values())
        if (reason := difference(results, expected)) is not None:
            return {'status': 'wrong', 'reason': reason}
        times = timing.alternate({name: one.call for name, one in programs.items()}, tuning.HEURISTIC, patience)
    return {
        'status': 'ok',
        'problem': problem.name,
        'kind': here.kind,
        'interpreted': here.interpret,
        'measured': [
            {
                'contender': name,
                'milliseconds': one.quartiles_in_milliseconds,
                'ratio': one.ratio,
                'low': one.low,
                'high': one.high,
                'most': one.most,
            }
            for name, one in times.items()
        ],
    }


def difference(results: Sequence[jax.Array], expected: Sequence[jax.Array]) -> str | None:
    """Where two runs of a call are farther apart than the order of sums explains; `None`: nowhere."""
    for place, (ours, other) in enumerate(zip(results, expected, strict=True)):
        one, two = (np.asarray(array.astype(jnp.float32)) for array in (ours, other))
        unit = float(jnp.finfo(other.dtype).eps) * float(np.max(np.abs(two), initial=0.0))
        allowed = APART[other.dtype.itemsize] * unit
        apart = np.abs(one - two)
        if not np.all(apart <= allowed):
            worst = float(np.max(np.where(np.isnan(apart), np.inf, apart)))
            return f'result {place} is {worst:.3g} from that of the rule; expected {allowed:.3g} at most'
    return None


def tables(sessions: Sequence[pathlib.Path], folder: pathlib.Path) -> Iterator[str]:
    """Writes the tables of the devices in the records of sessions, and says what of each was done.

    A candidate takes the place of the rule where it was faster in every round; of several the fastest one does. What an
    earlier table has of other calls stays.

    Raises ValueError for records without measurements, and for times of interpreted kernels.
    """
    measured = [line for line in lines.newest(sessions).values() if line['stage'] == 'tune' and line['status'] == 'ok']
    if not measured:
        raise ValueError('no case of the stage tune was ok in these records')
    if any(line['interpreted'] for line in measured):
        raise ValueError('kernels were interpreted in these records: their times say nothing of a device')
    for kind in dict.fromkeys(line['kind'] for line in measured):
        of_device = [line for line in measured if line['kind'] == kind]
        yield _write(kind, of_device, folder / tuning.file_name(kind))


def _write(kind: str, measured: Sequence[lines.Line], path: pathlib.Path) -> str:
    best: dict[tuning.Asked, dict[str, Any]] = {}
    tried = set()
    for line in measured:
        asked, _ = tuning.entry(line['id'], line['tile'])
        tried.add(asked)
        rule, candidate = line['measured']
        found = {
            **line['tile'],
            'milliseconds': candidate['milliseconds'][1],
            'heuristic_milliseconds': rule['milliseconds'][1],
            'ratio': candidate['ratio'],
            **{name: line[name] for name in ('commit', 'versions', 'time') if name in line},
        }
        # Records of five rounds, whose greatest is the end of the interval, do not have it by itself.
        faster = candidate.get('most', candidate['high']) < 1
        if faster and (asked not in best or found['ratio'] < best[asked]['ratio']):
            best[asked] = found
    before = tuning.entries(path, kind) if path.exists() else []
    kept = [entry for entry in before if tuning.entry(str(path), entry)[0] not in tried]
    if not kept and not best:
        path.unlink(missing_ok=True)
        return f'{kind}: no candidate was faster than the rules; it has no table'
    path.parent.mkdir(parents=True, exist_ok=True)
    table.replace(path, tuning.content(kind, [*kept, *best.values()]))
    return f'{path}: {len(best)} of {len(tried)} calls have a faster tile, {len(kept)} others are as before'


def _problem(core: str, place: int, k: int, here: Target) -> problems.Problem:
    """A problem at the size of models, with heads of `k` channels; a tiny one where kernels are interpreted."""
    sizes = problems.SMALL if here.interpret else problems.ACCELERATOR
    with target.compiling_for(here):
        of_core = problems.problems(core, dataclasses.replace(sizes, k=k))
        return next(itertools.islice(of_core, place, None))
