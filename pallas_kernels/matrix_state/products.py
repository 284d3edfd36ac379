"""Matrix products of small blocks, and their gradients, in the types that a device multiplies."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

EXACT = 'highest'
"""The precision of sums of log decays and of the triangular inverse, independent of other products."""


@dataclasses.dataclass(frozen=True)
class Form:
    """How products are computed: factors rounded to `operands`, sums in `sums`, at one of JAX's precisions."""

    operands: DTypeLike
    sums: DTypeLike
    precision: str | None = None


def exact(like: jax.Array) -> Form:
    """The form of products whose factors and sums are of the type of an array, nothing rounded."""
    return Form(like.dtype, like.dtype, EXACT)


PARTS = Form(jnp.bfloat16, jnp.float32)
"""That of products of parts of float32 numbers."""


class _Sides(NamedTuple):
    """The axes, of the last two, over which left and right are summed."""

    left: int
    right: int


_SUMMED = {'nn': _Sides(-1, -2), 'nt': _Sides(-1, -1), 'tn': _Sides(-2, -2)}


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def multiply(left: jax.Array, right: jax.Array, sides: str, form: Form) -> jax.Array:
    """Returns `left @ right`, of `form.sums`, both `... i j`; a `t` in `sides` transposes that factor.

    The gradients are products of the same form, so that nothing else is rounded in the backward pass.
    """
    summed, last = _SUMMED[sides], left.ndim - 2
    batch = tuple(range(last))
    return jax.lax.dot_general(
        left.astype(form.operands),
        right.astype(form.operands),
        (((summed.left % left.ndim,), (summed.right % right.ndim,)), (batch, batch)),
        precision=form.precision,
        preferred_element_type=form.sums,
    )


def multiply_with_rest(left: jax.Array, right: jax.Array, sides: str, form: Form) -> jax.Array:
    """Returns `left @ right` as `multiply` does, with what rounding takes from `left` as a product of its own.

    Of keys alike and strengths near two a row of a triangular inverse is 1, -2, 2, -2, ...: its sum is one or less in
    size, and the rounding of a hundred such numbers is not.
    """
    product = multiply(left, right, sides, form)
    if form.operands == form.sums:
        return product
    taken = jax.lax.stop_gradient(left - left.astype(form.operands).astype(form.sums))
    return product + multiply(taken, right, sides, form)


Multiply = Callable[[jax.Array, jax.Array, str], jax.Array]


def multiply_exactly(left: jax.Array, right: jax.Array, sides: str) -> jax.Array:
    """Returns `left @ right` with nothing rounded to a narrower type."""
    return multiply(left, right, sides, exact(left))


def multiply_in_parts(left: jax.Array, right: jax.Array, sides: str) -> jax.Array:
    """Returns `left @ right` of float32 factors in three products of bfloat16 parts.

    What rounding takes from a factor is a part of it; the product of both is left out, 2^-16 of the factors.
    """
    (left, dleft), (right, dright) = (parts_of(factor, 2) for factor in (left, right))
    return multiply(left, right, sides, PARTS) + (
        multiply(left, dright, sides, PARTS) + multiply(dleft, right, sides, PARTS)
    )


def multiply_for(form: Form) -> Multiply:
    """What multiplies float32 numbers that products of a form rest on: parts beside bfloat16, else exact products."""
    return multiply_in_parts if form.operands == jnp.bfloat16 else multiply_exactly


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def added_up(which: jax.Array, array: jax.Array, form: Form) -> jax.Array:
    """Returns `which @ array` of zeros and ones with nothing rounded, `... c c` and `... c n`.

    Beside products of bfloat16 the array is three parts of eight bits each, and so there are three products for six.
    """
    return _added_up(which, array, 'nn', form)


def _added_up(which: jax.Array, array: jax.Array, sides: str, form: Form) -> jax.Array:
    if form.operands != jnp.bfloat16:
        return multiply(which, array, sides, exact(array))
    first, *others = (multiply(which, part, sides, PARTS) for part in parts_of(array, 3))
    return first + (others[0] + others[1])


added_up.defvjp(
    lambda which, array, form: (added_up(which, array, form), which),
    lambda form, which, dsums: (None, _added_up(which, dsums, 'tn', form)),
)


def parts_of(array: jax.Array, number: int) -> list[jax.Array]:
    """Bfloat16 numbers of which each is what rounding takes from the array without those before."""
    parts = []
    for _ in range(number):
        parts.append(array.astype(jnp.bfloat16))
        array = array - parts[-1].astype(array.dtype)
    return parts


def _save(left: jax.Array, right: jax.Array, sides: str, form: Form) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return multiply(left, right, sides, form), (left, right)


def _pull(
    sides: str, form: Form, saved: tuple[jax.Array, jax.Array], dproduct: jax.Array
) -> tuple[jax.Array, jax.Array]:
    left, right = saved
    match sides:
        case 'nn':
            found = multiply(dproduct, right, 'nt', form), multiply(left, dproduct, 'tn', form)
        case 'nt':
            found = multiply(dproduct, right, 'nn', form), multiply(dproduct, left, 'tn', form)
        case _:
            found = multiply(right, dproduct, 'nt', form), multiply(left, dproduct, 'nn', form)
    return found[0].astype(left.dtype), found[1].astype(right.dtype)


multiply.defvjp(_save, _pull)
