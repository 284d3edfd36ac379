"""Named calls of `linear_scan`."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.cases import drawing


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of `linear_scan` with an incoming state.

    Attributes:
      decay: letters of its shape, such as 'd' or '1 t 1'.
      complex: which of 'x', 'decay' and 'state' are complex.
    """

    b: int
    t: int
    d: int
    decay: str = 'b t d'
    complex: tuple[str, ...] = ()
    documents: tuple[drawing.Runs, ...] | None = None
    reverse: bool = False


CASES = {
    'one': Case(b=2, t=1, d=3),
    'two': Case(b=1, t=2, d=5),
    'whole tiles': Case(b=2, t=16, d=8),
    'prime': Case(b=2, t=37, d=5),
    'constant': Case(b=2, t=37, d=5, decay='d'),
    'constant in whole tiles': Case(b=2, t=16, d=5, decay='d'),
    'one decay a step': Case(b=2, t=19, d=5, decay='b t 1', reverse=True),
    'one decay': Case(b=2, t=19, d=5, decay='1 1 1', reverse=True),
    'reverse': Case(b=2, t=37, d=5, reverse=True),
    'packed': Case(b=2, t=37, d=5, documents=drawing.PACKED_37),
    'packed, reverse': Case(b=2, t=37, d=5, decay='d', documents=drawing.PACKED_37, reverse=True),
    'complex': Case(b=2, t=37, d=5, decay='d', complex=('x', 'decay', 'state'), documents=drawing.PACKED_37),
    'complex decay': Case(b=2, t=13, d=5, complex=('decay',), reverse=True),
    'complex input': Case(b=2, t=13, d=5, complex=('x',)),
    'wide': Case(b=1, t=19, d=200, reverse=True),
}

KERNEL = ('one', 'two', 'constant', 'one decay a step', 'packed', 'packed, reverse', 'complex', 'complex decay', 'wide')
"""The cases that every kernel serves."""


def call(name: str, dtype: DTypeLike = jnp.float32) -> drawing.Call:
    """Returns the call of `CASES[name]`, see `draw`."""
    return draw(name, CASES[name], dtype)


def draw(name: str, case: Case, dtype: DTypeLike = jnp.float32) -> drawing.Call:
    """Returns a call: `x` and `decay` of `dtype` or complex, `state` float32 at least; the name seeds the numbers."""
    sizes = {'b': case.b, 't': case.t, 'd': case.d}
    modulus = jax.nn.sigmoid(1 + drawing.normal(name, 'decay', drawing.shape(case.decay, sizes), jnp.float32))
    arrays = {
        'x': drawing.normal(name, 'x', drawing.shape('b t d', sizes), dtype),
        'decay': modulus.astype(dtype),
        'state': drawing.normal(name, 'state', drawing.shape('b d', sizes), jnp.promote_types(dtype, jnp.float32)),
    }
    for part in case.complex:
        angle = drawing.normal(name, f'{part} angle', arrays[part].shape, jnp.float32)
        arrays[part] = jax.lax.complex(arrays[part] * jnp.cos(angle), arrays[part] * jnp.sin(angle))
    return drawing.Call(arrays, {'reverse': case.reverse, **drawing.documents(case.documents)})


def real() -> dict[str, drawing.Call]:
    """Calls at model sizes, shapes only."""
    return {
        'real': _real(jnp.bfloat16),
        'float32, reverse': _real(jnp.float32, reverse=True),
        'bfloat16 with decays in float32, one sequence': _real(jnp.bfloat16, decay_dtype=jnp.float32, b=1),
        'complex, constant': _real(jnp.complex64, decay='d', b=4, d=1024),
    }


def _real(
    dtype: DTypeLike,
    *,
    decay: str = 'b t d',
    decay_dtype: DTypeLike | None = None,
    b: int = 4,
    d: int = 2048,
    reverse: bool = False,
) -> drawing.Call:
    sizes = {'b': b, 't': 8192, 'd': d}
    arrays = {
        'x': drawing.abstract('b t d', sizes, dtype),
        'decay': drawing.abstract(decay, sizes, decay_dtype or dtype),
        'state': drawing.abstract('b d', sizes, jnp.promote_types(dtype, jnp.float32)),
    }
    return drawing.Call(arrays, {'reverse': reverse})
