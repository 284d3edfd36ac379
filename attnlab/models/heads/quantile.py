"""Heads of real numbers that predict distributions, by quantiles or by a density, and what may be asked of them."""

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float

from attnlab.errors import UserError
from attnlab.models.heads.head import Head, wide
from attnlab.nn.projections import Linear

HALVINGS = 40
"""How often the interval that a quantile lies in is halved."""

GREATEST = 80.0
"""Of the logarithm of a deviation, whose exponential is finite in float32."""


@runtime_checkable
class Quantiles(Protocol):
    """A head that can be asked for quantiles."""

    def quantiles(self, hidden: Float[Array, '*b d'], levels: Float[Array, '*b n']) -> Float[Array, '*b n o']:
        """The quantiles of these levels, in float32."""


class QuantileHead(Head):
    """Quantiles of fixed levels, each a linear map; the loss is the mean over levels and outputs of the pinball loss.

        rho_u(e) = e (u - 1[e < 0]),   e the target less the quantile

    Predictions and other quantiles are read after sorting, those between two levels by linear interpolation, those
    beyond the outer ones as these. The prediction is the median. Koenker and Bassett 1978,
    https://doi.org/10.2307/1913643.

    Args:
      dim: model width.
      vocab: number of outputs.
      levels: ascending, each between 0 and 1.
      rngs: draws the parameters.

    Raises `UserError` for other levels.
    """

    degree = 1

    def __init__(
        self,
        dim: int,
        vocab: int,
        *,
        levels: tuple[float, ...] = (0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98),
        rngs: nnx.Rngs,
    ):
        if not levels or list(levels) != sorted(set(levels)) or not 0 < levels[0] <= levels[-1] < 1:
            raise UserError(f'levels is {levels}; they must ascend, each between 0 and 1')
        self.outputs, self.levels = vocab, tuple(levels)
        self.linear = Linear(dim, vocab * len(levels), bias=True, axes=('embed', None), group='embedding', rngs=rngs)

    def losses(self, hidden: Float[Array, '*b d'], targets: Float[Array, '*b o']) -> Float[Array, '*b']:
        """The mean pinball loss."""
        found = self._found(hidden)
        apart = wide(targets)[..., None] - found
        levels = jnp.asarray(self.levels, apart.dtype).reshape((1,) * (apart.ndim - 1) + (-1,))
        return jnp.mean(apart * (levels - (apart < 0).astype(apart.dtype)), axis=(-2, -1))

    def logits(self, hidden: Float[Array, '*b d']) -> Float[Array, '*b o']:
        """The medians, in float32."""
        half = jnp.full((*hidden.shape[:-1], 1), 0.5, jnp.float32)
        return self.quantiles(hidden, half)[..., 0, :]

    def quantiles(self, hidden: Float[Array, '*b d'], levels: Float[Array, '*b n']) -> Float[Array, '*b n o']:
        """The quantiles of these levels, in float32."""
        found = jnp.sort(self._found(hidden), axis=-1)
        if len(self.levels) == 1:
            return jnp.broadcast_to(found[..., None, :, 0], (*levels.shape, self.outputs))
        knots = jnp.asarray(self.levels, levels.dtype)
        above = jnp.clip(jnp.searchsorted(knots, levels), 1, len(self.levels) - 1)
        share = jnp.clip((levels - knots[above - 1]) / (knots[above] - knots[above - 1]), 0, 1)[..., None]
        low, high = (jnp.take_along_axis(_last_first(found), at[..., None], axis=-2) for at in (above - 1, above))
        return low + share.astype(low.dtype) * (high - low)

    def _found(self, hidden: Float[Array, '*b d']) -> Float[Array, '*b o n']:
        return self.linear(wide(hidden)).reshape(*hidden.shape[:-1], self.outputs, len(self.levels))


class MixtureDensityHead(Head):
    """A mixture of normal densities for every output: `p(y) = sum_i softmax(a)_i N(y; m_i, exp(s_i)^2)`.

    Means, logarithms of deviations (at most 80) and logits are linear maps of the hidden state. The loss is `-log p`,
    the mean over outputs; the prediction is the mean. Bishop 1994, "Mixture density networks",
    https://publications.aston.ac.uk/id/eprint/373.

    Args:
      dim: model width.
      vocab: number of outputs.
      components: of a mixture.
      least: the smallest deviation, so that densities stay bounded.
      rngs: draws the parameters.

    Raises `UserError` for a least deviation that is not positive.
    """

    def __init__(self, dim: int, vocab: int, *, components: int = 3, least: float = 1e-3, rngs: nnx.Rngs):
        if least <= 0:
            raise UserError(f'least is {least}; it must be positive')
        self.outputs, self.components, self.least = vocab, components, least
        self.linear = Linear(dim, vocab * components * 3, bias=True, axes=('embed', None), group='embedding', rngs=rngs)

    def losses(self, hidden: Float[Array, '*b d'], targets: Float[Array, '*b o']) -> Float[Array, '*b']:
        """`-log p(target)`, in nats per output."""
        log_weights, means, deviations = self._mixture(hidden)
        apart = (wide(targets)[..., None] - means) / deviations
        logarithms = log_weights - jnp.square(apart) / 2 - jnp.log(deviations) - np.log(2 * np.pi) / 2
        return -jnp.mean(jax.nn.logsumexp(logarithms, axis=-1), axis=-1)

    def logits(self, hidden: Float[Array, '*b d']) -> Float[Array, '*b o']:
        """The means, in float32."""
        log_weights, means, _ = self._mixture(hidden)
        return jnp.sum(jnp.exp(log_weights) * means, axis=-1)

    def quantiles(self, hidden: Float[Array, '*b d'], levels: Float[Array, '*b n']) -> Float[Array, '*b n o']:
        """The quantiles of these levels, in float32, by halving the interval between those of the components."""
        log_weights, means, deviations = (one[..., None, :, :] for one in self._mixture(hidden))
        weights = jnp.exp(log_weights)
        asked = levels[..., None].astype(means.dtype)
        ends = means + deviations * jax.scipy.special.ndtri(asked)[..., None]
        interval = (jnp.min(ends, axis=-1), jnp.max(ends, axis=-1))

        def halve(_: Any, interval: tuple[Array, Array]) -> tuple[Array, Array]:
            low, high = interval
            middle = (low + high) / 2
            reached = jnp.sum(weights * jax.scipy.special.ndtr((middle[..., None] - means) / deviations), axis=-1)
            return jnp.where(reached < asked, middle, low), jnp.where(reached < asked, high, middle)

        low, high = jax.lax.fori_loop(0, HALVINGS, halve, interval)
        return (low + high) / 2

    def _mixture(self, hidden: Float[Array, '*b d']) -> tuple[Array, Array, Array]:
        """Logarithms of weights, which may be zero in float32, means and deviations, `*b o n`."""
        found = self.linear(wide(hidden)).reshape(*hidden.shape[:-1], self.outputs, 3, self.components)
        deviations = jnp.exp(jnp.minimum(found[..., 2, :], GREATEST)) + self.least
        return jax.nn.log_softmax(found[..., 0, :]), found[..., 1, :], deviations


def _last_first(x: Float[Array, '*b o n']) -> Float[Array, '*b n o']:
    return jnp.swapaxes(x, -1, -2)
