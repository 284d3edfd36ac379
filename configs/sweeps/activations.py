"""A search for the nonlinearity of the channel mixer, as a small tree of functions, on a language model.

    attnlab sweep --config=sweeps/activations:trials=64 --study=studies/activations

Every trial is a run of `configs/language.py` with `mlp=plain` and the nonlinearity `b(u_1(x), u_2(x))`, where `b` and
`u` are functions of `attnlab.nn.core_units`; with `units=2`, a second such unit reads the output of the first. `search`
is `tpe` (the default) or `random`; `zoo`, `size` and `data` are as in `configs/language.py`. The best tree is run again
with three new seeds, on the same text that it was chosen on. Ramachandran, Zoph and Le 2017,
https://arxiv.org/abs/1710.05941.
"""

import pathlib

from ml_collections import ConfigDict

from attnlab.config import arguments, choose, spec, spec_of, whole
from attnlab.configuration import config_of
from attnlab.errors import UserError
from attnlab.nn.core_units import BINARY, UNARY, CoreUnit
from attnlab.sweep.search import Asha, RandomSearch, Tpe
from attnlab.sweep.space import Choice
from attnlab.sweep.sweep import sweep_config

LANGUAGE = pathlib.Path(__file__).parents[1] / 'language.py'
SEARCHES = {'tpe': Tpe, 'random': RandomSearch}
UNITS = {'1': CoreUnit(), '2': CoreUnit(inner=CoreUnit())}
PLACES = {'combine': tuple(BINARY), 'first': tuple(UNARY), 'second': tuple(UNARY)}


def get_config(arg: str = '') -> ConfigDict:
    """The config for `search=,units=,trials=` and for `zoo=,size=,data=` of `configs/language.py`."""
    chosen = arguments(arg, search='tpe', units='1', trials='64', zoo='mha', size='tiny', data='stdlib')
    unit = choose(UNITS, 'units', chosen['units'])
    base = config_of(LANGUAGE, ','.join(f'{name}={chosen[name]}' for name in ('zoo', 'size', 'data')) + ',mlp=plain')
    blocks = base.model.stack.blocks
    if len(blocks) > 1:
        raise UserError(
            f'zoo={chosen["zoo"]} has {len(blocks)} kinds of layers; one unit is searched: choose one of one kind'
        )
    with base.unlocked():
        for block in blocks:
            with block.mlp.ignore_type():
                block.mlp.activation = spec_of(unit)
    prefixes = {'': '', 'inner_': 'inner.'} if unit.inner is not None else {'': ''}
    space = {
        f'{prefix}{place}': spec(Choice, key=f'model.stack.blocks[0].mlp.activation.{path}{place}', values=values)
        for prefix, path in prefixes.items()
        for place, values in PLACES.items()
    }
    return sweep_config(
        base,
        space,
        sampler=spec(choose(SEARCHES, 'search', chosen['search'])),
        pruner=spec(Asha, first=base.evals[0].cadence.n),
        trials=whole('trials', chosen['trials']),
        seeds=(0,),
        metric='valid/loss',
        confirm=3,
    )
