"""Text from a trained model: prefill, then one token at a time."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from attnlab.context import Context
from attnlab.models.model import LanguageModel
from attnlab.typing import State


def generate(
    model: LanguageModel, prompt: np.ndarray, steps: int, *, temperature: float = 1.0, top_p: float = 1.0, seed: int = 0
) -> Iterator[int]:
    """Yields `steps` tokens that go on from `prompt` (int `t`, not empty), each drawn as soon as it is asked for.

    The prompt is read in one pass; each token then costs one step of every mixer, whatever came before.
    Temperature 0 takes the likeliest token. The tokens are a pure function of the arguments.
    """
    graphdef, params = nnx.split(model)
    tokens = jnp.asarray(prompt, jnp.int32)[None]
    state = model.init_state(1, len(prompt) + steps)
    draw = jax.jit(functools.partial(sample, temperature=temperature, top_p=top_p))
    advance = jax.jit(functools.partial(_advance, graphdef), donate_argnums=2)
    key = jax.random.key(seed)
    position = 0
    for index in range(steps):
        logits, state = advance(params, tokens, state, jnp.int32(position))
        position += tokens.shape[1]
        tokens = draw(logits, jax.random.fold_in(key, index))[:, None]
        yield int(tokens[0, 0])


def sample(logits: Float[Array, 'b o'], key: jax.Array, *, temperature: float, top_p: float) -> Int[Array, ' b']:
    """Draws from `softmax(logits / temperature)` cut to its nucleus: the likeliest tokens that together reach `top_p`.

    Source: Holtzman et al., "The Curious Case of Neural Text Degeneration", ICLR 2020.
    """
    if temperature == 0.0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / temperature
    if top_p < 1.0:
        logits = jnp.where(nucleus(logits, top_p), logits, -jnp.inf)
    return jax.random.categorical(key, logits).astype(jnp.int32)


def nucleus(logits: Float[Array, 'b o'], top_p: float) -> Array:
    """Which tokens belong to the smallest set of likeliest tokens whose probability reaches `top_p`; at least one."""
    order = jnp.argsort(-logits, axis=-1)
    weights = jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), order, axis=-1)
    before = jnp.cumsum(weights, axis=-1) - weights
    kept = before < top_p
    return jnp.take_along_axis(kept, jnp.argsort(order, axis=-1), axis=-1)


def _advance(
    graphdef: nnx.GraphDef, params: nnx.State, tokens: Int[Array, 'b t'], state: State, position: jax.Array
) -> tuple[Float[Array, 'b o'], State]:
    """Logits after the last of `tokens`, and the state after them."""
    model = nnx.merge(graphdef, params)
    ctx = Context.full(*tokens.shape, start=position)
    hidden, state = model.hidden(tokens, ctx, state)
    return model.logits(hidden[:, -1:])[:, 0], state
