"""Problems mixed in one stream: their shares and lengths, their slices, and what is refused."""

import collections
import dataclasses

import pytest

from attnlab.config import build, from_plain, plain, spec, spec_of
from attnlab.data.synthetic.arithmetic import Parity
from attnlab.data.synthetic.mixture import Mixture
from attnlab.data.synthetic.problem import Examples
from attnlab.data.synthetic.recall import MultiQueryRecall, mixed_recall
from attnlab.errors import UserError
from attnlab.tasks.synthetic import Extra, LabelPrediction

MIXTURE = Mixture(
    (MultiQueryRecall(vocab=64, pairs=(2,)), MultiQueryRecall(vocab=64, pairs=(5,))),
    (16, 32),
    ('easy', 'hard'),
    (3.0, 1.0),
)


def test_examples_are_of_all_parts_in_their_shares():
    source = Examples(MIXTURE, 32, seed=1, count=400)
    kinds = collections.Counter(
        (int(row['segments'].sum()), int(row['weights'].sum())) for row in map(source.__getitem__, range(400))
    )
    assert kinds.keys() == {(16, 2), (32, 5)}
    assert kinds[16, 2] == pytest.approx(300, abs=35)  # four standard deviations
    assert len(source[0]['at']) == 5


def test_every_part_is_a_slice_and_so_is_what_a_paper_adds():
    task = LabelPrediction(problem=MIXTURE, extra=(Extra('beyond', 48, MultiQueryRecall(vocab=64, pairs=(12,))),))
    slices = task.slices('test', 32, (1, 2), 8)
    assert list(slices) == ['1x', '2x', 'part=easy', 'part=hard', 'beyond']
    assert slices['part=easy'].source[0]['weights'].sum() == 2 and len(slices['part=easy'].source[0]['tokens']) == 32
    assert slices['2x'].source[0]['weights'].sum() == 5 and len(slices['2x'].source[0]['tokens']) == 64
    assert slices['beyond'].source[0]['weights'].sum() == 12 and len(slices['beyond'].source[0]['tokens']) == 48


def test_a_config_holds_a_mixture():
    made = spec(LabelPrediction, problem=MIXTURE, extra=(Extra('beyond', 48, Parity()),))
    assert build(from_plain(plain(made))) == build(made)
    saved = plain(spec(LabelPrediction, problem=spec_of(MIXTURE)))
    del saved['extra']
    assert build(from_plain(saved)).extra == ()


@pytest.mark.parametrize(
    ('change', 'said'),
    [
        ({'lengths': (16,)}, 'lengths of Mixture is .*; it must be one length for each of 2 parts'),
        ({'names': ('a', 'a')}, 'it must be 2 different names'),
        ({'shares': (1.0, 0.0)}, 'it must be empty, or 2 numbers above 0'),
        ({'parts': (Parity(), MIXTURE.parts[1])}, 'problems of one vocabulary'),
        ({'lengths': (16, 64)}, 'length is 32; Mixture needs at least the longest part, 64 tokens'),
    ],
)
def test_wrong_values_are_refused(change, said):
    with pytest.raises(UserError, match=said):
        Examples(dataclasses.replace(MIXTURE, **change), 32)


def test_recall_of_several_sizes():
    easy, hard = (MultiQueryRecall(vocab=64, pairs=(pairs,)) for pairs in (2, 5))
    assert mixed_recall(64, ((16, 2), (32, 5)), (3.0, 1.0)) == Mixture(
        (easy, hard), (16, 32), ('16-2', '32-5'), (3.0, 1.0)
    )
