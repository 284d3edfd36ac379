"""Feature maps: what stands for the exponential in `exp(q . k) ~ f(q) . f(k)`, or what norm queries and keys have.

A mixer makes its map as `feature_map(key_dim, heads=heads, rngs=rngs)` and calls `features` of what it made: a map may
be learned, drawn, or depend on positions, and queries and keys may have maps of their own.
"""

import abc
import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from attnlab.functional.recurrences import state_dtype
from attnlab.typing import Keys, Positions, Queries


class FeatureMap(Protocol):
    """Made with the channels of a key and the number of heads."""

    def features(
        self, q: Queries, k: Keys, positions: Positions
    ) -> tuple[Float[Array, 'b t h m'], Float[Array, 'b s g m']]:
        """Returns the features of queries and of keys, as many of both; `positions` are inside the document."""


@dataclasses.dataclass(frozen=True)
class FixedMap(abc.ABC):
    """A map without parameters, the same for queries and keys: a value that stands for its own factory."""

    def __call__(self, key_dim: int, *, heads: int, rngs: nnx.Rngs) -> 'FixedMap':
        """Returns itself: nothing is to be made."""
        del key_dim, heads, rngs
        return self

    def features(
        self, q: Queries, k: Keys, positions: Positions
    ) -> tuple[Float[Array, 'b t h m'], Float[Array, 'b s g m']]:
        """Returns the features of queries and of keys."""
        del positions
        return self.apply(q), self.apply(k)

    @abc.abstractmethod
    def apply(self, x: Float[Array, 'b t h k']) -> Float[Array, 'b t h m']:
        """Returns the features of queries or of keys."""


@dataclasses.dataclass(frozen=True)
class EluPlusOne(FixedMap):
    """The positive map `f(x) = elu(x) + 1`: `x + 1` above zero, `e^x` below.

    The exponential is taken as it is, not as `expm1(x) + 1`, so that `f` stays positive where the latter rounds off.
    Katharopoulos et al. 2020, https://arxiv.org/abs/2006.16236.
    """

    def apply(self, x: Float[Array, 'b t h k']) -> Float[Array, 'b t h k']:
        return jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0)))


@dataclasses.dataclass(frozen=True)
class UnitNorm(FixedMap):
    """Vectors of length one, `x / sqrt(|x|^2 + eps)`, the norm in float32 or better.

    Yang et al. 2024, https://arxiv.org/abs/2406.06484.
    """

    eps: float = 1e-6

    def apply(self, x: Float[Array, 'b t h k']) -> Float[Array, 'b t h k']:
        wide = x.astype(state_dtype(x.dtype))
        return (wide * jax.lax.rsqrt(jnp.sum(jnp.square(wide), axis=-1, keepdims=True) + self.eps)).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class SumNorm(FixedMap):
    """Features of sum one, `f(x) / sum(f(x))`, of a positive map `f`, the sum in float32 or better.

    Schlag et al. 2021, https://arxiv.org/abs/2102.11174.
    """

    of: FixedMap = EluPlusOne()

    def apply(self, x: Float[Array, 'b t h k']) -> Float[Array, 'b t h m']:
        wide = self.of.apply(x.astype(state_dtype(x.dtype)))
        return (wide / jnp.sum(wide, axis=-1, keepdims=True)).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class SiluQueries(FixedMap):
    """SiLU of queries; keys stay as they are. Qin et al. 2024, https://arxiv.org/abs/2404.07904."""

    def features(
        self, q: Queries, k: Keys, positions: Positions
    ) -> tuple[Float[Array, 'b t h m'], Float[Array, 'b s g m']]:
        """Returns the features of queries, and the keys."""
        del positions
        return self.apply(q), k

    def apply(self, x: Float[Array, 'b t h k']) -> Float[Array, 'b t h m']:
        return jax.nn.silu(x)
