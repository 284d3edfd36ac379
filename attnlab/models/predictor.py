"""The protocols of models."""

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int, Shaped

from attnlab.blocks.block import Stage
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.models.stack import Stack
from attnlab.typing import DropoutKey, Embedded, Features, State, Tokens


@runtime_checkable
class Predictor(Protocol):
    """A model, an `nnx.Module`, as training, evaluation, decoding and analysis use it.

    Attributes:
      streaming: whether it can process a sequence piece by piece, passing on a state.
      decodes: whether it can also read its own predictions, so that it can generate.
      documents: the number of documents that a prediction is about, concatenated in the hidden state.
      outputs: the number of classes, or of numbers, that a prediction is about.
    """

    streaming: bool

    @property
    def decodes(self) -> bool:
        """See above."""

    @property
    def documents(self) -> int:
        """See above."""

    @property
    def outputs(self) -> int:
        """See above."""

    def hidden(
        self, inputs: Tokens | Features, ctx: Context, state: State | None = None
    ) -> tuple[Embedded, State | None]:
        """The hidden state of every position, and the advanced state (see the mixers' contract)."""

    def pooled(self, inputs: Tokens | Features, ctx: Context) -> Float[Array, 'b d']:
        """One hidden state per row, from its tokens without padding."""

    def losses(
        self, hidden: Float[Array, '*b d'], targets: Shaped[Array, '...'], key: DropoutKey | None = None
    ) -> Float[Array, '*b']:
        """One number per hidden state: `-log p(target)` in nats, or an error where predictions are real numbers.

        Given a key, as in training, it is the number that training minimises, which differs for some heads.
        """

    def logits(self, hidden: Float[Array, '*b d']) -> Float[Array, '*b o']:
        """Log-probabilities up to a constant, or the predicted numbers, in float32."""

    def sample(self, hidden: Float[Array, 'b d'], key: Array, *, temperature: float, top_p: float) -> Int[Array, ' b']:
        """A prediction sampled for every hidden state."""

    def init_state(self, batch: int, length: int) -> State:
        """The state before the first of `length` inputs; `()` for a model that is not streaming."""

    def stages(self, inputs: Tokens | Features, ctx: Context) -> Iterator[Stage]:
        """Every named intermediate value in order, lazily; to find the first wrong one."""


def check_decodes(model: Predictor) -> None:
    """Raises `UserError` for a model that cannot generate."""
    if not model.decodes:
        raise UserError('this model does not read tokens one by one, so it cannot generate')


@runtime_checkable
class Stacked(Predictor, Protocol):
    """A model of residual blocks, whose layers can be analysed.

    Attributes:
      dim: width of the residual stream.
      dtype: type of the activations.
      stack: the residual blocks.
    """

    dim: int
    dtype: DTypeLike
    stack: Stack

    def embed(self, inputs: Tokens | Features, ctx: Context) -> Embedded:
        """The input of the first block."""

    def layout(self, ctx: Context) -> Context:
        """The positions, segments and grid of the tokens that the blocks read, for rows with this context."""

    def context(self, ctx: Context, inputs: Tokens | Features) -> Context:
        """The context of the blocks: the layout, and what they are conditioned on for these inputs."""


@runtime_checkable
class Distributional(Predictor, Protocol):
    """A model of real numbers that may predict their distributions.

    Attributes:
      distributions: whether it does, which depends on its head.
    """

    @property
    def distributions(self) -> bool:
        """See above."""

    def quantiles(self, hidden: Float[Array, '*b d'], levels: Float[Array, ' n']) -> Float[Array, '*b n o']:
        """The quantiles of these levels, each between 0 and 1, in float32."""


@runtime_checkable
class Dynamical(Predictor, Protocol):
    """A model of a dynamical system: a map from a state to the next, which can run by itself."""

    def enter(self, row: Float[Array, 'b v']) -> Float[Array, 'b n']:
        """The state in which a trajectory is entered at a row."""

    def step(self, state: Float[Array, 'b n']) -> Float[Array, 'b n']:
        """The state one row later."""

    def observed(self, state: Float[Array, 'b n']) -> Float[Array, 'b v']:
        """The row that a state stands for."""

    def region(self, state: Float[Array, 'b n']) -> Int[Array, 'b w']:
        """The region, within which the map is linear, that a state is in: numbers that name it."""


def one_stack(model: Any) -> Stack:
    """Returns the stack of a model whose layers are of one width. Raises `UserError` for any other model."""
    stack = model.stack if isinstance(model, Stacked) else model
    if not isinstance(stack, Stack):
        raise UserError(
            f'the model is a {type(stack).__name__}; only the layers of one Stack can be analysed or changed'
        )
    return stack
