"""The portable form of `attention`."""

import jax

from pallas_kernels.attention import reference
from pallas_kernels.attention.problem import Operands, Rule


def attention(rule: Rule, operands: Operands) -> jax.Array:
    """See `reference.attention`."""
    return reference.attention(rule, operands)
