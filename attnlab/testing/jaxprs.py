"""The equations of a traced function."""

from collections.abc import Iterator
from typing import Any

import jax


def equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr and of every jaxpr inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for leaf in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, 'eqns') or hasattr(x, 'jaxpr')):
            inner = getattr(leaf, 'jaxpr', leaf)
            if hasattr(inner, 'eqns'):
                yield from equations(inner)
