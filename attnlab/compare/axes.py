"""Colours, marks and axes of figures in which things are compared."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib import ticker

COLOURS = ('#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00', '#56b4e9', '#000000', '#882255')
"""Of Okabe and Ito, which colour-blind people tell apart (https://jfly.uni-koeln.de/color/), and the wine of Paul Tol's
muted scheme, which unlike a grey stands out against what is behind."""

MARKERS = ('o', 's', '^', 'D', 'v', 'P', 'X', '*', 'p')
"""One more than there are colours, so that both together tell 72 things apart, and either the first eight."""


@dataclasses.dataclass(frozen=True)
class Style:
    """How one of the things compared looks in every figure."""

    colour: str
    marker: str


def styles(names: Sequence[str]) -> dict[str, Style]:
    """The style of each, by name."""
    pairs = zip(itertools.cycle(COLOURS), itertools.cycle(MARKERS), strict=False)
    return {name: Style(colour, marker) for name, (colour, marker) in zip(names, pairs, strict=False)}


def scale(axis: Any, values: Sequence[float], shown: Callable[[float], str], *, least: float) -> None:
    """A logarithmic axis where positive values span more than a factor of `least`; ticks few, and as `shown`."""
    if min(values) > 0 and max(values) > least * min(values):
        _logarithmic(axis, values)
    else:
        axis.set_major_locator(ticker.MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
        _widen(axis, values)
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: shown(value)))


def scale_metric(axis: Any, values: Sequence[float], room: float = 0.0, *, most: float = math.inf) -> None:
    """An axis of a metric, whose numbers end at `most`: logarithmic only where some runs diverged; `room` at its end,
    as a share.
    """
    if min(values) > 0 and max(values) > max(1.0, 10 * min(values)):
        _logarithmic(axis, values)
        axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f'{value:g}'))
    else:
        axis.set_major_locator(ticker.MaxNLocator(5))
        _widen(axis, values)
    low, high = axis.get_view_interval()
    if high > most:
        _limit(axis, low, most)
        axis.set_ticks([tick for tick in axis.get_majorticklocs() if low <= tick <= most])
    if room:
        low, high = axis.get_view_interval()
        logarithmic = axis.get_scale() == 'log'
        _limit(axis, low, high * (high / low) ** room if logarithmic else high + room * (high - low))


def _logarithmic(axis: Any, values: Sequence[float]) -> None:
    decades = math.log10(max(values) / min(values))
    (axis.axes.set_xscale if axis.axis_name == 'x' else axis.axes.set_yscale)('log')
    subs = (1.0, 2.0, 5.0) if decades < 1.6 else (1.0, 3.0) if decades < 3 else (1.0,)
    axis.set_major_locator(ticker.LogLocator(10, subs=subs, numticks=5))
    axis.set_minor_locator(ticker.NullLocator())
    margin = (max(values) / min(values)) ** 0.08
    _limit(axis, min(values) / margin, max(values) * margin)


def _widen(axis: Any, values: Sequence[float]) -> None:
    """Margins; where all values are one, a tenth to either side."""
    low, high = min(values), max(values)
    margin = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
    _limit(axis, low - margin, high + margin)


def _limit(axis: Any, low: float, high: float) -> None:
    (axis.axes.set_xlim if axis.axis_name == 'x' else axis.axes.set_ylim)(low, high)


UNITS = ((1e15, 'P'), (1e12, 'T'), (1e9, 'G'), (1e6, 'M'), (1e3, 'k'))


def short(value: int | float) -> str:
    """A number in few characters: 1.5M, 20k, 0.5, 1e-4."""
    if value and not 1e-2 < abs(value) < 1e18:
        return power(value)
    for size, unit in UNITS:
        if abs(value) >= size:
            return f'{value / size:g}{unit}'
    return f'{value:.4g}'


def power(value: int | float) -> str:
    """A number with a power of ten, as learning rates are written: 3e-4."""
    mantissa, exponent = f'{value:.3e}'.split('e')
    return f'{float(mantissa):g}e{int(exponent)}'
