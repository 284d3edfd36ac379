"""The protocols of tasks."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from attnlab.context import Context
from attnlab.data.pipeline import Source
from attnlab.metrics import Average
from attnlab.models.predictor import Predictor
from attnlab.typing import DropoutKey

Batch = Mapping[str, Any]


@runtime_checkable
class Task(Protocol):
    """Inputs, targets and metrics of one problem: what is predicted where.

    Losses and logits come from the model; no task accesses a weight. Constructing a task loads nothing; `source` does.
    `packs` says whether mixers are given the segments of several documents in a row, and `labels` which entry of a row
    holds what is predicted.
    """

    packs: ClassVar[bool]
    labels: ClassVar[str]

    @property
    def vocab(self) -> int:
        """Number of tokens that a model must support."""

    @property
    def evaluated_split(self) -> str:
        """The split that is evaluated by default."""

    def source(self, split: str, length: int, tokens: int | None = None) -> Source:
        """The examples of a split, of `length` tokens each: `len(source)`, `source[i]` a dict of numpy arrays.

        With `tokens`, those of an evaluation of that many tokens from the start, each counted once.
        """

    def example(self, length: int) -> dict[str, np.ndarray]:
        """An example of zeros with the shapes and types of `source(...)[i]`, without loading anything."""

    def measure(self, model: Predictor, batch: Batch, dropout_key: DropoutKey | None) -> dict[str, Average]:
        """The metrics of one batch; `metrics['loss']` is what training minimises. Dropout needs a key.

        Its count is that of the labels of the context which the model is given (see `context`).
        """

    def describe(self) -> dict[str, Any]:
        """Where the data came from, for the record of the run."""

    def save(self, folder: pathlib.Path) -> None:
        """Writes into the work directory what is needed to use the model elsewhere, besides its parameters."""

    def restored(self, folder: pathlib.Path) -> 'Task':
        """The task with what `save` wrote, if anything, such as a vocabulary, instead of making it anew."""


class WithoutFiles:
    """A task that its config describes completely: nothing in the work directory adds to it."""

    def save(self, folder: pathlib.Path) -> None:
        """Writes nothing."""
        del folder

    def restored[T](self: T, folder: pathlib.Path) -> T:
        """The task itself."""
        del folder
        return self


@dataclasses.dataclass(frozen=True)
class Slice:
    """A named part of a task: its examples, and their length in tokens."""

    source: Source
    length: int


@runtime_checkable
class Sliced(Protocol):
    """A task with named slices."""

    def slices(self, split: str, length: int, multiples: tuple[int, ...], count: int) -> dict[str, Slice]:
        """Up to `count` examples of each slice: of the training length, `1x`, and of multiples of it, `2x`."""


@runtime_checkable
class Placed(Protocol):
    """A task whose metrics `position_...` are by something else than the labels of a row.

    `place` says what one of its places is called, and `places` what those of the training length are.
    """

    place: ClassVar[str]
    places: ClassVar[str]


@runtime_checkable
class Guessable(Protocol):
    """A task that knows what predictors reach that need no training of a network."""

    def trivial(self, part: Slice) -> dict[str, dict[str, float]]:
        """By metric and predictor, such as `{'accuracy': {'chance': 0.1}}`, what they reach on a slice of the task.

        Computed from the task's own data, training examples and those of the slice; the same every time.
        """


@runtime_checkable
class Divided(Protocol):
    """A task on data of which two splits may be the same examples, as where there are none for validation."""

    def same_rows(self, split: str, other: str) -> bool:
        """Whether they are. Raises `UserError` for an unknown split, and for missing data."""


@runtime_checkable
class Choosy(Protocol):
    """A task that not every model can be trained on."""

    def check(self, model: Predictor) -> None:
        """Raises `UserError` for a model that cannot."""


@runtime_checkable
class Textual(Protocol):
    """A task on text; `save` keeps its tokenizer."""

    def sample(
        self, split: str, length: int, tokens: int | None = None, *, block: int | None = None, stride: int | None = None
    ) -> Any:
        """Windows to evaluate, of a sample of the split: an `attnlab.data.text.windows.Sample`."""

    @property
    def tokenizer(self) -> Any:
        """How text becomes tokens."""


def same_rows(task: Task, split: str, other: str) -> bool:
    """Whether two splits of a task are the same examples. Raises `UserError` where that cannot be found out."""
    return split == other or (isinstance(task, Divided) and task.same_rows(split, other))


def context(batch: Batch, dropout_key: DropoutKey | None = None, labels: Float[Array, '...'] | None = None) -> Context:
    """The context of a batch: one document per row where it has no positions; deterministic without a key.

    `labels` are the weights of the losses whose mean training minimises, those of the batch where a task gives none.
    """
    labels = batch.get('weights') if labels is None else labels
    if 'positions' in batch:
        ctx = Context(positions=batch['positions'], segments=batch['segments'])
    else:
        ctx = Context.full(*batch['tokens'].shape[:2])
    count = None if labels is None else jnp.sum(labels)
    return dataclasses.replace(ctx, deterministic=dropout_key is None, dropout_key=dropout_key, labels=count)
