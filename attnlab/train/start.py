"""Initialises a run from the parameters of another run."""

import contextlib
import dataclasses
import fnmatch
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import jax

from attnlab.errors import UserError, nearest
from attnlab.models.stack import layers_of
from attnlab.tables import visible
from attnlab.train.checkpoint import Checkpoints
from attnlab.train.optimizer import named_parameters
from attnlab.train.run import QUANTIZATION, saved_config
from attnlab.train.saved import steps_in
from attnlab.train.state import TrainState

TAKEN = ('params', 'buffers')
"""The parts of the train state that are copied; prefixes of array names in a checkpoint."""

OF_TOKENS = ('params.embedding.', 'params.head.')
"""What the arrays of a model that belong to tokens are called in a checkpoint."""


@dataclasses.dataclass(frozen=True)
class FromRun:
    """Copies the variables of another run in place of those drawn from the seed; the optimiser state is new.

    Attributes:
      run: the work directory of that run, which is not modified.
      leave: patterns of variables drawn from the seed instead, such as `head/*`; `*` also matches `/`.
      step: which checkpoint; `None` for the newest.
    """

    run: str
    leave: tuple[str, ...] = ('head/*',)
    step: int | None = None

    def check(self, abstract: TrainState) -> None:
        """Raises `UserError` where the checkpoint does not exist, is damaged or does not fit; reads no parameters."""
        run = self.workdir
        if (run / 'config.json').exists() and QUANTIZATION in saved_config(run):
            raise UserError(f'config.start.run is {self.run}, a quantized run; name the one that it was made from')
        steps = steps_in(self._folder)
        if not steps or (self.step is not None and self.step not in steps):
            wanted = 'checkpoint' if self.step is None else f'checkpoint of step {self.step}'
            raise UserError(f'config.start.run is {self.run}, which has no {wanted}')
        # Of damage it is said where the checkpoint is read.
        with contextlib.closing(Checkpoints(self._folder, notify=lambda line: None)) as checkpoints:
            step = checkpoints.newest() if self.step is None else self.step
            if step is None:
                raise UserError(f'config.start.run is {self.run}, which has no checkpoint')
            checkpoints.check_whole(step)
            checkpoints.check_structure(step, self._stored(self._taken(abstract)))

    def settled(self, step: int | None) -> 'FromRun':
        """The same with the step that is read: that of the config, else `step`, which was read before, else the newest.

        Raises `UserError` where the run has no checkpoint, or none undamaged.
        """
        if self.step is None and step is None:
            with self._checkpoints() as checkpoints:
                step = checkpoints.newest()
            if step is None:
                raise UserError(f'config.start.run is {self.run}, which has no checkpoint')
        return self if self.step is not None else dataclasses.replace(self, step=step)

    def describe(self) -> dict[str, Any]:
        """The run and the step as plain data, for run.json."""
        return {'run': self.run, 'step': self.step}

    def takes_tokens(self, abstract: TrainState) -> bool:
        """Whether it copies what a model of text has for every token: of its embedding or its head."""
        return any(name.startswith(OF_TOKENS) for name in self._taken(abstract))

    def restore_into(self, state: TrainState, abstract: TrainState) -> TrainState:
        """Replaces the variables of `state`, whose shapes and shardings are `abstract`, by those of the run.

        Raises `UserError` for a pattern that matches nothing, and for a parameter that the run lacks or has in another
        shape, naming it.
        """
        taken = self._taken(abstract)
        stored = self._stored(taken)
        with self._checkpoints() as checkpoints:
            found = checkpoints.restore_latest(stored) if self.step is None else checkpoints.restore(self.step, stored)
        if found is None:
            raise UserError(f'config.start.run is {self.run}, which has no checkpoint')
        parts = {part: getattr(state, part) for part in TAKEN}
        leaves = _named(state) | self._made(found[0], taken)
        return dataclasses.replace(
            state,
            **{
                part: jax.tree.unflatten(
                    jax.tree.structure(tree), [leaf for name, leaf in leaves.items() if name.startswith(f'{part}.')]
                )
                for part, tree in parts.items()
            },
        )

    def _taken(self, abstract: TrainState) -> dict[str, Any]:
        """The variables that are copied, by their names in a checkpoint."""
        named = _named(abstract)
        found_paths = (path for part in TAKEN for path in named_parameters(getattr(abstract, part)))
        paths = dict(zip(named, found_paths, strict=True))
        for pattern in self.leave:
            if not fnmatch.filter(paths.values(), pattern):
                raise UserError(
                    f'config.start.leave: no parameter matches {pattern!r}{nearest(pattern, paths.values())}'
                )
        return {
            name: leaf
            for name, leaf in named.items()
            if not any(fnmatch.fnmatchcase(paths[name], pattern) for pattern in self.leave)
        }

    def _stored(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """The shapes that the run has these variables in."""
        return dict(named)

    def _made(self, found: Mapping[str, Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """What was read as the variables that it is to be, whose shapes are `named`."""
        del named
        return dict(found)

    def _checkpoints(self) -> contextlib.closing[Checkpoints]:
        return contextlib.closing(Checkpoints(self._folder, notify=lambda line: print(visible(line), file=sys.stderr)))

    @property
    def workdir(self) -> pathlib.Path:
        """The folder of that run."""
        return pathlib.Path(self.run).expanduser()

    @property
    def _folder(self) -> pathlib.Path:
        return self.workdir / 'checkpoints'


@dataclasses.dataclass(frozen=True)
class FromLearngene(FromRun):
    """Makes the layers of the base and the slope of another run, whose stack is an `attnlab.models.stack.LinearStack`.

    There may be more or fewer than that run has. What is not learned of a layer is that of the base. All other
    variables are copied as they are.

    Attributes:
      leave: as in `FromRun`, nothing by default.
    """

    leave: tuple[str, ...] = ()

    def _stored(self, named: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: jax.ShapeDtypeStruct((2, *leaf.shape[1:]), leaf.dtype, sharding=leaf.sharding)
            if name.startswith(LAYERS)
            else leaf
            for name, leaf in named.items()
        }

    def _made(self, found: Mapping[str, Any], named: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: layers_of(leaf, len(named[name]), learned=name.startswith(LAYERS[0]))
            if name.startswith(LAYERS)
            else leaf
            for name, leaf in found.items()
        }


LAYERS = ('params.stack.', 'buffers.stack.')
"""What parameters and buffers of layers are called in a checkpoint."""


def _named(state: TrainState) -> dict[str, Any]:
    """Parameters and buffers by their names in a checkpoint."""
    return {
        f'{part}.{jax.tree_util.keystr(path, simple=True, separator=".")}': leaf
        for part in TAKEN
        for path, leaf in jax.tree.leaves_with_path(getattr(state, part))
    }
