"""The canonical form of a call of `attention`."""

import dataclasses

import jax

from pallas_kernels.attention.maps import WeightMap


@dataclasses.dataclass(frozen=True)
class Rule:
    """What is fixed when a call is traced; see `api.attention`."""

    weights: WeightMap
    scale: float
    causal: bool
    window: int | None
    sinks: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """The arrays of a call, or of one block of it.

    Attributes:
      q: `b t h k`.
      k: `b s g k`.
      v: `b s g v`.
      bias: each dimension that of `b h t s` or 1; or `None`.
      slopes: `h`, or `None`.
      query_forget: the logarithms of the forget gates summed up to each query, `b t h`, or `None`.
      key_forget: the same for the keys, `b s h`.
      query_segments: `b t`, or `None`.
      key_segments: `b s`, or `None`.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    bias: jax.Array | None = None
    slopes: jax.Array | None = None
    query_forget: jax.Array | None = None
    key_forget: jax.Array | None = None
    query_segments: jax.Array | None = None
    key_segments: jax.Array | None = None

    def floating(self) -> tuple[jax.Array | None, ...]:
        """The arrays that have gradients."""
        return self.q, self.k, self.v, self.bias, self.slopes, self.query_forget, self.key_forget
