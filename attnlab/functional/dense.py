"""Attention with a weight map that needs full rows of scores: memory grows with the product of the lengths."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from attnlab.functional.precision import wide_dtype
from attnlab.typing import DropoutKey, Heads, Keys, Queries, Values


class ScoreRows(NamedTuple):
    """The scores of a call, as full rows, in float32 or better.

    Attributes:
      scores: zero where not visible.
      visible: whether the query may see the key.
      limits: the scores that keys of the same norm would have in the query's direction, `scale |q_i| |k_j| + bias_ij`.
      own: which of the keys is that of the query's own token, visible or not.
    """

    scores: Float[Array, 'b h t s']
    visible: Bool[Array, 'b h t s']
    limits: Float[Array, 'b h t s']
    own: Int[Array, 't']


DenseMap = Callable[[ScoreRows, DropoutKey | None], Float[Array, 'b h t s']]
"""A map from rows, and in training a random key, to weights, zero where not visible."""


def dense_attention(
    weigh: DenseMap,
    q: Queries,
    k: Keys,
    v: Values,
    *,
    visible: Bool[Array, 'b t s'],
    own: Int[Array, 't'],
    bias: Float[Array, '1 _ t s'] | None,
    temperature: Float[Array, 'b t h'] | None,
    key: DropoutKey | None,
) -> Heads:
    """Returns `o_i = sum_j w_ij v_j`, with weights from the scores `temperature_i q_i . k_j / sqrt(k) + bias_ij`."""
    dtype = wide_dtype(q.dtype)
    repeats = q.shape[2] // k.shape[2]
    wide_q, wide_k = q.astype(dtype) * q.shape[-1] ** -0.5, jnp.repeat(k, repeats, axis=2).astype(dtype)
    if temperature is not None:
        wide_q = wide_q * temperature.astype(dtype)[..., None]
    scores = jnp.einsum('bthk,bshk->bhts', wide_q, wide_k)
    lengths = (jnp.moveaxis(_length(x), 1, 2) for x in (wide_q, wide_k))
    limits = jnp.einsum('bht,bhs->bhts', *lengths)
    if bias is not None:
        wide_bias = jnp.broadcast_to(bias.astype(dtype), scores.shape)
        scores, limits = scores + wide_bias, limits + wide_bias
    seen = jnp.broadcast_to(visible[:, None], scores.shape)
    weights = weigh(ScoreRows(jnp.where(seen, scores, 0), seen, limits, own), key)
    return jnp.einsum('bhts,bshv->bthv', weights.astype(v.dtype), jnp.repeat(v, repeats, axis=2))


def _length(x: Float[Array, 'b t h k']) -> Float[Array, 'b t h']:
    """The Euclidean norm, whose gradient at zero is zero."""
    square = jnp.sum(jnp.square(x), axis=-1)
    return jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0)


@jax.custom_jvp
def softmax(scores: Float[Array, '*b s'], visible: Bool[Array, '*#b #s']) -> Float[Array, '*b s']:
    """Returns the softmax over visible keys, zero elsewhere and in rows without any.

    Its derivative is made of the weights alone, which are all that is kept for it.
    """
    visible = jnp.broadcast_to(visible, scores.shape)
    highest = jnp.max(jnp.where(visible, scores, jnp.finfo(scores.dtype).min), axis=-1, keepdims=True)
    numerators = jnp.where(visible, jnp.exp(jnp.where(visible, scores - highest, 0)), 0)
    total = jnp.sum(numerators, axis=-1, keepdims=True)
    return numerators / jnp.where(total > 0, total, 1)


@softmax.defjvp
def _derivative(primals: tuple[Array, Array], tangents: tuple[Any, Any]) -> tuple[Array, Array]:
    """The weights, and `w_s (dx_s - sum_j w_j dx_j)`."""
    weights = softmax(*primals)
    moved = weights * tangents[0]
    return weights, moved - weights * jnp.sum(moved, axis=-1, keepdims=True)
