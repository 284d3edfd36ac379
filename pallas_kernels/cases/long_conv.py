"""Named calls of `long_conv`."""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.cases import drawing


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of `long_conv` with `w` taps."""

    b: int
    t: int
    d: int
    w: int
    documents: tuple[drawing.Runs, ...] | None = None


CASES = {
    'one': Case(b=2, t=1, d=3, w=1),
    'prime': Case(b=2, t=37, d=5, w=37),
    'packed': Case(b=2, t=37, d=5, w=37, documents=drawing.PACKED_37),
    'transforms': Case(b=2, t=150, d=3, w=200),
    'packed transforms': Case(b=2, t=150, d=3, w=150, documents=(((1, 140), (2, 10)), ((1, 3), (2, 147)))),
    'few taps': Case(b=1, t=70, d=3, w=4),
    'few taps of a long row, packed': Case(b=2, t=67, d=3, w=9, documents=drawing.PACKED_67),
    'few taps, packed': Case(b=2, t=37, d=3, w=9, documents=drawing.PACKED_37),
    'blocks, packed': Case(
        b=3, t=300, d=3, w=300, documents=(((1, 100), (2, 200)), ((1, 128), (2, 127), (3, 45)), ((1, 300),))
    ),
    'rows of two groups': Case(b=9, t=140, d=1, w=140),
    'fewer taps than blocks': Case(b=1, t=2100, d=2, w=400),
    'long documents': Case(b=1, t=2100, d=1, w=2100, documents=(((1, 1000), (2, 1), (3, 1099)),)),
    'many rows': Case(b=50, t=170, d=1, w=170),
    'many rows, packed': Case(
        b=29, t=300, d=1, w=200, documents=tuple(((1, 10 * row + 1), (2, 299 - 10 * row)) for row in range(29))
    ),
    'two': Case(b=2, t=2, d=5, w=7, documents=(((1, 2),), ((1, 1), (2, 1)))),
}

KERNEL = ('packed', 'transforms', 'packed transforms', 'prime', 'few taps', 'one', 'few taps of a long row, packed')
"""The cases that are compared every time."""

BLOCKS = ('blocks, packed', 'transforms', 'rows of two groups', 'fewer taps than blocks', 'long documents', 'prime')
"""Those that kernels serve: of one block or several, in one product or several."""

HOPPER = (
    'blocks, packed',
    'transforms',
    'rows of two groups',
    'long documents',
    'prime',
    'many rows',
    'many rows, packed',
)
"""Those that kernels for Hopper serve: of one program or several."""


def call(name: str, dtype: DTypeLike = jnp.float32) -> drawing.Call:
    """Returns the call of `CASES[name]`, both arrays of `dtype`."""
    case = CASES[name]
    arrays = {
        'x': drawing.normal(name, 'x', (case.b, case.t, case.d), dtype),
        'kernel': drawing.normal(name, 'kernel', (case.w, case.d), dtype),
    }
    return drawing.Call(arrays, drawing.documents(case.documents))


def real() -> dict[str, drawing.Call]:
    """Calls at model sizes, shapes only."""

    def call(b: int, t: int, dtype: DTypeLike, *, w: int | None = None, packed: bool = False) -> drawing.Call:
        sizes = {'b': b, 't': t, 'd': 1024, 'w': w or t}
        arrays = {
            'x': drawing.abstract('b t d', sizes, dtype),
            'kernel': drawing.abstract('w d', sizes, jnp.float32),
        }
        return drawing.Call(arrays, {'segments': drawing.abstract('b t', sizes, jnp.int32)} if packed else {})

    return {
        't=2048, packed': call(8, 2048, jnp.bfloat16, packed=True),
        't=2048': call(8, 2048, jnp.bfloat16),
        't=8192': call(4, 8192, jnp.bfloat16),
        't=8192, 128 taps': call(4, 8192, jnp.bfloat16, w=128),
        't=2048, float32': call(8, 2048, jnp.float32),
        't=2048, float32, packed': call(8, 2048, jnp.float32, packed=True),
    }
