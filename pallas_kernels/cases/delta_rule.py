"""Named calls of `delta_rule`."""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.cases import drawing
from pallas_kernels.cases.matrix_state import MatrixCase


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(MatrixCase):
    """A call of `delta_rule` with an incoming state and keys of length one.

    Attributes:
      most: the betas are between 0 and this.
      alike: the common part of all keys, as a multiple of their differences.
    """

    most: float = 1.0
    alike: float = 0.0


CASES = {
    'one': Case(b=2, t=1, k=3, v=4, decay='b t h'),
    'two': Case(b=1, t=2, k=3, v=2, decay='b t h k'),
    'no decay': Case(b=2, t=37, k=16, v=8),
    'constant': Case(b=2, t=37, k=8, v=8, decay='h'),
    'scalar': Case(b=2, t=37, k=8, v=16, decay='b t h'),
    'vector': Case(b=2, t=37, k=8, v=16, decay='b t h k'),
    'several chunks': Case(b=1, t=149, k=16, v=8),
    'several chunks, vector': Case(b=1, t=149, k=16, v=8, decay='b t h k'),
    'whole tiles': Case(b=1, t=128, k=8, v=8, decay='b t h'),
    'wide': Case(b=1, t=19, k=128, v=64, decay='b t h'),
    'shared queries and keys': Case(b=2, t=37, k=8, v=8, heads=(1, 1, 4), decay='b t h'),
    'grouped': Case(b=2, t=37, k=8, v=8, heads=(4, 2, 2), decay='b t h'),
    'grouped vector': Case(b=1, t=37, k=8, v=8, heads=(4, 1, 2), decay='b t h k'),
    'threes and twos': Case(b=1, t=19, k=4, v=4, heads=(6, 2, 3)),
    'threes and twos of six': Case(b=1, t=5, k=8, v=8, heads=(3, 2, 6), decay='b t h'),
    'twos and threes of six': Case(b=1, t=5, k=8, v=8, heads=(2, 3, 6), decay='b t h'),
    'reflecting': Case(b=1, t=67, k=8, v=8, most=2.0),
    'reflecting scalar': Case(b=1, t=67, k=8, v=8, decay='b t h', most=2.0),
    'reflecting vector': Case(b=1, t=67, k=8, v=8, decay='b t h k', most=2.0),
    'keys alike': Case(b=1, t=67, k=8, v=8, decay='b t h', alike=2.0),
    'packed': Case(b=2, t=67, k=8, v=8, documents=drawing.PACKED_67),
    'packed constant': Case(b=2, t=67, k=8, v=8, decay='h', documents=drawing.PACKED_67),
    'packed scalar': Case(b=2, t=67, k=8, v=8, decay='b t h', documents=drawing.PACKED_67),
    'packed vector': Case(b=2, t=67, k=8, v=8, decay='b t h k', documents=drawing.PACKED_67),
    'strong scalar': Case(b=1, t=67, k=8, v=8, decay='b t h', strength=25.0),
    'strong vector': Case(b=1, t=67, k=8, v=8, decay='b t h k', strength=25.0),
    'sudden scalar': Case(b=1, t=67, k=8, v=8, decay='b t h', sudden=True),
    'sudden vector': Case(b=2, t=67, k=8, v=8, decay='b t h k', strength=2.0, sudden=True, documents=drawing.PACKED_67),
}

KERNEL = (
    'one',
    'two',
    'constant',
    'several chunks',
    'wide',
    'grouped vector',
    'threes and twos of six',
    'reflecting scalar',
    'reflecting vector',
    'keys alike',
    'packed',
    'packed scalar',
    'strong scalar',
    'sudden vector',
)
"""The cases that every kernel serves."""


def call(name: str, dtype: DTypeLike = jnp.float32) -> drawing.Call:
    """Returns the call of `CASES[name]`: q, k, v and beta of `dtype`, log decays and state of float32 at least."""
    case = CASES[name]
    keys = drawing.normal(name, 'k', case.shape('b t hk k'), jnp.float32)
    keys += case.alike * drawing.normal(name, 'alike', case.shape('b 1 hk k'), jnp.float32)
    unit = keys / jnp.linalg.norm(keys, axis=-1, keepdims=True)
    beta = case.most * drawing.uniform(name, 'beta', case.shape('b t h'))
    return case.call(name, dtype, {'k': unit, 'beta': beta})


def real() -> dict[str, drawing.Call]:
    """Calls at model sizes, shapes only."""
    decays = {'no decay': None, 'scalar': 'b t h', 'vector': 'b t h k'}
    return {f'k={k}, {name}': _real(k, decay) for k in (64, 128) for name, decay in decays.items()}


def _real(k: int, decay: str | None) -> drawing.Call:
    sizes = {'b': 4, 't': 8192, 'h': 16, 'k': k, 'v': k}
    arrays = {name: drawing.abstract('b t h k', sizes, jnp.bfloat16) for name in ('q', 'k', 'v')}
    arrays['beta'] = drawing.abstract('b t h', sizes, jnp.bfloat16)
    if decay is not None:
        arrays['log_decay'] = drawing.abstract(decay, sizes, jnp.float32)
    return drawing.Call({**arrays, 'state': drawing.abstract('b h k v', sizes, jnp.float32)}, {})
