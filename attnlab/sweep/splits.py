"""Which examples a sweep chooses by, and which it reports."""

from ml_collections import ConfigDict

from attnlab.config import build
from attnlab.errors import UserError
from attnlab.sweep.sweep import Sweep
from attnlab.tasks.task import same_rows
from attnlab.train.average import SUFFIX


def split_of(base: ConfigDict, metric: str) -> str | None:
    """The split that an evaluator of a run reads, by the first part of a metric; `None` where none is called so."""
    name = metric.partition('/')[0].removesuffix(SUFFIX)
    return next((one.split for one in base.evals if one.get('name') == name and 'split' in one), None)


def without_own_split(sweep: Sweep) -> bool:
    """Whether the best point is chosen on the very examples that are reported, under the name of another split.

    Not known, and so not said, where the data are not here.
    """
    chosen, reported = (split_of(sweep.base, metric) for metric in (sweep.metric, sweep.score))
    if chosen is None or reported is None or chosen == reported:
        return False
    try:
        return same_rows(build(sweep.base.task), chosen, reported)
    except UserError:
        return False


def said_of(which: str, data: str) -> str:
    """The sentence for readers of its results; `which` is what "chooses and reports"."""
    return (
        f'{which} on the same examples: {data} has none for validation alone, and only the seeds of the runs that '
        'confirm are fresh.'
    )
