"""Configs that were saved before classes and arguments moved are today's."""

import json

import pytest

from attnlab.config import build, from_plain, plain
from attnlab.errors import UserError
from attnlab.models.heads.registry import REGRESSORS
from attnlab.signature import parameters
from attnlab.train.run import differences
from attnlab.trust import named
from attnlab.zoo import ZOO
from configs.grokking import get_config as grokking
from configs.language import get_config as language
from configs.long_range import get_config as long_range
from configs.recall import get_config as recall
from configs.series import get_config as series

MODEL = 'attnlab.models.model.'
HEADS = 'attnlab.models.heads.'


def one_model(name, head):
    """How a model was saved when there were three classes of them, and heads in one file."""

    def saved(run):
        del run['model']['pool'], run['model']['streaming']
        run['model'] |= {'target': MODEL + name, 'head': {**run['model']['head'], 'target': HEADS + head}}
        run['model']['head'].pop('error', None)
        return run

    return saved


def loss_in_task(run):
    """How a loss was saved when tasks chose it."""
    run['task']['loss'] = run['model'].pop('loss')
    return run


def series_windows(run):
    """How parts of forecasters were saved when the trend was called by how it is found, in a module of windows."""
    text = json.dumps(run).replace('attnlab.nn.series_windows.Trend', 'attnlab.nn.windows.MovingAverage')
    return json.loads(text.replace('attnlab.nn.series_windows', 'attnlab.nn.windows'))


def tied(run):
    """A head tied to the embedding was, and is, none."""
    run = one_model('Encoder', 'LanguageHead')(run)
    run['model']['head'] = None
    return run


def test_a_tied_head_stays_tied():
    config = long_range('task=listops,size=smoke,protocol=pretrain')
    assert from_plain(tied(plain(config))).model.head is None


@pytest.mark.parametrize(
    ('config', 'saved'),
    [
        (language('zoo=mha'), one_model('LanguageModel', 'LanguageHead')),
        (recall('task=mqar,zoo=mha'), one_model('LanguageModel', 'LanguageHead')),
        (recall('task=regression,zoo=mha'), one_model('LanguageModel', 'LanguageHead')),
        (long_range('task=digits,size=smoke,protocol=pretrain'), one_model('Encoder', 'LanguageHead')),
        (long_range('task=digits,size=smoke'), one_model('Classifier', 'ClassificationHead')),
        (long_range('task=aan'), one_model('Classifier', 'PairHead')),
        (grokking('method=stablemax'), loss_in_task),
        (series('system=dlinear'), series_windows),
        (series('system=rlinear'), series_windows),
    ],
)
def test_what_was_saved_is_what_would_be_saved_now(config, saved):
    before = saved(plain(config))
    assert before != plain(config)
    assert plain(from_plain(before)) == plain(config)


def lacking(value):
    """Every argument that has a default of today's, taken away."""
    if isinstance(value, list):
        return [lacking(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {name: lacking(item) for name, item in value.items()}
    if 'target' not in value:
        return kept
    defaults = {name: item.default for name, item in parameters(named(value['target'], 'target')).items()}
    return {name: item for name, item in kept.items() if name not in defaults or value[name] != defaults[name]}


@pytest.mark.parametrize('config', [language('zoo=gla'), recall('task=mqar,zoo=griffin'), grokking('size=tiny')])
def test_arguments_that_classes_have_gained_have_their_defaults(config):
    before = lacking(plain(config))
    assert before != plain(config)
    assert plain(from_plain(before)) == plain(config)
    assert differences(from_plain(before), config) == []


def test_what_cannot_be_imported_is_left_for_build_to_name():
    assert plain(from_plain({'target': 'attnlab.nothing.Such'})) == {'target': 'attnlab.nothing.Such'}
    assert plain(from_plain({'target': 'os.system'})) == {'target': 'os.system'}


SOFTMAX = {'target': 'pallas_kernels.attention.maps.softmax.Softmax', 'soft_cap': None}
RELU = {'target': 'pallas_kernels.attention.maps.pointwise.Relu', 'soft_cap': None}
PENALTY = {'target': 'attnlab.nn.penalties.RowPenalty', 'normalisation': 1.0, 'flatness': 1.0, 'margin': 0.7}
ROPE = {'target': 'attnlab.nn.positions.Rope', 'base': 10000.0, 'fraction': 1.0, 'interleaved': False}
ATTENTION = {
    **dict.fromkeys(('kv_heads', 'key_dim', 'value_dim', 'shift', 'qk_norm', 'temperature', 'forget', 'sink')),
    **dict.fromkeys(('window', 'read', 'norm', 'gate', 'penalty', 'implementation')),
    'target': 'attnlab.mixers.attention.Attention',
    'position': ROPE,
    'weights': SOFTMAX,
    'sinks': 0,
    'bias': False,
    'causal': True,
}
"""What `plain(spec(Attention, position=Rope()))` was when `read` and `penalty` were arguments of it."""

READ = {'target': 'attnlab.nn.reads.ShapedRead'}
TEMPERATURE = {'target': 'attnlab.nn.temperatures.RootLength'}


@pytest.mark.parametrize(
    ('recipe', 'saved'),
    [
        ('mha', ATTENTION),
        ('shaped_attention', ATTENTION | {'read': READ}),
        ('reluformer', ATTENTION | {'weights': RELU, 'temperature': TEMPERATURE, 'penalty': PENALTY}),
    ],
)
def test_attention_with_a_read_or_a_penalty(recipe: str, saved: dict):
    assert plain(from_plain(saved)) == plain(ZOO[recipe].spec)
    assert plain(from_plain(plain(ZOO[recipe].spec))) == plain(ZOO[recipe].spec)


def test_what_a_class_of_today_does_not_take_is_named():
    gate = {'target': 'attnlab.nn.gates.HeadGate', 'start': 0.25}
    with pytest.raises(UserError, match="takes no argument 'gate'"):
        build(from_plain(ATTENTION | {'read': READ, 'gate': gate}))


@pytest.mark.parametrize('width', [{}, {'width': 4}])
def test_vim_whose_convolutions_had_only_a_width(width):
    today = plain(ZOO['vim'].spec)
    saved = {name: value for name, value in today.items() if name != 'prelude'} | width
    assert plain(from_plain(saved)) == today
    assert from_plain(saved | {'width': 3}).prelude.width == 3


def test_implicit_quantiles_before_a_one_stood_beside_the_hidden_state():
    today = plain(REGRESSORS['iqn'].spec)
    assert today['constant'] and plain(from_plain(today)) == today
    saved = {name: value for name, value in today.items() if name != 'constant'} | {'kappa': 1.0}
    assert plain(from_plain(saved)) == today | {'constant': False, 'kappa': 1.0}


@pytest.mark.parametrize('recipe', ['linear_transformer', 'retnet', 'gla'])
def test_linear_attention_before_it_had_a_write_rule(recipe: str):
    today = plain(ZOO[recipe].spec)
    saved = {
        name: value for name, value in today.items() if name not in ('gates', 'joint_norm', 'write', 'values_per_key')
    }
    assert plain(from_plain(saved | {'target': 'attnlab.mixers.linear_attention.LinearAttention'})) == today
