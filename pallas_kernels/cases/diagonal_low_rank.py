"""Named calls of `diagonal_low_rank`."""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.cases import drawing
from pallas_kernels.cases.matrix_state import MatrixCase


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(MatrixCase):
    """A call of `diagonal_low_rank` with an incoming state; `b = -c a` for numbers c, but for a small part.

    `a` and `b` have the heads of k.

    Attributes:
      most: c lies between 0 and this.
      tied: what is read is written under k, which lies near a.
    """

    most: float = 1.0
    tied: bool = False


CASES = {
    'one': Case(b=2, t=1, k=3, v=4, decay='b t h'),
    'two': Case(b=1, t=2, k=3, v=2, decay='b t h k'),
    'no decay': Case(b=2, t=37, k=16, v=8),
    'constant': Case(b=2, t=37, k=8, v=8, decay='h'),
    'scalar': Case(b=2, t=37, k=8, v=16, decay='b t h'),
    'vector': Case(b=2, t=37, k=8, v=16, decay='b t h k'),
    'tied': Case(b=1, t=67, k=8, v=8, decay='b t h k', tied=True),
    'several chunks, vector': Case(b=1, t=149, k=16, v=8, decay='b t h k'),
    'whole tiles': Case(b=1, t=128, k=8, v=8, decay='b t h'),
    'wide': Case(b=1, t=19, k=64, v=128, decay='b t h k'),
    'grouped': Case(b=2, t=37, k=8, v=8, heads=(4, 2, 2), decay='b t h'),
    'grouped vector': Case(b=1, t=37, k=8, v=8, heads=(4, 1, 2), decay='b t h k'),
    'reflecting': Case(b=1, t=67, k=8, v=8, most=2.0),
    'reflecting vector': Case(b=1, t=67, k=8, v=8, decay='b t h k', most=2.0),
    'packed': Case(b=2, t=67, k=8, v=8, documents=drawing.PACKED_67),
    'packed tied': Case(b=2, t=67, k=8, v=8, tied=True, decay='b t h', documents=drawing.PACKED_67),
    'packed scalar': Case(b=2, t=67, k=8, v=8, decay='b t h', documents=drawing.PACKED_67),
    'packed vector': Case(b=2, t=67, k=8, v=8, decay='b t h k', documents=drawing.PACKED_67),
    'strong scalar': Case(b=1, t=67, k=8, v=8, decay='b t h', strength=25.0),
    'strong vector': Case(b=1, t=67, k=8, v=8, decay='b t h k', strength=25.0),
    'sudden scalar': Case(b=1, t=67, k=8, v=8, decay='b t h', sudden=True),
    'sudden vector': Case(b=2, t=67, k=8, v=8, decay='b t h k', strength=2.0, sudden=True, documents=drawing.PACKED_67),
    'sudden tied': Case(b=1, t=67, k=8, v=8, decay='b t h k', sudden=True, tied=True),
}

KERNEL = (
    'two',
    'no decay',
    'tied',
    'sudden vector',
    'grouped vector',
    'reflecting vector',
    'packed scalar',
    'packed tied',
)
"""Those that are compared every time."""


def call(name: str, dtype: DTypeLike = jnp.float32) -> drawing.Call:
    """Returns the call of `CASES[name]`: vectors of `dtype`, log decays and state of float32 at least."""
    case = CASES[name]
    keys = case.shape('b t hk k')
    a = drawing.normal(name, 'a', keys, jnp.float32)
    a /= jnp.linalg.norm(a, axis=-1, keepdims=True)
    part = case.most * drawing.uniform(name, 'part', case.shape('b t hk 1'))
    aside = 0.02 * drawing.normal(name, 'aside', keys, jnp.float32)
    if case.tied:
        return case.call(name, dtype, {'k': part * a + aside, 'a': -a})
    return case.call(name, dtype, {'k': drawing.normal(name, 'k', keys, jnp.float32), 'a': a, 'b': aside - part * a})


def erasing(name: str, dtype: DTypeLike = jnp.float32) -> drawing.Call:
    """A call of the delta rule with erase keys that are not its keys: `a` and, nearby, k, both of length one."""
    found, case = call(name, dtype), CASES[name]
    arrays = {what: array for what, array in found.arrays.items() if what not in 'ab'}
    strength = drawing.uniform(name, 'beta', (*found.arrays['q'].shape[:2], max(case.heads)))
    a = found.arrays['a'].astype(jnp.promote_types(dtype, jnp.float32))
    k, erase = ((x / jnp.linalg.norm(x, axis=-1, keepdims=True)).astype(dtype) for x in (a + 0.1, a))
    beta = (case.most * strength).astype(dtype)
    return drawing.Call(arrays | {'k': k, 'erase': erase, 'beta': beta}, found.options)


def real() -> dict[str, drawing.Call]:
    """Calls of the size of models, shapes only."""
    return {f'k={k}': _real(k) for k in (64, 128)}


def _real(k: int) -> drawing.Call:
    sizes = {'b': 4, 't': 8192, 'h': 16, 'k': k, 'v': k}
    arrays = {name: drawing.abstract('b t h k', sizes, jnp.bfloat16) for name in ('q', 'k', 'v', 'a', 'b')}
    arrays['log_decay'] = drawing.abstract('b t h k', sizes, jnp.float32)
    return drawing.Call({**arrays, 'state': drawing.abstract('b h k v', sizes, jnp.float32)}, {})
