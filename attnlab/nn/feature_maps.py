"""Feature maps `f`, whose products `f(q) . f(k)` are the weights of linear attention.

A mixer makes its map as `feature_map(key_dim, heads=heads, rngs=rngs)` and calls its `features`: a map may be learned,
random, or depend on positions, and may differ for queries and keys.
"""

import abc
import dataclasses
import math
from collections.abc import Sequence as Shape
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from attnlab.errors import UserError
from attnlab.functional.documents import document_sizes
from attnlab.functional.lookup import taken
from attnlab.functional.precision import wide_dtype
from attnlab.functional.recomputed import recomputed, recomputed_method
from attnlab.module import Module
from attnlab.nn.parameter import Drawn, buffer, param
from attnlab.signature import checked_fields
from attnlab.typing import Keys, Positions, Queries, Segments


class FeatureMap(Protocol):
    """Made with the channels of a key and the number of heads."""

    def features(
        self, q: Queries, k: Keys, positions: Positions
    ) -> tuple[Float[Array, 'b t h m'], Float[Array, 'b s g m']]:
        """Returns the features of queries and of keys, equally many; `positions` are within the document."""


@checked_fields
@dataclasses.dataclass(frozen=True)
class FixedMap(abc.ABC):
    """A map without parameters, the same for queries and keys: a value that is its own factory."""

    def __call__(self, key_dim: int, *, heads: int, rngs: nnx.Rngs) -> 'FixedMap':
        """Returns itself: there are no parameters to create."""
        del key_dim, heads, rngs
        return self

    def features(
        self, q: Queries, k: Keys, positions: Positions
    ) -> tuple[Float[Array, 'b t h m'], Float[Array, 'b s g m']]:
        """Returns the features of queries and of keys."""
        del positions
        return recomputed(self.apply)(q), recomputed(self.apply)(k)

    @abc.abstractmethod
    def apply(self, x: Float[Array, 'b t h k']) -> Float[Array, 'b t h m']:
        """Returns the features of queries or of keys."""


@checked_fields
@dataclasses.dataclass(frozen=True)
class EluPlusOne(FixedMap):
    """The positive map `f(x) = elu(x) + 1`: `x + 1` above zero, `e^x` below.

    The exponential is not computed as `expm1(x) + 1`, which would round to zero where `f` is small.
    Katharopoulos et al. 2020, https://arxiv.org/abs/2006.16236.
    """

    def apply(self, x: Float[Array, 'b t h k']) -> Float[Array, 'b t h k']:
        return jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0)))


@checked_fields
@dataclasses.dataclass(frozen=True)
class UnitNorm(FixedMap):
    """Vectors of length one, `x / sqrt(|x|^2 + eps)`, the norm in float32 or better.

    Yang et al. 2024, https://arxiv.org/abs/2406.06484.
    """

    eps: float = 1e-6

    def apply(self, x: Float[Array, 'b t h k']) -> Float[Array, 'b t h k']:
        wide = x.astype(wide_dtype(x.dtype))
        return (wide * jax.lax.rsqrt(jnp.sum(jnp.square(wide), axis=-1, keepdims=True) + self.eps)).astype(x.dtype)

    def wide(self, x: Float[Array, 'b t h k']) -> Float[Array, 'b t h k']:
        """Returns them in float32 or better."""
        return recomputed(lambda x: self.apply(x.astype(wide_dtype(x.dtype))))(x)


class CorrectedUnitNorm(Module):
    """Vectors of length one, of keys and of queries less a part of the key, `q - c k`; `c` is learned for every head.

    What a memory gives back for its own key is taken out of what the query asks for. `c` is `start` at first.
    Hu et al. 2025, https://arxiv.org/abs/2506.02475. Raises `UserError` for keys of other heads, as `Hedgehog` does.
    """

    def __init__(self, key_dim: int, *, heads: int, start: float, eps: float = 1e-6, rngs: nnx.Rngs):
        del key_dim
        self.unit = UnitNorm(eps)
        self.part = param(nnx.initializers.constant(start), (heads,), axes=('heads',), group='dynamics', rngs=rngs)

    def features(
        self, q: Queries, k: Keys, positions: Positions
    ) -> tuple[Float[Array, 'b t h k'], Float[Array, 'b s g k']]:
        _check_heads(self, self.part, k)
        return self._corrected(q, k), recomputed(self.unit.apply)(k)

    @recomputed_method
    def _corrected(self, q: Queries, k: Keys) -> Float[Array, 'b t h k']:
        wide = wide_dtype(q.dtype)
        part = self.part[...].astype(wide)[None, None, :, None]
        return self.unit.apply(q.astype(wide) - part * k.astype(wide)).astype(q.dtype)


@checked_fields
@dataclasses.dataclass(frozen=True)
class SumNorm(FixedMap):
    """Features of sum one, `f(x) / sum(f(x))`, of a positive map `f`, the sum in float32 or better.

    Schlag et al. 2021, https://arxiv.org/abs/2102.11174. Raises `UserError` for a map of its own for queries, or one
    that depends on positions.
    """

    of: FixedMap = EluPlusOne()

    def __post_init__(self) -> None:
        if type(self.of).features is not FixedMap.features:
            raise UserError(
                f'of SumNorm is {type(self.of).__name__}(), which maps queries apart from keys, or by position; it '
                'must be one map of both, such as EluPlusOne()'
            )

    def apply(self, x: Float[Array, 'b t h k']) -> Float[Array, 'b t h m']:
        wide = self.of.apply(x.astype(wide_dtype(x.dtype)))
        return (wide / jnp.sum(wide, axis=-1, keepdims=True)).astype(x.dtype)


@checked_fields
@dataclasses.dataclass(frozen=True)
class SiluQueries(FixedMap):
    """SiLU of queries; keys stay as they are. Qin et al. 2024, https://arxiv.org/abs/2404.07904."""

    def features(
        self, q: Queries, k: Keys, positions: Positions
    ) -> tuple[Float[Array, 'b t h m'], Float[Array, 'b s g m']]:
        """Returns the features of queries, and the keys."""
        del positions
        return recomputed(self.apply)(q), k

    def apply(self, x: Float[Array, 'b t h k']) -> Float[Array, 'b t h m']:
        return jax.nn.silu(x)


class Hedgehog(Module):
    """Learned maps of queries and of keys, one for every head: `f(x) = [softmax(y), softmax(-y)]`, `y = x W + c`.

    Features are at least 1e-12. `W` is square and starts as the identity, `c`, left out without `bias`, at zero. The
    softmax is in float32 or better. Zhang et al. 2024, https://arxiv.org/abs/2402.04347. Raises `UserError` for keys of
    other heads, such as those of several writes a token.
    """

    def __init__(self, key_dim: int, *, heads: int, bias: bool = False, rngs: nnx.Rngs):
        shape, axes = (heads, key_dim, key_dim), ('heads', None, None)
        self.query = param(_identities, shape, axes=axes, rngs=rngs)
        self.key = param(_identities, shape, axes=axes, rngs=rngs)
        zeros = nnx.initializers.zeros
        self.query_bias, self.key_bias = (
            param(zeros, shape[:2], axes=axes[:2], group='vector', rngs=rngs) if bias else None for _ in range(2)
        )

    def features(
        self, q: Queries, k: Keys, positions: Positions
    ) -> tuple[Float[Array, 'b t h m'], Float[Array, 'b s g m']]:
        """Returns the features of queries and of keys, twice as many as there are channels."""
        del positions
        _check_heads(self, self.key, k)
        return _both_signs(q, self.query, self.query_bias), _both_signs(k, self.key, self.key_bias)


class JointHedgehog(Module):
    """Learned maps of queries and of keys, the same for all heads: `f(x) = softmax([2 y, -2 y])`, `y = x W + c`.

    One softmax over features and negatives together, as flash-linear-attention has it for `Hedgehog`. `W` is square and
    starts as the identity, `c` at zero. The softmax is in float32 or better.
    """

    def __init__(self, key_dim: int, *, heads: int, rngs: nnx.Rngs):
        del heads
        zeros = nnx.initializers.zeros
        self.query, self.key = (param(_identities, (key_dim, key_dim), axes=(None, None), rngs=rngs) for _ in range(2))
        self.query_bias, self.key_bias = (
            param(zeros, (key_dim,), axes=(None,), group='vector', rngs=rngs) for _ in range(2)
        )

    def features(
        self, q: Queries, k: Keys, positions: Positions
    ) -> tuple[Float[Array, 'b t h m'], Float[Array, 'b s g m']]:
        """Returns the features of queries and of keys, twice as many as there are channels."""
        del positions
        return (
            _joint_softmax(q @ self.query[...].astype(q.dtype), self.query_bias[...]),
            _joint_softmax(k @ self.key[...].astype(k.dtype), self.key_bias[...]),
        )


@recomputed
def _joint_softmax(mapped: Float[Array, 'b t h k'], bias: Float[Array, ' k']) -> Float[Array, 'b t h m']:
    wide = 2 * (mapped.astype(wide_dtype(mapped.dtype)) + jnp.broadcast_to(bias, mapped.shape))
    return jax.nn.softmax(jnp.concatenate([wide, -wide], axis=-1)).astype(mapped.dtype)


class SignedExponentials(Module):
    """Learned maps of queries and of keys, one for every head: `f(x) = [exp(x W), exp(-x W)]`.

    `W` is square and starts as the identity. The features of a query are divided by their largest, a factor common to
    all its weights; those of keys are not bounded. The exponentials are in float32 or better.
    Nguyen et al. 2025, https://arxiv.org/abs/2507.09025.
    """

    def __init__(self, key_dim: int, *, heads: int, rngs: nnx.Rngs):
        shape, axes = (heads, key_dim, key_dim), ('heads', None, None)
        self.query = param(_identities, shape, axes=axes, rngs=rngs)
        self.key = param(_identities, shape, axes=axes, rngs=rngs)

    def features(
        self, q: Queries, k: Keys, positions: Positions
    ) -> tuple[Float[Array, 'b t h m'], Float[Array, 'b s g m']]:
        """Returns the features of queries and of keys, twice as many as there are channels."""
        del positions
        _check_heads(self, self.key, k)
        return _bounded_exponentials(_mapped(q, self.query)), _exponentials(_mapped(k, self.key))


@recomputed
def _bounded_exponentials(mapped: Float[Array, 'b t h k']) -> Float[Array, 'b t h m']:
    wide = mapped.astype(wide_dtype(mapped.dtype))
    largest = jnp.max(jnp.abs(wide), axis=-1, keepdims=True)
    return jnp.concatenate([jnp.exp(wide - largest), jnp.exp(-wide - largest)], axis=-1).astype(mapped.dtype)


@recomputed
def _exponentials(mapped: Float[Array, 'b t h k']) -> Float[Array, 'b t h m']:
    wide = mapped.astype(wide_dtype(mapped.dtype))
    return jnp.concatenate([jnp.exp(wide), jnp.exp(-wide)], axis=-1).astype(mapped.dtype)


def _check_heads(feature_map: Module, of_keys: nnx.Param, k: Keys) -> None:
    heads = of_keys.shape[0]
    if k.shape[2] != heads:
        raise UserError(
            f'{type(feature_map).__name__} has a map for each of {heads} heads of keys and was given {k.shape[2]}, as '
            'of several writes a token; choose a feature_map that is the same for all heads, such as UnitNorm()'
        )


def _identities(key: Array, shape: Shape[int], dtype: DTypeLike) -> Array:
    del key
    return jnp.broadcast_to(jnp.eye(shape[-1], dtype=dtype), tuple(shape))


def _mapped(x: Float[Array, 'b t h k'], weight: nnx.Param) -> Float[Array, 'b t h m']:
    return jnp.einsum('bthk,hkm->bthm', x, weight[...].astype(x.dtype))


def _both_signs(x: Float[Array, 'b t h k'], weight: nnx.Param, bias: nnx.Param | None) -> Float[Array, 'b t h m']:
    return _softmaxes(_mapped(x, weight), None if bias is None else bias[...])


@recomputed
def _softmaxes(mapped: Float[Array, 'b t h k'], bias: Float[Array, 'h k'] | None) -> Float[Array, 'b t h m']:
    wide = mapped.astype(wide_dtype(mapped.dtype))
    if bias is not None:
        wide = wide + bias.astype(wide.dtype)[None, None]
    features = jnp.concatenate([jax.nn.softmax(wide), jax.nn.softmax(-wide)], axis=-1)
    return jnp.maximum(features, 1e-12).astype(mapped.dtype)


@checked_fields
@dataclasses.dataclass(frozen=True)
class NormAware(FixedMap):
    """Positive and negative parts of channels; queries of larger norm are more selective, where a sum would cancel it.

        f(q) = [relu(d), relu(-d)]^p,  d = q / |q|,  p = power (1/2 + tanh |q|)        f(k) = [relu(k), relu(-k)]^power

    The norm, at least `eps`, and the powers are in float32 or better. Meng et al. 2025,
    https://arxiv.org/abs/2506.21137.
    """

    power: float = 3.0
    eps: float = 1e-6

    def features(
        self, q: Queries, k: Keys, positions: Positions
    ) -> tuple[Float[Array, 'b t h m'], Float[Array, 'b s g m']]:
        """Returns the features of queries and of keys, twice as many as there are channels."""
        del positions
        return recomputed(self._of_queries)(q), recomputed(self.apply)(k)

    def _of_queries(self, q: Queries) -> Float[Array, 'b t h m']:
        wide = q.astype(wide_dtype(q.dtype))
        norm = jnp.sqrt(jnp.maximum(jnp.sum(jnp.square(wide), axis=-1, keepdims=True), self.eps**2))
        power = self.power * (0.5 + jnp.tanh(norm))
        return _powers(wide / norm, power).astype(q.dtype)

    def apply(self, x: Float[Array, 'b t h k']) -> Float[Array, 'b t h m']:
        """Returns the features of keys."""
        wide = x.astype(wide_dtype(x.dtype))
        return _powers(wide, jnp.full((1,) * 4, self.power, wide.dtype)).astype(x.dtype)


def _powers(x: Float[Array, 'b t h k'], power: Float[Array, '#b #t #h 1']) -> Float[Array, 'b t h m']:
    parts = jnp.concatenate([x, -x], axis=-1)
    # A power of zero has no derivative by its exponent.
    inside = jnp.where(parts > 0, parts, jnp.ones_like(parts))
    return jnp.where(parts > 0, inside ** jnp.broadcast_to(power, parts.shape), jnp.zeros_like(parts))


@checked_fields
@dataclasses.dataclass(frozen=True)
class CosFormer(FixedMap):
    """Weights `relu(q_i) . relu(k_j) cos(pi/2 (i - j) / span)`, as features of twice as many channels.

        f(x_i) = [relu(x_i) sin(pi/2 i / span), relu(x_i) cos(pi/2 i / span)]

    `span` is the longest distance, in tokens: beyond it weights would be negative, so that queries from place `span` of
    their document on, counted from 0, are NaN; read both ways, all queries of a longer document are (`within_span`).
    The paper uses the length of the sequence instead, so that the features of a prefix change with the length.
    Qin et al. 2022, https://arxiv.org/abs/2202.08791.
    """

    span: int = 8192

    def features(
        self, q: Queries, k: Keys, positions: Positions
    ) -> tuple[Float[Array, 'b t h m'], Float[Array, 'b s g m']]:
        """Returns the features of queries and of keys, by their positions from 1 on."""
        angle = (positions + 1).astype(wide_dtype(q.dtype))[..., None, None] * (math.pi / 2 / self.span)
        # Keys stay finite: those of one document share a memory with the next.
        near = (positions < self.span)[..., None, None]
        return _weighted_by(q, jnp.where(near, angle, jnp.nan)), _weighted_by(k, angle)

    def apply(self, x: Float[Array, 'b t h k']) -> Float[Array, 'b t h k']:
        return jax.nn.relu(x)


@recomputed
def _weighted_by(x: Float[Array, 'b t h k'], angle: Float[Array, 'b t 1 1']) -> Float[Array, 'b t h m']:
    x = jax.nn.relu(x)
    return jnp.concatenate([x * jnp.sin(angle).astype(x.dtype), x * jnp.cos(angle).astype(x.dtype)], axis=-1)


def within_span(feature_map: object, q: Float[Array, 'b t h m'], segments: Segments | None) -> Float[Array, 'b t h m']:
    """The features of queries that read both ways, NaN in documents that are longer than the span of `CosFormer`."""
    if not isinstance(feature_map, CosFormer) or q.shape[1] <= feature_map.span:
        return q
    sizes = document_sizes(segments, *q.shape[:2])
    return jnp.where((sizes <= feature_map.span)[..., None, None], q, jnp.nan)


def pairs(x: Float[Array, 'b t h k']) -> Float[Array, 'b t h m']:
    """Products of two channels each, `pairs(x) . pairs(y) = (x . y)^2`: `k (k + 1) / 2` of them."""
    first, second = np.triu_indices(x.shape[-1])
    factors = jnp.asarray(np.where(first == second, 1.0, math.sqrt(2)), x.dtype)
    return taken(x, first, -1) * taken(x, second, -1) * factors[None, None, None]


@checked_fields
@dataclasses.dataclass(frozen=True)
class Taylor(FixedMap):
    """The second Taylor polynomial of the exponential: `f(q) . f(k) = 1 + s + s^2 / 2`, `s = q . k / sqrt(channels)`.

    Symmetric products are kept once. In float32 or better. Arora et al. 2024, https://arxiv.org/abs/2402.18668.
    """

    def apply(self, x: Float[Array, 'b t h k']) -> Float[Array, 'b t h m']:
        scaled = x.astype(wide_dtype(x.dtype)) * x.shape[-1] ** -0.25
        features = [jnp.ones_like(scaled[..., :1]), scaled, pairs(scaled) / math.sqrt(2)]
        return jnp.concatenate(features, axis=-1).astype(x.dtype)


class UnitTaylor(Module):
    """The second Taylor polynomial of the exponential, of vectors of length one: `1 + s + s^2 / 2`, at least a half.

    `s = c q . k / (|q| |k|)`, `c` learned for every head, 1 at first. Nauen et al. 2024,
    https://arxiv.org/abs/2403.02920.
    """

    def __init__(self, key_dim: int, *, heads: int, eps: float = 1e-12, rngs: nnx.Rngs):
        del key_dim
        self.eps = eps
        self.temperature = param(nnx.initializers.ones, (heads,), axes=('heads',), group='dynamics', rngs=rngs)

    def features(
        self, q: Queries, k: Keys, positions: Positions
    ) -> tuple[Float[Array, 'b t h m'], Float[Array, 'b s g m']]:
        return self._of_queries(q), self._of_keys(k)

    @recomputed_method
    def _of_queries(self, q: Queries) -> Float[Array, 'b t h m']:
        unit = self._unit(q)
        temperature = self.temperature[...].astype(unit.dtype)[None, None, :, None]
        return Taylor().apply(temperature * unit).astype(q.dtype)

    @recomputed_method
    def _of_keys(self, k: Keys) -> Float[Array, 'b s g m']:
        return Taylor().apply(self._unit(k)).astype(k.dtype)

    def _unit(self, x: Float[Array, 'b t h k']) -> Float[Array, 'b t h k']:
        """Vectors of length one, times what Taylor divides by, in float32 or better."""
        return x.shape[-1] ** 0.25 * UnitNorm(self.eps).wide(x)


class SquaredProduct(Module):
    """A learned parabola: `f(q) . f(k) = (n(q) . n(k))^2 / channels`, `n(x) = LayerNorm(x) * g + c`.

    Queries and keys have gains `g` and biases `c` of their own; the mean and variance are over the channels of all
    heads. Features are in float32 or better, and stay so: weights are small differences of their products,
    and lose digits where every weight of a row is small.
    Aksenov et al. 2024, https://arxiv.org/abs/2402.10644. Raises `UserError` for keys of other heads, as `Hedgehog`.
    """

    def __init__(self, key_dim: int, *, heads: int, eps: float = 1e-5, rngs: nnx.Rngs):
        self.eps = eps
        ones, zeros = nnx.initializers.ones, nnx.initializers.zeros
        shape, axes = (heads, key_dim), ('heads', None)
        self.query_scale = param(ones, shape, axes=axes, group='vector', rngs=rngs)
        self.query_bias = param(zeros, shape, axes=axes, group='vector', rngs=rngs)
        self.key_scale = param(ones, shape, axes=axes, group='vector', rngs=rngs)
        self.key_bias = param(zeros, shape, axes=axes, group='vector', rngs=rngs)

    def features(
        self, q: Queries, k: Keys, positions: Positions
    ) -> tuple[Float[Array, 'b t h m'], Float[Array, 'b s g m']]:
        """Returns the features of queries and of keys."""
        del positions
        _check_heads(self, self.key_scale, k)
        return (
            self._squares(q, self.query_scale[...], self.query_bias[...]),
            self._squares(k, self.key_scale[...], self.key_bias[...]),
        )

    @recomputed_method
    def _squares(
        self, x: Float[Array, 'b t h k'], scale: Float[Array, 'h k'], bias: Float[Array, 'h k']
    ) -> Float[Array, 'b t h m']:
        return _normed_pairs(x, scale, bias, (-2, -1), self.eps)


class HeadSquaredProduct(Module):
    """`SquaredProduct` whose norm is of every head, with one gain and bias for all heads, of queries and keys alike.

    So it is in flash-linear-attention. Aksenov et al. 2024, https://arxiv.org/abs/2402.10644.
    """

    def __init__(self, key_dim: int, *, heads: int, eps: float = 1e-5, rngs: nnx.Rngs):
        del heads
        self.eps = eps
        ones, zeros = nnx.initializers.ones, nnx.initializers.zeros
        self.scale, self.bias = (
            param(start, (key_dim,), axes=(None,), group='vector', rngs=rngs) for start in (ones, zeros)
        )

    def features(
        self, q: Queries, k: Keys, positions: Positions
    ) -> tuple[Float[Array, 'b t h m'], Float[Array, 'b s g m']]:
        """Returns the features of queries and of keys."""
        del positions
        return self._squares(q), self._squares(k)

    @recomputed_method
    def _squares(self, x: Float[Array, 'b t h k']) -> Float[Array, 'b t h m']:
        return _normed_pairs(x, self.scale[...][None], self.bias[...][None], -1, self.eps)


def _normed_pairs(
    x: Float[Array, 'b t h k'],
    scale: Float[Array, '#h k'],
    bias: Float[Array, '#h k'],
    axes: int | tuple[int, int],
    eps: float,
) -> Float[Array, 'b t h m']:
    """`pairs` of `LayerNorm(x) * scale + bias`, the norm over `axes`, over the root of the channels."""
    wide = x.astype(wide_dtype(x.dtype))
    centred = wide - jnp.mean(wide, axis=axes, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=axes, keepdims=True) + eps)
    gain, shift = (a.astype(wide.dtype)[None, None] for a in (scale, bias))
    return pairs(centred * inverse * gain + shift) * x.shape[-1] ** -0.5


class PositiveRandomFeatures(Module):
    """FAVOR+: positive random features whose products have the mean `exp(q . k / sqrt(channels))`.

        f(x)_i = (exp(w_i . y - |y|^2 / 2) + eps) / sqrt(count),  y = x / channels^(1/4)

    The `w_i` are normal, orthogonal within blocks as large as the number of channels, the same for all heads, and not
    trained: drawn once, or anew after every `redraw` steps of training. The largest `w_i . y` of a query is subtracted
    from its exponents, a factor common to all its weights; for keys this would be wrong. The mean feature of a query of
    64 channels of variance one is then some 2e-4; an `eps` that is not small against it makes all keys weigh alike.
    `count` is `channels log(channels)`, rounded down but at least the number of channels, when `None`. In float32 or
    better. Choromanski et al. 2021, https://arxiv.org/abs/2009.14794.
    """

    def __init__(
        self,
        key_dim: int,
        *,
        heads: int,
        count: int | None = None,
        eps: float = 1e-4,
        redraw: int | None = None,
        rngs: nnx.Rngs,
    ):
        del heads
        self.eps = eps
        count = max(key_dim, int(key_dim * math.log(key_dim))) if count is None else count
        directions = orthogonal_normals(rngs.params(), count, key_dim)
        drawn = None if redraw is None else Drawn(redraw, _draw)
        self.directions = buffer(directions, axes=(None, None), drawn=drawn)

    def features(
        self, q: Queries, k: Keys, positions: Positions
    ) -> tuple[Float[Array, 'b t h m'], Float[Array, 'b s g m']]:
        """Returns the features of queries and of keys."""
        del positions
        return self._of_queries(q, self._along(q)), self._of_keys(k, self._along(k))

    def _along(self, x: Float[Array, 'b t h k']) -> Float[Array, 'b t h m']:
        scaled = _scaled(x)
        return jnp.einsum('bthk,mk->bthm', scaled, self.directions[...].astype(scaled.dtype))

    @recomputed_method
    def _of_queries(self, q: Queries, along: Float[Array, 'b t h m']) -> Float[Array, 'b t h m']:
        return self._positive(along - _half_square(q) - jnp.max(along, axis=-1, keepdims=True), q)

    @recomputed_method
    def _of_keys(self, k: Keys, along: Float[Array, 'b s g m']) -> Float[Array, 'b s g m']:
        return self._positive(along - _half_square(k), k)

    def _positive(self, exponent: Float[Array, 'b t h m'], x: Float[Array, 'b t h k']) -> Float[Array, 'b t h m']:
        return ((jnp.exp(exponent) + self.eps) * exponent.shape[-1] ** -0.5).astype(x.dtype)


def _scaled(x: Float[Array, 'b t h k']) -> Float[Array, 'b t h k']:
    return x.astype(wide_dtype(x.dtype)) * x.shape[-1] ** -0.25


def _half_square(x: Float[Array, 'b t h k']) -> Float[Array, 'b t h 1']:
    return jnp.sum(jnp.square(_scaled(x)), axis=-1, keepdims=True) / 2


def _draw(key: Array, shape: tuple[int, ...]) -> Float[Array, 'm k']:
    return orthogonal_normals(key, *shape)


def orthogonal_normals(key: Array, count: int, dim: int) -> Float[Array, 'm k']:
    """Returns `count` vectors, each standard normal, orthogonal to the others in its block of `dim`."""
    directions, lengths = jax.random.split(key)
    blocks = jax.random.normal(directions, (-(-count // dim), dim, dim))
    bases, upper = jnp.linalg.qr(blocks)
    # Multiplied by the signs of the diagonal, bases are uniform over rotations and reflections.
    bases = bases * jnp.sign(jnp.diagonal(upper, axis1=1, axis2=2))[:, None]
    norms = jnp.linalg.norm(jax.random.normal(lengths, (count, dim)), axis=-1, keepdims=True)
    return norms * bases.swapaxes(1, 2).reshape(-1, dim)[:count]
