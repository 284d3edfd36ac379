"""Attention to a latent: keys and values of all heads are made from one small vector, which alone is kept."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional.attend import View, attend, look
from attnlab.functional.cache import KeyValueCache
from attnlab.functional.precision import wide_dtype
from attnlab.functional.reach import Reach
from attnlab.mixers.mixer import Mixer, require_causal
from attnlab.module import Module
from attnlab.nn.decoupled import DecoupledRope, EliteRope, SharedKey
from attnlab.nn.heads import by_head, head_channels
from attnlab.nn.norms import RMSNorm
from attnlab.nn.projections import Linear
from attnlab.typing import Heads, Queries, Segments, Sequence


class LatentEntries(NamedTuple):
    """What is known of tokens: latents, the keys rotated by position, and segments; see `Entries`."""

    latents: Float[Array, 'b s r']
    keys: Float[Array, 'b s g k']
    segments: Segments


class LatentAttention(Mixer):
    """Multi-head latent attention: softmax attention whose keys and values are `z_j U`, `z_j = norm(x_j D)` the latent.

        scores_ij = (q_i . k_j + q'_i . k'_j) / sqrt(channels of q and q')    [k_j | v_j] = z_j U

    `k` and `v` are per head, without position. `q'` and `k'` are rotated by position, `k'` being a map of `x_j` of its
    own; `position` says how many channels they have, and for how many heads. DeepSeek-AI 2024,
    https://arxiv.org/abs/2405.04434; rotated per head, and without the norm, Zhou et al. 2025,
    https://arxiv.org/abs/2503.01586.

    The state is a cache of latents and rotated keys, and of nothing else. One token that goes on from a state is
    computed in absorbed form: `q_i . k_j = (q_i U_k^T) . z_j` and `sum_j p_ij v_j = (sum_j p_ij z_j) U_v`, so that
    the heads all attend to the latents themselves, multi-query attention with the products of the rotated parts as a
    bias. More tokens, those without a state, and all where the map is none that `Linear.absorbs`, meet keys and values
    made from the latents, as it is written above. The cache holds the `length` tokens it was made for, and a call that
    goes beyond gives NaN.

    Raises `UserError` for sizes that do not divide, a ratio that is not positive, or a position that does not fit them.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        position: DecoupledRope | EliteRope | SharedKey,
        key_dim: int | None = None,
        value_dim: int | None = None,
        rank: int | None = None,
        rank_ratio: float = 0.25,
        query_rank: int | None = None,
        norm: Callable[..., nnx.Module] | None = RMSNorm,
        causal: bool = True,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        """Makes the projections and the norms.

        Args:
          dim: model width.
          heads: how many.
          position: which channels are rotated.
          key_dim: channels of a head, which `position` splits or adds to; `None`: `dim / heads`.
          value_dim: channels of a value per head; `None`: `key_dim`.
          rank: channels of the latent; `None`: `rank_ratio * dim`, rounded.
          rank_ratio: see `rank`.
          query_rank: channels of a latent that queries are made from, with a norm of its own; `None`: they are a
            map of the input.
          norm: made as `norm(rank, rngs=)`; `None`: the latent is a linear map of the input.
          causal: whether a query sees no later key.
          implementation: of the core; `None`: the default of the platform.
          rngs: draws the parameters.
        """
        if not 0 < rank_ratio < math.inf:
            raise UserError(f'rank_ratio of LatentAttention is {rank_ratio}; it must be above 0, and finite')
        self.channels = head_channels(dim, heads, instead='key_dim') if key_dim is None else key_dim
        self.value_dim = self.channels if value_dim is None else value_dim
        self.rank = max(1, round(rank_ratio * dim)) if rank is None else rank
        self.heads, self.position, self.causal, self.implementation = heads, position, causal, implementation
        self.key_dim, self.rotated_dim = position.split(self.channels)
        self.rotated_keys = position.keys(heads)
        width = heads * (self.key_dim + self.rotated_dim)
        if query_rank is None:
            self.query: Linear | Bottleneck = Linear(dim, width, rngs=rngs)
        else:
            self.query = Bottleneck(dim, query_rank, width, norm=norm, rngs=rngs)
        self.key = Linear(dim, self.rotated_keys * self.rotated_dim, rngs=rngs)
        self.down = Linear(dim, self.rank, axes=('embed', None), rngs=rngs)
        self.norm = None if norm is None else norm(self.rank, rngs=rngs)
        self.up = Linear(self.rank, heads * (self.key_dim + self.value_dim), axes=(None, 'heads'), rngs=rngs)
        self.output = Linear(heads * self.value_dim, dim, axes=('heads', 'embed'), rngs=rngs)

    def __call__(
        self, x: Sequence, ctx: Context, state: KeyValueCache | None = None
    ) -> tuple[Sequence, KeyValueCache | None]:
        batch, length, _ = x.shape
        q = by_head(self.query(x), self.heads)
        q, rotated_q = jnp.split(q, [self.key_dim], axis=-1)
        rotated_q = self.position.rotate(rotated_q, ctx.positions, self.channels)
        key = self.key(x).reshape(batch, length, self.rotated_keys, self.rotated_dim)
        key = self.position.rotate(key, ctx.positions, self.channels)
        latent = self.down(x) if self.norm is None else self.norm(self.down(x))
        view = look(LatentEntries(latent, key, ctx.segments_or_ones()), ctx, Reach(self.causal), state)
        absorbed = state is not None and length == 1 and self.up.absorbs
        read = self._absorbed if absorbed else self._expanded
        return self.output(read(q, rotated_q, view).reshape(batch, length, -1)), view.cache

    @property
    def divides_time(self) -> bool:
        return self.causal

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> KeyValueCache:
        """Returns an empty cache of `length` slots, `LatentEntries`."""
        require_causal(self, self.causal)
        entries = LatentEntries(
            latents=jnp.zeros((batch, length, self.rank), dtype),
            keys=jnp.zeros((batch, self.rotated_keys, length, self.rotated_dim), dtype),
            segments=jnp.zeros((batch, length), jnp.int32),
        )
        return KeyValueCache(entries, jnp.zeros((), jnp.int32))

    def _keys_and_values(
        self, latent: Float[Array, 'b s r'], key: Float[Array, 'b s g _']
    ) -> tuple[Float[Array, 'b s h k'], Float[Array, 'b s h v']]:
        """What is made from latents, the rotated keys after those without position."""
        k, v = jnp.split(by_head(self.up(latent), self.heads), [self.key_dim], axis=-1)
        return jnp.concatenate([k, jnp.repeat(key, self.heads // self.rotated_keys, axis=2)], axis=-1), v

    def _expanded(self, q: Queries, rotated_q: Float[Array, 'b t h _'], view: View) -> Heads:
        """Keys and values are made from the latents."""
        k, v = self._keys_and_values(view.entries.latents, view.entries.keys)
        return attend(jnp.concatenate([q, rotated_q], axis=-1), k, v, view, implementation=self.implementation)

    def _absorbed(self, q: Queries, rotated_q: Float[Array, 'b t h _'], view: View) -> Heads:
        """Queries attend to the latents; equal to `_expanded`, at a cost per key that does not grow with a head."""
        up = self.up.matrix().astype(q.dtype).reshape(self.rank, self.heads, -1)
        key_up, value_up = jnp.split(up, [self.key_dim], axis=-1)
        scale = (self.key_dim + self.rotated_dim) ** -0.5
        latents = self.up.inputs(view.entries.latents)[:, :, None]
        y = attend(
            jnp.einsum('bthk,rhk->bthr', q, key_up),
            latents,
            latents,
            view,
            scale=scale,
            bias=scale * self._products(rotated_q, view.entries.keys),
            implementation=self.implementation,
        )
        return jnp.einsum('bthr,rhv->bthv', y, value_up)

    def _products(self, q: Float[Array, 'b t h k'], k: Float[Array, 'b s g k']) -> Float[Array, 'b h t s']:
        """The products of the rotated parts."""
        q = q.reshape(*q.shape[:2], self.rotated_keys, -1, q.shape[-1])
        wide = wide_dtype(q.dtype)
        products = jnp.einsum('btgnk,bsgk->bgnts', q, k, preferred_element_type=wide)
        return products.reshape(q.shape[0], self.heads, q.shape[1], k.shape[1])


class Bottleneck(Module):
    """Two linear maps, with a norm between them unless it is `None`, `y = norm(x A) B`; `A` has `rank` columns."""

    def __init__(self, dim: int, rank: int, features: int, *, norm: Callable[..., nnx.Module] | None, rngs: nnx.Rngs):
        self.down = Linear(dim, rank, axes=('embed', None), rngs=rngs)
        self.norm = None if norm is None else norm(rank, rngs=rngs)
        self.up = Linear(rank, features, axes=(None, 'heads'), rngs=rngs)

    def __call__(self, x: Sequence) -> Float[Array, 'b t f']:
        latent = self.down(x)
        return self.up(latent if self.norm is None else self.norm(latent))
