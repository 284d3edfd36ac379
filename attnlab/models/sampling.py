"""Text from a trained model: prefill, then one token at a time."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional.sampling import Sampling
from attnlab.models.predictor import Predictor
from attnlab.models.thoughts import check_thinks, thought
from attnlab.typing import State


def generate(
    model: Predictor,
    prompt: np.ndarray,
    steps: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    thoughts: int = 0,
    seed: int = 0,
    jit: Callable[..., Any] = jax.jit,
) -> Iterator[int]:
    """Yields `steps` tokens that continue `prompt` (int `t`, not empty), each sampled when it is requested.

    The prompt is read in one pass; each token then costs one step of every mixer. Before the first there are
    `thoughts` mixtures of what might come next (`attnlab.models.thoughts`), which are read but not yielded.
    Temperature 0 takes the most likely token; `Sampling` says what the others restrict. The tokens are a pure function
    of the arguments. `jit` compiles the steps; use that of a run's `Setup`, which knows its precision and its mesh.
    Raises `UserError` for a model that cannot generate, and for a negative number of thoughts.
    """
    if thoughts < 0:
        raise UserError(f'thoughts is {thoughts}; it must be at least 0')
    if not model.decodes:
        raise UserError('this model does not read tokens one by one, so it cannot generate')
    graphdef, variables = nnx.split(model)
    tokens = jnp.asarray(prompt, jnp.int32)[None]
    state = model.init_state(1, len(prompt) + thoughts + steps)
    draw = jit(functools.partial(_draw, graphdef, sampling=Sampling(temperature, top_k, top_p, min_p)))
    run = jit(functools.partial(advance, graphdef), donate_argnums=2)
    key = jax.random.key(seed)
    position = 0
    if thoughts:
        check_thinks(model)
        think = jit(functools.partial(_thought, graphdef), donate_argnums=2)
    for index in range(steps):
        hidden, state = run(variables, tokens, state, jnp.int32(position))
        position += tokens.shape[1]
        for _ in range(thoughts if index == 0 else 0):
            hidden, state = think(variables, hidden, state, jnp.int32(position))
            position += 1
        tokens = draw(variables, hidden, jax.random.fold_in(key, index))[:, None]
        yield int(tokens[0, 0])


def _thought(
    graphdef: nnx.GraphDef, variables: nnx.State, hidden: Float[Array, 'b d'], state: State, position: jax.Array
) -> tuple[Float[Array, 'b d'], State]:
    """The hidden state after a thought, and the state of the mixers after it."""
    return thought(nnx.merge(graphdef, variables), hidden, state, position)


def _draw(
    graphdef: nnx.GraphDef,
    variables: nnx.State,
    hidden: Float[Array, 'b d'],
    key: jax.Array,
    *,
    sampling: Sampling,
) -> Int[Array, ' b']:
    """The next tokens; a head draws them itself where it can, which may be cheaper than all of its logits."""
    model = nnx.merge(graphdef, variables)
    if sampling.top_k is None and sampling.min_p == 0.0:
        return model.sample(hidden, key, temperature=sampling.temperature, top_p=sampling.top_p)
    return sampling.draw(model.logits(hidden), key)


def advance(
    graphdef: nnx.GraphDef, variables: nnx.State, tokens: Int[Array, 'b t'], state: State, position: jax.Array
) -> tuple[Float[Array, 'b d'], State]:
    """The hidden state after the last of `tokens`, and the state of the mixers after them."""
    model = nnx.merge(graphdef, variables)
    ctx = Context.full(*tokens.shape, start=position)
    hidden, state = model.hidden(tokens, ctx, state)
    return hidden[:, -1], state
