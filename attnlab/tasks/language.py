"""Next-token prediction on text."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from attnlab.context import Context
from attnlab.data.stdlib import StdlibText
from attnlab.data.tokenizers import Bytes
from attnlab.data.windows import Windows
from attnlab.losses import next_token_loss
from attnlab.metrics import Average
from attnlab.models.model import LanguageModel
from attnlab.tasks.task import Batch
from attnlab.typing import DropoutKey


@dataclasses.dataclass(frozen=True)
class LanguageModelling:
    """Predict every token of a text from those before it in its document.

    Attributes:
      text: where the text comes from (see `attnlab.data`).
      tokenizer: how text becomes tokens.
    """

    text: Any = StdlibText()
    tokenizer: Any = Bytes()

    @property
    def vocab(self) -> int:
        """Number of tokens."""
        return self.tokenizer.vocab

    def source(self, split: str, length: int) -> Windows:
        """Windows of `length` tokens over the split."""
        return Windows(self._load(split), length)

    def example(self, length: int) -> dict[str, np.ndarray]:
        """An example of zeros."""
        integers = {name: np.zeros(length, np.int32) for name in ('tokens', 'targets', 'segments', 'positions')}
        return integers | {name: np.zeros(length, np.float32) for name in ('weights', 'bytes')}

    def measure(self, model: LanguageModel, batch: Batch, dropout_key: DropoutKey | None) -> dict[str, Average]:
        """Loss in nats per token, by position too, and in nats per byte."""
        ctx = context(batch, dropout_key)
        hidden, _ = model.hidden(batch['tokens'], ctx)
        losses = next_token_loss(hidden, model.unembedding(), batch['targets'])
        weights = batch['weights']
        loss = Average.of(losses, weights)
        return {
            'loss': loss,
            'position_loss': Average.of(losses, weights, axis=0),
            'byte_loss': Average(loss.total, jnp.sum(batch['bytes'] * weights)),
        }

    def describe(self) -> dict[str, Any]:
        """Provenance of the training text."""
        return self._load('train').provenance

    @functools.lru_cache(maxsize=4)  # noqa: B019 - a task is a frozen value that lives as long as its run
    def _load(self, split: str) -> Any:
        return self.text.load(split, self.tokenizer)


def context(batch: Batch, dropout_key: DropoutKey | None = None) -> Context:
    """The context of a batch; deterministic without a key."""
    return Context(
        positions=batch['positions'],
        segments=batch['segments'],
        deterministic=dropout_key is None,
        dropout_key=dropout_key,
    )
