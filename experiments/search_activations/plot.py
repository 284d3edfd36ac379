"""The loss of every trial by learning rate, and of the best of each study with fresh seeds."""

import numpy as np

from attnlab.compare.axes import power, scale, styles
from attnlab.experiment.results import panels


def figure(studies):
    """Trees are points and known nonlinearities lines; the best tree is named, and bars are means."""
    looks = styles([study['study'] for study in studies])
    figure, (trials, fresh) = panels(2, width=5.2, height=3.8)
    for place, study in enumerate(studies):
        colour = looks[study['study']].colour
        known = sorted((one['rate'], one['value']) for one in study['trials'] if one['value'] is not None)
        searched = study['study'] == 'searched'
        rates, values = zip(*known, strict=True)
        line = {'ls': '', 'marker': 'o', 'alpha': 0.5} if searched else {'marker': '.'}
        trials.plot(rates, values, color=colour, label=study['study'], **line)
        fresh.plot([place] * len(study['confirmed']), study['confirmed'], 'o', color=colour, alpha=0.5)
        fresh.plot(place, np.mean(study['confirmed']), '_', ms=24, color=colour)
        if searched:
            name, rate, value = best(study)
            trials.annotate(name, (rate, value), xytext=(0, -14), textcoords='offset points', ha='center', fontsize=7)
    scale(trials.xaxis, [one['rate'] for study in studies for one in study['trials']], power, least=2.0)
    trials.set(xlabel='learning rate', ylabel='loss of a trial, nats per byte')
    trials.margins(y=0.12)
    trials.legend(frameon=False, fontsize='small')
    fresh.set(ylabel='loss of the best with fresh seeds, nats per byte', xlim=(-0.6, len(studies) - 0.4))
    fresh.set_xticks(range(len(studies)), [study['study'] for study in studies])
    return figure


def best(study):
    """The tree, rate and loss of the best trial of the search."""
    found = [pair for pair in zip(study['trials'], study['settings'], strict=True) if pair[0]['value'] is not None]
    trial, settings = min(found, key=lambda pair: pair[0]['value'])
    return tree(settings), trial['rate'], trial['value']


def tree(settings):
    """What the settings of a trial make of x, such as `product(identity, sigmoid)`."""
    parts = {key.rpartition('.')[2]: value for key, value in settings.items()}
    return f'{parts["combine"]}({parts["first"]}, {parts["second"]})'
