"""Sizes of a built model: parameters, bytes of state, operations of a training step, milliseconds of decoding.

Nothing is declared. Parameters are counted in the tree, states in the arrays of `init_state`, floating-point operations
from the shapes in the training step, and milliseconds on the clock.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from attnlab.context import Context
from attnlab.errors import UserError, nearest
from attnlab.train.cost import flops_per_token, parameters, state_bytes
from attnlab.train.setup import Setup

Measure = Callable[[Setup], float]

REPEATS = 20
"""Decoding steps that are timed; the median counts."""


def measure(text: str) -> Measure:
    """The measure that `--by` names: params, state_bytes@TOKENS, train_flops or decode_ms.

    Raises `UserError` for any other.
    """
    name, at, length = text.partition('@')
    if name == 'state_bytes' and at and length.isdecimal() and int(length) > 0:
        return lambda setup: float(state_bytes(setup, int(length)))
    if text in MEASURES:
        return MEASURES[text]
    raise UserError(f'--by is {text!r}{nearest(text, [*MEASURES, "state_bytes@8192"])}')


def decode_ms(setup: Setup) -> float:
    """Milliseconds of one step of decoding one sequence, at the length trained on, on the device at hand.

    Raises `UserError` for a model that does not read tokens one by one.
    """
    if not setup.model.decodes:
        raise UserError('decode_ms is for models that decode tokens one by one; this one does not')
    variables = setup.initialize().variables
    state = nnx.merge(setup.graphdef, variables).init_state(1, setup.length)
    token = jnp.zeros((1, 1), jnp.int32)

    def step(variables: nnx.State, state: Any, position: jax.Array) -> tuple[jax.Array, Any]:
        model = nnx.merge(setup.graphdef, variables)
        hidden, state = model.hidden(token, Context.full(1, 1, start=position), state)
        return model.logits(hidden), state

    decode = setup.jit(step, donate_argnums=1)
    seconds = []
    for position in range(min(REPEATS, setup.length)):
        began = time.perf_counter()
        logits, state = decode(variables, state, jnp.int32(position))
        jax.block_until_ready(logits)
        seconds.append(time.perf_counter() - began)
    return 1000 * float(np.median(seconds[1:] or seconds))


MEASURES: dict[str, Measure] = {
    'params': lambda setup: float(parameters(setup)),
    'train_flops': flops_per_token,
    'decode_ms': decode_ms,
}
