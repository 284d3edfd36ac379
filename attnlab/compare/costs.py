"""What runs and studies cost: a table of what a cost is called in print, along an axis, in a table and by `--by`."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType


@dataclasses.dataclass(frozen=True)
class Cost:
    """A cost, which is a field of `RunResult`, of the report's `Costs`, or of both.

    Attributes:
      name: in print, and along an axis of runs.
      axis: what it is called along an axis of studies.
      heading: at the head of a column of studies.
      measure: what `--by` calls it, without a length; empty for what nothing is matched in.
      multiple: of the training length that `--by` says besides; 0: it says none.
      more_is_better: whether the greater one is the better one.
    """

    name: str
    axis: str
    heading: str
    measure: str = ''
    multiple: int = 0
    more_is_better: bool = False

    def by(self, length: int) -> str:
        """What `--by` calls it, of runs of this length; empty for what nothing is matched in."""
        return f'{self.measure}@{self.multiple * length}' if self.multiple else self.measure


COSTS: Mapping[str, Cost] = MappingProxyType(
    {
        'parameters': Cost('parameters', 'parameters', 'Parameters', 'params'),
        'state_bytes': Cost('state bytes', 'state bytes a sequence', 'State', 'state_bytes', 1),
        'state_bytes_8x': Cost(
            'state bytes at 8x', 'state bytes at 8x the length', 'State, 8x length', 'state_bytes', 8
        ),
        'flops': Cost('training FLOPs', 'training FLOPs of a trial', 'FLOPs of a trial', 'train_flops'),
        'tokens_per_second': Cost('tokens/s', 'training tokens per second', 'Tokens/s', more_is_better=True),
        'decode_ms': Cost('ms to decode a token', 'ms to decode a token', 'Decode, ms/token', 'decode_ms'),
        'peak_bytes': Cost('peak bytes', 'peak bytes of a training step', 'Peak memory'),
        'weight_bytes': Cost('weight bytes', 'bytes of weights, packed', 'Weights, packed'),
        'bits': Cost('bits a parameter', 'bits a parameter', 'Bits a parameter'),
    }
)
"""By field, in the order of tables."""

WEIGHTS = ('weight_bytes', 'bits')
"""Costs where numbers have few bits; otherwise they follow from the parameters."""


def matched_cost(by: str, length: int) -> str | None:
    """The field of the cost that a measure is, of runs of this length; `None` for another measure."""
    return next((field for field, cost in COSTS.items() if by and cost.by(length) == by), None)
