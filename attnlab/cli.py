"""The `attnlab` command: the table of its subcommands, and the one place where errors become a line of text."""

import errno
import sys
from collections.abc import Callable

from attnlab import trust
from attnlab.commands import analyse, compare, data, eval, experiment, generate, match, report, show, sweep, train, zoo
from attnlab.errors import UserError, nearest

USAGE = """\
usage: attnlab COMMAND [--flag=value ...]

  train     --config=NAME[:ARG] --workdir=RUN      train, or go on training; --config.KEY=VALUE overrides
  sweep     --config=NAME[:ARG] --study=DIR        many runs: search, give up early, go on after any interruption
  sweep worker --study=DIR                         one more worker on a study, from whatever can start a process
  sweep status --study=DIR [--watch]               what runs, is done, failed and why; the best so far; the time left
  match     --config=NAME[:ARG] --by=MEASURE       configs of several recipes that agree in size
  compare   RUN... | STUDY...                      scores beside costs, with intervals for studies; says what is unequal
  report    STUDY... --out=DIR                     the same as one HTML page with figures, and as CSV
  eval      --workdir=RUN [--step=N]               every metric, by position too, at 1x to 8x the length
  analyse   --workdir=RUN [--step=N]               sinks, sparsity and outliers by layer; the loss with few bits
  generate  --workdir=RUN --prompt=TEXT            text from a trained model
  show      RUN                                    what a run was, and how far it came
  zoo [NAME]                                       the mixers that configs can name, or one of them whole
  data      prepare NAME                           make or convert a data set, once; verify it
  experiment NAME [--size=full]                    one of experiments/: run it, or go on with it

NAME is a config that comes with attnlab, such as language or sweeps/language, or a file of your own, FILE.py.
`attnlab COMMAND --help` lists a command's flags. Every command that reads a config, a run or a study takes
`--allow=PACKAGE` or `--allow=FILE.py`: classes of that package may stand in it. Only allow what you trust."""

ALLOW = '--allow='


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    'train': train.main,
    'sweep': sweep.main,
    'match': match.main,
    'compare': compare.main,
    'report': report.main,
    'eval': eval.main,
    'analyse': analyse.main,
    'generate': generate.main,
    'experiment': experiment.main,
    'show': show.main,
    'zoo': zoo.main,
    'data': data.main,
}


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit status. What the user can mend is said in one line, without a traceback."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ['--help']
    try:
        if name in ('--help', '-h', 'help'):
            print(USAGE)
            return 0
        if name not in COMMANDS:
            raise UserError(f'there is no command {name!r}{nearest(name, COMMANDS)}')
        for item in rest:
            if item.startswith(ALLOW):
                for package in item.removeprefix(ALLOW).split(','):
                    trust.allow(package)
        return COMMANDS[name]([item for item in rest if not item.startswith(ALLOW)])
    except UserError as error:
        message = str(error)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EFBIG):
            raise
        message = f'{error.filename or "the disk"}: {error.strerror}; what was saved before is whole'
    print(f'attnlab: {message}', file=sys.stderr)
    return 2
