"""Named calls of `diagonal_low_rank`."""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.cases import drawing


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of `diagonal_low_rank` with an incoming state; `b = -c a` for numbers c, but for a small part.

    Attributes:
      heads: those of q, of k and of v; `a` and `b` have those of k.
      decay: letters of the shape of the log decays, such as 'h' or 'b t h k'; `None`: no decay.
      strength: the log decays lie between minus twice this and 0.
      sudden: a tenth of the log decays are -50, and the others a thousandth of what they were.
      most: c lies between 0 and this.
      tied: what is read is written under k, which lies near a.
    """

    b: int
    t: int
    k: int
    v: int
    heads: tuple[int, int, int] = (2, 2, 2)
    decay: str | None = None
    strength: float = 0.2
    sudden: bool = False
    most: float = 1.0
    tied: bool = False
    documents: tuple[drawing.Runs, ...] | None = None


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
    hq, hk, hv = case.heads
    sizes = {'b': case.b, 't': case.t, 'h': max(case.heads), 'k': case.k, 'v': case.v, 'hq': hq, 'hk': hk, 'hv': hv}
    wide = jnp.promote_types(dtype, jnp.float32)
    keys = drawing.shape('b t hk k', sizes)
    a = drawing.normal(name, 'a', keys, jnp.float32)
    a /= jnp.linalg.norm(a, axis=-1, keepdims=True)
    part = case.most * drawing.uniform(name, 'part', drawing.shape('b t hk 1', sizes))
    aside = 0.02 * drawing.normal(name, 'aside', keys, jnp.float32)
    arrays = {
        'q': drawing.normal(name, 'q', drawing.shape('b t hq k', sizes), dtype),
        'k': (part * a + aside if case.tied else drawing.normal(name, 'k', keys, jnp.float32)).astype(dtype),
        'v': drawing.normal(name, 'v', drawing.shape('b t hv v', sizes), dtype),
        'a': (-a if case.tied else a).astype(dtype),
        'state': drawing.normal(name, 'state', drawing.shape('b h k v', sizes), wide),
    }
    if not case.tied:
        arrays['b'] = (aside - part * a).astype(dtype)
    if case.decay is not None:
        shape = drawing.shape(case.decay, sizes)
        arrays['log_decay'] = drawing.log_decay(name, shape, case.strength, sudden=case.sudden).astype(wide)
    return drawing.Call(arrays, drawing.documents(case.documents))


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
