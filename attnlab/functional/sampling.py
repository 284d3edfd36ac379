"""Sampling from logits."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attnlab.errors import UserError
from attnlab.signature import checked_fields

COLDEST = 1e-30
"""The least temperature that logits are divided by, which would give no numbers; those below take the likeliest."""


@checked_fields
@dataclasses.dataclass(frozen=True)
class Sampling:
    """From which distribution a token is drawn: `softmax(logits / temperature)`, restricted to some tokens.

    The restrictions are taken one after the other, each of what is left: `top_k`, `top_p`, `min_p`.

    Attributes:
      temperature: 0 takes the likeliest.
      top_k: as many of the likeliest; `None`: all. Of ties the first.
      top_p: the fewest of the likeliest that together reach this probability (Holtzman et al. 2020,
        https://arxiv.org/abs/1904.09751).
      min_p: those with at least this share of the probability of the likeliest (Nguyen et al. 2024,
        https://arxiv.org/abs/2407.01082).
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        """Raises `UserError` for a temperature below 0, and what is no probability."""
        if self.temperature < 0:
            raise UserError(f'temperature is {self.temperature}; it must be 0 or above')
        if not 0 < self.top_p <= 1:
            raise UserError(f'top_p is {self.top_p}; it must be a probability above 0, up to 1')
        if not 0 <= self.min_p <= 1:
            raise UserError(f'min_p is {self.min_p}; it must be a share from 0 to 1')

    def restricted(self, logits: Float[Array, 'b o']) -> Float[Array, 'b o']:
        """The logits of the distribution; minus infinity for what is not drawn."""
        if self.temperature < COLDEST:
            return jnp.where(jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1]) > 0, 0.0, -jnp.inf)
        logits = logits / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            _, chosen = jax.lax.top_k(logits, self.top_k)
            kept = jnp.zeros(logits.shape, bool).at[jnp.arange(len(logits))[:, None], chosen].set(True)
            logits = jnp.where(kept, logits, -jnp.inf)
        if self.top_p < 1.0:
            logits = jnp.where(nucleus(logits, self.top_p), logits, -jnp.inf)
        if self.min_p > 0.0:
            least = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(self.min_p)
            logits = jnp.where(logits >= least, logits, -jnp.inf)
        return logits

    def draw(self, logits: Float[Array, 'b o'], key: jax.Array) -> Int[Array, ' b']:
        """A token a row."""
        if self.temperature < COLDEST:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return jax.random.categorical(key, self.restricted(logits)).astype(jnp.int32)


UNRESTRICTED = Sampling()
"""The model's own distribution."""


def sample(logits: Float[Array, 'b o'], key: jax.Array, *, temperature: float, top_p: float) -> Int[Array, ' b']:
    """Draws from `softmax(logits / temperature)` within the nucleus; see `Sampling`."""
    return Sampling(temperature=temperature, top_p=top_p).draw(logits, key)


def nucleus(logits: Float[Array, 'b o'], top_p: float) -> Bool[Array, 'b o']:
    """Which tokens belong to the smallest set of likeliest tokens whose probability reaches `top_p`; at least one."""
    order = jnp.argsort(-logits, axis=-1)
    weights = jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), order, axis=-1)
    before = jnp.cumsum(weights, axis=-1) - weights
    kept = before < top_p
    return jnp.take_along_axis(kept, jnp.argsort(order, axis=-1), axis=-1)
