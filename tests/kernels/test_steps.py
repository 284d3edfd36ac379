"""A step alone, as decoding takes them: what it computes, and how often it goes over the state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import tiling

B, H, K, V = 4, 4, 32, 64
N = 16
VECTOR = {'q': (B, 1, H, K), 'k': (B, 1, H, K), 'v': (B, 1, H, V)}
STATE = (B, H, K, V)
CALLS = {
    'linear_attention': {**VECTOR, 'log_decay': (B, 1, H), 'state': STATE},
    'linear_attention, vector': {**VECTOR, 'log_decay': (B, 1, H, K), 'state': STATE},
    'delta_rule': {**VECTOR, 'beta': (B, 1, H), 'log_decay': (B, 1, H), 'state': STATE},
    'delta_rule, vector': {**VECTOR, 'beta': (B, 1, H), 'log_decay': (B, 1, H, K), 'state': STATE},
    'diagonal_low_rank': {**VECTOR, 'a': (B, 1, H, K), 'b': (B, 1, H, K), 'log_decay': (B, 1, H, K), 'state': STATE},
    'selective_scan': {
        'x': (B, 1, 128),
        'dt': (B, 1, 128),
        'A': (128, N),
        'B': (B, 1, N),
        'C': (B, 1, N),
        'state': (B, 128, N),
    },
}


def drawn(name):
    """Numbers of moderate size; decays and rates below zero, strengths and steps above."""
    found = {}
    for i, (argument, shape) in enumerate(CALLS[name].items()):
        numbers = 0.3 * jax.random.normal(jax.random.key(i), shape)
        if argument in ('log_decay', 'A'):
            numbers = -jnp.abs(numbers)
        found[argument] = jnp.abs(numbers) if argument in ('beta', 'dt') else numbers
    return found


@pytest.fixture(autouse=True, params=['in the caches', 'in memory'])
def place(request, monkeypatch):
    """Where a CPU is taken to have the state."""
    if request.param == 'in memory':
        monkeypatch.setattr(tiling, 'CPU_CACHES', 0)
    return request.param


def polynomial(x):
    total = x
    for _ in range(8):
        total = 0.5 * x * (1 + total)
    return total


def step(name, implementation):
    """The step, of values that are made by a few operations, as convolutions make them in a model."""
    core = getattr(pallas_kernels, name.partition(',')[0])

    def run(arrays):
        made = {argument: polynomial(array) if argument in ('v', 'x') else array for argument, array in arrays.items()}
        return core(**made, implementation=implementation)

    return run


def figures(name):
    arrays = drawn(name)
    compiled = jax.jit(step(name, 'xla')).lower(arrays).compile()
    analysis = compiled.cost_analysis()
    return arrays, analysis, compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize('name', CALLS)
def test_a_step_is_the_reference_with_its_gradients(name):
    arrays = drawn(name)

    def loss(implementation):
        def total(arrays):
            outputs, state = step(name, implementation)(arrays)
            return jnp.sum(jnp.sin(outputs)) + jnp.sum(jnp.cos(state))

        return total

    ours, expected = (jax.jit(jax.value_and_grad(loss(one)))(arrays) for one in ('xla', 'reference'))
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5 * max(1.0, float(jnp.max(jnp.abs(other)))))


@pytest.mark.parametrize('name', CALLS)
def test_the_state_is_read_twice_and_written_once(name, place):
    """By the compiled program; what else is touched are vectors, each a few times.

    In the caches it may be read once more, where what keys read has to be known before it is written.
    """
    once_more = place == 'in the caches' and name.startswith(('delta_rule', 'diagonal_low_rank'))
    arrays, analysis, temporaries = figures(name)
    state = arrays.pop('state').nbytes
    vectors = sum(array.nbytes for array in arrays.values())
    assert analysis['bytes accessed'] < (4 if once_more else 3) * state + 10 * vectors
    assert temporaries < state / 2
