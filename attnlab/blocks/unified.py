"""Residual blocks that share one set of attention weights."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from attnlab.blocks.block import PreNorm, Step, fed, step
from attnlab.blocks.residual import Addition
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional.attend import attend, look
from attnlab.functional.cache import Entries, KeyValueCache, empty_cache
from attnlab.functional.needed import of_pairs
from attnlab.functional.reach import Reach
from attnlab.functional.rotary import rotated_channels
from attnlab.mixers.mixer import Mixer, require_causal
from attnlab.module import Module
from attnlab.nn.heads import check_groups, head_channels
from attnlab.nn.mlps import GatedMLP
from attnlab.nn.norms import RMSNorm
from attnlab.nn.positions import Rope
from attnlab.nn.projections import Linear
from attnlab.typing import Keys, Queries, Sequence, State

Make = Callable[..., nnx.Module]


class Shared(NamedTuple):
    """What all layers share: the first layer's queries and keys and, once it has run, the keys in its view."""

    q: Queries
    k: Keys
    keys: Float[Array, 'b g _ k'] | None


class UnifiedBlocks(Mixer, PreNorm):
    """`layers` whole layers, `x += W_o P V(n) + n W_c`, then `x += mlp(norm(x))`, `n = norm(x)`, with one `P` for all.

    `P` are the softmax weights of the first layer, which has no `W_c`; the layers after it have neither queries nor
    keys, but their own values. `W_c`, the linear compensation, starts at zero; `attnlab.convert.unify` fits it
    to a trained model. Every layer recomputes the weights from the first one's queries and keys, so that none are
    stored. Xiong et al. 2025, https://arxiv.org/abs/2502.00439.

    The state is one cache per layer, of which only the first has keys; a call beyond their `length` gives NaN.

    Raises `UserError` for sizes that do not divide, or no layers.

    Args:
      dim: model width.
      heads: query heads.
      kv_heads: key and value heads, a divisor of `heads`; `None`: as many.
      key_dim: channels of a query, key or value per head; `None`: `dim / heads`.
      layers: how many layers share their weights.
      mlp: makes the channel mixers, as `mlp(dim, rngs=rngs)`; `None`: none.
      norm: makes the norms, likewise.
      position: how positions enter the scores; `None`: not at all.
      bias: whether the projections, and the compensation, have one.
      causal: whether a query sees no later key.
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
        layers: int = 4,
        mlp: Make | None = GatedMLP,
        norm: Make = RMSNorm,
        position: Rope | None = None,
        bias: bool = False,
        causal: bool = True,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        kv_heads = heads if kv_heads is None else kv_heads
        self.key_dim = head_channels(dim, heads, instead='key_dim') if key_dim is None else key_dim
        check_groups(heads, kv_heads)
        if layers < 1:
            raise UserError(f'layers is {layers}; it must be at least 1: the first is the one whose weights are shared')
        if position is not None:
            rotated_channels(self.key_dim, position.fraction)
        self.heads, self.kv_heads, self.position = heads, kv_heads, position
        self.reach, self.implementation = Reach(causal), implementation
        self.query = Linear(dim, heads * self.key_dim, bias=bias, rngs=rngs)
        self.key = Linear(dim, kv_heads * self.key_dim, bias=bias, rngs=rngs)
        widths = (kv_heads * self.key_dim, heads * self.key_dim)
        self.layers = nnx.List(
            [UnifiedLayer(dim, *widths, leads=i == 0, mlp=mlp, norm=norm, bias=bias, rngs=rngs) for i in range(layers)]
        )

    def __call__(
        self, x: Sequence, ctx: Context, state: tuple[KeyValueCache, ...] | None = None
    ) -> tuple[Sequence, tuple[KeyValueCache, ...] | None]:
        taken = list(self.steps(x, ctx, state))
        caches = tuple(each.state for each in taken if each.state is not None)
        return taken[-1].streams, None if state is None else caches

    def steps(self, streams: Sequence, ctx: Context, state: State | None = None) -> Iterator[Step]:
        """Runs the attention and the channel mixer of every layer, in order."""
        shared = Shared(*self._queries_and_keys(self.layers[0].mixer_norm(streams), ctx), None)
        for index, layer in enumerate(self.layers):
            mix = functools.partial(self._mix, layer, shared, None if state is None else state[index], ctx)
            name = f'layers[{index}]'
            mixed = step(f'{name}.mixer', streams, mix, norm=layer.mixer_norm, connection=Addition(), ctx=ctx)
            keys, cache = mixed.state
            shared = shared._replace(keys=keys)
            yield mixed._replace(state=cache)
            streams = mixed.streams
            if layer.mlp is not None:
                feed = functools.partial(_fed, layer, ctx.fold_in(index))
                last = step(f'{name}.mlp', streams, feed, norm=layer.mlp_norm, connection=Addition(), ctx=ctx)
                yield last
                streams = last.streams

    @property
    def divides_time(self) -> bool:
        return self.reach.causal

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> tuple[KeyValueCache, ...]:
        """Returns empty caches of `length` slots, one per layer; only the first has channels for keys."""
        require_causal(self, self.reach.causal)
        return tuple(
            empty_cache(
                batch,
                length,
                kv_heads=self.kv_heads,
                key_dim=self.key_dim if index == 0 else 0,
                value_dim=self.key_dim,
                dtype=dtype,
            )
            for index in range(len(self.layers))
        )

    def _mix(
        self,
        layer: 'UnifiedLayer',
        shared: Shared,
        cache: KeyValueCache | None,
        ctx: Context,
        normed: Sequence,
    ) -> tuple[Sequence, tuple[Array | None, KeyValueCache | None]]:
        """The attention of one layer, with the keys that it read and the cache after it."""
        q, k, keys = shared
        v = layer.value(normed).reshape(*normed.shape[:2], self.kv_heads, self.key_dim)
        # Only the first layer's cache holds keys.
        new = Entries(k if keys is None else k[..., :0], v, ctx.segments_or_ones())
        view = look(new, ctx, self.reach, cache)
        # The weights of the layers after the first are those of the first.
        weigh = attend if keys is None else of_pairs(attend, pairs=view.pairs(self.heads), channels=self.key_dim)
        keys = view.entries.keys if keys is None else keys
        read = weigh(q, keys, view.entries.values, view, implementation=self.implementation)
        return layer.mixed(normed, read.reshape(*normed.shape[:2], -1)), (keys, view.cache)

    def _queries_and_keys(self, normed: Sequence, ctx: Context) -> tuple[Queries, Keys]:
        q = self.query(normed).reshape(*normed.shape[:2], self.heads, self.key_dim)
        k = self.key(normed).reshape(*normed.shape[:2], self.kv_heads, self.key_dim)
        if self.position is None:
            return q, k
        return self.position.rotate(q, ctx.positions), self.position.rotate(k, ctx.positions)


class UnifiedLayer(Module):
    """The parameters of one layer of `UnifiedBlocks`; the first has no compensation."""

    def __init__(
        self,
        dim: int,
        value_width: int,
        read_width: int,
        *,
        leads: bool,
        mlp: Make | None,
        norm: Make,
        bias: bool,
        rngs: nnx.Rngs,
    ):
        zeros = nnx.initializers.zeros
        self.mixer_norm = norm(dim, rngs=rngs)
        self.value = Linear(dim, value_width, bias=bias, rngs=rngs)
        self.output = Linear(read_width, dim, bias=bias, axes=('heads', 'embed'), rngs=rngs)
        self.compensation = None if leads else Linear(dim, dim, bias=bias, initializer=zeros, rngs=rngs)
        self.mlp_norm: Any = None if mlp is None else norm(dim, rngs=rngs)
        self.mlp: Any = None if mlp is None else mlp(dim, rngs=rngs)

    def mixed(self, normed: Sequence, read: Float[Array, 'b t f']) -> Sequence:
        """Returns the attention output, mapped to the stream's width, plus the compensation."""
        y = self.output(read)
        return y if self.compensation is None else y + self.compensation(normed)


def _fed(layer: UnifiedLayer, ctx: Context, normed: Sequence) -> tuple[Sequence, None]:
    return fed(layer.mlp, normed, ctx), None
