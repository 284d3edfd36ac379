"""NormLin: a learned matrix of weights between places, the same for every document."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional.documents import document_slots
from attnlab.functional.precision import wide_dtype
from attnlab.functional.recomputed import recomputed
from attnlab.mixers.mixer import TwoSided
from attnlab.nn.parameter import param
from attnlab.nn.preludes import Prelude, behind_preludes, preludes_for
from attnlab.nn.projections import Linear
from attnlab.typing import Sequence


class NormLin(TwoSided):
    """Reads values by a learned matrix of positive weights, whose rows sum to one, `y_i = W_o sum_j a_ij W_v x_j`:

        a_ij = softplus(W_ij) / sum_l softplus(W_il)

    over the tokens that the document has; `W` starts as the identity plus standard normal numbers. Weights do not
    depend on the input. Yue et al. 2025, https://arxiv.org/abs/2505.08550.

    Every row has at most `documents` documents, padding not counted; outputs of any further ones are NaN.

    Raises `UserError` for rows of more than `length` tokens, and for no documents.

    Args:
      dim: model width.
      length: the most tokens of a row; `W` has as many rows and columns.
      documents: the most documents of a row.
      prelude: made as `prelude(dim, rngs=)`, for the values.
      bias: whether the projections have one.
      rngs: draws the parameters.
    """

    def __init__(
        self,
        dim: int,
        *,
        length: int = 1024,
        documents: int = 1,
        prelude: Callable[..., Prelude] | None = None,
        bias: bool = True,
        rngs: nnx.Rngs,
    ):
        if min(length, documents) < 1:
            raise UserError(f'NormLin has length {length} and {documents} documents; both must be at least 1')
        self.length, self.documents = length, documents
        self.value = Linear(dim, dim, bias=bias, rngs=rngs)
        self.preludes = preludes_for(prelude, dim, rngs=rngs)
        self.weights = param(_near_identity, (length, length), axes=(None, None), rngs=rngs)
        self.output = Linear(dim, dim, bias=bias, axes=('heads', 'embed'), rngs=rngs)

    def __call__(self, x: Sequence, ctx: Context, state: None = None) -> tuple[Sequence, None]:
        b, t, _ = x.shape
        if t > self.length:
            raise UserError(f'NormLin is made for rows of up to {self.length} tokens; got {t}: set its length')
        wide = wide_dtype(x.dtype)
        slots = document_slots(ctx.segments, b, t, self.documents)
        weights = recomputed(jax.nn.softplus)(self.weights[:t, :t].astype(wide))
        (v,), _ = behind_preludes(self.preludes, [self.value(x)], ctx.segments, None)
        values = slots.spread(v.astype(wide)).reshape(b, self.documents, t, -1)
        seen = slots.spread(slots.there.astype(wide)).reshape(b, self.documents, t)
        total = jnp.maximum(jnp.einsum('ts,bns->bnt', weights, seen), 1e-12)
        y = jnp.einsum('ts,bnsd->bntd', weights, values) / total[..., None]
        return self.output(slots.collected(y.reshape(b, self.documents * t, -1)).astype(x.dtype)), None


def _near_identity(key: Array, shape: tuple[int, int], dtype: DTypeLike) -> Float[Array, 't s']:
    return jnp.eye(*shape, dtype=dtype) + jax.random.normal(key, shape, dtype)
