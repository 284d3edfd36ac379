"""Whole layers against the equations of their papers, written as loops over tokens in numpy float64."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab import make_mixer
from attnlab.config import build, spec
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional.normalizers import RootGrowth, SumNormalizer
from attnlab.mixers.linear.attention import LinearAttention
from attnlab.mixers.linear.write import Delta
from attnlab.nn.decays import LowRankDecay, SlopeDecay, StepDecay
from attnlab.nn.feature_maps import (
    CosFormer,
    EluPlusOne,
    HeadSquaredProduct,
    Hedgehog,
    JointHedgehog,
    NormAware,
    SignedExponentials,
    SquaredProduct,
    Taylor,
    UnitTaylor,
)
from attnlab.nn.gates import OutputGate, Terms, TiedKeys, WriteStrength
from attnlab.nn.levels import LevelWeights
from attnlab.nn.norms import LayerNorm, RMSNorm
from attnlab.nn.positions import NeighbourRope
from attnlab.nn.preludes import ShortConv
from attnlab.testing.contract import Subject, context
from attnlab.testing.contract.streaming import check_decoding
from attnlab.testing.noise import noise
from attnlab.zoo.hybrids import HYBRIDS
from attnlab.zoo.linear import LINEAR
from tests.mixers.linear.equations import (
    DIM,
    HEADS,
    LENGTH,
    apply,
    batch,
    check_layer,
    documents,
    gated_output,
    heads,
    layer_normed,
    normed,
    recipe,
    sigmoid,
    silu,
)

Weight = Callable[[np.ndarray, np.ndarray, int, int], float]


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def linear_transformer(mixer: LinearAttention, x: np.ndarray, causal: bool = True, eps: float = 1e-6) -> np.ndarray:
    q, k, v = (heads(apply(linear, x)) for linear in (mixer.query, mixer.key, mixer.value))
    q, k = (np.where(a > 0, a + 1, np.exp(a)) for a in (q, k))
    out = np.zeros_like(v)
    for h in range(HEADS):
        for t in range(len(x)):
            seen = range(t + 1) if causal else range(len(x))
            weights = np.asarray([q[t, h] @ k[s, h] for s in seen])
            out[t, h] = sum(w * v[s, h] for w, s in zip(weights, seen, strict=True)) / (weights.sum() + eps)
    return apply(mixer.output, out.reshape(len(x), -1))


def retnet(mixer: LinearAttention, x: np.ndarray) -> np.ndarray:
    q, k, v = (heads(apply(linear, x)) for linear in (mixer.query, mixer.key, mixer.value))
    half = q.shape[-1] // 2
    exponents, pairs = np.arange(half) / half, (slice(half), slice(half, None))
    if isinstance(mixer.position, NeighbourRope):
        exponents, pairs = np.linspace(0, 1, half), (slice(0, None, 2), slice(1, None, 2))
    turn = np.exp(1j * np.arange(len(x))[:, None] * 10000.0 ** -exponents[None])[:, None]
    q, k = (turn * (a[..., pairs[0]] + 1j * a[..., pairs[1]]) for a in (q, k))
    out = np.zeros_like(v)
    for h in range(HEADS):
        gamma = 1 - 2.0 ** (-5 - h)
        for t in range(len(x)):
            for s in range(t + 1):
                score = np.real(q[t, h] @ np.conj(k[s, h])) / np.sqrt(2 * half)
                out[t, h] += gamma ** (t - s) * score * v[s, h]
    return gated_output(mixer, out, x)


def gla(mixer: LinearAttention, x: np.ndarray) -> np.ndarray:
    q, k, v = (heads(apply(linear, x)) for linear in (mixer.query, mixer.key, mixer.value))
    assert q.shape[-1] == DIM // 2 // HEADS and v.shape[-1] == DIM // HEADS
    decay = heads(sigmoid(apply(mixer.decay.up, apply(mixer.decay.down, x))) ** (1 / 16))
    out = np.zeros_like(v)
    for h in range(HEADS):
        memory = np.zeros((q.shape[-1], v.shape[-1]))
        for t in range(len(x)):
            memory = decay[t, h][:, None] * memory + np.outer(k[t, h], v[t, h])
            out[t, h] = q[t, h] @ memory / np.sqrt(q.shape[-1])
    return gated_output(mixer, out, x)


def lightning(mixer: LinearAttention, x: np.ndarray) -> np.ndarray:
    q, k, v = (heads(silu(apply(linear, x))) for linear in (mixer.query, mixer.key, mixer.value))
    out = np.zeros_like(v)
    for h in range(HEADS):
        decay = np.exp(-(2.0 ** (-8 * (h + 1) / HEADS)) * (1 - mixer.decay.depth + 1e-5))
        for t in range(len(x)):
            for s in range(t + 1):
                out[t, h] += decay ** (t - s) * (q[t, h] @ k[s, h]) * v[s, h]
    out = out.reshape(len(x), -1)
    whole = isinstance(mixer.joint_norm, LayerNorm)
    out = layer_normed(mixer.joint_norm, out) if whole else out / np.sqrt((out**2).mean(-1, keepdims=True) + 1e-6)
    return apply(mixer.output, out * sigmoid(apply(mixer.gate.up, apply(mixer.gate.down, x))))


def hgrn2(mixer: LinearAttention, x: np.ndarray) -> np.ndarray:
    q, f, v = (heads(apply(linear, x)) for linear in (mixer.query, mixer.key, mixer.value))
    q, bound = silu(q), mixer.gates.bound
    f = bound + (1 - bound) * sigmoid(f)
    out = np.zeros_like(v)
    for h in range(HEADS):
        memory = np.zeros((q.shape[-1], v.shape[-1]))
        for t in range(len(x)):
            memory = f[t, h][:, None] * memory + np.outer(1 - f[t, h], v[t, h])
            out[t, h] = q[t, h] @ memory / np.sqrt(q.shape[-1])
    out = out.reshape(len(x), -1)
    out = out / np.sqrt((out**2).mean(-1, keepdims=True) + 1e-5) * np.asarray(mixer.joint_norm.scale[...])
    return apply(mixer.output, out)


def weighted(
    mixer: LinearAttention,
    x: np.ndarray,
    weight: Weight,
    eps: float,
    added: bool = False,
    causal: bool = True,
    grown: bool = False,
) -> np.ndarray:
    """Values averaged by `weight(q_t, k_s, h, t - s)`, all pairs of queries and keys that are seen."""
    q, k, v = (heads(apply(linear, x)) for linear in (mixer.query, mixer.key, mixer.value))
    out = np.zeros_like(v)
    for h in range(HEADS):
        for t in range(len(x)):
            count = t + 1 if causal else len(x)
            weights = np.asarray([weight(q[t], k[s], h, t - s) for s in range(count)])
            out[t, h] = weights @ v[:count, h] / (weights.sum() + eps if added else max(weights.sum(), eps))
            out[t, h] *= np.sqrt(count / v.shape[-1]) if grown else 1
    return apply(mixer.output, out.reshape(len(x), -1))


def cosformer(mixer: LinearAttention, x: np.ndarray) -> np.ndarray:
    def weight(q: np.ndarray, k: np.ndarray, h: int, distance: int) -> float:
        return np.maximum(q[h], 0) @ np.maximum(k[h], 0) * np.cos(np.pi / 2 * distance / mixer.feature_map.span)

    return weighted(mixer, x, weight, 1e-6)


def hedgehog(mixer: LinearAttention, x: np.ndarray) -> np.ndarray:
    def features(x: np.ndarray, matrix: np.ndarray, bias: np.ndarray) -> np.ndarray:
        up, down = np.exp(x @ matrix + bias), np.exp(-x @ matrix - bias)
        return np.concatenate([up / up.sum(), down / down.sum()])

    names = ('query', 'query_bias', 'key', 'key_bias')
    query, shift_q, key, shift_k = (np.asarray(getattr(mixer.feature_map, name)[...], np.float64) for name in names)

    def weight(q: np.ndarray, k: np.ndarray, h: int, _: int) -> float:
        return features(q[h], query[h], shift_q[h]) @ features(k[h], key[h], shift_k[h])

    return weighted(mixer, x, weight, 1e-12)


def exponential_hedgehog(mixer: LinearAttention, x: np.ndarray) -> np.ndarray:
    query, key = (np.asarray(a[...], np.float64) for a in (mixer.feature_map.query, mixer.feature_map.key))

    def weight(q: np.ndarray, k: np.ndarray, h: int, _: int) -> float:
        up, down = q[h] @ query[h], k[h] @ key[h]
        return np.exp(up) @ np.exp(down) + np.exp(-up) @ np.exp(-down)

    return weighted(mixer, x, weight, eps=0.0)


def joint_hedgehog(mixer: LinearAttention, x: np.ndarray) -> np.ndarray:
    """As in flash-linear-attention, with its layer's norm in the place of the sum of weights."""

    def features(x: np.ndarray, matrix: np.ndarray, bias: np.ndarray) -> np.ndarray:
        y = np.exp(2 * np.concatenate([x @ matrix + bias, -x @ matrix - bias], axis=-1))
        return y / y.sum(-1, keepdims=True)

    q, k, v = (heads(apply(linear, x)) for linear in (mixer.query, mixer.key, mixer.value))
    names = ('query', 'query_bias', 'key', 'key_bias')
    query, shift_q, key, shift_k = (np.asarray(getattr(mixer.feature_map, name)[...], np.float64) for name in names)
    q, k = features(q, query, shift_q), features(k, key, shift_k)
    weights = np.einsum('thm,shm->hts', q, k) * np.tri(len(x)) / np.sqrt(q.shape[-1])
    return apply(mixer.output, normed(mixer, np.einsum('hts,shv->thv', weights, v)))


def rebased_by_head(mixer: LinearAttention, x: np.ndarray) -> np.ndarray:
    scale, bias = (np.asarray(getattr(mixer.feature_map, name)[...], np.float64) for name in ('scale', 'bias'))

    def norm(x: np.ndarray) -> np.ndarray:
        return (x - x.mean()) / np.sqrt(x.var() + 1e-5) * scale + bias

    return weighted(mixer, x, lambda q, k, h, _: (norm(q[h]) @ norm(k[h])) ** 2 / q.shape[-1], eps=1e-12)


def rebased(mixer: LinearAttention, x: np.ndarray) -> np.ndarray:
    names = ('query_scale', 'query_bias', 'key_scale', 'key_bias')
    gain_q, shift_q, gain_k, shift_k = (np.asarray(getattr(mixer.feature_map, name)[...], np.float64) for name in names)

    def norm(x: np.ndarray) -> np.ndarray:
        return (x - x.mean()) / np.sqrt(x.var() + 1e-5)

    def weight(q: np.ndarray, k: np.ndarray, h: int, _: int) -> float:
        return ((norm(q) * gain_q + shift_q)[h] @ (norm(k) * gain_k + shift_k)[h]) ** 2 / q.shape[-1]

    return weighted(mixer, x, weight, eps=1e-12)


def performer(mixer: LinearAttention, x: np.ndarray) -> np.ndarray:
    directions = np.asarray(mixer.feature_map.directions[...], np.float64)

    def features(x: np.ndarray, largest: float) -> np.ndarray:
        x = x / x.size**0.25
        return (np.exp(directions @ x - largest - x @ x / 2) + 1e-6) / np.sqrt(len(directions))

    def weight(q: np.ndarray, k: np.ndarray, h: int, _: int) -> float:
        largest = (directions @ q[h]).max() / q[h].size ** 0.25
        return features(q[h], largest) @ features(k[h], 0.0)

    return weighted(mixer, x, weight, eps=1e-12, added=True)


def nalaformer(mixer: LinearAttention, x: np.ndarray, causal: bool = True) -> np.ndarray:
    q, k, v = (heads(apply(linear, x)) for linear in (mixer.query, mixer.key, mixer.value))

    def turned(x: np.ndarray, place: int) -> np.ndarray:
        """As neighbours are in the released code, on one axis."""
        angle = np.zeros(len(x) // 2) if mixer.turn is None else place * 10000.0 ** -np.linspace(0, 1, len(x) // 2)
        numbers = (x[::2] + 1j * x[1::2]) * np.exp(1j * angle)
        return np.stack([numbers.real, numbers.imag], axis=-1).reshape(-1)

    def weight(q: np.ndarray, k: np.ndarray, t: int = 0, s: int = 0) -> float:
        norm = np.linalg.norm(q)
        power = 3 * (0.5 + np.tanh(norm))
        sides = [(np.maximum(n * q / norm, 0) ** power, np.maximum(n * k, 0) ** 3) for n in (1, -1)]
        return sum(turned(query, t) @ turned(key, s) for query, key in sides)

    out = np.zeros_like(v)
    for h in range(HEADS):
        for t in range(len(x)):
            seen = range(t + 1 if causal else len(x))
            total = sum(weight(q[t, h], k[s, h]) for s in seen)
            out[t, h] = sum(weight(q[t, h], k[s, h], t, s) * v[s, h] for s in seen) / (total + 1e-6)
    out = layer_normed(mixer.joint_norm, out.reshape(len(x), -1))
    return apply(mixer.output, out * silu(apply(mixer.gate.linear, x)))


def based(mixer: LinearAttention, x: np.ndarray) -> np.ndarray:
    def weight(q: np.ndarray, k: np.ndarray, h: int, _: int) -> float:
        score = q[h] @ k[h] / np.sqrt(q.shape[-1])
        return 1 + score + score**2 / 2

    return weighted(mixer, x, weight, eps=1e-12)


def taylorshift(mixer: LinearAttention, x: np.ndarray, **forms: bool) -> np.ndarray:
    """The direct form, over all pairs."""
    temperature = np.asarray(mixer.feature_map.temperature[...], np.float64)

    def weight(q: np.ndarray, k: np.ndarray, h: int, _: int) -> float:
        score = temperature[h] * q[h] @ k[h] / np.linalg.norm(q[h]) / np.linalg.norm(k[h])
        return 1 + score + score**2 / 2

    return weighted(mixer, x, weight, eps=0.0, **forms)


@pytest.mark.parametrize(
    'equations',
    [
        linear_transformer,
        retnet,
        gla,
        cosformer,
        hedgehog,
        nalaformer,
        performer,
        lightning,
        hgrn2,
        taylorshift,
    ],
)
def test_the_layer_is_that_of_the_paper(equations: Callable[[LinearAttention, np.ndarray], np.ndarray]):
    check_layer(equations.__name__, equations)


def test_options_are_the_forms_of_the_papers_where_released_code_has_others():
    layer_norm, with_bias = build(spec(LayerNorm)), build(spec(OutputGate, bias=True))
    check_layer('gla', gla, norm=layer_norm, gate=with_bias)
    check_layer('hedgehog', exponential_hedgehog, feature_map=build(spec(SignedExponentials)))
    check_layer('linear_transformer', functools.partial(linear_transformer, eps=0.0), normalizer=SumNormalizer(eps=0.0))
    check_layer('lightning', lightning, joint_norm=layer_norm)


def test_taylorshift_of_the_paper_reads_of_all_tokens():
    check_layer('taylorshift', functools.partial(taylorshift, causal=False), causal=False)


def test_retnet_may_rotate_as_in_its_released_code():
    check_layer('retnet', retnet, position=NeighbourRope())
    with pytest.raises(UserError, match='NeighbourRope rotates pairs in each of 2 parts of 6 channels; 4 must divide'):
        NeighbourRope(parts=2).rotate(jnp.zeros((1, 1, 1, 6)), jnp.zeros((1, 1), jnp.int32))


@pytest.mark.parametrize('causal', [True, False])
def test_taylorshift_may_grow_with_the_root_of_the_keys_over_channels(causal: bool):
    """As the models of the paper."""
    equations = functools.partial(taylorshift, causal=causal, grown=True)
    check_layer('taylorshift', equations, growth=RootGrowth(), causal=causal)


def test_what_grows_streams_and_needs_a_mean():
    made = functools.partial(LinearAttention, heads=4, feature_map=UnitTaylor, normalizer=SumNormalizer())
    with jax.enable_x64(False):
        check_decoding(Subject(functools.partial(made, growth=RootGrowth()), causal=True))
    with pytest.raises(UserError, match='growth multiplies a mean, which a normalizer makes'):
        made(DIM, normalizer=None, growth=RootGrowth(), rngs=nnx.Rngs(0))


@pytest.mark.parametrize('causal', [True, False])
def test_nalaformer_may_turn_what_is_summed_and_not_what_divides(causal: bool):
    equations = functools.partial(nalaformer, causal=causal)
    check_layer('nalaformer', equations, turn=NeighbourRope(parts=2), causal=causal)


def test_what_is_turned_streams():
    """Token by token as in one pass."""
    made = functools.partial(LinearAttention, heads=4, feature_map=NormAware(), normalizer=SumNormalizer())
    with jax.enable_x64(False):
        check_decoding(Subject(functools.partial(made, turn=NeighbourRope(parts=2)), causal=True))
    for wrong in ({'normalizer': None}, {'levels': LevelWeights}):
        with pytest.raises(UserError, match='turn rotates what is summed, not what divides it'):
            made(DIM, turn=NeighbourRope(parts=2), **wrong, rngs=nnx.Rngs(0))


@pytest.mark.slow
def test_nalaformer_over_a_long_sequence_in_bfloat16_stays_near_its_equations():
    length = 65536
    mixer = recipe('nalaformer', heads=1)
    x = 1 + noise(1, length, DIM, dtype=jnp.bfloat16)
    y, _ = jax.jit(mixer)(x, Context.full(1, length))
    rows = np.asarray(x[0], np.float64)
    q, k, v = (apply(linear, rows) for linear in (mixer.query, mixer.key, mixer.value))
    norm = np.linalg.norm(q, axis=1, keepdims=True)
    of_query = np.maximum(np.concatenate([q, -q], axis=1) / norm, 0) ** (3 * (0.5 + np.tanh(norm)))
    of_key = np.maximum(np.concatenate([k, -k], axis=1), 0) ** 3
    memory = np.cumsum(of_key[:, :, None] * np.concatenate([v, np.ones((length, 1))], axis=1)[:, None], axis=0)
    read = np.einsum('tm,tmv->tv', of_query, memory)
    out = read[:, :-1] / (read[:, -1:] + 1e-6)
    out = (out - out.mean(1, keepdims=True)) / np.sqrt(out.var(1, keepdims=True) + 1e-5)
    scale, shift = (np.asarray(p[...], np.float64) for p in (mixer.joint_norm.scale, mixer.joint_norm.bias))
    expected = apply(mixer.output, (out * scale + shift) * silu(apply(mixer.gate.linear, rows)))
    assert jnp.all(jnp.isfinite(y))
    np.testing.assert_allclose(np.asarray(y[0], np.float64), expected, rtol=0, atol=0.02 * np.abs(expected).max())


def test_what_performer_adds_to_features_is_small_against_them():
    """Of 64 channels: what is added makes all keys alike."""
    made = build(LINEAR['performer'].spec).kwargs['feature_map'](64, heads=1, rngs=nnx.Rngs(0))
    q, k = noise(1, 256, 1, 64), noise(1, 256, 1, 64, seed=1)
    of_query, _ = made.features(q, k, jnp.zeros((1, 256), jnp.int32))
    features = np.asarray(of_query, np.float64)[0, :, 0] * np.sqrt(of_query.shape[-1])
    assert np.median(features.mean(axis=1)) > 20 * made.eps


def test_cosformer_weighs_by_distance_inside_a_short_span():
    check_layer('cosformer', cosformer, feature_map=CosFormer(span=12))


def test_cosformer_gives_nan_beyond_its_span_and_nowhere_else():
    mixer = recipe('cosformer', feature_map=CosFormer(span=4))
    x, ctx = batch(np.asarray([[1, 1, 1, 1, 1, 1, 2, 2, 2]]))
    y, _ = jax.jit(mixer)(x, ctx)
    assert np.isnan(y[0]).all(axis=1).tolist() == [False] * 4 + [True] * 2 + [False] * 3
    expected = documents(lambda row: cosformer(mixer, row), x, ctx)
    np.testing.assert_allclose(y[0, [0, 1, 2, 3, 6, 7, 8]], expected[0, [0, 1, 2, 3, 6, 7, 8]], rtol=1e-9, atol=1e-9)
    state, streamed = mixer.init_state(1, 9, jnp.float64), []
    for t in range(9):
        at = Context(ctx.positions[:, t : t + 1], ctx.segments[:, t : t + 1])
        out, state = mixer(x[:, t : t + 1], at, state)
        streamed.append(out)
    np.testing.assert_allclose(jnp.concatenate(streamed, axis=1), y, rtol=1e-9, atol=1e-9)


def test_cosformer_read_both_ways_gives_nan_in_documents_beyond_its_span():
    """Their first queries are near, but not all keys are near to them."""
    mixer = recipe('cosformer', feature_map=CosFormer(span=4), causal=False)
    x, ctx = batch(np.asarray([[1, 1, 1, 1, 1, 1, 2, 2, 2, 2]]))
    y, _ = jax.jit(mixer)(x, ctx)
    assert np.isnan(y[0]).all(axis=1).tolist() == [True] * 6 + [False] * 4
    near, _ = mixer(x[:, 6:], Context.full(1, 4))
    np.testing.assert_allclose(y[:, 6:], near, rtol=1e-9, atol=1e-9)


def test_the_maps_of_based_and_rebased_are_their_polynomials():
    check_layer('hedgehog', based, feature_map=Taylor())
    check_layer('hedgehog', rebased, feature_map=build(spec(SquaredProduct)))
    check_layer('hedgehog', rebased_by_head, feature_map=build(spec(HeadSquaredProduct)))
    mixer = build(HYBRIDS['based'].pattern[0])(DIM, heads=HEADS, rngs=nnx.Rngs(0))
    assert mixer.init_state(1, 9, jnp.float32).memory.shape == (1, HEADS, 1 + 16 + 16 * 17 // 2, DIM // HEADS + 1)


def test_hedgehog_of_flash_linear_attention_has_one_softmax():
    """Whose maps start as the identity."""
    layer = {'normalizer': None, 'norm': build(spec(RMSNorm, eps=1e-5)), 'scale': None}
    check_layer('hedgehog', joint_hedgehog, feature_map=build(spec(JointHedgehog)), **layer)
    x = noise(1, 2, 1, 3)
    q, k = JointHedgehog(3, heads=1, rngs=nnx.Rngs(0)).features(x, x, jnp.zeros((1, 2), jnp.int32))
    np.testing.assert_allclose(q, jax.nn.softmax(jnp.concatenate([2 * x, -2 * x], axis=-1)), rtol=1e-5)
    np.testing.assert_array_equal(q, k)


@pytest.mark.parametrize('feature_map', [JointHedgehog, HeadSquaredProduct, SquaredProduct])
def test_maps_that_no_row_has_stream(feature_map: type):
    """Token by token as in one pass; divided by a norm, as sums of weights of the second map may vanish."""
    with jax.enable_x64(False):
        make = functools.partial(
            LinearAttention, heads=4, feature_map=feature_map, norm=functools.partial(RMSNorm, eps=1e-5)
        )
        check_decoding(Subject(make, causal=True))


def test_decays_by_slope_weaken_with_depth():
    check_layer('lightning', lightning, decay=build(spec(SlopeDecay, depth=0.5)))


def test_a_lower_bound_keeps_the_forget_gate_open():
    check_layer('hgrn2', hgrn2, gates=build(spec(TiedKeys, lower_bound=0.4)))


def test_where_logits_have_no_lower_end_forget_gates_of_hgrn2_are_at_their_bound():
    """A memory that fades by the bound with every token, keys of what that leaves free, and gradients without NaN."""
    mixer = recipe('hgrn2', gates=build(spec(TiedKeys, lower_bound=0.4)))
    x, ctx = batch(np.ones((1, LENGTH), int))
    q, v = (heads(apply(linear, np.asarray(x[0]))) for linear in (mixer.query, mixer.value))
    weights = 0.6 * np.tril(0.4 ** (np.arange(LENGTH)[:, None] - np.arange(LENGTH)))
    out = np.einsum('thk,ts,shv->thv', silu(q), weights, v).reshape(LENGTH, -1) / np.sqrt(DIM // HEADS)
    out = out / np.sqrt((out**2).mean(-1, keepdims=True) + 1e-5) * np.asarray(mixer.joint_norm.scale[...])
    for logit in (-1e4, -np.inf):
        mixer.key = lambda x, logit=logit: jnp.full_like(x, logit)
        np.testing.assert_allclose(mixer(x, ctx)[0][0], apply(mixer.output, out), rtol=1e-9, atol=1e-9)
    gates = mixer.gates
    for logit in (-1e4, -np.inf):
        k = jnp.full((1, 1, 1, 2), logit)
        slope = jax.grad(lambda k: sum(jnp.sum(each) for each in gates._tied(k)))(k)
        np.testing.assert_array_equal(slope, 0)


def test_widths_of_the_papers():
    assert recipe('retnet').value.weight.shape == (DIM, 2 * DIM)
    assert recipe('gla').key.weight.shape == (DIM, DIM // 2)
    assert recipe('gla').decay.down.weight.shape == (DIM, 16)
    assert recipe('gla').norm.eps == 1e-5


def test_bidirectional_linear_transformer_counts_every_pair_once():
    mixer = recipe('linear_transformer', causal=False)
    x, ctx = batch()
    expected = documents(lambda row: linear_transformer(mixer, row, causal=False), x, ctx)
    np.testing.assert_allclose(jax.jit(mixer)(x, ctx)[0], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('name', ['retnet', 'gla'])
def test_bidirectional_decay_is_what_lies_between(name: str):
    mixer = recipe(name, causal=False)
    x, ctx = batch(np.ones((1, 5), np.int32))
    q, k, v, _ = mixer._project(x, ctx, None)
    log_decay = mixer.decay(x)
    log_decay = np.broadcast_to(log_decay if log_decay.ndim == 4 else log_decay[None, None, :, None], q.shape)[0]
    got = mixer.write.both_ways(q, k, v, Terms(mixer.decay(x)), scale=None, segments=None)[0]
    q, k, v = (np.asarray(a[0]) for a in (q, k, v))
    expected = np.zeros_like(v)
    for h in range(HEADS):
        for t in range(5):
            for s in range(5):
                between = log_decay[s + 1 : t + 1, h] if s < t else log_decay[t:s, h]
                weight = (q[t, h] * k[s, h] * np.exp(between.sum(0))).sum() / np.sqrt(q.shape[-1])
                expected[t, h] += weight * v[s, h]
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)


def test_queries_keys_and_values_each_have_their_prelude():
    mixer = LinearAttention(DIM, heads=HEADS, prelude=ShortConv, value_ratio=2.0, rngs=nnx.Rngs(0))
    x, ctx = batch()
    run = jax.jit(mixer)
    whole, _ = run(x, ctx)
    state, pieces = mixer.init_state(2, LENGTH, jnp.float64), []
    assert [s.inputs.shape[-1] for s in state.preludes] == [DIM, DIM, 2 * DIM]
    for start, stop in ((0, 1), (1, 5), (5, 9)):
        part = Context(ctx.positions[:, start:stop], ctx.segments[:, start:stop])
        y, state = run(x[:, start:stop], part, state)
        pieces.append(y)
    np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), whole, rtol=1e-9, atol=1e-9)
    conv = mixer.preludes[1]
    alone, keys = jax.jit(lambda x: (conv(mixer.key(x), ctx.segments)[0], mixer._project(x, ctx, None)[1]))(x)
    np.testing.assert_allclose(keys.reshape(2, LENGTH, -1), alone)


def test_the_state_holds_the_sum_of_the_weights_and_keeps_its_type():
    mixer = recipe('linear_transformer')
    assert isinstance(mixer.feature_map, EluPlusOne) and mixer.normalizer == SumNormalizer(eps=1e-6)
    state = mixer.init_state(3, 100, jnp.bfloat16)
    assert state.memory.shape == (3, HEADS, DIM // HEADS, DIM // HEADS + 1) and state.memory.dtype == jnp.float32
    assert mixer.init_state(3, 100, jnp.float64).memory.dtype == jnp.float64


def test_sums_of_weights_apart_are_those_of_a_column_of_ones(monkeypatch):
    """Values that fill tiles of the kernels have their sums from a call of their own.

    With documents, in parts of a row after states that are not empty, and in gradients.
    """
    mixer = recipe('linear_transformer', value_dim=128)
    ctx = context(((1, 5), (2, 4)), ((1, 9),))
    x, weights = noise(2, 9, DIM), noise(2, 9, DIM, seed=1)

    def in_two(x):
        state, read = mixer.init_state(2, 9, jnp.float32), []
        for part in (slice(0, 4), slice(4, 9)):
            here = Context(ctx.positions[:, part], ctx.segments[:, part])
            y, state = mixer(x[:, part], here, state)
            read.append(y)
        y = jnp.concatenate(read, axis=1)
        return jnp.sum(y * weights), (y, state)

    runs = []
    for lanes in (128, 1000):
        monkeypatch.setattr('attnlab.functional.counted.LANES', lanes)
        runs.append((mixer._counts_apart, *jax.jit(jax.value_and_grad(in_two, has_aux=True))(x)))
    (apart, *found), (beside, *expected) = runs
    assert apart and not beside
    for actual, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-5)


def test_mistakes_are_named():
    x = noise(1, 3, 8)
    with pytest.raises(UserError, match=r'key_ratio 0.5 of dim 8 over 3 heads is 1.33.*, not a whole number'):
        LinearAttention(8, heads=3, key_ratio=0.5, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match='levels divide the past; a bidirectional mixer needs levels=None'):
        LinearAttention(8, heads=2, causal=False, levels=LevelWeights, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match='PreconditionedDelta has no levels, since its keys follow from all before'):
        make_mixer('preconditioned_gdn', 8, heads=2, levels=LevelWeights, rngs=nnx.Rngs(0))
    mixer = LinearAttention(8, heads=2, levels=build(spec(LevelWeights, count=2)), rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match=r'rows have 3 tokens; 2 levels reach over 2: give levels\.count'):
        mixer(x, Context.full(1, 3))
    with pytest.raises(UserError, match='cannot be streamed'):
        LinearAttention(8, heads=2, causal=False, decay=LowRankDecay, rngs=nnx.Rngs(0)).init_state(1, 4, jnp.float32)
    with pytest.raises(UserError, match=r'the delta rule needs a write strength.* such as WriteStrength'):
        LinearAttention(8, heads=2, write=Delta(), rngs=nnx.Rngs(0))(x, Context.full(1, 3))
    with pytest.raises(UserError, match=r'Delta writes in order; a bidirectional mixer needs write=Additive'):
        mixer = LinearAttention(8, heads=2, causal=False, write=Delta(), gates=WriteStrength, rngs=nnx.Rngs(0))
        mixer(x, Context.full(1, 3))
    with pytest.raises(UserError, match=r'lower_bound of TiedKeys is 1.0; it must be from 0 to below 1'):
        TiedKeys(8, heads=2, key_dim=4, value_dim=4, lower_bound=1.0, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match=r'TiedKeys make the decay themselves'):
        LinearAttention(8, heads=2, gates=TiedKeys, decay=LowRankDecay, rngs=nnx.Rngs(0))(x, Context.full(1, 3))


@pytest.mark.parametrize(
    ('name', 'changed', 'sentence'),
    [
        ('gla', {'feature_map': Hedgehog}, 'LowRankDecay has a decay for each of 4 channels of a key, and Hedgehog'),
        ('kda', {'feature_map': Taylor()}, 'LowRankStepDecay has a decay for each of 4 channels of a key, and Taylor'),
        (
            'gated_delta_net2',
            {'feature_map': NormAware(), 'decay': StepDecay},
            'ChannelStrengths has a strength for each of 4 channels of a key, and the feature_map makes 8 features',
        ),
        *(
            ('gated_delta_product', {'feature_map': each}, f'{each.__name__} has a map for each of 2 heads of keys and')
            for each in (Hedgehog, SignedExponentials, SquaredProduct)
        ),
        ('comba', {'write': Delta(steps=2)}, 'CorrectedUnitNorm has a map for each of 2 heads of keys and was given 4'),
        ('ttt_linear', {'feature_map': Taylor()}, 'feature_map of FastWeights makes 15 features of 4 channels'),
    ],
)
def test_parts_for_other_channels_or_heads_than_there_are_are_named(name, changed, sentence):
    sizes = {'key_ratio': 1.0, 'value_ratio': 1.0} if name in ('gla', 'gated_delta_product', 'comba') else {}

    def called(x: jax.Array) -> jax.Array:
        return make_mixer(name, DIM, heads=HEADS, **sizes, **changed, rngs=nnx.Rngs(0))(x, Context.full(1, 3))[0]

    with pytest.raises(UserError, match=f'^{sentence}'):
        jax.eval_shape(called, jax.ShapeDtypeStruct((1, 3, DIM), jnp.float32))


def test_a_key_that_serves_two_values_is_two_keys():
    make = functools.partial(
        LinearAttention, DIM, gates=WriteStrength, write=Delta(), prelude=ShortConv, rngs=nnx.Rngs(0)
    )
    shared, apart = make(heads=2, key_dim=3, value_dim=2, values_per_key=2), make(heads=4, key_dim=3, value_dim=2)
    nnx.update(apart.value, nnx.state(shared.value))
    for part in ('gates', 'output'):
        nnx.update(getattr(apart, part), nnx.state(getattr(shared, part)))
    for one, other, prelude in ((shared.query, apart.query, 0), (shared.key, apart.key, 1)):
        other.weight[...] = twice(one.weight[...])
        apart.preludes[prelude].taps[...] = twice(shared.preludes[prelude].taps[...])
    apart.preludes[2].taps[...] = shared.preludes[2].taps[...]
    x = noise(2, 7, DIM)
    np.testing.assert_array_equal(shared(x, Context.full(2, 7))[0], apart(x, Context.full(2, 7))[0])
    assert shared.init_state(2, 7, x.dtype).memory.shape == (2, 4, 3, 2)


def twice(weights: jax.Array) -> jax.Array:
    """Columns of heads of 3 channels, each head two times."""
    return jnp.repeat(weights.reshape(len(weights), -1, 3), 2, axis=1).reshape(len(weights), -1)


@pytest.mark.parametrize('name', ['linear_transformer', 'mlstm', 'ecoformer'])
def test_a_token_repeated_in_float16_is_read_where_sums_are_out_of_range(name):
    mixer = build(LINEAR[name].spec)(64, heads=2, rngs=nnx.Rngs(0))
    x = jnp.broadcast_to(10 * noise(1, 1, 64), (1, 2048, 64))
    run = jax.jit(lambda x: mixer(x, Context.full(1, 2048))[0])
    found, expected = run(x.astype(jnp.float16)), run(x)
    assert found.dtype == jnp.float16
    assert np.linalg.norm(found.astype(jnp.float32) - expected) < 0.05 * np.linalg.norm(expected)
