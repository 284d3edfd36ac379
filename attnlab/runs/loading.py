"""Loads a trained model from its work directory onto the devices at hand."""

import dataclasses
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from flax import nnx

from attnlab.config import spec
from attnlab.errors import UserError
from attnlab.train.checkpoint import Checkpoints
from attnlab.train.partition import Axes
from attnlab.train.run import saved_config
from attnlab.train.setup import Setup, prepare
from attnlab.train.state import joined, split


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A run's config, built, with the parameters and buffers after `step`."""

    setup: Setup
    variables: nnx.State
    step: int

    def model(self) -> Any:
        """The model with its parameters and buffers."""
        return nnx.merge(self.setup.graphdef, self.variables)

    def altered(self, change: Callable[[Any], Any]) -> 'Loaded':
        """The run with the model that `change(model)` returns, which may modify its argument in place."""
        make = self.setup.make_model
        setup = dataclasses.replace(self.setup, make_model=lambda rngs: change(make(rngs)))
        _, params, buffers = split(change(self.model()))
        return Loaded(setup, joined(params, buffers), self.step)


def load_run(workdir: pathlib.Path, step: int | None = None) -> Loaded:
    """Loads a checkpoint, by default the newest; the devices need not be those it was trained on.

    Raises `UserError` when `workdir` is not a run, or has no such checkpoint.
    """
    config = saved_config(workdir)
    with config.unlocked():
        config.mesh = spec(Axes)
    return restored(prepare(config).restored(workdir), workdir, step)


def restored(setup: Setup, workdir: pathlib.Path, step: int | None = None) -> Loaded:
    """The same for a config that has been built. Raises `UserError` when `workdir` has no such checkpoint."""
    checkpoints = Checkpoints(workdir / 'checkpoints', notify=lambda text: print(text, file=sys.stderr))
    # The state of the optimiser is for training alone: it is not read, and a quantized run has none.
    wanted = dataclasses.replace(setup.abstract, opt_state=())
    try:
        found = checkpoints.restore_latest(wanted) if step is None else checkpoints.restore(step, wanted)
    finally:
        checkpoints.close()
    if found is None:
        raise UserError(f'{workdir} has no checkpoint yet')
    state, carried = found
    return Loaded(setup, state.variables, carried['step'])
