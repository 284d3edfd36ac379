"""A sweep of runs that take a second: what `get_config` of a file in `configs/sweeps` looks like."""

import pathlib

from ml_collections import ConfigDict

from attnlab.config import arguments, spec
from attnlab.configuration import config_of
from attnlab.evals.cadence import EveryNSteps
from attnlab.evals.held_out import HeldOut
from attnlab.sweep.search import Asha, GridSearch, QuasiRandom, RandomSearch, Tpe
from attnlab.sweep.space import Choice, Grid, LogUniform
from attnlab.sweep.sweep import sweep_config
from attnlab.testing.sources import Markov
from attnlab.train.report import Reporting
from attnlab.train.setup import Saving

LANGUAGE = pathlib.Path(__file__).parents[2] / 'configs' / 'language.py'
SAMPLERS = {'random': RandomSearch, 'quasi': QuasiRandom, 'tpe': Tpe, 'grid': GridSearch}


def base(steps: int = 24) -> ConfigDict:
    """A run of a second."""
    config = config_of(LANGUAGE, 'zoo=mingru')
    with config.unlocked():
        config.model.dim = 8
        config.model.stack.depth = 1
        config.length = 16
        config.batch_size = 4
        config.steps = steps
        config.task.text = spec(Markov)
        config.evals = (spec(HeldOut, cadence=spec(EveryNSteps, n=steps // 4), tokens=64),)
        config.checkpoint = spec(Saving, every=steps // 4)
        config.report = spec(Reporting, every=2, tensorboard=False)
    return config


def get_config(arg: str = '') -> ConfigDict:
    """The config of `sampler=...,startup=...,trials=...,steps=...,pruner=...,confirm=...`."""
    chosen = arguments(arg, sampler='random', trials='4', steps='24', pruner='', confirm='0', high='1e-2', startup='10')
    steps, grid = int(chosen['steps']), chosen['sampler'] == 'grid'
    estimated = {'startup': int(chosen['startup'])} if chosen['sampler'] == 'tpe' else {}
    rate = spec(Grid, key='optimizer.peak_lr', values=(1e-3, 1e-2))
    if not grid:
        rate = spec(LogUniform, key='optimizer.peak_lr', low=1e-3, high=float(chosen['high']))
    return sweep_config(
        base(steps),
        {'rate': rate, 'decay': spec(Choice, key='optimizer.weight_decay', values=(0.0, 0.1))},
        sampler=spec(SAMPLERS[chosen['sampler']], **estimated),
        pruner=spec(Asha, first=steps // 4, reduction=2) if chosen['pruner'] else None,
        trials=None if grid else int(chosen['trials']),
        seeds=(0, 1),
        metric='valid/loss',
        confirm=int(chosen['confirm']),
    )
