"""Agent attention: a few tokens read the document for all others, by softmax, and are read by them."""

from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from attnlab.context import PADDING, Context
from attnlab.errors import UserError
from attnlab.functional.dense import softmax
from attnlab.functional.documents import document_membership, document_places, document_sizes
from attnlab.functional.precision import wide_dtype
from attnlab.mixers.mixer import TwoSided
from attnlab.nn.convolutions import CentredConv
from attnlab.nn.heads import by_head, head_channels
from attnlab.nn.parameter import param
from attnlab.nn.preludes import Prelude, behind_preludes, preludes_for
from attnlab.nn.projections import Linear
from attnlab.typing import Sequence

COARSE = 7
"""Values of a bias by place, before it is resized to the document."""


class AgentAttention(TwoSided):
    """Softmax attention by way of `n` agents, `y = W_o (softmax(s q a^T + c) (softmax(s a k^T + b) v) + conv(v))`.

    The agents `a` are the means of the queries of `n` equal stretches of the document, which overlap by a token where
    `n` does not divide it, `s` is one over the root of the channels, and `b` and `c` are learned for every head and
    agent at seven places, interpolated linearly to the document. `conv` sees a neighbour on each side. Han et al. 2024,
    https://arxiv.org/abs/2312.08874.

    Every row has at most `documents` documents, padding not counted; outputs of any further ones are NaN.

    Raises `UserError` for heads that do not divide the width, and for no agents or documents.

    Args:
      dim: model width.
      heads: each of `dim / heads` channels.
      agents: of every document.
      documents: the most documents of a row.
      prelude: made as `prelude(dim, rngs=)`, one each for values, queries and keys.
      bias: whether the projections have one; not that of keys, which the softmax cancels.
      rngs: draws the parameters.
    """

    convolves = True

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        agents: int = 49,
        documents: int = 1,
        prelude: Callable[..., Prelude] | None = None,
        bias: bool = True,
        rngs: nnx.Rngs,
    ):
        if min(agents, documents) < 1:
            raise UserError(f'AgentAttention has {agents} agents and {documents} documents; both must be at least 1')
        self.heads, self.channels = heads, head_channels(dim, heads)
        self.agents, self.documents = agents, documents
        self.query, self.value = (Linear(dim, dim, bias=bias, rngs=rngs) for _ in range(2))
        self.key = Linear(dim, dim, rngs=rngs)
        self.preludes = preludes_for(prelude, dim, dim, dim, rngs=rngs)
        start = nnx.initializers.normal(0.02)
        self.agent_bias, self.query_bias = (
            param(start, (heads, agents, COARSE), axes=('heads', None, None), group='vector', rngs=rngs)
            for _ in range(2)
        )
        self.conv = CentredConv(dim, bias=True, rngs=rngs)
        self.output = Linear(dim, dim, bias=bias, axes=('heads', 'embed'), rngs=rngs)

    def __call__(self, x: Sequence, ctx: Context, state: None = None) -> tuple[Sequence, None]:
        b, t, _ = x.shape
        wide = wide_dtype(x.dtype)
        projected = [linear(x) for linear in (self.value, self.query, self.key)]
        (v, q, k), _ = behind_preludes(self.preludes, projected, ctx.segments, None)
        q, k, values = (by_head(each.astype(wide), self.heads) for each in (q, k, v))
        places, sizes = document_places(ctx.segments, b, t), document_sizes(ctx.segments, b, t)
        own = document_membership(ctx.segments, b, t, self.documents)
        pooled = own[..., None] & _stretches(places, sizes, self.agents)[..., None, :]
        pooled = pooled.astype(wide) / jnp.maximum(jnp.sum(pooled, axis=1, keepdims=True), 1)
        agents = jnp.einsum('btdn,bthk->bdnhk', pooled, q) * self.channels**-0.5
        coarse = _resized(places, sizes, wide)
        by_place, of_queries = (
            jnp.einsum('btm,hnm->bhnt', coarse, table[...].astype(wide)) for table in (self.agent_bias, self.query_bias)
        )
        seen = jnp.moveaxis(own, 1, 2)[:, None, :, None]
        scores = jnp.einsum('bdnhk,bthk->bhdnt', agents, k) + by_place[:, :, None]
        read = jnp.einsum('bhdnt,bthv->bdnhv', softmax(scores, jnp.broadcast_to(seen, scores.shape)), values)
        scores = jnp.einsum('bthk,bdnhk->bhtdn', q, agents) + jnp.moveaxis(of_queries, 2, 3)[:, :, :, None]
        scores = scores.reshape(b, self.heads, t, -1)
        mine = jnp.repeat(own, self.agents, axis=2)[:, None]
        weights = softmax(scores, jnp.broadcast_to(mine, scores.shape))
        y = jnp.einsum('bhtn,bnhv->bthv', weights, read.reshape(b, -1, *read.shape[3:])).reshape(x.shape)
        if ctx.segments is not None:
            beyond = ~jnp.any(own, axis=-1, keepdims=True) & (ctx.segments != PADDING)[..., None]
            y = jnp.where(beyond, jnp.nan, y)
        return self.output(y.astype(x.dtype) + self.conv(v, ctx.segments)), None


def _stretches(places: Int[Array, 'b t'], sizes: Int[Array, 'b t'], count: int) -> Array:
    """Returns which of `count` stretches of its document every token is in, `b t n`: the bins of an adaptive mean."""
    number = jnp.arange(count)[None, None]
    first = number * sizes[..., None] // count
    stop = -(-(number + 1) * sizes[..., None] // count)
    return (first <= places[..., None]) & (places[..., None] < stop)


def _resized(places: Int[Array, 'b t'], sizes: Int[Array, 'b t'], dtype: DTypeLike) -> Float[Array, 'b t m']:
    """Returns the weights of `COARSE` values at every token: interpolation between centres of their parts."""
    centre = (places.astype(dtype) + 0.5) * COARSE / sizes.astype(dtype) - 0.5
    distance = jnp.abs(jnp.clip(centre, 0, COARSE - 1)[..., None] - jnp.arange(COARSE, dtype=dtype)[None, None])
    return jnp.maximum(1 - distance, 0)
