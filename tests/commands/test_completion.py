"""What shells complete, by scripts that hold all of it."""

import shutil
import subprocess

import pytest

from attnlab.cli import COMMANDS, main
from attnlab.commands.completion import SCRIPTS, vocabulary
from attnlab.zoo import ZOO

BASH = r"""
source "$1"; shift
compopt() { :; }
for line in "$@"; do
    COMP_LINE=$line COMP_POINT=${#line} COMPREPLY=()
    _attnlab
    echo "${COMPREPLY[*]}"
done
"""


@pytest.fixture(scope='module')
def known():
    return vocabulary(COMMANDS)


def test_the_vocabulary_is_that_of_the_commands(known):
    assert set(known.commands) == set(COMMANDS) and set(known.recipes) == set(ZOO)
    assert {'--config=', '--workdir=', '--dry_run', '--profile=', '--help'} <= set(known.words['train'])
    assert {'--study=', '--watch', '--format='} <= set(known.words['sweep status'])
    assert {'worker', 'status', '--config='} <= set(known.words['sweep'])
    assert known.values['--format='] == ('plain', 'json', 'csv', 'markdown')
    assert {'language', 'sweeps/language'} <= set(known.configs)


@pytest.mark.parametrize('shell', sorted(SCRIPTS))
def test_a_script_is_one_of_its_shell(shell, known, tmp_path):
    script = tmp_path / 'script'
    script.write_text(SCRIPTS[shell](known))
    if shutil.which(shell) is None:
        pytest.skip(f'{shell} is not here')
    option = '--no-execute' if shell == 'fish' else '-n'
    subprocess.run([shell, option, str(script)], check=True)


def test_bash_completes_commands_flags_configs_recipes_and_values(known, tmp_path):
    script = tmp_path / 'script'
    script.write_text(SCRIPTS['bash'](known))
    lines = {
        'attnlab tr': 'train',
        'attnlab sweep st': 'status',
        'attnlab train --dry': '--dry_run',
        'attnlab sweep status --wa': '--watch',
        'attnlab train --config=lang': 'language',
        'attnlab train --config=language:size=tiny,zoo=third_order_t': 'third_order_taylor',
        'attnlab train --config=language:zoo=3*gla+mamba2': '3*gla+mamba2',
        'attnlab zoo sliding_w': 'sliding_window',
        'attnlab zoo --format=ma': 'markdown',
        'attnlab data prepare listo': 'listops',
        f'attnlab show {tmp_path}/scr': f'{tmp_path}/script',
        f'attnlab eval --workdir={tmp_path}/scr': f'{tmp_path}/script',
    }
    command = ['bash', '-c', BASH, 'bash', str(script), *lines]
    found = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path)
    assert dict(zip(lines, found.stdout.splitlines(), strict=True)) == lines, found.stderr


def test_another_shell_is_refused(capsys):
    assert main(['completion', 'fsh']) == 2
    assert "there is no completion for 'fsh'; did you mean 'fish'?" in capsys.readouterr().err
