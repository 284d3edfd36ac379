"""Texts of grammars against Lark's own parser, on all short texts; the parser sees whole texts, ours bytes."""

import itertools

import lark
import numpy as np
import pytest

from attnlab.data.text.grammar import Derivable, Grammar
from attnlab.data.text.pattern import NEVER
from attnlab.data.text.tokenizers import Bytes
from attnlab.errors import UserError
from tests.data.text.test_pattern import Spelled, place_of

GRAMMARS = {
    'nested': 'start: "(" start ")" start |',
    'left recursion': 'start: start "+" term | term\nterm: "a" | "(" start ")"',
    'as many as': 'start: "a" start "b" | "ab"',
    'ambiguous': 'start: start start | "a" | "b" start "b"',
    'ends in empty rules': 'start: a b c\na: "a"?\nb: a a | "(" c ")"\nc: "b"*',
    'a circle of rules': 'start: a | "a"\na: start | "b" start',
    'terminals that overlap': 'start: WORD "b" [NUMBER]\nWORD: /a+b?/\nNUMBER: /[b+]{2,3}/',
    'repeats': 'start: ("a" "b"~1..2)+ ")"?',
    'ignored': 'start: "a" ("+" start)*\n%ignore "b"',
    'letters of either case': 'start: "A"i start "b" | "+"',
    'rules that derive nothing': 'start: "a" start | "b" | more\nmore: "(" more',
    'templates': 'start: _listed{x, "+"}\n_listed{item, between}: item (between item)*\nx: "a" | "(" start ")"',
}
LETTERS = 'ab(+)'


def derived(grammar, length):
    """Whether each text of at most so many letters is one of the grammar, as Lark finds it."""
    parser = lark.Lark(grammar, parser='earley', lexer='dynamic_complete')
    found = {}
    for count in range(length + 1):
        for letters in itertools.product(LETTERS, repeat=count):
            text = ''.join(letters)
            try:
                parser.parse(text)
                found[text] = True
            except lark.exceptions.UnexpectedInput:
                found[text] = False
    return found


@pytest.mark.parametrize('name', GRAMMARS)
def test_texts_and_the_fewest_letters_are_those_that_lark_derives(name):
    found = derived(GRAMMARS[name], 5)
    assert any(found.values()) and not all(found.values())
    constraint = Derivable(Grammar(GRAMMARS[name]), Bytes())
    for text, hit in found.items():
        if len(text) > 4:
            continue
        place = place_of(constraint, text.encode())
        needed = int(constraint.rest(np.array([place]))[0])
        assert (needed == 0) == hit, text
        further = [len(each) - len(text) for each, there in found.items() if there and each.startswith(text)]
        # Of texts of five letters at most.
        assert needed == min(further) if further else len(text) + needed > 5, text
        if needed == NEVER:
            assert constraint.ends(place)
        longer = [each for each in further if each]
        assert not (longer and constraint.ends(place)), text


def test_a_text_that_nothing_can_follow_ends():
    constraint = Derivable(Grammar('start: "a" "b"?'), Bytes())
    assert [constraint.ends(place_of(constraint, text)) for text in (b'', b'a', b'ab', b'b')] == [
        False,
        False,
        True,
        True,
    ]


def test_tokens_of_several_bytes_move_by_all_of_them():
    tokens = (b'(', b')', b'((', b'()', b'a)', b'\xc3', b'\x9f', 'ß)'.encode())
    constraint = Derivable(Grammar('start: "(" start ")" | /a|ß/'), Spelled(tokens=tokens))
    every = np.arange(len(tokens))
    first = constraint.after(constraint.start, every)
    # Half of a letter needs its other half.
    assert constraint.rest(first).tolist() == [2, NEVER, 3, NEVER, NEVER, 1, NEVER, NEVER]
    second = constraint.after(int(first[2]), every)
    assert constraint.rest(second).tolist() == [4, NEVER, 5, NEVER, 1, 3, NEVER, 1]


def test_long_texts_of_json():
    json = r"""
        start: value
        ?value: object | array | STRING | NUMBER | "true" | "false" | "null"
        array: "[" [value ("," value)*] "]"
        object: "{" [pair ("," pair)*] "}"
        pair: STRING ":" value
        STRING: /"([^"\\]|\\.)*"/
        NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?/
        %ignore " "
    """
    constraint = Derivable(Grammar(json), Bytes())
    text = b'{"a b": [1, -2.5, {"c": "\\"\xc3\x9f"}], "d": '
    place = place_of(constraint, text)
    # A digit and the brace.
    assert constraint.rest(np.array([place])).tolist() == [2]
    for more, needed in ((b'[[', 3), (b'"', 2), (b'nu', 3), (b'0}', 0), (b'0} ', 0), (b'00', NEVER), (b']', NEVER)):
        assert constraint.rest(np.array([place_of(constraint, text + more)])).tolist() == [needed], more


@pytest.mark.parametrize(
    ('grammar', 'sentence'),
    [
        ('start: "a', 'the grammar is none in the notation of Lark: '),
        ('begin: "a"', 'the grammar is none in the notation of Lark: Using an undefined rule'),
        ('start: other', 'the grammar is none in the notation of Lark: '),
        ('start: /a*/', 'the grammar is none in the notation of Lark: '),
        ('start: "a" start', 'the grammar derives no text: start needs itself in every rule'),
        ('%declare X\nstart: X "a"', 'the grammar declares the terminal X and does not say what it is'),
        (f'start: {"(" * 3000}"a"{")" * 3000}', 'the grammar is none in the notation of Lark: '),
        ('start: A\nA: /a(?=b)/', "the terminal A of the grammar: the pattern 'a(?=b)' makes no automaton"),
    ],
)
def test_what_is_no_grammar_is_said_in_a_line(grammar, sentence):
    with pytest.raises(UserError) as found:
        Grammar(grammar)
    assert str(found.value).startswith(sentence) and '\n' not in str(found.value)


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(__import__('sys').modules, 'lark', None)
    with pytest.raises(UserError, match=r'a grammar needs lark, .*: pip install "attnlab\[grammar\]"'):
        Grammar('start: "a"')
