"""How a width divides into heads, and heads into groups that share keys and values."""

from jax import Array
from jaxtyping import Float

from attnlab.errors import UserError
from attnlab.typing import Heads


def head_channels(dim: int, heads: int, *, instead: str | None = None) -> int:
    """Returns `dim / heads`, the channels of a head.

    `instead` names the argument that, when given, sets the channels itself. Raises `UserError` when `heads` is not a
    divisor of `dim`.
    """
    if heads < 1 or dim % heads:
        unless = '' if instead is None else f', unless {instead} is given'
        raise UserError(f'heads is {heads}; it must divide dim, which is {dim}{unless}')
    return dim // heads


def check_groups(heads: int, kv_heads: int) -> None:
    """Raises `UserError` when `kv_heads` is not a divisor of `heads`, so that no equal groups share keys and values."""
    if not 1 <= kv_heads <= heads or heads % kv_heads:
        raise UserError(f'kv_heads is {kv_heads}; it must divide heads, which is {heads}')


def by_head(x: Float[Array, 'b t d'], heads: int) -> Heads:
    """Returns the channels of each of `heads` heads, `b t h k`; `heads` divides the width."""
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads)
