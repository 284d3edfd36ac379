"""State-space models that read both ways, against one recurrence after another in float64 with numpy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.context import Context
from attnlab.mixers.state_space.two_sided import CrossScanSSM, TwoWaySSM
from attnlab.nn.convolutions import DepthwiseConv
from attnlab.nn.orders import Snake
from attnlab.nn.preludes import ShortConv
from attnlab.testing.contract import cast_parameters
from attnlab.testing.noise import perturbed

GRID, DIM, STATE = (3, 5), 4, 2


def outputs(kind, segments=None, **options):
    """A mixer in float64, an input of fifteen tokens, and the output."""
    x = np.random.default_rng(0).standard_normal((15, DIM))
    with jax.enable_x64(True):
        mixer = cast_parameters(perturbed(kind(DIM, state=STATE, rngs=nnx.Rngs(0), **options)), jnp.float64)
        graphdef, variables = nnx.split(mixer)
        ctx = dataclasses.replace(
            Context.full(1, 15), grid=GRID, segments=None if segments is None else jnp.asarray(segments)[None]
        )
        y = jax.jit(lambda variables, x: nnx.merge(graphdef, variables)(x, ctx)[0])(variables, jnp.asarray(x)[None])
        return mixer, x, np.asarray(y)[0]


def array(parameter):
    return np.asarray(parameter[...])


def silu(x):
    return x / (1 + np.exp(-x))


def scanned(scan, x):
    """The recurrence of `SelectiveScan`, token by token."""
    low, B, C = np.split(x @ array(scan.select.weight), [1, 1 + STATE], axis=1)
    dt = np.log1p(np.exp(low @ array(scan.step.weight) + array(scan.step_size.bias)))
    state, y = np.zeros((x.shape[1], STATE)), np.zeros_like(x)
    for t in range(len(x)):
        state = np.exp(-dt[t, :, None] * np.exp(array(scan.A_log))) * state + (dt[t] * x[t])[:, None] * B[t]
        y[t] = state @ C[t] + array(scan.D) * x[t]
    return y


def convolved(conv, x):
    """The causal convolution of `ShortConv`, token by token."""
    taps = array(conv.taps)
    before = np.concatenate([np.zeros((len(taps) - 1, x.shape[1])), x])
    return silu(sum(taps[i] * before[i : i + len(x)] for i in range(len(taps))) + array(conv.bias))


def test_vim_is_two_scans():
    segments = np.repeat([1, 2], [6, 9])
    mixer, u, found = outputs(TwoWaySSM, segments, prelude=functools.partial(ShortConv, bias=True))
    x, z = np.split(u @ array(mixer.input.weight), 2, axis=1)
    read = []
    for document in (x[:6], x[6:]):
        ways = [
            scanned(scan, convolved(conv, document[::way]))[::way]
            for way, conv, scan in zip((1, -1), mixer.convs, mixer.scans, strict=True)
        ]
        read.append(sum(ways) / 2)
    expected = (np.concatenate(read) * silu(z)) @ array(mixer.output.weight)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


def raster(rows, columns):
    """Places by rows, and by columns."""
    return [(i, j) for i in range(rows) for j in range(columns)], [(i, j) for j in range(columns) for i in range(rows)]


def snake(rows, columns):
    """Places by rows there and back from the top left, and by columns there and back from the bottom left."""
    return (
        [(i, j if i % 2 == 0 else columns - 1 - j) for i in range(rows) for j in range(columns)],
        [(rows - 1 - i if j % 2 == 0 else i, j) for j in range(columns) for i in range(rows)],
    )


def scanned_four_ways(scans, image, orders):
    """The sum of four scans, by rows, by columns, and both from the end."""
    total, two = np.zeros_like(image), orders(*image.shape[:2])
    for scan, places in zip(scans, [*two, *(each[::-1] for each in two)], strict=True):
        for place, y in zip(places, scanned(scan, np.stack([image[each] for each in places])), strict=True):
            total[place] += y
    return total


@pytest.mark.parametrize(
    ('orders', 'options'),
    [(raster, {}), (snake, {'orders': Snake(), 'conv': functools.partial(DepthwiseConv, bias=False)})],
    ids=['vmamba', 'lamamba'],
)
def test_ss2d_is_four_scans(orders, options):
    mixer, u, found = outputs(CrossScanSSM, **options)
    x, z = np.split(u @ array(mixer.input.weight), 2, axis=1)
    image = np.pad(x.reshape(*GRID, -1), ((1, 1), (1, 1), (0, 0)))
    taps = array(mixer.conv.taps)
    near = sum(taps[i, j] * image[i : i + GRID[0], j : j + GRID[1]] for i in range(3) for j in range(3))
    image = silu(near if mixer.conv.bias is None else near + array(mixer.conv.bias))
    y = scanned_four_ways(mixer.scans.directions, image, orders).reshape(15, -1)
    apart = y - y.mean(axis=1, keepdims=True)
    normed = apart / np.sqrt((apart**2).mean(axis=1, keepdims=True) + 1e-5)
    normed = normed * array(mixer.norm.scale) + array(mixer.norm.bias)
    np.testing.assert_allclose(found, (normed * silu(z)) @ array(mixer.output.weight), rtol=1e-9, atol=1e-12)
