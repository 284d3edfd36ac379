"""Heads of real numbers that are linear maps with an intercept, one for all variates or one each."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from attnlab.config import check_choice
from attnlab.errors import UserError
from attnlab.models.heads.head import Head, wide
from attnlab.models.heads.regression import DEGREES, ERRORS
from attnlab.nn.parameter import param, uniform_within

SMALLEST = 1e-9
"""Added to the size of a weight before its root is taken, whose derivative is infinite at 0."""


class AffineHead(Head):
    """`y = W h + b`, both drawn uniformly within `1 / sqrt(d)`, as PyTorch has it.

    Args:
      dim: model width.
      vocab: number of outputs.
      error: 'squared' or 'absolute'; the loss is its mean over outputs.
      variates: a map for each of so many variates, which are the last axis but one; `None`: one for all.
      parts: of how many maps of equal widths it is the sum: weights are drawn within `sqrt(parts / d)`.
      rngs: draws the parameters.

    Raises `UserError` for another error, and for hidden states of other variates.
    """

    def __init__(
        self,
        dim: int,
        vocab: int,
        *,
        error: str = 'squared',
        variates: int | None = None,
        parts: int = 1,
        rngs: nnx.Rngs,
    ):
        check_choice(ERRORS, 'error', error)
        self.error, self.variates = error, variates
        self.degree = DEGREES[error]
        bound = (parts / dim) ** 0.5
        each = () if variates is None else (variates,)
        some: tuple[None, ...] = (None,) * len(each)
        self.weight = param(
            uniform_within(bound), (*each, vocab, dim), axes=(*some, 'vocab', 'embed'), group='embedding', rngs=rngs
        )
        self.bias = param(uniform_within(bound), (*each, vocab), axes=(*some, 'vocab'), group='vector', rngs=rngs)

    def losses(self, hidden: Float[Array, '*b d'], targets: Float[Array, '*b o']) -> Float[Array, '*b']:
        """The mean error over outputs."""
        return ERRORS[self.error](self.logits(hidden), targets)

    def logits(self, hidden: Float[Array, '*b d']) -> Float[Array, '*b o']:
        """The predictions, in float32."""
        hidden = wide(hidden)
        if self.variates is None:
            found = hidden @ self.weight[...].astype(hidden.dtype).T
        else:
            if hidden.shape[-2] != self.variates:
                raise UserError(f'variates of the head is {self.variates}; the hidden states have {hidden.shape[-2]}')
            found = jnp.einsum('... v d, v o d -> ... v o', hidden, self.weight[...].astype(hidden.dtype))
        return found + jnp.broadcast_to(self.bias[...].astype(hidden.dtype), found.shape)


class SparseAffineHead(AffineHead):
    """`AffineHead` whose training adds `strength (1 / share - 1) mean_i R(w_i)`, which makes weights zero.

        R(w) = 2 / (1 + exp(-c |w|^(1/c))) - 1,   c = power

    `share` is the fraction of weights that are expected not to be zero; 1 adds nothing. Triebe, Laptev and Rajagopal
    2019, https://arxiv.org/abs/1911.12436, whose code multiplies the strength by a ramp over the first epochs.

    Raises `UserError` for a share that is not above 0 and at most 1, a power that is not above 0, and a negative
    strength, which would reward weights.
    """

    def __init__(
        self,
        dim: int,
        vocab: int,
        *,
        share: float = 1.0,
        strength: float = 0.02,
        power: float = 3.0,
        error: str = 'squared',
        variates: int | None = None,
        parts: int = 1,
        rngs: nnx.Rngs,
    ):
        super().__init__(dim, vocab, error=error, variates=variates, parts=parts, rngs=rngs)
        if not 0 < share <= 1:
            raise UserError(f'share of SparseAffineHead is {share}; it must be above 0 and at most 1')
        if power <= 0 or strength < 0:
            raise UserError(
                f'power and strength of SparseAffineHead are {power} and {strength}; they must be above 0, and at '
                'least 0'
            )
        self.share, self.strength, self.power = share, strength, power

    def penalty(self) -> Float[Array, ''] | None:
        """See the class."""
        if self.share == 1:
            return None
        sizes = (jnp.abs(self.weight[...]) + SMALLEST) ** (1 / self.power)
        return self.strength * (1 / self.share - 1) * jnp.mean(2 * jax.nn.sigmoid(self.power * sizes) - 1)
