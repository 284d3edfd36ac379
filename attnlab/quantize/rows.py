"""Rows of training that a quantization is calibrated on."""

import numpy as np

from attnlab.errors import UserError
from attnlab.tasks.task import Batch
from attnlab.train.setup import Setup


def training_rows(setup: Setup, rows: int, at_once: int = 1) -> list[Batch]:
    """The first rows of training, in batches of `at_once`; raises `UserError` where there are fewer."""
    source = setup.task.source('train', setup.length)
    if rows > len(source):
        raise UserError(f'{rows} rows are asked for; training has {len(source)} of {setup.length} tokens')
    found = [source[index] for index in range(rows)]
    return [
        {name: np.stack([row[name] for row in found[start : start + at_once]]) for name in found[0]}
        for start in range(0, rows, at_once)
    ]
