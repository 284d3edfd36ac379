"""Mixers of linear cost on images, and SegMAN's, against their equations in float64 with numpy, loops over places."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.errors import UserError
from attnlab.functional.grids import axial_angles
from attnlab.mixers.spatial.cascaded import LocalAttentionAndScan
from attnlab.mixers.spatial.linear import (
    GridAgentAttention,
    GridInLine,
    GridNormAwareAttention,
    GridSoftmaxFreeAttention,
)
from attnlab.nn.convolutions import DepthwiseConv
from tests.mixers.spatial.test_equations import (
    DIM,
    GRID,
    HEADS,
    OFFSETS,
    inputs,
    made,
    mapped,
    normed,
    outputs,
    seen_in_neighbourhoods,
    silu,
    softmax,
    split,
)
from tests.mixers.state_space.test_two_sided import raster, scanned_four_ways


def joined(heads):
    return heads.swapaxes(0, 1).reshape(35, -1)


def gelu(x):
    with jax.enable_x64(True):
        return np.asarray(jax.nn.gelu(jnp.asarray(x), approximate=False))


def near(conv, x):
    """A depthwise convolution of any width, each kernel for some neighbouring channels."""
    taps = np.repeat(np.asarray(conv.taps[...]), conv.shared, axis=-1)
    width = len(taps)
    around = np.pad(x.reshape(*GRID, -1), [(width // 2,) * 2] * 2 + [(0, 0)])
    y = np.zeros((*GRID, x.shape[1]))
    for place in np.ndindex(GRID):
        part = around[place[0] : place[0] + width, place[1] : place[1] + width]
        y[place] = (part * taps).sum(axis=(0, 1))
    return y.reshape(x.shape) + (0 if conv.bias is None else np.asarray(conv.bias[...]))


def resized(table):
    """PyTorch's bilinear interpolation without aligned corners, place by place."""
    found = np.zeros((*table.shape[:2], *GRID))
    for place in np.ndindex(GRID):
        at = [np.clip((i + 0.5) * 7 / size - 0.5, 0, 6) for i, size in zip(place, GRID, strict=True)]
        low = [min(int(each), 5) for each in at]
        (y, x), (dy, dx) = low, [each - first for each, first in zip(at, low, strict=True)]
        found[..., place[0], place[1]] = (
            (1 - dy) * (1 - dx) * table[..., y, x]
            + (1 - dy) * dx * table[..., y, x + 1]
            + dy * (1 - dx) * table[..., y + 1, x]
            + dy * dx * table[..., y + 1, x + 1]
        )
    return found.reshape(*table.shape[:2], 35)


def rotated(x, channels):
    """Pairs of neighbouring channels turned by place: the first half by the row, the others by the column."""
    z = x[..., 0::2] + 1j * x[..., 1::2]
    quarter = channels // 4
    frequencies = 10000.0 ** -(np.linspace(0, 1, quarter) if quarter > 1 else np.zeros(1))
    rows, columns = np.unravel_index(np.arange(35), GRID)
    z = z * np.exp(1j * np.concatenate([rows[:, None] * frequencies, columns[:, None] * frequencies], axis=1))
    return np.stack([z.real, z.imag], axis=-1).reshape(x.shape)


def test_agents_of_a_grid():
    mixer, x = made(GridAgentAttention, heads=HEADS, side=2)[0], inputs()
    q, k, v = (mapped(linear, x) for linear in (mixer.query, mixer.key, mixer.value))
    image = q.reshape(*GRID, DIM)
    agents = np.stack([image[y:z, a:b].mean(axis=(0, 1)) for y, z in ((0, 3), (2, 5)) for a, b in ((0, 4), (3, 7))])
    scale = (DIM // HEADS) ** -0.5
    first = scale * np.einsum('hnk,htk->hnt', split(agents), split(k)) + resized(np.asarray(mixer.agent_bias[...]))
    second = scale * np.einsum('hnk,htk->hnt', split(agents), split(q)) + resized(np.asarray(mixer.query_bias[...]))
    y = softmax(second.swapaxes(1, 2)) @ (softmax(first) @ split(v))
    expected = mapped(mixer.output, joined(y) + near(mixer.conv, v))
    found = outputs(GridAgentAttention, x, heads=HEADS, side=2)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-11)


def test_inline_on_a_grid_has_weights_that_sum_to_one():
    mixer, x = made(GridInLine, heads=HEADS)[0], inputs()
    q, k, v = (mapped(linear, x) for linear in (mixer.query, mixer.key, mixer.value))
    scores = np.einsum('htk,hsk->hts', split(q), split(k)) / (35 * np.sqrt(DIM // HEADS))
    weights = scores - scores.mean(axis=-1, keepdims=True) + 1 / 35
    np.testing.assert_allclose(weights.sum(axis=-1), 1)

    def grouped(linear, mean):
        parts = zip(np.split(mean, HEADS), np.asarray(linear.weight[...]), strict=True)
        return np.concatenate([part @ weight for part, weight in parts]) + np.asarray(linear.bias[...])

    factors = grouped(mixer.second, gelu(grouped(mixer.first, x.mean(axis=0)))).reshape(DIM, 3, 3)
    around, rest = np.pad(v.reshape(*GRID, DIM), ((1, 1), (1, 1), (0, 0))), np.zeros((*GRID, DIM))
    for (y, c), d in ((place, d) for place in np.ndindex(GRID) for d in range(DIM)):
        rest[y, c, d] = (around[y : y + 3, c : c + 3, d] * factors[d]).sum()
    expected = mapped(mixer.output, joined(weights @ split(v)) + rest.reshape(35, DIM))
    np.testing.assert_allclose(outputs(GridInLine, x, heads=HEADS), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize('normalised', [False, True])
def test_landmarks_of_a_grid(normalised):
    options = {'heads': HEADS, 'normalised': normalised, 'iterations': 60}
    mixer, x = made(GridSoftmaxFreeAttention, **options)[0], inputs()
    v, k = mapped(mixer.value, x), DIM // HEADS
    read = []
    for q, values in zip(split(mapped(mixer.query, x)) * k**-0.25, split(v), strict=True):
        image = q.reshape(*GRID, k)
        blocks = [image[y : y + 2, c : c + 2].reshape(-1) for y in (0, 2) for c in (0, 2, 4)]
        landmarks = gelu(normed(mixer.norm, mapped(mixer.landmark, np.stack(blocks))))
        kernel = [np.exp(-((a[:, None] - landmarks[None]) ** 2).sum(axis=-1) / 2) for a in (q, landmarks)]
        inverse = np.linalg.inv(kernel[1] + 0.01 * np.eye(6))
        if normalised:
            root = kernel[1].sum(axis=1) ** -0.5
            inverse = root[:, None] * inverse * root
        read.append(kernel[0] @ inverse @ kernel[0].T @ values)
    expected = mapped(mixer.output, joined(np.stack(read)) + near(mixer.conv, v))
    found = outputs(GridSoftmaxFreeAttention, x, **options)
    np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-9)


def test_norm_aware_attention_on_a_grid():
    mixer, x = made(GridNormAwareAttention, heads=HEADS)[0], inputs()
    q, k, v = (mapped(linear, x) for linear in (mixer.query, mixer.key, mixer.value))
    read = []
    for own, keys, values in zip(*(split(each) for each in (q, k, v)), strict=True):
        norm = np.linalg.norm(own, axis=1, keepdims=True)
        power = 3 * (0.5 + np.tanh(norm))
        halves = [np.maximum(sign * own, 0) ** power / norm**power for sign in (1, -1)]
        of_keys = [np.maximum(sign * keys, 0) ** 3 for sign in (1, -1)]
        total = sum(a @ b.T for a, b in zip(halves, of_keys, strict=True)).mean(axis=1, keepdims=True) + 1e-6
        scores = sum(rotated(a, 4) @ rotated(b, 4).T for a, b in zip(halves, of_keys, strict=True))
        read.append(scores @ values / 35 / total)
    y = normed(mixer.norm, joined(np.stack(read)) + near(mixer.conv, v)) * silu(mapped(mixer.gate, x))
    found = outputs(GridNormAwareAttention, x, heads=HEADS)
    np.testing.assert_allclose(found, mapped(mixer.output, y), rtol=1e-8, atol=1e-10)


def test_local_attention_and_scans():
    options = {'heads': HEADS, 'side': 3, 'state': 2}
    mixer, x = made(LocalAttentionAndScan, **options)[0], inputs()
    q, k, v = np.split(mapped(mixer.qkv, x), 3, axis=1)
    seen, channels = seen_in_neighbourhoods(1), DIM // HEADS
    rows = (OFFSETS + 2) @ np.array([5, 1])
    bias = np.where(seen, np.asarray(mixer.bias[...])[np.where(seen, rows, 0)].transpose(2, 0, 1), -np.inf)
    scores = np.stack([rotated(a, channels) @ rotated(b, channels).T for a, b in zip(split(q), split(k), strict=True)])
    read = joined(softmax(scores / np.sqrt(channels) + bias) @ split(v))
    scanned = scanned_four_ways(
        mixer.scans.directions, silu(normed(mixer.before, near(mixer.conv, read))).reshape(*GRID, -1), raster
    )
    y = read + normed(mixer.after, scanned.reshape(35, -1)) + near(mixer.near, v)
    found = outputs(LocalAttentionAndScan, x, **options)
    np.testing.assert_allclose(found, mapped(mixer.output, y), rtol=1e-8, atol=1e-10)


def test_angles_may_end_at_the_base():
    angles = axial_angles((3, 3), 16, 10000.0, jnp.float32, inclusive=True)
    np.testing.assert_allclose(angles[4], np.tile(10000.0 ** -np.linspace(0, 1, 4), 2), rtol=1e-5)


def test_kernels_of_a_convolution_are_shared():
    with pytest.raises(UserError, match='kernels of DepthwiseConv is 3; it must divide dim, which is 8'):
        DepthwiseConv(8, kernels=3, rngs=nnx.Rngs(0))
