"""Named calls of `cross_entropy`."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.cases import drawing


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of `cross_entropy` with `n` tokens of width `d` and `o` classes."""

    n: int
    d: int
    o: int
    z_loss: float = 0.0
    soft_cap: float | None = None


CASES = {
    'one': Case(n=1, d=3, o=2),
    'prime': Case(n=37, d=16, o=101),
    'soft cap': Case(n=37, d=16, o=101, soft_cap=2.0),
    'z-loss': Case(n=37, d=16, o=101, z_loss=1e-2),
    'both': Case(n=37, d=16, o=101, z_loss=1e-2, soft_cap=2.0),
    'tiles': Case(n=131, d=70, o=521, z_loss=1e-2, soft_cap=5.0),
    'many classes': Case(n=131, d=8, o=4099, z_loss=1e-3),
    'many tokens': Case(n=2053, d=8, o=67, soft_cap=5.0),
}
KERNEL = ('one', 'both', 'tiles')


def call(name: str, dtype: DTypeLike = jnp.float32) -> drawing.Call:
    """Returns the call of `CASES[name]`; the first label is the first class, the last label the last class."""
    case = CASES[name]
    sizes = {'n': case.n, 'd': case.d, 'o': case.o}
    arrays = {
        'hidden': drawing.normal(name, 'hidden', drawing.shape('n d', sizes), dtype),
        'embedding': drawing.normal(name, 'embedding', drawing.shape('o d', sizes), dtype),
    }
    labels = jax.random.randint(drawing.key(name, 'labels'), (case.n,), 0, case.o).at[0].set(0).at[-1].set(case.o - 1)
    return drawing.Call(arrays, {'labels': labels, 'z_loss': case.z_loss, 'soft_cap': case.soft_cap})


def real() -> dict[str, drawing.Call]:
    """Calls at model sizes, shapes only."""
    sizes = {'n': 32768, 'd': 2048, 'o': 50304}
    arrays = {
        'hidden': drawing.abstract('n d', sizes, jnp.bfloat16),
        'embedding': drawing.abstract('o d', sizes, jnp.bfloat16),
    }
    return {'o=50304': drawing.Call(arrays, {'labels': drawing.abstract('n', sizes, jnp.int32)})}
