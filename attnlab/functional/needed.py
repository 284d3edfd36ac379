"""What work that no core does costs by its definition, where a program is traced to count it."""

from collections.abc import Callable
from typing import Any

from pallas_kernels import counting
from pallas_kernels.cost import CallCost, Passes


def needing[**P, T](function: Callable[P, T], name: str, *, model: Passes, executed: Passes) -> Callable[P, T]:
    """The same function of arrays, or where calls are counted (`pallas_kernels.counting`) what stands for its cost.

    `model` is what its definition needs, and `executed` what it does, both as of a core. Elsewhere products count by
    their shapes, those with what is masked too. What the function closes over has no gradient where it is counted.
    """
    if not counting.is_counting():
        return function
    stand_in: Any = counting.stand_in(name, CallCost(model, executed), function)
    return stand_in
