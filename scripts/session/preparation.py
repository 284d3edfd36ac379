"""Prepares a session on any machine: the list of cases, their expected results, and the wheels they need."""

import importlib
import importlib.metadata
import pathlib
import re
from collections.abc import Sequence

from packaging.requirements import Requirement

from scripts.session import cases, lines

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent

COMPARED = ('check', 'correct', 'sanitize')
"""Stages whose cases need expectations."""

PEERS = ('jax-linear-attention', 'tokamax', 'fla-core', 'flash-linear-attention')
"""Packages to compare with where they are installed; the first pins JAX to 0.11.2."""


def prepare(
    folder: pathlib.Path, stages: list[str], *, small: bool, all_tiles: bool = False, only: Sequence[str] = ()
) -> int:
    """Writes the folder that `run` reads, of the cases whose names match a pattern; existing expectations are kept.

    Candidates of tiles are compiled for an H100 that is not there, unless kernels are interpreted (`small`) or
    `all_tiles` are wanted: those that spill far more than the rule's tile are dropped.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = cases.chosen([case for stage in stages for case in cases_of(stage, small=small)], only)
    expected = importlib.import_module('scripts.session.expected')
    compared = {expected.key(case): case for case in found if case.call and case.stage in COMPARED}
    expected.write(folder, list(compared.values()))
    (folder / 'wheels.txt').write_text(wheels((ROOT / 'requirements-oldest.lock').read_text()))
    (folder / 'commit').write_text(lines.commit(ROOT) + '\n')
    tried = [] if small or all_tiles else [case for case in found if case.stage == 'tune']
    dropped = importlib.import_module('scripts.session.spills').dropped(tried, folder)
    names = {case.id for case in dropped}
    found = [case for case in found if case.id not in names]
    cases.write(folder / cases.DROPPED, dropped)
    cases.write(folder / cases.FILE, found)
    print(f'{len(found)} cases in {folder}; the wheels to bring along are listed in {folder / "wheels.txt"}')
    return 0


def wheels(lock: str) -> str:
    """The wheels to bring to a machine without a network, with the versions of a lock, as pip reads them."""
    wanted = needed('attnlab')
    lines = [line for line in lock.splitlines() if _plain(line.partition('==')[0]) in wanted]
    jax = next(line.partition('==')[2] for line in lines if line.startswith('jax=='))
    cuda = [f'jax-cuda13-plugin=={jax}', f'jax-cuda13-pjrt=={jax}']
    return '\n'.join([*lines, *cuda, '# Compared with where they are installed:', *(f'# {name}' for name in PEERS), ''])


def needed(package: str) -> set[str]:
    """The transitive dependencies of a package in this environment."""
    found: set[str] = set()
    wanted = [(package, frozenset[str]())]
    while wanted:
        name, extras = wanted.pop()
        for text in importlib.metadata.requires(name) or ():
            required = Requirement(text)
            asked = required.marker is None or any(required.marker.evaluate({'extra': one}) for one in (*extras, ''))
            plain = _plain(required.name)
            if asked and plain not in found:
                found.add(plain)
                wanted.append((plain, frozenset(required.extras)))
    return found


def _plain(name: str) -> str:
    return re.sub(r'[-_.]+', '-', name).lower()


def cases_of(stage: str, *, small: bool) -> list[cases.Case]:
    """The cases of a stage; few and tiny ones for a rehearsal."""
    return importlib.import_module(f'scripts.session.stages.{stage}').cases(small)
