"""Selective attention: a token may tell all later ones to attend less to an earlier token."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float

from attnlab.context import Context
from attnlab.functional.attend import View, attend, look
from attnlab.functional.cache import Entries, KeyValueCache, empty_cache
from attnlab.functional.needed import NOTHING, needing
from attnlab.functional.precision import wide_dtype
from attnlab.functional.reach import Placed, Reach
from attnlab.functional.recomputed import recomputed
from attnlab.functional.recurrences import document_starts
from attnlab.mixers.mixer import Mixer
from attnlab.nn.heads import check_groups, head_channels
from attnlab.nn.positions import Rope
from attnlab.nn.projections import Linear
from attnlab.typing import Keys, Queries, Sequence, Values
from pallas_kernels.cost import Cost, Passes


class SelectiveAttentionState(NamedTuple):
    """What selective attention remembers of a stream.

    Attributes:
      cache: keys and values.
      mask: what the next query subtracts from the scores of every key, float32 or float64.
    """

    cache: KeyValueCache
    mask: Float[Array, 'b s']


class SelectiveAttention(Mixer):
    """Causal softmax attention of the scores `q_i . k_j / sqrt(key_dim) - F_ij`, `F` what earlier tokens selected.

        F_ij = sum_{l < i} S_lj    S_lj = max(scores_lj, 0), of the first head, for j < l

    `F` is the same for all heads. `S` has zeros for `j = l`, so that no token masks itself, and for the first token
    of a document, which is never masked; it has no parameters of its own. All pairs of `F` are held at once, so that a
    call takes memory that grows with the square of its length.
    Leviathan, Kalman and Matias 2025, https://arxiv.org/abs/2410.02703.

    The state is a cache of keys and values, with the sum so far for every key. It holds the `length` tokens it was made
    for, and a call that goes beyond gives NaN.

    Raises `UserError` for sizes that do not divide.

    Args:
      dim: model width.
      heads: query heads; the first one selects.
      kv_heads: key and value heads, a divisor of `heads`; `None`: as many.
      key_dim: channels of a query, key or value per head; `None`: `dim / heads`.
      position: rotates queries and keys; `None`: no positions.
      implementation: of the core; `None`: the default of the platform.
      rngs: draws the parameters.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        kv_heads: int | None = None,
        key_dim: int | None = None,
        position: Rope | None = None,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        kv_heads = heads if kv_heads is None else kv_heads
        self.key_dim = head_channels(dim, heads, instead='key_dim') if key_dim is None else key_dim
        check_groups(heads, kv_heads)
        self.heads, self.kv_heads = heads, kv_heads
        self.position, self.implementation = position, implementation
        self.query = Linear(dim, heads * self.key_dim, rngs=rngs)
        self.key = Linear(dim, kv_heads * self.key_dim, rngs=rngs)
        self.value = Linear(dim, kv_heads * self.key_dim, rngs=rngs)
        self.output = Linear(heads * self.key_dim, dim, axes=('heads', 'embed'), rngs=rngs)

    def __call__(
        self, x: Sequence, ctx: Context, state: SelectiveAttentionState | None = None
    ) -> tuple[Sequence, SelectiveAttentionState | None]:
        q, k, v = self._project(x, ctx)
        view = look(Entries(k, v, ctx.segments_or_ones()), ctx, Reach(), None if state is None else state.cache)
        mask, total = self._mask(q, view, state)
        k, v, _ = view.entries
        y = attend(q, k, v, view, bias=-mask[:, None], implementation=self.implementation)
        after = None if view.cache is None else SelectiveAttentionState(view.cache, total)
        return self.output(y.reshape(*x.shape[:2], -1)), after

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> SelectiveAttentionState:
        """Returns an empty cache of `length` slots, nothing of which is masked."""
        cache = empty_cache(
            batch, length, kv_heads=self.kv_heads, key_dim=self.key_dim, value_dim=self.key_dim, dtype=dtype
        )
        return SelectiveAttentionState(cache, jnp.zeros((batch, length), wide_dtype(dtype)))

    def _project(self, x: Sequence, ctx: Context) -> tuple[Queries, Keys, Values]:
        q, k, v = (y.reshape(*x.shape[:2], -1, self.key_dim) for y in (self.query(x), self.key(x), self.value(x)))
        if self.position is not None:
            q, k = self.position.rotate(q, ctx.positions), self.position.rotate(k, ctx.positions)
        return q, k, v

    def _mask(
        self, q: Queries, view: View, state: SelectiveAttentionState | None
    ) -> tuple[Float[Array, 'b t s'], Float[Array, 'b s']]:
        """`F` of a call, and what it would be for the query after the last."""
        before = jnp.zeros(view.keys.segments.shape, wide_dtype(q.dtype)) if state is None else state.mask
        return accumulated(selections(q[:, :, 0], view.entries.keys[:, :, 0], view.queries, view.keys), before)


def selections(
    q: Float[Array, 'b t k'], k: Float[Array, 'b s k'], queries: Placed, keys: Placed
) -> Float[Array, 'b t s']:
    """Returns `S_ij = max(q_i . k_j / sqrt(k), 0)` for the earlier keys of the document, its first one excepted.

    The keys are those of the stream from its first token on. The result is in float32 or better.
    """
    wide = wide_dtype(q.dtype)

    def scored(q: Float[Array, 'b t k'], k: Float[Array, 'b s k']) -> Float[Array, 'b t s']:
        return q.shape[-1] ** -0.5 * jnp.einsum('btk,bsk->bts', q, k, preferred_element_type=wide)

    # The first head has these scores, by the definition.
    products = 2 * q.size * k.shape[1]
    executed = Passes(Cost(products), Cost(2 * products))
    scores = needing(scored, 'selections', model=NOTHING, executed=executed)(q, k)
    earlier = Reach().visible(queries._replace(places=queries.places - 1), keys)
    selectable = earlier & ~document_starts(keys.segments)[:, None, :]
    return _positive(scores, selectable)


@recomputed
def _positive(scores: Float[Array, 'b t s'], selectable: Bool[Array, 'b t s']) -> Float[Array, 'b t s']:
    return jnp.where(selectable, jax.nn.relu(scores), jnp.zeros_like(scores))


def accumulated(
    selected: Float[Array, 'b t s'], before: Float[Array, 'b s']
) -> tuple[Float[Array, 'b t s'], Float[Array, 'b s']]:
    """Returns `F_ij = before_j + sum_{l < i} S_lj`, and what it would be for the query after the last."""
    total = jnp.cumsum(jnp.concatenate([before[:, None], selected], axis=1), axis=1)
    return total[:, :-1], total[:, -1]
