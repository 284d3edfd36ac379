"""Huffman trees by hand, and what holds of all of them."""

import numpy as np

from attnlab.functional.huffman import huffman


def test_a_tree_by_hand():
    # 1 and 1 join first; then the leaf of 2, which is older, with their node; then 4 with 4.
    tree = huffman([4, 2, 1, 1])
    assert tree.children.tolist() == [[-3, -4], [-2, 0], [-1, 1]] and tree.root == 2
    assert tree.nodes.tolist() == [[2, 0, 0], [2, 1, 0], [2, 1, 0], [2, 1, 0]]
    assert tree.signs.tolist() == [[1, 0, 0], [-1, 1, 0], [-1, -1, 1], [-1, -1, -1]]


def test_ties_are_broken_by_index():
    assert huffman([1] * 4).children.tolist() == [[-1, -2], [-3, -4], [0, 1]]


def test_paths_are_within_one_of_the_entropy():
    counts = 1 / np.arange(1, 101)
    chances = counts / counts.sum()
    tree = huffman(counts.tolist())
    mean = float(chances @ np.abs(tree.signs).sum(axis=1))
    entropy = float(-chances @ np.log2(chances))
    assert entropy <= mean <= entropy + 1
    assert np.isclose(np.sum(2.0 ** -np.abs(tree.signs).sum(axis=1)), 1)
