"""Learning rate and weight decay of language modelling, for any mixer and size of `configs/language.py`.

    attnlab sweep --config=configs/sweeps/language.py:zoo=gla,size=tiny --study=studies/gla

    attnlab match --config=configs/language.py:size=tiny --target=mha --recipes=gla,mamba2,mha --out=matched
    attnlab sweep --config=configs/sweeps/language.py:base=matched/gla.py --study=studies/gla

The same file for another mixer makes the same points, seeds and number of runs, so that both had the same chance.
`search` is `quasi`, `random`, `tpe` or `grid`. Runs that are behind are given up by successive halving, but in a grid.
"""

import pathlib

from ml_collections import ConfigDict

from attnlab.config import arguments, choose, spec
from attnlab.configuration import config_of
from attnlab.sweep.search import Asha, GridSearch, QuasiRandom, RandomSearch, Tpe
from attnlab.sweep.space import Grid, LogUniform
from attnlab.sweep.sweep import sweep_config

BASE = pathlib.Path(__file__).parents[1] / 'language.py'
RATES = (3e-4, 1e-3, 3e-3, 1e-2)
SEARCHES = {'quasi': QuasiRandom, 'random': RandomSearch, 'tpe': Tpe, 'grid': GridSearch}


def get_config(arg: str = '') -> ConfigDict:
    """The config of `search=...,trials=...`, and of `base=FILE.py` or the arguments of `configs/language.py`."""
    chosen = arguments(arg, search='quasi', trials='16', base='', zoo='mha', size='tiny', data='stdlib', tokens='bytes')
    search, trials, path = chosen.pop('search'), int(chosen.pop('trials')), chosen.pop('base')
    asked = ','.join(f'{name}={value}' for name, value in chosen.items())
    base = config_of(pathlib.Path(path)) if path else config_of(BASE, asked)
    sampler = choose(SEARCHES, 'search', search)
    if sampler is GridSearch:
        space = {'rate': spec(Grid, key='optimizer.peak_lr', values=RATES)}
        return sweep_config(base, space, sampler=spec(sampler), seeds=(0, 1, 2), metric='valid/loss')
    space = {
        'rate': spec(LogUniform, key='optimizer.peak_lr', low=3e-4, high=1e-2),
        'decay': spec(LogUniform, key='optimizer.weight_decay', low=1e-2, high=1.0),
    }
    return sweep_config(
        base,
        space,
        sampler=spec(sampler),
        pruner=spec(Asha, first=base.evals[0].cadence.n),
        trials=trials,
        seeds=(0, 1, 2),
        metric='valid/loss',
    )
