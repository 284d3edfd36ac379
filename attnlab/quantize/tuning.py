"""Codes and scales of a quantized model tuned by turns on rows of training (PV-tuning)."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array
from jaxtyping import Float, Int, Shaped

from attnlab.errors import UserError
from attnlab.functional.straight_through import straight_through
from attnlab.nn.parameter import Buffer
from attnlab.nn.projections import Linear
from attnlab.quantize.formats import Stored, Symmetric, Uniform
from attnlab.quantize.layers import QuantizedLinear, over_leading, replace_maps, shifted
from attnlab.quantize.packing import packed, unpacked
from attnlab.runs.loading import Loaded
from attnlab.signature import checked_fields
from attnlab.tasks.task import Batch
from attnlab.train.rows import rows_of
from attnlab.train.state import joined, split

TRIES = 6
"""How many shares of codes that move are tried where the loss would not fall, each half of the one before."""


@checked_fields
@dataclasses.dataclass(frozen=True)
class Alternation:
    """How codes and scales are tuned: by turns, on the loss `f(q(codes, scales))` of a batch of training rows,

        V: scales by a step of Adam down the gradient, codes as they are;
        P: codes one level down the gradient, of the few weights for which `|df/dw| s` is largest, scales as they are.

    Of each map the P step moves `share` of the codes at most, and so many that the weight changes by `trust` of its
    size at most; where the loss on the batch does not fall, half as many, and none after six tries, so that no P
    step raises it. Malinovskii et al. 2024, https://arxiv.org/abs/2405.14852: moves of all weights, as small as a
    gradient step, round back to where they were, and moves of few may be large.
    They choose by the step of an optimiser and search codes of vectors by beams; here a code moves by one.

    Attributes:
      rounds: how often both steps are taken, a batch a round.
      share: of the codes of a map that may move in a round.
      trust: the largest change of a weight in a round, as a share of its size.
      rate: of the logarithms of scales, in the V step.
      rows: of a batch; `None`: as many as in training.
    """

    rounds: int
    share: float = 0.01
    trust: float = 0.02
    rate: float = 1e-3
    rows: int | None = None

    def __post_init__(self) -> None:
        """Raises `UserError` without rounds or rows, and for shares that are none."""
        if self.rounds < 1 or (self.rows is not None and self.rows < 1):
            raise UserError(f'rounds and rows of Alternation are {self.rounds} and {self.rows}; they must be 1 or more')
        if not (0 < self.share <= 1 and 0 < self.trust <= 1 and 0 <= self.rate < 1):
            raise UserError(
                f'share, trust and rate of Alternation are {self.share}, {self.trust} and {self.rate}; the first two '
                'must be above 0 and at most 1, the last at least 0 and below 1'
            )


class Shift(nnx.Variable):
    """What is added to a weight, zero: the gradient by it is that by the weight."""


class Growth(nnx.Variable):
    """The logarithm of what scales are multiplied by."""


class Tuned(Linear):
    """A quantized map whose weight can be differentiated by scales and by itself.

    Raises `UserError` for a format whose codes are not equally far apart.
    """

    def __init__(self, linear: QuantizedLinear):
        if not isinstance(linear.format, Uniform):
            raise UserError(
                f'codes of {type(linear.format).__name__} do not lie side by side; --tuned is for weights such as '
                'int3, affine3 or minmax3'
            )
        self.axes, self.usual, self.bias = linear.axes, linear.usual, linear.bias
        self.format, self.input_format, self.shape = linear.format, linear.input_format, linear.shape
        self.shifts = linear.shifts
        self.stored = linear.stored
        scales = self.stored['scales'][...]
        self.growth = Growth(jnp.zeros(scales.shape, jnp.float32))
        self.shift = Shift(jnp.zeros((*scales.shape[:-1], *self.shape), jnp.float32))

    def inputs(self, x: Float[Array, '*b d']) -> Float[Array, '*b d']:
        """The inputs, rounded, with gradients straight through."""
        if self.input_format is None:
            return x
        x = shifted(x, self.shifts)
        return straight_through(self.input_format.rounded(x), x)

    def matrix(self) -> Float[Array, 'd f']:
        """The weight that the codes stand for."""
        stored = {name: variable[...] for name, variable in self.stored.items()}
        stored['scales'] = stored['scales'].astype(jnp.float32) * jnp.exp(self.growth[...])
        return self.format.decode(stored, self.shape[::-1], jnp.float32).T + self.shift[...]

    def codes(self) -> Int[Array, '*l g n']:
        """The codes of groups."""
        size = self.format.group_size(self.shape[::-1])
        return unpacked(self.stored['codes'][...], self.format.code_bits, size)

    def settle(self) -> None:
        """Multiplies scales by what they grew by."""
        scales = self.stored['scales']
        scales[...] = (scales[...].astype(jnp.float32) * jnp.exp(self.growth[...])).astype(scales[...].dtype)
        self.growth[...] = jnp.zeros_like(self.growth[...])


def tuned(changed: Loaded, how: Alternation) -> tuple[Loaded, list[float]]:
    """A quantized run with codes and scales tuned, and its loss on the first batch before and after.

    Raises `UserError` where weights are not of a uniform format, and for more rows than training has.
    """
    setup = changed.setup
    size = setup.batch_size if how.rows is None else how.rows
    source = setup.task.source('train', setup.length)
    batches = rows_of(setup, 'train', min(len(source) // size, how.rounds) * size or size, at_once=size)

    def loss(model: Any, batch: Batch) -> Array:
        found = setup.task.measure(model, batch, None)['loss']
        return found.total / jnp.maximum(found.count, 1)

    model = changed.model()
    losses = alternated(model, loss, batches, how, setup.jit)
    _, params, buffers = split(model)
    return dataclasses.replace(changed, variables=joined(params, buffers)), losses


def alternated(
    model: Any,
    loss: Callable[[Any, Any], Array],
    batches: Sequence[Any],
    how: Alternation,
    jit: Callable[..., Any] = jax.jit,
) -> list[float]:
    """Tunes a model in place; returns its loss on the first batch before and after.

    Round `i` is on batch `i`, beginning again after the last.
    """
    originals: list[QuantizedLinear] = []

    def made(index: int, linear: Linear) -> Tuned:
        if not isinstance(linear, QuantizedLinear) or linear.format is None:
            raise UserError('--tuned tunes weights of few bits; give --weights, such as int3')
        originals.append(linear)
        return Tuned(linear)

    maps = replace_maps(model, made)
    graphdef, *parts = nnx.split(model, Growth, Shift, Buffer, ...)
    whole = nnx.graphdef(model)

    @jit
    def slopes(growth: nnx.State, shift: nnx.State, buffers: nnx.State, rest: nnx.State, batch: Any) -> Any:
        def of(growth: nnx.State, shift: nnx.State) -> Array:
            return loss(nnx.merge(graphdef, growth, shift, buffers, rest), batch)

        return jax.value_and_grad(of, argnums=(0, 1))(growth, shift)

    def measured(batch: Any) -> tuple[float, Any, Any]:
        _, *now = nnx.split(model, Growth, Shift, Buffer, ...)
        value, (by_growth, by_shift) = slopes(*now, batch)
        return float(value), by_growth, by_shift

    @jit
    def forward(state: nnx.State, batch: Any) -> Array:
        return loss(nnx.merge(whole, state), batch)

    def loss_of(batch: Any) -> float:
        return float(forward(nnx.state(model), batch))

    rule = optax.adam(how.rate)
    moments = rule.init(parts[0])
    first = loss_of(batches[0])
    for turn in range(how.rounds):
        batch = batches[turn % len(batches)]
        _, by_growth, _ = measured(batch)
        step, moments = rule.update(by_growth, moments)
        nnx.update(model, step)
        for map_ in maps:
            map_.settle()
        before, _, by_shift = measured(batch)
        _moved(model, maps, by_shift, how, before, functools.partial(loss_of, batch))
    last = loss_of(batches[0])
    index = iter(originals)
    replace_maps(model, lambda _, map_: next(index))
    return [first, last]


def _moved(
    model: Any, maps: Sequence[Tuned], by_shift: nnx.State, how: Alternation, before: float, after: Callable[[], float]
) -> None:
    """The P step, in place: halves the share that moves until the loss falls."""
    nnx.update(model, by_shift)
    slopes = [np.asarray(map_.shift[...]) for map_ in maps]
    for map_ in maps:
        map_.shift[...] = jnp.zeros_like(map_.shift[...])
    whole = [np.asarray(map_.stored['codes'][...]) for map_ in maps]
    share = how.share
    for _ in range(TRIES):
        for map_, slope in zip(maps, slopes, strict=True):
            map_.stored['codes'][...] = moved(map_, slope, share, how.trust)
        changed = (np.any(map_.stored['codes'][...] != codes) for map_, codes in zip(maps, whole, strict=True))
        # Where none may move, none of fewer may.
        if not any(changed) or after() < before:
            return
        for map_, codes in zip(maps, whole, strict=True):
            map_.stored['codes'][...] = jnp.asarray(codes)
        share /= 2


def moved(map_: Tuned, slope: Shaped[np.ndarray, '*l d f'], share: float, trust: float) -> Shaped[Array, '*l g p']:
    """The packed codes of a map after those have moved for which the loss falls most, by one level each."""

    def one(slope: Array, stored: Stored) -> Stored:
        format, rows = map_.format, map_.shape[::-1]
        size = format.group_size(rows)
        codes = unpacked(stored['codes'], format.code_bits, size)
        scales = jnp.broadcast_to(stored['scales'][:, None].astype(jnp.float32), codes.shape)
        # What fills a group up has no gradient and so does not move.
        by_group = format.groups(slope.T) * _real(format, rows)
        target = codes - jnp.sign(by_group).astype(codes.dtype)
        there = (target >= 0) & (target <= _top(format)) & (by_group != 0)
        gain = jnp.where(there, jnp.abs(by_group) * scales, 0).reshape(-1)
        order = jnp.argsort(-gain)
        weight = jnp.sum(jnp.square(format.decode(stored, rows, jnp.float32)))
        spent = jnp.cumsum(jnp.square(scales.reshape(-1)[order]))
        count = jnp.arange(len(order)) < jnp.maximum(1, int(share * slope.size))
        goes = jnp.zeros(len(order), bool).at[order].set(count & (spent <= trust**2 * weight) & (gain[order] > 0))
        chosen = jnp.where(goes.reshape(codes.shape), target, codes)
        return {'codes': packed(chosen, format.code_bits)}

    stored = {name: variable[...] for name, variable in map_.stored.items()}
    return over_leading(one, jnp.asarray(slope), stored)['codes']


def _real(format: Uniform, rows: tuple[int, ...]) -> Float[Array, 'g n']:
    """1 where a number of a group is of the weight, 0 where it fills the group up."""
    if isinstance(format.scope, str):
        return jnp.ones((1, 1), jnp.float32)
    size = format.group_size(rows)
    there = jnp.pad(jnp.ones(rows), ((0, 0), (0, -rows[1] % size)))
    return there.reshape(-1, size)


def _top(format: Uniform) -> int:
    """The largest code."""
    return 2**format.code_bits - (2 if isinstance(format, Symmetric) else 1)
