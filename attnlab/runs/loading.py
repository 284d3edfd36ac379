"""Loads a trained model from its work directory onto the devices at hand."""

import contextlib
import dataclasses
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from flax import nnx

from attnlab.config import build, spec_of
from attnlab.errors import UserError
from attnlab.tables import visible
from attnlab.train.checkpoint import Checkpoints
from attnlab.train.partition import Axes
from attnlab.train.run import check_data, saved_config
from attnlab.train.setup import Setup, prepare
from attnlab.train.state import joined, split


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A run's config, built, with the parameters and buffers after `step`; with `ema` the average of the parameters."""

    setup: Setup
    variables: nnx.State
    step: int
    ema: bool = False

    @property
    def name(self) -> str:
        """What its results are filed under, such as `600` or `600-ema`."""
        return f'{self.step}-ema' if self.ema else str(self.step)

    def model(self) -> Any:
        """The model with its parameters and buffers."""
        return nnx.merge(self.setup.graphdef, self.variables)

    def altered(self, change: Callable[[Any], Any]) -> 'Loaded':
        """The run with the model that `change(model)` returns, which may modify its argument in place."""
        make = self.setup.make_model
        setup = dataclasses.replace(self.setup, make_model=lambda rngs: change(make(rngs)))
        _, params, buffers = split(change(self.model()))
        return Loaded(setup, joined(params, buffers), self.step, self.ema)


def load_run(workdir: pathlib.Path, step: int | None = None, *, ema: bool = False) -> Loaded:
    """Loads a checkpoint, by default the newest; the devices need not be those it was trained on.

    They are divided as in training, by the mesh of the config, with another size of `data` where their number asks for
    it; where they do not divide so, `data` takes them all.

    With `ema` the moving average of the parameters takes their place.

    Raises `UserError` when `workdir` is not a run, has no such checkpoint, or none with an average.
    """
    config = saved_config(workdir)
    trained = build(config.mesh, 'config.mesh') if 'mesh' in config else None
    if isinstance(trained, Axes):  # Of anything else `prepare` says what it should be.
        with config.unlocked():
            config.mesh = spec_of(_here(trained))
    return restored(prepare(config).restored(workdir), workdir, step, ema=ema)


def _here(trained: Axes) -> Axes:
    """The mesh of a run where the devices at hand make it up, with any `data`; otherwise `data` alone."""
    for axes in (trained, dataclasses.replace(trained, data=-1)):
        with contextlib.suppress(UserError):
            axes.make()
            return axes
    return Axes()


def load_checked(
    workdir: pathlib.Path, step: int | None = None, *, ema: bool = False, other_data: bool = False
) -> Loaded:
    """`load_run` for what reads the data too. Raises `UserError` where these have changed; `other_data` allows any."""
    loaded = load_run(workdir, step, ema=ema)
    check_data(workdir, loaded.setup.task.describe(), other=other_data)
    return loaded


def restored(setup: Setup, workdir: pathlib.Path, step: int | None = None, *, ema: bool = False) -> Loaded:
    """`load_run` for a config that has been built. Raises `UserError` when `workdir` has no such checkpoint."""
    if ema and setup.optimizer.ema is None:
        raise UserError(
            f'{workdir} keeps no average of its parameters (config.optimizer.ema is None); leave out --ema, or train '
            'another run with --config.optimizer.ema=0.999'
        )
    checkpoints = Checkpoints(workdir / 'checkpoints', notify=lambda text: print(visible(text), file=sys.stderr))
    # The state of the optimiser is for training alone: it is not read, and a quantized run has none. Of parameters and
    # their average one is read.
    unread: dict[str, Any] = {'opt_state': (), 'params' if ema else 'average': nnx.State({})}
    wanted = dataclasses.replace(setup.abstract, **unread)
    try:
        found = checkpoints.restore_latest(wanted) if step is None else checkpoints.restore(step, wanted)
    finally:
        checkpoints.close()
    if found is None:
        raise UserError(f'{workdir} has no checkpoint yet')
    state, carried = found
    return Loaded(setup, joined(state.average if ema else state.params, state.buffers), carried['step'], ema)
