"""Compiles the programs of recipes for devices that are not there, and keeps docs/compiled.md.

    python -m tests.compile.table [--topology=v5e:2x2] [--mesh=data=4] [--programs=prefill,...] [--level=O1] [--write]
        [--new] [--minutes=30] [--workers=2] [RECIPE ...]
    python -m tests.compile.table --missing --write [--level=O1] [--minutes=30] [--workers=2] [RECIPE ...]
    python -m tests.compile.table --stale [--topology=v5e:2x2] [--mesh=data=4] [--programs=prefill,...] [RECIPE ...]
    python -m tests.compile.table --render

For every recipe, of all of them if none is named, and every program one line of JSON on standard output: how many
kernels it calls, which cores none serves, or why it does not compile. For H100, the default, programs are lowered, with
`--mesh` compiled where JAX's plugin for CUDA is (`make compile-gpu`); for TPUs they are compiled, for one chip or with
`--mesh` for all of the topology. `--level` is the effort of XLA,
`JAX_OPTIMIZATION_LEVEL`, which a line names where it is not the default; at the default it replaces such a line.

`--write` keeps each line in docs/compiled.jsonl, under the hash of the program as it was lowered, and makes
docs/compiled.md of them: a program whose hash and compiler are those of its line is not compiled again. `--new` leaves
out whatever has a line, without looking at its hash. So it may be stopped at any time, by `--minutes` too, and goes on.
`--missing` goes through the cells of the document that have no line, the most telling first: one recipe of each class
everywhere, then all others, the programs that compile soonest before steps, and at last what is dear to compile; of
RECIPEs alone, if any is named. `--stale` lowers the programs that have a line of this version of JAX, a few seconds
each, compiles none, and says which lines are of programs that are others by now, and of how many that is unknown, as
their hashes are older than DIGITS. `--render` makes the document of the
lines that are kept and compiles nothing.

Programs are compiled in processes of their own, of which there are `--workers`: the compiler may die of one.
"""

import argparse
import collections
import dataclasses
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import pathlib
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from multiprocessing import connection
from typing import Any
from unittest import mock

import jax

from attnlab.train import topologies
from attnlab.zoo import ZOO
from pallas_kernels import dispatch, target
from tests.compile import programs

DOCUMENT = pathlib.Path(__file__).parents[2] / 'docs' / 'compiled.md'
KEPT = DOCUMENT.with_suffix('.jsonl')
KERNEL = {'cuda': 'custom_call_target="mosaic_gpu', 'tpu': 'custom_call_target="tpu_custom_call"'}
"""How a call of a kernel shows in a compiled program."""

LOWERED = 'custom_call @mosaic_gpu'
"""How it shows in a program lowered for GPUs."""

CLASSES = ('mha', 'gla', 'gated_delta_net', 'mamba', 'mamba2', 'rg_lru')
"""One recipe of each class of cores: softmax, linear attention, delta rule, selective scan, duality, linear scan."""

MESHES = ('data=4', 'fsdp=4', 'data=2,tensor=2', 'sequence=4', 'data=4,fsdp=2,tensor=2')


def _dividing(mesh: str) -> tuple[str, ...]:
    """The recipes that a mesh divides: where time is, those that claim to have a form for it."""
    return tuple(name for name, recipe in ZOO.items() if recipe.sequence or not mesh.startswith('sequence'))


WANTED: dict[tuple[str, str], tuple[tuple[str, ...], tuple[str, ...]]] = {
    ('H100x1', ''): (tuple(programs.PROGRAMS), tuple(ZOO)),
    ('v5e:2x2', ''): (tuple(programs.PROGRAMS), tuple(ZOO)),
    **{
        ('v5e:4x4' if mesh.count(',') > 1 else 'v5e:2x2', mesh): (('training step',), _dividing(mesh))
        for mesh in MESHES
    },
    ('v5p:2x2x1', ''): (tuple(programs.PROGRAMS), tuple(ZOO)),
    ('v6e:2x2', ''): (tuple(programs.PROGRAMS), tuple(ZOO)),
}
"""Of every topology and mesh, the programs and recipes whose cells the document has, compiled or not."""

NOT_COMPILED = 'not compiled'

SOONEST = ('decoding step', 'evaluation', 'prefill', 'training step', 'recomputing step')
STEPS = {'training step': 1, 'recomputing step': 2}
"""The programs as they compile soonest, and in which turn those come that take ten seconds or more."""

DEAR = 60.0
"""Seconds of processor time from which on a program is dear to compile: whole steps of long convolutions."""

DIGITS = 20
"""Of a hash; one of 16 is older, and of where source files lay too."""

PLACES = 'jax._src.source_info_util'
"""Where JAX decides which files it names in programs."""

LEVELS = ('O0', 'O1', 'O2', 'O3')
"""Values of `JAX_OPTIMIZATION_LEVEL`."""


@dataclasses.dataclass(frozen=True, order=True)
class Cell:
    """What is compiled: a program of a recipe for a topology, on one of its chips or, with a mesh, on all of them."""

    topology: str
    mesh: str
    recipe: str
    program: str

    @classmethod
    def of(cls, line: dict[str, Any]) -> 'Cell':
        """The cell of a line."""
        return cls(**{field.name: line[field.name] for field in dataclasses.fields(cls)})


def lower(cell: Cell, topology: topologies.Topology) -> jax.stages.Lowered:
    """A program as the compiler of a topology is given it, but that it does not say where its source files lie.

    A kernel in it would: of another checkout, or after a line of any file on the way to it, it would be another.
    """
    with target.compiling_for(topology.target), mock.patch(f'{PLACES}.is_user_filename', lambda name: False):
        traced = programs.trace(cell.recipe, cell.program, topology.devices, cell.mesh)
        return traced.lower(lowering_platforms=(topology.platform,))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def describe(
    cell: Cell, topology: topologies.Topology, before: dict[str, Any] | None = None, level: str = ''
) -> dict[str, Any]:
    """What became of a program; `before`, its line, where the same compiler was given the same program for it.

    With a level the compiler makes that effort alone, unless the program has a line of the default one.
    """
    start = time.process_time()
    version = {'jax': jax.__version__, 'hash': ''}
    effort = {'level': level} if level and topology.compiles else {}
    try:
        with dispatch.ledger() as entries:
            lowered = lower(cell, topology)
            text = lowered.as_text()
            version['hash'] = _hash(text)
            if before is not None and _serves(before, version, level):
                return before
            jax.config.update('jax_optimization_level', level or 'UNKNOWN')
            text = topology.compile(lowered).as_text() if topology.compiles else text
    except Exception as error:  # Whatever it is, it is the finding.
        found: dict[str, Any] = {'failed': _said(error)}
    else:
        without = {f'{entry.core}: {_reason(entry)}' for entry in entries if 'mosaic' not in entry.implementation}
        kernel = KERNEL[topology.platform] if topology.compiles else LOWERED
        found = {'kernels': text.count(kernel), 'without': sorted(without)}
    seconds = {'seconds': round(time.process_time() - start, 1)}
    return dataclasses.asdict(cell) | version | effort | found | seconds


def stale(cells: Iterable[Cell], kept: dict[Cell, dict[str, Any]]) -> Iterator[tuple[Cell, str]]:
    """Which lines are of programs that are as they were, '', and how the programs of others differ.

    Lines of another version of JAX are left out.
    """
    find = functools.cache(topologies.find)
    for cell in cells:
        line = kept.get(cell, {})
        if not line.get('hash') or line['jax'] != jax.__version__:
            continue
        topology = find(cell.topology)
        if len(line['hash']) != DIGITS:
            yield cell, 'unknown'
            continue
        try:
            now = _hash(lower(cell, topology).as_text())
        except Exception as error:  # As in `describe`.
            now = _said(error)
        yield cell, '' if now == line['hash'] else now
        jax.clear_caches()


def _said(error: Exception) -> str:
    return f'{type(error).__name__}: {str(error).strip().partition("\n")[0]}'


def _serves(line: dict[str, Any], version: dict[str, str], level: str) -> bool:
    """Whether a line is of this version of a program, compiled with this effort or the default one."""
    return all(line.get(name) == value for name, value in version.items()) and line.get('level', '') in ('', level)


def _reason(entry: dispatch.Entry) -> str:
    """Which form serves in the place of a kernel, and why."""
    kernels = [reason for name, reason in entry.refused if 'mosaic' in name and not reason.startswith('the platform')]
    return f'{entry.implementation} ({kernels[0] if kernels else "named"})'


def read() -> dict[Cell, dict[str, Any]]:
    """The lines that are kept."""
    lines = [json.loads(line) for line in KEPT.read_text().splitlines()] if KEPT.exists() else []
    return {Cell.of(line): line for line in lines}


def write(line: dict[str, Any]) -> None:
    """Keeps a line, in the place of that of the same cell, and makes the document anew."""
    lines = read() | {Cell.of(line): line}
    _replace(KEPT, ''.join(f'{json.dumps(lines[cell], sort_keys=True)}\n' for cell in sorted(lines)))
    _replace(DOCUMENT, render(lines))


def _replace(path: pathlib.Path, text: str) -> None:
    temporary = path.with_name(f'.{path.name}.{os.getpid()}')
    temporary.write_text(text)
    temporary.replace(path)


HEAD = f"""# What compiles for machines that are not there

Made by `python -m tests.compile.table --missing --write`, or `--write [--topology=v5e:2x2] [RECIPE ...]`, from the
lines of [compiled.jsonl](compiled.jsonl), which have the hash of each program, the version of JAX, the processor
seconds, and the effort of the compiler (`JAX_OPTIMIZATION_LEVEL`) where it was not the default; a test compares the
two; a line without a hash is older than the record, or of a program that the compiler died of. "{NOT_COMPILED}" is what
it says: nothing is known of that program, and no cell is derived from another. A line is of the program as it was when
it was compiled, and may be older than the code: what it says of kernels may have changed since. `git blame
docs/compiled.jsonl` names the commit of each, and `python -m tests.compile.table --stale` says which are. Nightly tests
compile for TPUs what a dozen and a half of the recipes run, and lower the rest.

A model of every recipe, {programs.ROWS} x {programs.LENGTH} tokens (a row a device at least), width {programs.WIDTH},
{programs.HEADS} heads, two periods of its pattern of layers scanned, in bfloat16, with the optimiser of
`configs/language.py`. For H100 the programs are lowered, which builds and verifies every Mosaic kernel but not its
machine code; for TPUs they are compiled by libtpu, for one chip or on a mesh. A number is how many kernels the program
calls, a loop over layers counted once; 0 is a program that compiles without any. Nothing here has run.

How long a step takes to compile, and what was done about it: [compile_time.md](compile_time.md).
"""


def render(lines: dict[Cell, dict[str, Any]]) -> str:
    """The document."""
    text = [HEAD]
    for (topology, mesh), (columns, recipes) in WANTED.items():
        wanted = [Cell(topology, mesh, recipe, name) for recipe in recipes for name in _programs(recipe, columns)]
        done = {cell.recipe for cell in wanted if cell in lines}
        cells = sum(cell in lines for cell in wanted)
        verb = 'lowered' if topologies.gpus(topology) else 'compiled'
        text += [f'## {topology}, {f"mesh {mesh}" if mesh else "one device"}: {verb}', '']
        text += [f'{cells} of {len(wanted)} programs were {verb} or tried{_effort(wanted, lines)}.', '']
        if done:
            text += [f'| recipe | {" | ".join(columns)} | calls of cores that no kernel serves |']
            text += [f'| {" | ".join(["---"] * (len(columns) + 2))} |']
            for recipe in (recipe for recipe in recipes if recipe in done):
                row = [lines.get(Cell(topology, mesh, recipe, name)) for name in columns]
                without = dict.fromkeys(reason for line in row if line for reason in line.get('without', ()))
                had = _programs(recipe, columns)
                cells_of_row = [
                    _shown(line) if name in had else 'none' for name, line in zip(columns, row, strict=True)
                ]
                shown = [*cells_of_row, '; '.join(without).replace('|', '/')]
                text += [f'| {recipe} | {" | ".join(shown)} |']
            text += ['']
        text += [f'Recipes {NOT_COMPILED}: {_missing(recipes, done)}.', '']
    return '\n'.join(text)


def _missing(recipes: Iterable[str], done: Collection[str]) -> str:
    """How many of the recipes are not done, and which, said by the shorter of the two lists."""
    missing = [recipe for recipe in recipes if recipe not in done]
    there = [recipe for recipe in recipes if recipe in done]
    if not missing or not there:
        return 'all' if missing else 'none'
    names = f': {", ".join(missing)}' if len(missing) <= len(there) else f', all but {", ".join(there)}'
    return f'{len(missing)} of {len(missing) + len(there)}{names}'


def _effort(cells: Iterable[Cell], lines: dict[Cell, dict[str, Any]]) -> str:
    """How many of the cells were compiled with less effort than the default, by level."""
    levels = collections.Counter(lines[cell]['level'] for cell in cells if 'level' in lines.get(cell, {}))
    return ''.join(f', {number} of them at {level}' for level, number in sorted(levels.items()))


def _programs(recipe: str, names: Iterable[str]) -> list[str]:
    """Those of the programs that the recipe has."""
    return [name for name in names if name in programs.programs_of(recipe)]


def _shown(line: dict[str, Any] | None) -> str:
    return NOT_COMPILED if line is None else str(line.get('failed', line.get('kernels'))).replace('|', '/')[:200]


def telling(kept: dict[Cell, dict[str, Any]]) -> list[Cell]:
    """The cells of the document that have no line, the most telling first.

    One recipe of each class on every topology and mesh, then all others but those of which a program took more than a
    minute to compile, then these; of each what compiles soonest, then training steps, then those that recompute.
    """
    dear = {cell.recipe for cell, line in kept.items() if line.get('seconds', 0) > DEAR}
    found = [
        Cell(topology, mesh, recipe, name)
        for (topology, mesh), (columns, recipes) in WANTED.items()
        for name in SOONEST
        if name in columns
        for recipe in recipes
        if name in programs.programs_of(recipe)
    ]
    rest = [cell for cell in found if cell not in kept]
    return sorted(rest, key=lambda cell: (cell.recipe not in CLASSES, cell.recipe in dear, STEPS.get(cell.program, 0)))


def topology_of(name: str, mesh: str) -> topologies.Topology:
    """What a program is compiled for; GPUs without a mesh are stood in for, as of these programs are only lowered."""
    if topologies.gpus(name) and not mesh:
        return topologies.stand_ins(name, 'programs without a mesh are lowered')
    return topologies.find(name)


def _serve(asked: connection.Connection) -> None:
    """Describes the programs that are asked for, one after another."""
    jax.config.update('jax_platforms', 'cpu')
    find = functools.cache(topology_of)
    while True:
        cell, before, level = asked.recv()
        asked.send(describe(cell, find(cell.topology, cell.mesh), before, level))
        jax.clear_caches()


class Compiler:
    """A process that compiles: it may die of a program, which is a finding as any other."""

    def __init__(self) -> None:
        context = multiprocessing.get_context('spawn')
        self.connection, there = context.Pipe()
        self.process = context.Process(target=_serve, args=(there,), daemon=True)
        self.process.start()
        there.close()

    def found(self, cell: Cell) -> dict[str, Any]:
        """What it says of the program that it was given, or that it died of it."""
        try:
            return self.connection.recv()
        except EOFError:
            self.process.join()
            died = f'the compiler died of signal {-self.process.exitcode}'
            return dataclasses.asdict(cell) | {'jax': jax.__version__, 'hash': '', 'failed': died, 'seconds': 0.0}


def run(
    cells: Iterable[Cell], kept: dict[Cell, dict[str, Any]], level: str = '', workers: int = 1
) -> Iterator[dict[str, Any]]:
    """What became of the programs, as they are found by so many processes."""
    cells = iter(cells)
    idle, busy = [Compiler() for _ in range(workers)], {}
    try:
        while True:
            for cell in itertools.islice(cells, len(idle)):
                compiler = idle.pop()
                busy[compiler.connection] = compiler, cell
                compiler.connection.send((cell, kept.get(cell), level))
            if not busy:
                return
            for ready in connection.wait(list(busy)):
                compiler, cell = busy.pop(ready)
                line = compiler.found(cell)
                idle.append(compiler if compiler.process.is_alive() else Compiler())
                yield line
    finally:
        for compiler in [*idle, *(compiler for compiler, _ in busy.values())]:
            compiler.process.kill()


if __name__ == '__main__':
    parser = argparse.ArgumentParser()
    parser.add_argument('--topology', default='H100x1')
    parser.add_argument('--mesh', default='')
    parser.add_argument('--level', choices=LEVELS, default='')
    parser.add_argument('--write', action='store_true')
    parser.add_argument('--new', action='store_true')
    parser.add_argument('--missing', action='store_true')
    parser.add_argument('--stale', action='store_true')
    parser.add_argument('--render', action='store_true')
    parser.add_argument('--minutes', type=float, default=float('inf'))
    parser.add_argument('--workers', type=int, default=1)
    parser.add_argument('--programs', default=','.join(programs.PROGRAMS))
    parser.add_argument('recipes', nargs='*')
    options = parser.parse_args()
    if options.render:
        _replace(DOCUMENT, render(read()))
        sys.exit()
    until = time.monotonic() + 60 * options.minutes
    kept = read() if options.write or options.new or options.missing or options.stale else {}
    wanted = [
        Cell(options.topology, options.mesh, recipe, name)
        for recipe in options.recipes or ZOO
        for name in _programs(recipe, options.programs.split(','))
    ]
    if options.stale:
        jax.config.update('jax_platforms', 'cpu')
        found: collections.Counter[str] = collections.Counter()
        for cell, now in stale(wanted, kept):
            found[{'': 'as they were', 'unknown': 'unknown'}.get(now, 'others')] += 1
            if now not in ('', 'unknown'):
                print(json.dumps(dataclasses.asdict(cell) | {'now': now}), flush=True)
            if time.monotonic() > until:
                break
        print(f'lines of programs: {dict(found)}', file=sys.stderr)
        sys.exit()
    if options.missing:
        wanted = [cell for cell in telling(kept) if not options.recipes or cell.recipe in options.recipes]
    left = [cell for cell in wanted if not (options.new and cell in kept)]
    for line in run(left, kept, options.level, options.workers):
        print(json.dumps(line), flush=True)
        if options.write:
            write(line)
        if time.monotonic() > until:
            sys.exit('the minutes given are over; the same command with --new or --missing goes on')
