"""Gated slot attention against its equations, as loops over tokens in numpy float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.config import build, spec
from attnlab.errors import UserError
from attnlab.mixers.linear.slots import GatedSlots, gated_slots
from attnlab.nn.decays import ChannelDecay
from attnlab.nn.gates import OutputGate, RoutedGates
from attnlab.nn.positions import Rope
from attnlab.testing.contract import Subject
from attnlab.testing.contract.streaming import check_decoding
from attnlab.testing.noise import noise, perturbed
from tests.mixers.linear.equations import (
    DIM,
    HEADS,
    SEGMENTS,
    apply,
    batch,
    check_layer,
    heads,
    recipe,
    sigmoid,
    silu,
    softplus,
)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def steps(q, k, v, gate, keys, values) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The reads of one head, `t v`, and its slots after them."""
    out = np.zeros_like(v)
    for t in range(len(q)):
        keys = gate[t][:, None] * keys + np.outer(1 - gate[t], k[t])
        values = gate[t][:, None] * values + np.outer(1 - gate[t], v[t])
        weights = np.exp(keys @ q[t])
        out[t] = weights @ values / weights.sum()
    return out, keys, values


def gsa(mixer: GatedSlots, x: np.ndarray) -> np.ndarray:
    q, k, v = (heads(silu(apply(linear, x))) for linear in (mixer.query, mixer.key, mixer.value))
    return read(mixer, q, k, v, heads(sigmoid(apply(mixer.forget, x)) ** (1 / 8)))


def raven_heads(mixer: GatedSlots, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    q, k, v = (heads(silu(apply(linear, x))) for linear in (mixer.query, mixer.key, mixer.value))
    q, k = (
        each / np.sqrt((each**2).mean(-1, keepdims=True) + 1e-5) * np.asarray(norm.scale[...], np.float64)
        for norm, each in zip(mixer.key_norms, (q, k), strict=True)
    )
    return q, k, v


def offered(mixer: GatedSlots, x: np.ndarray) -> np.ndarray:
    """What the released code offers: keys rotated, the decay of gated slots, a norm of every head and a gate."""
    q, k, v = raven_heads(mixer, x)
    half = q.shape[-1] // 2
    turn = np.exp(1j * np.arange(len(x))[:, None] * 10000.0 ** (-np.arange(half) / half)[None])[:, None]
    turned = (turn * (each[..., :half] + 1j * each[..., half:]) for each in (q, k))
    q, k = (np.concatenate([each.real, each.imag], axis=-1) for each in turned)
    fade = np.log(sigmoid(apply(mixer.forget.decay.linear, x))) / 8
    gate = np.exp(heads(fade) * routed(heads(apply(mixer.forget.router, x))))
    out = silu(reads(q, k, v, gate))
    out = out / np.sqrt((out**2).mean(-1, keepdims=True) + 1e-5) * np.asarray(mixer.norm.scale[...], np.float64)
    return apply(mixer.output, out.reshape(x.shape) * silu(apply(mixer.gate.linear, x)))


def raven(mixer: GatedSlots, x: np.ndarray) -> np.ndarray:
    q, k, v = raven_heads(mixer, x)
    decay = mixer.forget.decay
    A, bias = (np.asarray(each[...], np.float64) for each in (decay.A_log, decay.step_size.bias))
    fade = -np.exp(A) * softplus(apply(decay.linear, x) + bias)
    weigh = routed if mixer.forget.scores == 'sigmoid' else softened
    return read(mixer, q, k, v, np.exp(fade[..., None] * weigh(heads(apply(mixer.forget.router, x)))))


def softened(logits: np.ndarray, chosen: int = 2) -> np.ndarray:
    """A softmax over all slots, of which the `chosen` greatest are left."""
    weights = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    return np.where(logits >= np.sort(logits, axis=-1)[..., -chosen, None], weights, 0)


def routed(logits: np.ndarray, chosen: int = 2) -> np.ndarray:
    """The weights of slots, of which `chosen` are above zero."""
    weights = np.zeros_like(logits)
    for place in np.ndindex(*logits.shape[:-1]):
        best = np.argsort(logits[place])[-chosen:]
        weights[place][best] = sigmoid(logits[place][best]) / sigmoid(logits[place][best]).sum()
    return weights


def reads(q: np.ndarray, k: np.ndarray, v: np.ndarray, gate: np.ndarray) -> np.ndarray:
    empty = np.zeros((gate.shape[-1], DIM // HEADS))
    return np.stack([steps(*(a[:, h] for a in (q, k, v, gate)), empty, empty)[0] for h in range(HEADS)], axis=1)


def read(mixer: GatedSlots, q: np.ndarray, k: np.ndarray, v: np.ndarray, gate: np.ndarray) -> np.ndarray:
    return written(mixer, reads(q, k, v, gate))


def written(mixer: GatedSlots, out: np.ndarray) -> np.ndarray:
    out = silu(out).reshape(len(out), -1)
    out = out / np.sqrt((out**2).mean(-1, keepdims=True) + 1e-5) * np.asarray(mixer.norm.scale[...], np.float64)
    return apply(mixer.output, out)


def test_the_layer_is_that_of_the_paper():
    check_layer('gsa', gsa, slots=5)


def test_raven_is_that_of_the_paper():
    check_layer('raven', raven, slots=5, gates=build(spec(RoutedGates, chosen=2)))


def test_raven_has_what_its_released_code_offers():
    check_layer('raven', raven, slots=5, gates=build(spec(RoutedGates, chosen=2, scores='softmax')))
    with pytest.raises(UserError, match="scores is 'relu'; it must be 'sigmoid' or 'softmax'"):
        build(spec(RoutedGates, scores='relu'))
    gates = build(spec(RoutedGates, chosen=2, decay=spec(ChannelDecay)))
    check_layer('raven', offered, slots=5, gates=gates, position=Rope(), gate=build(spec(OutputGate)))
    with pytest.raises(UserError, match='temperature of ChannelDecay is 0'):
        ChannelDecay(DIM, heads=HEADS, key_dim=5, temperature=0.0, rngs=nnx.Rngs(0))


def test_a_temperature_that_nothing_reads_is_refused():
    """Saved configs of `raven` have the default."""
    GatedSlots(DIM, heads=HEADS, slots=5, temperature=8.0, gates=RoutedGates, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match=r'^temperature of GatedSlots is 4\.0, which gates do not read; leave it out'):
        GatedSlots(DIM, heads=HEADS, slots=5, temperature=4.0, gates=RoutedGates, rngs=nnx.Rngs(0))


def test_what_raven_offers_streams():
    """Token by token as in one pass."""
    gates = functools.partial(RoutedGates, chosen=3, decay=ChannelDecay)
    with jax.enable_x64(False):
        make = functools.partial(GatedSlots, heads=4, slots=6, gates=gates, position=Rope(), gate=OutputGate)
        check_decoding(Subject(make, causal=True))


def test_slots_that_a_token_does_not_choose_stay_as_they_are():
    """To the last bit, while those that it chooses change."""
    mixer = recipe('raven', slots=5, gates=build(spec(RoutedGates, chosen=2)))
    x, ctx = batch(np.ones((2, 9), int))
    states, state = [], mixer.init_state(2, 9, jnp.float64)
    for part in (slice(0, 8), slice(8, 9)):
        taken = dataclasses.replace(ctx, positions=ctx.positions[:, part], segments=ctx.segments[:, part])
        _, state = mixer(x[:, part], taken, state)
        states.append(state)
    weights = np.stack([routed(heads(apply(mixer.forget.router, np.asarray(row[8:]))))[0] for row in x])
    assert (weights > 0).sum() == 2 * HEADS * 2
    for before, after in ((states[0].keys, states[1].keys), (states[0].values, states[1].values)):
        np.testing.assert_array_equal(np.asarray(before != after).any(-1), weights > 0)


def test_raven_that_chooses_all_slots_is_gated_slot_attention():
    """The decay of a head is the sum of those of its slots, and the router gives every slot its own part of it."""
    other = recipe('gsa', slots=5)
    mixer = recipe('raven', slots=5, gates=build(spec(RoutedGates, chosen=5)), key_norm=None)
    for name in ('query', 'key', 'value', 'norm', 'output'):
        setattr(mixer, name, getattr(other, name))

    def fading(x: jax.Array) -> jax.Array:
        return jax.nn.log_sigmoid(other.forget(x)).reshape(*x.shape[:2], HEADS, 5) / 8

    x, ctx = batch()
    assert fading(x).min() > -1
    mixer.forget.decay = lambda x: fading(x).sum(axis=-1)
    mixer.forget.router = lambda x: jax.scipy.special.logit(-fading(x)).reshape(*x.shape[:2], -1)
    np.testing.assert_allclose(mixer(x, ctx)[0], other(x, ctx)[0], rtol=1e-7, atol=1e-9)


def test_raven_that_overwrites_one_slot_in_turn_is_a_cache_of_the_last_keys_and_values():
    """Softmax attention to the last three tokens; a slot that holds nothing yet is a key and a value of zeros."""
    mixer = recipe('raven', slots=3, gates=build(spec(RoutedGates, chosen=1)))
    mixer.forget.router = lambda x: jnp.tile(jnp.eye(3, dtype=x.dtype), (len(x), x.shape[1] // 3, HEADS))
    mixer.forget.decay = lambda x: jnp.full((*x.shape[:2], HEADS), -1e4, x.dtype)
    x, ctx = batch(np.ones((1, 9), int))
    q, k, v = raven_heads(mixer, np.asarray(x[0]))
    out = np.zeros_like(v)
    k, v = (np.concatenate([np.zeros((2, *each.shape[1:])), each]) for each in (k, v))
    for t in range(9):
        weights = np.exp(np.einsum('hk,shk->sh', q[t], k[t : t + 3]))
        out[t] = np.einsum('sh,shv->hv', weights / weights.sum(axis=0), v[t : t + 3])
    np.testing.assert_allclose(mixer(x, ctx)[0][0], written(mixer, out), rtol=1e-7, atol=1e-9)


def test_the_router_is_noisy_in_training_alone():
    gates = perturbed(RoutedGates(DIM, heads=HEADS, slots=5, chosen=2, rngs=nnx.Rngs(0)))
    x = noise(2, 9, DIM, dtype=jnp.float64)
    key = jax.random.key(0)
    moved = np.asarray(gates.router(x)).reshape(2, 9, HEADS, 5) + np.asarray(
        jax.random.gumbel(key, (2, 9, HEADS, 5), jnp.float64)
    )
    expected = np.asarray(gates.decay(x))[..., None] * routed(moved)
    np.testing.assert_allclose(gates(x, key), expected, rtol=1e-8, atol=1e-12)
    assert not np.array_equal(gates(x, key) < 0, gates(x, None) < 0)
    gates.noise = False
    np.testing.assert_array_equal(gates(x, key), gates(x, None))


def test_equal_scores_choose_no_more_slots_than_asked():
    gates = RoutedGates(DIM, heads=HEADS, slots=5, chosen=2, rngs=nnx.Rngs(0))
    gates.router.weight[...] = jnp.zeros_like(gates.router.weight[...])
    decays = gates(noise(1, 3, DIM, dtype=jnp.float64), None)
    assert ((decays < 0).sum(-1) == 2).all()


@pytest.mark.parametrize('strength', [0.1, pytest.param(30.0, marks=pytest.mark.slow)])
def test_the_two_passes_are_the_definition(strength):
    """With documents and slots that hold something to begin with; also where gates are as good as closed."""
    q, k, v = (noise(2, 9, 2, 4, seed=seed, dtype=jnp.float64) for seed in range(3))
    log_decay = -strength * jnp.abs(noise(2, 9, 2, 3, seed=3, dtype=jnp.float64))
    before = noise(2, 2, 3, 4, seed=4, dtype=jnp.float64), noise(2, 2, 3, 4, seed=5, dtype=jnp.float64)
    y, after = gated_slots(q, k, v, log_decay, state=before, segments=jnp.asarray(SEGMENTS))
    for row in range(2):
        for h in range(2):
            slots = [np.asarray(each[row, h]) for each in before]
            for document in dict.fromkeys(SEGMENTS[row]):
                where = SEGMENTS[row] == document
                parts = [np.asarray(each[row, :, h])[where] for each in (q, k, v, np.exp(log_decay))]
                expected, *last = steps(*parts, *slots)
                slots = [np.zeros_like(each) for each in slots]
                np.testing.assert_allclose(y[row, where, h], expected, rtol=1e-10, atol=1e-12)
            for found, wanted in zip(after, last, strict=True):
                np.testing.assert_allclose(found[row, h], wanted, rtol=1e-10, atol=1e-12)


def test_without_a_past_the_slots_are_read_alike():
    """With gates that are nearly closed a slot holds next to nothing: weights are equal."""
    q, k, v = (noise(1, 1, 1, 4, seed=seed, dtype=jnp.float64) for seed in range(3))
    y, _ = gated_slots(q, k, v, jnp.full((1, 1, 1, 5), -1e-9))
    np.testing.assert_allclose(y, 1e-9 * v, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize('strength', [1e-3, 10.0])
def test_long_sequences_stay_finite_and_near_the_definition(strength):
    with jax.enable_x64(False):
        q, k, v = (noise(1, 65536, 1, 8, seed=seed, dtype=jnp.bfloat16) for seed in range(3))
        log_decay = -strength * jnp.abs(noise(1, 65536, 1, 4, seed=3))
        y, _ = jax.jit(gated_slots)(q, k, v, log_decay)
    parts = [np.asarray(each[0, :, 0], np.float64) for each in (q, k, v, jnp.exp(log_decay))]
    expected, *_ = steps(*parts, *(np.zeros((4, 8)),) * 2)
    assert jnp.all(jnp.isfinite(y))
    np.testing.assert_allclose(np.asarray(y[0, :, 0], np.float64), expected, rtol=0, atol=0.02 * np.abs(expected).max())


def test_heads_that_do_not_divide():
    with pytest.raises(UserError, match='heads is 3; it must divide dim, which is 8'):
        GatedSlots(DIM, heads=3, rngs=nnx.Rngs(0))
