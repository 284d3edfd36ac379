"""Hyena against its equations, written as sums over tokens in numpy float64."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.mixers.convolution.hyena import Hyena, block_length
from attnlab.nn.filters import ImplicitFilter
from attnlab.testing.noise import noise, perturbed

DIM = 3

SLOTS, BLOCK = 41, 16
"""A state that ends within its third block."""

DOCUMENTS = ([7, 13, 21], [41], [16, 16, 9], [30, 1, 10])
"""Lengths of those of four rows: they start within blocks and at their edges, and run across none, one and two."""


def numbers(parameter) -> np.ndarray:
    return np.asarray(parameter[...], np.float64)


def linear(module, x: np.ndarray) -> np.ndarray:
    return x @ numbers(module.weight) + (0 if module.bias is None else numbers(module.bias))


def filters(module: ImplicitFilter, lags: int) -> np.ndarray:
    place = np.arange(lags)[:, None] / module.length
    angle = 2 * np.pi * place * np.linspace(1e-4, max(module.bands - 1, 1e-4), module.bands)
    x = np.concatenate([place, np.exp(-1j * angle).real, np.exp(-1j * angle).imag], axis=-1)
    for layer in module.hidden:
        x = np.sin(numbers(module.frequency) * linear(layer, x))
    rates = np.linspace(np.log(0.01) / 1.5, np.log(0.01) / 0.3, module.dim)
    return linear(module.last, x) * np.exp(-place * np.abs(rates))


def by_hand(mixer: Hyena, u: np.ndarray, mixed: np.ndarray) -> np.ndarray:
    *gates, v = np.split(mixed, mixer.order + 1, axis=-1)
    kernels = np.split(filters(mixer.filters, len(u)), mixer.order - 1, axis=-1)
    for j in range(mixer.order - 1):
        v = gates[mixer.order - 1 - j] * v
        read = [sum(kernels[j][lag] * v[t - lag] for lag in range(t + 1)) for t in range(len(u))]
        v = np.asarray(read) + numbers(mixer.direct)[j] * v
    return linear(mixer.output, v * gates[0])


@pytest.mark.parametrize(('order', 'bands'), [(3, 4), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_the_operator_is_that_of_the_paper(order, bands):
    with jax.enable_x64(True):

        def made(channels, *, length, rngs):
            return ImplicitFilter(channels, length=length, hidden=8, bands=bands, frequency=2.0, rngs=rngs)

        mixer = perturbed(Hyena(DIM, order=order, length=10, filters=made, rngs=nnx.Rngs(0)))
        x = noise(1, 12, DIM, dtype=jnp.float64)
        y, _ = jax.jit(mixer)(x, Context.full(1, 12))
        mixed = jax.jit(lambda x: mixer.prelude(mixer.input(x), None)[0])(x)
        np.testing.assert_allclose(y[0], by_hand(mixer, np.asarray(x[0]), np.asarray(mixed[0])), rtol=1e-9, atol=1e-9)


def test_the_whole_network_of_a_filter_is_of_the_group_dynamics():
    """Weights, biases and frequencies, as the released code trains them; the last map has no bias."""
    filters = nnx.to_flat_state(nnx.state(ImplicitFilter(DIM, length=10, rngs=nnx.Rngs(0)), nnx.Param))
    assert len(filters) == 8 and {parameter.get_metadata()['group'] for _, parameter in filters} == {'dynamics'}


def test_a_call_too_long_is_refused_and_a_stream_too_long_is_nan():
    mixer = Hyena(DIM, length=8, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match='9 tokens do not fit in a state of length 8'):
        jax.eval_shape(mixer, noise(1, 9, DIM), Context.full(1, 9), mixer.init_state(1, 8, jnp.float32))
    with pytest.raises(UserError, match='order of Hyena is 1'):
        Hyena(DIM, order=1, rngs=nnx.Rngs(0))
    state = mixer.init_state(1, 3, jnp.float32)
    step = jax.jit(mixer)
    for t in range(4):
        y, state = step(noise(1, 1, DIM), Context.full(1, 1, start=t), state)
        assert bool(jnp.isfinite(y).all()) == (t < 3)


def within(segments: jax.Array) -> Context:
    """The context of these documents, without positions, which Hyena does not read."""
    return Context(jnp.zeros_like(segments), segments)


def stream(mixer: Hyena, x: jax.Array, segments: jax.Array, calls: tuple[int, ...]) -> np.ndarray:
    """What calls of these many tokens give, each in the memory of the state before it."""
    call = jax.jit(lambda x, ctx, state: mixer(x, ctx, state), donate_argnums=2)
    state, outputs, start = mixer.init_state(len(x), x.shape[1], x.dtype), [], 0
    for steps in calls:
        here = slice(start, start + steps)
        y, state = call(x[:, here], within(segments[:, here]), state)
        outputs.append(y)
        start += steps
    assert start == x.shape[1]
    return np.concatenate(outputs, axis=1)


@pytest.mark.parametrize(
    ('order', 'calls'),
    [
        pytest.param(2, (1,) * SLOTS, id='single tokens'),
        pytest.param(3, (1,) * SLOTS, id='of order 3', marks=pytest.mark.slow),
        pytest.param(2, (1, 5, BLOCK, *(1,) * (BLOCK + 2), 1), id='one, five, a block, ones'),
        pytest.param(3, (*(1,) * (BLOCK - 1), 5, *(1,) * 5, BLOCK), id='ones, five, ones, a block'),
    ],
)
def test_a_stream_in_blocks_is_one_pass_over_rows_of_documents(order, calls):
    assert block_length(SLOTS) == BLOCK
    segments = jnp.asarray([np.repeat(np.arange(1, len(each) + 1), each) for each in DOCUMENTS])
    with jax.enable_x64(True):
        mixer = perturbed(Hyena(DIM, order=order, length=SLOTS, rngs=nnx.Rngs(0)))
        x = noise(len(DOCUMENTS), SLOTS, DIM, dtype=jnp.float64)
        whole, _ = jax.jit(mixer)(x, within(segments))
        np.testing.assert_allclose(stream(mixer, x, segments, calls), whole, rtol=1e-10, atol=1e-10)


def test_what_is_not_finite_stays_in_its_document():
    mixer, (first, *_) = Hyena(DIM, length=SLOTS, rngs=nnx.Rngs(0)), DOCUMENTS[0]
    segments = jnp.asarray([np.repeat([1, 2, 3], DOCUMENTS[0])])
    x = noise(1, SLOTS, DIM).at[:, first - 1].set(jnp.nan)
    y = stream(mixer, x, segments, (1,) * SLOTS)
    assert np.isnan(y[0, first - 1]).all() and np.isfinite(y[0, first:]).all()


def outside_branches(jaxpr: Any) -> Iterator[Any]:
    """The equations that run whatever a condition says, without those that call others."""
    for equation in jaxpr.eqns:
        leaves = jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, 'eqns') or hasattr(x, 'jaxpr'))
        inner = [found for found in (getattr(leaf, 'jaxpr', leaf) for leaf in leaves) if hasattr(found, 'eqns')]
        if not inner:
            yield equation
        elif equation.primitive.name != 'cond':
            for each in inner:
                yield from outside_branches(each)


def test_a_step_reads_its_own_block_and_what_is_ahead_is_made_once_a_block():
    mixer, slots = Hyena(DIM, order=3, length=8, rngs=nnx.Rngs(0)), 1000
    width = block_length(slots)
    state = mixer.init_state(1, slots, jnp.float32)
    step = jax.jit(mixer)
    traced = step.trace(noise(1, 1, DIM), Context.full(1, 1), state).jaxpr.jaxpr
    long = [each for each in outside_branches(traced) if any(slots in out.aval.shape for out in each.outvars)]
    assert {each.primitive.name for each in long} == {'dynamic_update_slice'}
    begun = []
    for t in range(2 * width + 1):
        _, state = step(noise(1, 1, DIM), Context.full(1, 1, start=t), state)
        begun.append(int(state.past.begun))
    assert begun == [width * (count // width) for count in range(1, 2 * width + 2)]


def test_blocks_are_powers_of_two_near_the_root_of_s_log_s():
    for slots in (*range(2, 100), 1000, 4096, 16_384, 100_000):
        width = block_length(slots)
        assert width <= slots and width & (width - 1) == 0
        assert 2**-0.51 < width / math.sqrt(slots * math.log2(slots)) < 2**0.51
    assert [block_length(slots) for slots in (0, 1, 16_384)] == [1, 1, 512]


@pytest.mark.slow
def test_in_float32_a_stream_agrees_with_one_pass_over_4096_tokens():
    mixer = Hyena(8, length=4096, rngs=nnx.Rngs(0))
    x, ctx = noise(1, 4096, 8), Context.full(1, 4096)
    y, _ = jax.jit(mixer)(x, ctx)
    # What is read before single tokens ends a block, so that they run over an edge of the next.
    start = 4096 - block_length(4096) - 2
    _, state = jax.jit(mixer)(x[:, :start], Context.full(1, start), mixer.init_state(1, 4096, jnp.float32))

    def token(state, x):
        y, state = mixer(x[:, None], Context.full(1, 1), state)
        return state, y[:, 0]

    _, found = jax.jit(lambda state, x: jax.lax.scan(token, state, x))(state, jnp.swapaxes(x[:, start:], 0, 1))
    difference = jnp.abs(jnp.swapaxes(found, 0, 1) - y[:, start:])
    assert float(jnp.max(difference)) < 1e-4 * float(jnp.max(jnp.abs(y)))
