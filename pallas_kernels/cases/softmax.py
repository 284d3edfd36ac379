"""Named calls of `softmax`."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.cases import drawing


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of `softmax`.

    Attributes:
      shape: of x.
      offset: added to all scores.
      where: the shape of the mask; its first row, or all of it, is False.
      hidden: whether the first row of x is minus infinity, and a fifth of the others.
    """

    shape: tuple[int, ...]
    offset: float = 0.0
    where: tuple[int, ...] | None = None
    hidden: bool = False


CASES = {
    'one': Case((1,)),
    'two': Case((1, 2)),
    'prime': Case((37, 101)),
    'whole tiles': Case((64, 128)),
    'batch': Case((2, 3, 5, 40), where=(3, 1, 40)),
    'masked': Case((37, 101), where=(37, 101)),
    'one mask': Case((5, 67), where=(1, 67)),
    'all masked': Case((3, 17), where=(1,)),
    'minus infinity': Case((5, 67), hidden=True),
    'large scores': Case((7, 150), offset=1e4),
    'long': Case((3, 40001)),
}
KERNEL = ('one', 'batch', 'masked', 'all masked', 'minus infinity', 'large scores', 'long')


def call(name: str, dtype: DTypeLike = jnp.float32) -> drawing.Call:
    """Returns the call of `CASES[name]`."""
    case = CASES[name]
    x = (case.offset + drawing.normal(name, 'x', case.shape, jnp.float32)).astype(dtype)
    if case.hidden:
        hidden = drawing.chosen(name, 'hidden', 0.2, case.shape).at[0].set(True)
        x = jnp.where(hidden, -math.inf, x)
    options = {}
    if case.where is not None:
        options['where'] = drawing.chosen(name, 'where', 0.8, case.where).at[0].set(False)
    return drawing.Call({'x': x}, options)


def real() -> dict[str, drawing.Call]:
    """Calls at model sizes, shapes only."""
    shapes = {'scores': (16384, 8192), 'logits': (8192, 50304), 'GPT-2 logits': (8192, 50257), 'experts': (65536, 64)}
    calls = {name: drawing.Call({'x': jax.ShapeDtypeStruct(shape, jnp.bfloat16)}, {}) for name, shape in shapes.items()}
    masked = {'where': jax.ShapeDtypeStruct(shapes['scores'], jnp.bool_)}
    return {
        **calls,
        'masked scores, float32': drawing.Call({'x': jax.ShapeDtypeStruct(shapes['scores'], jnp.float32)}, masked),
        'logits of a large vocabulary, float32': drawing.Call(
            {'x': jax.ShapeDtypeStruct((2048, 262144), jnp.float32)}, {}
        ),
        'scores, float16': drawing.Call({'x': jax.ShapeDtypeStruct(shapes['scores'], jnp.float16)}, {}),
    }
