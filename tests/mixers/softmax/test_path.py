"""PaTH attention against its product of reflections, in numpy float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import pallas_kernels
from attnlab.context import Context
from attnlab.mixers.softmax import path
from attnlab.mixers.softmax.path import PathAttention, path_attention
from attnlab.nn.decays import ForgetGate, ScaledForgetGate
from attnlab.testing.contract import Subject, cast_parameters, context
from attnlab.testing.contract.streaming import check_decoding
from attnlab.testing.noise import noise, perturbed

DIM, HEADS, LENGTH = 8, 2, 12
K = DIM // HEADS
DOCUMENTS = ((5, 7), (12,))


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def apply(linear, x: np.ndarray) -> np.ndarray:
    bias = 0.0 if linear.bias is None else np.asarray(linear.bias[...], np.float64)
    return x @ np.asarray(linear.weight[...], np.float64) + bias


def by_definition(mixer: PathAttention, x: np.ndarray) -> np.ndarray:
    """The output for one document."""
    q, k, v = (apply(linear, x).reshape(len(x), HEADS, K) for linear in (mixer.query, mixer.key, mixer.value))
    projected, taps = apply(mixer.up, apply(mixer.down, x)), np.asarray(mixer.conv.taps[...], np.float64)
    w = np.zeros_like(projected)
    for t, i in np.ndindex(len(x), len(taps)):
        if t >= i:
            w[t] += taps[-1 - i] * projected[t - i]
    w = (w / (1 + np.exp(-w))).reshape(k.shape)
    w = w / np.sqrt((w**2).sum(-1, keepdims=True) + 1e-6)
    strength = 2 / (1 + np.exp(-apply(mixer.strength, x)))
    gates = np.ones_like(strength)
    if mixer.forget is not None:
        # The released code divides gates by the root of the channels too.
        power = K**-0.5 if isinstance(mixer.forget, ScaledForgetGate) else 1.0
        gates = (1 / (1 + np.exp(-apply(mixer.forget.linear, x)))) ** power
    out = np.zeros_like(v)
    for i, h in np.ndindex(len(x), HEADS):
        scores, row = np.zeros(i + 1), q[i, h]
        for j in range(i, -1, -1):
            scores[j] = row @ k[j, h] / np.sqrt(K) + np.log(gates[j + 1 : i + 1, h]).sum()
            row = row - strength[j, h] * (row @ w[j, h]) * w[j, h]
        weights = np.exp(scores - scores.max())
        out[i, h] = weights @ v[: i + 1, h] / weights.sum()
    return apply(mixer.output, out.reshape(x.shape))


@pytest.mark.parametrize('chunk', [4, 5])
@pytest.mark.parametrize('forget', [None, ForgetGate, ScaledForgetGate], ids=['path', 'path_fox', 'scaled'])
def test_scores_are_products_of_reflections(forget, chunk, monkeypatch: pytest.MonkeyPatch):
    """Over documents, in chunks of fewer tokens than they have, and with tokens left over."""
    monkeypatch.setattr(path, 'CHUNK', chunk)
    mixer = cast_parameters(PathAttention(DIM, heads=HEADS, rank=3, forget=forget, rngs=nnx.Rngs(0)), jnp.float64)
    mixer, x = perturbed(mixer), noise(2, LENGTH, DIM, dtype=jnp.float64)
    ctx = context(*(tuple((n, length) for n, length in enumerate(row, 1)) for row in DOCUMENTS))
    y, _ = jax.jit(mixer)(x, ctx)
    for row, lengths in enumerate(DOCUMENTS):
        stops = np.cumsum(lengths)
        for start, stop in zip(stops - lengths, stops, strict=True):
            expected = by_definition(mixer, np.asarray(x[row, start:stop]))
            np.testing.assert_allclose(y[row, start:stop], expected, rtol=1e-9, atol=1e-10)


def run(axes: jax.Array, strength: float, log_forget: jax.Array, q, k, v) -> np.ndarray:
    b, t = q.shape[:2]
    past = PathAttention(DIM, heads=HEADS, rngs=nnx.Rngs(0)).init_state(b, t, jnp.float64).past
    strengths = jnp.full(q.shape[:3], strength)
    segments = jnp.ones((b, t), jnp.int32)
    return path_attention(q, k, v, axes, strengths, log_forget, past=past, segments=segments)[0]


def test_without_reflections_it_is_forgetting_attention():
    """And with gates of one softmax attention without positions."""
    q, k, v, axes = (noise(1, LENGTH, HEADS, K, seed=seed, dtype=jnp.float64) for seed in range(4))
    for gates in (
        jax.nn.log_sigmoid(noise(1, LENGTH, HEADS, seed=4, dtype=jnp.float64)),
        jnp.zeros((1, LENGTH, HEADS)),
    ):
        total = jnp.moveaxis(jnp.cumsum(gates, axis=1), 2, 1)
        bias = total[..., :, None] - total[..., None, :]
        expected = pallas_kernels.attention(q, k, v, causal=True, bias=bias)
        np.testing.assert_allclose(run(axes, 0.0, gates, q, k, v), expected, rtol=1e-9, atol=1e-10)


def test_one_whole_reflection_a_token_tells_odd_distances_from_even_ones():
    """`H^2 = I`: keys at odd distances are seen reflected, those at even ones as they are."""
    q, k, v = (noise(1, LENGTH, HEADS, K, seed=seed, dtype=jnp.float64) for seed in range(3))
    axis = jnp.zeros((1, 1, 1, K)).at[..., 1].set(1.0)
    as_is, reflected = (jnp.einsum('bihk,bjhk->bhij', q * sign, k) / np.sqrt(K) for sign in (1, 1 - 2 * axis))
    place = np.arange(LENGTH)
    odd = ((place[:, None] - place) % 2 == 1)[None, None]
    seen = np.tri(LENGTH, dtype=bool)[None, None]
    weights = jax.nn.softmax(jnp.where(seen, jnp.where(odd, reflected, as_is), -jnp.inf))
    expected = jnp.einsum('bhij,bjhk->bihk', weights, v)
    found = run(jnp.broadcast_to(axis, q.shape), 2.0, jnp.zeros((1, LENGTH, HEADS)), q, k, v)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-10)


def test_rows_of_any_length_are_read_by_chunks():
    """Of 131 tokens two chunks and three tokens; a token at a time before, as 131 is prime."""
    mixer = PathAttention(DIM, heads=HEADS, rngs=nnx.Rngs(0))
    x = jax.ShapeDtypeStruct((1, 131, DIM), jnp.float32)
    program = jax.make_jaxpr(lambda x: mixer(x, Context.full(1, 131))[0])(x)
    assert [each.params['length'] for each in program.eqns if each.primitive.name == 'scan'] == [2]


def test_scaled_gates_stream():
    """Token by token as in one pass."""
    with jax.enable_x64(False):
        make = functools.partial(PathAttention, heads=4, rank=3, forget=ScaledForgetGate)
        check_decoding(Subject(make, causal=True))


def test_keys_of_documents_that_ended_stay_as_they_are():
    """Moved by reflections of other documents they grew beyond all numbers, and gradients were NaN."""
    mixer = PathAttention(8, heads=1, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 6 * path.CHUNK, 8)), jnp.float32)
    ends = path.CHUNK + 2
    ctx = context(((1, ends), *((2 + i, 3) for i in range((x.shape[1] - ends) // 3)), (999, (x.shape[1] - ends) % 3)))

    @jax.jit
    def keys(x: jax.Array, ctx: Context) -> jax.Array:
        return mixer(x, ctx, mixer.init_state(1, x.shape[1], x.dtype))[1].past.keys[:, :ends]

    alone = jax.tree.map(lambda array: array[:, :ends], ctx)
    np.testing.assert_allclose(keys(x, ctx), keys(x[:, :ends], alone), rtol=1e-4, atol=1e-4)
