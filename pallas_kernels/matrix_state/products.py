"""Matrix products of small blocks, and their gradients, in the types that a device multiplies."""

import dataclasses
import functools
from typing import NamedTuple

import jax
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


def multiply_exactly(left: jax.Array, right: jax.Array, sides: str, form: Form) -> jax.Array:
    """Returns `left @ right` as `multiply` does, with what rounding takes from `left` as a product of its own.

    Of keys alike and strengths near two a row of a triangular inverse is 1, -2, 2, -2, ...: its sum is one or less in
    size, and the rounding of a hundred such numbers is not.
    """
    product = multiply(left, right, sides, form)
    if form.operands == form.sums:
        return product
    taken = jax.lax.stop_gradient(left - left.astype(form.operands).astype(form.sums))
    return product + multiply(taken, right, sides, form)


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
