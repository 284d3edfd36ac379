"""Third-order attention: every query reads products of two values, weighted by how it matches pairs of keys."""

from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional.attend import look
from attnlab.functional.cache import Entries, KeyValueCache, empty_cache
from attnlab.functional.precision import wide_dtype
from attnlab.functional.reach import Reach
from attnlab.functional.recurrences import no_segment
from attnlab.functional.third_order import (
    Operands,
    PairSums,
    monomials,
    taylor_attention,
    third_order_attention,
)
from attnlab.mixers.mixer import Mixer, require_causal
from attnlab.module import Module
from attnlab.nn.heads import by_head, head_channels
from attnlab.nn.norms import RMSNorm
from attnlab.nn.projections import Linear
from attnlab.typing import Sequence

Norm = Callable[..., nnx.Module]


class ThirdOrderAttention(Mixer):
    """Attention to pairs of tokens, `y_i = W_o sum_jk p_ijk (v1_j * v2_k)`, `p_i = softmax(scale sum_c q k1_j k2_k)`.

    Every token has a query, two keys and two values a head, the first three normalised. Causally `j <= i` and
    `k <= i`. There are no positions in it: a rotation of three factors does not depend on distances alone.
    Time is cubic in the length, or in the window. Alman and Song 2024, https://arxiv.org/abs/2310.04064.

    The state is a cache of keys and values, as that of attention: with a window a ring of as many slots.

    Raises `UserError` for sizes that do not divide, or a window below 1.

    Args:
      dim: model width.
      heads: how many heads.
      key_dim: channels of a query or key per head; `None`: `dim / heads`.
      value_dim: channels of a value per head; `None`: `key_dim`.
      window: how many tokens a query sees, its own included; `None`: all.
      scale: factor of the scores; `None`: one over the square root of `key_dim`.
      norm: makes the norms of queries and either keys, as `norm(key_dim, rngs=rngs)`; `None`: none.
      causal: whether a query sees no later token.
      rngs: draws the parameters.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        key_dim: int | None = None,
        value_dim: int | None = None,
        window: int | None = None,
        scale: float | None = None,
        norm: Norm | None = RMSNorm,
        causal: bool = True,
        rngs: nnx.Rngs,
    ):
        self.operands = PairProjections(dim, heads=heads, key_dim=key_dim, value_dim=value_dim, norm=norm, rngs=rngs)
        self.scale = self.operands.key_dim**-0.5 if scale is None else scale
        self.reach = Reach(causal, window)

    def __call__(
        self, x: Sequence, ctx: Context, state: KeyValueCache | None = None
    ) -> tuple[Sequence, KeyValueCache | None]:
        operands = self.operands(x)
        view = look(_entries(operands, ctx.segments_or_ones()), ctx, self.reach, state)
        y = third_order_attention(
            _of_entries(operands.q, view.entries), view.queries, view.keys, scale=self.scale, reach=self.reach
        )
        return self.operands.output_of(view.or_nan(y)), view.cache

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> KeyValueCache:
        """Returns an empty cache of `length` slots, or of `window` when that is fewer."""
        require_causal(self, self.reach.causal)
        return empty_cache(
            batch,
            length,
            kv_heads=self.operands.heads,
            key_dim=2 * self.operands.key_dim,
            value_dim=2 * self.operands.value_dim,
            dtype=dtype,
            reach=self.reach,
        )


class TaylorThirdOrderAttention(Mixer):
    """Causal third-order attention in linear time: a Taylor polynomial of `degree` stands for the exponential.

    Sums over pairs of keys then fall apart into products of two sums over keys, one for each monomial of up to `degree`
    in `key_dim` variables, of which there are `(key_dim + degree)! / (key_dim! degree!)`: the state, whose size does
    not depend on the length. See `attnlab.functional.third_order.taylor_attention`, also for how far off it is.
    Alman and Song 2024, https://arxiv.org/abs/2310.04064.

    Raises `UserError` for sizes that do not divide, and a degree that is not even: weights could then be negative.

    Args:
      dim: model width.
      heads: how many heads.
      degree: of the polynomial.
      key_dim: channels of a query or key per head; `None`: `dim / heads`.
      value_dim: channels of a value per head; `None`: `key_dim`.
      scale: factor of the scores, which must be small for the polynomial; `None`: one over `key_dim`.
      norm: makes the norms of queries and either keys, as `norm(key_dim, rngs=rngs)`; `None`: none.
      rngs: draws the parameters.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        degree: int = 2,
        key_dim: int | None = None,
        value_dim: int | None = None,
        scale: float | None = None,
        norm: Norm | None = RMSNorm,
        rngs: nnx.Rngs,
    ):
        if degree < 2 or degree % 2:
            raise UserError(f'degree is {degree}; expected 2, 4, ..., since an odd polynomial is negative somewhere')
        self.operands = PairProjections(dim, heads=heads, key_dim=key_dim, value_dim=value_dim, norm=norm, rngs=rngs)
        self.scale = 1 / self.operands.key_dim if scale is None else scale
        self.degree = degree

    def __call__(self, x: Sequence, ctx: Context, state: PairSums | None = None) -> tuple[Sequence, PairSums | None]:
        sums = self.init_state(x.shape[0], x.shape[1], x.dtype) if state is None else state
        y, sums = taylor_attention(self.operands(x), ctx.segments_or_ones(), sums, scale=self.scale, degree=self.degree)
        return self.operands.output_of(y), None if state is None else sums

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> PairSums:
        """Returns empty sums; their size does not depend on `length`."""
        features = len(monomials(self.operands.key_dim, self.degree)[0])
        shape = (batch, self.operands.heads, features, self.operands.value_dim + 1)
        first, second = (jnp.zeros(shape, wide_dtype(dtype)) for _ in range(2))
        return PairSums(first, second, no_segment(batch))


class PairProjections(Module):
    """The linear maps of third-order attention: to a query, two keys and two values a head, and back to the model."""

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        key_dim: int | None,
        value_dim: int | None,
        norm: Norm | None,
        rngs: nnx.Rngs,
    ):
        key_dim = head_channels(dim, heads, instead='key_dim') if key_dim is None else key_dim
        self.heads, self.key_dim = heads, key_dim
        self.value_dim = key_dim if value_dim is None else value_dim
        self.query, self.first_key, self.second_key = (Linear(dim, heads * key_dim, rngs=rngs) for _ in range(3))
        self.first_value, self.second_value = (Linear(dim, heads * self.value_dim, rngs=rngs) for _ in range(2))
        self.norms = nnx.List([] if norm is None else [norm(key_dim, rngs=rngs) for _ in range(3)])
        self.output = Linear(heads * self.value_dim, dim, axes=('heads', 'embed'), rngs=rngs)

    def __call__(self, x: Sequence) -> Operands:
        """Returns the operands, keys and queries normalised."""
        maps = (self.query, self.first_key, self.second_key, self.first_value, self.second_value)
        projected = [by_head(linear(x), self.heads) for linear in maps]
        for i, norm in enumerate(self.norms):
            projected[i] = norm(projected[i])
        return Operands(*projected)

    def output_of(self, y: Float[Array, 'b t h v']) -> Sequence:
        """Returns what was read, mapped back to the model's width."""
        return self.output(y.reshape(*y.shape[:2], -1))


def _entries(operands: Operands, segments: Array) -> Entries:
    """Both keys and both values side by side, as a cache keeps them."""
    keys = jnp.concatenate([operands.k1, operands.k2], axis=-1)
    values = jnp.concatenate([operands.v1, operands.v2], axis=-1)
    return Entries(keys, values, segments)


def _of_entries(q: Float[Array, 'b t h k'], entries: Entries) -> Operands:
    return Operands(q, *jnp.split(entries.keys, 2, axis=-1), *jnp.split(entries.values, 2, axis=-1))
