"""`attnlab report`: one HTML page that needs nothing else, its figures as SVG and their numbers as CSV.

A pure function of what `contents.gather` reads: the same studies give the same bytes.
"""

import dataclasses
import html
import pathlib
import urllib.parse
from collections.abc import Mapping, Sequence

from rich.console import Console

from attnlab import files
from attnlab.compare.axes import Style, styles
from attnlab.compare.costs import OPENING, matched_cost
from attnlab.compare.report import figures, tables
from attnlab.compare.report import opening as openings
from attnlab.compare.report.chart import WIDE
from attnlab.compare.report.comparison import ranked_metric, scored, scored_metric
from attnlab.compare.report.contents import Contents, Costs
from attnlab.compare.report.figures import Plot, svg, swatch
from attnlab.compare.report.opening import Opening, Scored
from attnlab.compare.report.style import SCRIPT, STYLE, themed
from attnlab.compare.report.tables import link
from attnlab.evals.measured import is_share
from attnlab.tables import csv_lines


@dataclasses.dataclass(frozen=True)
class Section:
    """A heading, what is under it as HTML, and its figures."""

    anchor: str
    title: str
    body: str
    plots: Sequence[Plot] = ()
    after: str = ''


def write_report(contents: Contents, folder: pathlib.Path, console: Console) -> None:
    """Writes the page and the files of its figures and tables."""
    texts = render(contents)
    for name, text in texts.items():
        files.write(folder / name, text)
    others = len(texts) - 1
    console.print(f'written: {folder / "index.html"} and {others} files beside it', highlight=False, soft_wrap=True)


def render(contents: Contents) -> dict[str, str]:
    """Every file of a report by its name: `index.html`, an SVG a figure, the numbers as CSV."""
    parts = sections(contents)
    plots = [plot for part in parts for plot in part.plots]
    drawn = {plot.name: svg(plot, key=False) for plot in plots}
    files = {'index.html': page(contents, parts, drawn)}
    files |= {f'{plot.name}.svg': XML + (svg(plot, key=True) if plot.keyed else drawn[plot.name]) for plot in plots}
    files |= {f'{plot.data}.csv': csv_lines(plot.header, plot.lines) for plot in plots}
    files |= large_files(opening_of(contents))
    if any(study.curves for study in contents.studies):
        files['curves.csv'] = csv_lines(('study', 'metric', 'step', 'value'), _curve_lines(contents))
    return files | {'studies.csv': tables.studies_csv(contents), 'trials.csv': tables.trials_csv(contents)}


XML = '<?xml version="1.0" encoding="utf-8" standalone="no"?>\n'


def large_files(opening: Opening) -> dict[str, str]:
    """The large figure as SVG, and its numbers as CSV."""
    rows = openings.lines(opening)
    if not rows:
        return {}
    drawn = openings.draw(opening, rows, WIDE)
    return {f'{opening.name}.svg': XML + drawn, f'{opening.name}.csv': csv_lines(openings.HEADER, rows)}


def opening_of(contents: Contents) -> Opening:
    """What the page opens with: the confirmed scores, or the best trials' where not every study was confirmed."""
    rows = [study.row for study in contents.studies]
    statistic = scored(rows)
    entries = [
        Scored(study.row.name, study.row.statistics[statistic], _shown(study.costs))
        for study in contents.studies
        if study.row.statistics
    ]
    matched = matched_cost(contents.comparison.by, contents.length)
    metric = _ranked_by(contents)
    return Opening(
        name='score',
        entries=entries,
        looks=styles([row.name for row in rows]),
        metric=scored_metric(rows, contents.comparison.metric, contents.comparison.score),
        higher=any(row.goal == 'max' for row in rows),
        share=is_share(metric),
        task=contents.comparison.task,
        matched=[] if matched is None else [matched],
        tolerance=contents.comparison.tolerance,
        baselines=contents.comparison.baselines,
    )


def _shown(costs: Costs) -> dict[str, float | None]:
    """Those that the opening may show."""
    return {name: cost for name, cost in dataclasses.asdict(costs).items() if name in OPENING}


def _ranked_by(contents: Contents) -> str:
    """The metric of the scores: that of confirmed runs only where every study has them."""
    comparison = contents.comparison
    return ranked_metric([study.row for study in contents.studies], comparison.metric, comparison.score)


def question(contents: Contents) -> str:
    """What the page answers."""
    names, comparison = [study.row.name for study in contents.studies], contents.comparison
    metric = _ranked_by(contents)
    on = f' on {contents.comparison.task}' if contents.comparison.task else ''
    if len(names) == 1:
        return f'What {metric} does {names[0]} reach{on}?'
    which = ', '.join(names[:-1]) + f' and {names[-1]}' if len(names) <= 4 else f'{len(names)} studies'
    most = 'highest' if any(study.row.goal == 'max' for study in contents.studies) else 'lowest'
    equal = '' if comparison.reasons else f', at equal {comparison.by}'
    return f'Which of {which} has the {most} {metric}{on}{equal}?'


def page(contents: Contents, parts: Sequence[Section], drawn: Mapping[str, str]) -> str:
    """The page as HTML; `drawn` are its figures as SVG, by name."""
    opening = opening_of(contents)
    heads = dict(zip([study.row.name for study in contents.studies], tables.study_heads(contents), strict=True))
    links = f'<span class="files">{_file("score.svg", "SVG")} {_file("score.csv", "CSV")}</span>'
    body = ''.join(_section(part, contents, drawn) for part in parts)
    return shell(
        question(contents),
        f'{openings.lead(opening)}{_verdict(contents)}{_notices(contents)}',
        f'{openings.figure(opening, links)}{openings.table(opening, heads)}{openings.caption(opening)}'
        f'<div class="rest">\n{_curves(contents, opening)}{body}</div>\n',
    )


def shell(title: str, head: str, body: str) -> str:
    """A page that needs no other file, from its title and the HTML of its two parts."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{html.escape(title)}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<header>\n'
        f'<h1>{html.escape(title)}</h1>\n{head}</header>\n<main>\n{body}</main>\n'
        f'<script>\n{SCRIPT}</script>\n</body>\n</html>\n'
    )


def folded(anchor: str, heading: str, body: str) -> str:
    """A part of the page that opens when asked for; the heading is HTML."""
    return f'<details id="{anchor}">\n<summary><h2>{heading}</h2></summary>\n{body}</details>\n'


def _curve_lines(contents: Contents) -> list[tuple[object, ...]]:
    return [
        (study.row.name, metric, step, value)
        for study in contents.studies
        for metric, points in study.curves.items()
        for step, value in points
    ]


def _curves(contents: Contents, opening: Opening) -> str:
    """The curves of the best trials, with values at the pointer."""
    found, metric = {study.row.name: study.curves for study in contents.studies}, contents.comparison.metric
    shown = openings.curves(opening, found, metric, opening.baselines if metric == _ranked_by(contents) else {})
    if not shown:
        return ''
    link_to = f'<span class="files">{_file("curves.csv", "CSV")}</span>'
    figures = ''.join(
        f'<figure class="curve">\n{drawn}<figcaption>{html.escape(name)} over steps, the best trial of each study; '
        f'values at the pointer. {link_to}</figcaption>\n</figure>\n'
        for name, drawn in shown
    )
    names = [study.row.name for study in contents.studies]
    return folded('curves', 'Training curves', f'{key(styles(names))}{figures}')


def sections(contents: Contents) -> list[Section]:
    """Everything under the head of the page, in order; what there is nothing to say of is left out."""
    metric = html.escape(_ranked_by(contents))
    found = [
        Section(
            'comparison',
            'All statistics, with intervals',
            _text(f'{INTERVALS} {contents.comparison.left_out}'.strip())
            + tables.comparison_table(contents)
            + _downloads('studies.csv'),
        ),
        Section(
            'costs',
            f'{metric} against cost',
            _text(COSTS) + tables.cost_table(contents),
            figures.cost_plots(contents),
            _text(_measured_on(contents)) + tables.measured_table(contents),
        ),
        Section(
            'companion',
            f'{html.escape(contents.companion or "")} against cost',
            _text(COMPANION),
            figures.companion_plots(contents),
        ),
        Section('rates', 'Learning rate', _text(_rates(contents)), figures.rate_plots(contents)),
        Section('lengths', 'Length', _text(LENGTHS), figures.length_plots(contents)),
        Section('progress', 'Best so far', _text(PROGRESS), figures.progress_plots(contents)),
        Section('intervals', 'Intervals', _text(STATISTICS), figures.interval_plots(contents)),
        Section('matched', 'What was matched', tables.equality_table(contents)),
        Section('kernels', 'Kernels', _text(KERNELS) + tables.kernel_table(contents)),
        Section('configs', 'Differences between configs', _differences(contents)),
        Section('trials', 'Trials', _moved(contents) + tables.trial_table(contents) + _downloads('trials.csv')),
        Section('failures', 'Failures', tables.failure_table(contents)),
    ]
    optional = {'companion', 'rates', 'lengths', 'intervals', 'progress'}
    return [one for one in found if one.plots or (one.body and one.anchor not in optional)]


def _section(section: Section, contents: Contents, drawn: Mapping[str, str]) -> str:
    shown = ''.join(_figure(plot, themed(drawn[plot.name])) for plot in section.plots)
    names = [study.row.name for study in contents.studies]
    marks = key(styles(names)) if any(plot.keyed for plot in section.plots) else ''
    wide = ' wide' if any(plot.size[0] > figures.SIZE[0] for plot in section.plots) else ''
    panels = f'{marks}<div class="panels{wide}">\n{shown}</div>\n' if shown else ''
    return folded(section.anchor, section.title, f'{section.body}{panels}{section.after}')


def _figure(plot: Plot, drawn: str) -> str:
    title = html.escape(plot.title)
    return (
        f'<figure>\n{drawn}<figcaption>{title} '
        f'<span class="files">{_file(f"{plot.name}.svg", "SVG")} {_file(f"{plot.data}.csv", "CSV")}</span>'
        '</figcaption>\n</figure>\n'
    )


def _file(name: str, kind: str) -> str:
    return f'<a href="{html.escape(urllib.parse.quote(name))}" title="{html.escape(name)}">{kind}</a>'


def key(looks: Mapping[str, Style]) -> str:
    """The marks of names."""
    items = ''.join(f'<li>{swatch(style)}{html.escape(name)}</li>\n' for name, style in looks.items())
    return f'<ul class="key" aria-label="Key">\n{items}</ul>\n'


def _verdict(contents: Contents) -> str:
    comparison = contents.comparison
    if not comparison.reasons:
        head = html.escape(comparison.head)
        return f'<p class="verdict matched"><strong>{head[:1].upper()}{head[1:]}.</strong></p>\n'
    return unmatched(comparison.reasons)


def unmatched(reasons: Sequence[str]) -> str:
    """What was not equal, for above the table."""
    listed = ''.join(f'<li>{html.escape(reason)}</li>\n' for reason in reasons)
    return f'<div class="verdict unmatched">\n<p><strong>NOT MATCHED</strong></p>\n<ul>\n{listed}</ul>\n</div>\n'


def _notices(contents: Contents) -> str:
    if not contents.notices:
        return ''
    lines = ''.join(f'<li>{html.escape(notice)}</li>\n' for notice in contents.notices)
    return f'<aside class="verdict notice" aria-label="Notices">\n<ul>\n{lines}</ul>\n</aside>\n'


def _text(text: str) -> str:
    return f'<p>{text}</p>\n'


def _downloads(name: str) -> str:
    return f'<p class="files">As CSV: {link(name)}</p>\n'


def _differences(contents: Contents) -> str:
    found = tables.difference_table(contents)
    return _text(DIFFERENCES) + found if found else _text('None: the studies have the same config.')


def _moved(contents: Contents) -> str:
    within = contents.within
    with_what = (
        'The links to runs are relative; the studies are in the folder of this page, and move with it.'
        if within == '.'
        else f'The links to runs are relative: they hold as long as this page and the studies keep their places below '
        f'<code>{html.escape(within)}</code>, wherever that is moved. The rest of the page needs no other file.'
    )
    return _text(f'★ is the best trial of a study. {with_what}')


def _rates(contents: Contents) -> str:
    seeds = sorted({point.seed for study in contents.studies for point in study.row.points})
    shapes = 'The shape of a mark is its seed. ' if len(seeds) > 1 else ''
    return (
        f'Every trial of a study, those of the others in grey behind it, all on the same axes. {shapes}Filled: ran to '
        'the end; hollow: pruned, with its value at that step; cross at the upper edge: failed. Where several trials '
        'share a rate, the line is their median and the band spans their minimum and maximum. '
        f'{html.escape(contents.comparison.at_an_end)}'
    ).strip()


def _measured_on(contents: Contents) -> str:
    if contents.device is None:
        return 'Decoding time and peak memory were not measured.'
    return (
        f'Decoding time and peak memory are those of {html.escape(contents.device)}. Both were measured once and are '
        'kept in the studies, in <code>measured.json</code>, by the kind of device. Decoding: the median step of one '
        'sequence, at the length trained on. '
        'Memory: what the compiled training step occupies on one device. Tokens per second are the median over trials '
        'of what training reported; trials that ran side by side on one machine slowed each other.'
    )


INTERVALS = """\
FLOPs and tokens are those of the steps that trials took, pruned and failed ones too. Trials are done / pruned /
failed; a failed one counts as the worst that did not fail, a pruned one as its value when it was pruned. Best: the
best single trial; being selected for its value, it is optimistic. Expected best: of a quarter of the trials (Dodge et
al. 2019). Top quarter: the median of the best quarter. Area: the mean over the logarithm of the learning rate, by
trapezoids, of values at the last step that every trial of all studies reached; none where a trial had reported nothing
up to there. Brackets of these are over trials: the
deviation of 1000 bootstrap resamples times Student's t, which covered 88 to 96 % in simulations of 8 and 16 trials,
and the noise of the examples or documents evaluated on where it was recorded of every trial.
Confirmed: the mean of the winner's settings with fresh seeds, with a 95 % interval by Student's t over seeds, and the
noise of the examples or documents evaluated on where it was recorded; for two seeds, their range; for one seed,
or where others failed, no interval."""

COSTS = f"""\
{tables.OPTIMAL} marks what is Pareto-optimal: no other study is at least as good in both the score and this cost,
and better in one; what was matched has no marks. The score is the confirmed value, or the best trial's where not every
study was confirmed. In the figures these are filled and joined by a line, the others hollow; bars are the
intervals of the table. State is what decoding one sequence keeps, at the length trained on and at eight times that.
Weights and bits, where studies were trained with few bits, are those that <code>attnlab quantize</code> stores."""

COMPANION = """\
A second metric of the same evaluation: the best final value of any trial of a study, not necessarily the trial that is
best above; marks and bars as there."""

LENGTHS = """\
Each study's best trial, evaluated at multiples of the length it was trained on; the band spans the minimum
and maximum of the trials that confirm it with fresh seeds and did not fail."""

STATISTICS = 'The statistics of the table with their intervals.'

PROGRESS = 'The best value among the first trials, over how many they are.'

DIFFERENCES = 'Only the keys of the sweeps that differ; a dash where a study has no such key, or has it unset.'

KERNELS = """\
The implementation of each core that the trials ran, in training, and why the ones preferred to it were refused."""
