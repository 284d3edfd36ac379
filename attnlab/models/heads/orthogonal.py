"""A head that forecasts in the directions in which the steps of the horizon are not correlated."""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float

from attnlab.errors import UserError
from attnlab.models.heads.head import Head, wide
from attnlab.nn.activations import gelu_exact
from attnlab.nn.parameter import buffer, param
from attnlab.nn.projections import Linear
from attnlab.nn.series_windows import Basis


class OrthogonalHead(Head):
    """`channels` forecasts in the coordinates of a basis, turned back to steps and joined by a small network.

        Z = W_z h + b_z                      channels o
        Y = Z Q + D_v                        of variate v, D starting at zero
        y = W_2 gelu(W_1 vec(Y^T) + b_1) + b_2

    The loss is the mean over steps of `s^-decay |y_s - target_s|`, s from 1 on. Yue et al. 2025,
    https://arxiv.org/abs/2505.08550.

    Args:
      dim: model width.
      vocab: number of steps.
      basis: gives `Q`, as `basis.rows(vocab)`.
      variates: the last axis but one of hidden states.
      channels: forecasts that are joined.
      hidden: width of the network; `None`: that of the model.
      decay: how fast later steps weigh less; 0: all weigh the same.
      rngs: draws the parameters.

    Raises `UserError` for hidden states of other variates, and for a negative decay.
    """

    degree = 1

    def __init__(
        self,
        dim: int,
        vocab: int,
        *,
        basis: Basis,
        variates: int,
        channels: int = 16,
        hidden: int | None = None,
        decay: float = 0.5,
        rngs: nnx.Rngs,
    ):
        if decay < 0:
            raise UserError(f'decay of OrthogonalHead is {decay}; it must be at least 0')
        hidden = dim if hidden is None else hidden
        self.outputs, self.variates, self.channels, self.decay = vocab, variates, channels, decay
        self.basis = buffer(basis.rows(vocab), axes=(None, None))
        self.coordinates = Linear(dim, channels * vocab, bias=True, axes=('embed', None), rngs=rngs)
        self.shift = param(nnx.initializers.zeros, (variates, vocab), axes=(None, None), group='vector', rngs=rngs)
        self.join = Linear(vocab * channels, hidden, bias=True, axes=(None, 'mlp'), rngs=rngs)
        self.steps = Linear(hidden, vocab, bias=True, axes=('mlp', None), group='embedding', rngs=rngs)

    def losses(self, hidden: Float[Array, '*b d'], targets: Float[Array, '*b o']) -> Float[Array, '*b']:
        """The weighted mean of absolute errors."""
        apart = jnp.abs(self.logits(hidden) - wide(targets))
        weights = np.arange(1, self.outputs + 1) ** -self.decay
        return jnp.mean(apart * jnp.asarray(weights, apart.dtype).reshape((1,) * (apart.ndim - 1) + (-1,)), axis=-1)

    def logits(self, hidden: Float[Array, '*b d']) -> Float[Array, '*b o']:
        """The forecasts, in float32."""
        if hidden.shape[-2] != self.variates:
            raise UserError(f'variates of the head is {self.variates}; the hidden states have {hidden.shape[-2]}')
        hidden = wide(hidden)
        turned = self.coordinates(hidden).reshape(*hidden.shape[:-1], self.channels, self.outputs)
        steps = turned @ self.basis[...].astype(hidden.dtype)
        shift = self.shift[...].astype(hidden.dtype)[:, None]
        steps = steps + jnp.broadcast_to(shift, steps.shape)
        joined = jnp.swapaxes(steps, -1, -2).reshape(*hidden.shape[:-1], self.outputs * self.channels)
        return self.steps(gelu_exact(self.join(joined)))
