"""What every problem keeps: examples are pure functions of seed, split and index, in bounds, labelled, and quick."""

import hashlib
import subprocess
import sys
import time

import numpy as np
import pytest

from attnlab.config import build, spec
from attnlab.data.synthetic.arithmetic import ModularArithmetic, Parity
from attnlab.data.synthetic.copying import Copying, DelayedCopying, SelectiveCopying
from attnlab.data.synthetic.groups import WordProblem
from attnlab.data.synthetic.mixture import Mixture
from attnlab.data.synthetic.passkey import Passkey
from attnlab.data.synthetic.problem import ENDLESS, SPLITS, Examples
from attnlab.data.synthetic.recall import CompositionalRecall, InductionHeads, MultiQueryRecall, OverwrittenRecall
from attnlab.data.synthetic.regression import LinearRegression
from attnlab.data.synthetic.sets import MaxRetrieval
from attnlab.errors import UserError

MIXTURE = Mixture(
    (MultiQueryRecall(vocab=64, pairs=(2,)), MultiQueryRecall(vocab=64, pairs=(4,))), (16, 32), ('a', 'b'), (3.0, 1.0)
)
PROBLEMS = [
    (MultiQueryRecall(vocab=64, pairs=(2, 4)), 32),
    (MultiQueryRecall(vocab=64, pairs=(4,), random_fillers=True), 32),
    (OverwrittenRecall(vocab=64, pairs=4, rewrites=4), 32),
    (CompositionalRecall(vocab=64, chains=3, links=3, hops=(1, 2)), 32),
    (InductionHeads(vocab=16), 33),
    (SelectiveCopying(vocab=10, data=8), 64),
    (DelayedCopying(vocab=10, data=8), 64),
    (Copying(letters=26, shortest=5), 43),
    (Passkey(), 384),
    (Parity(), 40),
    (ModularArithmetic(modulus=5), 21),
    (WordProblem('Z2'), 33),
    (WordProblem('A4xZ5'), 33),
    (WordProblem('S5'), 17),
    (WordProblem('S5', moved=2), 17),
    (MaxRetrieval(), 17),
    (MIXTURE, 32),
    (LinearRegression(dim=5), 22),
    (LinearRegression(dim=5, outputs=7, noise=0.5, decay=1.0, nonzero=2, layers=2), 22),
]
each = pytest.mark.parametrize(('problem', 'length'), PROBLEMS, ids=str)


def digest(source: Examples, count: int = 4) -> str:
    """SHA-256 of the first rows, names and all."""
    rows = [(name, value.dtype.str, value.tobytes()) for i in range(count) for name, value in source[i].items()]
    return hashlib.sha256(repr(rows).encode()).hexdigest()


def hashed() -> str:
    return ' '.join(digest(Examples(problem, length, seed=7)) for problem, length in PROBLEMS)


def test_another_process_draws_the_same_bytes():
    path = repr(__file__)
    code = f"import importlib.util as u; s = u.spec_from_file_location('e', {path}); m = u.module_from_spec(s); "
    code += 's.loader.exec_module(m); print(m.hashed())'
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == hashed()


@each
def test_rows_have_the_same_shapes_and_are_in_bounds(problem, length):
    source = Examples(problem, length)
    shapes = {name: (value.shape, value.dtype) for name, value in source[0].items()}
    labels = problem.labels(length)
    assert shapes['at'] == ((labels,), np.int32) and shapes['weights'] == ((labels,), np.float32)
    most = 0
    for i in range(200):
        row = source[i]
        assert {name: (value.shape, value.dtype) for name, value in row.items()} == shapes
        used, count = int(row['segments'].sum()), int(row['weights'].sum())
        most = max(most, count)
        assert 1 <= count <= labels and (row['weights'] == (np.arange(labels) < count)).all()
        assert (row['segments'] == (np.arange(length) < used)).all()
        assert (np.diff(row['at'][:count]) > 0).all() and row['at'][0] >= 0 and row['at'][count - 1] < used
        assert (row['positions'] == np.where(row['segments'], np.arange(length), 0)).all()
        assert not row['tokens'][used:].any() and not row['at'][count:].any() and not row['targets'][count:].any()
        if problem.features is None:
            assert row['tokens'].shape == (length,) and row['tokens'].dtype == np.int32
            assert row['tokens'].min() >= 0 and row['tokens'].max() < problem.vocab
        else:
            assert row['tokens'].shape == (length, problem.features) and row['tokens'].dtype == np.float32
        if row['targets'].dtype == np.int32:
            assert row['targets'].min() >= 0 and row['targets'].max() < problem.vocab
        else:
            assert row['targets'].shape == (labels, problem.vocab)
    assert most == labels or isinstance(problem, Copying | Passkey)


@each
def test_seed_split_and_index_each_make_another_example(problem, length):
    sources = [Examples(problem, length, seed, split) for seed in (0, 1) for split in SPLITS]
    assert len({digest(source, 8) for source in sources}) == len(sources)
    rows = [sources[0][i]['tokens'].tobytes() for i in range(16)]
    assert len(set(rows)) > 12
    assert all((Examples(problem, length)[3][name] == value).all() for name, value in sources[0][3].items())


@each
def test_slices_and_longer_rows_can_be_drawn(problem, length):
    for name, variant in problem.variants(length).items():
        assert type(variant) is type(problem) and name.partition('=')[2]
        Examples(variant, length)[0]
    longer = Examples(problem.stretched(), 4 * length)
    assert all(longer[i]['segments'].sum() >= 4 * length - 1 for i in range(8))


@each
def test_problems_survive_their_spec(problem, length):
    assert build(spec(type(problem), **vars(problem))) == problem


@each
def test_an_example_takes_less_than_a_millisecond(problem, length):
    source = Examples(problem, length)
    source[0]
    times = []
    for i in range(1, 60):
        began = time.thread_time()  # of this thread, whatever else the machine does
        source[i]
        times.append(time.thread_time() - began)
    assert np.median(times) < 1e-3, f'{np.median(times) * 1e6:.0f} us'


def test_streams_have_names_of_their_own():
    """Numbers of a seed and an index never make up those of another pair."""
    problem = InductionHeads()
    seen = {
        Examples(problem, 64, seed, split)[i]['tokens'].tobytes()
        for seed in range(9)
        for split in SPLITS
        for i in range(9)
    }
    assert len(seen) == 9 * 9 * len(SPLITS)
    assert len(Examples(problem, 64)) == ENDLESS and Examples(problem, 64)[ENDLESS - 1]['weights'].sum() == 1


@pytest.mark.parametrize(
    ('make', 'message'),
    [
        (lambda: Examples(Parity(), 8, split='tset'), r"Parity has no split 'tset'; did you mean 'test'\?"),
        (lambda: Examples(Parity(), 8, seed=-1), 'seed of the examples is -1; it must be from 0'),
        (lambda: Examples(Parity(shortest=9), 8), 'length is 8; Parity needs at least 9'),
        (lambda: Examples(MultiQueryRecall(vocab=64, pairs=(4, 9)), 32), 'length is 32; .* for each of 9 pairs: 36'),
        (
            lambda: Examples(MultiQueryRecall(vocab=64, pairs=(32,)), 256),
            r'pairs of MultiQueryRecall is \(32,\); .* 31',
        ),
        (lambda: Examples(MultiQueryRecall(vocab=7), 32), 'vocab of MultiQueryRecall is 7; it must be an even'),
        (lambda: Examples(MultiQueryRecall(power=0.0), 32), 'power of MultiQueryRecall is 0.0'),
        (lambda: Examples(OverwrittenRecall(vocab=16, pairs=4, rewrites=5), 64), 'rewrites of OverwrittenRecall is 5'),
        (lambda: Examples(CompositionalRecall(hops=(4,)), 64), r'hops of CompositionalRecall is \(4,\); .* links = 3'),
        (lambda: Examples(CompositionalRecall(vocab=8), 64), 'vocab of CompositionalRecall is 8; .* at least 20'),
        (lambda: Examples(InductionHeads(vocab=2), 64), 'vocab of InductionHeads is 2'),
        (lambda: Examples(SelectiveCopying(data=16), 31), 'length is 31; SelectiveCopying needs at least 32'),
        (lambda: Examples(Copying(shortest=0), 31), 'shortest of Copying is 0'),
        (lambda: Examples(Passkey(), 64), 'length is 64; Passkey needs at least'),
        (lambda: Examples(Passkey(depth=1.5), 512), 'depth of Passkey is 1.5'),
        (lambda: Examples(ModularArithmetic(modulus=1), 64), 'modulus of ModularArithmetic is 1'),
        (lambda: Examples(WordProblem('D4'), 64), "group of WordProblem is 'D4'; it must be S<n>"),
        (lambda: Examples(WordProblem('S7'), 64), "group of WordProblem is 'S7'; .* 720 elements"),
        (lambda: Examples(WordProblem('S5x'), 64), "group of WordProblem is 'S5x'"),
        (lambda: Examples(WordProblem('S5', moved=1), 64), 'moved of WordProblem is 1; it must be 2 to 5'),
        (lambda: Examples(WordProblem('A5', moved=6), 64), 'moved of WordProblem is 6; it must be 3 to 5'),
        (lambda: Examples(WordProblem('Z5', moved=2), 64), 'moved of WordProblem is 2; it must be None, for Z5 is no'),
        (lambda: Examples(MaxRetrieval(classes=1), 64), 'classes of MaxRetrieval is 1'),
        (lambda: Examples(LinearRegression(dim=5, nonzero=6), 64), 'nonzero of LinearRegression is 6; .* dim = 5'),
        (lambda: Examples(LinearRegression(noise=-1.0), 64), 'noise of LinearRegression is -1.0'),
        (lambda: Examples(LinearRegression(), 63), 'length is 63; LinearRegression needs an even number'),
    ],
)
def test_mistakes_name_the_field(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_an_index_out_of_bounds():
    with pytest.raises(IndexError, match='example 5 of 5'):
        Examples(Parity(), 8, count=5)[5]
