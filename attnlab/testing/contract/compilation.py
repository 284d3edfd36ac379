"""Nothing is compiled twice."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from attnlab.context import Context
from attnlab.testing.contract.subject import Subject, full, noted, require
from attnlab.typing import State


def check_compiles_once(subject: Subject) -> None:
    """Mixers built alike share one compilation, and a second call with other numbers does not compile again."""
    call, traces = _counted()
    for seed in (0, 1):
        graphdef, params = nnx.split(subject.fresh(seed))
        with noted('compiles once: static attributes must hash and compare by value', (TypeError, ValueError)):
            hash(graphdef)
            for _ in range(2):
                call.trace(graphdef, params, subject.x(seed=seed), full(), None)
    require(len(traces) == 1, f'compiles once: two mixers built alike were traced {len(traces)} times')


def check_streaming_compiles_once(subject: Subject) -> None:
    """A step does not compile again: the new state has the same structure, shapes and types as the old one."""
    call, traces = _counted()
    graphdef, params = nnx.split(subject.fresh())
    state = subject.mixer.init_state(2, subject.x().shape[1], jnp.float32)
    for step in range(4):
        ctx = Context.full(2, 1, start=jnp.int32(step))
        _, state = call(graphdef, params, subject.x(length=1, seed=step), ctx, state)
    require(len(traces) == 1, f'streaming compiles once: 4 steps were traced {len(traces)} times')


def _counted() -> tuple[Any, list[None]]:
    """The mixer of a graph definition as a jitted function, and a list that grows by one with every trace."""
    traces: list[None] = []

    @functools.partial(jax.jit, static_argnums=0)
    def call(graphdef: Any, params: Any, x: Array, ctx: Context, state: State | None) -> tuple[Array, State | None]:
        traces.append(None)
        return nnx.merge(graphdef, params)(x, ctx, state)

    return call, traces
