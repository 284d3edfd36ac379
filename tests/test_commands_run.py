"""Commands that documents show for a trained run are run, on one of this test's own and shortened by flags.

A line of these kinds that a document gains is run too, without anything to be written here. `LEFT` says what is not run
and why; lines of other kinds are read by `test_commands_in_documents.py` alone.
"""

import itertools
import pathlib
import re
import shlex
import shutil

import pytest

from attnlab import cli
from tests.bad_inputs.conftest import originals
from tests.test_commands_in_documents import lines, own_mixer, program

ROOT = pathlib.Path(__file__).parents[1]
__all__ = ['originals']

SHORTER = {
    'eval': ('--multiples=1', '--tokens=64', '--compilation_cache='),
    'generate': ('--tokens=4', '--compilation_cache='),
    'compare': (),
    'show': (),
}
"""What is added to a command, in the place of a flag of the same name."""

LEFT = {
    r'eval .*--attention': 'needs a run with a softmax; tests/convert/test_substitution.py',
    r'eval --workdir=runs/mqar-gla': 'needs a run of another task; tests/evals/test_by_slice.py',
}
"""Commands that are not run here, by a pattern, with the reason and what runs them."""


def commands() -> list:
    """The commands of attnlab in documents, without those that are left; the first of each kind is not slow."""
    found, seen = [], set()
    for file, line in lines():
        if program(line) != 'attnlab':
            continue
        words = list(itertools.takewhile(lambda word: word not in '|>&&', shlex.split(line, comments=True)))[1:]
        if words[0] not in SHORTER or any(re.match(pattern, ' '.join(words)) for pattern in LEFT):
            continue
        slow = words[0] in seen
        seen.add(words[0])
        found.append(pytest.param(words, id=f'{file}: {" ".join(words)}', marks=[pytest.mark.slow] if slow else []))
    return found


def shortened(words: list[str]) -> list[str]:
    """A command with flags that make it short, its globs expanded."""
    added = SHORTER[words[0]]
    names = {flag.partition('=')[0] for flag in added}
    kept = [word for word in words if word.partition('=')[0] not in names]
    globbed = [sorted(map(str, pathlib.Path().glob(word))) if '*' in word else [word] for word in kept]
    return [word for found in globbed for word in found] + list(added)


def place_runs(words: list[str], run: pathlib.Path, folder: pathlib.Path) -> None:
    """Puts a copy of the run wherever a command names one."""
    for word in words[1:]:
        named = re.fullmatch(r'(?:--workdir=)?(runs/[\w-]+)(\*?)', word)
        for end in ('one', 'two') if named and named[2] else ('',):
            if named:
                shutil.copytree(run, folder / f'{named[1]}{end}')


@pytest.mark.parametrize('words', commands())
def test_a_command_of_a_document_runs(words, originals, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'configs').symlink_to(ROOT / 'configs')
    (tmp_path / 'my_mixers.py').write_text(own_mixer())
    place_runs(words, originals / 'run', tmp_path)
    assert cli.main(shortened(words)) == 0, capsys.readouterr().err


def test_what_is_left_is_there():
    every = [' '.join(shlex.split(line, comments=True)[1:]) for _, line in lines() if program(line) == 'attnlab']
    assert all(any(re.match(pattern, line) for line in every) for pattern in LEFT)
    assert {item.values[0][0] for item in commands()} == set(SHORTER)
