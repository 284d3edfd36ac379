"""Named calls of `softmax_topk`."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.cases import drawing


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of `softmax_topk`.

    Attributes:
      shape: of x.
      offset: added to all scores.
      spacing: of the rounded scores, many of which are then equal; 0: not rounded.
      hidden: whether the first row of x is minus infinity, and a fifth of the others.
    """

    shape: tuple[int, ...]
    k: int
    offset: float = 0.0
    spacing: float = 0.0
    hidden: bool = False


CASES = {
    'one': Case((1,), k=1),
    'all': Case((2, 7), k=7),
    'prime': Case((37, 101), k=5),
    'batch': Case((2, 3, 5, 40), k=2),
    'many': Case((3, 150), k=64),
    'ties': Case((5, 300), k=9, spacing=0.5),
    'all alike': Case((3, 67), k=4, spacing=100.0),
    'minus infinity': Case((5, 17), k=16, hidden=True),
    'minus infinity, many': Case((5, 40), k=36, hidden=True),
    'large scores': Case((7, 150), k=3, offset=1e4),
    'long': Case((3, 9001), k=6),
    'long ties': Case((5, 9001), k=40, spacing=2.0, hidden=True),
}
KERNEL = ('all', 'batch', 'many', 'all alike', 'minus infinity', 'minus infinity, many', 'large scores', 'long ties')


def call(name: str, dtype: DTypeLike = jnp.float32) -> drawing.Call:
    """Returns the call of `CASES[name]`."""
    case = CASES[name]
    x = case.offset + drawing.normal(name, 'x', case.shape, jnp.float32)
    if case.spacing:
        x = case.spacing * jnp.round(x / case.spacing)
    if case.hidden:
        hidden = drawing.chosen(name, 'hidden', 0.2, case.shape).at[0].set(True)
        x = jnp.where(hidden, -math.inf, x)
    return drawing.Call({'x': x.astype(dtype)}, {'k': case.k})


def real() -> dict[str, drawing.Call]:
    """Calls at model sizes, shapes only."""
    calls = {
        'experts': ((65536, 64), jnp.float32, 8),
        'logits': ((8192, 50304), jnp.bfloat16, 8),
        'GPT-2 logits': ((8192, 50257), jnp.bfloat16, 64),
        'one token': ((1, 262144), jnp.float32, 64),
        'logits, float16': ((8192, 50304), jnp.float16, 8),
    }
    return {
        name: drawing.Call({'x': jax.ShapeDtypeStruct(shape, dtype)}, {'k': k})
        for name, (shape, dtype, k) in calls.items()
    }
