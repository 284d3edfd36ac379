"""Heads of real numbers that predict their distribution: atoms on a grid, or quantiles."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float

from attnlab.errors import UserError
from attnlab.functional.precision import wide_dtype
from attnlab.models.heads.head import Head, wide
from attnlab.nn.projections import Linear
from attnlab.typing import DropoutKey

LEVELS = 0x1E7E1
"""Folded into the key of a step, to make the draw differ from those of dropout."""


class AtomsHead(Head):
    """A softmax over `atoms` numbers `z_i` from `low` to `high`, and their mean as the prediction.

    The target lies between two atoms, and is divided between them so that their weighted mean is the target:
    `loss = -sum_i m_i log p_i`, `m_i = max(0, 1 - |y - z_i| / (z_1 - z_0))`; what lies outside is taken for the
    nearest atom.
    Bellemare, Dabney and Munos 2017, https://arxiv.org/abs/1707.06887, whose targets are distributions themselves.

    Args:
      dim: model width.
      vocab: number of outputs, each with a distribution of its own.
      atoms: numbers of the grid.
      low: the least of them.
      high: the greatest.

    Raises `UserError` for fewer than two atoms, and a range that is empty.
    """

    def __init__(
        self, dim: int, vocab: int, *, atoms: int = 51, low: float = -10.0, high: float = 10.0, rngs: nnx.Rngs
    ):
        if atoms < 2 or low >= high:
            raise UserError(f'atoms is {atoms}, from {low} to {high}; it must be at least 2, and low less than high')
        self.outputs, self.atoms, self.low, self.high = vocab, atoms, low, high
        self.linear = Linear(dim, vocab * atoms, bias=True, axes=('embed', None), group='embedding', rngs=rngs)

    def losses(self, hidden: Float[Array, '*b d'], targets: Float[Array, '*b o']) -> Float[Array, '*b']:
        """Cross-entropy in nats between the target's two atoms and the prediction, the mean over outputs."""
        logarithms = jax.nn.log_softmax(self._scores(hidden))
        step = (self.high - self.low) / (self.atoms - 1)
        place = (jnp.clip(wide(targets), self.low, self.high) - self.low) / step
        shares = jnp.maximum(
            1 - jnp.abs(place[..., None] - jnp.arange(self.atoms).reshape((1,) * place.ndim + (-1,))), 0
        )
        return jnp.mean(-jnp.sum(shares * logarithms, axis=-1), axis=-1)

    def logits(self, hidden: Float[Array, '*b d']) -> Float[Array, '*b o']:
        """The means of the predicted distributions, in float32."""
        chances = jax.nn.softmax(self._scores(hidden))
        return chances @ jnp.linspace(self.low, self.high, self.atoms, dtype=chances.dtype)

    def quantiles(self, hidden: Float[Array, '*b d'], levels: Float[Array, '*b n']) -> Float[Array, '*b n o']:
        """The least atoms up to which the probabilities add up to these levels, in float32."""
        reached = jnp.cumsum(jax.nn.softmax(self._scores(hidden)), axis=-1)[..., None, :, :]
        below = jnp.sum(reached < levels[..., None, None], axis=-1)
        step = (self.high - self.low) / (self.atoms - 1)
        return self.low + step * jnp.minimum(below, self.atoms - 1).astype(reached.dtype)

    def _scores(self, hidden: Float[Array, '*b d']) -> Float[Array, '*b o n']:
        return self.linear(wide(hidden)).reshape(*hidden.shape[:-1], self.outputs, self.atoms)


class ImplicitQuantiles(Head):
    """The quantile of any level `tau` between 0 and 1, as a function of the hidden state and of it.

        q(tau) = W ([hidden, 1] * relu(V cos(pi i tau) + c)) + b,   i from 0 to waves - 1

    The one stands for what the paper's hidden layer after the product does: without either an interval between two
    levels is linear in the hidden state, and none has the same width everywhere. Training draws `drawn` levels per
    prediction; the reported loss and the prediction, the mean of quantiles, take `levels` at equal distances. The loss
    is the mean over levels of `|tau - 1[u < 0]| huber(u) / kappa`, with `u` the target less the quantile and `huber(u)`
    half its square up to `kappa`, then linear. It finds quantiles where targets spread over much more than `kappa`, and
    expectiles, which lie closer together, where they do not. Dabney et al. 2018, https://arxiv.org/abs/1806.06923, who
    have a `kappa` of 1 for returns.

    Args:
      dim: model width.
      vocab: number of outputs.
      waves: cosines that a level is described by.
      drawn: levels of a training step.
      levels: levels of everything else.
      kappa: where the loss becomes linear, in units of the targets.
      constant: whether the one is there.
      rngs: draws the parameters.

    Raises `UserError` for a `kappa` that is not positive.
    """

    def __init__(
        self,
        dim: int,
        vocab: int,
        *,
        waves: int = 64,
        drawn: int = 8,
        levels: int = 32,
        kappa: float = 1.0,
        constant: bool = True,
        rngs: nnx.Rngs,
    ):
        if kappa <= 0:
            raise UserError(f'kappa is {kappa}; it must be positive')
        self.waves, self.drawn, self.levels, self.kappa, self.constant = waves, drawn, levels, kappa, constant
        width = dim + int(constant)
        self.level = Linear(waves, width, bias=True, axes=(None, 'embed'), rngs=rngs)
        self.linear = Linear(width, vocab, bias=True, axes=('embed', None), group='embedding', rngs=rngs)

    def losses(self, hidden: Float[Array, '*b d'], targets: Float[Array, '*b o']) -> Float[Array, '*b']:
        """The mean over outputs and levels at equal distances."""
        return self._loss(hidden, targets, self._even(hidden))

    def objective(
        self, hidden: Float[Array, '*b d'], targets: Float[Array, '*b o'], key: DropoutKey
    ) -> Float[Array, '*b']:
        """The same at levels drawn for every prediction."""
        shape = (*hidden.shape[:-1], self.drawn)
        drawn = jax.random.uniform(jax.random.fold_in(key, LEVELS), shape, self._even(hidden).dtype)
        return self._loss(hidden, targets, drawn)

    def logits(self, hidden: Float[Array, '*b d']) -> Float[Array, '*b o']:
        """The means of the quantiles, in float32."""
        return jnp.mean(self.quantiles(hidden, self._even(hidden)), axis=-2)

    def quantiles(self, hidden: Float[Array, '*b d'], levels: Float[Array, '*b n']) -> Float[Array, '*b n o']:
        """The quantiles of these levels, in float32."""
        if self.constant:
            hidden = jnp.concatenate([hidden, jnp.ones_like(hidden[..., :1])], axis=-1)
        orders = np.pi * np.arange(self.waves).reshape((1,) * levels.ndim + (-1,))
        waves = jnp.cos(levels[..., None] * jnp.asarray(orders, levels.dtype))
        described = jax.nn.relu(self.level(waves.astype(hidden.dtype)))
        return self.linear(wide(hidden)[..., None, :] * described)

    def _loss(self, hidden: Array, targets: Array, levels: Array) -> Array:
        apart = wide(targets)[..., None, :] - self.quantiles(hidden, levels)
        size = jnp.abs(apart)
        huber = jnp.where(size <= self.kappa, jnp.square(apart) / 2, self.kappa * (size - self.kappa / 2))
        weights = jnp.abs(levels[..., None] - (apart < 0).astype(levels.dtype))
        return jnp.mean(weights * huber / self.kappa, axis=(-2, -1))

    def _even(self, hidden: Float[Array, '*b d']) -> Float[Array, '*b n']:
        middles = (2 * np.arange(self.levels) + 1) / (2 * self.levels)
        dtype = wide_dtype(hidden.dtype)
        shape = (*hidden.shape[:-1], self.levels)
        return jnp.broadcast_to(jnp.asarray(middles, dtype).reshape((1,) * (hidden.ndim - 1) + (-1,)), shape)
