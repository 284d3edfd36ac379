"""Tables in a terminal of any width, and in the formats that programs read."""

import csv
import io
import json
import pathlib
import re

import pytest
from rich.console import Console

from attnlab import tables
from attnlab.tables import Column, Interval, Printer, Table, digits, in_bytes, pairs, rendered

COLUMNS = (
    Column('recipe'),
    Column('class', prose=True),
    Column('paper', rank=2),
    Column('a large size', digits(',.0f'), right=True, rank=1),
    Column('loss', lambda one: f'{one.value:.2f} ± {one.high - one.value:.2f}', right=True),
)
ROWS = [
    ('sliding_window', 'SlidingWindowAttention, Attention', 'A. Uthor 2024', 2_101_252.25, Interval(1 / 3, 0.25, 0.5)),
    ('mha', 'Attention', 'B. | C.\n2017', None, Interval(float('nan'), None, float('inf'))),
]
TABLE = Table('recipes', COLUMNS, ROWS, 'all of them')


def printed(form, *tables, width=80, terminal=False):
    file = io.StringIO()
    printer = Printer(Console(file=file, width=width, force_terminal=terminal, color_system=None), form)
    for table in tables:
        printer.table(table)
    printer.line('said')
    printer.close()
    return file.getvalue()


@pytest.mark.parametrize('width', [40, 60, 80, 100, 200])
def test_a_table_fits_the_terminal_and_keeps_names_and_numbers_whole(width):
    text = rendered(TABLE, width).plain
    words = text.split()
    assert max(map(len, text.splitlines())) <= width or width == 40
    assert {'sliding_window', 'SlidingWindowAttention,', 'mha', '0.33'} <= set(words)
    assert ('2,101,252' in words) == ('too narrow for' not in text or 'a large size' not in text.split('for:')[1])


def test_columns_are_left_out_by_rank_and_that_is_said():
    wide, middle, narrow = (rendered(TABLE, width).plain for width in (120, 70, 58))
    assert 'too narrow' not in wide
    assert 'too narrow for: paper; --format=plain has all' in middle and '2,101,252' in middle
    assert 'too narrow for: paper, a large size;' in narrow and '2,101,252' not in narrow


def test_a_value_too_long_for_its_place_stands_below_its_name_in_one_piece():
    target, path = 'attnlab.mixers.softmax.attention.Attention', f'runs/{"x" * 90}'
    table = pairs('config', {'model.stack.blocks[0].mixer.feature_map.target': target, 'steps': 600, 'path': path})
    lines = rendered(table, 80).plain.splitlines()
    assert f'    {target}' in lines and f'    {path}' in lines
    assert next(line for line in lines if line.startswith('steps')).split() == ['steps', '600']


def test_plain_lines_have_tabs_and_nothing_else_between_cells():
    lines = printed('plain', TABLE).splitlines()
    assert lines[0] == '# all of them' and lines[1].split('\t') == [column.name for column in COLUMNS]
    assert lines[2].split('\t')[:4] == [*ROWS[0][:3], '2,101,252'] and lines[3].split('\t')[2] == 'B. | C. 2017'
    assert printed(None, TABLE) == printed('plain', TABLE)
    assert '\t' not in printed(None, TABLE, terminal=True)


def test_json_has_every_digit_of_every_table_and_nothing_else(capsys):
    found = json.loads(printed('json', TABLE, Table('empty', COLUMNS, [])))
    assert found.keys() == {'recipes', 'empty'} and found['empty'] == []
    first, second = found['recipes']
    assert first['a large size'] == ROWS[0][3] and first['loss'] == 1 / 3 and first['loss high'] == 0.5
    assert second['a large size'] is None and second['loss'] == 'nan' and second['loss low'] is None
    assert 'said' in capsys.readouterr().err


def test_csv_has_every_digit():
    rows = list(csv.DictReader(io.StringIO(printed('csv', TABLE))))
    assert [row['recipe'] for row in rows] == ['sliding_window', 'mha'] and float(rows[0]['loss']) == 1 / 3
    assert rows[1]['paper'] == 'B. | C.\n2017' and rows[1]['a large size'] == ''


def test_markdown_is_a_table_of_as_many_cells_a_row():
    lines = printed('markdown', TABLE).splitlines()
    rows = [line.replace('\\|', '') for line in lines if line.startswith('|')]
    assert len(rows) == 4 and {row.count('|') for row in rows} == {len(COLUMNS) + 1}


def test_consoles_are_made_in_one_place():
    """Rich takes brackets for markup unless it is told not to."""
    package = pathlib.Path(tables.__file__).parent
    made = [
        path.relative_to(package).as_posix()
        for path in package.rglob('*.py')
        if re.search(r'Console\(', path.read_text())
    ]
    assert made == ['tables.py']


SPEAKS = 'a\x1b]52;c;aGk=\x07b\x1b[2J\x9b2Jc\rd'
SPELLED = r'a\x1b]52;c;aGk=\x07b\x1b[2J\x9b2Jc\x0dd'


@pytest.mark.parametrize('form', [None, 'plain', 'markdown', 'csv', 'json'])
def test_no_text_speaks_to_the_terminal(form, capsys):
    """Escape sequences of a terminal can rename its window, clear it, or write to the clipboard."""
    table = Table(SPEAKS, (Column(SPEAKS), Column('value', prose=True)), [(SPEAKS, SPEAKS)], SPEAKS)
    file = io.StringIO()
    printer = Printer(Console(file=file, width=200, force_terminal=form is None, color_system=None), form)
    printer.table(table)
    printer.line(f'said: {SPEAKS}')
    printer.close()
    shown = file.getvalue() + capsys.readouterr().err
    assert not {char for char in shown if char in '\x1b\x07\x9b\r'}, repr(shown)
    assert f'said: {SPELLED}' in shown and 'aGk=' in file.getvalue()
    if form == 'json':
        assert json.loads(file.getvalue()) == {SPEAKS: [{SPEAKS: SPEAKS, 'value': SPEAKS}]}
    tables.plain_console(file=file, width=200).print(f'failed: {SPEAKS}')
    assert f'failed: {SPELLED}\n' in file.getvalue()


def test_ends_of_lines_and_tabs_are_no_controls():
    assert tables.visible('a\n\tb é ü') == 'a\n\tb é ü'


def test_bytes_have_the_unit_that_leaves_few_digits():
    assert [in_bytes(size) for size in (512.0, 2048.0, 3.5 * 2**20)] == ['512 B', '2.0 KiB', '3.5 MiB']
    assert [in_bytes(size, '.4g') for size in (512, 3 * 2**30, 2**51)] == ['512 B', '3 GiB', '2048 TiB']
