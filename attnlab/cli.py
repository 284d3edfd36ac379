"""The `attnlab` command: the table of its subcommands, and the one place where errors become a line of text."""

import contextlib
import errno
import io
import os
import signal
import sys
from collections.abc import Callable

from attnlab import __version__, trust
from attnlab.commands import (
    analyse,
    compare,
    completion,
    config,
    data,
    edit,
    eval,
    experiment,
    generate,
    match,
    quantize,
    report,
    show,
    sweep,
    train,
    uncertainty,
    zoo,
)
from attnlab.errors import FULL, UserError, nearest, not_installed, out_of_memory, unserved
from attnlab.tables import visible, wrapped

USAGE = """\
usage: attnlab COMMAND [--flag=value ...]

  train         train a model, or resume training: --config=NAME[:ARG]
                --workdir=RUN; --config.KEY=VALUE overrides a key
  sweep         search hyperparameters: --config=NAME[:ARG] --study=DIR;
                resumes after any interruption
  sweep worker  add a worker to a study; start as many as you like
  sweep status  which trials run, are done or failed, and why; the best so far
  match         configs of several recipes, sized to agree in --by=MEASURE
  compare       RUN... or STUDY...: scores and costs side by side, and what is
                not equal between them
  report        STUDY... or RUN...: the same as one HTML page, and as CSV
  eval          all metrics, also by position, at 1x to 8x the training length
  analyse       attention sinks, sparsity and outliers by layer, loss after
                rounding; --inside: memory, decays, each layer's own prediction
  uncertainty   of classes or tokens: scores, calibration, risks, sets
  generate      text from a trained model: --workdir=RUN --prompt=TEXT
  quantize      write a quantized copy of a trained run: --workdir=RUN
                --weights=int4@32 --out=NEW
  edit          write a copy of a run that gives another answer to one prompt,
                by changing one matrix (ROME): --workdir=RUN --prompt=TEXT
                --answer=TEXT --layer=N --out=NEW
  show          RUN: its results, how it was started, its config
  config        every key of a config with its value, type and meaning
  zoo           list the mixers; zoo NAME: everything about one; zoo --heads:
                the heads
  data          list the data sets, or prepare NAME: make or convert one and
                verify it
  experiment    NAME: run one of experiments/, or resume it
  completion    print a completion script for bash, zsh or fish

NAME is a config that comes with attnlab, such as language or sweeps/language,
or a file of your own, FILE.py. Tables fit the terminal; --format=plain, json,
csv or markdown is for programs and pages.

attnlab COMMAND --help lists the flags of a command, attnlab --version prints
the version. Every command that reads a config, a run or a study takes
--allow=PACKAGE or --allow=FILE.py: a config may then name classes of that
package. Allow only code that you trust."""

ALLOW = '--allow='

UNUSABLE = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EEXIST,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.ENOENT,
)
"""Errors of paths that a user gave."""


LESS = {
    'train': 'in another --workdir, compute a step in more parts (config.accumulate) or of fewer rows '
    '(config.batch_size); --dry_run says what it takes',
    'eval': 'evaluate shorter rows (--multiples=1)',
    'generate': 'give fewer --prompts, or draw fewer --tokens',
}
LESS_ELSEWHERE = 'ask for fewer or shorter rows, or use a device with more'
"""How a command is made to take less memory."""


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    'train': train.main,
    'sweep': sweep.main,
    'match': match.main,
    'compare': compare.main,
    'report': report.main,
    'eval': eval.main,
    'analyse': analyse.main,
    'generate': generate.main,
    'quantize': quantize.main,
    'edit': edit.main,
    'uncertainty': uncertainty.main,
    'experiment': experiment.main,
    'show': show.main,
    'config': config.main,
    'zoo': zoo.main,
    'data': data.main,
}


COMMANDS['completion'] = lambda argv: completion.main(argv, COMMANDS)


MEANT = {
    'evaluate': 'eval',
    'test': 'eval',
    'sample': 'generate',
    'analyze': 'analyse',
    'resume': 'train',
    'run': 'train',
    'list': 'zoo',
    'models': 'zoo',
}
"""Commands by what others call them, whose letters are not like theirs."""


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit status. What the user can mend is said in one line, without a traceback."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ['--help']
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # File names and prompts may hold what the terminal cannot show.
            stream.reconfigure(errors='backslashreplace')
    try:
        if name in ('--help', '-h', 'help'):
            print(USAGE)
            return 0
        if name == '--version':
            print(f'attnlab {__version__}')
            return 0
        if name not in COMMANDS:
            meant = f'; did you mean {MEANT[name]!r}?' if name in MEANT else nearest(name, COMMANDS)
            raise UserError(f'there is no command {name!r}{meant}')
        _check_given_once(rest)
        for item in rest:
            if item.startswith(ALLOW):
                for package in item.removeprefix(ALLOW).split(','):
                    trust.allow(package)
        return COMMANDS[name]([item for item in rest if not item.startswith(ALLOW)])
    except UserError as error:
        message = str(error)
    except KeyboardInterrupt:
        # The process ends by the signal, status 130 of a shell: who started it tells that from a failure.
        sys.excepthook = lambda *_: None
        raise
    except BrokenPipeError:
        # Whoever read the output, such as `head`, has had enough; the interpreter shall not try to write the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in (*FULL, *UNUSABLE):
            raise
        kept = '; what was saved before is whole' if error.errno in FULL else '; name another path'
        message = f'{error.filename or "the disk"}: {error.strerror}{kept}'
    except ModuleNotFoundError as error:
        missing = not_installed(error, name)
        if missing is None:
            raise
        message = str(missing)
    except RuntimeError as error:
        shortage = out_of_memory(error)
        if shortage is not None:
            message = f'the device has too little memory: {shortage}; {LESS.get(name, LESS_ELSEWHERE)}'
        elif unserved(error):
            message = str(error)
        else:
            raise
        _forget_what_failed()
    lines = [visible(f'attnlab: {message}')]
    if sys.stderr.isatty():
        lines = wrapped(lines[0], os.get_terminal_size(sys.stderr.fileno()).columns or 80)
    print(*lines, sep='\n', file=sys.stderr)
    return 2


def _forget_what_failed() -> None:
    """Has JAX raise now what it would print as a traceback when the process ends."""
    import jax

    with contextlib.suppress(Exception):
        jax.effects_barrier()


def _check_given_once(argv: list[str]) -> None:
    """Raises `UserError` for a flag or an override that is given twice: which of them counts is not for us to guess."""
    names = [item.partition('=')[0] for item in argv if item.startswith('--') and not item.startswith(ALLOW)]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f'{name} is given {names.count(name)} times; give it once')
