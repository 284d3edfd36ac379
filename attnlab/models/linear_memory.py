"""A linear system and a linear read of its states, and nothing else."""

from collections.abc import Callable, Iterator

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int, Shaped

from attnlab.blocks.block import Stage
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional.precision import wide_dtype
from attnlab.models.heads.regression import RegressionHead
from attnlab.module import Module
from attnlab.nn.systems import System
from attnlab.typing import DropoutKey, Embedded, Features, State


class LinearMemory(Module):
    """A linear state-space system of `dim` channels that all read one signal, and a linear map of their outputs.

        y = W system(x 1^T)

    Without norms, skips and nonlinearities: of each initialisation it is known what the best read of its states would
    give (`attnlab.analysis.recall`). Implements `attnlab.models.predictor.Predictor`.

    Args:
      vocab: numbers that are predicted.
      dim: channels.
      system: made as `system(dim, state=, causal=, rngs=rngs)`; see `attnlab.nn.systems`.
      state: states, of a channel or of all, as the system counts them.
      dtype: type of the activations; the system is in float32 or better.
      rngs: draws the parameters.
    """

    streaming = False
    decodes = False
    documents = 1

    def __init__(
        self,
        vocab: int,
        *,
        dim: int,
        system: Callable[..., System],
        state: int = 32,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.dim, self.dtype = dim, jnp.dtype(dtype)
        self.system = system(dim, state=state, causal=True, rngs=rngs)
        self.head = RegressionHead(dim, vocab, rngs=rngs)

    @property
    def outputs(self) -> int:
        """Numbers that are predicted."""
        return self.head.weight.shape[0]

    def hidden(self, inputs: Features, ctx: Context, state: State | None = None) -> tuple[Embedded, State | None]:
        """The outputs of the system, and no state. Raises `UserError` for signals of several channels."""
        del state
        if inputs.shape[2] != 1:
            raise UserError(f'signals of the task have {inputs.shape[2]} channels; a LinearMemory reads one')
        wide = inputs.astype(wide_dtype(self.dtype))
        return self.system(jnp.repeat(wide, self.dim, axis=2), ctx.segments)[0].astype(self.dtype), None

    def pooled(self, inputs: Features, ctx: Context) -> Float[Array, 'b d']:
        """The outputs of the system at the last token."""
        return self.hidden(inputs, ctx)[0][:, -1]

    def losses(
        self, hidden: Float[Array, '*b d'], targets: Shaped[Array, '...'], key: DropoutKey | None = None
    ) -> Float[Array, '*b']:
        """The mean squared error over outputs."""
        del key
        return self.head.losses(hidden, targets)

    def logits(self, hidden: Float[Array, '*b d']) -> Float[Array, '*b o']:
        """The predictions, in float32."""
        return self.head.logits(hidden)

    def sample(self, hidden: Float[Array, 'b d'], key: Array, *, temperature: float, top_p: float) -> Int[Array, ' b']:
        """Raises `UserError`: predictions are numbers, not tokens."""
        raise UserError('a LinearMemory predicts numbers, not tokens')

    def init_state(self, batch: int, length: int) -> State:
        """Empty: signals are read whole."""
        del batch, length
        return ()

    def stages(self, inputs: Features, ctx: Context) -> Iterator[Stage]:
        """The outputs of the system, and the predictions."""
        hidden = self.hidden(inputs, ctx)[0]
        yield Stage('system', hidden)
        yield Stage('head', self.logits(hidden))
