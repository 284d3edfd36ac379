"""Normalisers: division of an unnormalised sum of values by the sum of its weights, and the size of what it gives."""

import dataclasses

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from attnlab.functional.precision import wide_dtype


@dataclasses.dataclass(frozen=True)
class SumNormalizer:
    """Divides by the sum of the weights, `o = n / (z + eps)`, where every weight is at least zero.

    Katharopoulos et al. 2020, https://arxiv.org/abs/2006.16236, whose code adds the eps.
    """

    eps: float = 1e-6

    def __call__(self, total: Float[Array, 'b t h v'], weight: Float[Array, 'b t h']) -> Float[Array, 'b t h v']:
        wide = weight.astype(wide_dtype(weight.dtype))
        return (total.astype(wide.dtype) / (wide + self.eps)[..., None]).astype(total.dtype)


@dataclasses.dataclass(frozen=True)
class FloorNormalizer:
    """Divides by the sum of the weights, bounded below by `floor`: `o = n / max(z, floor)`.

    Qin et al. 2022, https://arxiv.org/abs/2202.08791.
    """

    floor: float = 1e-6

    def __call__(self, total: Float[Array, 'b t h v'], weight: Float[Array, 'b t h']) -> Float[Array, 'b t h v']:
        wide = weight.astype(wide_dtype(weight.dtype))
        return (total.astype(wide.dtype) / jnp.maximum(wide, self.floor)[..., None]).astype(total.dtype)


@dataclasses.dataclass(frozen=True)
class RootGrowth:
    """The factor `sqrt(n / v)` of a mean of `n` values of `v` channels, which shrinks as it is over more of them.

    Nauen, Palacio and Dengel 2024, https://arxiv.org/abs/2403.02920.
    """

    def __call__(self, counts: Float[Array, 'b t'], channels: int) -> Float[Array, 'b t']:
        return jnp.sqrt(counts / channels)
