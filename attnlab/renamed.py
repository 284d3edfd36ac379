"""Names that saved configs may still hold, and what each is called now.

A work directory or a study names classes and functions by import path, and their arguments by name. When one moves, its
old path is listed here; when its arguments change, so is how those saved before are written now. What was made before
still loads.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

Fields = Mapping[str, Any]
"""A saved spec: its `target` and its arguments, specs inside them upgraded already and held as mappings."""

MODULES = MappingProxyType(
    {
        'attnlab.data.builders': 'attnlab.data.text.builders',
        'attnlab.data.long_range.source': 'attnlab.data.long_range.dataset',
        'attnlab.data.corpus': 'attnlab.data.text.corpus',
        'attnlab.data.stdlib': 'attnlab.data.text.stdlib',
        'attnlab.data.text': 'attnlab.data.text.text',
        'attnlab.data.tfds': 'attnlab.data.text.tfds',
        'attnlab.data.tokenizers': 'attnlab.data.text.tokenizers',
        'attnlab.data.windows': 'attnlab.data.text.windows',
        'attnlab.mixers.attention': 'attnlab.mixers.softmax.attention',
        'attnlab.mixers.convolution': 'attnlab.mixers.convolution.gated',
        'attnlab.mixers.diagonal': 'attnlab.mixers.recurrent.diagonal',
        'attnlab.mixers.differential': 'attnlab.mixers.softmax.differential',
        'attnlab.mixers.latent': 'attnlab.mixers.softmax.latent',
        'attnlab.mixers.linear_attention': 'attnlab.mixers.linear.attention',
        'attnlab.mixers.routed': 'attnlab.mixers.softmax.routed',
        'attnlab.mixers.selective': 'attnlab.mixers.state_space.selective',
        'attnlab.mixers.selective_attention': 'attnlab.mixers.softmax.selective',
        'attnlab.mixers.softmax_only': 'attnlab.blocks.softmax_only',
        'attnlab.mixers.third_order': 'attnlab.mixers.softmax.third_order',
        'attnlab.mixers.unified': 'attnlab.blocks.unified',
        'attnlab.models.block': 'attnlab.blocks.block',
        'attnlab.nn.embed': 'attnlab.models.inputs.embedding',
        'attnlab.nn.windows': 'attnlab.nn.series_windows',
    }
)
"""Modules that moved."""

OBJECTS: MappingProxyType[str, str] = MappingProxyType(
    {
        'attnlab.models.heads.ClassificationHead': 'attnlab.models.heads.classification.ClassificationHead',
        'attnlab.models.heads.LanguageHead': 'attnlab.models.heads.language.LanguageHead',
        'attnlab.models.heads.PairHead': 'attnlab.models.heads.pairs.PairHead',
        'attnlab.nn.series_windows.MovingAverage': 'attnlab.nn.series_windows.Trend',
    }
)
"""Classes and functions that were renamed or moved alone, by the path that they would have in `MODULES`."""


INITIALIZATION = 'attnlab.nn.initialization.Initialization'


def _stack(fields: Fields) -> Fields:
    """Once, all stacks had the plain residual and attnlab's own initialization."""
    usual = {'target': INITIALIZATION, 'linear': None, 'output': None, 'residual': None}
    return {'residual': {'target': 'attnlab.blocks.residual.Plain'}, 'initialization': usual, **fields}


def _block(fields: Fields) -> Fields:
    """Once, blocks had no preludes."""
    return {'mixer_prelude': None, 'mlp_prelude': None, **fields}


def _synthetic(fields: Fields) -> Fields:
    """Once, slices were only multiples of the training length and variants of the problem."""
    return {'extra': (), **fields}


def _linear_attention(fields: Fields) -> Fields:
    """Once, every write was additive, and there were as many keys as values, neither gated."""
    additive = {'target': 'attnlab.mixers.linear.write.Additive'}
    return {'values_per_key': 1, 'gates': None, 'joint_norm': None, 'write': additive, **fields}


def _implicit_quantiles(fields: Fields) -> Fields:
    """Once, no constant 1 was appended to the hidden state."""
    return {'constant': False, **fields}


def _quasi_random(fields: Fields) -> Fields:
    """Once, seeds were used in rotation, whatever the sequence."""
    return {'paired': False, **fields}


def _model(*, pool: Fields | None, streaming: bool) -> Callable[[Fields], Fields]:
    """The upgrade of a class that `Model` has replaced."""
    return lambda fields: {**fields, 'target': 'attnlab.models.model.Model', 'pool': pool, 'streaming': streaming}


SOFTMAX = 'pallas_kernels.attention.maps.softmax.Softmax'
SHAPED = 'attnlab.mixers.softmax.shaped.ShapedAttention'
PENALISED = 'attnlab.functional.penalty.Penalised'


def _two_way(fields: Fields) -> Fields:
    """Once, the convolutions of Vim were given by their width alone, not as a part."""
    if 'prelude' in fields:
        return fields
    fields = dict(fields)
    width = fields.pop('width', 4)
    return {**fields, 'prelude': {'target': 'attnlab.nn.preludes.ShortConv', 'width': width, 'bias': True}}


def _attention(fields: Fields) -> Fields:
    """`read` is a class of its own now, and `penalty` stands with the weights whose rows it is of."""
    fields = dict(fields)
    read, penalty = fields.pop('read', None), fields.pop('penalty', None)
    if penalty is not None:
        fields['weights'] = {'target': PENALISED, 'weights': fields['weights'], 'penalty': penalty}
    if read is None:
        return {'prelude': None, **fields}
    if [value for value in dict(fields['weights']).values() if value is not None] == [SOFTMAX]:
        del fields['weights']
    absent = ('shift', 'qk_norm', 'temperature', 'forget', 'sink', 'norm', 'gate')
    kept = {name: value for name, value in fields.items() if name not in absent or value is not None}
    return kept | {'target': SHAPED}


RUN = frozenset({'task', 'model', 'optimizer', 'evals'})
"""Some of the keys by which a run config is known."""

ADDITION = 'attnlab.tasks.addition.Addition'
LANGUAGE_HEAD = 'attnlab.models.heads.language.LanguageHead'
REGRESSION_HEAD = 'attnlab.models.heads.regression.RegressionHead'
PROJECTION = 'attnlab.models.inputs.embedding.Projection'
ERRORS = MappingProxyType(
    {
        'attnlab.tasks.long_range.Denoising': 'absolute',
        'attnlab.tasks.synthetic.InContextRegression': 'squared',
    }
)
"""What tasks once took of the predictions of a language head where inputs were numbers."""

UPGRADES: MappingProxyType[str, Callable[[Fields], Fields]] = MappingProxyType(
    {
        'attnlab.blocks.block.Block': _block,
        'attnlab.mixers.linear.attention.LinearAttention': _linear_attention,
        'attnlab.mixers.softmax.attention.Attention': _attention,
        'attnlab.mixers.state_space.two_sided.TwoWaySSM': _two_way,
        'attnlab.models.heads.distributional.ImplicitQuantiles': _implicit_quantiles,
        'attnlab.models.model.Classifier': _model(pool={'target': 'attnlab.nn.pools.MeanPool'}, streaming=False),
        'attnlab.models.model.Encoder': _model(pool=None, streaming=False),
        'attnlab.models.model.LanguageModel': _model(pool=None, streaming=True),
        'attnlab.models.stack.Stack': _stack,
        'attnlab.sweep.search.QuasiRandom': _quasi_random,
        'attnlab.tasks.synthetic.InContextRegression': _synthetic,
        'attnlab.tasks.synthetic.LabelPrediction': _synthetic,
    }
)
"""How specs saved with other arguments are written now, by today's path of their target.

An upgrade is also handed specs that need none, and returns those as they are.
"""


def current(path: str) -> str:
    """The import path of today for one that was saved at any time; a path that never changed is returned as it is."""
    module, _, name = path.rpartition('.')
    path = f'{MODULES.get(module, module)}.{name}'
    return OBJECTS.get(path, path)


def upgraded(fields: Fields) -> Fields:
    """The fields of a spec or a run config that was saved at any time, with the names and the arguments of today."""
    if isinstance(fields.get('target'), str):
        target = current(fields['target'])
        fields = {**fields, 'target': target}
        return UPGRADES[target](fields) if target in UPGRADES else fields
    return _with_loss_in_model(fields) if fields.keys() >= RUN else fields


def _with_loss_in_model(run: Fields) -> Fields:
    """A run config whose loss is its model's: once some tasks chose theirs."""
    task, model = dict(run['task']), dict(run['model'])
    if task['target'] == ADDITION and 'loss' in task:
        model['loss'] = task.pop('loss')
    targets = tuple(dict(model.get(name) or {}).get('target') for name in ('head', 'inputs'))
    if task['target'] in ERRORS and targets == (LANGUAGE_HEAD, PROJECTION):
        model['head'] = {'target': REGRESSION_HEAD, 'error': ERRORS[task['target']]}
    return {**run, 'task': task, 'model': model}
