"""Predictors that need no training of a network, and how often they are right: what a score has to beat.

All are pure functions of arrays: labels and tokens of training examples, which they count, and of those evaluated.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

from attnlab.data.pipeline import Row, Source, spread

TRAINED = 1024
"""Training examples that are counted."""

SHOWN = 'a label shown'


def sampled_rows(source: Source, count: int = TRAINED) -> list[Row]:
    """So many examples all over a source, or all there are."""
    return [source[place] for place in spread(len(source), min(len(source), count))]


def of_tokens(train: Sequence[Row], asked: Sequence[Row], vocab: int) -> dict[str, float]:
    """Accuracies of guesses at the labels of examples that have a token at every label.

    - `chance`: any of the labels that occur in training, each as likely; one that does not is never guessed;
    - `majority`: the one that occurs most often;
    - `a label shown`: any label, of training or asked, that stands in the example up to the place asked, each as
      likely: for recall, any of the values shown. Left out where no example shows one, and where tokens are not
      integers. Of very many labels, those that are shown and never asked, as what is overwritten, count in part.
    """
    counts = np.zeros(vocab)
    for row in train:
        np.add.at(counts, row['targets'][row['weights'] > 0], 1)
    occurring = counts > 0
    targets = [row['targets'][row['weights'] > 0] for row in asked]
    every = np.concatenate(targets)
    found = {
        'chance': float(occurring[every].mean() / occurring.sum()),
        'majority': float(np.mean(every == counts.argmax())),
    }
    if asked[0]['tokens'].dtype.kind == 'i':
        occurring[every] = True
        shares = [_seen(row, labels, occurring) for row, labels in zip(asked, targets, strict=True)]
        found |= {SHOWN: float(np.concatenate(shares).mean())}
    return {name: share for name, share in found.items() if share > 0 or name != SHOWN}


def _seen(row: Row, labels: Int[np.ndarray, 'n'], occurring: Bool[np.ndarray, 'o']) -> np.ndarray:
    """For each label, how likely it is guessed among the tokens that occur as labels and stand before it."""
    tokens, at = row['tokens'], row['at'][row['weights'] > 0]
    first = np.full(len(occurring), len(tokens))
    np.minimum.at(first, tokens[row['segments'] > 0], np.flatnonzero(row['segments'] > 0))
    starts = np.sort(first[occurring])
    shown = np.searchsorted(starts, at, side='right')
    return np.where(first[labels] <= at, 1 / np.maximum(shown, 1), 0.0)


def of_sequences(train: Sequence[Row], asked: Sequence[Row], classes: int, vocab: int | None) -> dict[str, float]:
    """Accuracies of guesses at the one label of a sequence.

    - `chance`: any class;
    - `majority`: the class that training has most often;
    - `first token`: the class that is most frequent in training for sequences that begin so: for ListOps, given the
      outermost operator;
    - `bag of tokens`: multinomial naive Bayes, a linear function of how often each token occurs, smoothed by one.

    The last two are left out where tokens are real numbers, for which `vocab` is `None`.
    """
    labels, targets = (np.array([row['label'] for row in rows]) for rows in (train, asked))
    found = of_labels(labels, targets, classes)
    if vocab is None:
        return found
    counts = np.bincount(labels, minlength=classes)
    begins, starts = (np.array([row['tokens'][0] for row in rows]) for rows in (train, asked))
    table = np.tile(counts / len(train), (vocab, 1))
    np.add.at(table, (begins, labels), 1.0)
    bags, asked_bags = (np.stack([_bag(row, vocab) for row in rows]) for rows in (train, asked))
    totals = np.ones((classes, vocab))
    np.add.at(totals, labels, bags)
    weights = np.log(totals / totals.sum(axis=1, keepdims=True))
    scores = asked_bags @ weights.T + np.log((counts + 1) / (len(train) + classes))
    return found | {
        'first token': float(np.mean(table.argmax(axis=1)[starts] == targets)),
        'bag of tokens': float(np.mean(scores.argmax(axis=1) == targets)),
    }


def of_labels(train: Int[np.ndarray, 'n'], asked: Int[np.ndarray, 'm'], classes: int) -> dict[str, float]:
    """Accuracies of two constant guesses at labels: `chance`, any class, and `majority`, that of training."""
    counts = np.bincount(train, minlength=classes)
    return {'chance': 1 / classes, 'majority': float(np.mean(asked == counts.argmax()))}


PRIOR = 10.0
"""How many tokens that follow another are added to those counted, in the shares of the tokens themselves."""


def of_text(train: Sequence[Row], asked: Sequence[Row], vocab: int) -> dict[str, float]:
    """Losses, in nats a token, of predictions of the next token that count what training has.

    - `unigram`: `p(t) = (n_t + 1) / (n + vocab)`, with `n_t` of n targets;
    - `bigram`: `p(t | s) = (n_st + PRIOR p(t)) / (n_s + PRIOR)` after the token s.

    Both are of the targets with weight, so that no document begins after another one's end.
    """
    before, after = _pairs(train)
    seen = np.bincount(before, minlength=vocab)
    shares = (np.bincount(after, minlength=vocab) + 1) / (len(after) + vocab)
    pairs, counts = np.unique(before * vocab + after, return_counts=True)
    first, second = _pairs(asked)
    places = np.searchsorted(pairs, first * vocab + second) % len(pairs)
    both = np.where(pairs[places] == first * vocab + second, counts[places], 0)
    follows = (both + PRIOR * shares[second]) / (seen[first] + PRIOR)
    return {'unigram': float(-np.log(shares[second]).mean()), 'bigram': float(-np.log(follows).mean())}


def _pairs(rows: Sequence[Row]) -> tuple[Int[np.ndarray, 'n'], Int[np.ndarray, 'n']]:
    """Tokens and those that follow them, where these count."""
    tokens, targets = (
        np.concatenate([row[name][row['weights'] > 0] for row in rows]).astype(np.int64)
        for name in ('tokens', 'targets')
    )
    return tokens, targets


PENALTY = 1.0
"""Added per feature to the squares of its weights, beside features of variance one and a thousand examples."""


def linear(train: Sequence[Row], asked: Sequence[Row], classes: int) -> float:
    """Accuracy of a linear map of the numbers of an example, fitted by ridge regression to its class as one-hot."""
    features, others = (np.stack([row['tokens'].reshape(-1) for row in rows]) for rows in (train, asked))
    labels, targets = (np.array([row['label'] for row in rows]) for rows in (train, asked))
    mean, spread = features.mean(axis=0), np.maximum(features.std(axis=0), 1e-6)
    x = np.column_stack([(features - mean) / spread, np.ones(len(features))]).astype(np.float64)
    # Of two systems with the same solution the smaller one: sequences may have more numbers than there are examples.
    one_hot, (count, size) = np.eye(classes)[labels], x.shape
    if size > count:
        weights = x.T @ np.linalg.solve(x @ x.T + PENALTY * np.eye(count), one_hot)
    else:
        weights = np.linalg.solve(x.T @ x + PENALTY * np.eye(size), x.T @ one_hot)
    scores = np.column_stack([(others - mean) / spread, np.ones(len(others))]) @ weights
    return float(np.mean(scores.argmax(axis=1) == targets))


def _bag(row: Row, vocab: int) -> Int[np.ndarray, 'o']:
    return np.bincount(row['tokens'][row['segments'] > 0], minlength=vocab)
