"""Weights rounded column by column, each error made up for by the columns that are still to be rounded (GPTQ)."""

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float, Int
from scipy.linalg import LinAlgError, cho_factor, cho_solve, cholesky

from attnlab.errors import UserError
from attnlab.nn.projections import Linear, check_plain
from attnlab.quantize.formats import Elementwise, Format, Stored
from attnlab.quantize.layers import QuantizedLinear, linear_maps, named_maps, replace_maps
from attnlab.quantize.packing import packed
from attnlab.quantize.told import tell
from attnlab.runs.loading import Loaded
from attnlab.signature import checked_fields
from attnlab.train.rows import rows_of
from attnlab.train.state import joined, split


@checked_fields
@dataclasses.dataclass(frozen=True)
class Feedback:
    """How weights are calibrated by error feedback.

    For a map with inputs x, `H = sum x x^T`, and `U^T U` the inverse of the damped H with U upper triangular: columns
    j, what one input is weighed with, are rounded in turn, and

        e = (w_j - q_j) / U_jj,  w_i <- w_i - U_ji e   for the columns i > j,

    the change of those columns that keeps the squared error of outputs least. Scales are those of the weights before.
    Frantar et al. 2022, https://arxiv.org/abs/2210.17323, who fit the scales of a group when its first column is
    reached, and set weights of inputs that were always zero to zero.

    Attributes:
      rows: of training, that inputs are taken from.
      damping: what is added to the diagonal of H, as a share of its mean.
      ordered: columns are rounded by falling diagonal of H, instead of in their order.

    Raises `UserError` without rows, and for a damping below 0.
    """

    rows: int = 128
    damping: float = 0.01
    ordered: bool = False

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise UserError(f'rows of Feedback is {self.rows}; inputs are taken from 1 or more')
        if not 0 <= self.damping < np.inf:
            raise UserError(f'damping of Feedback is {self.damping}; it must be 0 or above')

    def rounded(
        self, weight: Float[np.ndarray, 'r d'], hessian: Float[np.ndarray, 'd d'], format: Elementwise
    ) -> tuple[Stored, Float[np.ndarray, 'r d']]:
        """What stores a weight, an output a row, and the numbers it stands for; computed in float64.

        Raises `UserError` for a Hessian that has no inverse.
        """
        rows, columns = weight.shape
        diagonal = np.diagonal(hessian).astype(np.float64)
        order = np.argsort(-diagonal, kind='stable') if self.ordered else np.arange(columns)
        factor = _factor(hessian.astype(np.float64)[np.ix_(order, order)], self.damping)
        fitted = format.fitted(format.groups(jnp.asarray(weight, jnp.float32)))
        by_group = {name: np.asarray(array) for name, array in fitted.items()}
        places = _groups(format, (rows, columns))
        # In the order of rounding.
        left = weight.astype(np.float64)[:, order]
        codes, numbers = np.zeros((rows, columns), np.int32), np.zeros((rows, columns))
        for place, column in enumerate(order):
            here = {name: array[places[:, column]] for name, array in by_group.items()}
            code, number = _column(format, left[:, place].astype(np.float32), here)
            codes[:, column], numbers[:, column] = code, number
            error = (left[:, place] - numbers[:, column]) / factor[place, place]
            left[:, place + 1 :] -= np.outer(error, factor[place, place + 1 :])
        stored = {'codes': packed(format.groups(jnp.asarray(codes)), format.code_bits)} | fitted
        return stored, numbers.astype(weight.dtype)


def _factor(hessian: Float[np.ndarray, 'd d'], damping: float) -> Float[np.ndarray, 'd d']:
    """The upper triangular `U` with `U^T U` the inverse of the damped matrix; the identity for one that is zero."""
    mean = np.mean(np.diagonal(hessian))
    eye = np.eye(len(hessian))
    if mean == 0:
        return eye
    try:
        # In units of the mean, so that sizes of inputs do not matter.
        return cholesky(cho_solve(cho_factor(hessian / mean + damping * eye), eye))
    except LinAlgError as error:
        raise UserError(
            f'the inputs of a map of {len(hessian)} inputs do not span them; give a --damping above {damping}, or more '
            'rows'
        ) from error


def _groups(format: Format, shape: tuple[int, int]) -> Int[np.ndarray, 'r d']:
    """Which group each number of rows of this shape is of."""
    rows, columns = shape
    size = format.group_size(shape)
    if format.scope == 'tensor':
        return np.zeros(shape, np.int64)
    per_row = -(-columns // size)
    return np.arange(rows)[:, None] * per_row + np.arange(columns)[None] // size


@functools.partial(jax.jit, static_argnums=0)
def _column(
    format: Elementwise, x: Float[Array, 'r'], fitted: Mapping[str, Array]
) -> tuple[Int[Array, 'r'], Float[Array, 'r']]:
    codes = format.codes(x[:, None], fitted)
    return codes[:, 0], format.numbers(codes, fitted, jnp.float32)[:, 0]


class Moments(nnx.Variable):
    """A place for sums over inputs, which are given as a derivative by it; see `Watched`."""


class Watched(Linear):
    """A linear map whose `moments` have the derivative `sum x x^T` over its inputs, whatever the function.

    So the inputs of a map come along through scans, maps over axes and stacks of layers, as derivatives do. Those whose
    own derivative is zero, on which the function does not depend, such as padding, are not counted.

    Raises `UserError` for a map whose weight is rounded or stored, which this one would not compute with.
    """

    def __init__(self, linear: Linear):
        check_plain(linear)
        self.share(linear)
        shape = linear.weight[...].shape
        self.moments = Moments(jnp.zeros((*shape[:-1], shape[-2]), jnp.float32))

    def inputs(self, x: Float[Array, '*b d']) -> Float[Array, '*b d']:
        """The inputs, as they are."""
        return _watched(x, self.moments[...])


@jax.custom_vjp
def _watched(x: Array, moments: Array) -> Array:
    return x


def _forward(x: Array, moments: Array) -> tuple[Array, Array]:
    return x, x


def _backward(x: Array, derivative: Array) -> tuple[Array, Array]:
    there = jnp.any(derivative.reshape(-1, x.shape[-1]) != 0, axis=-1)
    rows = jnp.where(there[:, None], x.reshape(-1, x.shape[-1]).astype(jnp.float32), 0)
    return derivative, jnp.einsum('nd,ne->de', rows, rows, precision=jax.lax.Precision.HIGHEST)


_watched.defvjp(_forward, _backward)


def watched(model: Any) -> list[Watched]:
    """Replaces the linear maps of a model by ones that are watched, in place, and returns these, each once."""
    return replace_maps(model, lambda index, linear: Watched(linear))


def calibrated(loaded: Loaded, changed: Loaded, format: Format, how: Feedback) -> Loaded:
    """A quantized run with weights rounded by error feedback, on the inputs that its maps have in training rows.

    Maps are rounded period by period of the stack, with inputs of the model whose earlier periods are rounded; layer by
    layer where each has a block of its own.

    Args:
      loaded: the run, its layers taken apart and its activations sparse as those of `changed` are.
      changed: the same, quantized; what is stored of its maps is replaced.
      format: of the weights.
      how: on which rows.

    Raises `UserError` for a format that rounds groups as a whole, and where there are fewer rows.
    """
    if not isinstance(format, Elementwise):
        raise UserError(
            f'{type(format).__name__} does not round numbers one by one, so errors cannot be fed back; --feedback is '
            'for weights such as int4, affine4, minmax4, e2m1 or mxe2m1'
        )
    setup = loaded.setup
    batches = rows_of(setup, 'train', how.rows)
    model, made = loaded.model(), changed.model()
    maps = watched(model)
    each = {id(linear): linear for _, _, linear in linear_maps(made)}.values()
    targets = [linear for linear in each if isinstance(linear, QuantizedLinear)]
    found = [{name: np.array(variable[...]) for name, variable in target.stored.items()} for target in targets]
    periods = max((map_.weight[...].shape[0] for map_ in maps if map_.weight[...].ndim > 2), default=1)
    blocks = [_block(name) for name in named_maps(model)]
    for turn in range(periods if periods > 1 else 1 + max(blocks, default=0)):
        tell(setup, model, Moments, batches)
        for map_, block, stored in zip(maps, blocks, found, strict=True):
            weight, hessian = np.array(map_.weight[...]), np.asarray(map_.moments[...])
            # What is not stacked over layers has its turn with the first.
            for place in np.ndindex(weight.shape[:-2]):
                if (block if periods == 1 else place[0] if place else 0) == turn:
                    pieces, numbers = how.rounded(weight[place].T, hessian[place], format)
                    weight[place] = numbers.T
                    for name, piece in pieces.items():
                        stored[name][place] = np.asarray(piece)
            map_.weight[...] = jnp.asarray(weight)
    for target, stored in zip(targets, found, strict=True):
        for name, array in stored.items():
            target.stored[name][...] = jnp.asarray(array)
    _, params, buffers = split(made)
    return dataclasses.replace(changed, variables=joined(params, buffers))


def _block(name: str) -> int:
    """The place in its stack of the block that a map is of, by the map's name; of others the first."""
    found = re.search(r'\bblocks\.(\d+)\.', name)
    return int(found[1]) if found else 0
