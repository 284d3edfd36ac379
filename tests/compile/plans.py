"""Makes docs/plans.md: what `attnlab train --dry_run --topology=...` prints for models of a billion parameters.

    python -m tests.compile.plans [RECIPE ...]

Each section is one command and what it printed, without its table of parameters; a section that was not made
anew stays as it is. A command takes minutes.
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Sequence

DOCUMENT = pathlib.Path(__file__).parents[2] / 'docs' / 'plans.md'
RECIPES = ('mha', 'gla', 'mamba2')
SLICES = {'H100x8': (8, 8), 'v5p:2x2x4': (16, 16), 'v5p:4x4x4': (64, 4)}
"""Of every topology the number of chips, over which parameters and rows are divided, and the parts of a step.

A part has a row a chip at least.
"""

FITS = DOCUMENT.with_name('fits.jsonl')
ONE_GPU = """## One H100 of 80 GB

Sizes as they stand, with their batch and its parts, whole on one device: by
`python -m tests.compile.fits zoo=mha,size=1b` in an environment that `make compile-gpu` has added to, kept in
[fits.jsonl](fits.jsonl). XLA's own figures; what cuBLAS, the allocator and the programs themselves take is not in them.
What is not in the table was not compiled.
"""
NOT_MADE = 'Not made.'
HEAD = """# A billion parameters on 8, 16 and 64 chips, planned

Made by `python -m tests.compile.plans [RECIPE ...]`. Each section is what a command printed: memory and what chips
exchange as the compilers for TPUs and GPUs have them, operations counted from shapes, the time of a step by published
peaks. Nothing here has run. Those of H100 are made where JAX's plugin for CUDA is ([training.md](training.md)); their
links were computed again from the bytes printed, at what an H100 sends, when its rate had been that of both ways.
Sections of `gla` and `mamba2` are older than their kernels of 2026-11-29, and than the count of what these execute.

Where a product sums over the dimension by which its weight is divided over chips, that for TPUs makes one ring of
gathering the weight and multiplying by it: pieces go around, two at a time, while those that are there are
multiplied. These are the many `collective-permute`, in each layer and part, forward and backward. Each turn reads and
writes the sum so far, which is most of the bytes of memory.
"""
COUNTED = 'of the compiled step'
"""What the row of memory says since the bytes are those that the compiled step reads and writes."""
BEFORE = """\
Older sections count one turn of such a ring, and as memory the train state and temporaries, read and written once: {}.
"""
KEEPING = """\
The sections of v5p are of programs before 26 November 2026, which kept elementwise values for the backward pass and
merged rows and time in linear maps: steps keep and move less now ([benchmarks.md](benchmarks.md#memory-of-a-step)).
"""
OF_THEN = 'all three at once'
"""What the bound of a step was called before that day; sections made since say 'all at once'."""
EXPERT = """\
Sections whose batch names no axis `expert` of the mesh are older than that axis, which has one chip here.
"""


def command(recipe: str, topology: str) -> str:
    """The command that a section is of."""
    chips, parts = SLICES[topology]
    given = f'--config.mesh.fsdp={chips} --config.accumulate={parts}'
    return f'attnlab train --config=language:zoo={recipe},size=1b --dry_run --topology={topology} {given}'


def shown(printed: str) -> str:
    """What was printed, without the table of parameters; blank lines part the tables."""
    blocks = printed.strip('\n').split('\n\n')
    return '\n\n'.join(block for block in blocks if not block.startswith('# parameters\n'))


def fits() -> str:
    """A table of the lines of docs/fits.jsonl."""
    rows = ['| config | train state and batch, GiB | temporaries, GiB | s |', '| --- | --- | --- | --- |']
    for line in map(json.loads, FITS.read_text().splitlines()):
        state, temporaries = (f'{line[what] / 2**30:.2f}' for what in ('arguments', 'temporaries'))
        rows.append(f'| `language:{line["config"]}` | {state} | {temporaries} | {line["seconds"]} |')
    return '\n'.join(rows)


def sections() -> dict[str, str]:
    """The sections of the document by their commands."""
    text = DOCUMENT.read_text() if DOCUMENT.exists() else ''
    found = re.findall(r'^    (attnlab train [^\n]*)\n\n(.*?)\n+(?=## |\Z)', text, flags=re.M | re.S)
    return {line: body for line, body in found if body != NOT_MADE}


def write(found: dict[str, str]) -> None:
    """Writes the document of these sections and those that it has."""
    made = sections() | found
    text = [HEAD]
    older = [line for line, body in made.items() if COUNTED not in body]
    if older:
        names = re.findall(r'zoo=(\w+).*?topology=(\S+)', '\n'.join(older))
        text += [BEFORE.format(', '.join(f'{recipe} on {topology}' for recipe, topology in names))]
    if any(OF_THEN in body for body in made.values()):
        text += [KEEPING]
    if any("'expert'" not in body for body in made.values()):
        text += [EXPERT]
    text += [ONE_GPU, fits(), '']
    for recipe in RECIPES:
        for topology, (chips, _) in SLICES.items():
            line = command(recipe, topology)
            text += [f'## {recipe}, {chips} chips ({topology})', '', f'    {line}', '', made.get(line, NOT_MADE), '']
    DOCUMENT.write_text('\n'.join(text))


def section(printed: str) -> str:
    """The section of what was printed."""
    return f'```text\n{printed}\n```'


def run(line: str) -> str:
    """What a command prints for its section."""
    arguments = [sys.executable, '-m', *line.split()]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    return shown(done.stdout) if done.returncode == 0 else (done.stderr.strip().splitlines() or ['failed'])[-1]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog='python -m tests.compile.plans', description=(__doc__ or '').split('\n')[0])
    parser.add_argument('recipes', nargs='*', choices=RECIPES, metavar='RECIPE', help=f'{", ".join(RECIPES)}; or all')
    for recipe in parser.parse_args(arguments).recipes or RECIPES:
        for topology in SLICES:
            line = command(recipe, topology)
            write({line: section(run(line))})
            print(line, flush=True)


if __name__ == '__main__':
    main()
