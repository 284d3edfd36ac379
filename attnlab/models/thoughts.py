"""Continuous chains of thought: what a model would say next, as a mixture of token vectors, is read as its next input.

    a_t = softmax(logits_t),  z_{t+1} = sum_o a_{t,o} E_o

so that several continuations are carried at once, as far as token vectors can be told apart in their sum. Gozeten
et al. 2025, https://arxiv.org/abs/2505.23648.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.models.inputs.embedding import Embedding
from attnlab.typing import Embedded, Sequence, State


def check_thinks(model: Any) -> None:
    """Raises `UserError` for a model that reads no token vectors, or adds positions to them."""
    if not isinstance(getattr(model, 'embedding', None), Embedding) or getattr(model, 'positions', None) is not None:
        raise UserError(
            'thoughts are mixtures of token vectors; this model reads other inputs, or adds positions to them'
        )


def mixture(model: Any, weights: Float[Array, '*b o']) -> Float[Array, '*b d']:
    """The mean of token vectors by weights, in the type of the activations."""
    return (weights @ model.embedding.table[...].astype(weights.dtype)).astype(model.dtype)


def read(model: Any, vectors: Embedded, ctx: Context, state: State | None = None) -> tuple[Sequence, State | None]:
    """The hidden states after vectors in the place of embedded tokens, and the advanced state."""
    x, state = model.stack(vectors, model.layout(ctx), state)
    return model.norm(x), state


def thought(model: Any, hidden: Float[Array, 'b d'], state: State, position: Any) -> tuple[Float[Array, 'b d'], State]:
    """One thought after a hidden state: the hidden state after it, and the advanced state."""
    weights = jax.nn.softmax(model.logits(hidden), axis=-1)
    y, state = read(model, mixture(model, weights)[:, None], Context.full(len(hidden), 1, start=position), state)
    return y[:, -1], state


def thinking(model: Any, tokens: Int[Array, 'b t'], count: int) -> tuple[Float[Array, 'b m d'], Float[Array, 'b n o']]:
    """The hidden states at the last token and after each of `count` thoughts, and what the thoughts were.

    The whole row is read again for every thought, so that it works without states, and can be differentiated.
    """
    check_thinks(model)
    vectors = model.embed(tokens, Context.full(*tokens.shape))
    found, weights = [], []
    for index in range(count + 1):
        hidden, _ = read(model, vectors, Context.full(*vectors.shape[:2]))
        found.append(hidden[:, -1])
        if index < count:
            weights.append(jax.nn.softmax(model.logits(hidden[:, -1]), axis=-1))
            vectors = jnp.concatenate([vectors, mixture(model, weights[-1])[:, None]], axis=1)
    return jnp.stack(found, axis=1), jnp.stack(weights, axis=1)
