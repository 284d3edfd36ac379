"""Attention to a latent: keys and values of all heads are made from one small vector, which alone is kept."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from attnlab.context import Context
from attnlab.functional import cores
from attnlab.functional.cache import Entries, KeyValueCache, extend, overflown
from attnlab.functional.cached import attend_cached
from attnlab.mixers.mixer import Mixer, require_causal
from attnlab.nn.decoupled import DecoupledRope, EliteRope
from attnlab.nn.heads import head_channels
from attnlab.nn.norms import RMSNorm
from attnlab.nn.projections import Linear
from attnlab.typing import Heads, Queries, Segments, Sequence


class LatentEntries(NamedTuple):
    """What is kept of tokens: latents, the keys turned by position, of `c` channels, and segments."""

    latents: Float[Array, 'b s r']
    keys: Float[Array, 'b g s c']
    segments: Segments


class LatentAttention(Mixer):
    """Multi-head latent attention: softmax attention whose keys and values are `c_j U`, `c_j = norm(x_j D)` the latent.

        scores_ij = (q_i . k_j + q'_i . k'_j) / sqrt(channels of q and q')    [k_j | v_j] = c_j U

    `k` and `v` are per head, without position. `q'` and `k'` are turned by position, `k'` being a map of `x_j` of its
    own; `position` says how many channels they have, and for how many heads. DeepSeek-AI 2024,
    https://arxiv.org/abs/2405.04434; per head turned, and without the norm, Zhou et al. 2025,
    https://arxiv.org/abs/2503.01586.

    The state is a cache of latents and turned keys, and of nothing else. One token that goes on from a state is
    computed in absorbed form: `q_i . k_j = (q_i U_k^T) . c_j` and `sum_j p_ij v_j = (sum_j p_ij c_j) U_v`, so that
    the heads all attend to the latents themselves, multi-query attention with the products of the turned parts as a
    bias. More tokens, and those without a state, meet keys and values made from the latents, as it is written above.
    The cache holds the `length` tokens it was made for, and a call that goes beyond gives NaN.

    Raises `UserError` for sizes that do not divide, or a position that does not fit them.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        position: DecoupledRope | EliteRope,
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
          position: which channels are turned.
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
        self.channels = head_channels(dim, heads, instead='key_dim') if key_dim is None else key_dim
        self.value_dim = self.channels if value_dim is None else value_dim
        self.rank = max(1, round(rank_ratio * dim)) if rank is None else rank
        self.heads, self.position, self.causal, self.implementation = heads, position, causal, implementation
        self.key_dim, self.turned_dim = position.split(self.channels)
        self.turned_keys = position.keys(heads)
        width = heads * (self.key_dim + self.turned_dim)
        if query_rank is None:
            self.query: Linear | Bottleneck = Linear(dim, width, rngs=rngs)
        else:
            self.query = Bottleneck(dim, query_rank, width, norm=norm, rngs=rngs)
        self.key = Linear(dim, self.turned_keys * self.turned_dim, rngs=rngs)
        self.down = Linear(dim, self.rank, axes=('embed', None), rngs=rngs)
        self.norm = None if norm is None else norm(self.rank, rngs=rngs)
        self.up = Linear(self.rank, heads * (self.key_dim + self.value_dim), axes=(None, 'heads'), rngs=rngs)
        self.output = Linear(heads * self.value_dim, dim, axes=('heads', 'embed'), rngs=rngs)

    def __call__(
        self, x: Sequence, ctx: Context, state: KeyValueCache | None = None
    ) -> tuple[Sequence, KeyValueCache | None]:
        batch, length, _ = x.shape
        q = self.query(x).reshape(batch, length, self.heads, -1)
        q, turned_q = jnp.split(q, [self.key_dim], axis=-1)
        turned_q = self.position.rotate(turned_q, ctx.positions, self.channels)
        key = self.key(x).reshape(batch, length, self.turned_keys, self.turned_dim)
        key = self.position.rotate(key, ctx.positions, self.channels)
        latent = self.down(x) if self.norm is None else self.norm(self.down(x))
        if state is None:
            k, v = self._keys_and_values(latent, key)
            y = cores.attention(
                jnp.concatenate([q, turned_q], axis=-1),
                k,
                v,
                causal=self.causal,
                segments=ctx.segments,
                implementation=self.implementation,
            )
        else:
            y, state = self._continue(q, turned_q, latent, key, ctx.segments_or_ones(), state)
        return self.output(y.reshape(batch, length, -1)), state

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> KeyValueCache:
        """Returns an empty cache of `length` slots, `LatentEntries`."""
        require_causal(self.causal)
        entries = LatentEntries(
            latents=jnp.zeros((batch, length, self.rank), dtype),
            keys=jnp.zeros((batch, self.turned_keys, length, self.turned_dim), dtype),
            segments=jnp.zeros((batch, length), jnp.int32),
        )
        return KeyValueCache(entries, jnp.zeros((), jnp.int32))

    def _continue(
        self,
        q: Queries,
        turned_q: Float[Array, 'b t h c'],
        latent: Float[Array, 'b t r'],
        key: Float[Array, 'b t g c'],
        segments: Segments,
        state: KeyValueCache,
    ) -> tuple[Heads, KeyValueCache]:
        tokens = state.consumed + jnp.arange(q.shape[1], dtype=jnp.int32)
        seen, places, state = extend(state, LatentEntries(latent, jnp.swapaxes(key, 1, 2), segments))
        seen = seen._replace(latents=seen.latents.astype(q.dtype), keys=seen.keys.astype(q.dtype))
        attend = functools.partial(
            attend_cached, tokens=tokens, places=places, segments=segments, implementation=self.implementation
        )
        y = (self._absorbed if q.shape[1] == 1 else self._expanded)(q, turned_q, seen, attend)
        return jnp.where(overflown(state, None, 0), jnp.nan, y), state

    def _keys_and_values(
        self, latent: Float[Array, 'b s r'], key: Float[Array, 'b s g c']
    ) -> tuple[Float[Array, 'b s h k'], Float[Array, 'b s h v']]:
        """What is made from latents, the turned keys after those without position."""
        k, v = jnp.split(self.up(latent).reshape(*latent.shape[:2], self.heads, -1), [self.key_dim], axis=-1)
        return jnp.concatenate([k, jnp.repeat(key, self.heads // self.turned_keys, axis=2)], axis=-1), v

    def _expanded(
        self, q: Queries, turned_q: Float[Array, 'b t h c'], seen: LatentEntries, attend: Callable[..., Heads]
    ) -> Heads:
        """Keys and values are made from the latents."""
        k, v = self._keys_and_values(seen.latents, jnp.swapaxes(seen.keys, 1, 2))
        made = Entries(jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), seen.segments)
        return attend(jnp.concatenate([q, turned_q], axis=-1), made)

    def _absorbed(
        self, q: Queries, turned_q: Float[Array, 'b t h c'], seen: LatentEntries, attend: Callable[..., Heads]
    ) -> Heads:
        """Queries attend to the latents; equal to `_expanded`, at a cost per key that does not grow with a head."""
        up = self.up.matrix().astype(q.dtype).reshape(self.rank, self.heads, -1)
        key_up, value_up = jnp.split(up, [self.key_dim], axis=-1)
        scale = (self.key_dim + self.turned_dim) ** -0.5
        latents = self.up.inputs(seen.latents)[:, None]
        y = attend(
            jnp.einsum('bthk,rhk->bthr', q, key_up),
            Entries(latents, latents, seen.segments),
            scale=scale,
            bias=scale * self._products(turned_q, seen.keys),
        )
        return jnp.einsum('bthr,rhv->bthv', y, value_up)

    def _products(self, q: Float[Array, 'b t h c'], k: Float[Array, 'b g s c']) -> Float[Array, 'b h t s']:
        """The products of the turned parts."""
        q = q.reshape(*q.shape[:2], self.turned_keys, -1, q.shape[-1])
        wide = jnp.promote_types(q.dtype, jnp.float32)
        products = jnp.einsum('btgnc,bgsc->bgnts', q, k, preferred_element_type=wide)
        return products.reshape(q.shape[0], self.heads, q.shape[1], k.shape[2])


class Bottleneck(nnx.Module):
    """Two linear maps, with a norm between them unless it is `None`, `y = norm(x A) B`; `A` has `rank` columns."""

    def __init__(self, dim: int, rank: int, features: int, *, norm: Callable[..., nnx.Module] | None, rngs: nnx.Rngs):
        self.down = Linear(dim, rank, axes=('embed', None), rngs=rngs)
        self.norm = None if norm is None else norm(rank, rngs=rngs)
        self.up = Linear(rank, features, axes=(None, 'heads'), rngs=rngs)

    def __call__(self, x: Sequence) -> Float[Array, 'b t f']:
        latent = self.down(x)
        return self.up(latent if self.norm is None else self.norm(latent))
