"""Recall by difficulty and by state, parity by length, accuracy on every task."""

from attnlab.compare.axes import styles
from attnlab.compare.runs import COSTS, RunResult, by_task
from attnlab.compare.runs_table import baseline_lines, lines
from attnlab.experiment.results import panels

TASKS = ('mqar', 'induction', 'parity', 'listops', 'digits')
PAIRS = (2, 4, 8)


def figure(rows):
    """Four panels."""
    recipes = [row for row in rows if is_recipe(row)]
    names = list(dict.fromkeys(recipe(row) for row in recipes))
    looks = styles(names)
    figure, (pairs, states, lengths, tasks) = panels(2, rows=2, width=5.6, height=3.8)
    for row in recipes:
        label, accuracy = recipe(row), row['accuracy']
        if row['label'].startswith('mqar-'):
            found = [(count, accuracy[f'pairs={count}']) for count in PAIRS if f'pairs={count}' in accuracy]
            pairs.plot(*zip(*found, strict=True), ms=5, label=label, **look(looks[label]))
        if row['label'].startswith('parity-'):
            found = {int(name[:-1]): value for name, value in accuracy.items() if name.endswith('x')}
            lengths.plot(found.keys(), found.values(), ms=5, **look(looks[label]))
    for row in rows:
        if row['label'].startswith('mqar-'):
            style = look(looks[row['label'].split('-')[1]]) | {'fillstyle': 'full' if is_recipe(row) else 'none'}
            states.plot(row['entry']['state_bytes'], hardest(row), ms=6, **style)
    for place, task in enumerate(TASKS):
        group = [row for row in recipes if row['label'].startswith(f'{task}-')]
        for index, row in enumerate(group):
            x = place + 0.7 * ((index + 0.5) / len(group) - 0.5)
            tasks.plot(x, row['entry']['score'], ms=5, **look(looks[recipe(row)]))
        known = group[0]['entry']['baselines'].values()
        tasks.hlines(list(known), place - 0.4, place + 0.4, color='0.6', lw=1, ls='--')
    pairs.set(title='recall of key and value pairs', xlabel='pairs', ylabel='accuracy', xscale='log', ylim=(0, 1.03))
    pairs.set_xticks(PAIRS, map(str, PAIRS))
    pairs.minorticks_off()
    states.set(title='recall of the most pairs, by state', xlabel='bytes of state', xscale='log', ylim=(0, 1.03))
    lengths.set(title='parity', xlabel='times the length trained on', ylabel='accuracy', xscale='log', ylim=(0.4, 1.03))
    lengths.set_xticks((1, 2, 4, 8), ('1', '2', '4', '8'))
    lengths.minorticks_off()
    lengths.axhline(0.5, color='0.6', lw=1, ls='--')
    guessed = [1 / count for count in PAIRS]
    pairs.plot(PAIRS, guessed, color='0.6', lw=1, ls='--')
    pairs.annotate('dashed: any of the values shown', (PAIRS[0], guessed[1]), fontsize=8, color='0.4')
    states.axhline(guessed[-1], color='0.6', lw=1, ls='--')
    tasks.set(title='all tasks, at the length trained on', ylim=(0, 1.03))
    tasks.set_xticks(range(len(TASKS)), TASKS)
    figure.legend(*pairs.get_legend_handles_labels(), loc='outside lower center', ncols=4, frameon=False)
    return figure


def table(rows):
    """The table of `attnlab compare`, a line a run, the best of a task first."""
    results = [RunResult(**row['entry']) for row in rows]
    return [
        ['task', 'run', 'score', 'seeds', *COSTS.values()],
        *(
            [task, *line]
            for task, group in by_task(results).items()
            for line in (*lines(group), *baseline_lines(group))
        ),
    ]


def look(style):
    """A style, for `plot`."""
    return {'color': style.colour, 'marker': style.marker}


def recipe(row):
    """The mixer of a run."""
    return row['label'].partition('-')[2]


def is_recipe(row):
    """Whether a run has the state that its recipe has."""
    return row['label'].count('-') == 1


def hardest(row):
    """Accuracy on the examples with the most pairs."""
    return list(row['accuracy'].values())[-1]
