"""Scores with their errors beside what trivial predictors reach; recall by bytes of state; values by learning rate."""

from attnlab.compare.axes import power, scale, short, styles
from attnlab.experiment.results import legend_beside, named_parts, panels


def figure(studies):
    """A row of scores of the confirmed rate, a panel a task, recall over bytes of state; below, every trial's value."""
    tasks = list(dict.fromkeys(study['report'] for study in studies))
    looks = styles(list(dict.fromkeys(mixer(study) for study in studies)))
    figure, axes = panels(len(tasks), rows=2, width=4.8, height=3.6)
    for place, task in enumerate(tasks):
        group = [study for study in studies if study['report'] == task]
        scores, rates = axes[place], axes[len(tasks) + place]
        for index, study in enumerate(group):
            at = study['costs']['state_bytes'] if task == 'recall' else index
            draw_score(scores, at, study, looks)
            draw_rates(rates, study, looks)
        for axis in (scores, rates):
            draw_baselines(axis, group[0]['baselines'])
            axis.set_ylim(0, 1.03)
        scale(rates.xaxis, [trial['rate'] for study in group for trial in study['trials']], power, least=2.0)
        scores.set(title=task, ylabel=group[0]['metric'])
        rates.set(xlabel='learning rate')
        if task == 'recall':
            scale(scores.xaxis, [study['costs']['state_bytes'] for study in group], short, least=2.0)
            scores.set(xlabel='bytes of state')
        else:
            scores.set_xticks(range(len(group)), [study['study'].replace('_', '\n') for study in group], fontsize=6)
    legend_beside(figure, axes[len(tasks)], loc='outside lower center', ncols=4)
    return figure


def draw_score(axis, at, study, looks):
    """The confirmed score with its error; hollow where the state is smaller than the recipe's own."""
    found = study['statistics'].get('confirmed', study['statistics']['best'])
    look = looks[mixer(study)]
    face = look.colour if mixer(study) == study['study'] else 'white'
    axis.plot(at, found['mean'], look.marker, color=look.colour, mfc=face, ms=5)
    if found['low'] is not None:
        axis.vlines(at, found['low'], found['high'], color=look.colour, lw=1)


def draw_rates(axis, study, looks):
    """The value of every trial, of recipes with their own state."""
    if mixer(study) == study['study']:
        known = sorted((trial['rate'], trial['value']) for trial in study['trials'] if trial['value'] is not None)
        look = looks[mixer(study)]
        axis.plot(*zip(*known, strict=True), color=look.colour, marker=look.marker, ms=4, lw=1, label=study['study'])


def draw_baselines(axis, baselines):
    """Dashed lines at what predictors reach that need no training; one label for lines that are close."""
    labels = {}
    for name, value in sorted(baselines.items(), key=lambda item: item[1]):
        axis.axhline(value, color='0.6', lw=1, ls='--')
        close = next((at for at in labels if value - at < 0.04), value)
        labels.setdefault(close, []).append(name)
    for value, names in labels.items():
        place = {'xy': (1, value), 'xycoords': ('axes fraction', 'data'), 'ha': 'right', 'va': 'bottom'}
        axis.annotate(', '.join(names), fontsize=6, **place)


def mixer(study):
    """The recipe of a study."""
    return named_parts(study)[0]
