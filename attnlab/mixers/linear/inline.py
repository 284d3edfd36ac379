"""InLine attention: linear attention whose weights are made to sum to one by subtraction, and a local residual."""

from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from attnlab.context import Context
from attnlab.functional.documents import document_means, document_sizes, local_sum
from attnlab.functional.precision import wide_dtype
from attnlab.mixers.linear.write import Additive
from attnlab.mixers.mixer import TwoSided
from attnlab.module import Module
from attnlab.nn.activations import gelu_exact
from attnlab.nn.feature_maps import FeatureMap, within_span
from attnlab.nn.gates import Terms
from attnlab.nn.heads import by_head, head_channels
from attnlab.nn.preludes import Prelude, behind_preludes, preludes_for
from attnlab.nn.projections import BlockDiagonal, Linear
from attnlab.typing import Segments, Sequence


class LocalResidual(Module):
    """`y_t = a v_(t-1) + b v_t + c v_(t+1)` within a document, with factors a channel that the document sets:

        a, b, c = W_2 gelu(W_1 mean(x) + c_1) + c_2

    `W_1` and `W_2` map the channels of each head on their own; the mean is over the tokens of the document. Han et al.
    2024, https://arxiv.org/abs/2412.06590. Raises `UserError` unless `heads` divides `dim`.
    """

    def __init__(self, dim: int, *, heads: int, rngs: nnx.Rngs):
        self.first = BlockDiagonal(dim, blocks=heads, rngs=rngs)
        self.second = BlockDiagonal(dim, blocks=heads, features=3 * dim, rngs=rngs)

    def __call__(self, x: Sequence, v: Sequence, segments: Segments | None) -> Sequence:
        hidden = gelu_exact(self.first(document_means(x, segments)))
        factors = jnp.moveaxis(self.second(hidden).reshape(*hidden.shape, 3), -1, 0)
        return local_sum(v.astype(factors.dtype), factors, segments).astype(x.dtype)


class InLine(TwoSided):
    """Linear attention that is injective in its queries, `y_i = W_o (sum_j a_ij v_j + r_i)`, over the whole document:

        a_ij = s f(q_i) . f(k_j) - mean_l(s f(q_i) . f(k_l)) + 1 / n,   s = 1 / (n sqrt(k))

    of `n` tokens. Weights sum to one, but may be negative; no sum divides them, which would give queries of one
    direction the same weights. `r` is a `LocalResidual` of the values. Computed with centred keys:
    `s f(q_i) . sum_j (f(k_j) - mean f(k)) v_j^T + mean v`. Han et al. 2024, https://arxiv.org/abs/2412.06590.

    Raises `UserError` for heads that do not divide the width.

    Args:
      dim: model width.
      heads: each of `dim / heads` channels.
      feature_map: made as `feature_map(key_dim, heads=, rngs=)`; `None`: the identity.
      prelude: made as `prelude(dim, rngs=)`, one each for queries, keys and values.
      bias: whether the projections have one; that of keys would cancel where they are not mapped, and is left out.
      implementation: of the core; `None`: the default of the platform.
      rngs: draws the parameters.
    """

    convolves = True

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        feature_map: Callable[..., FeatureMap] | None = None,
        prelude: Callable[..., Prelude] | None = None,
        bias: bool = True,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        self.heads, self.channels = heads, head_channels(dim, heads)
        self.implementation = implementation
        self.query = Linear(dim, dim, bias=bias, rngs=rngs)
        self.key = Linear(dim, dim, bias=bias and feature_map is not None, rngs=rngs)
        self.value = Linear(dim, dim, bias=bias, rngs=rngs)
        self.preludes = preludes_for(prelude, dim, dim, dim, rngs=rngs)
        self.feature_map = None if feature_map is None else feature_map(self.channels, heads=heads, rngs=rngs)
        self.residual = LocalResidual(dim, heads=heads, rngs=rngs)
        self.output = Linear(dim, dim, bias=bias, axes=('heads', 'embed'), rngs=rngs)

    def __call__(self, x: Sequence, ctx: Context, state: None = None) -> tuple[Sequence, None]:
        projections = (linear(x) for linear in (self.query, self.key, self.value))
        (q, k, v), _ = behind_preludes(self.preludes, projections, ctx.segments, None, lambda y: by_head(y, self.heads))
        if self.feature_map is not None:
            q, k = self.feature_map.features(q, k, ctx.positions)
            q = within_span(self.feature_map, q, ctx.segments)
        wide = wide_dtype(x.dtype)
        # Of the scale each factor has the root: keys times values would leave the range of float16.
        sizes = document_sizes(ctx.segments, *x.shape[:2]).astype(wide)
        root = ((sizes * self.channels**0.5) ** -0.5)[..., None, None]
        centred = k.astype(wide) - document_means(k, ctx.segments)
        core = {'scale': 1.0, 'segments': ctx.segments, 'implementation': self.implementation}
        read = Additive().both_ways(_scaled(q, root), (centred * root).astype(x.dtype), v, Terms(), **core)
        y = (read.astype(wide) + document_means(v, ctx.segments)).astype(x.dtype).reshape(x.shape)
        return self.output(y + self.residual(x, v.reshape(x.shape), ctx.segments)), None


def _scaled(x: Float[Array, 'b t h m'], by: Float[Array, 'b t 1 1']) -> Float[Array, 'b t h m']:
    return (x.astype(by.dtype) * by).astype(x.dtype)
