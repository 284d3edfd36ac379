"""Inputs in floating point of few bits, with an exponent bias of every channel that weights make up for (LLM-FP4)."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float, Int8

from attnlab.functional.measured import measured
from attnlab.nn.projections import Linear
from attnlab.quantize.calibration import check_rows, listened
from attnlab.quantize.formats import BIASES, ELEMENTS, FixedFloating, Format
from attnlab.quantize.layers import Quantization, ShiftedLinear, named_maps, replace_maps
from attnlab.quantize.sparsity import apart
from attnlab.quantize.states import StateFormat
from attnlab.quantize.told import tell
from attnlab.runs.loading import Loaded
from attnlab.signature import checked_fields
from attnlab.tasks.task import Batch
from attnlab.train.rows import rows_of

TRIED = np.concatenate([[0.0], BIASES])
"""By how much an exponent bias is searched above that which fits the largest number; of equal ones the first counts."""


@checked_fields
@dataclasses.dataclass(frozen=True)
class ShiftCalibration:
    """A `Quantization` that is yet to be found: of every map of every layer the exponent biases of what it reads.

        x_j ~ 2^k_j s f,   y = sum_j s f_j (2^k_j W_j),   f the element of (2^-k_j x_j) / s

    Channel `j` has the bias of the tensor, `s`, and a whole number `k_j = ceil(log2 m_j / max_i m_i)`, at most 0, with
    `m_j` the largest size of the channel on rows of training. Powers of two go into the weight before it is rounded, so
    that one scale is of all channels in the product. `s` is of the largest number, and of ranges that clip it
    (`attnlab.quantize.formats.BIASES`) the one with the least squared error of the map's outputs on those rows. Liu et
    al. 2023, https://arxiv.org/abs/2310.16836, who search the biases of weights in turn with those of inputs; here
    weights have the search of their own format, and the biases searched are at equal distances.

    Attributes:
      element: of inputs, as of `attnlab.quantize.formats.Floating`.
      rows: of training, that biases are found on, on padding too.
      weights: as of `Quantization`.
      state: as of `Quantization`.
    """

    element: str
    rows: int = 64
    weights: Format | None = None
    state: StateFormat | None = None

    def __post_init__(self) -> None:
        """Raises `UserError` for an unknown element, and without rows."""
        FixedFloating(self.element, 1.0)
        check_rows(self)

    def found(self, loaded: Loaded) -> tuple[Quantization, Loaded]:
        """The biases, and the run whose maps read shifted channels, which computes what it did."""
        alone = loaded.altered(apart)
        batches = rows_of(alone.setup, 'train', self.rows, at_once=alone.setup.rows_of_part)
        ranges, _ = listened(alone, alone.model(), batches)
        sizes = {name: np.maximum(np.abs(low), np.abs(high)) for name, (low, high) in ranges.items()}
        shifts = {name: channel_shifts(each) for name, each in sizes.items()}
        moved = alone.altered(lambda model: with_shifts(model, shifts))
        largest = ELEMENTS[self.element].largest
        widest = {
            name: float(np.max(each * np.exp2(-shifts[name].astype(np.float32))) / largest) or 1.0
            for name, each in sizes.items()
        }
        errors = self._errors(moved, widest, batches)
        scales = (widest[name] * 2 ** -TRIED[np.argmin(errors[name])] for name in widest)
        return Quantization(
            self.weights, tuple(FixedFloating(self.element, float(s)) for s in scales), self.state
        ), moved

    def _errors(
        self, moved: Loaded, widest: Mapping[str, float], batches: list[Batch]
    ) -> dict[str, Float[np.ndarray, ' c']]:
        """By map the squared error of its outputs with each of the biases tried; zeros where no loss depends on it."""
        model = moved.model()
        scales = list(widest.values())
        maps = replace_maps(model, lambda index, map_: _Tried(map_, self.element, scales[index]))
        tell(moved.setup, model, _Errors, batches)
        return {
            name: np.asarray(map_.errors[...], np.float64).reshape(-1, len(TRIED) + 1).sum(axis=0)[:-1]
            for name, map_ in zip(widest, maps, strict=True)
        }


def channel_shifts(sizes: Float[np.ndarray, 'd']) -> Int8[np.ndarray, 'd']:
    """`ceil(log2 m_j / max_i m_i)` of the largest sizes of channels, at least -127; 0 of one that is always zero."""
    most = float(sizes.max())
    share = np.where(sizes > 0, sizes, most) / (most or 1.0)
    return np.clip(np.ceil(np.log2(np.where(share > 0, share, 1.0))), -127, 0).astype(np.int8)


def with_shifts(model: nnx.Module, shifts: Mapping[str, Int8[np.ndarray, 'd']]) -> nnx.Module:
    """The model, layers apart, with maps that read shifted channels, in place; `shifts` are by name of map."""
    of_map = {id(map_): shifts[name] for name, map_ in named_maps(model).items()}

    def made(index: int, linear: Linear) -> ShiftedLinear:
        del index
        given = jnp.asarray(of_map[id(linear)])
        return ShiftedLinear(linear, jnp.broadcast_to(given, linear.weight[...].shape[:-1]))

    replace_maps(model, made)
    return model


class _Errors(nnx.Variable):
    """A place for squared errors, which are given as a derivative by it, and for how many calls they are of."""


class _Tried(Linear):
    """A map that reads shifted channels and tells, as a derivative, the errors that rounding them would make."""

    def __init__(self, linear: Linear, element: str, widest: float):
        self.share(linear)
        assert isinstance(linear, ShiftedLinear)
        self.linear, self.element, self.widest = linear, element, widest
        self.errors = _Errors(jnp.zeros((*linear.weight[...].shape[:-2], len(TRIED) + 1), jnp.float32))

    def __call__(self, x: Float[Array, '*b d']) -> Float[Array, '*b f']:
        rows = self.linear.inputs(x)
        rows = rows.reshape(-1, rows.shape[-1]).astype(jnp.float32)
        weight, element = self.weight[...], ELEMENTS[self.element]

        def error(scale: Float[Array, '']) -> Float[Array, '']:
            return jnp.sum(
                jnp.dot(element.rounded(rows, scale) - rows, weight, precision=jax.lax.Precision.HIGHEST) ** 2
            )

        scales = jnp.asarray(self.widest * np.exp2(-TRIED), jnp.float32)
        return measured(self.linear(x), jax.lax.map(error, scales), self.errors[...])
