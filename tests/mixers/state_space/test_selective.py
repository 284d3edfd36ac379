"""Mamba, its S6 alone and Mamba-2 against their equations, written as loops over tokens in numpy float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import expit, ndtr

import attnlab
from attnlab.config import build, spec
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional.signed import signed_scan
from attnlab.mixers.state_space.selective import SelectiveMaps, SelectiveSSM, SelectiveSystem, StateSpaceDual
from attnlab.mixers.state_space.structured import StructuredSSM
from attnlab.nn.norms import RMSNorm
from attnlab.nn.preludes import Activation
from attnlab.testing.contract import Subject
from attnlab.testing.contract.documents import check_packing
from attnlab.testing.contract.gradients import check_gradients
from attnlab.testing.contract.narrow import check_bfloat16
from attnlab.testing.contract.streaming import check_decoding, check_streaming, check_streaming_packed
from attnlab.testing.noise import noise, perturbed
from attnlab.zoo import ZOO
from attnlab.zoo.chosen import initialized
from attnlab.zoo.state_space import STATE_SPACE
from tests.mixers.linear.equations import Ones, level_weights

DIM = 8
SEGMENTS = np.asarray([[1] * 9, [1, 1, 1, 2, 2, 3, 3, 0, 0]])


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def recipe(name: str, **overrides) -> SelectiveSSM | StateSpaceDual | StructuredSSM:
    """The recipe, every parameter moved off its initial value."""
    factory = build(STATE_SPACE[name].spec)
    return perturbed(factory.module(DIM, **{**factory.kwargs, **overrides}, rngs=nnx.Rngs(0)))


def weights(parameter) -> np.ndarray:
    return np.asarray(parameter[...], np.float64)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def softplus(x: np.ndarray) -> np.ndarray:
    return np.log1p(np.exp(x))


def conv(prelude, x: np.ndarray) -> np.ndarray:
    taps, out = weights(prelude.taps), np.zeros_like(x)
    for t in range(len(x)):
        for i in range(4):
            if t - 3 + i >= 0:
                out[t] += taps[i] * x[t - 3 + i]
    return silu(out + weights(prelude.bias))


def scanned(maps: SelectiveMaps, x: np.ndarray) -> np.ndarray:
    """What states of 16 give, without the skip."""
    selected = x @ weights(maps.select.weight)
    rank = selected.shape[1] - 32
    parts = [selected[:, :rank], selected[:, rank : rank + 16], selected[:, rank + 16 :]]
    for i, norm in enumerate(maps.select_norms):
        parts[i] = parts[i] / np.sqrt((parts[i] ** 2).mean(-1, keepdims=True) + 1e-6) * weights(norm.scale)
    low, B, C = parts
    dt = softplus(low @ weights(maps.step.weight) + weights(maps.step_size.bias))
    A = -np.exp(weights(maps.A_log))
    h, y = np.zeros((x.shape[1], 16)), np.zeros_like(x)
    signed = maps.eigenvalues == 'signed'
    for t in range(len(x)):
        decay = np.exp(dt[t][:, None] * A)
        h = (2 * decay - 1 if signed else decay) * h + (dt[t] * x[t])[:, None] * B[t][None]
        y[t] = h @ C[t]
    return y


def mamba(mixer: SelectiveSSM, u: np.ndarray) -> np.ndarray:
    inner = 2 * DIM
    xz = u @ weights(mixer.input.weight)
    x, z = conv(mixer.prelude, xz[:, :inner]), xz[:, inner:]
    return ((scanned(mixer, x) + weights(mixer.D) * x) * silu(z)) @ weights(mixer.output.weight)


def s6(mixer: StructuredSSM, u: np.ndarray) -> np.ndarray:
    y = scanned(mixer.system, u) + weights(mixer.D) * u
    map_ = mixer.readout.linear
    values, gate = np.split(y * ndtr(y) @ weights(map_.weight) + weights(map_.bias), 2, axis=-1)
    return values * expit(gate)


def mamba2(mixer: StateSpaceDual, u: np.ndarray) -> np.ndarray:
    inner, state = 2 * DIM, mixer.state
    heads = inner // 4
    projected = u @ weights(mixer.input.weight)
    z, xBC, step = np.split(projected, [inner, 2 * inner + 2 * state], axis=1)
    x, B, C = np.split(conv(mixer.prelude, xBC), [inner, inner + state], axis=1)
    x = x.reshape(len(u), heads, 4)
    dt = softplus(step + weights(mixer.step_size.bias))
    A, D = -np.exp(weights(mixer.A_log)), weights(mixer.D)
    y, ones = np.zeros_like(x), np.ones((len(u), len(u), heads))
    by_level = ones if mixer.levels is None or isinstance(mixer.levels, Ones) else level_weights(mixer.levels, u)
    for h in range(heads):
        for t in range(len(u)):
            for s in range(t + 1):
                fade = np.exp(dt[s + 1 : t + 1, h].sum() * A[h])
                y[t, h] += by_level[t, s, h] * fade * (C[t] @ B[s]) * dt[s, h] * x[s, h]
            y[t, h] += D[h] * x[t, h]
    gated = y.reshape(len(u), inner) * silu(z)
    gated = gated / np.sqrt((gated**2).mean(-1, keepdims=True) + 1e-5) * weights(mixer.norm.scale)
    return gated @ weights(mixer.output.weight)


@pytest.mark.parametrize(
    ('name', 'equations', 'overrides'),
    [
        ('mamba', mamba, {}),
        ('mamba', mamba, {'select_norm': build(spec(RMSNorm)), 'dt_rank': 3}),
        ('mamba', mamba, {'eigenvalues': 'signed'}),
        ('s6', s6, {}),
        ('mamba2', mamba2, {'head_dim': 4, 'state': 5}),
        ('log_linear_mamba2', mamba2, {'head_dim': 4, 'state': 5}),
        ('log_linear_mamba2', mamba2, {'head_dim': 4, 'state': 5, 'levels': Ones}),
    ],
    ids=[
        'mamba',
        'mamba, normed',
        'mamba, signed',
        's6',
        'mamba2',
        'mamba2 by level',
        'mamba2 by level, weights of one',
    ],
)
def test_the_layer_is_that_of_the_paper(name, equations, overrides):
    mixer = recipe(name, **overrides)
    x = noise(2, 9, DIM, dtype=jnp.float64)
    ctx = Context(jnp.zeros((2, 9), jnp.int32), jnp.asarray(SEGMENTS, jnp.int32))
    y, state = jax.jit(mixer)(x, ctx)
    assert state is None
    for i, row in enumerate(SEGMENTS):
        for document in np.unique(row):
            where = row == document
            np.testing.assert_allclose(y[i][where], equations(mixer, np.asarray(x[i])[where]), rtol=1e-9, atol=1e-9)


def test_with_negative_eigenvalues_mamba_streams_and_has_the_gradients_of_differences():
    make = functools.partial(SelectiveSSM, state=4, eigenvalues='signed')
    with jax.enable_x64(False):
        subject = Subject(make, causal=True)
        for check in (check_decoding, check_streaming, check_streaming_packed, check_bfloat16):
            check(subject)
        check_packing(subject, causal=True)
    check_gradients(Subject(make, causal=True))


def test_a_state_whose_decay_is_minus_one_counts_modulo_two():
    """A bit of one takes a step so long that the decay is -1; one of zero takes none."""
    bits = np.asarray([[0, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 1]])
    dt = jnp.asarray(1e3 * bits[..., None], jnp.float32)
    ones = jnp.ones((1, bits.shape[1], 1), jnp.float32)
    start = jnp.ones((1, 1, 1), jnp.float32)
    y, last = signed_scan(jnp.zeros_like(ones), dt, -jnp.ones((1, 1), jnp.float32), ones, ones, state=start)
    np.testing.assert_array_equal(y[0, :, 0], 1.0 - 2.0 * (np.cumsum(bits[0]) % 2))
    assert last.item() == -1


def test_mamba_in_jamba_and_hymba_norms_what_it_selects_by():
    jamba = [mixer for mixer in ZOO['jamba'].pattern if 'select_norm' in mixer]
    assert len(jamba) == 7 and all(mixer.select_norm.target.endswith('.RMSNorm') for mixer in jamba)
    mamba = attnlab.make_mixer('hymba', 32, heads=2, rngs=nnx.Rngs(0)).mixers[1]
    assert [norm.scale.shape for norm in mamba.select_norms] == [(2,), (16,), (16,)]
    assert not SelectiveSSM(8, rngs=nnx.Rngs(0)).select_norms


def test_mamba_starts_as_the_paper_does():
    mixer = SelectiveSSM(32, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(jnp.exp(mixer.A_log[...]), np.broadcast_to(np.arange(1, 17), (64, 16)), rtol=1e-6)
    np.testing.assert_array_equal(mixer.D[...], np.ones(64))
    dt = softplus(weights(mixer.step_size.bias))
    assert dt.min() >= 0.999e-3 and dt.max() <= 1.001e-1 and dt.max() / dt.min() > 10
    assert mixer.step.weight.shape == (2, 64)
    assert 0.9 * 2**-0.5 < jnp.abs(mixer.step.weight[...]).max() <= 2**-0.5
    assert mixer.select.weight.shape == (64, 2 + 32) and mixer.input.weight.shape == (32, 128)


def test_mamba2_starts_as_the_paper_does():
    mixer = StateSpaceDual(1024, rngs=nnx.Rngs(0))
    rate = jnp.exp(mixer.A_log[...])
    assert rate.shape == (32,) and rate.min() >= 1 and rate.max() <= 16 and 7 < rate.mean() < 10
    assert mixer.input.weight.shape == (1024, 2 * 2048 + 2 * 128 + 32)
    dt = softplus(weights(mixer.step_size.bias))
    assert dt.min() >= 0.999e-3 and dt.max() <= 1.001e-1


def test_counted_rates_are_those_of_the_released_log_linear_models():
    """Which `init=paper` has too."""
    mixer = StateSpaceDual(32, head_dim=8, rates='counted', rngs=nnx.Rngs(0))
    np.testing.assert_allclose(jnp.exp(mixer.A_log[...]), np.arange(1, 9), rtol=1e-6)
    begun, _ = initialized(ZOO['log_linear_mamba2'], 'paper')
    assert [begun.pattern[0].rates, ZOO['log_linear_mamba2'].pattern[0].rates] == ['counted', 'drawn']


def test_what_sets_the_time_scales_is_of_the_group_dynamics():
    for mixer in (SelectiveSSM(8, rngs=nnx.Rngs(0)), StateSpaceDual(32, rngs=nnx.Rngs(0))):
        for parameter in (mixer.A_log, mixer.D, mixer.step_size.bias):
            assert parameter.get_metadata()['group'] == 'dynamics'
        assert mixer.prelude.taps.get_metadata()['group'] == 'vector'


def test_the_state_keeps_its_type():
    state = SelectiveSSM(8, rngs=nnx.Rngs(0)).init_state(3, 100, jnp.bfloat16)
    assert state.memory.shape == (3, 16, 16) and state.memory.dtype == jnp.float32
    assert state.prelude.inputs.shape == (3, 3, 16) and state.prelude.inputs.dtype == jnp.bfloat16
    state = StateSpaceDual(32, rngs=nnx.Rngs(0)).init_state(3, 100, jnp.float64)
    assert state.memory.shape == (3, 1, 128, 64) and state.memory.dtype == jnp.float64


def test_mistakes_are_named():
    with pytest.raises(UserError, match='head_dim is 64; it must divide the inner width, 2 times 48'):
        StateSpaceDual(48, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match='causal of SelectiveSystem is False; it must be True'):
        SelectiveSystem(8, state=4, causal=False, rngs=nnx.Rngs(0))


def test_the_gradient_of_the_skip_of_mamba2_is_summed_in_float32():
    """Of values of one, nothing read from the state and a gate of 32: a count of ones that bfloat16 would round."""
    factory = spec(StateSpaceDual, head_dim=4, state=2, prelude=spec(Activation, name='identity'), norm=None)
    mixer = build(factory).module(DIM, **build(factory).kwargs, rngs=nnx.Rngs(0))
    inner, tokens = 2 * DIM, 2049
    # Gates, values, then B, C and steps.
    columns = np.repeat([32.0, 1.0, 0.0], [inner, inner, mixer.input.weight.shape[1] - 2 * inner])
    mixer.input.weight[...] = jnp.asarray(np.tile(columns / DIM, (DIM, 1)), jnp.float32)
    mixer.output.weight[...] = jnp.zeros((inner, DIM), jnp.float32).at[:, 0].set(1 / 32)
    graphdef, params = nnx.split(mixer)
    x, ctx = jnp.ones((1, tokens, DIM), jnp.bfloat16), Context.full(1, tokens)

    @jax.jit
    def gradients(params):
        return jax.grad(lambda params: jnp.sum(nnx.merge(graphdef, params)(x, ctx)[0].astype(jnp.float32)))(params)

    assert (np.asarray(gradients(params)['D'][...]) == 4 * tokens).all()
