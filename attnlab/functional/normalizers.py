"""Normalisers: division of an unnormalised sum of values by the sum of its weights."""

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
