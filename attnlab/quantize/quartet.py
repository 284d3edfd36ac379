"""Quartet: all three products of a linear map in training are of numbers of four bits, in blocks of 32."""

import dataclasses
import functools
import math
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jax import Array
from jaxtyping import Bool, Float

from attnlab.blocks.block import Block
from attnlab.errors import UserError
from attnlab.module import modules_of
from attnlab.nn.parameter import Buffer, Drawn
from attnlab.nn.projections import Linear
from attnlab.quantize.formats import ELEMENTS
from attnlab.quantize.layers import check_maps, replace_maps
from attnlab.signature import checked_fields

BLOCK = 32
"""Numbers that share a scale, and that are rotated together."""

LARGEST = ELEMENTS['e2m1'].largest

BEST = 2.92247856 / LARGEST
"""The scale of four bits of a Gaussian with the least error, in standard deviations, as in the released code."""

SHARE = 3 / 4
"""Numbers are shrunk by this before they are rounded at random, so that none lies beyond the largest."""

Exponent = Literal['nearest', 'floor']


@checked_fields
@dataclasses.dataclass(frozen=True)
class Quartet:
    """Linear maps of blocks that compute and are trained in MXFP4, simulated.

    Forward, inputs and weights are rotated along what is summed over, `H` Hadamard's matrix over the root of 32, and
    rounded to the nearest of E2M1 with scales that are powers of two,

        y = Q(x H) Q(W H)^T,  Q(u) = 2^e E2M1(u / 2^e),  2^e near 0.487 std(u);

    what lies beyond the largest number is clipped, and its gradient is zero. Backward, of what was multiplied,

        dx = 16/9 S(dy H') S(Q(W H) H') H^T,  dW likewise,  E S(u) = 3/4 u,

    `H'` with signs drawn anew and S rounded at random, by a key of every map of every layer that follows from seed and
    step (`attnlab.train.redraw`): gradients are those of exact products on average, and the same every time. Parts of
    an accumulated batch, and several uses of one map, share a step's draw; in the first step all maps have the same
    key. Castro et al. 2025, https://arxiv.org/abs/2505.14669.

    Maps outside of blocks (embeddings, heads) stay as they are. Products are of float32.

    Attributes:
      exponent: of forward scales: `nearest` power of two, as the error that the paper says has it, or the power below
        (`floor`), as the released code does.
    """

    exponent: Exponent = 'nearest'

    def __post_init__(self) -> None:
        """Raises `UserError` for another rounding of exponents."""
        if self.exponent not in ('nearest', 'floor'):
            raise UserError(f"exponent of Quartet is {self.exponent!r}; it must be 'nearest' or 'floor'")

    def __call__(self, model: Any) -> Any:
        """Replaces the maps in blocks of a model, in place. Raises `UserError` where there are none."""
        check_maps(model)
        blocks = modules_of(model, Block)
        made = [linear for block in blocks for linear in replace_maps(block, lambda _, linear: self._of(linear))]
        if not made:
            raise UserError('no block of this model has a linear map, so there is nothing to train in four bits')
        return model

    @property
    def added(self) -> tuple[str, ...]:
        """Patterns of the variables that a model has besides those of full precision."""
        return ('*/noise',)

    def _of(self, linear: Linear) -> 'QuartetLinear':
        return linear if isinstance(linear, QuartetLinear) else QuartetLinear(linear, self.exponent)


class QuartetLinear(Linear):
    """A linear map in four bits forward and backward; its parameters are those of the map, stacked over layers or not.

    Its buffer `noise` is the data of the key that its backward pass draws from, one a layer; layers of a `LinearStack`
    share that of the base.
    """

    absorbs: ClassVar[bool] = False

    def __init__(self, linear: Linear, exponent: Exponent):
        self.share(linear)
        self.exponent = exponent
        data = jax.random.key_data(jax.random.key(0))
        noise = jnp.broadcast_to(data, (*linear.weight.shape[:-2], *data.shape))
        self.noise = Buffer(noise, axes=(None,), drawn=Drawn(1, _key_data))

    def apply(self, x: Float[Array, '*b d'], weight: Float[Array, 'd f']) -> Float[Array, '*b f']:
        """Applies the map with a weight. Raises `UserError` for `x` of another width than the map's."""
        self.check_width(x, weight.shape[0])
        rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
        y = product(self.exponent, rows, weight.astype(jnp.float32), self.noise[...])
        if self.bias is not None:
            y = y + self.bias[...].astype(y.dtype)[None]
        return y.astype(x.dtype).reshape(*x.shape[:-1], y.shape[-1])


def _key_data(key: Array, shape: tuple[int, ...]) -> Array:
    """A new key, as a buffer holds it."""
    del shape
    return jax.random.key_data(key)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(exponent: Exponent, x: Float[Array, 'n d'], w: Float[Array, 'd f'], key: Array) -> Float[Array, 'n f']:
    """`x w` in four bits, with gradients in four bits, drawn from the data of a key."""
    return _forward(exponent, x, w, key)[0]


def _forward(exponent: Exponent, x: Array, w: Array, key: Array) -> tuple[Array, Any]:
    rows, columns = (rotated(blocks(each)) for each in (x, w.T))
    (x_few, x_kept), (w_few, w_kept) = (rounded(each, exponent) for each in (rows, columns))
    y = jnp.einsum('nki,fki->nf', x_few, w_few, precision=jax.lax.Precision.HIGHEST)
    return y, (x_few, x_kept, w_few, w_kept, key, x[:0])


def _backward(exponent: Exponent, kept: Any, dy: Array) -> tuple[Array, Array, None]:
    x_few, x_kept, w_few, w_kept, data, x = kept
    of_x, of_w = jax.random.split(jax.random.wrap_key_data(data))
    n, f, (k, i) = len(x_few), len(w_few), x_few.shape[1:]
    by_input = drawn_product(dy, w_few.reshape(f, -1), of_x).reshape(n, k, i)
    by_weight = drawn_product(dy.T, x_few.reshape(n, -1), of_w).reshape(f, k, i)
    dx, dw = (
        rotated(jnp.where(mask, each, 0)).reshape(len(each), -1)
        for mask, each in ((x_kept, by_input), (w_kept, by_weight))
    )
    return dx[:, : x.shape[1]], dw[:, : x.shape[1]].T, None


product.defvjp(_forward, _backward)


def blocks(x: Float[Array, 'n d']) -> Float[Array, 'n k i']:
    """The last axis in blocks of 32, filled up with zeros."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK)))
    return x.reshape(len(x), -1, BLOCK)


def rotated(x: Float[Array, 'n k i']) -> Float[Array, 'n k i']:
    """Every block by Hadamard's matrix over the root of its size, which is its own inverse."""
    matrix = scipy.linalg.hadamard(BLOCK).astype(np.float32) / math.sqrt(BLOCK)
    return jnp.einsum('nki,ij->nkj', x, matrix, precision=jax.lax.Precision.HIGHEST)


def rounded(x: Float[Array, 'n k i'], exponent: Exponent) -> tuple[Float[Array, 'n k i'], Bool[Array, 'n k i']]:
    """Blocks in four bits, to the nearest, and which numbers were not clipped."""
    deviation = jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True))
    power = jnp.log2(jnp.where(deviation == 0, 1, BEST * deviation))
    scale = jnp.exp2(jnp.round(power) if exponent == 'nearest' else jnp.floor(power))
    scale = jnp.broadcast_to(scale, x.shape)
    element, ratio = ELEMENTS['e2m1'], x / scale
    return element.numbers(element.codes(ratio)) * scale, jnp.abs(ratio) <= LARGEST


def drawn_product(a: Float[Array, 'n f'], b: Float[Array, 'f d'], key: Array) -> Float[Array, 'n d']:
    """`a b` of numbers of four bits, rounded at random, of which the mean is the exact product."""
    signs_key, a_key, b_key = jax.random.split(key, 3)
    a_blocks, b_blocks = blocks(a), blocks(b.T)
    signs = jax.random.rademacher(signs_key, a_blocks.shape[1:], a.dtype)[None]
    few = [stochastic(rotated(each * signs), one) for each, one in ((a_blocks, a_key), (b_blocks, b_key))]
    found = jnp.einsum('nki,dki->nd', *few, precision=jax.lax.Precision.HIGHEST)
    return found / SHARE**2


def stochastic(x: Float[Array, 'n k i'], key: Array) -> Float[Array, 'n k i']:
    """`3/4 x` in four bits, rounded at random so that this is the mean.

    The scale of a block, `2^(floor(log2 max |x|) - 2)`, leaves nothing beyond 6 after it is shrunk.
    """
    most = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    _, above = jnp.frexp(most)
    exponent = jnp.broadcast_to(jnp.where(most > 0, above - 3, 0), x.shape)
    sizes = SHARE * jnp.abs(jnp.ldexp(x, -exponent))
    step = jnp.where(sizes < 2, 0.5, jnp.where(sizes < 4, 1.0, 2.0))
    below = jnp.floor(sizes / step) * step
    up = jax.random.uniform(key, x.shape, x.dtype) < (sizes - below) / step
    return jnp.sign(x) * jnp.ldexp(below + up * step, exponent)
