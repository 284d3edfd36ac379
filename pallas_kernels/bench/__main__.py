"""Times the cores against what a user would run instead.

    python -m pallas_kernels.bench                                   every core, a table for each call
    python -m pallas_kernels.bench --cores=delta_rule --json=cpu.json
    python -m pallas_kernels.bench --page=docs/kernel_measurements.md docs/kernels/*.json   rewrite the tables of a page

All contenders of a call take turns in one process. A ratio is a contender's time over that of the core as users call
it: above one, ours is faster. The ceiling is what a large copy and a large matrix product reach on the same device.
"""

import argparse
import contextlib
import dataclasses
import json
import pathlib
import sys
from collections.abc import Iterator, Sequence

import jax

from pallas_kernels import target
from pallas_kernels.bench import ceilings, measure, problems, table, timing


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog='python -m pallas_kernels.bench', description=(__doc__ or '').split('\n')[0])
    parser.add_argument('--cores', default=','.join(problems.CORES), help='which, separated by commas')
    parser.add_argument('--rounds', type=int, default=10, help='how often the contenders take turns')
    parser.add_argument('--json', type=pathlib.Path, help='write the figures to this file too')
    parser.add_argument('--small', action='store_true', help='tiny calls, to see that everything runs')
    parser.add_argument('--page', type=pathlib.Path, help='measure nothing; rewrite the tables of this page')
    parser.add_argument('records', nargs='*', type=pathlib.Path, help='with --page: files that --json wrote')
    options = parser.parse_args(arguments)
    if (options.page is None) != (not options.records):
        parser.error('--page rewrites the tables of records; expected both, or neither')
    if options.page is not None:
        with _errors(parser):
            table.rewrite(options.page, options.records)
        return 0
    if options.rounds < 1:
        parser.error(f'--rounds is {options.rounds}; expected at least 1')
    cores = options.cores.split(',')
    unknown = [core for core in cores if core not in problems.CORES]
    if unknown:
        parser.error(f'no core is called {unknown[0]!r}; the cores are {", ".join(problems.CORES)}')
    if options.json is not None:
        with _errors(parser):
            table.check_writable(options.json)

    platform = target.current().platform
    sizes = problems.SMALL if options.small else problems.CPU if platform == 'cpu' else problems.ACCELERATOR
    patience = timing.Patience(options.rounds, 0.01 if options.small else 0.2)
    top = ceilings.measure(platform, sizes.dtype, patience)
    facts = table.facts(top)
    print('; '.join(f'{name} {value}' for name, value in facts.items()), end='\n\n', flush=True)
    measured: list[measure.Measurement] = []
    for core in cores:
        for problem in problems.problems(core, sizes):
            lines = list(measure.lines(problem, top, patience))
            for what in dict.fromkeys(line.what for line in lines):
                print(table.text([line for line in lines if line.what == what]), end='\n\n', flush=True)
            measured += lines
            # One call at a time is held in memory.
            jax.clear_caches()
            if options.json is not None:
                record = {'facts': facts, 'lines': [dataclasses.asdict(line) for line in measured]}
                with _errors(parser):
                    table.replace(options.json, json.dumps(record, indent=1) + '\n')
    return 0


@contextlib.contextmanager
def _errors(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Ends the command with one line where a file cannot be read or written, or is not what it should be."""
    try:
        yield
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == '__main__':
    sys.exit(main())
