"""Gated attention units: one head of attention inside a gated linear unit, in the place of attention and MLP."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from attnlab.context import Context
from attnlab.functional.attend import attend, look
from attnlab.functional.cache import Entries, KeyValueCache, empty_cache
from attnlab.functional.needed import of_pairs
from attnlab.functional.reach import Reach
from attnlab.functional.recomputed import gated, recomputed
from attnlab.functional.recurrences import carried, no_segment
from attnlab.mixers.mixer import Mixer, require_causal
from attnlab.nn.gated_units import (
    ROPE,
    SOFTMAX,
    QueriesAndKeys,
    averaged,
    gated_by_silu,
    offset_deviation,
    rounded_silu,
    wide_silu,
)
from attnlab.nn.parameter import param
from attnlab.nn.positions import Rope
from attnlab.nn.projections import Linear
from attnlab.nn.systems import DampedAverage
from attnlab.typing import Segments, Sequence
from pallas_kernels import SquaredRelu, WeightMap


class GatedAttentionUnit(Mixer):
    """GAU: `y = W_o (u * (A v))` with `u`, `v`, `z = silu(W x)` and `A = relu(q k^T / length)^2`.

    Queries and keys are gains and offsets of `z`, rotated by position; the product of the offsets, by distance, is what
    the paper adds as a relative bias. `length` is a constant, that of the rows of training.
    Hua et al. 2022, https://arxiv.org/abs/2202.10447.

    The state is a cache of keys and values; a call that goes beyond its `length` gives NaN.

    Args:
      dim: model width.
      expand: width of `u` and `v` over that of the model.
      key_dim: channels of `z`.
      length: what products of queries and keys are divided by.
      position: rotates queries and keys; `None`: no positions.
      bias: whether the projections have one.
      causal: whether a query sees no later key.
      implementation: of the core; `None`: the default of the platform.
      rngs: draws the parameters.
    """

    def __init__(
        self,
        dim: int,
        *,
        expand: int = 2,
        key_dim: int = 128,
        length: int = 1024,
        position: Rope | None = ROPE,
        bias: bool = False,
        causal: bool = True,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        self.key_dim, self.value_dim, self.length = key_dim, expand * dim, length
        self.reach, self.implementation = Reach(causal), implementation
        self.input = Linear(dim, 2 * self.value_dim + key_dim, bias=bias, rngs=rngs)
        self.heads = QueriesAndKeys(key_dim, position=position, offset=offset_deviation(length), rngs=rngs)
        self.output = Linear(self.value_dim, dim, bias=bias, axes=('heads', 'embed'), rngs=rngs)

    def __call__(
        self, x: Sequence, ctx: Context, state: KeyValueCache | None = None
    ) -> tuple[Sequence, KeyValueCache | None]:
        splits = (self.value_dim, 2 * self.value_dim)
        gate, v, z = jnp.split(self.input(x), splits, axis=-1)
        q, k = (each.astype(x.dtype) for each in self.heads(wide_silu(z), ctx))
        view = look(Entries(k, rounded_silu(v)[:, :, None], ctx.segments_or_ones()), ctx, self.reach, state)
        read = attend(
            q,
            view.entries.keys,
            view.entries.values,
            view,
            weights=SquaredRelu(),
            scale=1 / self.length,
            implementation=self.implementation,
        )
        return self.output(gated_by_silu(read[:, :, 0], gate)), view.cache

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> KeyValueCache:
        """Returns an empty cache of `length` slots."""
        require_causal(self, self.reach.causal)
        return empty_cache(batch, length, kv_heads=1, key_dim=self.key_dim, value_dim=self.value_dim, dtype=dtype)


class MegaState(NamedTuple):
    """What a MEGA layer remembers of a stream.

    Attributes:
      average: the state of the moving average, float32 or float64.
      cache: keys and values.
      segment: the segment of the last token, `b`; -1 before the first.
    """

    average: Float[Array, 'b d n']
    cache: KeyValueCache
    segment: Int[Array, ' b']


class Mega(Mixer):
    """MEGA: gated attention whose queries and keys read a moving average.

        m = silu(average(x) + w x)         v = silu(W_v x)     u, z, r, s = split(W m)
        h = silu(s + W_h (silu(r) * (A v)))                    y = sigmoid(u) * (h - x)

    `A` is attention of one head, by default a softmax, of gains and offsets of `silu(z)`, to the keys of the same
    `chunk` tokens of the document. In a block that adds `y` to its input this mixes the two by the gate u.
    Ma et al. 2023, https://arxiv.org/abs/2209.10655. With `weights=SquaredRelu()` it is `relu(q k^T / n)^2`, `n` the
    number of keys that the query sees, as in the released code, and offsets start as in `GatedAttentionUnit`.

    The state is that of the average and a cache of keys and values, of a chunk; without chunks, a call that goes
    beyond its `length` gives NaN.

    Args:
      dim: model width.
      key_dim: channels of `z`.
      value_dim: channels of `v` and `r`; `None`: twice the width.
      state: dimensions of the moving average, of every channel.
      chunk: tokens that attend to one another; `None`: all of a document.
      position: rotates queries and keys; `None`: no positions but the average.
      weights: the map from scores to weights.
      implementation: of the cores; `None`: the default of the platform.
      rngs: draws the parameters.
    """

    goes_on = True

    def __init__(
        self,
        dim: int,
        *,
        key_dim: int = 64,
        value_dim: int | None = None,
        state: int = 16,
        chunk: int | None = 128,
        position: Rope | None = ROPE,
        weights: WeightMap = SOFTMAX,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        value_dim = 2 * dim if value_dim is None else value_dim
        self.dim, self.key_dim, self.value_dim = dim, key_dim, value_dim
        self.chunk, self.weights, self.implementation = chunk, weights, implementation
        self.reach = Reach(window=chunk)
        self.average = DampedAverage(dim, state=state, rngs=rngs)
        self.direct = param(nnx.initializers.normal(1.0), (dim,), axes=('mlp',), group='vector', rngs=rngs)
        self.value = Linear(dim, value_dim, bias=True, rngs=rngs)
        self.mixed = Linear(dim, 2 * dim + key_dim + value_dim, bias=True, rngs=rngs)
        # Without chunks, of rows as long as those of a gated attention unit are by default.
        offset = offset_deviation(1024 if chunk is None else chunk) if isinstance(weights, SquaredRelu) else 0.0
        self.heads = QueriesAndKeys(key_dim, position=position, offset=offset, rngs=rngs)
        self.output = Linear(value_dim, dim, axes=('heads', 'embed'), rngs=rngs)

    def __call__(self, x: Sequence, ctx: Context, state: MegaState | None = None) -> tuple[Sequence, MegaState | None]:
        segments = ctx.segments_or_ones()
        before = None if state is None else carried(state.average, segments, state.segment)
        average, after = self.average(x, ctx.segments, before, implementation=self.implementation)
        splits = (self.dim, self.dim + self.key_dim, self.dim + self.key_dim + self.value_dim)
        mixed = averaged(average, x, self.direct[...]).astype(x.dtype)
        update, z, r, own = jnp.split(self.mixed(mixed), splits, axis=-1)
        q, k = self.heads(wide_silu(z), ctx)
        squared = isinstance(self.weights, SquaredRelu)
        if squared:
            q = q / self._seen(ctx)[..., None, None].astype(q.dtype)
        q, k = q.astype(x.dtype), k.astype(x.dtype)
        chunked = self._chunked(ctx)
        v = recomputed(jax.nn.silu)(self.value(x))[:, :, None]
        view = look(
            Entries(k, v, chunked.segments_or_ones()), chunked, self.reach, None if state is None else state.cache
        )
        within = of_pairs(attend, pairs=x.shape[0] * self._pairs(x.shape[1]), channels=self.key_dim + self.value_dim)
        read = within(
            q,
            view.entries.keys,
            view.entries.values,
            view,
            weights=self.weights,
            scale=1.0 if squared else None,
            implementation=self.implementation,
        )
        y = _updated(update, own, self.output(gated(read[:, :, 0], r)), x)
        if after is None or view.cache is None:
            return y, None
        return y, MegaState(after, view.cache, segments[:, -1])

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> MegaState:
        """Returns an average at rest and an empty cache, of a chunk or of `length` slots when that is fewer."""
        cache = empty_cache(
            batch,
            length,
            kv_heads=1,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            dtype=dtype,
            reach=self.reach,
        )
        return MegaState(self.average.init_state(batch, dtype), cache, no_segment(batch))

    def _seen(self, ctx: Context) -> Int[Array, 'b t']:
        """How many keys each query sees: those of its chunk up to its own."""
        return 1 + (ctx.positions if self.chunk is None else ctx.positions % self.chunk)

    def _pairs(self, length: int) -> int:
        """How many keys the queries of a row see, together."""
        size = length if self.chunk is None else min(self.chunk, length)
        whole, rest = divmod(length, size)
        return (whole * size * (size + 1) + rest * (rest + 1)) // 2

    def _chunked(self, ctx: Context) -> Context:
        """The context in which every chunk is a document of its own."""
        if self.chunk is None:
            return ctx
        return dataclasses.replace(ctx, segments=_chunks(ctx, self.chunk))


def _chunks(ctx: Context, chunk: int) -> Segments:
    """A number for every chunk of every document, of up to 2^16 chunks, from 2^16 on; for padding from 0."""
    return ctx.segments_or_ones() * 2**16 + ctx.positions // chunk


@recomputed
def _updated(
    update: Float[Array, 'b t d'], own: Float[Array, 'b t d'], given: Float[Array, 'b t d'], x: Float[Array, 'b t d']
) -> Float[Array, 'b t d']:
    return jax.nn.sigmoid(update) * (jax.nn.silu(own + given) - x)
