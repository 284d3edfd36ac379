"""Generated pages are up to date."""

import pathlib

from attnlab.cli import main

ROOT = pathlib.Path(__file__).parents[1]


def test_the_zoo_table_is_what_the_command_prints(capsys):
    assert main(['zoo', '--markdown']) == 0
    assert capsys.readouterr().out.strip() in (ROOT / 'docs' / 'zoo.md').read_text()
