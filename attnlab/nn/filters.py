"""Filters of long convolutions that are functions of the lag."""

import itertools
import math

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from attnlab.errors import UserError
from attnlab.module import Module
from attnlab.nn.parameter import param
from attnlab.nn.projections import Linear


class ImplicitFilter(Module):
    """A small sine network of the lag, under a window that decays: Hyena's filters.

        k_j = exp(-|a| j / length) W_3 sin(w W_2 sin(w (W_1 e_j + c_1)) + ...)

    `e_j` is the lag over `length`, and cosines and minus sines of `bands` frequencies of its angle `2 pi j / length`;
    `w`, one a unit, is learned and starts at `frequency`. The decays `a` are constants, spaced evenly over the
    channels so that at `length` 0.01 is left after 0.3 to 1.5 of it. Lags beyond `length` are served. In float32 or
    better. The network is of the group `dynamics`, as the released code trains it at a low rate, without weight decay.
    Poli et al. 2023, https://arxiv.org/abs/2302.10866.

    Args:
      dim: channels.
      length: the unit of lags, the length of rows in training.
      hidden: units of the network.
      inner: hidden maps between the first and the last.
      bands: frequencies.
      frequency: where `w` starts.
      rngs: draws the parameters.
    """

    def __init__(
        self,
        dim: int,
        *,
        length: int,
        hidden: int = 64,
        inner: int = 2,
        bands: int = 1,
        frequency: float = 1.0,
        rngs: nnx.Rngs,
    ):
        if frequency <= 0:
            raise UserError(f'the frequency of ImplicitFilter is {frequency}; it must be above 0')
        self.length, self.bands, self.dim = length, bands, dim
        sizes = (1 + 2 * bands, *(hidden,) * (inner + 1))
        self.hidden = nnx.List(
            Linear(a, b, bias=True, axes=(None, None), group='dynamics', rngs=rngs)
            for a, b in itertools.pairwise(sizes)
        )
        start = nnx.initializers.constant(frequency)
        self.frequency = param(start, (hidden,), axes=(None,), group='dynamics', rngs=rngs)
        self.last = Linear(hidden, dim, axes=(None, 'mlp'), group='dynamics', rngs=rngs)

    def __call__(self, lags: int, dtype: DTypeLike) -> Float[Array, 'w d']:
        """Returns the filter of `lags` lags."""
        place = jnp.arange(lags, dtype=dtype)[:, None] / self.length
        angle = 2 * math.pi * place * jnp.linspace(1e-4, max(self.bands - 1, 1e-4), self.bands, dtype=dtype)[None]
        x = jnp.concatenate([place, jnp.cos(angle), -jnp.sin(angle)], axis=-1)
        frequency = self.frequency[...].astype(dtype)[None]
        for linear in self.hidden:
            x = jnp.sin(frequency * linear(x))
        rates = np.abs(np.linspace(math.log(0.01) / 1.5, math.log(0.01) / 0.3, self.dim))
        return self.last(x) * jnp.exp(-place * jnp.asarray(rates, dtype)[None])
