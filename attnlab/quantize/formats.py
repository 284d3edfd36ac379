"""Formats of few bits: how real numbers become codes and scales, and which numbers those stand for.

Numbers are given in rows: of a weight a row is what one output reads, of activations a token. What shares a scale is
the `scope` of a format: `tensor`, `row`, or so many consecutive numbers of a row, the last group of which is filled up.

    Symmetric(4, scope=32).rounded(x)
    stored = Symmetric(4, scope=32).encode(weight.T)    # codes packed in bytes, and scales
"""

import abc
import dataclasses
import functools
import math
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int, Shaped
from scipy.special import ndtr, ndtri

from attnlab.errors import UserError
from attnlab.functional.precision import wide_dtype
from attnlab.quantize.packing import packed, unpacked
from attnlab.signature import checked_fields

Stored = dict[str, Shaped[Array, 'g ...']]
"""Arrays of a format by name, a row a group: `codes`, packed in bytes, and what they are decoded with."""

SCALES = ('float32', 'float16', 'bfloat16')
"""Types in which scales may be stored."""


@runtime_checkable
class Rounding(Protocol):
    """Whatever rounds numbers to few that can be told apart."""

    def rounded(self, x: Float[Array, '*b d']) -> Float[Array, '*b d']:
        """The numbers, each replaced by one of those that can be stored; of the same type."""


class Format(abc.ABC):
    """A format in which numbers can be stored; subclasses are frozen dataclasses."""

    scope: int | str

    @property
    @abc.abstractmethod
    def code_bits(self) -> int:
        """Bits of a code."""

    @property
    def stable(self) -> bool:
        """Whether what was rounded is rounded to itself, `rounded(rounded(x)) = rounded(x)`, but for last bits.

        States need this: they are stored again after every token.
        """
        return True

    def encode(self, x: Float[Array, 'r d']) -> Stored:
        """The codes of rows of numbers, and their scales, computed in float32 or better.

        Steps of codes are finer than numbers of half the bits lie.
        """
        return self.encode_groups(self.groups(x.astype(wide_dtype(x.dtype))))

    def groups(self, x: Shaped[Array, 'r d']) -> Shaped[Array, 'g n']:
        """The numbers of rows by what shares a scale, the last group of a row filled up."""
        size = self.group_size(x.shape)
        if self.scope != 'tensor':
            x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size)), mode=self.filled)
        return x.reshape(-1, size)

    def decode(self, stored: Mapping[str, Array], shape: tuple[int, ...], dtype: DTypeLike) -> Float[Array, 'r d']:
        """The numbers that were stored as rows of this shape, computed in float32 or better."""
        rows, columns = shape
        numbers = self.decode_groups(stored, self.group_size(shape), wide_dtype(dtype))
        return numbers.astype(dtype).reshape(rows, -1)[:, :columns]

    def rounded(self, x: Float[Array, '*b d']) -> Float[Array, '*b d']:
        """The numbers that are stored in the place of `x`."""
        rows = x.reshape(-1, x.shape[-1])
        return self.decode(self.encode(rows), rows.shape, x.dtype).reshape(x.shape)

    def stored_bits(self, shape: tuple[int, ...]) -> int:
        """Bits that rows of this shape take, scales included."""
        stored = jax.eval_shape(self.encode, jax.ShapeDtypeStruct(shape, jnp.float32))
        return 8 * sum(array.size * array.dtype.itemsize for array in stored.values())

    def group_size(self, shape: tuple[int, ...]) -> int:
        """How many numbers share a scale in rows of this shape."""
        rows, columns = shape
        return rows * columns if self.scope == 'tensor' else columns if self.scope == 'row' else int(self.scope)

    @property
    def filled(self) -> Literal['edge', 'constant']:
        """What a group that a row does not fill ends with: `edge`, its last number again, or `constant`, zeros."""
        return 'edge'

    @abc.abstractmethod
    def encode_groups(self, x: Float[Array, 'g n']) -> Stored:
        """The codes of groups, each with its own scale."""

    @abc.abstractmethod
    def decode_groups(self, stored: Mapping[str, Array], size: int, dtype: DTypeLike) -> Float[Array, 'g n']:
        """The numbers of groups of `size`."""


class Elementwise(Format):
    """A format in which a number's code follows from it and from what its group is decoded with, such as a scale."""

    def encode_groups(self, x: Float[Array, 'g n']) -> Stored:
        return self.stored_with(x, self.fitted(x))

    def stored_with(self, x: Float[Array, 'g n'], fitted: Stored) -> Stored:
        """The codes of groups by what they are decoded with, and that."""
        return {'codes': packed(self.codes(x, fitted), self.code_bits)} | fitted

    def decode_groups(self, stored: Mapping[str, Array], size: int, dtype: DTypeLike) -> Float[Array, 'g n']:
        return self.numbers(unpacked(stored['codes'], self.code_bits, size), stored, dtype)

    @abc.abstractmethod
    def fitted(self, x: Float[Array, 'g n']) -> Stored:
        """What groups are decoded with, such as scales; without the codes."""

    @abc.abstractmethod
    def codes(self, x: Float[Array, 'g n'], fitted: Mapping[str, Array]) -> Int[Array, 'g n']:
        """The codes of numbers by what their groups are decoded with."""

    @abc.abstractmethod
    def numbers(self, codes: Int[Array, 'g n'], fitted: Mapping[str, Array], dtype: DTypeLike) -> Float[Array, 'g n']:
        """The numbers that codes stand for."""


def _check(name: str, bits: int, scope: int | str, scales: str = 'float32') -> None:
    if not 2 <= bits <= 16:
        limit = 'at least 2' if bits < 2 else 'at most 16'
        raise UserError(f'bits is {bits}; it must be {limit}')
    if isinstance(scope, str) and scope not in ('tensor', 'row'):
        raise UserError(f"scope of {name} is {scope!r}; it must be 'tensor', 'row' or how many numbers share a scale")
    if scales not in SCALES:
        raise UserError(f'scales of {name} is {scales!r}; it must be one of {", ".join(SCALES)}')


@checked_fields
@dataclasses.dataclass(frozen=True)
class Uniform(Elementwise):
    """Base class of codes that are equally far apart.

    Attributes:
      bits: of a code, 2 to 16.
      scope: what shares a scale.
      scales: the type of stored scales; codes are taken with the scale as stored.

    Raises `UserError` for an unknown number of bits, scope or type.
    """

    bits: int
    scope: int | str = 'row'
    scales: str = 'float32'

    def __post_init__(self) -> None:
        _check(type(self).__name__, self.bits, self.scope, self.scales)

    @property
    def code_bits(self) -> int:
        return self.bits


class Symmetric(Uniform):
    """`x ~ s q`, `q` from `-(2^(bits-1) - 1)` to as much, `s = max |x| / (2^(bits-1) - 1)`."""

    @property
    def _top(self) -> int:
        return 2 ** (self.bits - 1) - 1

    def fitted(self, x: Float[Array, 'g n']) -> Stored:
        return {'scales': _step(jnp.max(jnp.abs(x), axis=-1), self._top, self.scales)}

    def codes(self, x: Float[Array, 'g n'], fitted: Mapping[str, Array]) -> Int[Array, 'g n']:
        levels = jnp.clip(jnp.round(_divided(x, fitted['scales'][:, None])), -self._top, self._top)
        return levels.astype(jnp.int32) + self._top

    def numbers(self, codes: Int[Array, 'g n'], fitted: Mapping[str, Array], dtype: DTypeLike) -> Float[Array, 'g n']:
        return (codes - self._top).astype(dtype) * fitted['scales'][:, None].astype(dtype)


class Affine(Uniform):
    """`x ~ s (q - z)`, `q` from 0 to `2^bits - 1`, over the range of `x` and zero, which is stored exactly.

    `s = (max - min) / (2^bits - 1)`, `z = round(-min / s)`. Krishnamoorthi 2018, https://arxiv.org/abs/1806.08342.
    """

    def fitted(self, x: Float[Array, 'g n']) -> Stored:
        top = 2**self.bits - 1
        low, high = jnp.minimum(jnp.min(x, axis=-1), 0), jnp.maximum(jnp.max(x, axis=-1), 0)
        scale = _step(high - low, top, self.scales)
        zero = jnp.clip(jnp.round(_divided(-low, scale)), 0, top)
        return {'scales': scale, 'zeros': zero.astype(jnp.uint8 if self.bits <= 8 else jnp.uint16)}

    def codes(self, x: Float[Array, 'g n'], fitted: Mapping[str, Array]) -> Int[Array, 'g n']:
        zero = fitted['zeros'][:, None].astype(x.dtype)
        levels = jnp.clip(jnp.round(_divided(x, fitted['scales'][:, None])) + zero, 0, 2**self.bits - 1)
        return levels.astype(jnp.int32)

    def numbers(self, codes: Int[Array, 'g n'], fitted: Mapping[str, Array], dtype: DTypeLike) -> Float[Array, 'g n']:
        levels = codes - fitted['zeros'][:, None].astype(jnp.int32)
        return levels.astype(dtype) * fitted['scales'][:, None].astype(dtype)


class MinMax(Uniform):
    """`x ~ min + s q`, `q` from 0 to `2^bits - 1`, `s = (max - min) / (2^bits - 1)`.

    As caches are stored by KIVI, Liu et al. 2024, https://arxiv.org/abs/2402.02750.
    """

    def fitted(self, x: Float[Array, 'g n']) -> Stored:
        low = jnp.min(x, axis=-1).astype(jnp.dtype(self.scales))
        scale = _step(jnp.max(x, axis=-1) - low.astype(x.dtype), 2**self.bits - 1, self.scales)
        return {'scales': scale, 'lows': low}

    def codes(self, x: Float[Array, 'g n'], fitted: Mapping[str, Array]) -> Int[Array, 'g n']:
        levels = _divided(x - fitted['lows'][:, None].astype(x.dtype), fitted['scales'][:, None])
        return jnp.clip(jnp.round(levels), 0, 2**self.bits - 1).astype(jnp.int32)

    def numbers(self, codes: Int[Array, 'g n'], fitted: Mapping[str, Array], dtype: DTypeLike) -> Float[Array, 'g n']:
        return codes.astype(dtype) * fitted['scales'][:, None].astype(dtype) + fitted['lows'][:, None].astype(dtype)


SEARCHED = np.arange(8, 81) / 37
"""Steps of levels that a base is searched among, in octaves: bases from 1.16 to 4.48 (Wu et al. 2024)."""


@checked_fields
@dataclasses.dataclass(frozen=True)
class Logarithmic(Format):
    """`x ~ sign(x) m 2^(-octaves k)`, `m = max |x|`, `k = round(-log2(|x| / m) / octaves)` from 0 to `2^(bits-1) - 2`.

    One bit is the sign, and the last code of the others is zero, which takes what lies below the last level. One octave
    is base 2, half of one the base of RepQ-ViT (Li et al. 2023, https://arxiv.org/abs/2212.08254). `None` searches
    the base of every group among 2^(8/37) to 2^(80/37) for the least squared error, after Wu et al. 2024,
    https://arxiv.org/abs/2407.12951, who search by the error of a product and round the levels to a table.
    """

    bits: int
    scope: int | str = 'row'
    octaves: float | None = 1.0

    def __post_init__(self) -> None:
        """Raises `UserError` for an unknown number of bits, scope or step."""
        _check(type(self).__name__, self.bits, self.scope)
        if self.octaves is not None and not 0 < self.octaves < 16:
            raise UserError(f'octaves of Logarithmic is {self.octaves}; it must be above 0 and below 16, or None')

    @property
    def code_bits(self) -> int:
        return self.bits

    def encode_groups(self, x: Float[Array, 'g n']) -> Stored:
        most = jnp.max(jnp.abs(x), axis=-1).astype(jnp.float32)
        if self.octaves is not None:
            return {'codes': packed(self._codes(x, most, self.octaves), self.bits), 'scales': most}
        found = [self._codes(x, most, octaves) for octaves in SEARCHED]
        numbers = [
            self._numbers(codes, most, self._table(octaves)) for codes, octaves in zip(found, SEARCHED, strict=True)
        ]
        best = jnp.argmin(jnp.stack([jnp.sum((each - x) ** 2, axis=-1) for each in numbers]), axis=0)
        codes = jnp.take_along_axis(jnp.stack(found), best[None, :, None], axis=0)[0]
        return {'codes': packed(codes, self.bits), 'scales': most, 'searched': best.astype(jnp.uint8)}

    def decode_groups(self, stored: Mapping[str, Array], size: int, dtype: DTypeLike) -> Float[Array, 'g n']:
        codes = unpacked(stored['codes'], self.bits, size)
        if self.octaves is not None:
            return self._numbers(codes, stored['scales'], self._table(self.octaves)).astype(dtype)
        tables = jnp.concatenate([self._table(octaves) for octaves in SEARCHED])
        return self._numbers(codes, stored['scales'], tables[stored['searched']]).astype(dtype)

    @property
    def _zero(self) -> int:
        """The code of zero, without the bit of the sign."""
        return 2 ** (self.bits - 1) - 1

    def _codes(self, x: Float[Array, 'g n'], most: Float[Array, 'g'], octaves: float) -> Int[Array, 'g n']:
        share = _divided(jnp.abs(x).astype(jnp.float32), _positive(most)[:, None])
        # A share is rounded to level k where it lies between 2^(-octaves (k - 1/2)) and 2^(-octaves (k + 1/2)).
        ends = np.exp2(-octaves * (np.arange(self._zero)[::-1] + 0.5))
        above = jnp.searchsorted(jnp.asarray(ends, jnp.float32), share.reshape(-1), side='right').reshape(x.shape)
        return self._zero - above + (self._zero + 1) * (x < 0)

    def _table(self, octaves: float) -> Float[Array, '1 l']:
        """The sizes of levels as shares of the largest, zero last."""
        levels = np.append(np.exp2(-octaves * np.arange(self._zero)), 0)
        return jnp.asarray(levels, jnp.float32)[None]

    def _numbers(
        self, codes: Int[Array, 'g n'], most: Float[Array, 'g'], tables: Float[Array, '#g l']
    ) -> Float[Array, 'g n']:
        shares = jnp.take_along_axis(jnp.broadcast_to(tables, (len(most), tables.shape[1])), codes & self._zero, axis=1)
        return most[:, None] * jnp.where(codes > self._zero, -shares, shares)


class Element(NamedTuple):
    """A floating-point format of a number: bits of exponent and mantissa besides the sign, and its largest number.

    There is no infinity. The exponent's bias is `2^(exponent-1) - 1`, and the least exponent is that of subnormals.
    """

    exponent: int
    mantissa: int
    largest: float

    @property
    def bits(self) -> int:
        """The bits of a number."""
        return 1 + self.exponent + self.mantissa

    @property
    def least(self) -> int:
        """The exponent of the smallest normal number, which subnormals share."""
        return 2 - 2 ** (self.exponent - 1)

    @property
    def levels(self) -> Float[np.ndarray, 'n']:
        """Its numbers that are not negative, in order: of code `i` the i-th."""
        exponent, rest = np.divmod(np.arange(2 ** (self.exponent + self.mantissa)), 2**self.mantissa)
        share = rest / 2**self.mantissa + (exponent > 0)
        numbers = share * 2.0 ** (self.least + np.maximum(exponent - 1, 0))
        return numbers[numbers <= self.largest]

    def codes(self, x: Float[Array, '*b']) -> Int[Array, '*b']:
        """The codes of the nearest numbers, of two as near that with an even mantissa; beyond the largest that."""
        sizes = jnp.minimum(jnp.abs(x), self.largest).astype(jnp.float32)
        _, above = jnp.frexp(sizes)
        exponent = jnp.maximum(above - 1, self.least) - self.mantissa
        nearest = jnp.ldexp(jnp.round(jnp.ldexp(sizes, -exponent)), exponent)
        code = jnp.searchsorted(jnp.asarray(self.levels, jnp.float32), nearest.reshape(-1)).reshape(x.shape)
        return code + (x < 0) * 2 ** (self.exponent + self.mantissa)

    def numbers(self, codes: Int[Array, '*b']) -> Float[Array, '*b']:
        """The numbers that codes stand for, in float32."""
        sign = 2 ** (self.exponent + self.mantissa)
        sizes = jnp.asarray(self.levels, jnp.float32)[codes & (sign - 1)]
        return jnp.where(codes >= sign, -sizes, sizes)

    def rounded(self, x: Float[Array, '*b'], scale: Float[Array, '']) -> Float[Array, '*b']:
        """The nearest of its numbers times a scale, in float32; beyond the largest that, and of none none (NaN)."""
        return jnp.where(jnp.isnan(x), x, self.numbers(self.codes(_divided(x, scale))) * scale)


ELEMENTS = {
    'e5m2': Element(5, 2, 57344.0),
    'e4m3': Element(4, 3, 448.0),
    'e3m2': Element(3, 2, 28.0),
    'e2m3': Element(2, 3, 7.5),
    'e3m0': Element(3, 0, 16.0),
    'e2m1': Element(2, 1, 6.0),
}
"""Floating-point formats of 8, 6 and 4 bits."""


def _element(kind: str, name: str) -> Element:
    if kind not in ELEMENTS:
        raise UserError(f'element of {name} is {kind!r}; it must be one of {", ".join(ELEMENTS)}')
    return ELEMENTS[kind]


@checked_fields
@dataclasses.dataclass(frozen=True)
class Floating(Elementwise):
    """`x ~ s f`, `f` a floating-point number of few bits, `s = max |x|` over its largest.

    Attributes:
      element: `e5m2`, `e4m3` (the one without infinities, to 448), `e3m2`, `e2m3`, `e3m0` or `e2m1`.
      scope: what shares a scale.
      scales: the type of stored scales.
    """

    element: str
    scope: int | str = 'row'
    scales: str = 'float32'

    def __post_init__(self) -> None:
        """Raises `UserError` for an unknown element, scope or type."""
        _check(type(self).__name__, _element(self.element, 'Floating').bits, self.scope, self.scales)

    @property
    def code_bits(self) -> int:
        return ELEMENTS[self.element].bits

    def fitted(self, x: Float[Array, 'g n']) -> Stored:
        most = jnp.max(jnp.abs(x), axis=-1).astype(jnp.float32)
        return {'scales': _step(most, ELEMENTS[self.element].largest, self.scales)}

    def codes(self, x: Float[Array, 'g n'], fitted: Mapping[str, Array]) -> Int[Array, 'g n']:
        return ELEMENTS[self.element].codes(_divided(x.astype(jnp.float32), fitted['scales'][:, None]))

    def numbers(self, codes: Int[Array, 'g n'], fitted: Mapping[str, Array], dtype: DTypeLike) -> Float[Array, 'g n']:
        numbers = ELEMENTS[self.element].numbers(codes)
        return (numbers * fitted['scales'][:, None].astype(jnp.float32)).astype(dtype)


BIASES = np.arange(-8, 57) / 32
"""By how much an exponent bias is searched above that which fits the largest number: ranges of 1.19 to 0.3 of it."""


class SearchedFloating(Floating):
    """`Floating` with the scale, of those that `BIASES` give, whose numbers have the least squared error.

        s = 2^-b max |x| over the element's largest; what is beyond the largest becomes that

    A real-valued exponent bias `b`, searched: Liu et al. 2023, "LLM-FP4", https://arxiv.org/abs/2310.16836. They search
    products of a share and the bias, which for a bias of 0 are all the same, by the error of a map's outputs; here
    biases are at equal distances, and compared by the error of the numbers themselves. Of equal ones the widest range
    counts, that of the largest number first.
    """

    @property
    def stable(self) -> bool:
        # The scale cuts off the largest number, and is searched again below what is left of it.
        return False

    def fitted(self, x: Float[Array, 'g n']) -> Stored:
        widest = super().fitted(x)['scales']

        def tried(best: tuple[Array, Array], bias: Array) -> tuple[tuple[Array, Array], None]:
            scales = (widest.astype(jnp.float32) * jnp.exp2(-bias)).astype(widest.dtype)
            error = self._error(x, scales)
            better = error < best[0]
            return (jnp.where(better, error, best[0]), jnp.where(better, scales, best[1])), None

        first = (self._error(x, widest), widest)
        (_, scales), _ = jax.lax.scan(tried, first, jnp.asarray(BIASES, jnp.float32))
        return {'scales': scales}

    def _error(self, x: Float[Array, 'g n'], scales: Float[Array, 'g']) -> Float[Array, 'g']:
        fitted = {'scales': scales}
        return jnp.sum((self.numbers(self.codes(x, fitted), fitted, jnp.float32) - x) ** 2, axis=-1)


@checked_fields
@dataclasses.dataclass(frozen=True)
class Microscaling(Elementwise):
    """Blocks with a power of two for a scale, in eight bits: `x ~ 2^e f`, `e = floor(log2 max |x|) - e_max`.

    `e_max` is the exponent of the largest number of the element; what is larger still becomes that. A block with a
    number that is not finite is NaN, by the scale 255. The MX formats of the Open Compute Project, version 1.0.

    Attributes:
      element: as of `Floating`.
      scope: numbers of a block, or `row` or `tensor`.
    """

    element: str
    scope: int | str = 32

    def __post_init__(self) -> None:
        """Raises `UserError` for an unknown element or scope."""
        _check(type(self).__name__, _element(self.element, 'Microscaling').bits, self.scope)

    @property
    def code_bits(self) -> int:
        return ELEMENTS[self.element].bits

    def fitted(self, x: Float[Array, 'g n']) -> Stored:
        element = ELEMENTS[self.element]
        most = jnp.max(jnp.abs(x), axis=-1).astype(jnp.float32)
        _, above = jnp.frexp(most)
        exponent = jnp.clip(above - 1 - math.floor(math.log2(element.largest)), -127, 127)
        exponent = jnp.where(most > 0, exponent, 0)
        return {'exponents': jnp.where(jnp.isfinite(most), exponent + 127, 255).astype(jnp.uint8)}

    def codes(self, x: Float[Array, 'g n'], fitted: Mapping[str, Array]) -> Int[Array, 'g n']:
        exponent = fitted['exponents'][:, None].astype(jnp.int32) - 127
        return ELEMENTS[self.element].codes(jnp.ldexp(x.astype(jnp.float32), -exponent))

    def numbers(self, codes: Int[Array, 'g n'], fitted: Mapping[str, Array], dtype: DTypeLike) -> Float[Array, 'g n']:
        exponent = fitted['exponents'][:, None].astype(jnp.int32) - 127
        numbers = jnp.ldexp(ELEMENTS[self.element].numbers(codes), exponent)
        return jnp.where(exponent == 128, jnp.nan, numbers).astype(dtype)


@checked_fields
@dataclasses.dataclass(frozen=True)
class Rotated(Format):
    """HIGGS: a group rotated by a Hadamard matrix, and of every `dimension` of its numbers the nearest point of a grid.

        u = H w / |w|,  w ~ |w| H q(u) / n,  q the grid of least squared error for a Gaussian

    `H` has entries of plus and minus one, so that `u` has variance one. Groups are filled up with zeros to `n`, a
    power of two; a row shorter than `scope` is one group. Malinovskii et al. 2025, https://arxiv.org/abs/2411.17525.

    Attributes:
      bits: of a number, 2 to 8; of a point `dimension` times as many.
      scope: numbers of a group, a power of two.
      dimension: of the grid: 1 (Lloyd-Max); 2 with up to 4 bits, or 4 with 2, found by Lloyd's method (`GRIDS`).
    """

    bits: int
    scope: int = 1024
    dimension: int = 1

    def __post_init__(self) -> None:
        """Raises `UserError` for bits or a dimension that there are not, or a scope that is no power of two."""
        _check(type(self).__name__, self.bits, self.scope)
        if self.bits > 8 or self.scope & (self.scope - 1):
            raise UserError(
                f'Rotated has {self.bits} bits and groups of {self.scope}; it must be 2 to 8 bits and a power of two'
            )
        if self.dimension != 1 and (self.dimension, self.bits) not in GRIDS:
            there = ', '.join(f'{bits} bits in {dimension} dimensions' for dimension, bits in GRIDS)
            raise UserError(
                f'Rotated has no grid of {self.bits} bits in {self.dimension} dimensions; there are {there}, and 2 to '
                '8 in one'
            )
        if self.scope < self.dimension:
            raise UserError(f'Rotated has groups of {self.scope}, fewer than the {self.dimension} numbers of a point')

    @property
    def code_bits(self) -> int:
        return self.bits * self.dimension

    @property
    def filled(self) -> Literal['edge', 'constant']:
        return 'constant'

    @property
    def stable(self) -> bool:
        # The scale is the norm of the group, and points of the grid do not have that of what they stand for.
        return False

    def group_size(self, shape: tuple[int, ...]) -> int:
        return max(self.dimension, min(self.scope, 1 << (shape[1] - 1).bit_length()))

    def encode_groups(self, x: Float[Array, 'g n']) -> Stored:
        wide = x.astype(jnp.float32)
        norm = jnp.sqrt(jnp.sum(wide**2, axis=-1))
        rotated = hadamard(_divided(wide, _positive(norm)[:, None]))
        grid = jnp.asarray(gaussian_grid(self.bits, self.dimension), jnp.float32)
        if self.dimension == 1:
            codes = jnp.searchsorted((grid[1:, 0] + grid[:-1, 0]) / 2, rotated.reshape(-1)).reshape(x.shape)
        else:
            # Group by group: there are as many distances as numbers times points.
            codes = jax.lax.map(lambda group: nearest(group.reshape(-1, self.dimension), grid), rotated)
        return {'codes': packed(codes, self.code_bits), 'scales': norm}

    def decode_groups(self, stored: Mapping[str, Array], size: int, dtype: DTypeLike) -> Float[Array, 'g n']:
        grid = jnp.asarray(gaussian_grid(self.bits, self.dimension), jnp.float32)
        points = grid[unpacked(stored['codes'], self.code_bits, size // self.dimension)]
        values = hadamard(points.reshape(len(points), size)) / size
        return (values * stored['scales'][:, None]).astype(dtype)


@checked_fields
@dataclasses.dataclass(frozen=True)
class Fixed:
    """`x ~ s (q - z)`, `q = round(x / s) + z` from 0 to `2^bits - 1`, with a scale and a zero point that are given.

    For activations alone: their range is that of rows read before, and what lies outside of it becomes its end.

    Attributes:
      bits: of a code, 2 to 16.
      scale: `s`.
      zero: `z`.
    """

    bits: int
    scale: float
    zero: int

    def __post_init__(self) -> None:
        """Raises `UserError` for an unknown number of bits, scale or zero point."""
        _check(type(self).__name__, self.bits, 'row')
        if not (0 < self.scale < math.inf and 0 <= self.zero < 2**self.bits):
            raise UserError(
                f'Fixed has a scale of {self.scale} and a zero point of {self.zero}; they must be above 0, and a code'
            )

    @classmethod
    def of(cls, bits: int, low: float, high: float) -> 'Fixed':
        """The format of a range, which is widened to hold zero."""
        low, high, top = min(low, 0.0), max(high, 0.0), 2**bits - 1
        scale = (high - low) / top or 1.0
        return cls(bits, scale, min(round(-low / scale), top))

    def rounded(self, x: Float[Array, '*b d']) -> Float[Array, '*b d']:
        """The activations, rounded; computed in float32 or better."""
        levels = jnp.round(x.astype(wide_dtype(x.dtype)) / self.scale) + self.zero
        return ((jnp.clip(levels, 0, 2**self.bits - 1) - self.zero) * self.scale).astype(x.dtype)


@checked_fields
@dataclasses.dataclass(frozen=True)
class FixedFloating:
    """`x ~ s f`, `f` a floating-point number of few bits, with a scale that is given; beyond the largest it is that.

    For activations alone, of which every channel is brought to one range before (`attnlab.quantize.shifts`).

    Attributes:
      element: as of `Floating`.
      scale: `s`.
    """

    element: str
    scale: float

    def __post_init__(self) -> None:
        """Raises `UserError` for an unknown element or scale."""
        _element(self.element, type(self).__name__)
        if not 0 < self.scale < math.inf:
            raise UserError(f'FixedFloating has a scale of {self.scale}; it must be above 0')

    def rounded(self, x: Float[Array, '*b d']) -> Float[Array, '*b d']:
        """The activations, rounded; computed in float32."""
        return ELEMENTS[self.element].rounded(x.astype(jnp.float32), jnp.float32(self.scale)).astype(x.dtype)


@checked_fields
@dataclasses.dataclass(frozen=True)
class Crossed:
    """CrossQuant: activations rounded with a step of row and column, which leaves fewer of them zero.

        step_ij = t_i^alpha c_j^(1 - alpha) / (2^(bits-1) - 1),  t_i = max_j |x_ij|,  c_j = max_i |x_ij|

    For activations alone: columns are those of the call. Liu et al. 2024, https://arxiv.org/abs/2410.07505.
    """

    bits: int
    alpha: float = 0.15

    def __post_init__(self) -> None:
        """Raises `UserError` for bits that there are not, or a share that is none."""
        _check(type(self).__name__, self.bits, 'row')
        if not 0 <= self.alpha <= 1:
            raise UserError(f'alpha of Crossed is {self.alpha}; it must be from 0 to 1')

    def rounded(self, x: Float[Array, '*b d']) -> Float[Array, '*b d']:
        """The activations, rounded; computed in float32 or better."""
        rows, top = x.reshape(-1, x.shape[-1]).astype(wide_dtype(x.dtype)), 2 ** (self.bits - 1) - 1
        by_row = jnp.max(jnp.abs(rows), axis=1, keepdims=True) ** self.alpha
        # A row that is NaN leaves the others as they are.
        by_column = jnp.nanmax(jnp.abs(rows), axis=0, keepdims=True) ** (1 - self.alpha)
        step = _positive(by_row * by_column)
        step = _divided(step, jnp.where(step > 0, top, top))
        return (jnp.round(_divided(rows, step)) * step).astype(x.dtype).reshape(x.shape)


def hadamard(x: Float[Array, '*b n']) -> Float[Array, '*b n']:
    """`H x` by the fast transform, `H` symmetric with entries of plus and minus one; `n` is a power of two."""
    size = x.shape[-1]
    half = 1
    while half < size:
        pairs = x.reshape(*x.shape[:-1], size // (2 * half), 2, half)
        x = jnp.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], axis=-2).reshape(
            x.shape
        )
        half *= 2
    return x


def nearest(points: Float[Array, 'n p'], grid: Float[Array, 'c p']) -> Int[Array, 'n']:
    """The index of the nearest point of a grid, for every point; of two as near the first."""
    products = jnp.einsum('np,cp->nc', points, grid, precision=jax.lax.Precision.HIGHEST)
    return jnp.argmin(jnp.sum(grid**2, axis=1)[None] / 2 - products, axis=1)


GRIDS = ((2, 2), (2, 3), (2, 4), (4, 2))
"""Dimension and bits a number of the grids in `gaussian_grids.npz`."""


def gaussian_grid(bits: int, dimension: int = 1) -> Float[np.ndarray, 'c p']:
    """The `2^(bits dimension)` points with a small mean squared distance to a standard Gaussian.

    In one dimension it is the least there is; in more it is that of a local minimum that Lloyd's method found
    (`scripts/gaussian_grids.py`), stored, since codes mean nothing without the grid that they were taken from.
    """
    if dimension == 1:
        return _lloyd_max(bits)[:, None]
    return _stored_grids()[f'{dimension}x{bits}']


@functools.cache
def _stored_grids() -> dict[str, Float[np.ndarray, '_ _']]:
    with np.load(pathlib.Path(__file__).parent / 'gaussian_grids.npz', allow_pickle=False) as file:
        return dict(file)


@functools.cache
def _lloyd_max(bits: int) -> Float[np.ndarray, 'n']:
    """The `2^bits` numbers with the least mean squared distance to a standard Gaussian, in order, by Lloyd's method."""
    count = 2**bits
    # Quantiles of a Gaussian of variance 3, to which the grid tends as it grows.
    grid = math.sqrt(3) * ndtri((np.arange(count) + 0.5) / count)
    for _ in range(1000):
        middles = (grid[1:] + grid[:-1]) / 2
        ends = np.concatenate([[-np.inf], middles, [np.inf]])
        density = np.exp(-(ends**2) / 2) / np.sqrt(2 * np.pi)
        means = (density[:-1] - density[1:]) / np.diff(ndtr(ends))
        if np.max(np.abs(means - grid)) < 1e-10:
            break
        grid = means
    return grid


def _rotated(bits: int, dimension: int, scope: int | str) -> Rotated:
    return Rotated(bits, 1024 if isinstance(scope, str) else scope, dimension)


NAMES: dict[str, Callable[[str, int | str], Rounding]] = {
    r'int(\d+)': lambda bits, scope: Symmetric(int(bits), scope=scope),
    r'affine(\d+)': lambda bits, scope: Affine(int(bits), scope=scope),
    r'minmax(\d+)': lambda bits, scope: MinMax(int(bits), scope=scope),
    r'log(\d+)': lambda bits, scope: Logarithmic(int(bits), scope=scope),
    r'logsqrt(\d+)': lambda bits, scope: Logarithmic(int(bits), scope=scope, octaves=0.5),
    r'adalog(\d+)': lambda bits, scope: Logarithmic(int(bits), scope=scope, octaves=None),
    r'(e\dm\d)': lambda element, scope: Floating(element, scope=scope),
    r'ada(e\dm\d)': lambda element, scope: SearchedFloating(element, scope=scope),
    r'mx(e\dm\d)': lambda element, scope: Microscaling(element, scope=32 if scope == 'row' else scope),
    r'higgs(\d+)': lambda bits, scope: _rotated(int(bits), 1, scope),
    r'higgs(\d+)x2': lambda bits, scope: _rotated(int(bits), 2, scope),
    r'higgs(\d+)x4': lambda bits, scope: _rotated(int(bits), 4, scope),
    r'cross(\d+)': lambda bits, scope: Crossed(int(bits)),
}
"""How formats are called on the command line, and what makes them of what is in parentheses and a scope."""

CALLED = (
    'intN, affineN, minmaxN, logN, logsqrtN, adalogN, e4m3, e5m2, e3m2, e2m3, e2m1, e3m0, adaELEMENT, mxELEMENT, '
    'higgsN, higgsNx2, higgsNx4, crossN'
)


def format_called(text: str) -> Rounding:
    """The format of a name, such as `int4`, `int4@32` or `e4m3@tensor`; the scope is a row unless given.

    Raises `UserError` for an unknown name or scope.
    """
    name, at, given = text.partition('@')
    if at and not (given in ('tensor', 'row') or (given.isdecimal() and int(given) > 0)):
        raise UserError(f'{text!r} ends in {given!r}; after @ comes tensor, row, or how many numbers share a scale')
    scope: int | str = int(given) if given.isdecimal() else given or 'row'
    for pattern, make in NAMES.items():
        if (found := re.fullmatch(pattern, name)) is not None:
            made = make(found[1], scope)
            if at and getattr(made, 'scope', None) != scope:
                raise UserError(f'{text!r}: {type(made).__name__} has no scope {given}')
            return made
    raise UserError(f'there is no format {name!r}; choose from {CALLED}, such as int4@32')


def storage_called(text: str) -> Format:
    """The same for what is stored; raises `UserError` for a format of activations alone as well."""
    found = format_called(text)
    if not isinstance(found, Format):
        raise UserError(f'{text!r} rounds activations and stores nothing; weights need another format, such as int4@32')
    return found


def rows_apart(rounding: Rounding | None) -> bool:
    """Whether every row is rounded as it would be alone, by no scale that it shares with the other rows of a call."""
    return not isinstance(rounding, Crossed) and getattr(rounding, 'scope', None) != 'tensor'


def _step(reach: Float[Array, 'g'], steps: int | float, kind: str) -> Float[Array, 'g']:
    """`reach / steps` in the type in which scales are stored, 1 where that is zero."""
    stored = jnp.promote_types(reach.dtype, kind) if kind == 'float32' else kind
    return _positive(_divided(reach, jnp.where(reach > 0, steps, steps)).astype(stored))


def _divided(x: Float[Array, '...'], divisor: Shaped[Array, '...']) -> Float[Array, '...']:
    """`x / divisor`; where a divisor is broadcast, XLA would multiply by its reciprocal, and the last bit differ."""
    return x / jax.lax.optimization_barrier(jnp.broadcast_to(divisor, x.shape).astype(x.dtype))


def _positive(x: Float[Array, '...']) -> Float[Array, '...']:
    """Sizes, of zero one; NaN stays, and so do all numbers that it is the scale of."""
    return jnp.where(x == 0, 1, x)
