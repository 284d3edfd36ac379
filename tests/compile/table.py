"""Compiles the programs of recipes for devices that are not there, and keeps docs/compiled.md.

    python -m tests.compile.table [--topology=v5e:2x2] [--mesh=data=4] [--programs=prefill,...] [--write] [--new]
        [--minutes=30] [RECIPE ...]

For every recipe, of all of them if none is named, and every program one line of JSON on standard output: how many
kernels it calls, which cores none serves, or why it does not compile. For H100, the default, programs are lowered; for
TPUs they are compiled, for one chip or with `--mesh` for all of the topology.

`--write` keeps each line in docs/compiled.jsonl, under the hash of the program as it was lowered, and makes
docs/compiled.md of them: a program whose hash and compiler are those of its line is not compiled again. `--new` leaves
out whatever has a line, without looking at its hash. So it may be stopped at any time, by `--minutes` too, and goes on.
"""

import argparse
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from attnlab.train import topologies
from attnlab.zoo import ZOO
from pallas_kernels import dispatch, target
from tests.compile import programs

DOCUMENT = pathlib.Path(__file__).parents[2] / 'docs' / 'compiled.md'
KEPT = DOCUMENT.with_suffix('.jsonl')
KERNEL = {'cuda': 'custom_call @mosaic_gpu', 'tpu': 'custom_call_target="tpu_custom_call"'}
"""How a call of a kernel shows in a program lowered for GPUs, and in one compiled for TPUs."""

CLASSES = ('mha', 'gla', 'gated_delta_net', 'mamba', 'mamba2', 'rg_lru')
"""One recipe of each class of cores: softmax, linear attention, delta rule, selective scan, duality, linear scan."""

MESHES = ('data=4', 'fsdp=4', 'data=2,tensor=2', 'sequence=4', 'data=4,fsdp=2,tensor=2')
STEPS = ('training step', 'recomputing step')
WANTED: dict[tuple[str, str], tuple[tuple[str, ...], tuple[str, ...]]] = {
    ('H100x1', ''): (tuple(programs.PROGRAMS), tuple(ZOO)),
    ('v5e:2x2', ''): (tuple(programs.PROGRAMS), tuple(ZOO)),
    ('v5p:2x2x1', ''): (tuple(programs.PROGRAMS), tuple(ZOO)),
    ('v6e:2x2', ''): (tuple(programs.PROGRAMS), tuple(ZOO)),
    **{('v5e:4x4' if mesh.count(',') > 1 else 'v5e:2x2', mesh): (('training step',), CLASSES) for mesh in MESHES},
}
"""Of every topology and mesh, the programs and recipes whose cells the document has, compiled or not."""

NOT_COMPILED = 'not compiled'


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


def describe(cell: Cell, topology: topologies.Topology, before: dict[str, Any] | None = None) -> dict[str, Any]:
    """What became of a program; `before`, its line, where the same compiler was given the same program for it."""
    start = time.process_time()
    version = {'jax': jax.__version__, 'hash': ''}
    try:
        with target.compiling_for(topology.target), dispatch.ledger() as entries:
            traced = programs.trace(cell.recipe, cell.program, topology.devices, cell.mesh)
            lowered = traced.lower(lowering_platforms=(topology.platform,))
            text = lowered.as_text()
            version['hash'] = hashlib.sha256(text.encode()).hexdigest()[:16]
            if before is not None and all(before.get(name) == value for name, value in version.items()):
                return before
            text = lowered.compile().as_text() if topology.compiles else text
    except Exception as error:  # Whatever it is, it is the finding.
        found: dict[str, Any] = {'failed': f'{type(error).__name__}: {str(error).strip().partition("\n")[0]}'}
    else:
        without = {f'{entry.core}: {_reason(entry)}' for entry in entries if 'mosaic' not in entry.implementation}
        found = {'kernels': text.count(KERNEL[topology.platform]), 'without': sorted(without)}
    return dataclasses.asdict(cell) | version | found | {'seconds': round(time.process_time() - start, 1)}


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

Made by `python -m tests.compile.table --write [--topology=v5e:2x2] [RECIPE ...]` from the lines of
[compiled.jsonl](compiled.jsonl), which have the hash of each program, the version of JAX and the processor seconds; a
test compares the two; a line without a hash is older than the record. "{NOT_COMPILED}" is what it says: nothing is
known of that program, and no cell is derived from another.

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
        text += [f'{cells} of {len(wanted)} programs were {verb} or tried.', '']
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
        missing = [recipe for recipe in recipes if recipe not in done]
        text += [f'Recipes {NOT_COMPILED}: {", ".join(missing) or "none"}.', '']
    return '\n'.join(text)


def _programs(recipe: str, names: Iterable[str]) -> list[str]:
    """Those of the programs that the recipe has."""
    return [name for name in names if name in programs.programs_of(recipe)]


def _shown(line: dict[str, Any] | None) -> str:
    return NOT_COMPILED if line is None else str(line.get('failed', line.get('kernels'))).replace('|', '/')[:200]


def run(cells: Iterable[Cell], kept: dict[Cell, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """What became of the programs, as they are found."""
    find = functools.cache(topologies.find)
    for cell in cells:
        yield describe(cell, find(cell.topology), kept.get(cell))
        jax.clear_caches()


if __name__ == '__main__':
    jax.config.update('jax_platforms', 'cpu')
    parser = argparse.ArgumentParser()
    parser.add_argument('--topology', default='H100x1')
    parser.add_argument('--mesh', default='')
    parser.add_argument('--write', action='store_true')
    parser.add_argument('--new', action='store_true')
    parser.add_argument('--minutes', type=float, default=float('inf'))
    parser.add_argument('--programs', default=','.join(programs.PROGRAMS))
    parser.add_argument('recipes', nargs='*')
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    wanted = [
        Cell(options.topology, options.mesh, recipe, name)
        for recipe in options.recipes or ZOO
        for name in _programs(recipe, options.programs.split(','))
    ]
    kept = read() if options.write or options.new else {}
    for line in run((cell for cell in wanted if not (options.new and cell in kept)), kept):
        print(json.dumps(line), flush=True)
        if options.write:
            write(line)
        if time.monotonic() > until:
            sys.exit('the minutes given are over; the same command with --new goes on')
