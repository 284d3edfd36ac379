"""Automata of patterns against Python's own regular expressions, on all short texts."""

import dataclasses
import itertools
import re

import numpy as np
import pytest

from attnlab.data.text.pattern import NEVER, Matching, Pattern
from attnlab.data.text.tokenizers import Bytes
from attnlab.errors import UserError


@dataclasses.dataclass(frozen=True)
class Spelled(Bytes):
    """A tokenizer of a few tokens, some of several bytes."""

    tokens: tuple[bytes, ...] = ()

    @property
    def vocab(self) -> int:
        return len(self.tokens)

    def decode(self, ids):
        return b''.join(self.tokens[index] for index in ids)


def place_of(constraint, ids):
    place = constraint.start
    for index in ids:
        (place,) = constraint.after(int(place), np.array([index]))
    return int(place)


@pytest.mark.parametrize(
    'expression',
    # Alternatives of which one begins with another, lazy ones, empty texts.
    ['a|ab', 'a??b?', '(a|ab)(0|b0b)', 'a*', '', '(ab|a)*0', '[^a]{2,3}', 'b+?', '(a|b0)*?b', '.*', '(?i)A{2}'],
)
def test_it_matches_what_python_matches(expression):
    constraint = Matching(Pattern(expression), Bytes())
    texts = [''.join(text) for length in range(5) for text in itertools.product('ab0', repeat=length)]
    matched = [re.fullmatch(expression, text) is not None for text in texts]
    places = np.array([place_of(constraint, text.encode()) for text in texts])
    rest = constraint.rest(places)
    np.testing.assert_array_equal(rest == 0, matched)
    # The fewest further letters, of texts of four at most.
    for text, needed in zip(texts, map(int, rest), strict=True):
        further = [
            len(each) - len(text) for each, hit in zip(texts, matched, strict=True) if hit and each.startswith(text)
        ]
        assert needed == min(further) if further else needed == NEVER or len(text) + needed > 4


def test_tokens_of_several_bytes_move_by_all_of_them():
    tokens = (b'a', b'b', b'ab', b'aba', b'\xc3', b'\x9f', 'ß'.encode(), b'abab')
    constraint = Matching(Pattern('(ab)+ß?'), Spelled(tokens))
    every = np.arange(len(tokens))
    first = constraint.after(constraint.start, every)
    assert (constraint.rest(first) < NEVER).tolist() == [True, False, True, True, False, False, False, True]
    assert constraint.rest(first)[[0, 2, 3, 7]].tolist() == [1, 0, 1, 0]
    after_ab = constraint.after(int(first[2]), every)
    assert (constraint.rest(after_ab) < NEVER).tolist() == [True, False, True, True, True, False, True, True]
    assert not constraint.ends(int(first[2])) and constraint.ends(int(after_ab[6]))
    # Half of a character is no text.
    assert constraint.rest(after_ab[4:5]).tolist() == [1]


@pytest.mark.parametrize('expression', ['ab', '(ab)+ß?', 'a{5}', '[ab]*aß', 'ab(ab|ba)b?'])
@pytest.mark.parametrize('tokens', [(b'a', b'b', b'ab', 'ß'.encode(), b'aaa', b''), (b'ab', b'ba', b'b')])
def test_the_fewest_tokens_are_those_of_the_shortest_text(expression, tokens):
    constraint = Matching(Pattern(expression), Spelled(tokens))
    texts = [text for length in range(5) for text in itertools.product(range(len(tokens)), repeat=length)]
    matched = {
        text: re.fullmatch(expression, b''.join(tokens[index] for index in text).decode()) is not None for text in texts
    }
    for text in texts[: len(tokens) ** 2]:
        further = [len(each) - len(text) for each, hit in matched.items() if hit and each[: len(text)] == text]
        needed = int(constraint.rest(np.array([place_of(constraint, text)]))[0])
        assert needed == min(further) if further else len(text) + needed > 4


def test_what_stands_for_the_end_is_no_character_of_a_text():
    constraint = Matching(Pattern('.*'), Bytes())
    assert constraint.rest(np.array([place_of(constraint, '\U0010fffe'.encode())])).tolist() == [0]
    assert constraint.rest(np.array([place_of(constraint, '\U0010ffff'.encode())])).tolist() == [NEVER]


@pytest.mark.parametrize('expression', ['(a', 'a)|(b', '^a', r'(a)\1', '[a&&b]', r'\ba', 'a$b', 'a\udcff'])
def test_what_makes_no_automaton_is_said_in_a_line(expression):
    with pytest.raises(
        UserError, match=r'the pattern .* makes no automaton: [^\n]*the whole text is to match'
    ) as found:
        Pattern(expression)
    assert repr(expression) in str(found.value) and '\n' not in str(found.value)


def test_an_automaton_without_bound_is_refused(monkeypatch):
    monkeypatch.setattr('attnlab.data.text.pattern.SECONDS', 1)
    with pytest.raises(
        UserError, match=r"the pattern 'a\{1000\}\{1000\}' makes too large an automaton: it is not built"
    ):
        Pattern('a{1000}{1000}')
    monkeypatch.undo()
    monkeypatch.setattr('attnlab.data.text.pattern.SIZE', 2**25)
    with pytest.raises(UserError, match=r'within 10 seconds and 0\.0312 GiB; repeat less'):
        Pattern('(a|b)*a(a|b){14}')


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(__import__('sys').modules, 'outlines_core', None)
    with pytest.raises(UserError, match=r'a pattern needs outlines_core, .*: pip install "attnlab\[regex\]"'):
        Pattern('a')
