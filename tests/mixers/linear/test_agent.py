"""Agent attention against its equations, in numpy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.context import Context
from attnlab.mixers.linear.agent import AgentAttention
from attnlab.testing.noise import noise
from tests.mixers.linear.equations import DIM, HEADS, apply, check_layer, heads, recipe

PACKED = np.asarray([[1] * 9, [1, 1, 1, 2, 2, 3, 4, 4, 4]])


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def softmax(x: np.ndarray) -> np.ndarray:
    exponentials = np.exp(x - x.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def resized(values: np.ndarray, length: int) -> np.ndarray:
    """Values at the centres of equal parts of a unit length, at the centres of `length` parts; flat at the ends."""
    there, wanted = ((np.arange(count) + 0.5) / count for count in (values.shape[-1], length))
    return np.stack([np.interp(wanted, there, row) for row in values])


def convolved(conv, v: np.ndarray) -> np.ndarray:
    taps, bias = (np.asarray(each[...], np.float64) for each in (conv.taps, conv.bias))
    values = np.pad(v, ((1, 1), (0, 0)))
    return np.stack([(taps * values[t : t + 3]).sum(axis=0) for t in range(len(v))]) + bias


def agent(mixer: AgentAttention, x: np.ndarray) -> np.ndarray:
    q, k, v = (heads(apply(linear, x)) for linear in (mixer.query, mixer.key, mixer.value))
    n, scale, out = len(x), (DIM // HEADS) ** -0.5, np.zeros_like(v)
    bins = [range(i * n // mixer.agents, -(-(i + 1) * n // mixer.agents)) for i in range(mixer.agents)]
    by_place, of_queries = (np.asarray(p[...], np.float64) for p in (mixer.agent_bias, mixer.query_bias))
    for h in range(HEADS):
        agents = np.stack([q[list(each), h].mean(axis=0) for each in bins])
        read = softmax(scale * agents @ k[:, h].T + resized(by_place[h], n)) @ v[:, h]
        out[:, h] = softmax(scale * q[:, h] @ agents.T + resized(of_queries[h], n).T) @ read
    return apply(mixer.output, out.reshape(n, DIM) + convolved(mixer.conv, v.reshape(n, DIM)))


@pytest.mark.parametrize('agents', [2, 4])
def test_the_layer_is_that_of_the_paper(agents):
    check_layer('agent', agent, PACKED, agents=agents, documents=4)


def test_more_documents_than_it_is_made_for_are_nan():
    mixer = recipe('agent', agents=2)
    segments = jnp.asarray([[1, 1, 2, 2, 0]], jnp.int32)
    y, _ = mixer(noise(1, 5, DIM, dtype=jnp.float64), Context(segments, segments))
    assert np.isnan(y).any(axis=-1).tolist() == [[False, False, True, True, False]]
