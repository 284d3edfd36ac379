"""What is fitted before the first step: to rows of training, and then not trained; or to weights of another run."""

import dataclasses
from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx

from attnlab.blocks.block import mixer_of, past_prelude, steps
from attnlab.context import Context
from attnlab.models.layers import entered, layers, stacks
from attnlab.models.stack import Stack
from attnlab.random import key_for
from attnlab.tasks.given import given
from attnlab.tasks.task import Batch
from attnlab.train.rows import rows_of
from attnlab.train.setup import Setup
from attnlab.train.state import TrainState, split
from attnlab.typing import Features, Sequence, Tokens

ROWS = 8
"""How many rows of training hashes are fitted to."""


@runtime_checkable
class OfWeights(Protocol):
    """A module with parameters that begin as a function of others, such as the steps that weights are rounded to."""

    def fit_to_weights(self) -> Iterable[nnx.Param]:
        """Sets them, in place, and returns them."""


@runtime_checkable
class OfRows(Protocol):
    """A mixer that is fitted to rows of training, such as by its hash."""

    def fit(self, x: Sequence, ctx: Context, key: jax.Array) -> None:
        """Fits it in place to what its block gives it, unless it has been fitted before."""


def fit_to_weights(model: Any) -> None:
    """Sets what begins as a function of weights, in place; in a `LinearStack` all layers begin with that of the base.

    A slope of weights is no weight, and a function of it not the slope of that function.
    """
    modules = [module for _, module in nnx.iter_modules(model) if isinstance(module, OfWeights)]
    found = [variable for module in modules for variable in module.fit_to_weights()]
    for stack in stacks(model):
        for _, part in nnx.iter_graph(stack):
            if any(part is variable for variable in found):
                stack.level(part)


def fitted_state(setup: Setup, state: TrainState) -> TrainState:
    """Returns the state before the first step with all that is fitted: to the weights, and to rows of training."""
    return with_hashes_fitted(setup, with_weights_fitted(setup, state))


def with_weights_fitted(setup: Setup, state: TrainState) -> TrainState:
    """Returns the state with what begins as a function of weights set anew, where these are those of another run."""
    modules = [module for _, module in nnx.iter_modules(setup.model)]
    if setup.start is None or not any(isinstance(module, OfWeights) for module in modules):
        return state
    shardings = jax.tree.map(lambda leaf: leaf.sharding, setup.abstract.params)

    def run(variables: nnx.State) -> nnx.State:
        model = nnx.merge(setup.graphdef, variables)
        fit_to_weights(model)
        return split(model)[1]

    return dataclasses.replace(state, params=setup.jit(run, out_shardings=shardings)(state.variables))


def with_hashes_fitted(setup: Setup, state: TrainState) -> TrainState:
    """Returns the state before the first step with hashes fitted to rows spread over the training split.

    Those that have been fitted stay; a model without hashes, or with several stacks, is returned unchanged. It is a
    function of the config alone. Liu et al. 2022, https://arxiv.org/abs/2209.09004.
    """
    stack = getattr(setup.model, 'stack', None)
    if not isinstance(stack, Stack) or not any(isinstance(mixer_of(block), OfRows) for block in stack.blocks):
        return state
    source = setup.task.source('train', setup.length)
    count = min(ROWS, len(source))
    (batch,) = rows_of(setup, 'train', count, at_once=count)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, setup.abstract.buffers)

    def run(variables: nnx.State, batch: Batch) -> nnx.State:
        model = nnx.merge(setup.graphdef, variables)
        fit_hashes(model, *given(setup.task, batch), key_for(setup.seed, 0, 'fit'))
        return split(model)[2]

    return dataclasses.replace(state, buffers=setup.jit(run, out_shardings=shardings)(state.variables, batch))


def fit_hashes(model: Any, tokens: Tokens | Features, ctx: Context, key: jax.Array) -> None:
    """Fits the hashes of a model with one stack, in place, layer by layer, to what those before give.

    Raises `UserError` where layers have none of their own.
    """
    model.stack.check_own()
    streams, ctx = entered(model, tokens, ctx)
    found = []
    for index, block in layers(model):
        mixer = mixer_of(block)
        if isinstance(mixer, OfRows):
            x = past_prelude(block, 'mixer', next(iter(steps(block, streams, ctx))).normed, ctx)
            mixer.fit(x, ctx, jax.random.fold_in(key, index))
        found.append(nnx.state(block, nnx.Not(nnx.Param)))
        own, ctx = model.stack.told(index, block, streams, ctx)
        *_, last = steps(block, streams, own)
        streams = last.streams
    for block, own in model.stack.pattern():
        nnx.update(block, jax.tree.map(lambda *leaves: jnp.stack(leaves), *(found[layer] for layer in own)))
