"""The one exception meant for the person at the keyboard."""

import difflib
from collections.abc import Iterable

EXTRAS = {
    'optuna': 'sweep',
    'scipy': 'sweep',
    'submitit': 'sweep',
    'psycopg': 'postgresql',
    'tokenizers': 'bpe',
    'tensorflow_datasets': 'tfds',
    'sklearn': 'offline',
    'pyarrow': 'parquet',
    'outlines_core': 'regex',
    'lark': 'grammar',
    'wandb': 'wandb',
}
"""The extra that installs a package that is not always there."""


SHOWN = 40
"""The most names that an error lists."""


class UserError(Exception):
    """A mistake or a circumstance the user can mend; the command line prints it as one line, without a traceback."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """Returns `; did you mean 'x'?` for the valid name closest to `name`, or the valid names when none is close.

    Of many names it shows those that are least far.
    """
    valid = sorted(valid)
    close = difflib.get_close_matches(name, valid, n=SHOWN, cutoff=0.0)
    if close and difflib.get_close_matches(name, close[:1], cutoff=0.5):
        return f'; did you mean {close[0]!r}?'
    if len(valid) > SHOWN:
        return f'; the nearest of {len(valid)} valid names: {", ".join(close)}'
    return f'; valid names: {", ".join(valid) or "none"}'
