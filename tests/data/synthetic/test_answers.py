"""The answers of every problem, worked out again from the tokens alone by other means."""

import itertools
import re

import numpy as np
import pytest

from attnlab.data.synthetic.arithmetic import ModularArithmetic, Parity
from attnlab.data.synthetic.copying import Copying, DelayedCopying, SelectiveCopying
from attnlab.data.synthetic.groups import WordProblem, elements, group_table
from attnlab.data.synthetic.passkey import Passkey
from attnlab.data.synthetic.problem import Examples, Problem
from attnlab.data.synthetic.recall import CompositionalRecall, InductionHeads, MultiQueryRecall, OverwrittenRecall
from attnlab.data.synthetic.sets import MaxRetrieval


def drawn(problem: Problem, length: int, count: int = 200):
    """Tokens, and the labels as a dict from place to target, of many examples."""
    source = Examples(problem, length, seed=3)
    for i in range(count):
        row = source[i]
        labels = int(row['weights'].sum())
        tokens = row['tokens'][: int(row['segments'].sum())]
        yield tokens, dict(zip(row['at'][:labels].tolist(), row['targets'][:labels].tolist(), strict=True))


def test_multi_query_recall():
    sizes, gaps = set(), []
    for tokens, labels in drawn(MultiQueryRecall(vocab=64, pairs=(2, 4)), 32):
        tokens = tokens.tolist()
        count = len(labels)
        keys, values = tokens[: 2 * count : 2], tokens[1 : 2 * count : 2]
        assert len({*keys}) == len({*values}) == count
        assert all(1 <= key < 32 <= value for key, value in zip(keys, values, strict=True))
        asked = [i for i in range(2 * count, 32) if tokens[i]]
        assert labels == {i: values[keys.index(tokens[i])] for i in asked}
        assert all(i % 2 == 0 for i in asked) and sorted(tokens[i] for i in asked) == sorted(keys)
        sizes.add(count)
        gaps += [(i - 2 * count) // 2 for i in asked]
    assert sizes == {2, 4}
    assert np.mean(np.array(gaps) == 0) > 4 * np.mean(np.array(gaps) == 5), 'queries come soon, by a power law'


def test_random_fillers_do_not_move_the_labels():
    for tokens, labels in drawn(MultiQueryRecall(vocab=64, pairs=(4,), random_fillers=True), 64, 50):
        table = dict(tokens[:8].reshape(4, 2).tolist())
        assert labels == {i: table[tokens[i]] for i in labels} and len(labels) == 4
        assert (tokens[8:] > 0).mean() > 0.8


@pytest.mark.parametrize('rewrites', [0, 4])
def test_the_last_value_written_is_the_one_recalled(rewrites):
    overwritten = 0
    for tokens, labels in drawn(OverwrittenRecall(vocab=64, pairs=4, rewrites=rewrites), 32):
        writes = tokens[: 2 * (4 + rewrites)].reshape(-1, 2).tolist()
        table = {}
        for key, value in writes:
            overwritten += key in table
            table[key] = value
        assert len(table) == 4 and len({value for _, value in writes}) == 4 + rewrites
        assert labels == {i: table[tokens[i]] for i in range(2 * (4 + rewrites), 32) if tokens[i]}
    assert overwritten == 200 * rewrites


def test_compositional_recall_follows_the_links():
    seen = set()
    for tokens, labels in drawn(CompositionalRecall(vocab=64, chains=3, links=3, hops=(1, 2)), 40):
        links = dict(tokens[:18].reshape(9, 2).tolist())
        assert len(links) == 9 and min(links) > 3
        assert len(labels) == 3
        for place, answer in labels.items():
            hops, symbol = tokens[place - 1 : place + 1].tolist()
            for _ in range(hops):
                symbol = links[symbol]
            assert symbol == answer
            seen.add(hops)
        rest = np.delete(tokens, np.concatenate([np.arange(18), *([p - 1, p] for p in labels)]))
        assert not rest.any()
    assert seen == {1, 2}


def test_induction_heads():
    places = set()
    for tokens, labels in drawn(InductionHeads(vocab=16), 24, 400):
        text = ''.join(chr(ord('a') + token) for token in tokens)
        match = re.fullmatch('([a-o]*)p([a-p]).*p', text)
        assert match and text.count('p') == 2
        assert labels == {23: ord(match[2]) - ord('a')}
        places.add(len(match[1]))
    assert places == set(range(22))


def test_selective_copying():
    for tokens, labels in drawn(SelectiveCopying(vocab=10, data=8), 64):
        assert (tokens[56:] == 9).all() and (tokens[:56] < 9).all()
        assert list(labels) == list(range(56, 64))
        assert list(labels.values()) == [token for token in tokens[:56] if token]


def test_delayed_copying():
    for tokens, labels in drawn(DelayedCopying(vocab=10, data=8), 64):
        assert (
            (tokens[56:] == 9).all() and (tokens[8:56] == 0).all() and (tokens[:8] > 0).all() and (tokens[:8] < 9).all()
        )
        assert labels == dict(zip(range(56, 64), tokens[:8], strict=True))


def test_copying():
    sizes = set()
    for tokens, labels in drawn(Copying(letters=26, shortest=5), 43, 400):
        text = ''.join('abcdefghijklmnopqrstuvwxyz$|'[token] for token in tokens)
        match = re.fullmatch(r'\$([a-z]+)\|([a-z]+)', text)
        assert match and match[1] == match[2]
        middle = text.index('|')
        assert list(labels) == list(range(middle, len(text)))
        assert list(labels.values()) == [*tokens[middle + 1 :], 28]
        sizes.add(len(match[1]))
    assert sizes == set(range(5, 21))


@pytest.mark.parametrize('depth', [None, 0.0, 1.0])
def test_passkey(depth):
    places = []
    for tokens, labels in drawn(Passkey(depth=depth), 600, 60):
        text = bytes(tokens.astype(np.uint8)).decode()
        found = re.search(r'The pass key is (\d+)\. Remember it\. (\d+) is the pass key\. ', text)
        key = found[1]
        assert len(text) == 600 and 1 <= int(key) <= 50_000 and found[2] == key
        assert text.endswith(f'\nWhat is the pass key? The pass key is {key}')
        assert list(labels) == list(range(600 - len(key) - 1, 600 - 1))
        assert bytes(labels.values()).decode() == key
        places.append(found.start() - text.index('there.\n') - len('there.\n'))
    assert (max(places) == 0) if depth == 0.0 else (np.ptp(places) > 100) if depth is None else min(places) > 200


def test_parity():
    sizes = set()
    for tokens, labels in drawn(Parity(shortest=3), 12, 400):
        assert {*tokens} <= {1, 2}
        assert labels == {len(tokens) - 1: 2 if (tokens == 2).sum() % 2 else 1}
        sizes.add(len(tokens))
    assert sizes == set(range(3, 13))


def test_modular_arithmetic_is_pythons_own():
    sizes = set()
    for tokens, labels in drawn(ModularArithmetic(modulus=5), 16, 400):
        text = ''.join('.+-*=01234'[token] for token in tokens)
        assert re.fullmatch('[0-4]([-+*][0-4])*=', text)
        assert labels == {len(text) - 1: 5 + eval(text[:-1]) % 5}
        sizes.add(len(text) // 2)
    assert sizes == set(range(2, 9))


@pytest.mark.parametrize(('group', 'n', 'even'), [('S3', 3, False), ('A5', 5, True), ('S5', 5, False)])
def test_word_problems_move_things_as_matrices_do(group, n, even):
    """The product of permutation matrices, worked out in full at every step."""
    matrices = [np.eye(n, dtype=int)[:, list(p)] for p in itertools.permutations(range(n))]
    matrices = [m for m in matrices if not even or round(np.linalg.det(m)) == 1]
    for tokens, labels in drawn(WordProblem(group), 12, 40):
        assert tokens[0] == len(matrices) and list(labels) == list(range(1, 12))
        product = np.eye(n, dtype=int)
        for place, target in labels.items():
            product = product @ matrices[tokens[place]]
            assert (product == matrices[target]).all()


def test_products_of_groups_and_cyclic_groups():
    for tokens, labels in drawn(WordProblem('A4xZ5'), 12, 40):
        pairs = [divmod(int(token), 5) for token in tokens[1:]]
        table = group_table('A4')
        for place, target in labels.items():
            left = 0
            for element, _ in pairs[:place]:
                left = table[left][element]
            assert divmod(target, 5) == (left, sum(number for _, number in pairs[:place]) % 5)
    for tokens, labels in drawn(WordProblem('Z2'), 12, 40):
        assert list(labels.values()) == (np.cumsum(tokens[1:]) % 2).tolist()


@pytest.mark.parametrize(
    ('group', 'moved', 'count'), [('S5', 2, 11), ('S5', 5, 120), ('S3', 2, 4), ('A5', 3, 21), ('A4', 4, 12)]
)
def test_elements_that_move_few_things_still_reach_the_whole_group(group, moved, count):
    members = elements(int(group[1]), even=group[0] == 'A')
    seen, reached = set(), set()
    for tokens, labels in drawn(WordProblem(group, moved), 12, 400):
        product = tuple(range(int(group[1])))
        for place, target in labels.items():
            step = members[tokens[place]]
            assert sum(i != j for i, j in enumerate(step)) <= moved
            product = tuple(product[i] for i in step)
            assert members[target] == product
            seen.add(int(tokens[place]))
            reached.add(int(target))
    assert len(seen) == count
    assert len(reached) == len(members)


@pytest.mark.parametrize(('group', 'size', 'commutes'), [('Z60', 60, True), ('A4xZ5', 60, False), ('A5', 60, False)])
def test_tables_are_of_groups(group, size, commutes):
    table = np.array(group_table(group))
    assert table.shape == (size, size)
    every = np.arange(size)
    assert (table[0] == every).all() and (table[:, 0] == every).all()
    assert (np.sort(table, axis=0) == every[:, None]).all() and (np.sort(table, axis=1) == every[None]).all()
    assert (table[table] == table[every[:, None, None], table[None]]).all(), 'products associate'
    assert (table == table.T).all() == commutes


def test_elements_are_in_lexical_order():
    assert elements(3, even=False) == [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
    assert elements(3, even=True) == [(0, 1, 2), (1, 2, 0), (2, 0, 1)]
    assert group_table('S3')[1][2] == 4  # (0 2 1) after (1 0 2): 0 goes to 1 goes to 2, 1 to 0 to 0, 2 to 2 to 1


def test_max_retrieval():
    sizes, classes = set(), np.zeros(10)
    for tokens, labels in drawn(MaxRetrieval(), 17, 500):
        items, query = tokens[:-1], tokens[-1]
        best = sorted(items.tolist())[-1]
        assert labels == {len(items): best[1:11].index(1.0)}
        assert (items[:, 1:11].sum(1) == 1).all() and not items[:, 11].any() and not query[:11].any()
        sizes.add(len(items))
        classes[best[1:11].index(1.0)] += 1
    assert sizes == set(range(1, 17)) and classes.min() > 20
