"""Mixers of grids against their equations, written out in float64 with numpy, on grids that suit no window."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import attnlab
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.mixers.linear.agent import AgentAttention
from attnlab.mixers.spatial.factorised import FactorisedAttention
from attnlab.mixers.spatial.gated import VisionGatedLinearAttention
from attnlab.mixers.spatial.linear import GridAgentAttention
from attnlab.mixers.spatial.planes import PlaneAttention
from attnlab.mixers.spatial.polarized import PolarizedAttention
from attnlab.mixers.spatial.reduced import EmbeddingFreeAttention, PooledReduction, ReducedAttention, StridedReduction
from attnlab.mixers.spatial.windows import NeighbourhoodAttention, WindowAttention, neighbours
from attnlab.testing.contract import cast_parameters
from attnlab.testing.noise import noise, perturbed

GRID, DIM, HEADS = (5, 7), 8, 2
PLACES = np.stack(np.unravel_index(np.arange(35), GRID), axis=-1)
OFFSETS = PLACES[:, None] - PLACES[None]


@functools.cache
def made(kind, **options):
    """A mixer in float64, and its compiled call on one row of the grid."""
    with jax.enable_x64(True):
        mixer = cast_parameters(perturbed(kind(DIM, rngs=nnx.Rngs(0), **options)), jnp.float64)
        graphdef, variables = nnx.split(mixer)
        ctx = dataclasses.replace(Context.full(1, 35), grid=GRID)
        return mixer, jax.jit(lambda variables, x: nnx.merge(graphdef, variables)(x, ctx)[0]), variables


def outputs(kind, x, **options):
    _, call, variables = made(kind, **options)
    with jax.enable_x64(True):
        return np.asarray(call(variables, jnp.asarray(x)[None]))[0]


def inputs(seed=0):
    return np.random.default_rng(seed).standard_normal((35, DIM))


def mapped(linear, x):
    y = x @ np.asarray(linear.weight[...])
    return y if linear.bias is None else y + np.asarray(linear.bias[...])


def split(x):
    """Heads first."""
    return x.reshape(len(x), HEADS, -1).swapaxes(0, 1)


def softmax(scores):
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def attended(q, k, v, output, bias=0.0):
    """Heads read, joined and mapped."""
    scores = np.einsum('htk,hsk->hts', split(q), split(k)) / np.sqrt(q.shape[1] // HEADS) + bias
    read = np.einsum('hts,hsk->thk', softmax(scores), split(v))
    return mapped(output, read.reshape(len(q), -1))


def normed(norm, x):
    apart = x - x.mean(axis=-1, keepdims=True)
    unit = apart / np.sqrt((apart**2).mean(axis=-1, keepdims=True) + 1e-5)
    return unit * np.asarray(norm.scale[...]) + np.asarray(norm.bias[...])


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def seen_in_windows(shifted):
    """Windows of 3 x 3 on the grid filled up to 6 x 9; tokens that a shift brings together from both ends are apart."""
    window = (PLACES - (1 if shifted else 0)) % np.array([6, 9]) // 3
    same = (window[:, None] == window[None]).all(axis=-1)
    return same & (np.abs(OFFSETS) < 3).all(axis=-1)


def seen_in_neighbourhoods(dilation):
    """The three nearest keys on every axis among those of equal remainder, moved inwards at borders."""
    seen = np.ones((35, 35), bool)
    for axis, size in enumerate(GRID):
        own = np.zeros((size, size), bool)
        for i in range(size):
            alike = np.arange(i % dilation, size, dilation)
            first = min(max(i // dilation - 1, 0), len(alike) - 3)
            own[i, alike[first : first + 3]] = True
        seen &= own[PLACES[:, None, axis], PLACES[None, :, axis]]
    return seen


WINDOWED = {
    'windows': (WindowAttention, {}, seen_in_windows(shifted=False), 1),
    'shifted windows': (WindowAttention, {'shifted': True}, seen_in_windows(shifted=True), 1),
    'neighbourhoods': (NeighbourhoodAttention, {}, seen_in_neighbourhoods(1), 1),
}


@pytest.mark.parametrize('name', WINDOWED)
def test_windows_and_neighbourhoods(name):
    kind, options, seen, dilation = WINDOWED[name]
    mixer, x = made(kind, heads=HEADS, side=3, **options)[0], inputs()
    q, k, v = np.split(mapped(mixer.qkv, x), 3, axis=1)
    rows = (OFFSETS // dilation + 2) @ np.array([5, 1])
    bias = np.where(seen, np.asarray(mixer.bias[...])[np.where(seen, rows, 0)].transpose(2, 0, 1), -np.inf)
    found = outputs(kind, x, heads=HEADS, side=3, **options)
    np.testing.assert_allclose(found, attended(q, k, v, mixer.output, bias), rtol=1e-10, atol=1e-12)
    # What is forbidden has no influence at all, and what is not has some.
    for token in (0, 17, 34):
        changed = x.copy()
        changed[token] += 1
        differs = (outputs(kind, changed, heads=HEADS, side=3, **options) != found).any(axis=1)
        np.testing.assert_array_equal(differs, seen[:, token])


@pytest.mark.parametrize(
    'tables',
    [
        lambda rngs: [WindowAttention(64, heads=16, rngs=rngs).bias],
        lambda rngs: [NeighbourhoodAttention(64, heads=16, rngs=rngs).bias],
        lambda rngs: [(planes := PlaneAttention(64, heads=4, rngs=rngs)).of_queries, planes.of_keys, planes.of_values],
        lambda rngs: [(agent := GridAgentAttention(64, heads=4, rngs=rngs)).agent_bias, agent.query_bias],
        lambda rngs: [(agent := AgentAttention(64, heads=4, rngs=rngs)).agent_bias, agent.query_bias],
    ],
    ids=['windows', 'neighbourhoods', 'planes', 'agents of a grid', 'agents'],
)
def test_tables_start_normal_and_are_not_cut_at_two_deviations(tables):
    """Released code cuts at plus and minus 2, which is a hundred deviations away."""
    for table in tables(nnx.Rngs(0)):
        values = np.asarray(table[...])
        assert 0.0185 < values.std() < 0.0215 and np.abs(values).max() > 0.045


@pytest.mark.parametrize('name', ['axial_rope', 'relu_vit'])
def test_attention_of_images_has_biases(name):
    mixer = attnlab.make_mixer(name, 16, heads=2, rngs=nnx.Rngs(0))
    assert all(linear.bias is not None for linear in (mixer.query, mixer.key, mixer.value, mixer.output))


def test_dilated_neighbours_are_those_of_equal_remainder():
    index, offsets = neighbours((6, 8), 3, 2)
    places = np.stack(np.unravel_index(np.arange(48), (6, 8)), axis=-1)
    assert (np.diff(np.sort(index)) > 0).all() and index.shape == (48, 9)
    np.testing.assert_array_equal(places[:, None] - places[index], 2 * offsets)
    assert np.abs(offsets).max() == 2 and set(index[0].tolist()) == {0, 2, 4, 16, 18, 20, 32, 34, 36}
    full, _ = neighbours((3, 3), 3, 1)
    np.testing.assert_array_equal(full, np.tile(np.arange(9), (9, 1)))


def test_dilated_neighbourhoods():
    """On a grid with as many rows as a side of 3 at a distance of 2 needs, and more columns."""
    grid, side, dilation = (6, 8), 3, 2
    mixer = perturbed(NeighbourhoodAttention(DIM, heads=HEADS, side=side, dilation=dilation, rngs=nnx.Rngs(0)))
    ctx, x = dataclasses.replace(Context.full(1, 48), grid=grid), noise(1, 48, DIM)
    places = np.stack(np.unravel_index(np.arange(48), grid), axis=-1)
    apart, seen = places[:, None] - places[None], np.ones((48, 48), bool)
    for axis, size in enumerate(grid):
        place = places[:, axis]
        first = np.clip(place // dilation - 1, 0, size // dilation - side)
        steps = place[None] // dilation - first[:, None]
        seen &= (apart[..., axis] % dilation == 0) & (steps >= 0) & (steps < side)
    assert (seen.sum(axis=1) == side**2).all()
    q, k, v = np.split(mapped(mixer.qkv, np.asarray(x, np.float64)[0]), 3, axis=1)
    rows = (apart // dilation + side - 1) @ np.array([2 * side - 1, 1])
    bias = np.where(seen, np.asarray(mixer.bias[...])[np.where(seen, rows, 0)].transpose(2, 0, 1), -np.inf)
    found = jax.jit(lambda x: mixer(x, ctx)[0])(x)[0]
    np.testing.assert_allclose(found, attended(q, k, v, mixer.output, bias), rtol=1e-4, atol=1e-5)


def test_a_window_as_large_as_the_grid_is_not_shifted():
    x = inputs()
    found = [outputs(WindowAttention, x, heads=HEADS, side=7, shifted=shifted) for shifted in (False, True)]
    np.testing.assert_array_equal(*found)


def blocks(x):
    """Blocks of 2 x 2 tokens, row by row; the last row and column are in none."""
    image = x.reshape(*GRID, -1)
    return np.stack([image[y : y + 2, c : c + 2].reshape(4, -1) for y in (0, 2) for c in (0, 2, 4)])


def test_keys_of_a_strided_reduction():
    mixer, x = made(ReducedAttention, heads=HEADS)[0], inputs()
    conv, norm = mixer.reduction.conv, mixer.reduction.norm
    reduced = normed(norm, mapped(conv.linear, blocks(x).reshape(6, -1)))
    k, v = np.split(mapped(mixer.key_value, reduced), 2, axis=1)
    expected = attended(mapped(mixer.query, x), k, v, mixer.output)
    np.testing.assert_allclose(outputs(ReducedAttention, x, heads=HEADS), expected, rtol=1e-10, atol=1e-12)
    assert StridedReduction(DIM, ratio=1, rngs=nnx.Rngs(0)).conv is None


def test_keys_of_a_pooled_reduction():
    reduction = functools.partial(PooledReduction, side=3)
    mixer, x = made(ReducedAttention, heads=HEADS, reduction=reduction)[0], inputs()
    image, bins = x.reshape(*GRID, DIM), ([(0, 2), (1, 4), (3, 5)], [(0, 3), (2, 5), (4, 7)])
    means = np.stack([image[y:z, a:b].mean(axis=(0, 1)) for y, z in bins[0] for a, b in bins[1]])
    pre = normed(mixer.reduction.norm, mapped(mixer.reduction.linear, means))
    with jax.enable_x64(True):
        reduced = np.asarray(jax.nn.gelu(jnp.asarray(pre), approximate=False))
    k, v = np.split(mapped(mixer.key_value, reduced), 2, axis=1)
    expected = attended(mapped(mixer.query, x), k, v, mixer.output)
    found = outputs(ReducedAttention, x, heads=HEADS, reduction=reduction)
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


def test_attention_without_maps():
    mixer, x = made(EmbeddingFreeAttention, heads=HEADS)[0], inputs()
    u = mapped(mixer.linear, blocks(x).mean(axis=1))
    expected = attended(x, u, u, mixer.output)
    np.testing.assert_allclose(outputs(EmbeddingFreeAttention, x, heads=HEADS), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize('join', ['parallel', 'sequential'])
def test_polarized_gates(join):
    mixer, x = made(PolarizedAttention, join=join)[0], inputs()

    def channels(x):
        gate, scores = mixer.channels, mapped(mixer.channels.query, x)[:, 0]
        return sigmoid(normed(gate.norm, mapped(gate.up, softmax(scores) @ mapped(gate.value, x))))

    def places(x):
        gate = mixer.places
        return sigmoid(mapped(gate.value, x) @ softmax(mapped(gate.query, x).mean(axis=0)))[:, None]

    z = channels(x) * x
    expected = z + places(x) * x if join == 'parallel' else places(z) * z
    np.testing.assert_allclose(outputs(PolarizedAttention, x, join=join), expected, rtol=1e-10, atol=1e-12)


def test_the_gate_of_places_has_its_whole_range():
    """That of the released code does not: a softmax over places is between 0 and 1, where the paper has any number."""
    gate, x = made(PolarizedAttention)[0].places, 10 * inputs()
    with jax.enable_x64(True):
        found = np.asarray(gate(jnp.asarray(x)[None], None))
    assert found.min() < 0.1 and found.max() > 0.9
    for size in (0.1, 1, 10, 1e3):
        released = sigmoid(softmax(mapped(gate.value, size * x) @ mapped(gate.query, size * x).mean(axis=0)))
        assert released.min() >= 0.5 and released.max() <= sigmoid(1.0)


def test_fewer_keys_are_those_of_the_whole_ratio():
    """`factor` multiplies the ratio, and no variable depends on either."""
    grid, x = (8, 12), noise(1, 96, DIM)
    ctx = dataclasses.replace(Context.full(1, 96), grid=grid)

    def run(**sizes):
        mixer = perturbed(EmbeddingFreeAttention(DIM, heads=HEADS, rngs=nnx.Rngs(0), **sizes))
        return mixer, np.asarray(jax.jit(lambda x: mixer(x, ctx)[0])(x))[0]

    (mixer, few), (whole, same), (_, more) = run(ratio=2, factor=2), run(ratio=4, factor=1), run(ratio=2)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(mixer), nnx.state(whole))
    np.testing.assert_array_equal(few, same)
    means = np.asarray(x, np.float64).reshape(2, 4, 3, 4, DIM).mean(axis=(1, 3)).reshape(6, DIM)
    u = mapped(mixer.linear, means)
    np.testing.assert_allclose(few, attended(np.asarray(x)[0], u, u, mixer.output), rtol=1e-4, atol=1e-5)
    assert np.abs(few - more).max() > 1e-3


def test_grids_that_are_refused():
    ctx = dataclasses.replace(Context.full(1, 10), grid=(2, 5))
    with pytest.raises(UserError, match=r'every axis of the grid must have at least 3 tokens, and it is \(2, 5\)'):
        NeighbourhoodAttention(DIM, heads=HEADS, side=3, rngs=nnx.Rngs(0))(noise(1, 10, DIM), ctx)
    with pytest.raises(
        UserError, match=r'windows of 5 x 5 tokens cannot be filled up by reflection on a grid of \(2, 5\)'
    ):
        FactorisedAttention(32, heads=2, side=3, rngs=nnx.Rngs(0))(noise(1, 10, 32), ctx)
    with pytest.raises(UserError, match='FactorisedAttention has dim 24 and 2 heads; dim must be a multiple of 16'):
        FactorisedAttention(24, heads=2, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match=r'the ratio of reduction is 3; the grid is \(2, 5\)'):
        EmbeddingFreeAttention(DIM, heads=HEADS, ratio=3, rngs=nnx.Rngs(0))(noise(1, 10, DIM), ctx)


def convolved(conv, image):
    """A depthwise convolution, 3 x 3, zeros outside."""
    taps, around = np.asarray(conv.taps[...]), np.pad(image, ((1, 1), (1, 1), (0, 0)))
    height, width = image.shape[:2]
    y = sum(taps[i, j] * around[i : i + height, j : j + width] for i in range(3) for j in range(3))
    return y if conv.bias is None else y + np.asarray(conv.bias[...])


def silu(x):
    return x * sigmoid(x)


def rms(norm, x):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * np.asarray(norm.scale[...])


def test_gated_linear_attention_from_both_ends():
    mixer, x = made(VisionGatedLinearAttention, heads=HEADS)[0], inputs()
    u = silu(convolved(mixer.conv, x.reshape(*GRID, DIM)).reshape(35, DIM))
    q, k, v = (split(mapped(linear, u)) for linear in (mixer.query, mixer.key, mixer.value))
    decays = np.log(sigmoid(mapped(mixer.decay, mapped(mixer.narrow, u)))) / 16
    read = np.zeros_like(v)
    for way, log_decay in zip((1, -1), np.split(decays, 2, axis=1), strict=True):
        decay = np.exp(split(log_decay))
        memory = np.zeros((HEADS, q.shape[-1], v.shape[-1]))
        for t in range(35)[::way]:
            memory = decay[:, t, :, None] * memory + k[:, t, :, None] * v[:, t, None]
            read[:, t] += np.einsum('hk,hkv->hv', q[:, t], memory) / (2 * np.sqrt(q.shape[-1]))
    share = split(sigmoid(mapped(mixer.share, u)))
    y = share * rms(mixer.far, read) + (1 - share) * rms(mixer.near, split(u))
    expected = mapped(mixer.output, silu(y.swapaxes(0, 1).reshape(35, DIM)))
    np.testing.assert_allclose(outputs(VisionGatedLinearAttention, x, heads=HEADS), expected, rtol=1e-8, atol=1e-10)


def read_by(q, k, v):
    """Attention of one head."""
    return softmax(q @ k.T / np.sqrt(q.shape[1])) @ v


@pytest.mark.parametrize('ratio', [1, 2])
def test_factorised_attention(ratio):
    options, dim = {'heads': HEADS, 'side': 3, 'ratio': ratio}, 16 * ratio
    with jax.enable_x64(True):
        mixer = cast_parameters(perturbed(FactorisedAttention(dim, rngs=nnx.Rngs(0), **options)), jnp.float64)
        x = np.random.default_rng(0).standard_normal((35, dim))
        ctx = dataclasses.replace(Context.full(1, 35), grid=GRID)
        found = np.asarray(mixer(jnp.asarray(x)[None], ctx)[0])[0]
    whole, q, image = 2 * ratio, mapped(mixer.query, x), x.reshape(*GRID, dim)
    corners = [(y, c) for y in range(0, 6 - ratio, ratio) for c in range(0, 8 - ratio, ratio)]
    cut = [image[y : y + ratio, c : c + ratio, :whole].reshape(-1) for y, c in corners]
    reduced = normed(mixer.reduction.norm, mapped(mixer.reduction.map.linear, np.stack(cut)))
    k, v = np.split(mapped(mixer.key_value, reduced), 2, axis=1)
    v = v + convolved(mixer.value_conv, v.reshape(5 // ratio, 7 // ratio, -1)).reshape(v.shape)
    reads = [read_by(q[:, :whole], k, v)]
    source = mapped(mixer.local, convolved(mixer.conv, image[..., whole:]))
    size, start = 14, 0
    for factors, dilation in zip(mixer.factors, (1, 2)[:ratio], strict=True):
        span = 2 * dilation + 1
        filled = np.pad(source[..., start : start + size], ((0, -5 % span), (0, -7 % span), (0, 0)), mode='reflect')
        windows = [
            filled[y : y + span : dilation, c : c + span : dilation]
            for y in range(0, len(filled), span)
            for c in range(0, filled.shape[1], span)
        ]
        means = np.mean(windows, axis=0).reshape(9, HEADS, size // HEADS)
        k, v = np.split(mapped(factors.key_value, mapped(factors.first, means)), 2, axis=-1)
        v = v + convolved(factors.conv, v.reshape(3, 3, size)).reshape(v.shape)
        heads = q[:, whole:].reshape(35, HEADS, -1)[..., start // HEADS : (start + size) // HEADS]
        reads.append(np.concatenate([read_by(heads[:, h], k[:, h], v[:, h]) for h in range(HEADS)], axis=1))
        start += size
    np.testing.assert_allclose(found, mapped(mixer.output, np.concatenate(reads, axis=1)), rtol=1e-9, atol=1e-11)
