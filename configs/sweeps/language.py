"""Learning rate and weight decay for language modelling, for any mixer and size of `configs/language.py`.

    attnlab sweep --config=sweeps/language:zoo=gla,size=tiny --study=studies/gla

    attnlab match --config=language:size=tiny --target=mha --recipes=gla,mamba2,mha --out=matched
    attnlab sweep --config=sweeps/language:base=matched/gla.py --study=studies/gla

So that comparisons are fair, every mixer is tried at the same points, with the same seeds and as many runs. The
exception is `search=tpe`, whose points after the first ten depend on the scores of each mixer; there the search space
is the same. The text that chooses the best point is also the one that is reported; only the seeds of the runs that
confirm it are new. For each optimiser, including that of a `base`, the ranges are multiplied by its factors in
`attnlab.run_config.OPTIMIZERS`. `search` is `quasi`, `random`, `tpe` or `grid`. `pruner` stops poor runs early: `asha`,
`hyperband` or `none`; a grid stops no run.
"""

import pathlib

from ml_collections import ConfigDict

from attnlab.config import arguments, choose, spec, whole
from attnlab.configuration import config_of
from attnlab.errors import UserError
from attnlab.run_config import CHOICES, choice_of, moved
from attnlab.sweep.search import Asha, GridSearch, Hyperband, Pruner, QuasiRandom, RandomSearch, Tpe
from attnlab.sweep.space import Grid, LogUniform
from attnlab.sweep.sweep import sweep_config

LANGUAGE = pathlib.Path(__file__).parents[1] / 'language.py'
RATES = (3e-4, 1e-3, 3e-3, 1e-2)
SEARCHES = {'quasi': QuasiRandom, 'random': RandomSearch, 'tpe': Tpe, 'grid': GridSearch}
PRUNERS: dict[str, type[Pruner] | None] = {'asha': Asha, 'hyperband': Hyperband, 'none': None}


def get_config(arg: str = '') -> ConfigDict:
    """The config for `search=,pruner=,trials=`, and for `base=FILE.py` or the arguments of `configs/language.py`."""
    data = {'data': 'stdlib', 'tokens': 'bytes'}
    defaults = {'zoo': 'mha', 'size': 'tiny', **data, 'residual': 'plain', 'init': 'framework', **CHOICES}
    chosen = arguments(arg, search='quasi', pruner='', trials='16', base='', **defaults)
    base = _base(chosen['base'], {name: chosen[name] for name in defaults}, defaults)
    sampler = choose(SEARCHES, 'search', chosen['search'])
    if sampler is GridSearch:
        if choose(PRUNERS, 'pruner', chosen['pruner'] or 'none') is not None:
            raise UserError(
                f'search=grid runs every point to its end; pruner={chosen["pruner"]} is for the other searches'
            )
        space = {'rate': spec(Grid, key='optimizer.peak_lr', values=moved(RATES, base.optimizer))}
        return sweep_config(base, space, sampler=spec(sampler), seeds=(0, 1, 2), metric='valid/loss')
    pruner = choose(PRUNERS, 'pruner', chosen['pruner'] or 'asha')
    usual = choice_of(base.optimizer)
    space = {
        'rate': _range('optimizer.peak_lr', 3e-4, 1e-2, usual.peak_lr),
        'decay': _range('optimizer.weight_decay', 1e-2, 1.0, usual.weight_decay),
    }
    return sweep_config(
        base,
        space,
        sampler=spec(sampler),
        pruner=None if pruner is None else spec(pruner, first=base.evals[0].cadence.n),
        trials=whole('trials', chosen['trials']),
        seeds=(0, 1, 2),
        metric='valid/loss',
    )


def _base(path: str, asked: dict[str, str], defaults: dict[str, str]) -> ConfigDict:
    """The config of one run, from a file or from `configs/language.py` with these arguments."""
    if not path:
        return config_of(LANGUAGE, ','.join(f'{name}={value}' for name, value in asked.items()))
    given = [name for name in asked if asked[name] != defaults[name]]
    if given:
        raise UserError(f'base={path} is a whole config, so {given[0]}={asked[given[0]]} does not apply')
    return config_of(pathlib.Path(path))


def _range(key: str, low: float, high: float, factor: float) -> ConfigDict:
    return spec(LogUniform, key=key, low=low * factor, high=high * factor)
