"""Facts: one table for all splits, subjects that take both names, and fields that are checked."""

import numpy as np
import pytest

from attnlab.data.synthetic.facts import Facts
from attnlab.data.synthetic.problem import Examples
from attnlab.errors import UserError


def test_every_split_asks_about_one_table():
    facts = Facts(subjects=20, names=6, relations=3, objects=50)
    known = {}
    for split in ('train', 'test'):
        source = Examples(facts, 5, split=split)
        for row in map(source.__getitem__, range(300)):
            assert row['at'].tolist() == [3] and row['tokens'][3] == facts.vocab - 1 and row['segments'].sum() == 4
            assert known.setdefault(tuple(row['tokens'][:3]), int(row['targets'][0])) == row['targets'][0]
    assert len(known) == 60
    prompts = np.array(list(known))
    assert (prompts.min(0) >= [0, 6, 12]).all() and (prompts.max(0) < [6, 12, 15]).all()
    assert min(known.values()) >= 15 and max(known.values()) < facts.vocab - 1
    # A fact has the object that its prompt has among examples; another table has others.
    example = facts.fact(4, 2)
    assert known[tuple(example.tokens[:3])] == example.targets[0]
    other = Facts(subjects=20, names=6, relations=3, objects=50, seed=1)
    assert any(facts.fact(s, 0).targets != other.fact(s, 0).targets for s in range(20))


def test_fields_are_checked():
    with pytest.raises(UserError, match=r'subjects of Facts is 50; it must be a whole number from 2 to .* 36'):
        Facts(subjects=50, names=6).check(4)
    with pytest.raises(UserError, match='length is 3; Facts needs at least 4 tokens'):
        Facts().check(3)
