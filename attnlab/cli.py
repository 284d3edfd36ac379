"""The `attnlab` command: train, sweep, eval, analyse, generate, show, zoo, data."""

import errno
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from absl import flags

from attnlab.errors import UserError, nearest
from attnlab.help import help_text

USAGE = """\
usage: attnlab COMMAND [--flag=value ...]

  train     --config=FILE.py[:ARG] --workdir=RUN   train, or go on training; --config.KEY=VALUE overrides
  sweep     --config=FILE.py[:ARG] --study=DIR     many runs: search, give up early, go on after any interruption
  sweep worker --study=DIR                         one more worker on a study, from whatever can start a process
  sweep status --study=DIR [--watch]               what runs, is done, failed and why; the best so far; the time left
  match     --config=FILE.py[:ARG] --by=MEASURE    configs of several recipes that agree in size
  compare   RUN... | STUDY...                      scores beside costs, with intervals for studies; says what is unequal
  report    STUDY... --out=DIR                     the same as one HTML page with figures, and as CSV
  eval      --workdir=RUN [--step=N]               every metric, by position too, at 1x to 8x the length
  analyse   --workdir=RUN [--step=N]               sinks, sparsity and outliers by layer; the loss with few bits
  generate  --workdir=RUN --prompt=TEXT            text from a trained model
  show      RUN                                    what a run was, and how far it came
  zoo                                              the mixers that configs can name
  data      prepare NAME                           make or convert a data set, once; verify it

`attnlab COMMAND --help` lists a command's flags."""


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit status. What the user can mend is said in one line, without a traceback."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ['--help']
    try:
        if name in ('--help', '-h', 'help'):
            print(USAGE)
            return 0
        if name not in COMMANDS:
            raise UserError(f'there is no command {name!r}{nearest(name, COMMANDS)}')
        return COMMANDS[name](rest)
    except UserError as error:
        message = str(error)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EFBIG):
            raise
        message = f'{error.filename or "the disk"}: {error.strerror}; what was saved before is whole'
    print(f'attnlab: {message}', file=sys.stderr)
    return 2


def train(argv: list[str]) -> int:
    """`attnlab train`."""
    from attnlab.configuration import read_config

    values = flags.FlagValues()
    flags.DEFINE_string('workdir', None, 'The directory of the run.', flag_values=values)
    flags.DEFINE_bool('dry_run', False, 'Build everything abstractly, print the plan, and stop.', flag_values=values)
    flags.DEFINE_integer('data_workers', 0, 'Processes that read data; changes speed, not results.', flag_values=values)
    _define_devices(values)
    config = read_config(values, argv)
    if config is None:
        return 0
    _start_devices(values)
    from rich.console import Console

    if values.dry_run:
        from attnlab.runs.plan import print_plan
        from attnlab.train.setup import prepare

        print_plan(prepare(config), Console())
        return 0
    workdir = _required(values, 'workdir')
    from attnlab.train.launch import launch

    return launch(config, workdir, console=Console(highlight=False), data_workers=values.data_workers)


def sweep(argv: list[str]) -> int:
    """`attnlab sweep`, `attnlab sweep worker`, `attnlab sweep status`."""
    if argv and not argv[0].startswith('-'):
        if argv[0] not in SWEEPS:
            raise UserError(f'there is no command sweep {argv[0]}{nearest(argv[0], SWEEPS)}')
        return SWEEPS[argv[0]](argv[1:])
    from attnlab.configuration import read_config

    values = flags.FlagValues()
    _define_study(values)
    _define_devices(values)
    _define_stopping(values)
    flags.DEFINE_integer('workers', 1, 'How many trials run at once.', lower_bound=1, flag_values=values)
    flags.DEFINE_list(
        'devices', [], 'Accelerators of this host by index; workers take them in turn.', flag_values=values
    )
    flags.DEFINE_enum(
        'launcher', 'processes', ['processes', 'submitit'], 'Workers run here, or as jobs.', flag_values=values
    )
    flags.DEFINE_enum('cluster', 'slurm', ['slurm', 'local'], 'With --launcher=submitit.', flag_values=values)
    flags.DEFINE_list(
        'job', [], 'Parameters of submitit, such as gpus_per_node=1,slurm_partition=gpu.', flag_values=values
    )
    config = read_config(values, argv, 'sweep', 'study')
    if config is None:
        return 0
    from rich.console import Console

    from attnlab.sweep import launch
    from attnlab.sweep.study import create_study

    console = Console(highlight=False)
    folder = _required(values, 'study')
    together = values.distributed or values.coordinator is not None
    if together and values.launcher == 'processes' and values.workers != 1:
        raise UserError(f'--workers is {values.workers}; several processes that run one trial together are one worker')
    study = create_study(folder, config, values.storage)
    arguments = [f'--study={folder}', f'--compilation_cache={values.compilation_cache}']
    named = ('storage', 'platform', 'cpu_devices', 'distributed', 'coordinator', 'processes', 'process')
    given = {name: values[name].value for name in named}
    arguments += [f'--{name}={value}' for name, value in given.items() if value is not None and value is not False]
    if values.launcher == 'submitit':
        jobs = launch.submit(folder, arguments, values.workers, values.cluster, _options(values.job))
        console.print(f'submitted {", ".join(job.job_id for job in jobs)}. Next: attnlab sweep status --study={folder}')
        return 0
    devices = [_index(text, '--devices') for text in values.devices]
    where = launch.places(values.workers, devices, launch.host_cores())
    return 0 if launch.run_processes(study, arguments, where, console) else values.stopped_status


def sweep_worker(argv: list[str]) -> int:
    """`attnlab sweep worker`."""
    values = flags.FlagValues()
    _define_study(values)
    _define_devices(values)
    _define_stopping(values)
    flags.DEFINE_float('idle', None, 'Seconds to wait for something to do; no end by default.', flag_values=values)
    flags.DEFINE_list('cores', [], 'Cores of the processor to keep to.', flag_values=values)
    flags.DEFINE_integer('device', None, 'The accelerator to keep to, by index.', flag_values=values)
    flags.DEFINE_bool('tied', False, 'Stop when standard input closes.', flag_values=values)
    if not _parsed(values, argv, 'sweep worker'):
        return 0
    folder = _required(values, 'study')
    from attnlab.sweep.launch import pin

    pin([_index(text, '--cores') for text in values.cores], values.device)
    _start_devices(values)
    from rich.console import Console

    from attnlab.sweep.worker import leave_when_asked, stop_with_parent, work

    leave_when_asked(values.stopped_status)
    if values.tied:
        stop_with_parent()
    idle = float('inf') if values.idle is None else values.idle
    finished = work(folder, values.storage, Console(highlight=False, soft_wrap=True), idle)
    return 0 if finished else values.stopped_status


def sweep_status(argv: list[str]) -> int:
    """`attnlab sweep status`."""
    values = flags.FlagValues()
    _define_study(values)
    flags.DEFINE_bool('watch', False, 'Go on showing, until the sweep is finished.', flag_values=values)
    if not _parsed(values, argv, 'sweep status'):
        return 0
    from rich.console import Console

    from attnlab.sweep.status import show_status

    show_status(_required(values, 'study'), values.storage, Console(), watch=values.watch)
    return 0


def match(argv: list[str]) -> int:
    """`attnlab match`."""
    values = flags.FlagValues()
    flags.DEFINE_string('config', None, 'FILE.py:ARG; zoo=RECIPE is added to ARG.', flag_values=values)
    flags.DEFINE_string('by', 'params', 'params, state_bytes@TOKENS, train_flops or decode_ms.', flag_values=values)
    flags.DEFINE_string('target', None, 'A number, or the recipe that the others are matched to.', flag_values=values)
    flags.DEFINE_list('recipes', [], 'Names of `attnlab zoo`.', flag_values=values)
    flags.DEFINE_float('tolerance', 0.01, 'How far off, as a share.', lower_bound=0.0, flag_values=values)
    flags.DEFINE_string('out', 'matched', 'Where the matched configs are written.', flag_values=values)
    _define_platform(values)
    if not _parsed(values, argv, 'match'):
        return 0
    path, _, arg = str(_required(values, 'config')).partition(':')
    target, out = str(_required(values, 'target')), _required(values, 'out')
    if not values.recipes:
        raise UserError('--recipes is missing, such as --recipes=gla,mamba2,mha')
    _start_platform(values)
    from rich.console import Console

    from attnlab.compare.match import match_recipes
    from attnlab.configuration import config_of

    names = {name: ','.join(filter(None, (arg, f'zoo={name}'))) for name in values.recipes}
    configs = {name: config_of(pathlib.Path(path), text) for name, text in names.items()}
    match_recipes(configs, values.by, target, values.tolerance, out, Console())
    return 0


def compare(argv: list[str]) -> int:
    """`attnlab compare`, of runs or of studies."""
    folders = [pathlib.Path(word) for word in argv if not word.startswith('-')]
    for folder in folders:
        if not any((folder / name).exists() for name in ('config.json', 'sweep.json')):
            raise UserError(f'{folder} is neither a run nor a study: it holds no config.json and no sweep.json')
    if folders and not any((folder / 'config.json').exists() for folder in folders):
        return _compared(argv, 'compare', None)
    values = flags.FlagValues()
    flags.DEFINE_string('metric', None, 'The score; accuracy, bits per byte or loss by default.', flag_values=values)
    _define_strictness(values)
    flags.DEFINE_string('out', 'comparison', 'Where the table and the figure are written.', flag_values=values)
    if not _parsed(values, [word for word in argv if word.startswith('-')], 'compare RUN...'):
        return _compared(['--help'], 'compare', None)
    if not folders:
        raise UserError('usage: attnlab compare RUN... [--flag=value ...], or STUDY... in the place of RUN...')
    from rich.console import Console

    from attnlab.compare.runs import compare_runs

    chosen: dict[str, Any] = {name: values[name].value for name in ('metric', 'tolerance', 'strict')}
    compare_runs(folders, _required(values, 'out'), Console(), **chosen)
    return 0


def report(argv: list[str]) -> int:
    """`attnlab report`."""
    return _compared(argv, 'report', 'report')


def _compared(argv: list[str], command: str, out: str | None) -> int:
    """Compares studies: prints the table or, with somewhere to write to, makes the page."""
    values = flags.FlagValues()
    if out is not None:
        flags.DEFINE_string('out', out, 'Where the page is written.', flag_values=values)
        flags.DEFINE_bool(
            'measure',
            None,
            'Measure decoding time and memory on the device at hand; --nomeasure never does. By default, once a study.',
            flag_values=values,
        )
    flags.DEFINE_string('by', 'params', 'What the models should agree in, as for match.', flag_values=values)
    _define_strictness(values)
    flags.DEFINE_string('storage', None, 'The database of the studies, if they are in one.', flag_values=values)
    _define_platform(values)
    studies = [word for word in argv if not word.startswith('-')]
    if not _parsed(values, [word for word in argv if word.startswith('-')], f'{command} STUDY...'):
        return 0
    if not studies:
        raise UserError(f'usage: attnlab {command} STUDY... [--flag=value ...]')
    _start_platform(values)
    from rich.console import Console

    from attnlab.compare.report.comparison import compare, print_comparison

    folders = [pathlib.Path(study) for study in studies]
    if out is None:
        found = compare(folders, values.by, values.tolerance, values.storage)
        print_comparison(found, Console(), strict=values.strict)
        return 0
    from attnlab.compare.report.contents import gather
    from attnlab.compare.report.page import write_report

    folder = _required(values, 'out')
    chosen: dict[str, Any] = {name: values[name].value for name in ('by', 'tolerance', 'storage', 'strict', 'measure')}
    contents = gather(folders, folder, **chosen)
    print_comparison(contents.comparison, Console())
    write_report(contents, folder, Console())
    return 0


def evaluate(argv: list[str]) -> int:
    """`attnlab eval`."""
    values = flags.FlagValues()
    _define_run(values)
    flags.DEFINE_string(
        'split', None, 'The split: valid of a text, test of other tasks by default.', flag_values=values
    )
    flags.DEFINE_list('multiples', ['1', '2', '4', '8'], 'Lengths, in training lengths.', flag_values=values)
    flags.DEFINE_integer(
        'tokens', None, 'Tokens of a text to evaluate at each length; all by default.', flag_values=values
    )
    flags.DEFINE_integer('examples', None, 'Examples of each slice of other tasks.', flag_values=values)
    flags.DEFINE_string(
        'attention',
        None,
        'What takes the place of the softmax: adaptive_temperature, ssmax, quantized_8, quantized_8_corrected.',
        flag_values=values,
    )
    if not _parsed(values, argv, 'eval'):
        return 0
    _start_devices(values)
    from rich.console import Console

    from attnlab.analysis.evaluation import Asked, evaluate_run

    multiples = tuple(_whole(text, '--multiples') for text in values.multiples)
    asked = Asked(values.split, multiples, values.tokens, values.examples, values.attention)
    evaluate_run(_required(values, 'workdir'), Console(), values.step, asked)
    return 0


def analyse(argv: list[str]) -> int:
    """`attnlab analyse`."""
    values = flags.FlagValues()
    _define_run(values)
    flags.DEFINE_string(
        'split', None, 'The split: valid of a text, test of other tasks by default.', flag_values=values
    )
    flags.DEFINE_integer('rows', 32, 'Rows to look at, of the length trained on.', lower_bound=1, flag_values=values)
    flags.DEFINE_list('bits', ['8', '6', '4'], 'Bits of weights and activations to try.', flag_values=values)
    if not _parsed(values, argv, 'analyse'):
        return 0
    _start_devices(values)
    from rich.console import Console

    from attnlab.analysis.examination import analyse_run

    bits = tuple(_whole(text, '--bits') for text in values.bits)
    analyse_run(_required(values, 'workdir'), Console(), values.step, values.split, values.rows, bits)
    return 0


def generate(argv: list[str]) -> int:
    """`attnlab generate`."""
    values = flags.FlagValues()
    _define_run(values)
    flags.DEFINE_string('prompt', '\n', 'The text to go on from.', flag_values=values)
    flags.DEFINE_integer('tokens', 256, 'How many tokens to draw.', lower_bound=1, flag_values=values)
    flags.DEFINE_float('temperature', 1.0, '0 takes the likeliest token.', lower_bound=0.0, flag_values=values)
    flags.DEFINE_float('top_p', 1.0, 'Draw from the likeliest tokens that reach this much.', flag_values=values)
    flags.DEFINE_integer('seed', 0, 'The same seed draws the same text.', flag_values=values)
    if not _parsed(values, argv, 'generate'):
        return 0
    if not 0.0 < values.top_p <= 1.0:
        raise UserError(f'--top_p is {values.top_p}; it wants a probability above 0, up to 1')
    _start_devices(values)
    from attnlab.runs.generation import generate_text

    pieces = generate_text(
        _required(values, 'workdir'),
        values.prompt,
        step=values.step,
        tokens=values.tokens,
        temperature=values.temperature,
        top_p=values.top_p,
        seed=values.seed,
    )
    print(values.prompt, end='', flush=True)
    for piece in pieces:
        print(piece, end='', flush=True)
    print()
    return 0


def show(argv: list[str]) -> int:
    """`attnlab show`."""
    if len(argv) != 1 or argv[0].startswith('-'):
        raise UserError('usage: attnlab show RUN')
    from rich.console import Console

    from attnlab.runs.show import show_run

    show_run(pathlib.Path(argv[0]), Console())
    return 0


def zoo(argv: list[str]) -> int:
    """`attnlab zoo`."""
    values = flags.FlagValues()
    flags.DEFINE_bool('markdown', False, 'Print the table as Markdown.', flag_values=values)
    if not _parsed(values, argv, 'zoo'):
        return 0
    from rich.console import Console

    from attnlab.zoo.table import print_zoo

    print_zoo(Console(), markdown=values.markdown)
    return 0


def data(argv: list[str]) -> int:
    """`attnlab data`."""
    from attnlab.data.long_range.prepared import DATASETS, FOLDER

    values = flags.FlagValues()
    flags.DEFINE_string('data_dir', FOLDER, 'Folder of downloads and prepared data sets.', flag_values=values)
    flags.DEFINE_integer(
        'workers', os.cpu_count() or 1, 'Processes that draw examples.', lower_bound=1, flag_values=values
    )
    usage = f'usage: attnlab data prepare NAME [--flag=value ...], NAME one of {", ".join(DATASETS)}'
    if not argv or argv[0] in ('--help', '-h'):
        print(help_text(usage, values))
        return 0
    words = [word for word in argv if not word.startswith('-')]
    if len(words) != 2 or words[0] != 'prepare':
        raise UserError(usage)
    if not _parsed(values, [word for word in argv if word.startswith('-')], 'data prepare NAME'):
        return 0
    from rich.console import Console

    from attnlab.data.long_range.shown import prepare_shown

    prepare_shown(words[1], pathlib.Path(values.data_dir).expanduser(), values.workers, Console(highlight=False))
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    'train': train,
    'sweep': sweep,
    'match': match,
    'compare': compare,
    'report': report,
    'eval': evaluate,
    'analyse': analyse,
    'generate': generate,
    'show': show,
    'zoo': zoo,
    'data': data,
}


SWEEPS: dict[str, Callable[[list[str]], int]] = {'worker': sweep_worker, 'status': sweep_status}


def _define_study(values: flags.FlagValues) -> None:
    flags.DEFINE_string('study', None, 'The directory of the study.', flag_values=values)
    flags.DEFINE_string(
        'storage',
        None,
        'A database to keep trials in, such as postgresql://USER@HOST/NAME; a journal in the study by default.',
        flag_values=values,
    )


def _define_strictness(values: flags.FlagValues) -> None:
    flags.DEFINE_float('tolerance', 0.01, 'How far sizes may be off, as a share.', lower_bound=0.0, flag_values=values)
    flags.DEFINE_bool('strict', False, 'Refuse to compare what is not matched.', flag_values=values)


def _define_stopping(values: flags.FlagValues) -> None:
    flags.DEFINE_integer(
        'stopped_status',
        0,
        'Exit status where it stops before the end; clusters that start again what failed want one above 0.',
        lower_bound=0,
        upper_bound=255,
        flag_values=values,
    )


def _define_run(values: flags.FlagValues) -> None:
    flags.DEFINE_string('workdir', None, 'The directory of the run.', flag_values=values)
    flags.DEFINE_integer('step', None, 'The checkpoint to load; the newest by default.', flag_values=values)
    _define_devices(values)


def _define_platform(values: flags.FlagValues) -> None:
    flags.DEFINE_string('platform', None, 'cpu, cuda or tpu; the best there is by default.', flag_values=values)
    flags.DEFINE_integer('cpu_devices', None, 'Virtual CPU devices, to try a mesh out.', flag_values=values)
    flags.DEFINE_string(
        'compilation_cache',
        '~/.cache/attnlab/compiled',
        'Where compiled programs are kept between runs; empty for nowhere.',
        flag_values=values,
    )


def _define_devices(values: flags.FlagValues) -> None:
    _define_platform(values)
    flags.DEFINE_bool('distributed', False, 'Join the processes that the cluster started.', flag_values=values)
    flags.DEFINE_string('coordinator', None, 'HOST:PORT of process 0, where no cluster tells.', flag_values=values)
    flags.DEFINE_integer('processes', None, 'How many processes, with --coordinator.', flag_values=values)
    flags.DEFINE_integer('process', None, 'Which of them this is, from 0.', flag_values=values)


def _start_platform(values: flags.FlagValues) -> None:
    from attnlab.train.devices import start

    start(platform=values.platform, cpu_devices=values.cpu_devices, compilation_cache=values.compilation_cache)


def _start_devices(values: flags.FlagValues) -> None:
    from attnlab.train.devices import start

    start(
        platform=values.platform,
        cpu_devices=values.cpu_devices,
        compilation_cache=values.compilation_cache,
        distributed=values.distributed,
        coordinator=values.coordinator,
        processes=values.processes,
        process=values.process,
    )


def _parsed(values: flags.FlagValues, argv: list[str], command: str) -> bool:
    """Parses flags; prints them and returns False when asked for help."""
    if '--help' in argv or '-h' in argv:
        print(help_text(f'usage: attnlab {command} [--flag=value ...]', values))
        return False
    try:
        rest = values(['attnlab', *argv])[1:]
    except flags.Error as error:
        raise UserError(str(error)) from error
    if rest:
        raise UserError(f'{command} takes no argument {rest[0]!r}; flags are written --name=value')
    return True


def _required(values: flags.FlagValues, name: str) -> pathlib.Path:
    given = values[name].value
    if not given:
        raise UserError(f'--{name} is missing')
    return pathlib.Path(given).expanduser()


def _whole(text: str, flag: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f'{flag} holds {text!r}; it wants whole numbers from 1')
    return int(text)


def _index(text: str, flag: str) -> int:
    if not text.isdecimal():
        raise UserError(f'{flag} holds {text!r}; it wants whole numbers from 0')
    return int(text)


def _options(items: list[str]) -> dict[str, int | str]:
    """Reads `name=value` items; whole numbers become numbers."""
    pairs = [item.partition('=') for item in items]
    for item, (name, equals, _) in zip(items, pairs, strict=True):
        if not equals or not name:
            raise UserError(f'--job holds {item!r}, which is not name=value')
    return {name: int(value) if value.isdecimal() else value for name, _, value in pairs}
