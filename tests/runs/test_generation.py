"""Text from a run, as the command prints it."""

import re

import pytest

from attnlab.cli import main
from tests.bad_inputs.conftest import originals

__all__ = ['originals']


@pytest.mark.parametrize('tested', ['all', 'drawn'])
def test_a_text_that_matches(originals, capsys, tested):
    asked = ['generate', f'--workdir={originals / "run"}', '--prompt=one', '--tokens=9', '--compilation_cache=']
    expression = r' (\d{2,3}|ß+), .*'
    assert main([*asked, f'--regex={expression}', f'--tested={tested}']) == 0
    printed = capsys.readouterr()
    text = printed.out.removesuffix('\n').removeprefix('one')
    assert re.fullmatch(expression, text) and len(text.encode()) == 9
    assert re.search(r'log-weight -\d+\.\d{4} nats, .*; \d[\d,]* tokens tested', printed.err)
    # A text ends where the pattern does.
    assert main([*asked, '--regex=[a-c]{3}', f'--tested={tested}', '--seed=1']) == 0
    assert re.fullmatch('one[a-c]{3}\n', capsys.readouterr().out)


@pytest.mark.parametrize('tested', ['all', 'drawn'])
def test_a_text_of_a_grammar(originals, tmp_path, capsys, tested):
    asked = ['generate', f'--workdir={originals / "run"}', '--prompt=one', '--tokens=8', '--compilation_cache=']
    (tmp_path / 'nested.lark').write_text('start: "<" (start | /[a-d]/) ">"')
    for seed in range(3):
        assert main([*asked, f'--grammar={tmp_path / "nested.lark"}', f'--tested={tested}', f'--seed={seed}']) == 0
        printed = capsys.readouterr()
        depth = printed.out.count('<')
        # Three at most, in eight bytes.
        assert depth in (1, 2, 3) and re.fullmatch(f'one<{{{depth}}}[a-d]>{{{depth}}}\n', printed.out)
    assert re.search(r'log-weight -\d+\.\d{4} nats, .*; \d[\d,]* tokens tested', printed.err)
