"""Losses, one number a token."""

from jaxtyping import Array, Float

import pallas_kernels
from attnlab.typing import PerToken, Sequence, Tokens


def next_token_loss(hidden: Sequence, embedding: Float[Array, 'o d'], targets: Tokens) -> PerToken:
    """Cross-entropy in nats, `-log softmax(embedding hidden)[target]`, without storing all logits at once."""
    b, t, d = hidden.shape
    losses = pallas_kernels.cross_entropy(
        hidden.reshape(b * t, d), embedding.astype(hidden.dtype), targets.reshape(b * t)
    )
    return losses.reshape(b, t)
