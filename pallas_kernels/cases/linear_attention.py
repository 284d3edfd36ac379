"""Named calls of `linear_attention`."""

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.cases import drawing
from pallas_kernels.cases.matrix_state import MatrixCase


class Case(MatrixCase):
    """A call of `linear_attention` with an incoming state."""


PACKED_131: drawing.Runs = ((1, 64), (2, 5), (3, 40), (4, 22))

CASES = {
    'one': Case(b=2, t=1, k=3, v=4, decay='b t h'),
    'two': Case(b=1, t=2, k=3, v=2, decay='b t h k'),
    'no decay': Case(b=2, t=37, k=16, v=8),
    'constant': Case(b=2, t=37, k=8, v=8, decay='h'),
    'constant in whole tiles': Case(b=1, t=64, k=8, v=8, decay='h'),
    'scalar': Case(b=2, t=37, k=8, v=16, decay='b t h'),
    'vector': Case(b=2, t=37, k=8, v=16, decay='b t h k'),
    'vector in whole tiles': Case(b=1, t=64, k=8, v=8, decay='b t h k'),
    'wide': Case(b=1, t=19, k=128, v=64, decay='b t h'),
    'shared queries and keys': Case(b=2, t=37, k=8, v=8, heads=(1, 1, 4), decay='b t h'),
    'grouped': Case(b=2, t=37, k=8, v=8, heads=(4, 2, 2), decay='b t h'),
    'grouped vector': Case(b=1, t=37, k=8, v=8, heads=(4, 1, 2), decay='b t h k'),
    'threes and twos': Case(b=1, t=19, k=4, v=4, heads=(6, 2, 3)),
    'threes and twos of six': Case(b=1, t=5, k=8, v=8, heads=(3, 2, 6), decay='b t h'),
    'twos and threes of six': Case(b=1, t=5, k=8, v=8, heads=(2, 3, 6), decay='b t h'),
    'packed': Case(b=2, t=67, k=8, v=8, documents=drawing.PACKED_67),
    'packed constant': Case(b=2, t=67, k=8, v=8, decay='h', documents=drawing.PACKED_67),
    'packed scalar': Case(b=2, t=67, k=8, v=8, decay='b t h', documents=drawing.PACKED_67),
    'packed vector': Case(b=2, t=67, k=8, v=8, decay='b t h k', documents=drawing.PACKED_67),
    'strong scalar': Case(b=1, t=67, k=8, v=8, decay='b t h', strength=25.0),
    'strong vector': Case(b=1, t=67, k=8, v=8, decay='b t h k', strength=25.0),
    'sudden scalar': Case(b=1, t=67, k=8, v=8, decay='b t h', sudden=True),
    'sudden vector': Case(b=2, t=67, k=8, v=8, decay='b t h k', strength=2.0, sudden=True, documents=drawing.PACKED_67),
    'long': Case(b=1, t=131, k=8, v=72, heads=(1, 2, 2), decay='b t h', documents=(PACKED_131,)),
    'wide values': Case(b=1, t=67, k=8, v=136, heads=(1, 2, 2), decay='b t h', documents=drawing.PACKED_67[:1]),
    'wide keys': Case(b=1, t=67, k=136, v=8, heads=(2, 1, 2), decay='b t h', documents=drawing.PACKED_67[:1]),
    'long sudden': Case(b=1, t=131, k=24, v=8, heads=(1, 1, 1), decay='b t h', sudden=True),
    'long vector': Case(b=1, t=131, k=8, v=24, heads=(2, 1, 1), decay='b t h k', strength=1.0, documents=(PACKED_131,)),
    'wide vector': Case(b=1, t=131, k=72, v=72, heads=(2, 1, 2), decay='b t h k', documents=(PACKED_131,)),
}

KERNEL = (
    'one',
    'no decay',
    'constant',
    'grouped',
    'threes and twos of six',
    'twos and threes of six',
    'shared queries and keys',
    'packed scalar',
    'strong scalar',
    'long',
    'wide values',
    'wide keys',
    'long sudden',
)
"""The cases that every kernel serves."""

VECTOR = ('two', 'grouped vector', 'strong vector', 'sudden vector', 'long vector')
"""Those with decays per key channel, which all kernels also serve."""


def call(name: str, dtype: DTypeLike = jnp.float32) -> drawing.Call:
    """Returns the call of `CASES[name]`, see `draw`."""
    return draw(name, CASES[name], dtype)


def draw(name: str, case: Case, dtype: DTypeLike = jnp.float32) -> drawing.Call:
    """Returns a call: q, k and v of `dtype`, log decays and state of float32 at least; the name seeds the numbers."""
    return case.call(name, dtype, {'k': drawing.normal(name, 'k', case.shape('b t hk k'), dtype)})


def real() -> dict[str, drawing.Call]:
    """Calls at model sizes, shapes only; in the last, Mamba-2's, all heads read and write by the same keys."""
    decays = {'no decay': None, 'scalar': 'b t h', 'vector': 'b t h k'}
    calls = {f'k={k}, {name}': _real(k, decay) for k in (64, 128) for name, decay in decays.items()}
    grouped = _real(128, 'h', groups=4, letters=('b t h k', 'b t g k', 'b t g v'))
    shared = _real(128, 'b t h', groups=1, v=64, letters=('b t g k', 'b t g k', 'b t h v'))
    return calls | {'k=128, constant, grouped': grouped, 'k=128, scalar, shared': shared}


def _real(
    k: int,
    decay: str | None,
    groups: int = 16,
    v: int | None = None,
    letters: tuple[str, str, str] = ('b t h k', 'b t h k', 'b t h v'),
) -> drawing.Call:
    sizes = {'b': 4, 't': 8192, 'h': 16, 'g': groups, 'k': k, 'v': v or k}
    arrays = {name: drawing.abstract(shape, sizes, jnp.bfloat16) for name, shape in zip('qkv', letters, strict=True)}
    if decay is not None:
        arrays['log_decay'] = drawing.abstract(decay, sizes, jnp.float32)
    return drawing.Call({**arrays, 'state': drawing.abstract('b h k v', sizes, jnp.float32)}, {})
