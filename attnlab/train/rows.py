"""Rows of a split that something is measured on or fitted to, beside training itself."""

import numpy as np

from attnlab.data.pipeline import spread
from attnlab.errors import UserError
from attnlab.tasks.task import Batch
from attnlab.train.setup import Setup


def places_of(setup: Setup, split: str, count: int) -> list[int]:
    """The places of `count` rows all over a split. Raises `UserError` for a split that does not exist, or fewer."""
    length = len(setup.task.source(split, setup.length))
    if count > length:
        raise UserError(
            f'rows is {count}; the {split} split has {length} rows of {setup.length}: ask for {length} or fewer'
        )
    return spread(length, count)


def rows_of(setup: Setup, split: str, count: int, at_once: int = 1) -> list[Batch]:
    """So many rows all over a split, in batches of `at_once`. Raises `UserError` as `places_of` does."""
    source = setup.task.source(split, setup.length)
    found = [source[place] for place in places_of(setup, split, count)]
    return [
        {name: np.stack([row[name] for row in found[start : start + at_once]]) for name in found[0]}
        for start in range(0, count, at_once)
    ]
