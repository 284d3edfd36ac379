"""How a page opens, of studies or of runs: a sentence, one large figure, and a table with errors."""

import dataclasses
import html
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from attnlab.compare.axes import Style, short
from attnlab.compare.costs import COSTS, LARGE, OPENING, pareto, shown_cost
from attnlab.compare.equality import unmatched
from attnlab.compare.headline import Entrant, ranked, sentence, shown_digits, stands_out
from attnlab.compare.report.chart import (
    DAGGER,
    NARROW,
    WIDE,
    Axis,
    Spot,
    curve_chart,
    rows_chart,
    score_chart,
    shown_lines,
)
from attnlab.compare.report.style import themed
from attnlab.evals.measured import Measured, is_share
from attnlab.tables import in_bytes


@dataclasses.dataclass(frozen=True)
class Scored:
    """One of the things compared: its name, its score, and what it costs by the fields of `OPENING`."""

    name: str
    score: Measured
    costs: Mapping[str, int | float | None]


@dataclasses.dataclass(frozen=True)
class Opening:
    """What the sentence, the large figure and the table of a page are drawn from.

    Attributes:
      name: of the files of the figure, without an ending.
      entries: in any order.
      looks: their colours and marks, by name.
      metric: what the score is called.
      higher: whether more is better.
      share: whether the score is a share, from 0 to 1.
      task: what they were trained on.
      matched: the costs that were made equal, which nothing is drawn or listed over.
      tolerance: within which costs count as equal.
      baselines: what trivial predictors reach, by name.
    """

    name: str
    entries: Sequence[Scored]
    looks: Mapping[str, Style]
    metric: str
    higher: bool
    share: bool
    task: str
    matched: Sequence[str]
    tolerance: float
    baselines: Mapping[str, float]

    @property
    def cost(self) -> str | None:
        """The cost that the large figure is over; `None` where none is known of all and tells them apart."""
        told = [cost for cost in LARGE if cost not in self.matched and self._differs(cost)]
        if 'bits' in told and self._differs('parameters'):
            told.remove('bits')
        return told[0] if told else None

    def _differs(self, cost: str) -> bool:
        """Whether a cost is known of all entries, and not the same."""
        values = [float(entry.costs[cost] or 0) for entry in self.entries if cost in entry.costs]
        return len(values) == len(self.entries) > 1 and min(values) > 0 and unmatched(values, self.tolerance)

    @property
    def order(self) -> list[Entrant]:
        """The entries, the best first."""
        cost = self.cost
        found = [Entrant(one.name, one.score, one.costs[cost] if cost else None) for one in self.entries]
        return ranked(found, higher=self.higher)

    @property
    def sentence(self) -> str:
        """What is best, at what cost, and whether the intervals say so."""
        cost = self.cost
        return sentence(
            self.order,
            metric=self.metric,
            higher=self.higher,
            task=self.task,
            shown_cost=lambda value: f'{shown_briefly(cost or "", value)}{_large(cost)[1]}',
            baselines=self.baselines,
        )


def shown_briefly(cost: str, value: int | float | None) -> str:
    """A cost in few characters; a model without a state does not stream."""
    if value is None or not math.isfinite(value):
        return '–'
    if cost.startswith('state_bytes') and not value:
        return 'no stream'
    return f'{value:.3g}' if cost == 'flops' else shown_cost(cost, float(value))


def lead(opening: Opening) -> str:
    """The sentence for the page, whose lines end nowhere between a number and its error or unit."""
    kept = re.sub(r' (?=[±%\[]|(?:[KMGT]i)?B\b)|(?<=±) |(?<=,) (?=[0-9.]+\])', '\u00a0', opening.sentence)
    return f'<p class="lead">{html.escape(kept)}</p>\n'


HEADER = ('name', 'cost', 'score', 'low', 'high', 'pareto_optimal', 'seeds_failed')
"""Of the CSV file of the large figure."""


def lines(opening: Opening) -> list[tuple[Any, ...]]:
    """Everything that the large figure draws, the best first."""
    order = [one for one in opening.order if math.isfinite(one.score.mean)]
    points = [
        None if one.cost is None else (float(one.cost), -one.score.mean if opening.higher else one.score.mean)
        for one in order
    ]
    found = []
    for one, optimal in zip(order, pareto(points), strict=True):
        low, high = (one.score.mean if end is None else end for end in (one.score.low, one.score.high))
        found.append((one.name, one.cost, one.score.mean, low, high, optimal, one.score.kind == 'survivors'))
    return found


def _large(cost: str | None) -> tuple[str, str]:
    """What a cost of the large figure is called along its axis, and after a number; nothing of none."""
    return (COSTS[cost].large if cost else None) or ('', '')


def draw(opening: Opening, rows: Sequence[tuple[Any, ...]], size: tuple[int, int]) -> str:
    """The large figure, from the lines of its CSV file, in literal colours."""
    scores = {one.name: one.score for one in opening.entries}
    digits = shown_digits(list(scores.values()))
    spots = [
        Spot(name, float(cost or 0.0), y, low, high, _hovered(scores[name], digits), bool(mark), lacks)
        for name, cost, y, low, high, mark, lacks in rows
    ]
    score, cost = _score_axis(opening), opening.cost
    if cost is None:
        return rows_chart(spots, opening.looks, score, opening.baselines, title(opening), size[0])
    binary = cost in ('state_bytes', 'weight_bytes')
    along = Axis(_large(cost)[0], _round_bytes if binary else short, binary=binary)
    return score_chart(spots, opening.looks, along, score, opening.baselines, title(opening), size)


def _hovered(score: Measured, digits: int) -> str:
    """A score as the pointer is told it."""
    text = score.text(digits)
    return f'{text}, {evidence(score)}' if score.kind == 'survivors' else text


def _score_axis(opening: Opening) -> Axis:
    return Axis(opening.metric, short_score, *((0.0, 1.0) if opening.share else ()))


def _round_bytes(size: int | float) -> str:
    """Bytes along an axis."""
    return in_bytes(size, '.4g')


def short_score(value: int | float) -> str:
    """A score along an axis."""
    return f'{value:.4g}'


def title(opening: Opening) -> str:
    """What the large figure shows, for those who do not see it: the scores among it."""
    cost = opening.cost
    over = f' over {_large(cost)[0]}' if cost else ''
    digits = shown_digits([one.score for one in opening.entries])
    shown = ', '.join(f'{one.name} {one.score.text(digits)}' for one in opening.order[:12])
    return f'{opening.metric} on {opening.task}{over}: {shown}'


def figure(opening: Opening, links: str) -> str:
    """The large figure for the page, on a desk and on a phone; nothing where there is nothing to draw."""
    rows = lines(opening)
    if not rows:
        return ''
    desk, phone = (themed(draw(opening, rows, size)) for size in (WIDE, NARROW))
    parts = f'<div class="desk">{desk}</div><div class="phone">{phone}</div>'
    values = [value for row in rows for value in row[2:5]]
    across = shown_lines(opening.baselines, values, _score_axis(opening))
    baselines = ' Dashed: what trivial predictors reach.' if across else ''
    joined = ' The line joins the Pareto-optimal entries.' if opening.cost and sum(row[5] for row in rows) > 1 else ''
    bars = ' Bars are intervals at 95 % (of two seeds, their range).' if any(row[3] != row[4] for row in rows) else ''
    lacking = f' {DAGGER} Some of its seeds failed; the mean is of the others.' if any(row[6] for row in rows) else ''
    caption = f'{html.escape(opening.metric)} on {html.escape(opening.task)}.{bars}{joined}{baselines}{lacking}'
    return f'<figure class="large">\n{parts}<figcaption>{caption} {links}</figcaption>\n</figure>\n'


def curves(
    opening: Opening,
    found: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]],
    metric: str,
    baselines: Mapping[str, float],
) -> list[tuple[str, str]]:
    """A figure a metric of the values over steps, each with what it is of; `found` is by name, then by metric.

    `baselines` are what trivial predictors reach by the metric.
    """
    shown = []
    for name in dict.fromkeys((metric, 'train/loss')):
        these = {one: by_metric[name] for one, by_metric in found.items() if by_metric.get(name)}
        if these:
            axis = Axis(name, short_score, *((0.0, 1.0) if is_share(name) else ()))
            words = f'{name} over training steps'
            across = baselines if name == metric else {}
            sizes = ((WIDE[0], 360), (NARROW[0], 300))
            desk, phone = (themed(curve_chart(these, opening.looks, axis, words, size, across)) for size in sizes)
            shown.append((name, f'<div class="desk">{desk}</div><div class="phone">{phone}</div>'))
    return shown


def table(opening: Opening, heads: Mapping[str, str]) -> str:
    """Score and error, n, and costs, the best first, bold only where it is separated from all others.

    On a phone every row is a card. `heads` are the names as HTML.
    """
    order = opening.order
    digits = shown_digits([one.score for one in order])
    by_name = {one.name: one for one in opening.entries}
    costs = [
        cost
        for cost in OPENING
        if cost not in opening.matched and any(entry.costs.get(cost) is not None for entry in opening.entries)
    ]
    titles = [html.escape(opening.metric), 'n', *(COSTS[cost].title for cost in costs)]
    bold = stands_out(order)
    body = []
    for place, one in enumerate(order):
        score = _score(one.score, digits)
        entry = by_name[one.name]
        cells = [f'<b>{score}</b>' if bold and place == 0 else score, re.sub('(?<!,) ', '\u00a0', evidence(one.score))]
        cells += [html.escape(shown_briefly(cost, entry.costs.get(cost))) for cost in costs]
        body.append(_row(heads[one.name], cells, titles))
    for name, value in sorted(opening.baselines.items(), key=lambda item: item[1], reverse=opening.higher):
        cells = [f'{value:.{digits}f}', *[''] * (len(titles) - 1)]
        body.append(_row(f'<i>{html.escape(name)}</i>, trivial', cells, titles, ' class="trivial"'))
    head = ''.join(f'<th scope="col" class="number">{one}</th>' for one in titles)
    return (
        '<div class="scroll scores" role="region" aria-label="Scores" tabindex="0">\n<table>\n'
        f'<thead><tr><th scope="col">Name</th>{head}</tr></thead>\n<tbody>\n{"".join(body)}</tbody>\n</table>\n</div>\n'
    )


def _score(score: Measured, digits: int) -> str:
    return html.escape(score.text(digits)) if math.isfinite(score.mean) else 'nan'


def evidence(score: Measured) -> str:
    """How many seeds a score is from or, where it is one, how many documents or examples."""
    if score.kind in ('examples', 'documents'):
        return f'1 seed, {score.n:,} {score.kind}'
    seeds = '1 seed' if score.n == 1 else f'{score.n} seeds'
    return f'{seeds}, others failed' if score.kind == 'survivors' else seeds


def _row(head: str, cells: Sequence[str], titles: Sequence[str], more: str = '') -> str:
    rest = ''.join(
        f'<td class="number{"" if cell else " none"}" data-label="{name}">{cell or "–"}</td>'
        for cell, name in zip(cells, titles, strict=True)
    )
    return f'<tr{more}><th scope="row">{head}</th>{rest}</tr>\n'


def caption(opening: Opening) -> str:
    """What the table's numbers are, as HTML."""
    errors = {one.score.kind for one in opening.entries}
    parts = []
    if 'seeds' in errors:
        parts.append('± is half of a 95 % interval by Student’s t over seeds, with the noise of the finite test set')
    if 'range' in errors:
        parts.append('two seeds give no interval, and round brackets are their range')
    if errors & {'examples', 'documents'}:
        parts.append('of one seed, ± is the noise of the finite test set alone, which says nothing of other seeds')
    digits = shown_digits([entry.score for entry in opening.entries])
    if any('[' in entry.score.text(digits) for entry in opening.entries):
        parts.append('square brackets are the ends of an interval that is not symmetric about the value')
    if 'one' in errors:
        parts.append('one value has no error')
    if 'survivors' in errors:
        parts.append('where seeds failed the mean of the others has no error')
    if stands_out(opening.order):
        parts.append('bold: the interval of the best does not overlap that of any other')
    text = '; '.join(parts)
    return f'<p class="caption">{text[:1].upper()}{text[1:]}.</p>\n'
