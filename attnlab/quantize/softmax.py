"""Softmaxes of few bits, whose mean rounding error is measured on rows of training and added back."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float

from attnlab.errors import UserError
from attnlab.functional.dense import ScoreRows, softmax
from attnlab.functional.straight_through import straight_through
from attnlab.models.weight_maps import replaced
from attnlab.module import Module, modules_of
from attnlab.nn.parameter import buffer
from attnlab.quantize.told import tell
from attnlab.runs.loading import Loaded
from attnlab.signature import checked_fields
from attnlab.train.rows import rows_of
from attnlab.train.state import joined, split
from attnlab.typing import DropoutKey


class QuantizedSoftmax(Module):
    """The softmax rounded to multiples of `1 / (2^bits - 1)`, plus a constant for every head on every visible key.

        w_ij = Q(p_ij) + c_h,   c_h = mean of p - Q(p) over the visible keys of the queries of rows of training

    Rounding sets most small weights to zero, so that rows lose mass; the constant, a buffer, restores it on average.
    Queries that the loss does not depend on, such as those of padding, are not in the mean. Gradients are those of the
    softmax. Pandey et al. 2023, https://arxiv.org/abs/2309.01729.
    """

    def __init__(self, *, heads: int, bits: int, rngs: nnx.Rngs):
        del rngs
        self.bits = bits
        self.correction = buffer(jnp.zeros(heads, jnp.float32), axes=('heads',))

    def __call__(self, rows: ScoreRows, key: DropoutKey | None) -> Float[Array, 'b h t s']:
        weights = softmax(rows.scores, rows.visible)
        rounded = straight_through(quantized_weights(weights, self.bits), weights)
        correction = self.correction[...].astype(rounded.dtype)[None, :, None, None]
        return jnp.where(rows.visible, rounded + correction, 0)


def quantized_weights(weights: Float[Array, '*b s'], bits: int) -> Float[Array, '*b s']:
    """Rounds numbers in [0, 1] to multiples of `1 / (2^bits - 1)`."""
    top = 2**bits - 1
    return jnp.round(weights * top) / top


@checked_fields
@dataclasses.dataclass(frozen=True)
class Correction:
    """A softmax of few bits whose constants are yet to be found.

    Attributes:
      bits: of a weight, 1 to 16.
      rows: of training, that the constants are measured on.
    """

    bits: int
    rows: int = 64

    def __post_init__(self) -> None:
        """Raises `UserError` for bits that there are not, and without rows."""
        check_bits(self.bits)
        if self.rows < 1:
            raise UserError(f'rows of Correction is {self.rows}; constants are measured on 1 or more')

    def found(self, loaded: Loaded, changed: Loaded) -> Loaded:
        """A run with a `QuantizedSoftmax` in the place of every softmax of `loaded`, with the constants measured there.

        Raises `UserError` where there are fewer rows.
        """
        model = replaced(loaded.model(), functools.partial(_Told, bits=self.bits))
        tell(loaded.setup, model, _Lost, rows_of(loaded.setup, 'train', self.rows))
        made = changed.model()
        for told, rounded in zip(modules_of(model, _Told), modules_of(made, QuantizedSoftmax), strict=True):
            sums = np.asarray(told.lost[...], np.float64)
            lost, keys = sums[..., 0, :], sums[..., 1, :]
            rounded.correction[...] = jnp.asarray(lost / np.maximum(keys, 1), jnp.float32)
        _, params, buffers = split(made)
        return dataclasses.replace(changed, variables=joined(params, buffers))


def check_bits(bits: int) -> None:
    """Raises `UserError` for bits that a softmax is not rounded to."""
    if not 1 <= bits <= 16:
        raise UserError(f'a softmax is rounded to {bits} bits; they must be from 1 to 16')


class _Lost(nnx.Variable):
    """Sums of what rounding takes from visible keys, and how many keys they are of, by head."""


class _Told(Module):
    """The softmax as it is, which tells what rounding would take of it as the derivative by `lost`."""

    def __init__(self, *, heads: int, bits: int, rngs: nnx.Rngs):
        del rngs
        self.bits = bits
        self.lost = _Lost(jnp.zeros((2, heads), jnp.float32))

    def __call__(self, rows: ScoreRows, key: DropoutKey | None) -> Float[Array, 'b h t s']:
        return _told(self.bits, softmax(rows.scores, rows.visible), rows.visible, self.lost[...])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _told(bits: int, weights: Array, visible: Array, lost: Array) -> Array:
    return weights


def _forward(bits: int, weights: Array, visible: Array, lost: Array) -> tuple[Array, tuple[Array, Array]]:
    return weights, (weights, visible)


def _backward(bits: int, kept: tuple[Array, Array], derivative: Array) -> tuple[Array, None, Array]:
    weights, visible = kept
    counted = visible & jnp.any(derivative != 0, axis=-1, keepdims=True)
    taken = jnp.where(counted, weights - quantized_weights(weights, bits), 0)
    sums = [jnp.sum(each, axis=(0, 2, 3), dtype=jnp.float32) for each in (taken, counted)]
    return derivative, None, jnp.stack(sums)


_told.defvjp(_forward, _backward)
