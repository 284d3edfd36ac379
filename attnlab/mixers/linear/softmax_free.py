"""Softmax-free attention: a Gaussian kernel between tokens, by way of a few landmarks."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional.documents import block_slots, document_means
from attnlab.functional.newton import FIXED, BacktrackedStep, FixedStep, solved
from attnlab.functional.precision import wide_dtype
from attnlab.functional.recurrences import document_starts
from attnlab.mixers.mixer import TwoSided
from attnlab.nn.activations import gelu_exact
from attnlab.nn.convolutions import CentredConv
from attnlab.nn.heads import by_head, head_channels
from attnlab.nn.norms import LayerNorm
from attnlab.nn.preludes import Prelude, behind_preludes, preludes_for
from attnlab.nn.projections import Linear
from attnlab.typing import Queries, Sequence


class SoftmaxFreeAttention(TwoSided):
    """Reads values by a Gaussian kernel, of low rank by way of landmarks, `y = W_o (P (Q + e I)^-1 P^T v + conv(v))`:

        P_ia = exp(-|q_i - l_a|^2 / 2)    Q_ab = exp(-|l_a - l_b|^2 / 2)    q = W_q x / k^(1/4)

    Queries are the keys as well. A landmark `l = gelu(LayerNorm(W_l [q_1 .. q_r]))` is made of every `stride` tokens
    of the document, `r`, by one map for all heads; where the document ends before, zeros take the place of what is
    missing. `e` is `ridge`. The inverse is Newton's after `iterations`, which `newton` begins, at
    `1.8 Q / max(sum_b Q_ab)^2` by default; a sum is over the landmarks of the document. `conv` has a kernel a head,
    `width` tokens wide. Lu et al. 2021, https://arxiv.org/abs/2110.11945.

    `normalised` divides the inverse by the roots of the row sums of `Q`, from both sides. Lu et al. 2024,
    https://arxiv.org/abs/2207.03341.

    Rows have landmarks for up to `documents` documents, padding not counted; outputs of further ones are NaN.

    Raises `UserError` for heads that do not divide the width, an even `width`, for no documents, and for a `ridge` with
    which `newton` may diverge.

    Args:
      dim: model width.
      heads: each of `dim / heads` channels.
      stride: tokens of a landmark.
      width: of the convolution of values.
      documents: the most documents of a row.
      normalised: see above.
      ridge: see above.
      newton: how the inverse is found.
      iterations: of Newton's method.
      prelude: made as `prelude(dim, rngs=)`, one each for values and queries.
      bias: whether the projections have one.
      rngs: draws the parameters.
    """

    convolves = True

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        stride: int = 16,
        width: int = 5,
        documents: int = 1,
        normalised: bool = False,
        ridge: float = 0.01,
        newton: FixedStep | BacktrackedStep = FIXED,
        iterations: int = 20,
        prelude: Callable[..., Prelude] | None = None,
        bias: bool = True,
        rngs: nnx.Rngs,
    ):
        if min(stride, documents) < 1:
            raise UserError(
                f'SoftmaxFreeAttention has stride {stride} and {documents} documents; both must be at least 1'
            )
        newton.check_ridge(type(self).__name__, ridge)
        self.heads, self.channels = heads, head_channels(dim, heads)
        self.stride, self.documents, self.normalised = stride, documents, normalised
        self.ridge, self.newton, self.iterations = ridge, newton, iterations
        self.query, self.value = (Linear(dim, dim, bias=bias, rngs=rngs) for _ in range(2))
        self.preludes = preludes_for(prelude, dim, dim, rngs=rngs)
        self.landmark = Linear(stride * self.channels, self.channels, axes=(None, None), rngs=rngs)
        self.norm = LayerNorm(self.channels, rngs=rngs)
        self.conv = CentredConv(dim, width=width, kernels=heads, rngs=rngs)
        self.output = Linear(dim, dim, bias=bias, axes=('heads', 'embed'), rngs=rngs)

    def __call__(self, x: Sequence, ctx: Context, state: None = None) -> tuple[Sequence, None]:
        b, t, _ = x.shape
        wide = wide_dtype(x.dtype)
        (v, q), _ = behind_preludes(self.preludes, [self.value(x), self.query(x)], ctx.segments, None)
        q = by_head(q, self.heads).astype(wide) * self.channels**-0.25
        slots = block_slots(ctx.segments, b, t, self.stride, self.documents)
        landmarks = self._landmarks(slots.spread(q))
        # Documents by their number among all runs of the row, from 1, so that 0 is no landmark of any.
        number = jnp.cumsum(document_starts(ctx.segments_or_ones()), axis=1).astype(wide)
        owner = jnp.max(slots.spread(number).reshape(b, -1, self.stride), axis=-1)
        seen = (number[..., None] == owner[:, None])[:, None]
        together = ((owner[..., None] == owner[:, None]) & (owner > 0)[..., None])[:, None]
        one = jnp.eye(owner.shape[1], dtype=wide)[None, None]
        to_landmarks = jnp.where(seen, gaussian(q, landmarks), 0)
        # Of slots without a landmark, ones on the diagonal.
        between = jnp.where(together, gaussian(landmarks, landmarks), one)
        sums = jnp.sum(between, axis=-1)
        largest = jnp.max(jnp.where(together, sums[..., None, :], 1), axis=-1)
        inverse = self.newton(between + self.ridge * one, largest, together, self.iterations)
        if self.normalised:
            inverse = inverse * (sums[..., None] * sums[..., None, :]) ** -0.5
        values = by_head(v, self.heads).astype(wide)
        y = jnp.einsum('bhtn,bthv->bhnv', to_landmarks, values)
        y = jnp.einsum('bhtn,bhnv->bthv', to_landmarks, solved(inverse, y))
        # All of a document with a token that has no slot: its other tokens would have some of the landmarks alone.
        lost = document_means((slots.there & (slots.index == slots.count)).astype(wide), ctx.segments) > 0
        y = jnp.where((slots.there & lost)[..., None], jnp.nan, y.reshape(x.shape))
        return self.output(y.astype(x.dtype) + self.conv(v, ctx.segments)), None

    def _landmarks(self, q: Float[Array, 'b s h k']) -> Float[Array, 'b n h k']:
        blocks = q.reshape(q.shape[0], -1, self.stride, *q.shape[2:])
        blocks = jnp.moveaxis(blocks, 3, 2).reshape(*blocks.shape[:2], self.heads, -1)
        return gelu_exact(self.norm(self.landmark(blocks)))


def gaussian(a: Queries, c: Float[Array, 'b n h k']) -> Float[Array, 'b h t n']:
    """`exp(-|a - c|^2 / 2)`; small distances are differences of large numbers, hence the highest precision."""
    products = jnp.einsum('bthk,bnhk->bhtn', a, c, precision=jax.lax.Precision.HIGHEST)
    of_a, of_c = (jnp.moveaxis(jnp.sum(jnp.square(each), axis=-1), 1, 2) for each in (a, c))
    return jnp.exp(products - 0.5 * (of_a[..., None] + of_c[..., None, :]))
