"""RWKV-7 against its equations, as loops over tokens in numpy float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.test_util import check_grads
from ml_collections import ConfigDict

from attnlab.config import build, spec
from attnlab.errors import UserError
from attnlab.mixers.combine import SideBySide
from attnlab.mixers.linear.rwkv7 import RWKV7
from attnlab.mixers.softmax.attention import Attention
from attnlab.models.stack import Stack, stack_spec
from attnlab.testing.noise import perturbed
from pallas_kernels import linear_attention
from tests.mixers.linear.equations import DIM, HEADS, apply, batch, check_layer, documents, heads, recipe, sigmoid


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def low_rank(part, x: np.ndarray, activation) -> np.ndarray:
    start = 0.0 if part.start is None else np.asarray(part.start[...], np.float64)
    return start + apply(part.up, activation(apply(part.down, x)))


def rwkv7(mixer: RWKV7, x: np.ndarray, first: np.ndarray | None = None) -> np.ndarray:
    """The layer; `first` are the values of the first layer, where this is another."""
    before = np.concatenate([np.zeros_like(x[:1]), x[:-1]])
    mix = np.asarray(mixer.mix[...], np.float64)
    x_r, x_w, x_k, x_v, x_a, x_g = (x + (before - x) * mix[i] for i in range(6))
    r, k, v = heads(apply(mixer.query, x_r)), heads(apply(mixer.key, x_k)), apply(mixer.value, x_v)
    if first is not None:
        v = v + (first - v) * sigmoid(low_rank(mixer.mixed_in, x_v, lambda y: y))
    v = heads(v)
    w = heads(np.exp(-np.exp(-0.5) * sigmoid(low_rank(mixer.decay, x_w, np.tanh))))
    a = heads(sigmoid(low_rank(mixer.rate, x_a, lambda y: y)))
    gate = low_rank(mixer.gate, x_g, sigmoid)
    erased, written, bonus, gain, offset = (
        np.asarray(p[...], np.float64)
        for p in (mixer.erased, mixer.written, mixer.bonus, mixer.norm.scale, mixer.norm.bias)
    )
    kappa = k * erased
    kappa = kappa / np.linalg.norm(kappa, axis=-1, keepdims=True)
    k = k * (1 + (a - 1) * written)
    out = np.zeros_like(v)
    for h in range(HEADS):
        memory = np.zeros((DIM // HEADS,) * 2)
        for t in range(len(x)):
            transition = np.diag(w[t, h]) - np.outer(a[t, h] * kappa[t, h], kappa[t, h])
            memory = transition @ memory + np.outer(k[t, h], v[t, h])
            y = memory.T @ r[t, h]
            y = (y - y.mean()) / np.sqrt(y.var() + 1e-5 * len(y)) * gain[h] + offset[h]
            out[t, h] = y + (r[t, h] * k[t, h] * bonus[h]).sum() * v[t, h]
    return apply(mixer.output, out.reshape(len(x), -1) * gate)


def test_the_layer_is_that_of_the_paper():
    check_layer('rwkv7', rwkv7, rank=3, gate_rank=2)


def stacked(*before: ConfigDict, depth: int = 4, **settings) -> Stack:
    """Layers of the recipe with values of the first, after others, every parameter somewhere."""
    mixing = spec(RWKV7, heads=HEADS, rank=3, gate_rank=2, value_residual=True, value_rank=2)
    stack = stack_spec((*before, mixing), depth=depth, mlp=None)
    stack.update(settings)
    return perturbed(build(stack)(DIM, rngs=nnx.Rngs(0)))


def test_values_of_the_first_layer_are_mixed_into_those_above_as_in_the_paper():
    stack = stacked()

    def layers(x: np.ndarray) -> np.ndarray:
        first = None
        for block in stack.layers():
            normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + block.mixer_norm.eps)
            normed = normed * np.asarray(block.mixer_norm.scale[...], np.float64)
            x = x + rwkv7(block.mixer, normed, first)
            if first is None:
                before = np.concatenate([np.zeros_like(normed[:1]), normed[:-1]])
                mix = np.asarray(block.mixer.mix[...], np.float64)[3]
                first = apply(block.mixer.value, normed + (before - normed) * mix)
        return x

    x, ctx = batch()
    real = np.asarray(ctx.segments) > 0
    np.testing.assert_allclose(
        np.asarray(stack(x, ctx)[0])[real], documents(layers, x, ctx)[real], rtol=1e-9, atol=1e-10
    )


@pytest.mark.parametrize('before', [(), (spec(Attention, heads=HEADS),)], ids=['first', 'second'])
@pytest.mark.parametrize('depth', [2, 4, 5])
def test_mixed_values_are_the_same_in_a_loop_recomputed_and_in_pieces(before, depth):
    x, ctx = batch()
    whole, _ = stacked(*before, depth=depth, loop='unroll')(x, ctx)
    for settings in ({'loop': 'scan'}, {'loop': 'scan', 'remat': True}, {'loop': 'unroll', 'remat': True}):
        found, _ = stacked(*before, depth=depth, **settings)(x, ctx)
        np.testing.assert_allclose(found, whole, rtol=1e-11, atol=1e-12)
    stack = stacked(*before, depth=depth)
    state, pieces = stack.init_state(len(x), x.shape[1], x.dtype), []
    for start, stop in ((0, 1), (1, 1), (1, 5), (5, 9)):
        piece = dataclasses.replace(ctx, positions=ctx.positions[:, start:stop], segments=ctx.segments[:, start:stop])
        y, state = stack(x[:, start:stop], piece, state)
        pieces.append(y)
    np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), whole, rtol=1e-11, atol=1e-12)


def test_the_first_layer_keeps_its_values_and_its_gradient_is_right():
    """It has the map of the others, as the released code does, and makes no use of it."""
    stack = stacked(depth=3)
    x, ctx = batch()
    graphdef, params = nnx.split(stack)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params)

    def loss(params: nnx.State) -> jax.Array:
        return jnp.sum(jnp.sin(nnx.merge(graphdef, params)(x, ctx)[0]))

    gradient = jax.grad(loss)(params)
    for leaf in jax.tree.leaves(gradient['blocks'][0]['mixer']['mixed_in']):
        assert not leaf[0].any() and leaf[1:].any(axis=tuple(range(1, leaf.ndim))).all()
    check_grads(loss, (params,), order=1, modes=['rev'], rtol=1e-5, atol=1e-6)


def test_alone_it_is_the_first_layer():
    alone, first = (RWKV7(DIM, heads=HEADS, value_residual=each, rngs=nnx.Rngs(0)) for each in (False, True))
    x, ctx = batch()
    np.testing.assert_array_equal(alone(x, ctx)[0], first(x, ctx)[0])
    np.testing.assert_array_equal(first.mixed_in.start[...][jnp.array([0, 7])], jnp.asarray([0.93, 0.53], jnp.float32))
    assert first.mixed_in.down.weight.shape == (DIM, 32)


def test_within_another_mixer_nobody_would_tell_it():
    within = spec(SideBySide, mixers=(spec(RWKV7, heads=HEADS, value_residual=True),), scales=(1.0,))
    with pytest.raises(UserError, match='RWKV7 mixes the values of the first layer into its own and stands within'):
        build(stack_spec((within,), depth=2, mlp=None))(DIM, rngs=nnx.Rngs(0))


def test_with_rates_of_zero_it_is_gated_linear_attention(monkeypatch):
    """Nothing is erased then; the core is exchanged for the additive one."""
    mixer = recipe('rwkv7', rank=3, gate_rank=2)
    mixer.rate.start[...] = jnp.full(DIM, -jnp.inf)
    x, ctx = batch()
    found, _ = mixer(x, ctx)

    def additive(q, k, v, a, b, log_decay, **options):
        return linear_attention(q, k, v, log_decay, **options)

    monkeypatch.setattr('attnlab.mixers.linear.rwkv7.cores.diagonal_low_rank', additive)
    np.testing.assert_allclose(found, mixer(x, ctx)[0], rtol=1e-11, atol=1e-12)


def test_the_start_is_that_of_the_released_code():
    """Numbers of channels 0, 3 and 7 of 8, in heads of 4, in the first layer and half way down."""
    first, middle = (RWKV7(8, heads=2, place=place, rngs=nnx.Rngs(0)) for place in (0.0, 0.5))
    np.testing.assert_allclose(first.decay.start[...][jnp.array([0, 3, 7])], [-8, -5.5 + 18 / 7 + 2.5, 3], rtol=1e-6)
    np.testing.assert_allclose(middle.decay.start[...][3], -3 + 6 * (3 / 7) ** (1 + 0.5**0.3), rtol=1e-6)
    np.testing.assert_allclose(first.mix[...][2, jnp.array([0, 7])], [1, 1 - (7 / 8) ** 0.7], rtol=1e-6)
    np.testing.assert_allclose(first.erased[...][jnp.array([0, 1]), jnp.array([0, 3])], [0.76, 0.66], rtol=1e-6)
    assert not first.rate.down.weight[...].any()


def test_layers_start_by_their_place_as_in_the_released_code():
    """The third of four: mixtures by the layers that remain, decays by the place, gains of the norm below one."""
    third = RWKV7(8, heads=2, place=2 / 3, remaining=0.5, norm_gain=0.75**0.7, rngs=nnx.Rngs(0))
    mixtures = [1 - (3 / 8) ** (each * 0.5) for each in (0.2, 0.9, 0.7, 0.7, 0.9, 0.2)]
    np.testing.assert_allclose(third.mix[...][:, 3], mixtures, rtol=1e-6)
    np.testing.assert_allclose(third.decay.start[...][3], -3 + 6 * (3 / 7) ** (1 + (2 / 3) ** 0.3), rtol=1e-6)
    np.testing.assert_allclose(third.norm.scale[...], np.full((2, 4), 0.75**0.7), rtol=1e-6)


def test_errors():
    with pytest.raises(UserError, match=r'heads is 3; it must divide dim, which is 8$'):
        RWKV7(8, heads=3, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match='the place of RWKV7 is 2'):
        RWKV7(8, heads=2, place=2.0, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match=r'remaining of RWKV7 is -0\.5'):
        RWKV7(8, heads=2, remaining=-0.5, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match='value_rank of RWKV7 is 4, which is not read without value_residual'):
        RWKV7(8, heads=2, value_rank=4, rngs=nnx.Rngs(0))
