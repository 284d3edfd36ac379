import numpy as np

from attnlab.config import build, spec
from attnlab.data.text.tokenizers import Bytes
from attnlab.testing.sources import Markov


def test_markov_is_a_pure_function_of_its_seed():
    loaded = [Markov(seed).load('train', Bytes()).tokens for seed in (0, 0, 1)]
    assert np.array_equal(loaded[0], loaded[1])
    assert not np.array_equal(loaded[0], loaded[2])
    assert not np.array_equal(loaded[0], Markov(0).load('valid', Bytes()).tokens)
    # A document does not depend on how many there are.
    assert list(Markov(0, count=3).documents('train')) == list(Markov(0, count=9).documents('train'))[:3]


def test_the_entropy_of_markov_is_that_of_its_text():
    source = Markov(letters=4, count=64, length=512)
    text = source.load('train', Bytes())
    tokens = text.tokens.astype(int) - ord('a')
    inside = np.ones(len(tokens) - 1, bool)
    inside[text.ends[:-1] - 1] = False
    pairs = np.stack([tokens[:-1], tokens[1:]])[:, inside]
    bits = -np.log2(source.transitions[pairs[0], pairs[1]])
    assert abs(bits.mean() - source.entropy) < 4 * bits.std() / np.sqrt(bits.size)
    counts = np.zeros((4, 4))
    np.add.at(counts, tuple(pairs), 1)
    rows = counts.sum(1, keepdims=True)
    spread = np.sqrt(source.transitions * (1 - source.transitions) / rows)
    assert (np.abs(counts / rows - source.transitions) < 5 * spread).all()


def test_specs():
    assert build(spec(Markov, seed=3)) == Markov(3)
