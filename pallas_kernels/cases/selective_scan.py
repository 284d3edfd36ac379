"""Named calls of `selective_scan`."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.cases import drawing


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of `selective_scan` with an incoming state and a skip."""

    b: int
    t: int
    d: int
    n: int
    documents: tuple[drawing.Runs, ...] | None = None


CASES = {
    'one': Case(b=2, t=1, d=3, n=4),
    'two': Case(b=1, t=2, d=5, n=1),
    'whole tiles': Case(b=2, t=64, d=3, n=16),
    'prime': Case(b=2, t=37, d=5, n=3),
    'packed': Case(b=2, t=67, d=5, n=4, documents=drawing.PACKED_67),
    'long and wide': Case(b=1, t=131, d=130, n=9),
    'many numbers': Case(b=1, t=19, d=5, n=33),
    'two spans': Case(b=1, t=300, d=3, n=4, documents=(((1, 100), (2, 60), (3, 140)),)),
}

KERNEL = ('one', 'two', 'prime', 'packed', 'long and wide', 'many numbers', 'two spans')
"""The cases that every kernel serves."""


def call(name: str, dtype: DTypeLike = jnp.float32) -> drawing.Call:
    """Returns the call of `CASES[name]`: parameters and state of float32 at least, the rest of `dtype`."""
    case = CASES[name]
    sizes = {'b': case.b, 't': case.t, 'd': case.d, 'n': case.n}
    wide = jnp.promote_types(dtype, jnp.float32)
    arrays = {
        'x': drawing.normal(name, 'x', drawing.shape('b t d', sizes), dtype),
        'dt': jax.nn.softplus(drawing.normal(name, 'dt', drawing.shape('b t d', sizes), dtype) - 1),
        'A': -jnp.exp(drawing.normal(name, 'A', drawing.shape('d n', sizes), wide)),
        'B': drawing.normal(name, 'B', drawing.shape('b t n', sizes), dtype),
        'C': drawing.normal(name, 'C', drawing.shape('b t n', sizes), dtype),
        'D': drawing.normal(name, 'D', drawing.shape('d', sizes), wide),
        'state': drawing.normal(name, 'state', drawing.shape('b d n', sizes), wide),
    }
    return drawing.Call(arrays, drawing.documents(case.documents))


def real() -> dict[str, drawing.Call]:
    """Calls at model sizes, shapes only."""
    return {
        'n=16': _real(jnp.bfloat16, n=16),
        'n=16, float32, packed': _real(jnp.float32, n=16, packed=True),
        'n=64': _real(jnp.bfloat16, n=64),
    }


def wide() -> dict[str, drawing.Call]:
    """A call whose state of a sequence takes 5 MiB, shapes only."""
    return {'d=20480, n=64': _real(jnp.bfloat16, n=64, d=20480)}


def _real(dtype: DTypeLike, *, n: int, d: int = 2048, packed: bool = False) -> drawing.Call:
    sizes = {'b': 4, 't': 8192, 'd': d, 'n': n}
    letters = {'x': 'b t d', 'dt': 'b t d', 'B': 'b t n', 'C': 'b t n'}
    parameters = {'A': 'd n', 'D': 'd', 'state': 'b d n'}
    arrays = {name: drawing.abstract(shape, sizes, dtype) for name, shape in letters.items()}
    arrays |= {name: drawing.abstract(shape, sizes, jnp.float32) for name, shape in parameters.items()}
    return drawing.Call(arrays, {'segments': drawing.abstract('b t', sizes, jnp.int32)} if packed else {})
