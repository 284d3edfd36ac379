"""Formats against their definitions, written again in numpy, and against the types of ml_dtypes, to the bit."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from attnlab.errors import UserError
from attnlab.quantize import formats
from attnlab.quantize.formats import (
    ELEMENTS,
    Affine,
    Crossed,
    Fixed,
    FixedFloating,
    Floating,
    Logarithmic,
    Microscaling,
    MinMax,
    Rotated,
    SearchedFloating,
    Symmetric,
    format_called,
    gaussian_grid,
    hadamard,
    nearest,
    storage_called,
)
from attnlab.quantize.packing import packed, unpacked

X = np.random.default_rng(0).standard_normal((6, 50)).astype(np.float32)
X[2] = 0
X[3, :25] *= 100


def groups(x: np.ndarray, scope: int | str) -> list[tuple[slice, slice]]:
    """Where the numbers lie that share a scale."""
    rows, columns = x.shape
    if scope == 'tensor':
        return [(slice(None), slice(None))]
    size = columns if scope == 'row' else int(scope)
    return [(slice(row, row + 1), slice(at, at + size)) for row in range(rows) for at in range(0, columns, size)]


def by_group(rounding, x: np.ndarray, scope: int | str) -> np.ndarray:
    result = np.empty_like(x)
    for place in groups(x, scope):
        result[place] = rounding(x[place])
    return result


def symmetric(x, bits):
    top = np.float32(2 ** (bits - 1) - 1)
    scale = np.abs(x).max() / top
    return np.zeros_like(x) if scale == 0 else np.clip(np.round(x / scale), -top, top) * scale


def affine(x, bits):
    top = np.float32(2**bits - 1)
    low, high = min(x.min(), np.float32(0)), max(x.max(), np.float32(0))
    scale = (high - low) / top
    if scale == 0:
        return np.zeros_like(x)
    zero = np.round(-low / scale)
    return (np.clip(np.round(x / scale) + zero, 0, top) - zero) * scale


def min_max(x, bits):
    top = np.float32(2**bits - 1)
    scale = (x.max() - x.min()) / top
    return x if scale == 0 else np.clip(np.round((x - x.min()) / scale), 0, top) * scale + x.min()


def logarithmic(x, bits, octaves):
    most, last = np.abs(x).max(), 2 ** (bits - 1) - 1
    if most == 0:
        return np.zeros_like(x)
    with np.errstate(divide='ignore'):
        level = np.round(-np.log2(np.abs(x) / most) / octaves)
    sizes = most * np.exp2(-octaves * np.where(level < last, level, 0)).astype(np.float32)
    return np.where(level < last, np.sign(x) * sizes, 0).astype(np.float32)


@pytest.mark.parametrize('scope', ['tensor', 'row', 16])
@pytest.mark.parametrize(
    ('kind', 'definition'),
    [
        (Symmetric(4), symmetric),
        (Affine(2), affine),
        (Affine(8), affine),
        (MinMax(2), min_max),
        (Logarithmic(4), lambda x, bits: logarithmic(x, bits, 1.0)),
        (Logarithmic(5, octaves=0.5), lambda x, bits: logarithmic(x, bits, 0.5)),
    ],
    ids=('int4', 'affine2', 'affine8', 'minmax2', 'log4', 'logsqrt5'),
)
def test_formats_are_their_definitions(kind, definition, scope):
    kind = dataclasses.replace(kind, scope=scope)
    stored = kind.encode(jnp.asarray(X))
    expected = by_group(lambda x: definition(x, kind.bits), X, scope)
    np.testing.assert_array_equal(kind.decode(stored, X.shape, jnp.float32), expected)
    np.testing.assert_array_equal(kind.rounded(jnp.asarray(X)[None]), expected[None])
    filled = len(groups(X, scope)) * (X.size if scope == 'tensor' else 50 if scope == 'row' else 16)
    assert stored['codes'].nbytes == len(groups(X, scope)) * -(-filled // len(groups(X, scope)) * kind.bits // 8)
    assert 8 * sum(array.nbytes for array in stored.values()) == kind.stored_bits(X.shape)


@pytest.mark.parametrize('kind', [Symmetric(4), Affine(5), Floating('e2m1'), SearchedFloating('e2m1')], ids=str)
def test_compiled_mapped_or_neither_the_numbers_are_the_same(kind):
    x = jnp.asarray(X)
    expected = kind.rounded(x)
    np.testing.assert_array_equal(jax.jit(kind.rounded)(x), expected)
    np.testing.assert_array_equal(jax.jit(jax.vmap(kind.rounded))(x[:, None])[:, 0], expected)


NAMED = (
    'int8',
    'affine8',
    'minmax8',
    'log8',
    'adalog8',
    'e4m3',
    'e2m1',
    'adae2m1',
    'mxe4m3',
    'mxe2m1',
    'higgs4',
    'cross8',
)


@pytest.mark.parametrize('kind', [*map(format_called, NAMED), FixedFloating('e4m3', 0.1), Fixed(8, 0.1, 3)], ids=str)
def test_what_is_no_number_is_rounded_to_none(kind):
    x = jnp.asarray([[1.0, -2, 0, 3], [np.nan, 1, 2, -3], [0, 0, 0, 0]])
    found = jax.jit(kind.rounded)(x)
    assert jnp.isnan(found[1, 0])
    np.testing.assert_array_equal(found[::2], kind.rounded(x[::2]))


def test_a_block_with_an_infinite_number_is_none():
    found = Microscaling('e4m3').rounded(jnp.asarray([[np.inf, 1.0], [1.0, 2.0]]))
    np.testing.assert_array_equal(found, [[np.nan, np.nan], [1, 2]])


@pytest.mark.parametrize('name', ELEMENTS)
def test_floating_numbers_are_those_of_ml_dtypes(name):
    element = ELEMENTS[name]
    kinds = {'e4m3': 'float8_e4m3fn', 'e5m2': 'float8_e5m2', 'e3m2': 'float6_e3m2fn', 'e2m3': 'float6_e2m3fn'}
    x = np.concatenate([X[0] * 4, np.float32(2.0) ** np.arange(-20, 16), *[X[1] * 1e-3, X[4] * 40], [0.0, -5e4, 5e4]])
    x = np.concatenate([x, element.levels[:-1] + np.diff(element.levels) / 2]).astype(np.float32)
    x = np.clip(x, -element.largest, element.largest)
    codes = np.asarray(jax.jit(element.codes)(x))
    if name == 'e3m0':
        # It has no counterpart: by the definition of LLM-FP4, with a bias of 3.
        exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(x), 1e-30)) + 3), 1)
        expected = np.exp2(exponent - 3) * np.round(x / np.exp2(exponent - 3))
    else:
        kind = getattr(ml_dtypes, kinds.get(name, 'float4_e2m1fn'))
        expected = x.astype(kind).astype(np.float32)
        same = expected != 0  # of zero the sign is not kept
        np.testing.assert_array_equal(codes[same], x.astype(kind).view(np.uint8)[same])
    np.testing.assert_array_equal(element.numbers(jnp.asarray(codes)), expected)


def test_floating_scales():
    for place in groups(X, 16):
        part = X[place]
        stored = Floating('e2m1', scope='row').rounded(jnp.asarray(part))
        scale = np.abs(part).max() / np.float32(6)
        expected = (part / (scale or 1)).astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * scale
        np.testing.assert_array_equal(stored, expected)
        blocks = Microscaling('e2m1', scope='row').rounded(jnp.asarray(part))
        exponent = np.floor(np.log2(np.abs(part).max())) - 2 if part.any() else 0
        scaled = np.clip(part / np.float32(2.0**exponent), -6, 6).astype(ml_dtypes.float4_e2m1fn)
        np.testing.assert_array_equal(blocks, scaled.astype(np.float32) * np.float32(2.0**exponent))
    assert Microscaling('e2m1').stored_bits((4, 64)) == 4 * 64 * 4 + 8 * 8


def test_a_searched_base_is_the_best_of_the_list():
    kind = Logarithmic(4, octaves=None)
    found = np.sum((np.asarray(kind.rounded(jnp.asarray(X))) - X) ** 2, axis=1)
    each = [np.sum((logarithmic(row[None], 4, octaves) - row) ** 2) for octaves in formats.SEARCHED for row in X]
    np.testing.assert_allclose(found, np.reshape(each, (-1, len(X))).min(axis=0), rtol=1e-5)


def test_rotated_groups():
    np.testing.assert_array_equal(hadamard(jnp.eye(4)), [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])
    # Mean squared errors of the best grids of 2, 4, 8 and 16 numbers for a Gaussian (Max 1960).
    normal = np.random.default_rng(1).standard_normal(200_000)
    for bits, error in ((2, 0.1175), (3, 0.0345), (4, 0.0095)):
        grid = gaussian_grid(bits)[:, 0]
        nearest = grid[np.searchsorted((grid[1:] + grid[:-1]) / 2, normal)]
        np.testing.assert_allclose(np.mean((nearest - normal) ** 2), error, rtol=0.02)
    # Heavy tails: a rotation makes them nearly Gaussian, so that the error is that of a Gaussian.
    heavy = np.random.default_rng(2).standard_t(3, (16, 1000)).astype(np.float32)
    rounded = np.asarray(Rotated(4).rounded(jnp.asarray(heavy)))
    assert np.sum((rounded - heavy) ** 2) / np.sum(heavy**2) < 0.011
    plain = np.asarray(Symmetric(4).rounded(jnp.asarray(heavy)))
    assert np.sum((plain - heavy) ** 2) / np.sum(heavy**2) > 0.04


@pytest.mark.parametrize(
    ('dimension', 'bits', 'error'), [(2, 2, 0.1076), (2, 3, 0.0298), (2, 4, 0.0078), (4, 2, 0.0970)]
)
def test_grids_of_points_are_where_their_cells_are(dimension, bits, error):
    grid = gaussian_grid(bits, dimension)
    assert grid.shape == (2 ** (bits * dimension), dimension) and grid.dtype == np.float32
    # A number of one grid has the error 0.1175, 0.0345 or 0.0095: points are better.
    assert error < {2: 0.1175, 3: 0.0345, 4: 0.0095}[bits] * 0.93
    x = np.random.default_rng(4).standard_normal((60_000, dimension)).astype(np.float32)
    codes = np.asarray(nearest(jnp.asarray(x), jnp.asarray(grid)))
    distances = np.sum((x[:500, None] - grid) ** 2, axis=-1)
    np.testing.assert_allclose(distances[np.arange(500), codes[:500]], distances.min(axis=1), atol=1e-5)
    np.testing.assert_allclose(np.mean((grid[codes] - x) ** 2), error, rtol=0.02)
    # Of a grid that cannot be bettered by moving a point, each is the mean of what is nearest to it.
    counts = np.bincount(codes, minlength=len(grid))
    common = np.flatnonzero(counts > 50)
    assert len(common) > 0.7 * len(grid)
    for index in common:
        cell = x[codes == index]
        assert np.all(np.abs(cell.mean(axis=0) - grid[index]) < 6 * cell.std(axis=0) / np.sqrt(len(cell)))


def test_rotated_groups_of_points_are_their_definition():
    rows = np.random.default_rng(5).standard_t(3, (3, 50)).astype(np.float32)
    for kind in (Rotated(2, 32, 4), Rotated(3, 32, 2), Rotated(2, 4, 4)):
        size, grid = kind.scope, gaussian_grid(kind.bits, kind.dimension).astype(np.float64)
        signs = np.asarray(hadamard(jnp.eye(size)), np.float64)
        groups = np.pad(rows, ((0, 0), (0, -50 % size))).reshape(-1, size).astype(np.float64)
        norms = np.linalg.norm(groups, axis=1, keepdims=True)
        points = (groups / np.maximum(norms, 1e-30) @ signs).reshape(-1, kind.dimension)
        codes = np.argmin(np.sum((points[:, None] - grid) ** 2, axis=-1), axis=1)
        expected = (norms * (grid[codes].reshape(-1, size) @ signs) / size).reshape(3, -1)[:, :50]
        np.testing.assert_allclose(kind.rounded(jnp.asarray(rows)), expected, rtol=1e-4, atol=1e-4)
        count = len(groups)
        assert kind.stored_bits((3, 50)) == count * (size * kind.bits + 32)


def test_a_step_of_row_and_column_leaves_fewer_zeros():
    x = np.random.default_rng(3).standard_normal((512, 1024)).astype(np.float32)
    x[:, :6] *= np.linspace(20, 60, 6, dtype=np.float32)
    zeros = [np.mean(np.asarray(Crossed(8, alpha).rounded(jnp.asarray(x))) == 0) for alpha in (1.0, 0.15)]
    assert zeros[0] > 0.15
    assert zeros[1] < 0.03


@pytest.mark.parametrize('alpha', [0.0, 0.15, 1.0])
@pytest.mark.parametrize('bits', [4, 8])
def test_a_step_of_row_and_column_by_its_definition(bits, alpha):
    # Rows and columns of several sizes, so that a step of one of them alone is another.
    x = np.random.default_rng(4).standard_normal((2, 20, 48)).astype(np.float32)
    x *= np.geomspace(0.1, 10, 48, dtype=np.float32) * np.geomspace(1, 30, 20, dtype=np.float32)[:, None]
    rows = x.reshape(40, 48).astype(np.float64)
    sizes = np.abs(rows)
    step = sizes.max(axis=1, keepdims=True) ** alpha * sizes.max(axis=0) ** (1 - alpha) / (2 ** (bits - 1) - 1)
    levels = rows / step
    # Between two levels float32 may take either.
    clear = np.abs(levels - np.floor(levels) - 0.5) > 1e-4
    found = np.asarray(Crossed(bits, alpha).rounded(jnp.asarray(x)), np.float64).reshape(40, 48)
    assert clear.mean() > 0.99
    np.testing.assert_allclose(found[clear], (np.round(levels) * step)[clear], rtol=1e-5)


@pytest.mark.parametrize('element', ['e2m1', 'e3m0', 'e4m3'])
def test_a_searched_bias_has_the_least_error_of_all(element):
    x = np.random.default_rng(3).standard_t(3, (4, 64)).astype(np.float32)
    kind = ELEMENTS[element]
    levels = np.concatenate([-kind.levels[::-1], kind.levels])

    def error(row, bias):
        scale = np.abs(row).max() / kind.largest * 2.0**-bias
        return np.min((row[:, None] - scale * levels) ** 2, axis=1).sum()

    least = [min(error(row, bias) for bias in [0, *formats.BIASES]) for row in x.astype(np.float64)]
    found, whole = (
        np.sum((np.asarray(each(element).rounded(jnp.asarray(x)), np.float64) - x) ** 2, axis=1)
        for each in (SearchedFloating, Floating)
    )
    np.testing.assert_allclose(found, least, rtol=1e-4)
    assert (found <= whole * (1 + 1e-6)).all() and found.sum() < 0.97 * whole.sum()
    # Numbers that the format has stay what they are, also where all are zero.
    exact = jnp.asarray(np.stack([kind.levels[-6:] * 0.75, np.zeros(6)]).astype(np.float32))
    np.testing.assert_array_equal(SearchedFloating(element).rounded(exact), exact)


@pytest.mark.parametrize('bits', [2, 3, 5, 8, 12])
def test_codes_survive_packing(bits):
    codes = np.random.default_rng(bits).integers(0, 2**bits, (3, 7))
    stored = packed(jnp.asarray(codes), bits)
    assert stored.shape == (3, -(-7 * bits // 8))
    np.testing.assert_array_equal(unpacked(stored, bits, 7), codes)


def test_names():
    assert format_called('int4@32') == Symmetric(4, scope=32)
    assert format_called('mxe2m1') == Microscaling('e2m1')
    assert format_called('e4m3@tensor') == Floating('e4m3', scope='tensor')
    assert format_called('adae2m1@16') == SearchedFloating('e2m1', scope=16)
    assert format_called('adalog3') == Logarithmic(3, octaves=None)
    assert format_called('higgs3x2') == Rotated(3, dimension=2)
    assert format_called('higgs2x4@64') == Rotated(2, 64, 4)
    wrong = {
        'int1': 'bits is 1; it must be at least 2',
        'int4@some': "'int4@some' ends in 'some'; after @ comes tensor, row, or how many",
        'in4': "there is no format 'in4'; choose from intN",
        'cross8@32': "'cross8@32': Crossed has no scope 32",
        'higgs4@48': 'a power of two',
        'higgs4x4': 'Rotated has no grid of 4 bits in 4 dimensions; there are 2 bits in 2 dimensions, 3 bits in 2',
        'higgs2x4@2': 'Rotated has groups of 2, fewer than the 4 numbers of a point',
        'e4m4': "element of Floating is 'e4m4'; it must be one of e5m2",
    }
    for name, message in wrong.items():
        with pytest.raises(UserError, match=message):
            format_called(name)
    with pytest.raises(UserError, match="'cross8' rounds activations and stores nothing"):
        storage_called('cross8')
