"""Every command that prints tables: in 80 columns with every name whole, and in the formats that programs read."""

import json
import pathlib
import re

import jax
import pytest
from absl.flags import DEFINE_string, FlagValues

from attnlab import tables
from attnlab.cli import COMMANDS, main
from attnlab.commands import eval as evaluating
from attnlab.commands.arguments import lines
from attnlab.commands.completion import vocabulary
from attnlab.runs import loading

TINY = pathlib.Path(__file__).parents[1] / 'sweep' / 'tiny.py'
SMALL = (
    '--config.model.dim=8',
    '--config.model.stack.depth=2',
    '--config.length=16',
    '--config.batch_size=4',
)
TRAINING = (*SMALL, '--config.steps=2', '--config.evals[0].tokens=64', '--compilation_cache=')

WALKED = {
    'zoo': ('zoo',),
    'zoo NAME': ('zoo', 'griffin'),
    'zoo --heads': ('zoo', '--heads'),
    'config': ('config', '--config=language:zoo=mamba2'),
    'data list': ('data', 'list'),
    'show': ('show', 'RUN'),
    'compare': ('compare', 'RUN', '--out=OUT'),
    'train': ('train', '--config=language:zoo=gla', *SMALL, '--dry_run', '--compilation_cache='),
    'sweep': ('sweep', f'--config={TINY}', '--dry_run', '--compilation_cache='),
    'eval': ('eval', '--workdir=RUN', '--tokens=64', '--multiples=1,2', '--compilation_cache='),
    'analyse': ('analyse', '--workdir=RUN', '--rows=1', '--bits=8', '--compilation_cache='),
    'quantize': ('quantize', '--workdir=RUN', '--weights=int4', '--out=OUT/few', '--compilation_cache='),
    'edit': (
        'edit',
        '--workdir=RUN',
        '--prompt=de',
        '--answer=f',
        '--layer=0',
        '--rows=2',
        '--out=OUT/edited',
        '--compilation_cache=',
    ),
    'uncertainty': ('uncertainty', '--workdir=RUN', '--rows=4', '--fitted_rows=2', '--compilation_cache='),
    'match': ('match', '--config=language', '--target=sliding_window', '--recipes=sliding_window', '--out=OUT'),
}
"""A line of each command; RUN and OUT are folders."""

ELSEWHERE = {
    'sweep status': 'tests/sweep/test_study.py',
    'data prepare': 'needs the extra tfds: tests/data/long_range',
    'report': 'tests/compare/report',
}
"""Commands whose tables other tests walk."""


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp('runs') / 'a_run_with_a_name_that_is_rather_long'
    assert main(['train', '--config=language', *TRAINING, f'--workdir={folder}']) == 0
    return folder


def line_of(words, run, out):
    return [word.replace('RUN', str(run)).replace('OUT', str(out)) for word in words]


def test_every_command_with_tables_is_walked():
    known = vocabulary(COMMANDS)
    with_tables = {path for path, words in known.words.items() if '--format=' in words}
    assert with_tables - {'data'} == {*WALKED, *ELSEWHERE} - {'zoo NAME', 'zoo --heads'}


@pytest.mark.parametrize('name', WALKED)
def test_in_80_columns_no_line_is_longer_and_no_name_is_broken(name, run, tmp_path, monkeypatch, capsys):
    shown = []
    whole = tables.Printer.table
    monkeypatch.setattr(tables.Printer, 'table', lambda self, table: (shown.append(table), whole(self, table))[1])
    monkeypatch.setenv('COLUMNS', '80')
    monkeypatch.setenv('FORCE_COLOR', '1')
    assert main(line_of(WALKED[name], run, tmp_path)) == 0
    text = re.sub(r'\x1b\[[\d;]*m', '', capsys.readouterr().out)
    words = set(text.split())
    assert all(len(line) <= 80 for line in text.splitlines() if len(line.split()) > 3), text
    for table in shown:
        named = next(index for index, column in enumerate(table.columns) if not column.rank)
        assert {word for row in table.text() for word in row[named].split()} <= words, text
    assert shown or name == 'config'


@pytest.mark.parametrize('name', sorted(WALKED.keys() - {'analyse', 'match', 'train'}))
def test_json_is_one_object_of_tables(name, run, tmp_path, capsys):
    assert main([*line_of(WALKED[name], run, tmp_path), '--format=json']) == 0
    found = json.loads(capsys.readouterr().out)
    assert found and all(isinstance(record, dict) for records in found.values() for record in records)
    if name == 'eval':
        value = found['evaluation'][0]['nats/token']
        assert (
            value != round(value, 4) and json.loads((run / 'evals' / '2-64-tokens.json').read_text())['loss'] == value
        )


@pytest.mark.parametrize('process', [0, 1])
def test_of_several_processes_that_evaluate_the_first_prints(process, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(jax, 'process_index', lambda: process)
    monkeypatch.setattr(evaluating, 'start_devices', lambda values: None)
    monkeypatch.setattr(evaluating, '_evaluate', lambda *_: None)
    monkeypatch.setattr(loading, 'load_run', lambda *_, **__: None)
    assert main(['eval', f'--workdir={tmp_path}', '--format=json']) == 0
    assert capsys.readouterr().out == ('' if process else '{}\n')


def test_texts_of_a_file_are_its_lines_and_no_other_pieces(tmp_path):
    values, path = FlagValues(), tmp_path / 'prompts.txt'
    DEFINE_string('prompts', str(path), '', flag_values=values)
    values.mark_as_parsed()
    path.write_text('a\x0cb\x1cc\u2028d\n\ne\x85f\n')
    assert lines(values, 'prompts') == ('a\x0cb\x1cc\u2028d', 'e\x85f')


def test_show_begins_with_the_results(run, capsys):
    assert main(['show', str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == '# last of each metric' and any(line.startswith('valid/loss\t') for line in lines[1:4])


def test_formats_that_are_none_and_formats_of_what_is_no_table_are_refused(capsys):
    assert main(['zoo', '--format=xml']) == 2
    assert 'plain|json|csv|markdown' in capsys.readouterr().err
    assert main(['train', '--config=language', '--format=json', '--workdir=nowhere']) == 2
    assert '--format is for tables' in capsys.readouterr().err
