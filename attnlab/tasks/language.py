"""Next-token prediction on text."""

import dataclasses
import functools
import pathlib
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.context import Context
from attnlab.data.text.corpus import Corpus, Text
from attnlab.data.text.stdlib import StdlibText
from attnlab.data.text.tokenizers import BytePairs, Bytes, TrainedBytePairs, load_tokenizer, save_tokenizer
from attnlab.data.text.windows import UNITS, Sample, Windows
from attnlab.metrics import Average
from attnlab.models.predictor import Predictor
from attnlab.tasks.task import Batch, context
from attnlab.typing import DropoutKey

TOKENIZER = 'tokenizer.json'


@dataclasses.dataclass(frozen=True)
class LanguageModelling:
    """Predict every token of a text from those before it in its document.

    Attributes:
      text: where the text comes from (see `attnlab.data`).
      tokenizer: how text becomes tokens.
    """

    packs: ClassVar[bool] = True

    text: Corpus = StdlibText()
    tokenizer: Bytes | BytePairs | TrainedBytePairs = Bytes()

    @property
    def vocab(self) -> int:
        """Number of tokens."""
        return self.tokenizer.vocab

    @property
    def evaluated_split(self) -> str:
        """The text beside the one trained on; `test` is for the end."""
        return 'valid'

    def source(self, split: str, length: int, tokens: int | None = None) -> Windows | Sample:
        """Windows of `length` tokens over the split; to evaluate, over a sample of so many `tokens`."""
        return Windows(self.load(split), length) if tokens is None else self.sample(split, length, tokens)

    def sample(
        self, split: str, length: int, tokens: int | None = None, *, block: int | None = None, stride: int | None = None
    ) -> Sample:
        """Windows to evaluate: a sample of so many `tokens`, or all, in blocks spread over the documents of a split."""
        return Sample(self.load(split), length, tokens, block, stride)

    def example(self, length: int) -> dict[str, np.ndarray]:
        """A row of zeros."""
        names = ('tokens', 'targets', 'segments', 'positions', 'bytes')
        return {name: np.zeros(length, np.int32) for name in names} | {'weights': np.zeros(length, np.float32)}

    def measure(self, model: Predictor, batch: Batch, dropout_key: DropoutKey | None) -> dict[str, Average]:
        """Loss in nats per token, by position too, and in nats per byte; by document where the batch tells them apart.

        Of `document_loss` the count is of tokens, of `document_byte_loss` of bytes, `UNITS` each.
        """
        ctx = self.context(batch, dropout_key)
        hidden, _ = model.hidden(batch['tokens'], ctx)
        losses = model.losses(hidden, batch['targets'])
        weights = batch['weights']
        loss = Average.of(losses, weights)
        found = {
            'loss': loss,
            'position_loss': Average.of(losses, weights, axis=0),
            'byte_loss': Average(loss.total, jnp.sum(batch['bytes'] * weights)),
        }
        if 'documents' not in batch:
            return found
        total, tokens, count = (
            jax.ops.segment_sum(values.ravel(), batch['documents'].ravel(), UNITS)
            for values in (losses * weights, weights, batch['bytes'] * weights)
        )
        return found | {'document_loss': Average(total, tokens), 'document_byte_loss': Average(total, count)}

    def context(self, batch: Batch, dropout_key: DropoutKey | None) -> Context:
        """What the mixers know of a batch: its documents, which do not see each other."""
        return context(batch, dropout_key)

    def describe(self) -> dict[str, Any]:
        """Provenance of the training text."""
        return self.load('train').provenance

    def save(self, folder: pathlib.Path) -> None:
        """Writes the tokenizer, which a trained model is worth nothing without, as `tokenizer.json`."""
        save_tokenizer(self.load('train').tokenizer, folder / TOKENIZER)

    def restored(self, folder: pathlib.Path) -> 'LanguageModelling':
        """The task with the tokenizer that the run was trained with, whatever the text has become."""
        path = folder / TOKENIZER
        return dataclasses.replace(self, tokenizer=load_tokenizer(path)) if path.exists() else self

    def load(self, split: str) -> Text:
        """The tokens of a split, read once."""
        return _load(self.text, split, self.tokenizer)


@dataclasses.dataclass(frozen=True)
class RunningText(LanguageModelling):
    """The same, reading a row as one text without regard to where documents end, for mixers that cannot pack them.

    What is predicted and counted is the same: never the first token of a document.
    """

    packs: ClassVar[bool] = False

    def context(self, batch: Batch, dropout_key: DropoutKey | None) -> Context:
        """One document a row."""
        unpacked = {name: array for name, array in batch.items() if name not in ('positions', 'segments')}
        return context(unpacked, dropout_key)


@functools.lru_cache(maxsize=4)
def _load(source: Corpus, split: str, tokenizer: Any) -> Text:
    return source.load(split, tokenizer)
