"""Named calls of `short_conv`."""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.cases import drawing


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of `short_conv` with `w` taps."""

    b: int
    t: int
    d: int
    w: int
    bias: bool = False
    activation: str = 'silu'
    documents: tuple[drawing.Runs, ...] | None = None


SHORT = (((1, 1), (2, 2), (3, 3), (4, 1), (5, 8), (0, 4)), ((1, 6), (1, 1), (2, 1), (3, 1), (4, 10)))
"""Two rows of 19 tokens, most documents of fewer than four."""

CASES = {
    'one': Case(b=2, t=1, d=128, w=1, activation='identity'),
    'two': Case(b=1, t=5, d=128, w=2, bias=True, activation='identity'),
    'prime': Case(b=2, t=37, d=128, w=4, bias=True),
    'packed': Case(b=2, t=37, d=128, w=4, bias=True, documents=drawing.PACKED_37),
    'without a bias, packed': Case(b=2, t=67, d=128, w=4, activation='identity', documents=drawing.PACKED_67),
    'documents shorter than the taps': Case(b=2, t=19, d=128, w=4, documents=SHORT),
    'a row shorter than the taps': Case(b=2, t=3, d=128, w=7, bias=True),
    'seven': Case(b=1, t=67, d=384, w=7, activation='identity'),
    'a tap, wide': Case(b=1, t=67, d=256, w=1, bias=True),
    'long': Case(b=2, t=130, d=256, w=4, documents=(((1, 63), (2, 2), (3, 65)), ((1, 128), (2, 2)))),
    'channels of two tiles': Case(b=2, t=37, d=200, w=4, bias=True, documents=drawing.PACKED_37),
    'odd channels': Case(b=2, t=37, d=5, w=4, bias=True, documents=drawing.PACKED_37),
    'many taps': Case(b=1, t=37, d=128, w=9),
}

KERNEL = (
    'packed',
    'documents shorter than the taps',
    'one',
    'two',
    'prime',
    'without a bias, packed',
    'a row shorter than the taps',
    'seven',
    'a tap, wide',
    'long',
    'channels of two tiles',
)
"""The cases that every kernel serves."""


def call(name: str, dtype: DTypeLike = jnp.float32) -> drawing.Call:
    """Returns the call of `CASES[name]`, all arrays of `dtype`."""
    case = CASES[name]
    arrays = {
        'x': drawing.normal(name, 'x', (case.b, case.t, case.d), dtype),
        'taps': drawing.normal(name, 'taps', (case.w, case.d), dtype),
    }
    if case.bias:
        arrays['bias'] = drawing.normal(name, 'bias', (case.d,), dtype)
    return drawing.Call(arrays, {'activation': case.activation, **drawing.documents(case.documents)})


def real() -> dict[str, drawing.Call]:
    """Calls at model sizes, shapes only; models are trained with documents, and taps are parameters in float32."""
    sizes = {'b': 4, 't': 8192, 'd': 2048, 'w': 4}
    arrays = {
        'x': drawing.abstract('b t d', sizes, jnp.bfloat16),
        'taps': drawing.abstract('w d', sizes, jnp.float32),
    }
    bias = {'bias': drawing.abstract('d', sizes, jnp.float32)}
    segments = {'segments': drawing.abstract('b t', sizes, jnp.int32)}
    return {
        'real': drawing.Call(arrays, {'activation': 'silu'}),
        'bias, documents': drawing.Call(arrays | bias, {'activation': 'silu', **segments}),
    }
