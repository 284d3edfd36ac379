"""The interface of a weight map to the attention templates.

A map is written twice. `weights` is its definition over whole rows, which the reference differentiates. The other
methods are the same map block by block, for templates that never hold a whole row. All of them work element by element
on a `Block`, and are made of operations that the kernels' compilers know: exp, log, tanh, where, maximum, comparisons
and arithmetic. Row quantities broadcast against the block (`... t 1` against `... t s`); reductions over keys are the
template's. There are two kinds of maps.

Most are a ratio that can be kept up to date while keys come in. The template keeps for every query a pivot (a running
maximum that begins at `start`), a denominator and an accumulator, and goes over the keys once:

    pivot' = max(pivot, max_j map.pivot(block)_j),   r = map.rescale(pivot, pivot')
    numerators, denominators = map.block(block, pivot')
    denominator = r denominator + sum_j denominators_j,   accumulator = r accumulator + sum_j numerators_j v_j

The output is `accumulator / normalizer` with `normalizer, statistics = map.finish(pivot, denominator)`.

A map that `surveys` knows its statistics before any weight: `map.survey(reduce)` computes them, with as many
reductions over the keys as it needs, or none, always in the portable form. The template then goes over the keys
once more, and sums `map.recompute(block, statistics)_j v_j`, and with `has_companion` also
`map.companion(block, statistics)_j v_j`.

The statistics, a tuple of row quantities in the type of accumulators, are all that the backward pass gets:
`map.recompute` makes the weights of a block from them, and `map.score_gradient` the gradient of its scores.
"""

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import arguments

HIDDEN = -1e30
"""The score of a hidden key: its exponential is zero, and unlike minus infinity it may be subtracted from itself."""

Statistics = tuple[jax.Array, ...]

Reduce = Callable[..., Any]
"""`reduce(function, kind, *rows)`: a reduction over all visible keys of `function(block, *rows)`, elementwise.

`kind` is 'max', 'min' or 'sum'; a function that returns a tuple has each of its parts reduced. 'argmax' and 'argmin'
return the extreme and the position of the first key that has it, in the same type. Over no keys they are minus
infinity, infinity, zero, and the position -1.
"""


class Scaled(NamedTuple):
    """Scores that are products times a positive number and nothing else, from which kernels save operations."""

    products: jax.Array
    scale: float

    @property
    def scores(self) -> jax.Array:
        return self.scale * self.products


class Block(NamedTuple):
    """The scores of some queries and some keys; the arrays broadcast against each other.

    Attributes:
      scores: finite; those of hidden keys are arbitrary.
      visible: whether the query may see the key.
      columns: the positions of the keys, integers.
      scaled: what the scores are made of, where a template says so.
    """

    scores: jax.Array
    visible: jax.Array
    columns: jax.Array
    scaled: Scaled | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightMap(abc.ABC):
    """How the scores of a row become the weights of its keys: over whole rows (`weights`), and block by block.

    Attributes:
      soft_cap: the scaled products of queries and keys are first bounded to `soft_cap tanh(scores / soft_cap)` (Gemma
        team, 2024, arXiv 2408.00118), before biases and masks; `None`: not bounded.
    """

    soft_cap: float | None = None

    statistics: ClassVar[tuple[str, ...]]
    """The names of the statistics."""

    start: ClassVar[float] = HIDDEN
    """Where the running maximum begins."""

    surveys: ClassVar[bool] = False
    """Whether the statistics are known before the weights; otherwise `pivot`, `block` and `finish` find both."""

    has_companion: ClassVar[bool] = False
    """Whether the gradient needs a second weighted sum of the values; only for maps that survey."""

    takes_sink: ClassVar[bool] = False
    """Whether the map supports a sink, an additional key with a score and no value; then it has `merge_sink`."""

    merges: ClassVar[bool] = False
    """Whether rows over some of the keys can be combined; then `merge` works."""

    counts_keys: ClassVar[bool] = False
    """Whether `query_factor` or `output_factor` depend on the number of visible keys; otherwise neither is called."""

    def __post_init__(self) -> None:
        arguments.check_fields(self)
        self._require(
            self.soft_cap is None or 0 < self.soft_cap < math.inf, 'soft_cap', 'a positive, finite number, or None'
        )

    def _require(self, fits: bool, field: str, expected: str) -> None:
        if not fits:
            raise ValueError(f'{type(self).__name__}: {field} is {getattr(self, field)}; expected {expected}')

    @abc.abstractmethod
    def weights(self, scores: jax.Array, visible: jax.Array) -> jax.Array:
        """The definition: the weights of whole rows, zero where not visible; zero rows where nothing is visible."""

    def query_factor(self, counts: jax.Array) -> jax.Array | None:
        """The factor of the products of a query that sees this many keys, before the cap; `None`: one."""
        return None

    def output_factor(self, counts: jax.Array) -> jax.Array | None:
        """The final factor of the weights of a query that sees this many keys; `None`: one."""
        return None

    def pivot(self, block: Block) -> jax.Array:
        """The numbers whose running maximum keeps `block` within range, `start` where not visible."""
        return jnp.where(block.visible, block.scores, self.start)

    def highest(self, block: Block, largest: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """The largest pivot of every row; `largest` takes the maxima over the keys of a block."""
        return largest(self.pivot(block))

    def rescale(self, old: jax.Array, new: jax.Array) -> jax.Array:
        """The factor of numerators and denominators when the pivot changes from `old` to `new`."""
        return jnp.exp(old - new)

    def block(self, block: Block, pivot: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The numerators and the denominators of a block, zero where not visible."""
        raise NotImplementedError(type(self).__name__)

    def finish(self, pivot: jax.Array, denominator: jax.Array) -> tuple[jax.Array, Statistics]:
        """The divisor of the accumulator, never zero, and the statistics; `denominator` is zero without keys."""
        raise NotImplementedError(type(self).__name__)

    def dense(self, block: Block) -> tuple[jax.Array, Statistics]:
        """`pivot`, `block` and `finish` for whole rows at once; where a row sees no key, the weights are arbitrary."""
        pivot = jnp.max(self.pivot(block), axis=-1, keepdims=True, initial=self.start)
        numerators, denominators = self.block(block, pivot)
        normalizer, statistics = self.finish(pivot, jnp.sum(denominators, axis=-1, keepdims=True))
        return numerators / normalizer, statistics

    def survey(self, reduce: Reduce) -> Statistics:
        """The statistics of all rows of a map that surveys."""
        raise NotImplementedError(type(self).__name__)

    def companion(self, block: Block, statistics: Statistics) -> jax.Array:
        """The second weights `u` of a block, zero where not visible; only with `has_companion`."""
        raise NotImplementedError(type(self).__name__)

    def resume(self, statistics: Statistics) -> tuple[jax.Array, jax.Array]:
        """The pivot and the denominator that `finish` made the statistics from; with `merges` alone."""
        raise NotImplementedError(type(self).__name__)

    def merge(self, left: Statistics, right: Statistics) -> tuple[Statistics, jax.Array, jax.Array]:
        """Combines rows over two disjoint sets of keys; with `merges` alone.

        Returns the statistics over both, and the factors of the sums of values by the weights of either.
        """
        known = [self.resume(left), self.resume(right)]
        pivot = jnp.maximum(known[0][0], known[1][0])
        rescales = [self.rescale(old, pivot) for old, _ in known]
        denominator = rescales[0] * known[0][1] + rescales[1] * known[1][1]
        normalizer, statistics = self.finish(pivot, denominator)
        first, second = (
            rescale * self.finish(*each)[0] / normalizer for rescale, each in zip(rescales, known, strict=True)
        )
        return statistics, first, second

    def merge_sink(self, statistics: Statistics, sink: jax.Array) -> tuple[Statistics, jax.Array, jax.Array]:
        """Adds a key with score `sink`, which may be minus infinity, and no value; only with `takes_sink`.

        Returns the new statistics, the factor of weights computed without it, and its own weight.
        """
        raise NotImplementedError(type(self).__name__)

    @abc.abstractmethod
    def recompute(self, block: Block, statistics: Statistics) -> jax.Array:
        """The weights of a block, zero where not visible."""

    @abc.abstractmethod
    def score_gradient(
        self,
        block: Block,
        weights: jax.Array,
        statistics: Statistics,
        dweights: jax.Array,
        delta: jax.Array,
        companion_delta: Any,
    ) -> jax.Array:
        """The gradient of the scores of a block, zero where not visible.

        `delta` is `sum_j weights_j dweights_j` over the row, `companion_delta` is `sum_j u_j dweights_j`, or `None`.
        """
