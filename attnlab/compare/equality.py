"""Whether runs or studies are comparable: equal sizes, within a tolerance, and equal conditions of training."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

DATA = 'data'
"""The prefix of keys, beside those of a config, of the hashes that a run recorded of its data."""

CONDITIONS = {
    'data and length': ('task', 'length', DATA),
    'tokens of training': ('steps', 'batch_size', 'length'),
    'optimiser and precision': ('optimizer', 'accumulate', 'rows_at_once', 'precision'),
    'initial parameters': ('seed', 'start'),
    'evaluation': ('evals',),
}
"""The conditions that runs should share besides size, and the prefixes of the config keys that each consists of."""


@dataclasses.dataclass(frozen=True)
class Equality:
    """A measure or a condition, and whether all agree in it.

    Attributes:
      name: of the measure or the condition.
      required: whether it must be equal for them to count as matched.
      equal: whether it is.
      least: the smallest value and whose it is; `None` for a condition.
      most: the largest.
      different: what differs: keys of the configs, or kinds of device.
    """

    name: str
    required: bool
    equal: bool
    least: tuple[float, str] | None = None
    most: tuple[float, str] | None = None
    different: tuple[str, ...] = ()

    @property
    def spread(self) -> float | None:
        """How far the largest and the smallest are from the middle between them, as a share of it; `None` where that is
        not defined. They are within a tolerance where this is no more than it.
        """
        if self.least is None or self.most is None or not self.least[0]:
            return None
        return share(self.least[0], self.most[0])


def of_measure(
    name: str, names: Sequence[str], values: Sequence[float | None], tolerance: float, *, required: bool
) -> Equality:
    """Compares a measure; `values` are in the order of `names`, and a missing value equals nothing."""
    known = [(value, owner) for value, owner in zip(values, names, strict=True) if value is not None]
    equal = len(known) == len(values) and not unmatched([value for value, _ in known], tolerance)
    least, most = min(known, key=lambda one: one[0]), max(known, key=lambda one: one[0])
    return Equality(name, required, equal, least, most)


def unmatched(values: Sequence[int | float], tolerance: float) -> bool:
    """Whether the values are not within a tolerance: a share, to either side of the middle of the largest and least."""
    return max(values) > min(values) and share(min(values), max(values)) > tolerance


def share(least: int | float, most: int | float) -> float:
    """`(most - least) / (most + least)`: how far both are from the middle between them."""
    return (most - least) / (most + least)


def of_conditions(conditions: Mapping[str, tuple[str, ...]], keys: Iterable[str]) -> list[Equality]:
    """Each condition, given by the prefixes of its keys, with the keys that differ."""
    wrong = {name: tuple(key for key in keys if key.startswith(starts)) for name, starts in conditions.items()}
    return [Equality(name, True, not found, different=found) for name, found in wrong.items()]


def of_kinds(name: str, kinds: Iterable[str]) -> Equality:
    """A condition that is a single label for each, such as the device it ran on."""
    found = tuple(sorted(set(kinds)))
    return Equality(name, True, len(found) < 2, different=found)


def differing(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[str | None]]:
    """The keys that differ, with the value in each as text; `None` for none."""
    keys = dict.fromkeys(key for one in settings for key in one)
    columns = {key: [_text(one.get(key)) for one in settings] for key in keys}
    return {key: values for key, values in columns.items() if any(value != values[0] for value in values)}


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
