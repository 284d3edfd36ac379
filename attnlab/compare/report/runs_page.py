"""`attnlab compare RUN...` as one HTML page that needs nothing else: a part a task, each opening with its sentence."""

import html
from collections.abc import Mapping, Sequence

from attnlab.compare.axes import Style, styles
from attnlab.compare.costs import OPENING
from attnlab.compare.report import opening as openings
from attnlab.compare.report.figures import swatch
from attnlab.compare.report.opening import Opening, Scored
from attnlab.compare.report.page import folded, key, shell, unmatched
from attnlab.compare.runs import RunResult, baselines_of, costs_of, short_names

Curves = Mapping[tuple[str, str], Mapping[str, Sequence[tuple[int, float]]]]
"""Of runs, by task and name: steps with values by metric."""


def runs_opening(
    task: str, group: Sequence[RunResult], tolerance: float, place: int = 0, looks: Mapping[str, Style] | None = None
) -> Opening:
    """What the part of a task opens with; runs have the names that tell them apart, and the looks given."""
    names = short_names(group)
    # Bytes of weights follow from the parameters, unless some have few bits.
    costs = [cost for cost in OPENING if cost in costs_of(group)]
    entries = [
        Scored(name, one.measured, {cost: _known(getattr(one, cost)) for cost in costs})
        for name, one in zip(names, group, strict=True)
    ]
    return Opening(
        name=f'runs_{place}',
        entries=entries,
        looks=looks or styles(names),
        metric=', '.join(dict.fromkeys(one.metric for one in group)),
        higher=group[0].higher,
        share=all(one.share for one in group),
        task=task,
        matched=(),
        tolerance=tolerance,
        baselines=baselines_of(group),
    )


def _known(cost: int | float | None) -> float | None:
    return None if cost is None else float(cost)


def question(groups: Mapping[str, Sequence[RunResult]]) -> str:
    """What the page answers."""
    if len(groups) > 1:
        runs = sum(map(len, groups.values()))
        return f'Which of {runs} runs is best on each of {len(groups)} tasks?'
    ((task, group),) = groups.items()
    names = short_names(group)
    if len(names) == 1:
        return f'What {group[0].metric} does {names[0]} reach on {task}?'
    which = ', '.join(names[:-1]) + f' and {names[-1]}' if len(names) <= 4 else f'{len(names)} runs'
    return f'Which of {which} has the {"highest" if group[0].higher else "lowest"} {group[0].metric} on {task}?'


def runs_page(
    groups: Mapping[str, Sequence[RunResult]],
    matched: Mapping[str, str],
    wrong: Mapping[str, Sequence[str]],
    curves: Curves,
    tolerance: float,
) -> str:
    """The page; of each task `matched` says in what its runs are equal, and `wrong` in what they are not."""
    looks = styles(list(dict.fromkeys(name for group in groups.values() for name in short_names(group))))
    parts = [
        _part(
            runs_opening(task, group, tolerance, place, looks),
            group,
            folded(f'matched_{place}', 'What is equal', f'<p>{html.escape(matched[task])}</p>\n'),
            wrong[task],
            curves,
            place,
            len(groups) > 1,
        )
        for place, (task, group) in enumerate(groups.items())
    ]
    return shell(question(groups), '', ''.join(parts))


def _part(
    opening: Opening,
    group: Sequence[RunResult],
    matched: str,
    wrong: Sequence[str],
    curves: Curves,
    place: int,
    named: bool,
) -> str:
    names = [entry.name for entry in opening.entries]
    heads = {
        name: f'<span class="name">{swatch(opening.looks[name])}{html.escape(one.titled(name))}</span>'
        for name, one in zip(names, group, strict=True)
    }
    found = {name: curves[one.task, one.name] for name, one in zip(names, group, strict=True)}
    figures = ''.join(
        f'<figure class="curve">\n{drawn}<figcaption>{html.escape(metric)} over steps; values at the pointer.'
        '</figcaption>\n</figure>\n'
        for metric, drawn in openings.curves(opening, found, opening.metric, opening.baselines)
    )
    folds = (
        folded(f'curves_{place}', 'Training curves', f'{key({name: opening.looks[name] for name in names})}{figures}')
        if figures
        else ''
    )
    heading = f'<h2 class="task">{html.escape(opening.task)}</h2>\n' if named else ''
    return (
        f'<section>\n{heading}{openings.lead(opening)}{unmatched(wrong) if wrong else ""}'
        f'{openings.figure(opening, "")}{openings.table(opening, heads)}{openings.caption(opening)}'
        f'<div class="rest">\n{folds}{matched}</div>\n</section>\n'
    )
