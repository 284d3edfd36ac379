"""Bits per byte that counts of three bytes reach on the text of the quickstart: python scripts/trigram.py.

Counts are of the training split of this Python's standard library, and the bits of its whole validation split.
"""

from collections.abc import Sequence

import numpy as np

from attnlab.data.text.stdlib import StdlibText

START = 256
"""What stands before the first byte of a document."""


def grams(documents: Sequence[bytes], order: int) -> np.ndarray:
    """Every byte of documents with the `order - 1` before it, as a number to the base of 257, itself last."""
    before = np.full(order - 1, START)
    found = []
    for document in documents:
        digits = np.concatenate([before, np.frombuffer(document, np.uint8).astype(np.int64)])
        found.append(sum(digits[place : place + len(document)] * 257 ** (order - 1 - place) for place in range(order)))
    return np.concatenate(found)


def counts(of: np.ndarray, among: np.ndarray) -> np.ndarray:
    """How often each number occurs among others."""
    found, times = np.unique(among, return_counts=True)
    place = np.minimum(np.searchsorted(found, of), len(found) - 1)
    return np.where(found[place] == of, times[place], 0)


def bits_per_byte(train: Sequence[bytes], asked: Sequence[bytes], order: int = 3) -> float:
    """The mean of `-log2 p` over the bytes asked, where p interpolates counts n of training.

        p(c | ab) = (n(abc) + k(ab) p(c | b)) / (n(ab) + k(ab)),   k(ab) = different bytes after ab

    Shortest is the empty context, with 1 / 256 below it; one that training has not adds nothing. Method C of Witten and
    Bell 1991, https://doi.org/10.1109/18.87000.
    """
    p = np.full(sum(map(len, asked)), 1 / 256)
    for length in range(1, order + 1):
        seen, here = grams(train, length), grams(asked, length)
        contexts = here // 257
        kinds = np.maximum(counts(contexts, np.unique(seen) // 257), 1)  # One, of no context, leaves p as it is.
        p = (counts(here, seen) + kinds * p) / (counts(contexts, seen // 257) + kinds)
    return float(-np.mean(np.log2(p)))


def main() -> None:
    """Prints the bits."""
    text = StdlibText()
    train, valid = ([document.content for document in text.documents(split)] for split in ('train', 'valid'))
    print(f'{sum(map(len, valid)):,} bytes, corpus hash {text.describe()["corpus_hash"][:8]}')
    print(f'{bits_per_byte(train, valid):.3f} bits per byte')


if __name__ == '__main__':
    main()
