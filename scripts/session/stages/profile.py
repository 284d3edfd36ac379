"""Times every kernel of a call by itself, ours and a rival's, with JAX's profiler."""

import collections
import gzip
import json
import pathlib
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import jax

from pallas_kernels.bench import measure, timing
from pallas_kernels.bench.problems import OURS, Contender, Problem
from scripts.session.cases import CORES, Case
from scripts.session.stages import bench
from scripts.session.turn import Turn

SECONDS = 300.0
CALLS = 8
FEWEST = 1e-3
"""Of the time of a call: kernels that take less are added up."""


def cases(small: bool) -> list[Case]:
    """Both passes of the first problems of every core, ours and third parties'."""
    found = []
    for core in ('softmax',) if small else CORES:
        for place, name in list(enumerate(bench.names(core)))[: 1 if core == 'attention' else None]:
            rivals = () if small else bench.RIVALS.get(core, ())
            found += [_case(core, place, name, rival) for rival in (OURS, *rivals)]
    return found


def _case(core: str, place: int, name: str, rival: str) -> Case:
    identity = f'profile/{core}/{place} {name}/{rival}'
    return Case(identity, 'profile', SECONDS, core, str(place), what=measure.PASSES[1], rival=rival)


def run(case: Case, folder: pathlib.Path) -> dict[str, Any]:
    """Microseconds of every kernel in a call, in the order of their sums, and how often it runs."""
    with Turn(folder) as turn:
        problem = bench.problem_of(case, turn)
        if case.rival not in problem.contenders:
            return {'status': 'skipped', 'reason': f'{case.rival} is not installed here, or has no such call'}
        return _profiled(problem, problem.contenders[case.rival], turn)


def _profiled(problem: Problem, contender: Contender, turn: Turn) -> dict[str, Any]:
    with turn.compiling():
        given = measure.cotangents(contender, problem.arrays)
        program = timing.compiled(measure.graded(contender), problem.arrays, given)
        jax.block_until_ready(program.call())
        with turn.alone():
            jax.block_until_ready([program.call() for _ in range(2)])
            found = kernels_of(program.call, CALLS)
    if not found:
        return {'status': 'skipped', 'reason': 'the trace has no kernels of a GPU'}
    return {'status': 'ok', 'problem': problem.name, 'kernels': found}


def kernels_of(call: Callable[[], Any], calls: int) -> list[dict[str, Any]]:
    """The kernels of a GPU in a call, over so many calls."""
    with tempfile.TemporaryDirectory() as place:
        with jax.profiler.trace(place, create_perfetto_trace=True):
            jax.block_until_ready([call() for _ in range(calls)])
        (path,) = pathlib.Path(place).rglob('perfetto_trace.json.gz')
        return kernels(json.loads(gzip.decompress(path.read_bytes()))['traceEvents'], calls)


def kernels(events: Iterable[dict[str, Any]], calls: int) -> list[dict[str, Any]]:
    """Of the events of a trace, the kernels on streams of a GPU: name, microseconds and times it runs, in one call."""
    processes, threads = set(), set()
    spent, times = collections.Counter[str](), collections.Counter[str]()
    events = list(events)
    for event in events:
        if event.get('ph') == 'M' and 'GPU' in event['args'].get('name', '') and event['name'] == 'process_name':
            processes.add(event['pid'])
        if event.get('ph') == 'M' and 'Stream' in event['args'].get('name', '') and event['name'] == 'thread_name':
            threads.add((event['pid'], event['tid']))
    for event in events:
        if event.get('ph') == 'X' and event['pid'] in processes and (event['pid'], event['tid']) in threads:
            spent[event['name']] += event['dur']
            times[event['name']] += 1
    least = FEWEST * spent.total()
    found = [
        {'kernel': name, 'microseconds': round(total / calls, 1), 'times': round(times[name] / calls, 2)}
        for name, total in spent.most_common()
        if total >= least
    ]
    rest = [name for name, total in spent.items() if total < least]
    if rest:
        total, often = sum(spent[name] for name in rest), sum(times[name] for name in rest)
        found.append({'kernel': 'others', 'microseconds': round(total / calls, 1), 'times': round(often / calls, 2)})
    return found
