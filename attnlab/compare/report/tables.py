"""The tables of a page of studies, as HTML and as CSV."""

import html
import math
import urllib.parse
from collections.abc import Iterable, Sequence
from typing import Any

from attnlab.compare.axes import styles
from attnlab.compare.costs import COSTS, shown_cost, shown_size
from attnlab.compare.equality import Equality, differing
from attnlab.compare.report.comparison import COLUMNS, Comparison, StudyResult, counts
from attnlab.compare.report.contents import Contents, StudyContents, Trial, costs_of, frontier
from attnlab.compare.report.figures import swatch
from attnlab.compare.report.measured import shown_versions
from attnlab.evals.measured import Measured
from attnlab.tables import csv_lines, in_bytes
from attnlab.train.metrics_file import interval_ends

NONE = '<span class="none">–</span>'
OPTIMAL = '<span class="optimal" title="Pareto-optimal: no study is better in both">◆</span>'


def table(headers: Sequence[str], groups: Iterable[tuple[str, Sequence[Sequence[str]]]], name: str) -> str:
    """A table in a box that scrolls: cells are HTML, the first of a row its head; numbers stand under `>headers`.

    Rows come in groups, each with a heading of its own where that is not empty; `name` is what the table is called.
    """
    sides = [' class="number"' if text.startswith('>') else '' for text in headers]
    titles = [text.removeprefix('>') for text in headers]
    head = ''.join(f'<th scope="col"{side}>{text}</th>' for text, side in zip(titles, sides, strict=True))
    bodies, count = [], 0
    for heading, rows in groups:
        span = (
            f'<tr class="group"><th scope="rowgroup" colspan="{len(headers)}">{heading}</th></tr>\n' if heading else ''
        )
        bodies.append(f'<tbody>\n{span}{"".join(_row(cells, sides) for cells in rows)}</tbody>\n')
        count += len(rows)
    kind = 'scroll' if count <= WHOLE else 'scroll long'
    return (
        f'<div class="{kind}" role="region" aria-label="{html.escape(name)}" tabindex="0">\n<table>\n'
        f'<thead><tr>{head}</tr></thead>\n{"".join(bodies)}</table>\n</div>\n'
    )


WHOLE = 24
"""Rows up to which a table is not divided between pages."""


def _row(cells: Sequence[str], sides: Sequence[str]) -> str:
    rest = ''.join(f'<td{side}>{cell}</td>' for cell, side in zip(cells[1:], sides[1:], strict=True))
    return f'<tr><th scope="row"{sides[0]}>{cells[0]}</th>{rest}</tr>\n'


def comparison_table(contents: Contents) -> str:
    """Every statistic with its interval."""
    comparison = contents.comparison
    columns = [_intervals(comparison.rows, name) for name in COLUMNS]
    sizes = [shown_size(row.size) for row in comparison.rows]
    rows = [
        [head, size, f'{row.flops:.2e}', f'{row.tokens:.2e}', ' / '.join(counts(row)), *cells]
        for head, size, row, *cells in zip(study_heads(contents), sizes, comparison.rows, *columns, strict=True)
    ]
    titles = [f'>{name.capitalize()}' for name in COLUMNS]
    by = f'>{html.escape(comparison.by)}'
    return table(('Study', by, '>FLOPs of all', '>Tokens of all', '>Trials', *titles), [('', rows)], 'Comparison')


def _intervals(rows: Sequence[StudyResult], statistic: str) -> list[str]:
    found = [row.statistics.get(statistic) for row in rows]
    digits = decimals(
        [number for one in found if one is not None for number in (one.mean, one.low, one.high) if number is not None]
    )
    return [NONE if one is None else _interval(one, digits) for one in found]


def _interval(one: Measured, digits: int) -> str:
    value = number(one.mean, digits)
    if one.low is None or one.high is None:
        failed = ', others failed' if one.kind == 'survivors' else ''
        return f'{value} <span class="interval">n={one.n}{failed}</span>'
    few = ', the 2 seen' if one.kind == 'range' else ''
    return f'{value} <span class="interval">[{number(one.low, digits)}, {number(one.high, digits)}]{few}</span>'


def cost_table(contents: Contents) -> str:
    """What each study costs; a mark where it is Pareto-optimal."""
    rows = [study.row for study in contents.studies]
    columns = [
        [_marked(cell, mark) for cell, mark in zip(_costs(contents.studies, cost), marks, strict=True)]
        for cost in costs_of(contents)
        for marks in [frontier(contents, cost, rows)]
    ]
    lines = [list(line) for line in zip(study_heads(contents), *columns, strict=True)]
    return table(('Study', *(f'>{COSTS[cost].heading}' for cost in costs_of(contents))), [('', lines)], 'Costs')


def _marked(cell: str, mark: bool) -> str:
    return f'{OPTIMAL} {cell}' if mark else cell


def _costs(studies: Sequence[StudyContents], cost: str) -> list[str]:
    """A column of costs, in which numbers line up."""
    values = [getattr(study.costs, cost) for study in studies]
    if cost == 'decode_ms':
        digits = decimals([value for value in values if value is not None], significant=3)
        return [NONE if value is None else number(value, digits) for value in values]
    return [NONE if value is None else _shown(cost, value) for value in values]


def _shown(cost: str, value: float) -> str:
    return 'no stream' if cost.startswith('state_bytes') and not value else shown_cost(cost, value)


def measured_table(contents: Contents) -> str:
    """What was measured of each study, on every kind of device."""
    lines = [
        (head, device, one)
        for head, study in zip(study_heads(contents), contents.studies, strict=True)
        for device, one in study.measured.items()
    ]
    digits = decimals([one.decode_ms for _, _, one in lines if one.decode_ms is not None], significant=3)
    rows = [
        [
            head,
            html.escape(device),
            html.escape(shown_versions(one)),
            NONE if one.decode_ms is None else number(one.decode_ms, digits),
            NONE if one.peak_bytes is None else in_bytes(one.peak_bytes),
        ]
        for head, device, one in lines
    ]
    headers = ('Study', 'Device', 'Measured with', *(f'>{COSTS[cost].heading}' for cost in ('decode_ms', 'peak_bytes')))
    return table(headers, [('', rows)], 'Measured') if rows else ''


def equality_table(contents: Contents) -> str:
    """In what the studies agree, and in what they do not."""
    rows = [_equality(one, contents) for one in contents.equalities]
    headers = ('What', 'Verdict', '>Spread', 'Least, or what differs', 'Most')
    return table(headers, [('', rows)], 'What was matched')


def _equality(one: Equality, contents: Contents) -> list[str]:
    by = contents.comparison.by
    heading = COSTS[one.name].heading if one.name in COSTS else one.name[:1].upper() + one.name[1:]
    name = f'Size, by {by}' if one.name == by else heading
    if one.least is None or one.most is None:
        verdict = _verdict('same' if one.equal else 'differs', one)
        listed = '' if one.equal else ', '.join(map(_broken, one.different))
        return [html.escape(name), verdict, '', f'<span class="wrapping">{listed}</span>' if listed else '', '']
    verdict = _verdict(f'{"" if one.equal else "not "}within ±{contents.comparison.tolerance:.1%}', one)
    spread = '' if one.spread is None else f'±{one.spread:.1%}'
    if one.spread is not None and one.spread > 1 / 3:
        spread = f'{one.most[0] / one.least[0]:.3g}x'
    ends = [
        f'{shown_cost(one.name, value)} <span class="whose">{html.escape(of)}</span>'
        for value, of in (one.least, one.most)
    ]
    return [html.escape(name), verdict, spread, *ends]


def _verdict(text: str, one: Equality) -> str:
    kind = 'yes' if one.equal else 'no' if one.required else 'other'
    return f'<span class="{kind}">{"✓" if one.equal else "✗" if one.required else "≠"} {html.escape(text)}</span>'


def kernel_table(contents: Contents) -> str:
    """Which implementation of which core ran in which study, on what, and why others were refused."""
    groups = []
    for head, study in zip(study_heads(contents), contents.studies, strict=True):
        rows = [
            [
                html.escape(kernel.ran.core),
                html.escape(kernel.ran.implementation),
                html.escape(kernel.ran.mixer),
                html.escape(layers(kernel.ran.layers)),
                html.escape(kernel.device),
                '<br>'.join(f'<b>{html.escape(name)}</b>: {html.escape(why)}' for name, why in kernel.ran.refused)
                or NONE,
                str(trials),
            ]
            for kernel, trials in study.kernels
        ]
        groups.append((head, rows or [['nothing recorded', *[''] * 6]]))
    headers = ('Core', 'Implementation', 'Mixer', 'Layers', 'Device', 'Preferred, but refused', '>Trials')
    return table(headers, groups, 'Kernels')


def layers(numbers: Sequence[int]) -> str:
    """Indices of layers; as a range where they follow on one another."""
    if len(numbers) > 2 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f'{numbers[0]} to {numbers[-1]}'
    return ', '.join(map(str, numbers))


def difference_table(contents: Contents) -> str:
    """The keys of the sweeps' configs that differ, one column per study; empty where none does."""
    groups: dict[str, list[list[str]]] = {}
    for key, values in differing([study.settings for study in contents.studies]).items():
        start = parent(key)
        rest = key[len(start) :].removeprefix('.')
        groups.setdefault(start, []).append([f'<code>{_broken(rest)}</code>', *map(_setting, values)])
    shown = [(f'<code>{html.escape(start)}</code>' if start else '', rows) for start, rows in groups.items()]
    return table(('Key', *study_heads(contents)), shown, 'Differences between configs') if groups else ''


def parent(key: str) -> str:
    """The prefix shared by several keys: up to the last layer, mixer or the like; of others, up to the first dot."""
    for mark in ('.mixer.', '.mlp.', '].'):
        if mark in key:
            return key[: key.rindex(mark) + len(mark) - 1]
    return key.partition('.')[0] if '.' in key else ''


def _setting(value: str | None) -> str:
    return NONE if value is None else f'<code>{_broken(value)}</code>'


def _broken(text: str) -> str:
    """Escaped, with places to break the line after dots and underscores."""
    return html.escape(text).replace('.', '.<wbr>').replace('_', '_<wbr>')


def trial_table(contents: Contents) -> str:
    """Every trial, with a link to its directory."""
    keys = sorted({key for study in contents.studies for trial in study.trials for key in trial.settings})
    short = [key if keys_ending(keys, key) > 1 else key.rpartition('.')[2] for key in keys]
    values = [trial.value for study in contents.studies for trial in study.trials if trial.value is not None]
    digits = decimals(values)
    groups = [
        (head, [_trial(trial, keys, digits) for trial in study.trials])
        for head, study in zip(study_heads(contents), contents.studies, strict=True)
    ]
    named = [f'>{_broken(name)}' for name in short]
    metric, reported = map(html.escape, (contents.comparison.metric, contents.comparison.reported))
    metric = f'{metric}, confirmed: {reported}' if reported else metric
    return table(('Trial', 'State', 'Run', *named, '>Seed', f'>{metric}', '>Tokens/s'), groups, 'Trials')


def failure_table(contents: Contents) -> str:
    """The trials that failed, and why; nothing where none did."""
    rows = [
        [
            head,
            NONE if trial.link is None else link(trial.link),
            f'<span class="reason">{html.escape(trial.reason)}</span>',
        ]
        for head, study in zip(study_heads(contents), contents.studies, strict=True)
        for trial in study.trials
        if trial.state == 'failed'
    ]
    return table(('Study', 'Run', 'Why it failed'), [('', rows)], 'Failures') if rows else ''


def keys_ending(keys: Sequence[str], key: str) -> int:
    """How many of the keys have the last name of this one."""
    return sum(other.rpartition('.')[2] == key.rpartition('.')[2] for other in keys)


def _trial(trial: Trial, keys: Sequence[str], digits: int) -> list[str]:
    star = ' <b title="the best of the study">★</b>' if trial.best else ''
    name = f'confirm {trial.number}' if trial.confirms else str(trial.number)
    speed = trial.tokens_per_second
    return [
        f'{name}{star}',
        f'<span class="state {trial.state.replace(" ", "-")}">{trial.state}</span>',
        NONE if trial.link is None else link(trial.link),
        *(html.escape(_number(trial.settings[key])) if key in trial.settings else '' for key in keys),
        str(trial.seed),
        NONE if trial.value is None else number(trial.value, digits),
        NONE if speed is None else f'{speed:,.0f}',
    ]


def _number(value: Any) -> str:
    return f'{value:.3e}' if isinstance(value, float) else str(value)


def link(path: str) -> str:
    """A link to a relative path, which is also what it says; it may break after a slash."""
    shown = html.escape(path).replace('/', '/<wbr>')
    return f'<a href="{html.escape(urllib.parse.quote(path))}">{shown}</a>'


def study_heads(contents: Contents) -> list[str]:
    """The name of each study after its mark."""
    names = [study.row.name for study in contents.studies]
    return [f'<span class="name">{swatch(style)}{html.escape(name)}</span>' for name, style in styles(names).items()]


def decimals(values: Sequence[float], significant: int = 4) -> int:
    """So many that the median of the values has `significant` digits: numbers of a column line up at the point."""
    sizes = sorted(abs(value) for value in values if value and math.isfinite(value))
    if not sizes:
        return 0
    return min(max(significant - 1 - math.floor(math.log10(sizes[len(sizes) // 2])), 0), 9)


def number(value: float, digits: int) -> str:
    """A number with `digits` decimals; in powers of ten where it would be longer than anyone reads."""
    return f'{value:.{digits}f}' if abs(value) < 1e6 else f'{value:.3e}'


PARTS = ('mean', 'low', 'high')


def studies_csv(contents: Contents) -> str:
    """A line a study: its size, effort, statistics and costs."""
    names = [name.replace(' ', '_') for name in COLUMNS]
    ends = [each for name in names for each in (name, *interval_ends(name))]
    costs = costs_of(contents)
    optimal = [f'pareto_{cost}' for cost in costs]
    rows = [study.row for study in contents.studies]
    marks = zip(*(frontier(contents, cost, rows) for cost in costs), strict=True)
    lines = [
        [
            *(study.row.name, study.row.size, study.row.flops, study.row.tokens, len(study.row.points)),
            *_statistics(study.row),
            *(getattr(study.costs, cost) for cost in costs),
            *marked,
        ]
        for study, marked in zip(contents.studies, marks, strict=True)
    ]
    return csv_lines(
        ('study', _size(contents.comparison), 'flops_of_all', 'tokens_of_all', 'trials', *ends, *costs, *optimal), lines
    )


def _size(comparison: Comparison) -> str:
    return f'matched_{comparison.by}'


def _statistics(row: StudyResult) -> list[Any]:
    found = row.statistics
    return [getattr(found[name], part) if name in found else None for name in COLUMNS for part in PARTS]


def trials_csv(contents: Contents) -> str:
    """A line a trial."""
    comparison = contents.comparison
    keys = sorted({key for study in contents.studies for trial in study.trials for key in trial.settings})
    lines = [
        [
            *(study.row.name, trial.number, int(trial.confirms), trial.state, trial.seed),
            *(comparison.score if trial.confirms else comparison.metric, trial.value),
            *(trial.settings.get(key) for key in keys),
            *(trial.tokens_per_second, trial.device, trial.link, trial.reason),
        ]
        for study in contents.studies
        for trial in study.trials
    ]
    header = ('study', 'trial', 'confirms', 'state', 'seed', 'metric', 'value', *keys)
    return csv_lines((*header, 'tokens_per_second', 'device', 'run', 'reason'), lines)
