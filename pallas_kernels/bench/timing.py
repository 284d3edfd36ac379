"""Times contenders alternately, in one process, so that other load on the machine affects all alike."""

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

ENOUGH = 6
"""Rounds from which on the interval of a ratio is one at 95 %: in simulation it covers 94 %. Of fewer its ends are the
least and the most, between which the true ratio is in 94 % of five rounds, 87 % of four and 75 % of three."""


@dataclasses.dataclass(frozen=True)
class Patience:
    """How long to measure: the number of rounds, and the seconds of the turn of every contender in each."""

    rounds: int
    seconds: float = 0.2


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled contender and its arguments."""

    call: Callable[[], Any]
    compile_seconds: float
    temporary_bytes: int


@dataclasses.dataclass(frozen=True)
class Times:
    """The measurements of one contender.

    Attributes:
      seconds: the median over turns of the mean time of a call.
      ratio: the median over rounds of this contender's time over the baseline's in the same round.
      low: lower end of the 95 % bootstrap interval of `ratio`; of fewer rounds than `ENOUGH` the least.
      high: its upper end.
      most: the greatest ratio of a round.
      quartiles: of the mean time of a call over turns; the middle one is `seconds`.
    """

    seconds: float
    ratio: float
    low: float
    high: float
    most: float
    quartiles: tuple[float, float, float]

    @property
    def quartiles_in_milliseconds(self) -> tuple[float, float, float]:
        """The quartiles as tables have them."""
        low, middle, high = self.quartiles
        return 1e3 * low, 1e3 * middle, 1e3 * high


def compiled(function: Callable[..., Any], *arguments: Any) -> Program:
    """Compiles a call."""
    start = time.perf_counter()
    program = jax.jit(function).lower(*arguments).compile()
    seconds = time.perf_counter() - start
    memory = program.memory_analysis()
    return Program(lambda: program(*arguments), seconds, 0 if memory is None else memory.temp_size_in_bytes)


def alternate(calls: Mapping[str, Callable[[], Any]], baseline: str, patience: Patience) -> dict[str, Times]:
    """Runs the calls alternately, in a different order every round, and returns the times of each."""
    order = random.Random(0)
    repeats = {name: _repeats(call, patience.seconds) for name, call in calls.items()}
    turns: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(patience.rounds):
        names = list(calls)
        order.shuffle(names)
        for name in names:
            turns[name].append(_turn(calls[name], repeats[name]))
    return {name: _times(turns[name], turns[baseline]) for name in calls}


def _repeats(call: Callable[[], Any], seconds: float) -> int:
    jax.block_until_ready(call())
    return max(1, round(seconds / max(_turn(call, 1), 1e-6)))


def _turn(call: Callable[[], Any], repeats: int) -> float:
    jax.block_until_ready(call())
    start = time.perf_counter()
    for _ in range(repeats):
        result = call()
    # Calls run in the order in which they were made, so the last one ends last.
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / repeats


def _times(turns: Sequence[float], baseline: Sequence[float]) -> Times:
    ratios = [mine / other for mine, other in zip(turns, baseline, strict=True)]
    middle = statistics.median(turns)
    low, _, high = statistics.quantiles(turns, method='inclusive') if len(turns) > 1 else (middle,) * 3
    return Times(middle, *median(ratios), max(ratios), (low, middle, high))


def median(ratios: Sequence[float]) -> tuple[float, float, float]:
    """The median over rounds, and the ends of its 95 % interval by bootstrap: of few the least and most."""
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return statistics.median(ratios), medians[50], medians[1949]
