"""What the trainer knows of a problem."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from attnlab.context import Context
from attnlab.data.pipeline import Source
from attnlab.metrics import Average
from attnlab.models.predictor import Predictor
from attnlab.typing import DropoutKey

Batch = Mapping[str, Any]


@runtime_checkable
class Task(Protocol):
    """Inputs, targets and metrics of one problem: what is predicted where. The trainer knows `Task` and the model, not
    which. Losses and logits are asked of the model; no task reaches for a weight.

    Constructing a task touches nothing; `source` loads. `packs` says whether mixers are told of several documents in a
    row, by segments.
    """

    packs: ClassVar[bool]

    @property
    def vocab(self) -> int:
        """Number of tokens a model must know."""

    @property
    def evaluated_split(self) -> str:
        """The split that is evaluated where none is named."""

    def source(self, split: str, length: int, tokens: int | None = None) -> Source:
        """The examples of a split, of `length` tokens each: `len(source)`, `source[i]` a dict of numpy arrays.

        With `tokens`, those of an evaluation: over that many tokens from the start, every one of them counted once.
        """

    def example(self, length: int) -> dict[str, np.ndarray]:
        """An example of zeros with the shapes and types of `source(...)[i]`, without loading anything."""

    def measure(self, model: Predictor, batch: Batch, dropout_key: DropoutKey | None) -> dict[str, Average]:
        """The metrics of one batch; `metrics['loss']` is what training minimises. Trains when given a dropout key."""

    def describe(self) -> dict[str, Any]:
        """Where the data came from, for the record of the run."""

    def save(self, folder: pathlib.Path) -> None:
        """Writes into the work directory what using the model elsewhere needs besides its parameters."""

    def restored(self, folder: pathlib.Path) -> 'Task':
        """The task with what `save` wrote, if it did, in the place of what would be made anew, such as a vocabulary."""


@dataclasses.dataclass(frozen=True)
class Slice:
    """A named part of what a task asks: its examples, and their length in tokens."""

    source: Source
    length: int


@runtime_checkable
class Sliced(Protocol):
    """A task whose difficulty has names."""

    def slices(self, split: str, length: int, multiples: tuple[int, ...], count: int) -> dict[str, Slice]:
        """Up to `count` examples of each difficulty: of the length trained on, `1x`, and of multiples of it, `2x`."""


@runtime_checkable
class Textual(Protocol):
    """A task whose tokens are a text's; `save` keeps its tokenizer."""

    def sample(
        self, split: str, length: int, tokens: int | None = None, *, block: int | None = None, stride: int | None = None
    ) -> Any:
        """Windows to evaluate, of a sample of the split: an `attnlab.data.text.windows.Sample`."""

    @property
    def tokenizer(self) -> Any:
        """How text becomes tokens."""


def context(batch: Batch, dropout_key: DropoutKey | None = None) -> Context:
    """The context of a batch, one unbroken document a row where it has no positions; deterministic without a key."""
    if 'positions' in batch:
        ctx = Context(positions=batch['positions'], segments=batch['segments'])
    else:
        ctx = Context.full(*batch['tokens'].shape[:2])
    return dataclasses.replace(ctx, deterministic=dropout_key is None, dropout_key=dropout_key)
