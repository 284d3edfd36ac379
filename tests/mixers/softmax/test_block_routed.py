"""Attention to routed blocks against its definition, one query at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.mixers.softmax.block_routed import BlockRoutedAttention
from attnlab.nn.positions import Rope
from attnlab.testing.contract import cast_parameters, context
from attnlab.testing.noise import noise

LENGTH, DIM, HEADS, BLOCK = 23, 8, 2, 4
DOCUMENTS = ((3, 13, 7), (20, 3))


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def by_definition(mixer: BlockRoutedAttention, x: np.ndarray, blocks: int) -> np.ndarray:
    """The output for one document."""
    q, k, v = (
        (x @ np.asarray(linear.weight[...], np.float64)).reshape(len(x), HEADS, -1)
        for linear in (mixer.query, mixer.key, mixer.value)
    )
    q, k = (np.asarray(mixer.position.rotate(jnp.asarray(a)[None], jnp.arange(len(x))[None])[0]) for a in (q, k))
    out = np.zeros_like(v)
    for t, h in np.ndindex(len(x), HEADS):
        own = t // BLOCK
        scores = [q[t, h] @ k[n * BLOCK : (n + 1) * BLOCK, h].mean(0) for n in range(own)]
        chosen = {own, *np.argsort(scores)[::-1][: blocks - 1]}
        seen = [s for s in range(t + 1) if s // BLOCK in chosen]
        weights = np.exp(k[seen, h] @ q[t, h] / np.sqrt(q.shape[-1]))
        out[t, h] = weights @ v[seen, h] / weights.sum()
    return out.reshape(x.shape) @ np.asarray(mixer.output.weight[...], np.float64)


@pytest.mark.parametrize(
    'blocks', [pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(6, marks=pytest.mark.slow)]
)
def test_every_query_reads_its_block_and_the_best_before_it(blocks: int):
    """One block is attention within blocks, and as many as there are is causal attention to all."""
    mixer = BlockRoutedAttention(DIM, heads=HEADS, block=BLOCK, blocks=blocks, position=Rope(), rngs=nnx.Rngs(0))
    mixer = cast_parameters(mixer, jnp.float64)
    x = noise(2, LENGTH, DIM, dtype=jnp.float64)
    y, _ = jax.jit(mixer)(x, context(*(tuple((n, length) for n, length in enumerate(row, 1)) for row in DOCUMENTS)))
    for row, lengths in enumerate(DOCUMENTS):
        stop = np.cumsum(lengths)
        for start, end in zip(stop - lengths, stop, strict=True):
            expected = by_definition(mixer, np.asarray(x[row, start:end]), blocks)
            np.testing.assert_allclose(y[row, start:end], expected, rtol=1e-9, atol=1e-10)
