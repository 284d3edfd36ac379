"""Search spaces: which config keys a sweep sets, and to which values. A dimension names the keys it sets.

Optuna draws one number for a dimension: the value itself for a range, an index for one of several values.
"""

import abc
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from attnlab.errors import UserError

Drawn = float | int
PLAIN = (bool, int, float, str, type(None))


class Dimension(abc.ABC):
    """A dimension of a search space."""

    @property
    @abc.abstractmethod
    def keys(self) -> tuple[str, ...]:
        """The keys of the run's config that it sets, as dotted paths."""

    @property
    @abc.abstractmethod
    def count(self) -> int | None:
        """The number of values; `None` for a range."""

    @property
    @abc.abstractmethod
    def distribution(self) -> BaseDistribution:
        """Optuna's distribution."""

    @abc.abstractmethod
    def at_quantile(self, quantile: float) -> Drawn:
        """The value at a quantile in [0, 1) of the distribution."""

    @abc.abstractmethod
    def holds(self, drawn: Any) -> bool:
        """Whether what stands for a number drawn, as in a file, is one that this dimension has."""

    @abc.abstractmethod
    def settings(self, drawn: Drawn) -> dict[str, Any]:
        """The value of each key."""


class Range(Dimension):
    """The real numbers from `low` to `high`."""

    key: str
    low: float
    high: float
    log: bool

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key,)

    @property
    def count(self) -> None:
        return None

    @property
    def distribution(self) -> FloatDistribution:
        return FloatDistribution(self.low, self.high, log=self.log)

    def at_quantile(self, quantile: float) -> float:
        if self.log:
            return min(self.high, self.low * (self.high / self.low) ** quantile)
        return self.low + quantile * (self.high - self.low)

    def holds(self, drawn: Any) -> bool:
        return type(drawn) in (int, float) and self.low <= drawn <= self.high

    def settings(self, drawn: Drawn) -> dict[str, Any]:
        return {self.key: float(drawn)}


@dataclasses.dataclass(frozen=True)
class LogUniform(Range):
    """A positive number from `low` to `high` whose logarithm is uniform.

    Attributes:
      key: of the run's config, such as `optimizer.peak_lr`.
      low: the smallest.
      high: the largest.
    """

    key: str
    low: float
    high: float
    log = True

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high < math.inf:
            raise UserError(f'{self.key}: LogUniform needs 0 < low < high; got {self.low} and {self.high}')


@dataclasses.dataclass(frozen=True)
class Uniform(Range):
    """A number from `low` to `high`, uniform.

    Attributes:
      key: of the run's config, such as `model.stack.blocks[0].dropout`.
      low: the smallest.
      high: the largest.
    """

    key: str
    low: float
    high: float
    log = False

    def __post_init__(self) -> None:
        if not -math.inf < self.low < self.high < math.inf:
            raise UserError(f'{self.key}: Uniform needs low < high; got {self.low} and {self.high}')


class Listed(Dimension):
    """One of several values; what is drawn is the index."""

    @property
    @abc.abstractmethod
    def count(self) -> int: ...

    @property
    def distribution(self) -> BaseDistribution:
        return CategoricalDistribution(range(self.count))

    def at_quantile(self, quantile: float) -> int:
        return min(int(quantile * self.count), self.count - 1)

    def holds(self, drawn: Any) -> bool:
        return type(drawn) is int and 0 <= drawn < self.count


@dataclasses.dataclass(frozen=True)
class Choice(Listed):
    """One of several values without an order: numbers, names, or tuples of them.

    Attributes:
      key: of the run's config.
      values: to choose from.
    """

    key: str
    values: tuple

    def __post_init__(self) -> None:
        _check_values(self.key, self.values)

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key,)

    @property
    def count(self) -> int:
        return len(self.values)

    def settings(self, drawn: Drawn) -> dict[str, Any]:
        return {self.key: self.values[int(drawn)]}


@dataclasses.dataclass(frozen=True)
class Grid(Choice):
    """One of several values in a meaningful order, such as widths or learning rates."""

    @property
    def distribution(self) -> IntDistribution:
        return IntDistribution(0, self.count - 1)


@dataclasses.dataclass(frozen=True)
class Zip(Listed):
    """Several keys that change together.

    Attributes:
      together: the keys of the run's config.
      rows: each holds one value for every key.
    """

    together: tuple
    rows: tuple

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.together):
                raise UserError(f'a row of Zip holds a value for each of {", ".join(self.together)}; got {row}')
        _check_values(' and '.join(self.together), tuple(value for row in self.rows for value in row))

    @property
    def keys(self) -> tuple[str, ...]:
        return self.together

    @property
    def count(self) -> int:
        return len(self.rows)

    def settings(self, drawn: Drawn) -> dict[str, Any]:
        return dict(zip(self.together, self.rows[int(drawn)], strict=True))


Space = Mapping[str, Dimension]
"""Dimensions by name, as shown in tables."""


def _check_values(key: str, values: tuple) -> None:
    if not values:
        raise UserError(f'{key}: there are no values to choose from')
    for value in values:
        flat = value if isinstance(value, tuple) else (value,)
        if not all(isinstance(item, PLAIN) for item in flat):
            raise UserError(f'{key}: {value!r} is not a number, name, None, or tuple of them')
