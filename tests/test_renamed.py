"""Configs that were saved before classes and arguments moved are today's."""

import pytest

from attnlab.config import from_plain, plain
from configs.grokking import get_config as grokking
from configs.language import get_config as language
from configs.long_range import get_config as long_range
from configs.recall import get_config as recall

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
    ],
)
def test_what_was_saved_is_what_would_be_saved_now(config, saved):
    before = saved(plain(config))
    assert before != plain(config)
    assert plain(from_plain(before)) == plain(config)
