"""Huffman trees, as arrays of the paths from the root to every leaf."""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int


class Tree(NamedTuple):
    """A binary tree of `o` leaves and `o - 1` inner nodes.

    Attributes:
      nodes: inner nodes on the way from the root to each leaf; 0 beyond its end.
      signs: 1 where the way goes to the first child, -1 to the second, 0 beyond its end.
      children: of every inner node; leaf `j` is written as `-1 - j`.
      root: an inner node.
    """

    nodes: Int[np.ndarray, 'o n']
    signs: Int[np.ndarray, 'o n']
    children: Int[np.ndarray, 'i 2']
    root: int


def huffman(weights: Sequence[float | int]) -> Tree:
    """Returns the tree that joins the two lightest nodes until one is left; of equal ones those made first.

    Leaves were made in their order, before inner nodes. The mean length of a path is within one of the entropy of the
    weights in bits. Needs at least two weights.
    """
    leaves = len(weights)
    heap = [(float(weight), index) for index, weight in enumerate(weights)]
    heapq.heapify(heap)
    children = np.zeros((leaves - 1, 2), np.int32)
    for inner in range(leaves - 1):
        (one, first), (other, second) = heapq.heappop(heap), heapq.heappop(heap)
        children[inner] = [-1 - each if each < leaves else each - leaves for each in (first, second)]
        heapq.heappush(heap, (one + other, leaves + inner))
    paths: dict[int, list[tuple[int, int]]] = {}
    # A node is made after its children, so the last one is the root, and going backwards meets parents first.
    ways: list[list[tuple[int, int]]] = [[] for _ in range(leaves - 1)]
    for inner in reversed(range(leaves - 1)):
        for sign, child in zip((1, -1), children[inner].tolist(), strict=True):
            way = [*ways[inner], (inner, sign)]
            if child < 0:
                paths[-1 - child] = way
            else:
                ways[child] = way
    longest = max(len(path) for path in paths.values())
    nodes, signs = np.zeros((leaves, longest), np.int32), np.zeros((leaves, longest), np.int32)
    for leaf, path in paths.items():
        nodes[leaf, : len(path)], signs[leaf, : len(path)] = zip(*path, strict=True)
    return Tree(nodes, signs, children, leaves - 2)
