"""What work costs by its definition that no core does, or does with more, where a program is traced to count it."""

from collections.abc import Callable
from typing import Any

from pallas_kernels import counting
from pallas_kernels.cost import CallCost, Cost, Passes

NOTHING = Passes(Cost(), Cost())
"""The need of what is known otherwise."""


def needing[**P, T](function: Callable[P, T], name: str, *, model: Passes, executed: Passes) -> Callable[P, T]:
    """The same function of arrays, or where calls are counted (`pallas_kernels.counting`) what stands for its cost.

    `model` is what its definition needs, and `executed` what it does, both as of a core. Elsewhere products count by
    their shapes, those with what is masked too. What the function closes over has no gradient where it is counted.
    """
    if not counting.is_counting():
        return function
    stand_in: Any = counting.stand_in(name, CallCost(model, executed), function)
    return stand_in


def of_pairs[**P, T](function: Callable[P, T], *, pairs: int, channels: int) -> Callable[P, T]:
    """The same function, which calls attention; counted, it needs products of `channels` channels for so many pairs.

    For what does more than its definition needs: scores that are known, or pairs that are hidden. A product of values
    or keys has two in the backward pass. What is executed is that of the core.
    """
    if not counting.is_counting():
        return function
    model = Passes(Cost(2 * pairs * channels), Cost(4 * pairs * channels))

    def counted(*args: P.args, **kwargs: P.kwargs) -> T:
        with counting.needing(model):
            return function(*args, **kwargs)

    return counted
