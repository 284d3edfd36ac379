"""One layer of linear attention learns regression from its context as one step of gradient descent."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from attnlab.context import Context
from attnlab.mixers.linear.attention import LinearAttention

DIM, EXAMPLES, NOISE = 3, 10, 0.5
RATE = 1 / (EXAMPLES + DIM + 1 + NOISE**2)
"""The best size of one step, and what is left of the loss: Mahankali et al. 2024, https://arxiv.org/abs/2307.03576."""
LOSS = DIM * (1 - EXAMPLES * RATE) + NOISE**2


def layer() -> LinearAttention:
    return LinearAttention(DIM + 1, heads=1, scale=1 / EXAMPLES, rngs=nnx.Rngs(0))


def prompts(key: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Tokens `(x_i, w^T x_i + noise)`, the last one `(x, 0)`, and the number that belongs in the place of the zero."""
    of_x, of_w, of_noise = jax.random.split(key, 3)
    x = jax.random.normal(of_x, (count, EXAMPLES + 1, DIM))
    y = jnp.einsum('btd,bd->bt', x, jax.random.normal(of_w, (count, DIM)))
    y = y + NOISE * jax.random.normal(of_noise, y.shape)
    return jnp.concatenate([x, y.at[:, -1].set(0)[..., None]], axis=-1), y[:, -1]


def predicted(mixer: LinearAttention, tokens: jax.Array) -> jax.Array:
    return mixer(tokens, Context.full(*tokens.shape[:2]))[0][:, -1, -1]


def one_step(tokens: jax.Array) -> jax.Array:
    """The prediction after a step of gradient descent on half of the squared errors, from weights of zero."""

    def loss(w: jax.Array, examples: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(examples[:, :-1] @ w - examples[:, -1])) / 2

    def prediction(row: jax.Array) -> jax.Array:
        return row[-1, :-1] @ (-RATE * jax.grad(loss)(jnp.zeros(DIM, row.dtype), row[:-1]))

    return jax.vmap(prediction)(tokens)


def test_constructed_weights_are_one_step_of_gradient_descent():
    with jax.enable_x64(True):
        mixer = layer()
        inputs, target = np.diag([1] * DIM + [0]), np.diag([0] * DIM + [1])
        mixer.query.weight[...] = mixer.key.weight[...] = jnp.asarray(inputs, jnp.float32)
        mixer.value.weight[...] = jnp.asarray(target, jnp.float32)
        mixer.output.weight[...] = jnp.asarray(EXAMPLES * RATE * target, jnp.float32)  # The one number that is rounded.
        tokens, _ = prompts(jax.random.key(0), 4)
        np.testing.assert_allclose(predicted(mixer, tokens), one_step(tokens), rtol=1e-6, atol=1e-12)


@pytest.mark.slow
def test_trained_weights_are_one_step_of_gradient_descent():
    graph, weights = nnx.split(layer())
    optimiser = optax.adam(optax.cosine_decay_schedule(1e-2, 3000))

    def loss(weights: nnx.State, key: jax.Array, count: int = 256) -> jax.Array:
        tokens, target = prompts(key, count)
        return jnp.mean(jnp.square(predicted(nnx.merge(graph, weights), tokens) - target))

    @jax.jit
    def trained(weights: nnx.State) -> nnx.State:
        def step(carry, key):
            weights, state = carry
            updates, state = optimiser.update(jax.grad(loss)(weights, key), state)
            return (optax.apply_updates(weights, updates), state), None

        keys = jax.random.split(jax.random.key(1), 3000)
        return jax.lax.scan(step, (weights, optimiser.init(weights)), keys)[0][0]

    weights = trained(jax.tree.map(lambda weight: 0.5 * weight, weights))
    mixer = nnx.merge(graph, weights)
    tokens, target = prompts(jax.random.key(2), 100_000)
    found, step = predicted(mixer, tokens), one_step(tokens)
    # Three standard errors of the loss of the best step, and two in a hundred for what is left to learn.
    errors = jnp.square(step - target)
    assert abs(float(jnp.mean(errors)) - LOSS) < 3 * float(jnp.std(errors)) / len(errors) ** 0.5
    assert float(jnp.mean(jnp.square(found - target))) < 1.02 * float(jnp.mean(errors))
    assert float(jnp.corrcoef(found, step)[0, 1]) > 0.999
    q, k, v, out = (np.asarray(map_.weight[...]) for map_ in (mixer.query, mixer.key, mixer.value, mixer.output))
    scores = q @ k.T * (v @ out)[-1, -1]
    np.testing.assert_allclose(scores[:DIM, :DIM], RATE * EXAMPLES * np.eye(DIM), atol=0.05 * RATE * EXAMPLES)
