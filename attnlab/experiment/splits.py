"""What an experiment evaluates: the split that chooses, and the one that is reported."""

from ml_collections import ConfigDict

from attnlab.config import spec
from attnlab.evals.by_slice import WHOLE, BySlice
from attnlab.evals.cadence import AtEnd, EveryNSteps
from attnlab.train.setup import HELD_OUT

SPLITS = HELD_OUT
"""By the first something may be chosen; the second is for what is reported."""


def of_splits(
    examples: int = WHOLE, *, every: int | None = None, multiples: tuple[int, ...] = (1,)
) -> tuple[ConfigDict, ...]:
    """Evaluations of so many examples of both splits, every so many steps or at the end.

    Examples are as long as those trained on, or of the given `multiples` of that. Numbers begin with the name of the
    split.
    """
    cadence = spec(AtEnd) if every is None else spec(EveryNSteps, n=every)
    return tuple(
        spec(BySlice, cadence=cadence, split=split, name=split, multiples=multiples, examples=examples)
        for split in SPLITS
    )


def chosen_on_valid(evals: tuple[ConfigDict, ...]) -> tuple[ConfigDict, ...]:
    """The evaluations of a config with the first, of test, at the end alone, and with the same of validation as often
    as that one was."""
    first, *rest = (one.copy_and_resolve_references() for one in evals)
    valid = first.copy_and_resolve_references()
    valid.split = valid.name = 'valid'
    first.cadence = spec(AtEnd)
    return first, valid, *rest
