"""An hour on a rented GPU: correctness, speed and training; resumable, without losing results.

    python scripts/gpu_session.py prepare --to=session    # on any machine, before
    python scripts/gpu_session.py run --from=session --out=out --minutes=9 --stages=check,correct
    python scripts/gpu_session.py run --from=session --out=out2 --minutes=9 --resume=out/session.jsonl
    python scripts/gpu_session.py report out*/session.jsonl
    python scripts/gpu_session.py record out*/session.jsonl --to=docs/kernels/h200.json --without='bench/softmax/*'
    python scripts/gpu_session.py table out*/session.jsonl

`prepare` writes the float64 expectations, the list of cases, without tiles that the compiler for an absent H100 says
spill far more than the rules', and the list of wheels. `run` writes one line of JSON per case; its status is 0 if no
case that ran was wrong, 1 if one was, 2 if what it was given cannot be used, before the device is touched, and 3 if
the device stopped responding. `table` writes the tiles that were faster than the rules' into `pallas_kernels/tuned`.
"""

import argparse
import importlib
import json
import math
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a checkout that is not installed

from scripts.session import lines, parent, preparation, report, worker  # noqa: E402
from scripts.session.cases import STAGES  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog='gpu_session.py', description=(__doc__ or '').split('\n')[0])
    commands = parser.add_subparsers(dest='command', required=True)
    one = commands.add_parser('prepare', help='write expectations, cases and wheels; needs no GPU')
    one.add_argument('--to', type=pathlib.Path, required=True, help='the folder; existing files are kept')
    one.add_argument('--stages', default=','.join(STAGES), help='which, separated by commas')
    one.add_argument('--small', action='store_true', help='few tiny cases, for a rehearsal on a CPU')
    one.add_argument(
        '--all_tiles',
        action='store_true',
        help='of `tune` every candidate: none is compiled for an absent H100, nor dropped because it spills registers',
    )
    one.add_argument('--only', default='', help='patterns of names of cases, separated by semicolons: only these')
    one = commands.add_parser('run', help='run the cases')
    one.add_argument('--from', dest='folder', type=pathlib.Path, required=True, help='what `prepare` wrote')
    one.add_argument('--out', type=pathlib.Path, required=True, help='the folder of session.jsonl and session.log')
    one.add_argument(
        '--stages', default='', help='which, in this order, separated by commas; by default all that were prepared'
    )
    one.add_argument('--minutes', type=_above_zero, default=9.0, help='after which it ends')
    one.add_argument(
        '--resume', type=pathlib.Path, nargs='*', default=[], help='earlier records: cases that were ok are skipped'
    )
    one.add_argument(
        '--only',
        default='',
        help='patterns of names of cases, separated by semicolons: only these, in this order within a stage',
    )
    one.add_argument('--workers', type=_count, help='processes that share the device, in stages without timings')
    one.add_argument('--patience', type=_above_zero, default=1.0, help='multiplies every time limit')
    one = commands.add_parser(
        'report', help='Markdown tables of one or several sessions, from the last line of each case'
    )
    one.add_argument('sessions', type=pathlib.Path, nargs='+')
    one.add_argument('--against', type=pathlib.Path, help='an earlier session, to list changes')
    one = commands.add_parser(
        'record', help='write the times of cores as `python -m pallas_kernels.bench --page` reads them'
    )
    one.add_argument('sessions', type=pathlib.Path, nargs='+')
    one.add_argument('--to', type=pathlib.Path, required=True, help='the file, such as docs/kernels/h200.json')
    one.add_argument(
        '--without',
        default='',
        help='patterns of names of cases, separated by semicolons: of kernels that changed since',
    )
    one = commands.add_parser('table', help='write the tables of tiles that were measured to be faster')
    one.add_argument('sessions', type=pathlib.Path, nargs='+')
    one.add_argument('--to', type=pathlib.Path, default=ROOT / 'pallas_kernels' / 'tuned', help='the folder of tables')
    one = commands.add_parser('worker', help='what `run` starts')
    one.add_argument('--from', dest='folder', type=pathlib.Path, required=True)
    one.add_argument('--results', type=int, required=True, help='the file descriptor for results')
    options = parser.parse_args(arguments)
    try:
        return _obey(parser, options)
    except lines.Unusable as error:
        parser.error(str(error))


def _obey(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if options.command == 'prepare':
        return preparation.prepare(
            options.to,
            _stages(parser, options.stages),
            small=options.small,
            all_tiles=options.all_tiles,
            only=_patterns(options.only),
        )
    if options.command == 'run':
        stages = _stages(parser, options.stages) if options.stages else None
        return parent.run(
            parent.Session(
                folder=options.folder,
                out=options.out,
                minutes=options.minutes,
                workers=options.workers,
                patience=options.patience,
                commit=lines.commit(ROOT),
                only=_patterns(options.only),
            ),
            stages,
            options.resume,
        )
    if options.command == 'report':
        print(report.tables(options.sessions, options.against))
        return 0
    if options.command == 'record':
        try:
            found = report.record(options.sessions, _patterns(options.without))
            # Imported here, since it imports JAX.
            importlib.import_module('pallas_kernels.bench.table').replace(
                options.to, json.dumps(found, indent=1) + '\n'
            )
        except (OSError, ValueError) as error:
            parser.error(str(error))
        return 0
    if options.command == 'table':
        # Imported here, since it imports JAX.
        tune = importlib.import_module('scripts.session.stages.tune')
        try:
            print('\n'.join(tune.tables(options.sessions, options.to)))
        except (OSError, ValueError) as error:
            parser.error(str(error))
        return 0
    return worker.serve(options.folder, options.results)


def _above_zero(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f'{text}; expected a number above 0')
    return number


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'{text}; expected a whole number from 1')
    return int(text)


def _patterns(text: str) -> list[str]:
    return [pattern for pattern in text.split(';') if pattern]


def _stages(parser: argparse.ArgumentParser, names: str) -> list[str]:
    chosen = names.split(',')
    unknown = [name for name in chosen if name not in STAGES]
    if unknown:
        parser.error(f'no stage is called {unknown[0]!r}; the stages are {", ".join(STAGES)}')
    return chosen


if __name__ == '__main__':
    sys.exit(main())
