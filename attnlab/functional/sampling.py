"""Sampling from logits."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def sample(logits: Float[Array, 'b o'], key: jax.Array, *, temperature: float, top_p: float) -> Int[Array, ' b']:
    """Draws from `softmax(logits / temperature)` within the nucleus: the likeliest tokens that together reach `top_p`.

    Temperature 0 takes the likeliest. Source: Holtzman et al., "The Curious Case of Neural Text Degeneration", ICLR
    2020.
    """
    if temperature == 0.0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / temperature
    if top_p < 1.0:
        logits = jnp.where(nucleus(logits, top_p), logits, -jnp.inf)
    return jax.random.categorical(key, logits).astype(jnp.int32)


def nucleus(logits: Float[Array, 'b o'], top_p: float) -> Bool[Array, 'b o']:
    """Which tokens belong to the smallest set of likeliest tokens whose probability reaches `top_p`; at least one."""
    order = jnp.argsort(-logits, axis=-1)
    weights = jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), order, axis=-1)
    before = jnp.cumsum(weights, axis=-1) - weights
    kept = before < top_p
    return jnp.take_along_axis(kept, jnp.argsort(order, axis=-1), axis=-1)
