"""The layers of the delta rule against their equations, as loops over tokens in numpy float64."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab import make_mixer
from attnlab.config import build, spec
from attnlab.errors import UserError
from attnlab.mixers.linear.attention import LinearAttention
from attnlab.mixers.linear.write import Additive, Delta, EarlyDelta, PreconditionedDelta
from attnlab.nn.decays import LowRankStepDecay, StepDecay
from attnlab.nn.feature_maps import SumNorm
from attnlab.nn.gates import (
    ChannelStrengths,
    LowRankGate,
    Moment,
    MomentGates,
    OutputGate,
    PartialErase,
    Terms,
    WriteStrength,
)
from attnlab.testing.contract import context
from attnlab.testing.noise import noise
from tests.mixers.linear.equations import (
    DIM,
    HEADS,
    Ones,
    apply,
    batch,
    check_layer,
    convolved,
    gated_output,
    level_weights,
    normed,
    recipe,
    sigmoid,
    silu,
    softplus,
)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)


def delta(q: np.ndarray, k: np.ndarray, v: np.ndarray, beta: np.ndarray, decay: np.ndarray) -> np.ndarray:
    """The delta rule with decays, `t h k`, token after token."""
    out = np.zeros_like(v)
    for h in range(HEADS):
        memory = np.zeros((q.shape[-1], v.shape[-1]))
        for t in range(len(q)):
            memory = decay[t, h][:, None] * memory
            memory = memory + beta[t, h] * np.outer(k[t, h], v[t, h] - memory.T @ k[t, h])
            out[t, h] = memory.T @ q[t, h] / np.sqrt(q.shape[-1])
    return out


def plain_output(mixer: LinearAttention, out: np.ndarray, x: np.ndarray) -> np.ndarray:
    return apply(mixer.output, normed(mixer, out))


def delta_net(mixer: LinearAttention, x: np.ndarray, output: Callable = plain_output) -> np.ndarray:
    q, k, v = convolved(mixer, x)
    assert q.shape[-1] == v.shape[-1] == DIM // HEADS
    out = delta(unit(q), unit(k), v, sigmoid(apply(mixer.gates.linear, x)), np.ones_like(k))
    return output(mixer, out, x)


def sum_normed(mixer: LinearAttention, x: np.ndarray) -> np.ndarray:
    q, k, v = convolved(mixer, x)
    q, k = (np.where(a > 0, a + 1, np.exp(a)) for a in (q, k))
    q, k = (a / a.sum(-1, keepdims=True) for a in (q, k))
    out = delta(q, k, v, sigmoid(apply(mixer.gates.linear, x)), np.ones_like(k))
    return apply(mixer.output, normed(mixer, out))


def gated_delta_net(mixer: LinearAttention, x: np.ndarray, scale: float = 1.0) -> np.ndarray:
    q, k, v = convolved(mixer, x)
    assert q.shape[-1] == 3 * DIM // 4 // HEADS and v.shape[-1] == 2 * q.shape[-1]
    A, bias = (np.asarray(a[...], np.float64) for a in (mixer.decay.A_log, mixer.decay.step_size.bias))
    decay = np.exp(-np.exp(A) * softplus(apply(mixer.decay.linear, x) + bias))[..., None] + np.zeros_like(k)
    out = delta(unit(q), unit(k), v, scale * sigmoid(apply(mixer.gates.linear, x)), decay)
    return gated_output(mixer, out, x)


def log_linear_gated_delta_net(mixer: LinearAttention, x: np.ndarray) -> np.ndarray:
    """What values give by themselves, one after another, each read by its level."""
    q, k, v = convolved(mixer, x)
    A, bias = (np.asarray(a[...], np.float64) for a in (mixer.decay.A_log, mixer.decay.step_size.bias))
    decay = np.exp(-np.exp(A) * softplus(apply(mixer.decay.linear, x) + bias))[..., None] + np.zeros_like(k)
    beta, weights, out = sigmoid(apply(mixer.gates.linear, x)), level_weights(mixer.levels, x), np.zeros_like(v)
    for s in range(len(x)):
        alone = np.where(np.arange(len(x))[:, None, None] == s, v, 0)
        out += weights[:, s, :, None] * delta(unit(q), unit(k), alone, beta, decay)
    return gated_output(mixer, out, x)


def kda(mixer: LinearAttention, x: np.ndarray, floor: float | None = None) -> np.ndarray:
    q, k, v = convolved(mixer, x)
    A, bias = (np.asarray(a[...], np.float64) for a in (mixer.decay.A_log, mixer.decay.step_size.bias))
    step = (apply(mixer.decay.up, apply(mixer.decay.down, x)) + bias).reshape(k.shape)
    if floor is None:
        decay = np.exp(-np.exp(A)[:, None] * softplus(step))
    else:
        decay = np.exp(floor * sigmoid(np.exp(A)[:, None] * step))
        assert decay.min() > np.exp(floor)
    out = delta(unit(q), unit(k), v, sigmoid(apply(mixer.gates.linear, x)), decay)
    gate = sigmoid(apply(mixer.gate.up, apply(mixer.gate.down, x)))
    return apply(mixer.output, normed(mixer, out) * gate)


def gated_delta_product(mixer: LinearAttention, x: np.ndarray) -> np.ndarray:
    q, k, v = convolved(mixer, x, mixer.write.steps)
    A, bias = (np.asarray(a[...], np.float64) for a in (mixer.decay.A_log, mixer.decay.step_size.bias))
    decay = np.exp(-np.exp(A) * softplus(apply(mixer.decay.linear, x) + bias))
    beta = 2 * sigmoid(apply(mixer.gates.linear, x))
    q, k, steps = unit(q), unit(k), mixer.write.steps
    out = np.zeros((len(x), HEADS, v.shape[-1]))
    for h in range(HEADS):
        memory = np.zeros((q.shape[-1], v.shape[-1]))
        for t in range(len(x)):
            memory = decay[t, h] * memory
            for write in range(h, steps * HEADS, HEADS):
                missing = v[t, write] - memory.T @ k[t, write]
                memory = memory + beta[t, write] * np.outer(k[t, write], missing)
            out[t, h] = memory.T @ q[t, h] / np.sqrt(q.shape[-1])
    return gated_output(mixer, out, x)


def gated_delta_net2(
    mixer: LinearAttention, x: np.ndarray, scale: float = 1.0, opened: Callable[[np.ndarray], np.ndarray] = silu
) -> np.ndarray:
    q, k, v = convolved(mixer, x)
    A, bias = (np.asarray(a[...], np.float64) for a in (mixer.decay.A_log, mixer.decay.step_size.bias))
    step = softplus(apply(mixer.decay.up, apply(mixer.decay.down, x)) + bias)
    decay = np.exp(-np.exp(A)[:, None] * step.reshape(k.shape))
    q, k = unit(q), unit(k)
    erase = scale * sigmoid(apply(mixer.gates.erase, x)).reshape(k.shape) * k
    v = sigmoid(apply(mixer.gates.write, x)).reshape(v.shape) * v
    out = np.zeros_like(v)
    for h in range(HEADS):
        memory = np.zeros((q.shape[-1], v.shape[-1]))
        for t in range(len(x)):
            memory = decay[t, h][:, None] * memory
            memory = memory + np.outer(k[t, h], v[t, h] - memory.T @ erase[t, h])
            out[t, h] = memory.T @ q[t, h] / np.sqrt(q.shape[-1])
    gate = opened(apply(mixer.gate.up, apply(mixer.gate.down, x)))
    return apply(mixer.output, normed(mixer, out) * gate)


def comba(mixer: LinearAttention, x: np.ndarray) -> np.ndarray:
    q, k, v = convolved(mixer, x)
    A, bias = (np.asarray(a[...], np.float64) for a in (mixer.decay.A_log, mixer.decay.step_size.bias))
    decay = np.exp(-np.exp(A) * softplus(apply(mixer.decay.linear, x) + bias))
    whole = isinstance(mixer.gates, WriteStrength)
    beta = sigmoid(apply(mixer.gates.linear if whole else mixer.gates.strength.linear, x))
    corrected = np.asarray(mixer.feature_map.part[...], np.float64)
    parts = np.ones(HEADS) if whole else sigmoid(np.asarray(mixer.gates.part[...], np.float64))
    q, k = unit(q - corrected[:, None] * k), unit(k)
    out = np.zeros_like(v)
    for h in range(HEADS):
        memory = np.zeros((q.shape[-1], v.shape[-1]))
        for t in range(len(x)):
            missing = v[t, h] - memory.T @ (parts[h] * k[t, h])
            memory = decay[t, h] * memory + beta[t, h] * np.outer(k[t, h], missing)
            out[t, h] = memory.T @ q[t, h] / np.sqrt(q.shape[-1])
    return apply(mixer.output, normed(mixer, out) * sigmoid(apply(mixer.gate.linear, x)))


def preconditioned_gdn(mixer: LinearAttention, x: np.ndarray, base: float = 1.5, scale: float = 1.0) -> np.ndarray:
    q, k, v = convolved(mixer, x)
    q, k = unit(q), unit(k)
    fades = []
    for decay in (mixer.decay, mixer.gates.decay):
        A, bias = (np.asarray(a[...], np.float64) for a in (decay.A_log, decay.step_size.bias))
        if isinstance(decay, LowRankStepDecay):
            step = softplus(apply(decay.up, apply(decay.down, x)) + bias).reshape(k.shape)
            fades.append(np.exp(-np.exp(A)[:, None] * step))
        else:
            fades.append(np.exp(-np.exp(A) * softplus(apply(decay.linear, x) + bias)))
    beta, growth = (sigmoid(apply(linear, x)) for linear in (mixer.gates.strength.linear, mixer.gates.growth))
    beta, level = scale * beta, np.asarray(mixer.gates.level[...], np.float64)
    out = np.zeros_like(v)
    for h in range(HEADS):
        memory, moment = np.zeros((q.shape[-1], v.shape[-1])), np.zeros(q.shape[-1])
        for t in range(len(x)):
            moment = fades[1][t, h] * moment + growth[t, h] * k[t, h] ** 2
            relative = np.log(moment + 1e-6) - level[h]
            written = base ** (-relative / (1 + abs(relative))) * k[t, h]
            memory = np.reshape(fades[0][t, h], (-1, 1)) * memory
            memory = memory + beta[t, h] * np.outer(written, v[t, h] - memory.T @ k[t, h])
            out[t, h] = memory.T @ q[t, h] / np.sqrt(q.shape[-1])
    return gated_output(mixer, out, x)


def sharing(mixer: LinearAttention, other: LinearAttention) -> LinearAttention:
    """The mixer with the other's projections, convolutions, norm and output gate."""
    for name in ('query', 'key', 'value', 'preludes', 'norm', 'gate', 'output'):
        setattr(mixer, name, getattr(other, name))
    return mixer


def test_the_preconditioned_layer_is_that_of_the_paper():
    check_layer('preconditioned_gdn', preconditioned_gdn)
    check_layer('preconditioned_gdn', preconditioned_gdn, decay=LowRankStepDecay)
    doubled = functools.partial(preconditioned_gdn, base=1.0, scale=2.0)
    gates, write = build(spec(MomentGates, scale=2.0)), PreconditionedDelta(base=1.0)
    check_layer('preconditioned_gdn', doubled, gates=gates, write=write)


def test_with_a_base_of_one_the_preconditioned_rule_is_the_delta_rule():
    """And where moments stay empty, with keys that are written as if all were scaled alike."""
    q, k, v = (noise(2, 5, HEADS, 4, seed=seed, dtype=jnp.float64) for seed in range(3))
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    fade, strength = -jnp.abs(noise(2, 5, HEADS, seed=3, dtype=jnp.float64)), jnp.full((2, 5, HEADS), 0.7)
    terms = Terms(fade, strength, moment=Moment(fade, jnp.zeros_like(strength), jnp.full(HEADS, -0.2)))
    equal, memory = PreconditionedDelta(base=1.0)(q, k, v, terms, segments=None)
    expected, left = Delta()(q, k, v, terms, segments=None)
    np.testing.assert_allclose(equal, expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(memory[..., :-1], left, rtol=1e-12, atol=1e-12)
    relative = np.log(1e-6) + 0.2
    scaled = 1.5 ** (relative / (relative - 1)) * k
    found, _ = PreconditionedDelta()(q, k, v, terms, segments=None)
    expected, _ = Delta()(q, scaled, v, terms._replace(erase=k), segments=None)
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


def test_the_preconditioned_rule_refuses_what_it_cannot_use():
    with pytest.raises(UserError, match=r'the base of PreconditionedDelta is 0\.5; it must be from 1 to 2'):
        PreconditionedDelta(base=0.5)
    for scale, base in ((2.0, 1.5), (1.5, 2.0)):
        gates = build(spec(MomentGates, scale=scale))
        with pytest.raises(UserError, match=rf'MomentGates is {scale} and .*Delta {base}; their product must be at mo'):
            recipe('preconditioned_gdn', gates=gates, write=PreconditionedDelta(base=base))
    q = noise(1, 2, 1, 4)
    with pytest.raises(UserError, match='give its mixer gates=MomentGates'):
        PreconditionedDelta()(q, q, q, Terms(strength=q[..., 0]))


def test_a_memory_erased_before_it_decays_refuses_strengths_above_one():
    """With them a token that repeats has an eigenvalue below -1, and what the memory holds for it grows."""
    k = jnp.broadcast_to(jnp.eye(4)[0], (1, 40, 1, 4))
    for strength, most in ((1.0, 1.0), (1.8, 1e5)):
        terms = Terms(jnp.full((1, 40, 1), np.log(0.2)), jnp.full((1, 40, 1), strength))
        _, memory = EarlyDelta()(k, k, k, terms, segments=None)
        assert (np.abs(memory).max() > most) == (strength > 1)
    for gates, name in ((WriteStrength, 'WriteStrength'), (PartialErase, 'PartialErase')):
        options = {'gates': build(spec(gates, scale=1.5))}
        with pytest.raises(UserError, match=rf'scale of {name} is 1\.5; where EarlyDelta .* must be at most 1'):
            recipe('comba', **options)
        recipe('comba', **options, decay=None)


@pytest.mark.parametrize(
    ('write', 'gates'),
    [(Additive(), PartialErase), (Additive(), ChannelStrengths), (Additive(), MomentGates), (Delta(), MomentGates)],
)
def test_gates_that_give_what_a_rule_does_not_read_are_refused(write, gates):
    with pytest.raises(
        UserError, match=f'^{type(write).__name__} does not read all that {gates.__name__} give; choose'
    ):
        recipe('gated_delta_net', write=write, gates=gates)


def test_the_layer_with_erase_keys_is_that_of_the_paper():
    check_layer('gated_delta_net2', gated_delta_net2)
    check_layer('comba', comba)


def test_the_layer_by_levels_is_that_of_the_paper_and_with_weights_of_one_that_which_it_divides():
    check_layer('log_linear_gated_delta_net', log_linear_gated_delta_net)
    check_layer('log_linear_gated_delta_net', gated_delta_net, levels=Ones)


def test_several_writes_of_a_token_are_of_its_level():
    plain, by_level = (
        make_mixer('gated_delta_product', 16, heads=2, rngs=nnx.Rngs(0), **given) for given in ({}, {'levels': Ones})
    )
    x, ctx = noise(1, 16, 16), context(((1, 11), (2, 5)))
    y = jax.jit(lambda x: by_level(x, ctx)[0])(x)
    np.testing.assert_allclose(y, jax.jit(lambda x: plain(x, ctx)[0])(x), rtol=1e-4, atol=1e-5)
    stream = jax.jit(lambda x: by_level(x, ctx, by_level.init_state(1, 16, x.dtype))[0])(x)
    np.testing.assert_allclose(stream, y, rtol=1e-4, atol=1e-5)


def test_the_options_of_layers_with_erase_keys_are_those_of_released_code():
    gate, gates = build(spec(LowRankGate, activation='sigmoid')), build(spec(ChannelStrengths, scale=2.0))
    equations = functools.partial(gated_delta_net2, scale=2.0, opened=sigmoid)
    check_layer('gated_delta_net2', equations, gate=gate, gates=gates)
    check_layer('comba', comba, gates=WriteStrength)


def test_gated_delta_net2_with_equal_strengths_is_kda():
    """All weights of the gates zero: every strength a half. But for the activation of the output gate."""
    mixer = recipe('gated_delta_net2')
    for linear in (mixer.gates.erase, mixer.gates.write):
        linear.weight[...] = jnp.zeros_like(linear.weight[...])
    x, ctx = batch()
    apart, _ = mixer(x, ctx)
    mixer.gates = WriteStrength(DIM, heads=HEADS, key_dim=4, value_dim=4, rngs=nnx.Rngs(0))
    mixer.gates.linear.weight[...] = jnp.zeros_like(mixer.gates.linear.weight[...])
    np.testing.assert_allclose(apart, mixer(x, ctx)[0], rtol=1e-12, atol=1e-12)


def test_gated_delta_net2_with_equal_strengths_and_one_decay_a_head_is_gated_delta_net():
    mixer = recipe('gated_delta_net2')
    other = sharing(recipe('gated_delta_net', key_ratio=1.0, value_ratio=1.0), mixer)
    for linear in (mixer.gates.erase, mixer.gates.write, other.gates.linear, mixer.decay.up, other.decay.linear):
        linear.weight[...] = jnp.zeros_like(linear.weight[...])
    bias = other.decay.step_size.bias[...]
    mixer.decay.step_size.bias[...] = jnp.repeat(bias, DIM // HEADS)
    other.decay.A_log[...] = mixer.decay.A_log[...]
    x, ctx = batch()
    np.testing.assert_allclose(mixer(x, ctx)[0], other(x, ctx)[0], rtol=1e-12, atol=1e-12)


def test_gated_delta_net2_that_erases_nothing_is_gated_linear_attention():
    mixer = recipe('gated_delta_net2')
    mixer.gates.scale = 0.0
    x, ctx = batch()
    found, _ = mixer(x, ctx)
    mixer.write = Additive()
    np.testing.assert_allclose(found, mixer(x, ctx)[0], rtol=1e-12, atol=1e-12)


def test_comba_without_correction_that_erases_all_of_what_has_decayed_is_gated_delta_net():
    mixer = recipe('comba')
    mixer.feature_map.part[...] = jnp.zeros_like(mixer.feature_map.part[...])
    mixer.gates.part[...] = jnp.full(HEADS, jnp.inf)
    other = sharing(recipe('gated_delta_net'), mixer)
    other.decay, other.gates = mixer.decay, mixer.gates.strength
    x, ctx = batch()
    early, _ = mixer(x, ctx)
    mixer.write = Delta()
    late, expected = mixer(x, ctx)[0], other(x, ctx)[0]
    np.testing.assert_allclose(late, expected, rtol=1e-12, atol=1e-12)
    assert np.abs(early - expected).max() > 1e-3


def test_without_decay_and_correction_comba_that_erases_all_is_the_delta_rule():
    mixer = recipe('comba')
    mixer.feature_map.part[...] = jnp.zeros_like(mixer.feature_map.part[...])
    mixer.gates.part[...] = jnp.full(HEADS, jnp.inf)
    mixer.decay = None
    x, ctx = batch()
    early, _ = mixer(x, ctx)
    mixer.gates, mixer.write = mixer.gates.strength, Delta()
    np.testing.assert_allclose(early, mixer(x, ctx)[0], rtol=1e-12, atol=1e-12)


def test_the_layer_is_that_of_the_paper():
    check_layer('delta_net', delta_net)
    check_layer('delta_net', sum_normed, feature_map=SumNorm())
    check_layer('delta_net', functools.partial(delta_net, output=gated_output), gate=build(spec(OutputGate)))
    check_layer('gated_delta_net', gated_delta_net)
    check_layer('kda', kda)
    check_layer('gated_delta_product', gated_delta_product)


def test_decays_of_kda_may_have_a_floor():
    """As the safe gate of released code, whose rates start at one."""
    bounded = build(spec(LowRankStepDecay, floor=-5.0))
    made = bounded(DIM, heads=HEADS, key_dim=4, rngs=nnx.Rngs(0))
    assert not made.A_log[...].any() and made(-1e3 * jnp.ones((1, 1, DIM))).min() >= -5.0
    check_layer('kda', functools.partial(kda, floor=-5.0), decay=bounded)
    for floor in (0.0, -np.inf):
        with pytest.raises(UserError, match=rf'the floor of LowRankStepDecay is {floor}; it must be None or below 0'):
            LowRankStepDecay(DIM, heads=HEADS, key_dim=4, floor=floor, rngs=nnx.Rngs(0))


def test_the_write_strength_can_reach_two():
    doubled = build(spec(WriteStrength, scale=2.0))
    check_layer('gated_delta_net', lambda mixer, x: gated_delta_net(mixer, x, scale=2.0), gates=doubled)


def test_the_write_strength_may_have_a_bias():
    """As in the code of the authors; it starts at zero."""
    with_bias = build(spec(WriteStrength, bias=True))
    assert not with_bias(DIM, heads=HEADS, key_dim=4, value_dim=4, rngs=nnx.Rngs(0)).linear.bias[...].any()
    assert recipe('gated_delta_net', gates=with_bias).gates.linear.bias[...].all()
    check_layer('gated_delta_net', gated_delta_net, gates=with_bias)


def test_without_decay_gated_delta_net_is_the_delta_rule():
    mixer = recipe('gated_delta_net')
    x, ctx = batch()
    mixer.decay.A_log[...] = jnp.full(HEADS, -jnp.inf)
    decayed, _ = mixer(x, ctx)
    mixer.decay = None
    np.testing.assert_allclose(decayed, mixer(x, ctx)[0], rtol=1e-12, atol=1e-12)


def test_kda_with_equal_decays_in_a_head_is_gated_delta_net():
    mixer = recipe('kda')
    x, ctx = batch()
    mixer.decay.up.weight[...] = jnp.zeros_like(mixer.decay.up.weight[...])
    mixer.decay.step_size.bias[...] = jnp.zeros_like(mixer.decay.step_size.bias[...])
    by_channel, _ = mixer(x, ctx)
    by_head = StepDecay(DIM, heads=HEADS, key_dim=4, rngs=nnx.Rngs(0))
    by_head.linear.weight[...] = jnp.zeros_like(by_head.linear.weight[...])
    by_head.step_size.bias[...] = jnp.zeros_like(by_head.step_size.bias[...])
    by_head.A_log[...] = mixer.decay.A_log[...]
    mixer.decay = by_head
    np.testing.assert_allclose(by_channel, mixer(x, ctx)[0], rtol=1e-12, atol=1e-12)


def test_a_delta_product_of_one_step_is_gated_delta_net():
    def one(mixer: LinearAttention, x: np.ndarray) -> np.ndarray:
        return gated_delta_net(mixer, x, scale=2.0)

    check_layer('gated_delta_product', one, write=Delta(steps=1))


@pytest.mark.parametrize('shape', [(HEADS,), (2, 5, HEADS), (2, 5, HEADS, 4)], ids=str)
def test_the_memory_decays_before_the_first_write_of_a_token(shape: tuple[int, ...]):
    q, k, v = (noise(2, 5, n * HEADS, 4, seed=seed, dtype=jnp.float64) for seed, n in enumerate((1, 3, 3)))
    terms = Terms(-jnp.abs(noise(*shape, seed=3, dtype=jnp.float64)), jnp.full((2, 5, 3 * HEADS), 0.1))
    silent = terms._replace(strength=terms.strength.at[..., HEADS:].set(0.0))  # writes that change nothing
    y, memory = Delta(steps=3)(q, k, v, silent, segments=None)
    first = (k[:, :, :HEADS], v[:, :, :HEADS], terms._replace(strength=terms.strength[..., :HEADS]))
    alone, left = Delta()(q, *first, segments=None)
    np.testing.assert_allclose(y, alone, rtol=1e-12)
    np.testing.assert_allclose(memory, left, rtol=1e-12)


def core(q: jax.Array, k: jax.Array, v: jax.Array, beta: float) -> tuple[jax.Array, jax.Array]:
    return Delta()(q, k, v, Terms(strength=jnp.full(k.shape[:3], beta)), scale=1.0)


def test_a_strength_of_zero_leaves_the_memory_empty():
    q, k, v = (noise(2, 5, HEADS, 4, seed=seed, dtype=jnp.float64) for seed in range(3))
    y, memory = core(q, k, v, 0.0)
    assert not y.any() and not memory.any()


@pytest.mark.parametrize('shape', [(HEADS,), (2, 5, HEADS), (2, 5, HEADS, 4)], ids=str)
def test_with_a_strength_of_zero_a_memory_only_decays(shape: tuple[int, ...]):
    q, k, v = (noise(2, 5, HEADS, 4, seed=seed, dtype=jnp.float64) for seed in range(3))
    log_decay, start = -jnp.abs(noise(*shape, seed=3, dtype=jnp.float64)), noise(2, HEADS, 4, 4, seed=4)
    y, memory = Delta()(q, k, v, Terms(log_decay, jnp.zeros((2, 5, HEADS))), state=start.astype(jnp.float64), scale=1.0)
    by_channel = np.broadcast_to(log_decay[..., None] if len(shape) < 4 else log_decay, (2, 5, HEADS, 4))
    left = np.exp(by_channel.cumsum(1))[..., None] * np.asarray(start, np.float64)[:, None]
    np.testing.assert_allclose(memory, left[:, -1], rtol=1e-12)
    np.testing.assert_allclose(y, np.einsum('bthk,bthkv->bthv', q, left), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(('beta', 'left'), [(1.0, 0.0), (2.0, -2.0), (0.5, 0.25)])
def test_a_second_write_to_a_key_replaces_the_first(beta: float, left: float):
    key = jnp.zeros((1, 2, 1, 4)).at[..., 1].set(1.0)
    v = noise(1, 2, 1, 3, dtype=jnp.float64)
    y, _ = core(key, key, v, beta)
    np.testing.assert_allclose(y[0, 1, 0], beta * v[0, 1, 0] + left * v[0, 0, 0], rtol=1e-12)
