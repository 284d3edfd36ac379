"""One training step of a small transformer in hand-written JAX, as a careful user would write it without a framework.

Two details are for speed on CPU. Matrix products see one token axis: with two (`b t d`), the weight gradient
contracts both, and XLA first makes a transposed copy of the output gradient. And the backward pass of attention
transposes the narrow factor of each product, never the `t s` weights.
"""

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from step_size import StepSize

Params = dict
State = tuple[Params, optax.OptState]
Batch = Mapping[str, jax.Array]


def init(key: jax.Array, size: StepSize) -> Params:
    """Parameters in nested dictionaries, matrices as [in, out], normal with variance one over the number of inputs."""
    keys = iter(jax.random.split(key, 7 * size.depth + 2))

    def matrix(inputs: int, outputs: int) -> jax.Array:
        return jax.random.normal(next(keys), (inputs, outputs)) * inputs**-0.5

    d, f = size.dim, size.mlp_dim
    blocks = [
        {
            'norm_attention': jnp.ones(d),
            'q': matrix(d, d),
            'k': matrix(d, d),
            'v': matrix(d, d),
            'out': matrix(d, d),
            'norm_mlp': jnp.ones(d),
            'gate': matrix(d, f),
            'up': matrix(d, f),
            'down': matrix(f, d),
        }
        for _ in range(size.depth)
    ]
    return {'embed': matrix(size.vocab, d), 'blocks': blocks, 'norm': jnp.ones(d), 'head': matrix(d, size.vocab)}


def rms_norm(x: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * gain


def rotary_tables(size: StepSize) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of position times frequency, [t, 1, k/2]."""
    frequency = size.rope_base ** (-np.arange(0, size.head_dim, 2) / size.head_dim)
    angle = (np.arange(size.length)[:, None] * frequency)[:, None]
    return jnp.asarray(np.cos(angle), jnp.float32), jnp.asarray(np.sin(angle), jnp.float32)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    left, right = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


@jax.custom_vjp
def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal softmax attention, `b t h k` each, returning `b t h k`."""
    return _attention_forward(q, k, v)[0]


def _attention_forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    length, key_dim = q.shape[-2:]
    scores = jnp.einsum('bhtk,bhsk->bhts', q, k) * key_dim**-0.5
    weights = jax.nn.softmax(jnp.where(np.tri(length, dtype=bool), scores, jnp.finfo(scores.dtype).min), axis=-1)
    out = jnp.swapaxes(jnp.einsum('bhts,bhsk->bhtk', weights, v), 1, 2)
    return out, (q, k, v, weights, out)


def _attention_backward(residuals: tuple[jax.Array, ...], d_out: jax.Array) -> tuple[jax.Array, ...]:
    q, k, v, weights, out = residuals
    scale = q.shape[-1] ** -0.5
    row = jnp.swapaxes(jnp.sum(d_out * out, axis=-1, keepdims=True), 1, 2)
    d_weights = jnp.einsum('bhtk,bhsk->bhts', jnp.swapaxes(d_out, 1, 2), v)
    d_scores = weights * (d_weights - row) * scale
    d_q = jnp.einsum('bhts,bhsk->bhtk', d_scores, k)
    d_k = jnp.einsum('bhkt,bhts->bhks', jnp.swapaxes(q, 2, 3), d_scores)
    d_v = jnp.einsum('bhkt,bhts->bhks', d_out.transpose(0, 2, 3, 1), weights)
    return jnp.swapaxes(d_q, 1, 2), d_k.transpose(0, 3, 1, 2), d_v.transpose(0, 3, 1, 2)


attention.defvjp(_attention_forward, _attention_backward)


def loss(params: Params, batch: Batch, size: StepSize) -> jax.Array:
    """Mean cross-entropy of the labels; the residual stream is kept as [tokens, dim]."""
    cos, sin = rotary_tables(size)
    by_head = (size.batch, size.length, size.heads, size.head_dim)
    x = params['embed'][batch['inputs'].reshape(-1)]
    for block in params['blocks']:
        y = rms_norm(x, block['norm_attention'], size.norm_eps)
        q, k, v = ((y @ block[name]).reshape(by_head) for name in ('q', 'k', 'v'))
        y = attention(rotate(q, cos, sin), rotate(k, cos, sin), v)
        x = x + y.reshape(x.shape) @ block['out']
        y = rms_norm(x, block['norm_mlp'], size.norm_eps)
        x = x + (jax.nn.silu(y @ block['gate']) * (y @ block['up'])) @ block['down']
    logits = rms_norm(x, params['norm'], size.norm_eps) @ params['head']
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch['labels'].reshape(-1)).mean()


def contender(size: StepSize) -> tuple[Callable[[State, Batch], tuple[State, jax.Array]], State, Batch]:
    """Returns (step, state, batch): `step(state, batch)` is jitted, donates its state and returns (state, loss)."""
    optimizer = optax.adamw(size.learning_rate, weight_decay=size.weight_decay)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: State, batch: Batch) -> tuple[State, jax.Array]:
        params, optimizer_state = state
        value, gradient = jax.value_and_grad(loss)(params, batch, size)
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state), value

    params = init(jax.random.key(0), size)
    tokens = np.random.default_rng(0).integers(0, size.vocab, (size.batch, size.length + 1), dtype=np.int32)
    batch = {'inputs': jnp.asarray(tokens[:, :-1]), 'labels': jnp.asarray(tokens[:, 1:])}
    return step, (params, optimizer.init(params)), batch


def from_torch(arrays: Mapping[str, np.ndarray], size: StepSize) -> tuple[Params, Batch]:
    """The parameters and the batch that `torch_step.py save` wrote, in this file's layout."""

    def block(i: int) -> Params:
        names = ('norm_attention', 'out', 'norm_mlp', 'gate', 'up', 'down')
        theirs = {name: arrays[f'blocks.{i}.{name}.weight'] for name in names}
        q, k, v = np.split(arrays[f'blocks.{i}.qkv.weight'], 3)
        return {name: x.T for name, x in {**theirs, 'q': q, 'k': k, 'v': v}.items()}

    params = {
        'embed': arrays['embed.weight'],
        'blocks': [block(i) for i in range(size.depth)],
        'norm': arrays['norm.weight'],
        'head': arrays['head.weight'].T,
    }
    return jax.tree.map(jnp.asarray, params), {name: jnp.asarray(arrays[name]) for name in ('inputs', 'labels')}
