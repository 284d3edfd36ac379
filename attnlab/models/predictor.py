"""What may be asked of a model, whichever it is."""

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int, Shaped

from attnlab.blocks.block import Stage
from attnlab.context import Context
from attnlab.models.stack import Stack
from attnlab.typing import Features, Sequence, State, Tokens


@runtime_checkable
class Predictor(Protocol):
    """A model, an `nnx.Module`: what training, evaluation, decoding and analysis ask of it, and no more.

    Attributes:
      streaming: whether it can be given a sequence piece by piece, a state handed on.
      decodes: whether it also reads what it predicts, so that it can go on from its own predictions.
      documents: how many documents a prediction is about, one after the other in the hidden state.
    """

    streaming: bool

    @property
    def decodes(self) -> bool:
        """See above."""

    @property
    def documents(self) -> int:
        """See above."""

    def hidden(
        self, inputs: Tokens | Features, ctx: Context, state: State | None = None
    ) -> tuple[Sequence, State | None]:
        """The hidden state of every place, and the advanced state (see the mixers' contract)."""

    def pooled(self, inputs: Tokens | Features, ctx: Context) -> Float[Array, 'b d']:
        """One hidden state for every row, padding left out."""

    def losses(self, hidden: Float[Array, '*b d'], targets: Shaped[Array, '...']) -> Float[Array, '*b']:
        """One number for every hidden state: `-log p(target)` in nats, or an error where predictions are numbers."""

    def logits(self, hidden: Float[Array, '*b d']) -> Float[Array, '*b o']:
        """Log-probabilities up to a constant, or the numbers predicted, in float32."""

    def sample(self, hidden: Float[Array, 'b d'], key: Array, *, temperature: float, top_p: float) -> Int[Array, ' b']:
        """A prediction drawn for every hidden state."""

    def init_state(self, batch: int, length: int) -> State:
        """The state before the first of `length` inputs; `()` for a model that is not streaming."""

    def stages(self, inputs: Tokens | Features, ctx: Context) -> Iterator[Stage]:
        """Every named intermediate value in order, lazily; for finding where one went wrong."""


@runtime_checkable
class Stacked(Predictor, Protocol):
    """A model of residual blocks, whose layers can be looked into.

    Attributes:
      dim: width of the residual stream.
      dtype: type of the activations.
      stack: the residual blocks.
    """

    dim: int
    dtype: DTypeLike
    stack: Stack

    def embed(self, inputs: Tokens | Features, ctx: Context) -> Sequence:
        """What the first block is given."""

    def context(self, ctx: Context) -> Context:
        """The context that the blocks are given."""
