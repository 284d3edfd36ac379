"""A head of real numbers."""

from flax import nnx
from jax import Array
from jaxtyping import Float

from attnlab.config import check_choice
from attnlab.losses import absolute_error, squared_error
from attnlab.models.heads.head import Head, linear_logits, output_weight

ERRORS = {'squared': squared_error, 'absolute': absolute_error}
DEGREES = {'squared': 2, 'absolute': 1}


class RegressionHead(Head):
    """A linear map to real numbers, `y = hidden W^T`, `W` of shape `o d`, initialised normal with variance 1 / d.

    Args:
      dim: model width.
      vocab: number of outputs.
      error: 'squared' or 'absolute'; the loss is its mean over outputs.

    Raises `UserError` for another error.
    """

    def __init__(self, dim: int, vocab: int, *, error: str = 'squared', rngs: nnx.Rngs):
        check_choice(ERRORS, 'error', error)
        self.error = error
        self.degree = DEGREES[error]
        self.weight = output_weight(dim, vocab, rngs)

    def losses(self, hidden: Float[Array, '*b d'], targets: Float[Array, '*b o']) -> Float[Array, '*b']:
        """The mean error over outputs."""
        return ERRORS[self.error](self.logits(hidden), targets)

    def logits(self, hidden: Float[Array, '*b d']) -> Float[Array, '*b o']:
        """The predictions, in float32."""
        return linear_logits(hidden, self.weight[...])
