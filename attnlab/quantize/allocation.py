"""Bits given to the linear maps of layers by how much the loss rises with the error of each (the linearity theorem)."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from attnlab.errors import UserError
from attnlab.quantize.formats import Format, Rounding
from attnlab.quantize.layers import Quantization, named_maps
from attnlab.quantize.sparsity import apart
from attnlab.quantize.states import StateFormat
from attnlab.runs.loading import Loaded
from attnlab.signature import checked_fields
from attnlab.train.rows import rows_of
from attnlab.train.state import joined, split

NOISE = (0.05, 0.1, 0.15)
"""Sizes of noise, as shares of the size of a weight, that slopes are fitted to: about the errors of 6 to 3 bits."""


@dataclasses.dataclass(frozen=True)
class Share:
    """What one map has been given.

    Attributes:
      name: where the map is.
      slope: by how much the loss rises with the squared relative error of the weight, in nats.
      error: that error in the format chosen, `|W' - W|^2 / |W|^2`.
      format: the format.
      bits: that the weight takes, scales included.
      numbers: of the weight.
    """

    name: str
    slope: float
    error: float
    format: Format
    bits: int
    numbers: int


@checked_fields
@dataclasses.dataclass(frozen=True)
class Allocation:
    """A `Quantization` that is yet to be found: of every map of every layer the format, within a budget of bits.

        E[loss(W')] - loss(W) ~ sum_l a_l t_l^2,  t_l = |W'_l - W_l| / |W_l|,

    the linearity theorem of Malinovskii et al. 2025, https://arxiv.org/abs/2411.17525: slopes `a_l` do not depend on
    how weights are rounded, as long as errors are small (they grow faster from about three bits down). Formats are
    those with the least sum within the budget.

    Attributes:
      formats: to choose from.
      bits: that a number of linear maps may take on average, scales included.
      rows: of training, that slopes are measured on.
      inputs: as of `Quantization`.
      state: as of `Quantization`.
    """

    formats: tuple[Format, ...]
    bits: float
    rows: int = 64
    inputs: Rounding | None = None
    state: StateFormat | None = None

    def __post_init__(self) -> None:
        """Raises `UserError` for fewer than two formats, bits that are not above 0, and without rows."""
        if len(self.formats) < 2:
            raise UserError(
                f'a budget of bits chooses among formats, of which there are {len(self.formats)}; give two or more, '
                'such as --weights=higgs3x2,higgs4x2'
            )
        if not 0 < self.bits < np.inf:
            raise UserError(f'the budget is {self.bits} bits; it must be above 0')
        if self.rows < 1:
            raise UserError(f'rows of Allocation is {self.rows}; losses are measured on 1 or more')

    def found(self, loaded: Loaded) -> tuple[Quantization, list[Share]]:
        """The formats, measured and chosen for a run. Raises `UserError` for too small a budget."""
        alone = loaded.altered(apart)
        setup, model = alone.setup, alone.model()
        batches = rows_of(setup, 'train', self.rows, at_once=setup.rows_of_part)

        def loss(model: Any) -> float:
            _, params, buffers = split(model)
            total = [setup.measure(joined(params, buffers), batch)['loss'] for batch in batches]
            return sum(float(each.total) for each in total) / sum(float(each.count) for each in total)

        maps = named_maps(model)
        if not maps:
            raise UserError('this model has no linear map, so there is nothing to quantize')
        weights = [np.asarray(linear.weight[...]) for linear in maps.values()]
        errors = np.array([[_error(weight, format) for format in self.formats] for weight in weights])
        bits = np.array([[_bits(weight, format) for format in self.formats] for weight in weights])
        numbers = [weight.size for weight in weights]
        least = bits.min(axis=1).sum() / sum(numbers)
        if least > self.bits:
            raise UserError(
                f'the budget is {self.bits:g} bits a number and the smallest formats take {least:.4g}, scales '
                'included; give a larger budget, or smaller formats'
            )
        rises = slopes(model, loss)
        chosen = cheapest(rises[:, None] * errors, bits, int(self.bits * sum(numbers)))
        shares = [
            Share(name, float(rise), float(error[best]), self.formats[best], int(size[best]), count)
            for name, rise, error, size, count, best in zip(maps, rises, errors, bits, numbers, chosen, strict=True)
        ]
        return Quantization(tuple(share.format for share in shares), self.inputs, self.state), shares


def slopes(model: Any, loss: Callable[[Any], float], seed: int = 0) -> Float[np.ndarray, 'l']:
    """By how much `loss(model)` rises with the squared relative error of each linear map, in order of `named_maps`.

    Gaussian noise of sizes `NOISE` is added to one map at a time, and taken off it, so that the gradient of a model
    that is not at a minimum cancels: `a` is the least-squares slope, through the origin, of the mean rise on `t^2`.
    None is below 0. The model is as it was in the end.
    """
    whole = loss(model)
    squares = np.square(NOISE)
    found = []
    for index, linear in enumerate(named_maps(model).values()):
        weight = linear.weight[...]
        size = float(jnp.linalg.norm(weight.astype(jnp.float32)))
        rises = []
        for level, share in enumerate(NOISE):
            noise = np.random.default_rng([seed, index, level]).standard_normal(weight.shape)
            noise *= share * size / np.linalg.norm(noise)
            tried = []
            for sign in (1, -1):
                linear.weight[...] = (weight + sign * noise).astype(weight.dtype)
                tried.append(loss(model) - whole)
            rises.append(np.mean(tried))
        linear.weight[...] = weight
        found.append(max(0.0, float(squares @ rises / (squares @ squares))))
    return np.array(found)


def cheapest(costs: Float[np.ndarray, 'l j'], bits: Int[np.ndarray, 'l j'], budget: int) -> Int[np.ndarray, 'l']:
    """The choice of one of `j` for each of `l` with the least sum of costs whose sum of bits is within a budget.

    Exactly, by dynamic programming: of the choices for the first maps those are kept that no other betters in bits
    and in cost. Raises `UserError` for a budget below the least bits.
    """
    if bits.min(axis=1).sum() > budget:
        raise UserError(f'the budget is {budget:,} bits; the least is {bits.min(axis=1).sum():,}')
    # What the maps that follow take at least.
    later = np.append(np.cumsum(bits.min(axis=1)[::-1])[::-1][1:], 0)
    spent, paid = np.zeros(1, np.int64), np.zeros(1)
    stages = []
    for cost, size, rest in zip(costs, bits, later, strict=True):
        total, price = (spent[:, None] + size).reshape(-1), (paid[:, None] + cost).reshape(-1)
        order = np.lexsort((price, total))
        order = order[total[order] + rest <= budget]
        lowest = np.minimum.accumulate(price[order])
        kept = order[np.append(True, price[order][1:] < lowest[:-1])]
        spent, paid = total[kept], price[kept]
        stages.append(kept)
    # The last that is kept costs least.
    place, chosen = len(spent) - 1, []
    for kept in reversed(stages):
        place, choice = divmod(int(kept[place]), costs.shape[1])
        chosen.append(choice)
    return np.array(chosen[::-1])


def _error(weight: Float[np.ndarray, '*l d f'], format: Format) -> float:
    """The squared relative error of a weight in a format."""
    matrices = weight.reshape(-1, *weight.shape[-2:])
    change = sum(float(np.sum(np.square(np.asarray(format.rounded(jnp.asarray(one.T))).T - one))) for one in matrices)
    size = float(np.sum(np.square(weight)))
    return change / size if size else 0.0


def _bits(weight: Float[np.ndarray, '*l d f'], format: Format) -> int:
    """The bits that a weight takes in a format."""
    return format.stored_bits(weight.shape[:-3:-1]) * int(np.prod(weight.shape[:-2]))
