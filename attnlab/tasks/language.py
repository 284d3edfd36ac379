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
from attnlab.metrics import Average, bits, perplexity
from attnlab.models.heads.head import heads
from attnlab.models.predictor import Predictor
from attnlab.tasks.task import Batch, Slice, context
from attnlab.tasks.trivial import of_text
from attnlab.typing import DropoutKey

TOKENIZER = 'tokenizer.json'
COUNTED = 2**18
"""Tokens of the training text that trivial predictors count."""


@dataclasses.dataclass(frozen=True)
class LanguageModelling:
    """Predict every token of a text from those before it in its document.

    Attributes:
      text: where the text comes from (see `attnlab.data`).
      tokenizer: how text becomes tokens.
    """

    packs: ClassVar[bool] = True
    labels: ClassVar[str] = 'targets'

    text: Corpus = StdlibText()
    tokenizer: Bytes | BytePairs | TrainedBytePairs = Bytes()

    @property
    def vocab(self) -> int:
        """Number of tokens."""
        return self.tokenizer.vocab

    @property
    def evaluated_split(self) -> str:
        """The validation text; `test` is for final results."""
        return 'valid'

    def source(self, split: str, length: int, tokens: int | None = None) -> Windows | Sample:
        """Windows of `length` tokens over the split; with `tokens`, over a sample of that many."""
        return Windows(self.load(split), length) if tokens is None else self.sample(split, length, tokens)

    def sample(
        self, split: str, length: int, tokens: int | None = None, *, block: int | None = None, stride: int | None = None
    ) -> Sample:
        """Windows to evaluate: a sample of `tokens` tokens, or all, in blocks spread over the documents of a split."""
        return Sample(self.load(split), length, tokens, block, stride)

    def example(self, length: int) -> dict[str, np.ndarray]:
        """A row of zeros."""
        names = ('tokens', 'targets', 'segments', 'positions', 'bytes')
        return {name: np.zeros(length, np.int32) for name in names} | {'weights': np.zeros(length, np.float32)}

    def measure(self, model: Predictor, batch: Batch, dropout_key: DropoutKey | None) -> dict[str, Average]:
        """Loss in nats per token, also by position, and in nats per byte; by document where the batch numbers them.

        In training there are no nats per byte where the head minimises an estimate of them (`Head.estimated`).
        `document_loss` counts tokens and `document_byte_loss` bytes, each an array of size `UNITS`.
        """
        ctx = self.context(batch, dropout_key)
        hidden, _ = model.hidden(batch['tokens'], ctx)
        losses = model.losses(hidden, batch['targets'], dropout_key)
        weights = batch['weights']
        loss = Average.of(losses, weights)
        found = {
            'loss': loss,
            'position_loss': Average.of(losses, weights, axis=0),
        }
        if dropout_key is None or not any(head.estimated for head in heads(model)):
            found['byte_loss'] = Average(loss.total, jnp.sum(batch['bytes'] * weights))
        if 'documents' not in batch:
            return found
        total, tokens, count = (
            jax.ops.segment_sum(values.ravel(), batch['documents'].ravel(), UNITS)
            for values in (losses * weights, weights, batch['bytes'] * weights)
        )
        return found | {'document_loss': Average(total, tokens), 'document_byte_loss': Average(total, count)}

    def context(self, batch: Batch, dropout_key: DropoutKey | None) -> Context:
        """The context of the mixers: segments keep documents separate."""
        return context(batch, dropout_key)

    def trivial(self, part: Slice) -> dict[str, dict[str, float]]:
        """What counts of `COUNTED` tokens of the training text, spread over its documents, predict of a sample."""
        train, asked = (
            [source[index] for index in range(len(source))]
            for source in (self.sample('train', part.length, COUNTED), part.source)
        )
        losses = of_text(train, asked, self.vocab)
        tokens, sizes = (sum(float(np.sum(row['weights'] * row[of])) for row in asked) for of in ('weights', 'bytes'))
        return {
            'loss': losses,
            'bits_per_byte': {name: bits(loss * tokens / sizes) for name, loss in losses.items()},
            'perplexity': {name: perplexity(loss) for name, loss in losses.items()},
        }

    def describe(self) -> dict[str, Any]:
        """Provenance of the training text, with what the evaluated one is as `held_out`."""
        held_out = self.load(self.evaluated_split).provenance
        kept = ('split', 'content_hash', 'documents', 'bytes', 'tokens')
        return self.load('train').provenance | {'held_out': {name: held_out[name] for name in kept}}

    def save(self, folder: pathlib.Path) -> None:
        """Writes the tokenizer, without which a trained model is useless, as `tokenizer.json`."""
        save_tokenizer(self.load('train').tokenizer, folder / TOKENIZER)

    def restored(self, folder: pathlib.Path) -> 'LanguageModelling':
        """The task with the tokenizer that the run was trained with, even if the text has changed since."""
        path = folder / TOKENIZER
        return dataclasses.replace(self, tokenizer=load_tokenizer(path)) if path.exists() else self

    def load(self, split: str) -> Text:
        """The tokens of a split, read once."""
        return _load(self.text, split, self.tokenizer)


@dataclasses.dataclass(frozen=True)
class RunningText(LanguageModelling):
    """`LanguageModelling` that reads a row as one text and ignores document ends, for mixers that cannot pack.

    The same tokens are predicted and counted: never the first one of a document.
    """

    packs: ClassVar[bool] = False

    def context(self, batch: Batch, dropout_key: DropoutKey | None) -> Context:
        """One document a row."""
        unpacked = {name: array for name, array in batch.items() if name not in ('positions', 'segments')}
        return context(unpacked, dropout_key)


@functools.lru_cache(maxsize=4)
def _load(source: Corpus, split: str, tokenizer: Any) -> Text:
    return source.load(split, tokenizer)
