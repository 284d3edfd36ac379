"""What runs and studies cost: what a cost is called and how it is shown, and which of several are Pareto-optimal."""

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from attnlab.tables import in_bytes


@dataclasses.dataclass(frozen=True)
class Cost:
    """A cost, which is a field of `RunResult`, of the report's `Costs`, or of both.

    Attributes:
      name: in print, and along an axis of runs.
      axis: what it is called along an axis of studies.
      heading: at the head of a column of studies.
      title: at the head of a column of the table that a page opens with.
      large: along the axis of the large figure of a page, and after a number; `None` for what it is never over.
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
    title: str = ''
    large: tuple[str, str] | None = None

    def by(self, length: int) -> str:
        """What `--by` calls it, of runs of this length; empty for what nothing is matched in."""
        return f'{self.measure}@{self.multiple * length}' if self.multiple else self.measure


COSTS: Mapping[str, Cost] = MappingProxyType(
    {
        'parameters': Cost(
            name='parameters',
            axis='parameters',
            heading='Parameters',
            measure='params',
            title='Parameters',
            large=('parameters', ' parameters'),
        ),
        'state_bytes': Cost(
            name='state bytes',
            axis='state bytes a sequence',
            heading='State',
            measure='state_bytes',
            multiple=1,
            title='State',
            large=('bytes of state a sequence', ' of state'),
        ),
        'state_bytes_8x': Cost(
            name='state bytes at 8x',
            axis='state bytes at 8x the length',
            heading='State, 8x length',
            measure='state_bytes',
            multiple=8,
            title='State at 8x',
        ),
        'flops': Cost(
            name='training FLOPs',
            axis='training FLOPs of a trial',
            heading='FLOPs of a trial',
            measure='train_flops',
            title='Training FLOPs',
            large=('training FLOPs', ' training FLOPs'),
        ),
        'tokens_per_second': Cost(
            name='tokens/s',
            axis='training tokens per second',
            heading='Tokens/s',
            more_is_better=True,
            title='Tokens/s',
        ),
        'decode_ms': Cost(
            name='ms to decode a token',
            axis='ms to decode a token',
            heading='Decode, ms/token',
            measure='decode_ms',
        ),
        'peak_bytes': Cost(name='peak bytes', axis='peak bytes of a training step', heading='Peak memory'),
        'weight_bytes': Cost(
            name='weight bytes',
            axis='bytes of weights, packed',
            heading='Weights, packed',
            title='Weights',
            large=('bytes of weights', ' of weights'),
        ),
        'bits': Cost(
            name='bits a parameter',
            axis='bits a parameter',
            heading='Bits a parameter',
            title='Bits a parameter',
            large=('bits a parameter', ' bits a parameter'),
        ),
    }
)
"""By field, in the order of tables."""

WEIGHTS = ('weight_bytes', 'bits')
"""Costs where numbers have few bits; otherwise they follow from the parameters."""

OPENING = ('state_bytes', 'state_bytes_8x', 'flops', 'parameters', 'weight_bytes', 'bits', 'tokens_per_second')
"""Costs of the table that a page opens with, in the order of its columns."""

LARGE = ('bits', 'weight_bytes', 'state_bytes', 'flops', 'parameters')
"""Costs that the large figure of a page may be over, the first that tells its entries apart. Bits of a parameter do
where there are as many parameters; elsewhere bytes of weights say what both come to."""

BYTES = ('state_bytes', 'state_bytes_8x', 'peak_bytes', 'weight_bytes')
WHOLE_NUMBERS = ('parameters', 'tokens_per_second')


def matched_cost(by: str, length: int) -> str | None:
    """The field of the cost that a measure is, of runs of this length; `None` for another measure."""
    return next((field for field, cost in COSTS.items() if by and cost.by(length) == by), None)


def shown_size(size: float) -> str:
    """A size by any measure: what is counted with every digit, what is timed with few."""
    return f'{size:,.0f}' if size == int(size) else f'{size:,.6g}'


def shown_cost(cost: str, value: float) -> str:
    """A cost on its own, by its field or by the name of a measure."""
    if cost in BYTES:
        return in_bytes(value)
    if cost == 'flops':
        return f'{value:.2e}'
    if cost == 'bits':
        return f'{value:.2f}'
    return f'{value:,.0f}' if cost in WHOLE_NUMBERS else shown_size(value) if value == int(value) else f'{value:.4g}'


def pareto(points: Sequence[tuple[float, float] | None]) -> list[bool]:
    """Of points (cost, loss), both better when less: whether no other is at least as good in both and better in one."""
    known = [point for point in points if point is not None]
    return [
        point is not None and not any(one[0] <= point[0] and one[1] <= point[1] and one != point for one in known)
        for point in points
    ]
