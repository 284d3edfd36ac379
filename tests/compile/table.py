"""Compiles the programs of recipes for devices that are not there, and keeps docs/compiled.md.

    python -m tests.compile.table [--topology=v5e:2x2] [--write] [--programs=prefill,...] [RECIPE ...]

For every recipe, of all of them if none is named, and every program one line of JSON on standard output: how many
kernels it calls, which cores none serves, or why it does not compile. For H100, the default, programs are lowered; for
TPUs they are compiled. `--write` puts what was found into the table of docs/compiled.md, whose other rows stay.
"""

import argparse
import json
import pathlib
import re
import sys
import time
from collections.abc import Iterator

import jax

from attnlab.train import topologies
from pallas_kernels import dispatch, target
from tests.compile import programs

DOCUMENT = pathlib.Path(__file__).parents[2] / 'docs' / 'compiled.md'
KERNEL = {'cuda': 'custom_call @mosaic_gpu', 'tpu': 'custom_call_target="tpu_custom_call"'}
"""How a call of a kernel shows in a program lowered for GPUs, and in one compiled for TPUs."""

NOT_RUN = 'not run'
HEAD = """# What compiles for machines that are not there

Made by `python -m tests.compile.table --write [--topology=v5e:2x2] [RECIPE ...]`; rows that it was not asked for stay
as they are.

A model of every recipe, {rows} x {length} tokens, width {width}, {heads} heads, two periods of its pattern of layers,
in bfloat16, with the optimiser of `configs/language.py`. For H100 the programs are lowered, which builds and verifies
every Mosaic kernel but not its machine code; for TPUs they are compiled for one chip by libtpu. A number is how many
kernels the program calls, a loop over layers counted once. Nothing here has run.
"""


def describe(recipe: str, program: str, topology: topologies.Topology) -> dict[str, object]:
    """What became of a program."""
    line: dict[str, object] = {'recipe': recipe, 'program': program, 'topology': topology.name}
    start = time.process_time()
    try:
        with target.compiling_for(topology.target), dispatch.ledger() as entries:
            lowered = programs.trace(recipe, program, topology.devices).lower(lowering_platforms=(topology.platform,))
            text = lowered.compile().as_text() if topology.compiles else lowered.as_text()
    except Exception as error:  # Whatever it is, it is the finding.
        found: dict[str, object] = {'failed': f'{type(error).__name__}: {str(error).strip().partition("\n")[0]}'}
    else:
        without = {f'{entry.core}: {_reason(entry)}' for entry in entries if 'mosaic' not in entry.implementation}
        found = {'kernels': text.count(KERNEL[topology.platform]), 'without': sorted(without)}
    return line | found | {'seconds': round(time.process_time() - start, 1)}


def _reason(entry: dispatch.Entry) -> str:
    """Which form serves in the place of a kernel, and why."""
    kernels = [reason for name, reason in entry.refused if 'mosaic' in name and not reason.startswith('the platform')]
    return f'{entry.implementation} ({kernels[0] if kernels else "named"})'


def sections() -> dict[str, dict[str, list[str]]]:
    """The cells of the document by topology and recipe."""
    found: dict[str, dict[str, list[str]]] = {}
    topology = ''
    for line in DOCUMENT.read_text().splitlines() if DOCUMENT.exists() else ():
        if line.startswith('## '):
            topology = line.removeprefix('## ').partition(' ')[0]
            found[topology] = {}
        elif (row := re.fullmatch(r'\| (\w+) \| (.*) \|', line)) and row[1] != 'recipe':
            found[topology][row[1]] = row[2].split(' | ')
    return found


def write(lines: list[dict[str, object]]) -> None:
    """Puts what was found of one recipe into the document."""
    tables = sections()
    columns = list(programs.PROGRAMS)
    for line in lines:
        cells = tables.setdefault(str(line['topology']), {}).setdefault(
            str(line['recipe']), [*[NOT_RUN] * len(columns), '']
        )
        cells[columns.index(str(line['program']))] = str(line.get('failed', line.get('kernels'))).replace('|', '/')[
            :200
        ]
    without = dict.fromkeys(text for line in lines for text in line.get('without', ()))  # type: ignore[attr-defined]
    cells[-1] = '; '.join(without).replace('|', '/')
    text = [HEAD.format(rows=programs.ROWS, length=programs.LENGTH, width=programs.WIDTH, heads=programs.HEADS)]
    for topology, rows in sorted(tables.items()):
        missing = [recipe for recipe in programs.ZOO if recipe not in rows]
        text += [f'## {topology} ({"lowered" if topologies.gpus(topology) else "compiled"})', '']
        text += [f'| recipe | {" | ".join(columns)} | calls of cores that no kernel serves |']
        text += [f'| {" | ".join(["---"] * (len(columns) + 2))} |']
        text += [f'| {recipe} | {" | ".join(rows[recipe])} |' for recipe in programs.ZOO if recipe in rows]
        text += ['', f'Not run: {", ".join(missing) or "none"}.', '']
    DOCUMENT.write_text('\n'.join(text))


def run(recipes: list[str], names: list[str], topology: str) -> Iterator[list[dict[str, object]]]:
    """What became of the programs, a list for every recipe; printed as they are found."""
    found = topologies.find(topology)
    for recipe in recipes:
        lines = []
        for name in names:
            lines.append(describe(recipe, name, found))
            print(json.dumps(lines[-1]), flush=True)
        jax.clear_caches()
        yield lines


if __name__ == '__main__':
    jax.config.update('jax_platforms', 'cpu')
    parser = argparse.ArgumentParser()
    parser.add_argument('--topology', default='H100x1')
    parser.add_argument('--write', action='store_true')
    parser.add_argument('--programs', default=','.join(programs.PROGRAMS))
    parser.add_argument('recipes', nargs='*')
    options = parser.parse_args()
    for lines in run(options.recipes or list(programs.ZOO), options.programs.split(','), options.topology):
        if options.write:
            write(lines)
        sys.stdout.flush()
