"""`attnlab config`: what it prints is what can be overridden."""

import io
import json
import pathlib

import pytest
from absl import flags
from rich.console import Console

from attnlab.cli import main
from attnlab.config import TARGET, from_plain, plain
from attnlab.config_keys import arguments_of, groups, print_config
from attnlab.configuration import config_of, keys, read_config
from attnlab.tables import Printer
from attnlab.zoo import ZOO
from tests.chosen import FIRST_OF_ROOM, one_or_all


def entries(config):
    return [entry for group in groups(config, {}) for entry in group]


def overridden(config, *argv):
    return read_config(flags.FlagValues(), list(argv), 'config', from_plain(plain(config)))


@pytest.mark.parametrize('names', one_or_all(FIRST_OF_ROOM, 'room'))
def test_every_key_of_every_recipe_is_printed_and_can_be_overridden_by_what_is_printed(names):
    parts = {}
    for name in names:
        config = config_of(pathlib.Path(ZOO[name].config), f'zoo={name}')
        found = entries(config)
        groups_of_parts = {key for key in keys(config) if f'{key}[0]' in keys(config)}
        assert {e.key for e in found} == {k for k in keys(config) if not k.endswith(TARGET)} - groups_of_parts, name
        values = [f'--config.{entry.key}={entry.value}' for entry in found if entry.kind != 'part']
        assert overridden(config, *values) == config, name
        parts |= {(e.key, e.value): (config, e) for e in found if e.kind == 'part'}
    for config, entry in parts.values():
        changed = entries(overridden(config, f'--config.{entry.key}={entry.value}'))
        assert entry.value == next(other.value for other in changed if other.key == entry.key), entry


def test_types_and_docs_are_those_of_the_classes():
    found = {entry.key: entry for entry in entries(config_of(pathlib.Path('language'), 'zoo=gla'))}
    assert all(entry.doc for key, entry in found.items() if '.' not in key or entry.kind == 'part')
    large = entries(config_of(pathlib.Path('language'), 'size=350m'))
    assert all(entry.doc for entry in large if '.' not in entry.key)
    mixer = 'model.stack.blocks[0].mixer'
    assert found[f'{mixer}.scale'].kind == 'float or None' and 'factor of the queries' in found[f'{mixer}.scale'].doc
    assert found[f'{mixer}.prelude'].kind == 'part or None' and found['evals[0].tokens'].kind == 'int or None'
    # Of a base class.
    assert found['optimizer.peak_lr'].doc == 'the highest learning rate.'


def test_a_docstring_is_read_to_the_end_of_its_list():
    text = 'What it is.\n\nArgs:\n  a: one, or\n    more: lines.\n  b, c: both.\n\nRaises: nothing.\n  d: not this.'
    assert arguments_of(text) == {'a': 'one, or more: lines.', 'b': 'both.', 'c': 'both.'}


def test_the_command_prints_lines_for_grep_and_json(capsys):
    argv = ['config', '--config=language:zoo=gla', '--config.steps=7']
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert 'steps = 7  # int: training steps' in lines
    assert sum(line.startswith('model.stack.blocks[0].mixer = attnlab.mixers.linear.') for line in lines) == 1
    assert main([*argv, '--format=json']) == 0
    found = json.loads(capsys.readouterr().out)['config']
    assert {'key': 'steps', 'value': '7', 'kind': 'int', 'doc': 'training steps'} in found


@pytest.mark.parametrize(
    'name', ['sweeps/language', 'recall', 'long_range', 'grokking', 'images', 'series', 'separation', 'dynamics']
)
def test_other_configs_are_printed_too(name):
    file = io.StringIO()
    print_config(config_of(pathlib.Path(name)), Printer(Console(file=file)), {})
    assert 'seed' in file.getvalue()


def test_in_a_terminal_nothing_is_broken():
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, color_system=None)
    print_config(config_of(pathlib.Path('language')), Printer(console), {})
    lines = file.getvalue().splitlines()
    assert 'model.stack.blocks[0].mixer.position = attnlab.nn.positions.Rope' in lines
    assert all(len(line) <= 80 or len(line.split()) <= 3 for line in lines)
