"""The large figure of a page, and its curves: SVG written by hand, so that labels stand at their points, nothing
overlaps, colours follow the reader's theme, and values show on hover.

Every chart is a pure function of its data, in literal colours; `themed` puts the page's variables in their place.
"""

import dataclasses
import html
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence

from attnlab.compare.axes import Style
from attnlab.compare.report.style import GREY, GRID, INK, PALE, PAPER, SOFT

WIDE, NARROW = (940, 470), (372, 400)
"""Widths and heights of a chart on a desk and on a phone, in pixels."""

FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Arial, sans-serif"
SIZE = 13.0
"""Of text, in pixels."""

DAGGER = '†'
"""After the name of what has a mean without its failed seeds."""


@dataclasses.dataclass(frozen=True)
class Spot:
    """A point of the large figure: a name at a cost, and a score with the ends of its interval.

    Of a mean over the seeds that are left where others failed, `survivors`, the name has a `DAGGER`.
    """

    name: str
    x: int | float
    y: int | float
    low: int | float
    high: int | float
    shown: str
    optimal: bool = False
    survivors: bool = False

    @property
    def label(self) -> str:
        """What stands beside the point."""
        return f'{self.name} {DAGGER}' if self.survivors else self.name


@dataclasses.dataclass(frozen=True)
class Axis:
    """What an axis is of: its title, how its numbers are shown, bounds, and whether it counts in powers of two."""

    title: str
    shown: Callable[[float], str]
    least: float = -math.inf
    most: float = math.inf
    binary: bool = False


@dataclasses.dataclass(frozen=True)
class Box:
    """A rectangle in pixels."""

    left: int | float
    top: int | float
    right: int | float
    bottom: int | float

    def meets(self, other: 'Box') -> bool:
        """Whether two rectangles share a point."""
        return not (
            self.right <= other.left or other.right <= self.left or self.bottom <= other.top or other.bottom <= self.top
        )

    def crossed(self, stroke: 'Stroke') -> bool:
        """Whether a straight line from one point to another enters the rectangle (Liang and Barsky 1984)."""
        x, y, to_x, to_y = stroke
        enters, leaves = 0.0, 1.0
        for along, start, low, high in ((to_x - x, x, self.left, self.right), (to_y - y, y, self.top, self.bottom)):
            if along == 0.0:
                if not low < start < high:
                    return False
                continue
            first, last = sorted(((low - start) / along, (high - start) / along))
            enters, leaves = max(enters, first), min(leaves, last)
        return enters < leaves

    def distance(self, x: int | float, y: int | float) -> float:
        """From a point to the nearest of the rectangle's."""
        return math.hypot(max(self.left - x, 0, x - self.right), max(self.top - y, 0, y - self.bottom))


Stroke = tuple[int | float, int | float, int | float, int | float]
"""A straight line in pixels: from a point, x and y, to another."""


@dataclasses.dataclass(frozen=True)
class Scale:
    """From values to pixels, logarithmic or not."""

    low: int | float
    high: int | float
    start: int | float
    end: int | float
    logarithmic: bool
    binary: bool = False

    def __call__(self, value: int | float) -> float:
        low, high, at = (math.log(x) if self.logarithmic else x for x in (self.low, self.high, value))
        share = (at - low) / (high - low) if high > low else 0.5
        return float(self.start + share * (self.end - self.start))

    def ticks(self, count: int) -> list[float]:
        """Round values between the ends, about `count` of them."""
        if self.logarithmic and self.binary:
            doublings = range(math.ceil(math.log2(self.low)), math.floor(math.log2(self.high)) + 1)
            apart = max(1, math.ceil(len(doublings) / count))
            return [2.0**n for n in doublings if n % apart == 0]
        if self.logarithmic:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for steps in ((1.0, 2.0, 5.0), (1.0, 3.0), (1.0,)):
                found = [step * 10.0**n for n in decades for step in steps if self.low <= step * 10.0**n <= self.high]
                if len(found) <= count + 1:
                    break
            return found[:: max(1, math.ceil(len(found) / (count + 1)))]
        raw = (self.high - self.low) / count
        if self.binary:
            step = 2.0 ** math.ceil(math.log2(raw))
            return [n * step for n in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(power * n for n in (1, 2, 2.5, 5, 10) if power * n >= raw * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


def scale_of(
    values: Sequence[int | float], start: int | float, end: int | float, axis: Axis, *, least: float = math.inf
) -> Scale:
    """A scale with margins about the values, within the bounds of the quantity; logarithmic where they span `least`."""
    low, high = min(values), max(values)
    if low > 0 and high > least * low:
        margin = (high / low) ** 0.06
        return Scale(low / margin, high * margin, start, end, True, axis.binary)
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return Scale(max(low - margin, axis.least), min(high + margin, axis.most), start, end, False, axis.binary)


def score_chart(
    spots: Sequence[Spot],
    looks: Mapping[str, Style],
    x: Axis,
    y: Axis,
    lines: Mapping[str, float],
    title: str,
    size: tuple[int, int],
) -> str:
    """Scores over a cost: a mark with its interval and its name beside it, `lines` across for trivial predictors."""
    width, height = size
    plot = Box(66, 16, width - 16, height - 50)
    values = [value for one in spots for value in (one.low, one.y, one.high)]
    near = shown_lines(lines, values, y)
    horizontal = scale_of([one.x for one in spots], plot.left + 10, plot.right - 10, x, least=3.0)
    vertical = scale_of([*values, *near.values()], plot.bottom, plot.top, y)
    parts = [_frame(plot, horizontal, vertical, x, y, size)]
    front = sorted((horizontal(one.x), vertical(one.y)) for one in spots if one.optimal)
    if len(front) > 1:
        path = ' '.join(f'{a:.1f},{b:.1f}' for a, b in front)
        parts.append(f'<polyline points="{path}" style="fill:none;stroke:{PALE};stroke-width:1.5"/>')
    points = [(one.label, horizontal(one.x), vertical(one.y)) for one in spots]
    taken, marks = [], []
    for one, (_, a, b) in zip(spots, points, strict=True):
        low, high = vertical(one.low), vertical(one.high)
        taken += [Box(a - 7, b - 7, a + 7, b + 7), Box(a - 2, high, a + 2, low)]
        taken += [Box(a - 5, end - 1, a + 5, end + 1) for end in (low, high)]
        marks.append(_mark(one, a, b, low, high, looks[one.name], x))
    strokes = _strokes(front)
    for words, value in _merged(near, vertical):
        parts.append(_line_across(plot, vertical(value), words, taken, strokes))
        strokes.append((plot.left, vertical(value), plot.right, vertical(value)))
    parts.append(_labels(points, plot, taken, strokes))
    return _svg(size, title, [*parts, *marks], 'chart')


def rows_chart(
    spots: Sequence[Spot], looks: Mapping[str, Style], y: Axis, lines: Mapping[str, float], title: str, width: int
) -> str:
    """The same where no cost tells them apart: a row for each, the best on top."""
    longest = min(max(len(one.label) for one in spots), 24 if width < 500 else 34)
    size = (width, 70 + 30 * len(spots))
    plot = Box(20 + 7.4 * longest, 26, width - 16, size[1] - 44)
    values = [value for one in spots for value in (one.low, one.y, one.high)]
    near = shown_lines(lines, values, y)
    across = scale_of([*values, *near.values()], plot.left + 8, plot.right - 8, y)
    parts = []
    for value in across.ticks(5 if width > 500 else 3):
        at = across(value)
        parts.append(f'<path d="M{at:.1f} {plot.top}V{plot.bottom}" style="stroke:{GRID};stroke-width:1"/>')
        parts.append(_text(at, plot.bottom + 18, y.shown(value), 'middle', SOFT))
    parts.append(_text((plot.left + plot.right) / 2, size[1] - 6, y.title, 'middle', SOFT))
    end = -math.inf
    for words, value in _merged(near, across):
        at = across(value)
        dashes = 'stroke-width:1.2;stroke-dasharray:5 4'
        parts.append(f'<path d="M{at:.1f} {plot.top}V{plot.bottom}" style="stroke:{GREY};{dashes}"/>')
        left = min(max(at - _wide(words) / 2, 2), width - _wide(words) - 2)
        if left > end:
            parts.append(_text(left, 16, words, 'start', SOFT))
            end = left + _wide(words) + 8
    for place, one in enumerate(spots):
        b = plot.top + (place + 0.5) * (plot.bottom - plot.top) / len(spots)
        parts.append(_text(plot.left - 10, b + 4.5, _cut(one.label, longest), 'end', INK))
        style = looks[one.name]
        line = f'M{across(one.low):.1f} {b:.1f}H{across(one.high):.1f}'
        parts.append(
            f'<g><title>{html.escape(f"{one.name}: {one.shown}")}</title>'
            f'<path d="{line}" style="stroke:{style.colour};stroke-width:2"/>'
            f'{_shape(style, across(one.y), b)}</g>'
        )
    return _svg(size, title, parts, 'chart')


def curve_chart(
    curves: Mapping[str, Sequence[tuple[int, float]]],
    looks: Mapping[str, Style],
    y: Axis,
    title: str,
    size: tuple[int, int],
    lines: Mapping[str, float],
) -> str:
    """Values over training steps, a line for each; the page's script shows them at the pointer."""
    width, height = size
    plot = Box(66, 14, width - 16, height - 48)
    known = {name: points for name, points in curves.items() if points}
    steps = [step for points in known.values() for step, _ in points]
    values = [value for points in known.values() for _, value in points]
    near = shown_lines(lines, values, y)
    spread = 10.0 if min(values) > 0 and y.most == math.inf else math.inf
    horizontal = scale_of(steps, plot.left + 4, plot.right - 4, Axis('', str, least=0.0, most=float(max(steps))))
    vertical = scale_of([*values, *near.values()], plot.bottom, plot.top, y, least=spread)
    parts = [_frame(plot, horizontal, vertical, Axis('training step', lambda step: f'{step:,.0f}'), y, size)]
    thinned = {name: _thinned(points) for name, points in known.items()}
    drawn = [
        stroke
        for shown in thinned.values()
        for stroke in _strokes([(horizontal(step), vertical(value)) for step, value in shown])
    ]
    parts += [_line_across(plot, vertical(value), words, [], drawn) for words, value in _merged(near, vertical)]
    series = []
    for name, points in known.items():
        style, shown = looks[name], thinned[name]
        path = ' '.join(f'{horizontal(step):.1f},{vertical(value):.1f}' for step, value in shown)
        parts.append(
            f'<g><title>{html.escape(f"{name}: {y.shown(points[-1][1])} at step {points[-1][0]:,}")}</title>'
            f'<polyline points="{path}" style="fill:none;stroke:{style.colour};stroke-width:1.8"/>'
            f'{_shape(style, horizontal(points[-1][0]), vertical(points[-1][1]), 4)}</g>'
        )
        found = [[step, round(horizontal(step), 1), round(vertical(value), 1), y.shown(value)] for step, value in shown]
        series.append({'name': name, 'colour': style.colour, 'points': found})
    parts.append(f'<path class="rule" d="M0 {plot.top}V{plot.bottom}" style="stroke:{GREY};visibility:hidden"/>')
    return _svg(size, title, parts, 'chart curves', json.dumps(series, separators=(',', ':')))


CURVE_POINTS = 150


def _thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most about `CURVE_POINTS` of them, the last among them."""
    step = math.ceil(len(points) / CURVE_POINTS)
    return [*points[:-1:step], points[-1]]


def shown_lines(lines: Mapping[str, float], values: Sequence[float], y: Axis) -> dict[str, float]:
    """The lines that are worth the room: all of a share, of another quantity those not far from the values."""
    low, high = min(values), max(values)
    room = math.inf if y.most < math.inf else max(high - low, 0.1 * abs(high))
    return {name: value for name, value in lines.items() if low - room <= value <= high + room}


def _merged(lines: Mapping[str, float], scale: Scale) -> list[tuple[str, float]]:
    """Lines by value, with what is written at them; those less than a line of text apart are one, at the greatest."""
    found: list[tuple[list[str], float]] = []
    for name, value in sorted(lines.items(), key=lambda item: item[1]):
        words = f'{name} {value:.3g}'
        if found and abs(scale(value) - scale(found[-1][1])) < SIZE + 4:
            found[-1] = ([*found[-1][0], words], value)
        else:
            found.append(([words], value))
    return [(', '.join(words), value) for words, value in found]


def _frame(plot: Box, horizontal: Scale, vertical: Scale, x: Axis, y: Axis, size: tuple[int, int]) -> str:
    """Grid, ticks and titles."""
    parts = []
    for value in vertical.ticks(5):
        at = vertical(value)
        parts.append(f'<path d="M{plot.left} {at:.1f}H{plot.right}" style="stroke:{GRID};stroke-width:1"/>')
        parts.append(_text(plot.left - 8, at + 4, y.shown(value), 'end', SOFT))
    end = -math.inf
    for value in horizontal.ticks(7 if size[0] > 500 else 4):
        at, words = horizontal(value), x.shown(value)
        parts.append(f'<path d="M{at:.1f} {plot.bottom}v5" style="stroke:{GREY};stroke-width:1"/>')
        left = min(at - _wide(words) / 2, size[0] - _wide(words) - 1)
        if left > end:
            parts.append(_text(left + _wide(words) / 2, plot.bottom + 19, words, 'middle', SOFT))
            end = left + _wide(words) + 6
    parts.append(f'<path d="M{plot.left} {plot.bottom}H{plot.right}" style="stroke:{GREY};stroke-width:1"/>')
    parts.append(_text((plot.left + plot.right) / 2, size[1] - 8, x.title, 'middle', SOFT))
    rotation = f' transform="rotate(-90 13 {(plot.top + plot.bottom) / 2:.1f})"'
    parts.append(_text(13, (plot.top + plot.bottom) / 2, y.title, 'middle', SOFT, rotation))
    return ''.join(parts)


def _strokes(points: Sequence[tuple[float, float]]) -> list[Stroke]:
    """The straight lines from each point to the next."""
    return [(*one, *other) for one, other in itertools.pairwise(points)]


def _line_across(plot: Box, at: float, words: str, taken: list[Box], strokes: Sequence[Stroke]) -> str:
    """A dashed line with its name above it, or below, as far to the right as is free; the room of the name is taken."""
    wide, high = _wide(words), SIZE + 4
    tops = [top for top in (at - high - 1, at + 3) if plot.top <= top <= plot.bottom - high] or [at - high - 1]
    rights = [plot.right - step for step in range(0, max(1, int(plot.right - plot.left - wide)), 12)]
    places = [Box(right - wide - 4, top, right, top + high) for right in rights for top in tops]
    clear = [one for one in places if _free(one, taken, ())]
    box = next((one for one in clear if _free(one, (), strokes)), [*clear, *places][0])
    taken.append(box)
    dashes = 'stroke-width:1.2;stroke-dasharray:5 4'
    return (
        f'<path d="M{plot.left} {at:.1f}H{plot.right}" style="stroke:{GREY};{dashes}"/>'
        f'{_text(box.right, box.top + SIZE, words, "end", f"{SOFT}{HALO}")}'
    )


def _free(box: Box, taken: Sequence[Box], strokes: Sequence[Stroke]) -> bool:
    """Whether nothing is where a box is."""
    return not any(box.meets(other) for other in taken) and not any(map(box.crossed, strokes))


def _mark(one: Spot, a: float, b: float, low: float, high: float, style: Style, x: Axis) -> str:
    words = html.escape(f'{one.name}: {one.shown}; {x.title} {x.shown(one.x)}')
    bar = f'M{a:.1f} {low:.1f}V{high:.1f}M{a - 4:.1f} {low:.1f}h8M{a - 4:.1f} {high:.1f}h8'
    drawn = f'<path d="{bar}" style="stroke:{style.colour};stroke-width:1.5"/>' if low != high else ''
    return f'<g><title>{words}</title>{drawn}{_shape(style, a, b)}</g>'


def _labels(
    points: Sequence[tuple[str, float, float]], plot: Box, taken: Sequence[Box], strokes: Sequence[Stroke]
) -> str:
    """Names beside their points, or further off with a line to them where that costs less: see `_cost`.

    Boxes that are taken, and names, are never covered; what crosses a name nevertheless passes behind it.
    """
    labels: list[Box] = []
    leads: list[Stroke] = []
    lines, words = [], []
    for name, a, b in sorted(points, key=lambda point: point[2]):
        others = [(x, y) for _, x, y in points if (x, y) != (a, b)]
        marks = [Box(x - 5, y - 5, x + 5, y + 5) for x, y in others if math.hypot(x - a, y - b) > 5]
        least, found = math.inf, None
        for far, text, box, anchor in _places(name, a, b):
            if far >= least:
                break
            inside = box.left >= plot.left and box.right <= plot.right and box.top >= 2 and box.bottom <= plot.bottom
            if not inside or not _free(box, (*taken, *labels), ()):
                continue
            lead = _lead(a, b, box, others)
            cost = far + _cost(box, lead, marks, labels, leads, strokes)
            if cost < least:
                least, found = cost, (text, box, anchor, lead)
        if found is None:
            continue
        text, box, anchor, lead = found
        labels.append(box)
        if lead:
            leads.append(lead)
            lines.append('<path d="M{:.1f} {:.1f}L{:.1f} {:.1f}" '.format(*lead) + f'style="stroke:{PALE}"/>')
        at = {'start': box.left, 'end': box.right, 'middle': (box.left + box.right) / 2}[anchor]
        words.append(_text(at, box.bottom - 4, text, anchor, f'{INK}{HALO}'))
    return ''.join((*lines, *words))


def _cost(
    box: Box,
    lead: Stroke | None,
    marks: Sequence[Box],
    labels: Sequence[Box],
    leads: Sequence[Stroke],
    strokes: Sequence[Stroke],
) -> float:
    """What a place for a name spoils, in pixels that one would rather go for it."""
    cost = 80.0 * sum(map(box.crossed, leads)) + 25.0 * any(map(box.crossed, strokes))
    if lead:
        cost += 80.0 * sum(one.crossed(lead) for one in labels) + 50.0 * sum(one.crossed(lead) for one in marks)
        cost += 60.0 * sum(_cross(lead, one) for one in leads)
    return cost


def _cross(one: Stroke, other: Stroke) -> bool:
    """Whether two straight lines meet between their ends."""

    def side(line: Stroke, x: int | float, y: int | float) -> float:
        return float((line[2] - line[0]) * (y - line[1]) - (line[3] - line[1]) * (x - line[0]))

    return side(one, *other[:2]) * side(one, *other[2:]) < 0 and side(other, *one[:2]) * side(other, *one[2:]) < 0


def _lead(a: float, b: float, box: Box, others: Sequence[tuple[float, float]]) -> Stroke | None:
    """The line from a point to its name; none where the name is close and no other point is closer to it."""
    far = box.distance(a, b)
    if far <= 18 and all(box.distance(x, y) > far for x, y in others):
        return None
    edge = min(max(a, box.left), box.right)
    level = (box.top + box.bottom) / 2 if edge != a else min(max(b, box.top), box.bottom)
    return (a, b, edge, level)


HALO = f';paint-order:stroke;stroke:{PAPER};stroke-width:4;stroke-linejoin:round'
"""Keeps what passes behind a label from its letters."""


LETTERS = (30, 16)
"""Of a name beside a point: as many as the longest recipe's has and more, or fewer where that is too long."""


def _places(name: str, a: float, b: float) -> list[tuple[float, str, Box, str]]:
    """Where a name may stand about a point, the best first: how far off, its text, its box, and its anchor."""
    high, found = SIZE + 3, []
    for text, penalty in {_cut(name, letters): 15.0 * n for n, letters in reversed([*enumerate(LETTERS)])}.items():
        wide = _wide(text)
        for up in range(-160, 161, 8):
            top = b - high / 2 + up
            for out in (0, 8, 20, 36, 60, 90):
                far = penalty + math.hypot(up, out)
                right, left = a + 11 + out, a - 11 - out - wide
                found.append((far, text, Box(right, top, right + wide, top + high), 'start'))
                found.append((far + 1, text, Box(left, top, left + wide, top + high), 'end'))
        for out in range(0, 161, 8):
            for top in (b - 11 - out - high, b + 11 + out):
                for shift in (0.0, 0.35, -0.35):
                    left = a - wide / 2 + shift * wide
                    far = penalty + out + 4 + 4 * abs(shift)
                    found.append((far, text, Box(left, top, left + wide, top + high), 'middle'))
    return sorted(found, key=lambda place: place[0])


def _shape(style: Style, a: float, b: float, radius: int | float = 6) -> str:
    """A marker with its outline in the colour of the page, so that marks that overlap are told apart."""
    shape = SHAPES[style.marker]
    factor = radius / 5.5
    place = f'translate({a - 6 * factor:.1f} {b - 6 * factor:.1f}) scale({factor:.3g})'
    return f'<g transform="{place}" style="fill:{style.colour};stroke:{PAPER};stroke-width:1">{shape}</g>'


SHAPES: Mapping[str, str] = {
    'o': '<circle cx="6" cy="6" r="4.5"/>',
    's': '<rect x="2" y="2" width="8" height="8"/>',
    '^': '<path d="M6 1 11 10.5H1z"/>',
    'D': '<path d="M6 .5 11.5 6 6 11.5.5 6z"/>',
    'v': '<path d="M6 11 11 1.5H1z"/>',
    'P': '<path d="M4.2 1h3.6v3.2H11v3.6H7.8V11H4.2V7.8H1V4.2h3.2z"/>',
    'X': '<path d="M3.2.8 6 3.6 8.8.8l2.4 2.4L8.4 6l2.8 2.8-2.4 2.4L6 8.4l-2.8 2.8L.8 8.8 3.6 6 .8 3.2z"/>',
    '*': '<path d="M6 .3 7.6 4.2 11.8 4.5 8.5 7.2 9.6 11.3 6 9 2.4 11.3 3.5 7.2.2 4.5 4.4 4.2z"/>',
    'p': '<path d="M6 1 11 4.8 9.1 10.6H2.9L1 4.8z"/>',
}
"""Markers as SVG, twelve units wide, for charts and for the key in the page."""


def _text(x: int | float, y: int | float, words: str, anchor: str, colour: str, more: str = '') -> str:
    style = f'fill:{colour};text-anchor:{anchor}'
    return f'<text x="{x:.1f}" y="{y:.1f}" style="{style}"{more}>{html.escape(words)}</text>'


WIDTHS = {
    "ijlIJ'": 0.3,
    ' ,.:;|/\\f-': 0.36,
    't()[]!r': 0.42,
    'cszvxyk_*?"`': 0.6,
    'abdeghnopqu0123456789${}': 0.65,
    'ABCDEFGHKLNOPQRSTUVXYZ&w': 0.83,
}
"""Of letters, in the size of the text, at most, in the widest of the fonts, DejaVu Sans; of all others 1."""


def _wide(words: str) -> float:
    """How wide a text is at most, in pixels."""
    return SIZE * sum(next((wide for some, wide in WIDTHS.items() if letter in some), 1.0) for letter in words)


def _cut(name: str, letters: int) -> str:
    """A name in `letters` letters; all of it stands in the mark's title and in the table."""
    return name if len(name) <= letters else f'{name[: letters - 1]}…'


def _svg(size: tuple[int, int], title: str, parts: Sequence[str], kind: str, series: str = '') -> str:
    width, height = size
    data = f' data-series="{html.escape(series, quote=True)}"' if series else ''
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="{kind}" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="{html.escape(title)}" font-family="{html.escape(FONT)}" '
        f'font-size="{SIZE:.0f}"{data}>\n <title>{html.escape(title)}</title>{"".join(itertools.chain(parts))}</svg>\n'
    )
