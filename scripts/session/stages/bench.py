"""Times the cores at model sizes, as `python -m pallas_kernels.bench` does, next to JAX's own functions."""

import dataclasses
import itertools
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import target
from pallas_kernels.bench import ceilings, measure, problems, timing
from scripts.session.cases import CORES, Case
from scripts.session.turn import Turn

SECONDS = 300.0
"""With the time in which it waits for its turn."""

RIVALS = {
    'attention': ('cuDNN', 'tokamax'),
    'linear_attention': ('jax-linear-attention',),
    'delta_rule': ('jax-linear-attention',),
    'diagonal_low_rank': ('jax-linear-attention',),
    'selective_scan': ('jax-linear-attention',),
}
"""Third-party kernels, which have separate cases, since they may crash or hang."""

ROUNDS = timing.ENOUGH


def cases(small: bool) -> list[Case]:
    """Every problem and pass; for attention the plain softmax first, its other maps at the end."""
    cores = ('softmax',) if small else CORES
    found = [(core, place, name) for core in cores for place, name in enumerate(names(core))]
    found.sort(key=lambda one: one[0] == 'attention' and one[1] > 0)
    return [
        Case(f'bench/{core}/{place} {name}/{what}', 'bench', SECONDS, core, str(place), what=what)
        for core, place, name in found
        for what in measure.PASSES
    ]


def run(case: Case, folder: pathlib.Path) -> dict[str, Any]:
    """Ours, as users call it, next to our portable form and functions of JAX."""
    with Turn(folder) as turn:
        problem = problem_of(case, turn)
        contenders = [name for name in problem.contenders if name not in RIVALS.get(case.core, ())]
        return timed(case, problem, contenders, turn)


def timed(case: Case, problem: problems.Problem, contenders: Sequence[str], turn: Turn) -> dict[str, Any]:
    """Times the named contenders of a problem, including ours, with the reasons of failures."""
    jax.clear_caches()
    problem = dataclasses.replace(problem, contenders={name: problem.contenders[name] for name in contenders})
    top = _ceilings(turn)
    with turn.compiling():
        found = list(measure.lines(problem, top, _patience(), (case.what,), turn.alone))
    failed = [f'{line.contender}: {line.failure}' for line in found if line.failure is not None]
    figures = [_figures(line) for line in found if line.failure is None]
    line = {'status': 'ok', 'problem': problem.name, 'measured': figures, 'ceilings': dataclasses.asdict(top)}
    return {**line, 'reason': '; '.join(failed)} if failed else line


def names(core: str) -> list[str]:
    """The names of the problems of a core, without their sizes."""
    found = [problem.name for problem in problems.problems(core, problems.SMALL)]
    return [name.partition(':')[0] if ':' in name else core for name in found]


def _figures(line: measure.Measurement) -> dict[str, Any]:
    names = ('contender', 'implementation', 'ratio', 'low', 'high', 'tflops', 'gigabytes', 'ceiling', 'temporary_mib',
             'compile_seconds', 'rounds')  # fmt: skip
    return {'milliseconds': line.quartiles, **{name: getattr(line, name) for name in names}}


def problem_of(case: Case, turn: Turn) -> problems.Problem:
    """The problem of a case, by its index among those of the core, drawn while nothing is timed."""
    with turn.compiling():
        found = next(itertools.islice(problems.problems(case.core, _sizes()), int(case.call), None))
        jax.block_until_ready(found.arrays)
    return found


def _sizes() -> problems.Sizes:
    """Model sizes; tiny ones on a CPU, for rehearsals."""
    return problems.SMALL if target.current().platform == 'cpu' else problems.ACCELERATOR


def _patience() -> timing.Patience:
    return timing.Patience(ROUNDS, 0.01 if target.current().platform == 'cpu' else 0.2)


def _ceilings(turn: Turn) -> ceilings.Ceilings:
    """The rates of the device, measured by the first process that asks."""

    def measure() -> dict[str, Any]:
        return dataclasses.asdict(ceilings.measure(target.current().platform, jnp.dtype(_sizes().dtype), _patience()))

    return ceilings.Ceilings(**turn.once(measure))
