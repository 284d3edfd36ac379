"""What shells complete, by scripts that hold all of it."""

import collections
import re
import shlex
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

ZSH = r"""
compdef() { : }
compset() { IPREFIX=${PREFIX%%=*}= PREFIX=${PREFIX#*=} }
compadd() {
    local found=()
    while [[ $1 != -- ]]; do shift; done; shift
    for word in "$@"; do [[ $word == "$PREFIX"* ]] && found+=($word); done
    (( $#found )) && print -r -- $found
}
_files() {
    local files=(${~PREFIX}*(N))
    print -r -- $IPREFIX$files
}
source "$1"; shift
for line in "$@"; do
    words=(${(s: :)line})
    CURRENT=$#words PREFIX=$words[-1] IPREFIX=
    _attnlab
done
"""
"""The completion system of zsh needs its line editor: here stand the parts that the script calls."""

FISH = """
source $argv[1]
for line in $argv[2..]
    echo (complete -C $line)
end
"""

STARTS = {'bash': ('bash', '-c', BASH, 'bash'), 'zsh': ('zsh', '-f', '-c', ZSH, 'zsh'), 'fish': ('fish', '-c', FISH)}
"""How a shell is started with a program, whose arguments are a script and lines, of which it prints the completions."""

BLOCKS = {
    'bash': ((('case',), 'esac'), (('if',), 'fi'), (('do',), 'done')),
    'zsh': ((('case',), 'esac'), (('do',), 'done')),
    'fish': ((('function', 'switch', 'if'), 'end'),),
}
"""The words that begin a block, and the one that ends it."""


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


def written(shell, known, folder):
    script = folder / 'script'
    script.write_text(SCRIPTS[shell](known))
    return script


@pytest.mark.parametrize('shell', sorted(SCRIPTS))
def test_a_script_is_one_of_its_shell(shell, known, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f'{shell} is not here')
    option = '--no-execute' if shell == 'fish' else '-n'
    subprocess.run([shell, option, str(written(shell, known, tmp_path))], check=True)


@pytest.mark.parametrize('shell', sorted(SCRIPTS))
def test_a_script_is_whole_where_its_shell_is_not_here(shell, known, tmp_path):
    """Every word is in it, quotes are closed on their line, and as many blocks end as begin."""
    script = written(shell, known, tmp_path).read_text()
    words = set(re.findall(r'[\w./=-]+', script))
    flags = {word for found in known.words.values() for word in found}
    assert not ({*known.commands, *known.recipes, *flags} - words), 'words are missing'
    for line in script.splitlines():
        assert shlex.split(line, comments=True) is not None
    code = re.sub(r'\'[^\']*\'|"[^"]*"|#.*', '', script)
    count = collections.Counter(re.findall(r'(?<![\w-])[a-z]+(?![\w-])', code))
    for begins, end in BLOCKS[shell]:
        assert sum(count[word] for word in begins) == count[end] > 0, (begins, end)


@pytest.mark.parametrize('shell', sorted(SCRIPTS))
def test_commands_flags_configs_recipes_and_values_are_completed(shell, known, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f'{shell} is not here')
    script = written(shell, known, tmp_path)

    def completed(before, word):
        """To bash, what stands behind `=` or `:` is a word of its own."""
        return word if shell == 'bash' else f'{before}{word}'

    lines = {
        'attnlab tr': 'train',
        'attnlab sweep st': 'status',
        'attnlab train --dry': '--dry_run',
        'attnlab sweep status --wa': '--watch',
        'attnlab train --config=lang': completed('--config=', 'language'),
        'attnlab train --config=language:size=tiny,zoo=third_order_t': completed(
            '--config=language:size=tiny,zoo=', 'third_order_taylor'
        ),
        'attnlab train --config=language:zoo=3*gla+mamba2': completed('--config=language:zoo=', '3*gla+mamba2'),
        'attnlab zoo sliding_w': 'sliding_window',
        'attnlab zoo --format=ma': completed('--format=', 'markdown'),
        'attnlab data prepare listo': 'listops',
        f'attnlab show {tmp_path}/scr': f'{tmp_path}/script',
        f'attnlab eval --workdir={tmp_path}/scr': completed('--workdir=', f'{tmp_path}/script'),
    }
    command = [*STARTS[shell], str(script), *lines]
    found = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path)
    assert dict(zip(lines, found.stdout.splitlines(), strict=True)) == lines, found.stderr


def test_another_shell_is_refused(capsys):
    assert main(['completion', 'fsh']) == 2
    assert "there is no completion for 'fsh'; did you mean 'fish'?" in capsys.readouterr().err
