"""The measured limits of the device: the rates of a large copy, of a large matrix product and of exponentials."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.bench import timing

CHAIN = 64
"""Exponentials of every number in a row, so that reading and writing it is little beside them."""


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Rates of a device: bytes that a copy reads and writes, operations of a product, exponentials in float32."""

    bytes_per_second: float
    flops_per_second: float
    exponentials_per_second: float

    def seconds(self, flops: float, moved: float, exponentials: float = 0) -> float:
        """The least time for the given numbers of operations, bytes moved and exponentials."""
        return max(
            flops / self.flops_per_second,
            moved / self.bytes_per_second,
            exponentials / self.exponentials_per_second,
        )


def measure(platform: str, dtype: jnp.dtype, patience: timing.Patience) -> Ceilings:
    """Measures all three, the product in `dtype`; as large as fills the device."""
    # On a CPU larger results are allocated page by page, which takes longer than copying.
    mebibytes, size, numbers = (24, 2048, 2**16) if platform == 'cpu' else (1024, 8192, 2**24)
    source = jnp.ones((mebibytes * 2**18,), jnp.float32)
    # The compiler would remove a plain copy.
    copy = timing.compiled(lambda x: x + 1, source)
    left = jax.random.normal(jax.random.key(0), (size, size), jnp.float32).astype(dtype)
    product = timing.compiled(jnp.matmul, left, left)
    exponentials = timing.compiled(chained, jnp.linspace(0, 1, numbers, dtype=jnp.float32))
    programs = {'copy': copy, 'product': product, 'exponentials': exponentials}
    times = timing.alternate({name: program.call for name, program in programs.items()}, 'copy', patience)
    return Ceilings(
        2 * source.nbytes / times['copy'].seconds,
        2 * size**3 / times['product'].seconds,
        CHAIN * numbers / times['exponentials'].seconds,
    )


def chained(x: jax.Array) -> jax.Array:
    """`CHAIN` times `x = exp(-x)`, which stays between 0 and 1."""
    for _ in range(CHAIN):
        x = jnp.exp(-x)
    return x
