"""The value of every trial over its learning rate: a panel a mixer, the others behind it."""

import statistics

from attnlab.compare.axes import power, scale, styles
from attnlab.experiment.results import dashed, panels


def figure(studies):
    """A row of panels a task; hollow points were given up early, lines join the medians of the seeds.

    Dashed: what predictors reach that need no training.
    """
    reports = dict.fromkeys(study['report'] for study in studies)
    names = dict.fromkeys(study['study'] for study in studies)
    looks = styles(list(names))
    figure, axes = panels(len(names), rows=len(reports), width=2.2, height=2.1)
    for report, row in zip(reports, zip(*[iter(axes)] * len(names), strict=True), strict=True):
        compared = [study for study in studies if study['report'] == report]
        behind = [trial for study in compared for trial in known(study)]
        values = [*(trial['value'] for trial in behind), *compared[0]['baselines'].values()]
        low, high = min(values), max(values)
        for axis, study in zip(row, compared, strict=True):
            colour = looks[study['study']].colour
            axis.plot([one['rate'] for one in behind], [one['value'] for one in behind], '.', color='0.8', ms=3)
            axis.plot(*zip(*medians(study), strict=True), color=colour, lw=1.2)
            for trial in known(study):
                face = colour if trial['state'] == 'done' else 'white'
                axis.plot(trial['rate'], trial['value'], 'o', color=colour, mfc=face, ms=4)
            axis.set_title(study['study'], color=colour, fontsize='small')
            scale(axis.xaxis, [trial['rate'] for trial in behind], power, least=2.0)
            dashed(axis, study['baselines'].values())
            axis.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
            axis.tick_params(labelsize='x-small', labelleft=axis is row[0])
        row[0].set_ylabel(f'{report}\n{compared[0]["metric"]}', fontsize='small')
    figure.supxlabel('learning rate', fontsize='small')
    return figure


def known(study):
    """The trials that have a value: those that did not fail."""
    return [trial for trial in study['trials'] if trial['value'] is not None]


def medians(study):
    """The median over seeds of every learning rate, in their order."""
    rates = sorted({trial['rate'] for trial in known(study)})
    return [(rate, statistics.median(one['value'] for one in known(study) if one['rate'] == rate)) for rate in rates]
