"""What models that read rows whole, and generate nothing, have in common."""

from typing import ClassVar

from jax import Array
from jaxtyping import Float

from attnlab.errors import UserError
from attnlab.module import Module
from attnlab.typing import State


class WholeRows(Module):
    """Base class of models that keep no state and, unless they say otherwise, predict no tokens.

    It is half of `attnlab.models.predictor.Predictor`.

    Attributes:
      predicts: of the class, what is predicted in place of tokens.
    """

    streaming = False
    decodes = False
    documents = 1
    predicts: ClassVar[str] = 'numbers'

    def sample(self, hidden: Float[Array, 'b d'], key: Array, *, temperature: float, top_p: float) -> Array:
        """Raises `UserError`: there are no tokens to sample."""
        raise UserError(f'{type(self).__name__} predicts {self.predicts}, not tokens')

    def init_state(self, batch: int, length: int) -> State:
        """Empty: rows are read whole."""
        del batch, length
        return ()
