"""Overrides on the command line, and config files that are none."""

import pathlib
import re

import pytest
from absl import flags
from ml_collections import ConfigDict
from ml_collections.config_flags import config_path

from attnlab.config import TARGET, build
from attnlab.configuration import config_of, keys, read_config
from attnlab.errors import UserError
from attnlab.signature import members, parameters
from attnlab.train.setup import prepare
from attnlab.trust import named
from attnlab.zoo import ZOO
from tests.chosen import FIRST, one_or_all

CONFIGS = pathlib.Path(__file__).parents[1] / 'configs'
LANGUAGE = CONFIGS / 'language.py'
SAMPLES = {int: 3, float: 0.5, str: 'x', bool: True, tuple: (1, 2)}
"""A value of every type that an override can spell out."""


def read(*argv: str, config: object = LANGUAGE) -> ConfigDict:
    return read_config(flags.FlagValues(), [f'--config={config}', *argv], 'train')


def overridable(config: ConfigDict):
    """Every key that is a plain value or could be, with another value for it."""
    for key in keys(config):
        value = config_path.get_value(key, config)
        parent, _, name = key.rpartition('.')
        if name == TARGET:
            continue
        if type(value) in SAMPLES:
            if not (isinstance(value, tuple) and any(isinstance(item, ConfigDict) for item in value)):
                yield key, value if isinstance(value, tuple) else SAMPLES[type(value)]
        elif value is None and parent:
            taken = parameters(named(config_path.get_value(parent, config)[TARGET], key))[name]
            kinds = [kind for kind in members(taken.kind) if kind in SAMPLES]
            if kinds:
                yield key, SAMPLES[kinds[0]]


@pytest.mark.parametrize('names', one_or_all(FIRST, 'class'))
def test_every_plain_key_of_every_recipe_can_be_overridden(names):
    for name in names:
        file = CONFIGS / f'{ZOO[name].config}.py'
        asked = dict(overridable(config_of(file, f'zoo={name}')))
        config = read(*(f'--config.{key}={value}' for key, value in asked.items()), config=f'{file}:zoo={name}')
        found = {key: config_path.get_value(key, config) for key in asked}
        assert found == asked, name


def test_a_part_is_put_in_by_its_import_path_and_its_keys_set():
    mixer = '--config.model.stack.blocks[0].mixer'
    config = read(
        f'{mixer}.qk_norm=attnlab.nn.norms.HeadRMSNorm', f'{mixer}.qk_norm.eps=1e-3', f'{mixer}.position=None'
    )
    made = config.model.stack.blocks[0].mixer
    assert made.qk_norm.eps == 1e-3 and made.position is None
    assert build(config.model.stack.blocks[0].mixer.qk_norm).module.__name__ == 'HeadRMSNorm'


def test_an_optimizer_is_put_in_and_given_what_it_has_no_default_for():
    config = read('--config.optimizer=attnlab.train.optimizer.Lion', '--config.optimizer.peak_lr=1e-3')
    assert build(config.optimizer).peak_lr == 1e-3
    with pytest.raises(UserError, match=r"config.optimizer.peak_lr is 'high', of type str; it must be float"):
        read('--config.optimizer=attnlab.train.optimizer.Lion', '--config.optimizer.peak_lr=high')


@pytest.mark.parametrize(
    ('key', 'meant'),
    [
        ('lr', 'did you mean optimizer.peak_lr?'),
        ('optimizer.learning_rate', 'did you mean optimizer.peak_lr?'),
        ('optimizer.wd', 'did you mean optimizer.weight_decay?'),
        ('optimizer.warmup', 'did you mean optimizer.schedule.warmup?'),
        ('optimizer.betas', 'did you mean optimizer.b1 or optimizer.b2?'),
        ('optimzer.peak_lr', 'did you mean optimizer.peak_lr?'),
        ('optimizer.peaklr', 'did you mean optimizer.peak_lr?'),
        ('model.vocab', 'model has dim, head, inputs, norm, pool, positions, stack, streaming'),
        ('model.heads', r'did you mean model.stack.blocks\[0\].mixer.heads?'),
        ('model.stack.blocks[3].mixer.heads', r'did you mean model.stack.blocks\[0\].mixer.heads?'),
        ('data', 'did you mean task?'),
        ('stpes', 'did you mean steps?'),
        ('steps.first', 'it has accumulate, batch_size, '),
        ('nothing', 'it has accumulate, batch_size, '),
    ],
)
def test_a_key_that_is_not_there_is_answered_by_what_may_be_meant_or_by_what_is_there(key, meant):
    with pytest.raises(UserError, match=f'^the config has no key {re.escape(key)}; {meant.replace("?", "[?]$")}'):
        read(f'--config.{key}=1', config=f'{LANGUAGE}:zoo=mha')


def test_a_config_without_keys_says_so(tmp_path):
    (tmp_path / 'mine.py').write_text(
        'from ml_collections import ConfigDict\ndef get_config(arg):\n    return ConfigDict()'
    )
    with pytest.raises(UserError, match='the config has no key lr; it has no keys'):
        read('--config.lr=1', config=tmp_path / 'mine.py')


def test_optional_keys_of_a_run_are_left_out_by_none():
    config = read('--config.rows_at_once=None', config=f'{LANGUAGE}:size=125m')
    assert config.rows_at_once is None and prepare(config).rows_at_once is None


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('x = 1', r'has no function get_config\(arg\), so it is no config file'),
        ('def get_config(arg):\n    return {}', 'returned dict; it must be an ml_collections.ConfigDict'),
        ('def get_config(arg):\n    return 1 / 0', r'(?s)mine.py raised ZeroDivisionError:\n +File .*mine.py", line 2'),
        ('import nothing_such', r'mine.py raised ModuleNotFoundError'),
        ('def get_config(:', 'raised SyntaxError'),
    ],
)
def test_a_file_that_is_no_config_says_why(tmp_path, text, message):
    (tmp_path / 'mine.py').write_text(text)
    with pytest.raises(UserError, match=message) as raised:
        config_of(tmp_path / 'mine.py')
    assert 'attnlab/configuration.py' not in str(raised.value) and 'importlib' not in str(raised.value)


def test_a_traceback_has_the_lines_of_a_file_that_was_named_by_a_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'mine.py').write_text('def get_config(arg):\n    return 1 / 0')
    with pytest.raises(UserError, match=r'(?s)^mine.py raised ZeroDivisionError:\n +File .*mine.py", line 2'):
        config_of(pathlib.Path('mine.py'))


def test_a_config_is_given_once():
    with pytest.raises(UserError, match='--config is given 2 times'):
        read(f'--config={LANGUAGE}')


def test_a_config_that_comes_with_attnlab_is_found_by_name_and_a_file_of_ones_own_goes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert config_of(pathlib.Path('language'), 'zoo=gla') == config_of(LANGUAGE, 'zoo=gla')
    assert 'base' in config_of(pathlib.Path('sweeps/language'))
    with pytest.raises(UserError, match="there is no config file langage; did you mean 'language'"):
        config_of(pathlib.Path('langage'))
    (tmp_path / 'language.py').write_text(
        'from ml_collections import ConfigDict\n\ndef get_config(arg):\n    return ConfigDict({"own": arg})'
    )
    for name in ('language', 'language.py', './language'):
        assert config_of(pathlib.Path(name), 'x').own == 'x'
