"""The measured limits of the device: the rates of a large copy and of a large matrix product."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.bench import timing


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Rates of a device: bytes read and written a second by a copy, operations a second by a matrix product."""

    bytes_per_second: float
    flops_per_second: float

    def seconds(self, flops: float, moved: float) -> float:
        """The least time for the given numbers of operations and bytes moved."""
        return max(flops / self.flops_per_second, moved / self.bytes_per_second)


def measure(platform: str, dtype: jnp.dtype, patience: timing.Patience) -> Ceilings:
    """Measures both, the product in `dtype`; as large as fills the device."""
    # On a CPU larger results are allocated page by page, which takes longer than copying.
    mebibytes, size = (24, 2048) if platform == 'cpu' else (1024, 8192)
    source = jnp.ones((mebibytes * 2**18,), jnp.float32)
    # The compiler would remove a plain copy.
    copy = timing.compiled(lambda x: x + 1, source)
    left = jax.random.normal(jax.random.key(0), (size, size), jnp.float32).astype(dtype)
    product = timing.compiled(jnp.matmul, left, left)
    times = timing.alternate({'copy': copy.call, 'product': product.call}, 'copy', patience)
    return Ceilings(2 * source.nbytes / times['copy'].seconds, 2 * size**3 / times['product'].seconds)
