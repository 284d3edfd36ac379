"""Linear attention: a matrix-valued memory that keys write to, queries read from, and decays fade."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional.counted import counts_apart, summable, with_sums_apart
from attnlab.functional.documents import document_sizes
from attnlab.functional.levels import levels_of, no_levels, read_by_level
from attnlab.functional.normalizers import FloorNormalizer, RootGrowth, SumNormalizer
from attnlab.functional.precision import wide_dtype
from attnlab.functional.recomputed import recomputed_beside_products
from attnlab.functional.recurrences import carried, no_segment
from attnlab.mixers.linear.write import Additive, WriteRule
from attnlab.mixers.mixer import Mixer, require_causal
from attnlab.nn.feature_maps import FeatureMap, within_span
from attnlab.nn.gates import MemoryGates, Terms
from attnlab.nn.levels import LevelWeights
from attnlab.nn.positions import NeighbourRope, Rope
from attnlab.nn.preludes import Prelude, behind_preludes, preludes_for, states_of
from attnlab.nn.projections import Linear
from attnlab.typing import Heads, Keys, Queries, Sequence, State, Values


class LinearAttentionState(NamedTuple):
    """What linear attention remembers of a stream.

    Attributes:
      memory: what keys have written of values; float32 or float64, `b h m v`; by level where there are levels.
      preludes: the states of the preludes of queries, keys and values; empty without preludes.
      segment: the segment of the last token, `b`; -1 before the first.
    """

    memory: State
    preludes: tuple[State, ...]
    segment: Int[Array, ' b']


class LinearAttention(Mixer):
    """Multi-head linear attention, `y_t = W_o (g_t * norm(S_t^T f(q_t)))`, `S_t = write(S_{t-1}, f(k_t), v_t)`.

    `f` is the feature map, `g` the gate, `norm` a norm of every head's read or of all of them; a normalizer instead
    divides the read by the sum of the weights it is made of. `write` says what a key does to the memory: as a rule it
    adds `f(k_t) v_t^T` to what is left after a decay. With `levels` the past is divided into blocks of doubling length,
    and the read is a weighted sum of reads of each (see `read_by_level`); the state then grows with the logarithm of
    the length it is made for, beyond which a call gives NaN. Every other part may be `None`, which leaves it out.
    Katharopoulos et al. 2020, https://arxiv.org/abs/2006.16236; Yang et al. 2024, https://arxiv.org/abs/2312.06635.

    Raises `UserError` for sizes that do not divide, for gates that the write rule refuses, and where called, for decays
    of key channels of which the feature map makes another number.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        key_dim: int | None = None,
        value_dim: int | None = None,
        key_ratio: float = 1.0,
        value_ratio: float = 1.0,
        values_per_key: int = 1,
        feature_map: Callable[..., FeatureMap] | None = None,
        decay: Callable[..., nnx.Module] | None = None,
        gates: Callable[..., MemoryGates] | None = None,
        write: WriteRule = Additive(),
        levels: Callable[..., LevelWeights] | None = None,
        prelude: Callable[..., Prelude] | None = None,
        position: Rope | NeighbourRope | None = None,
        turn: Rope | NeighbourRope | None = None,
        scale: float | None = None,
        normalizer: SumNormalizer | FloorNormalizer | None = None,
        growth: RootGrowth | None = None,
        norm: Callable[..., nnx.Module] | None = None,
        joint_norm: Callable[..., nnx.Module] | None = None,
        gate: Callable[..., nnx.Module] | None = None,
        bias: bool = False,
        causal: bool = True,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        """Makes the projections and the parts that have parameters.

        Args:
          dim: model width.
          heads: how many queries and keys a token has.
          key_dim: channels of a query or key per head; `None`: `key_ratio * dim / heads`.
          value_dim: channels of a value per memory; `None`: `value_ratio * dim` over the number of memories.
          key_ratio: see `key_dim`.
          value_ratio: see `value_dim`.
          values_per_key: how many memories a head has, each with values, decay and gates of its own.
          feature_map: made as `feature_map(key_dim, heads=, rngs=)`; see `attnlab.nn.feature_maps`.
          decay: made as `decay(dim, heads=, key_dim=, rngs=)`, `heads` the number of memories; gives log decays, `h`,
            `b t h` or `b t h k`, from the input.
          gates: made as `gates(dim, heads=, key_dim=, value_dim=, rngs=)`; gives what else the write rule needs, and
            may tie keys, values and decays to each other: from the input, keys, values and log decays the keys, values
            and terms. Its `heads` are `write.steps` times the number of memories.
          write: what a key does to the memory.
          levels: made as `levels(dim, heads=, rngs=)`, `heads` the number of memories; gives the weights of the levels
            of the past; causal only.
          prelude: made as `prelude(features, rngs=)`, one each for queries, keys and values.
          position: rotates queries and keys.
          turn: rotates features where values are summed, and not where the weights are by which sums are divided; needs
            a normalizer, and no levels.
          scale: factor of the queries; `None`: one over the square root of the feature channels.
          normalizer: divides by the sum of the weights; needs a feature map that is never negative.
          growth: multiplies what it gives by a function of the number of keys: of the document, or causal of those up
            to the query, by its position; needs a normalizer.
          norm: made as `norm(value_dim, rngs=)`, one for all heads, applied to each.
          joint_norm: made as `joint_norm(heads * value_dim, rngs=)`, applied to all heads together.
          gate: made as `gate(dim, features, rngs=)`; multiplies the read.
          bias: whether the projections have one.
          causal: whether a query sees no later key.
          implementation: of the core; `None`: the default of the platform.
          rngs: draws the parameters.
        """
        if levels is not None and not causal:
            raise UserError('levels divide the past; a bidirectional mixer needs levels=None')
        if levels is not None and write.beside:
            # A level is a run over blocks, and what stands beside a memory is of the whole document.
            raise UserError(f'{type(write).__name__} has no levels, since its keys follow from all before them')
        if turn is not None and (normalizer is None or levels is not None):
            raise UserError('turn rotates what is summed, not what divides it: it needs a normalizer, and levels=None')
        if growth is not None and normalizer is None:
            raise UserError('growth multiplies a mean, which a normalizer makes; give one, such as SumNormalizer()')
        key_dim = _head_channels('key', key_ratio, dim, heads) if key_dim is None else key_dim
        if values_per_key < 1:
            raise UserError(f'values_per_key of LinearAttention is {values_per_key}; it must be at least 1')
        memories = heads * values_per_key
        value_dim = _head_channels('value', value_ratio, dim, memories) if value_dim is None else value_dim
        self.heads, self.key_dim, self.value_dim, self.values_per_key = heads, key_dim, value_dim, values_per_key
        self.position, self.turn, self.scale = position, turn, scale
        self.normalizer, self.growth = normalizer, growth
        self.write, self.causal, self.implementation = write, causal, implementation
        self.query = Linear(dim, heads * key_dim, bias=bias, rngs=rngs)
        writes = write.steps * memories
        widths = (heads * key_dim, write.steps * heads * key_dim, writes * value_dim)
        self.key = Linear(dim, widths[1], bias=bias, rngs=rngs)
        self.value = Linear(dim, widths[2], bias=bias, rngs=rngs)
        self.preludes = preludes_for(prelude, *widths, rngs=rngs)
        self.decay = None if decay is None else decay(dim, heads=memories, key_dim=key_dim, rngs=rngs)
        self.gates = (
            None if gates is None else gates(dim, heads=writes, key_dim=key_dim, value_dim=value_dim, rngs=rngs)
        )
        write.check_gates(self.gates, decays=self.decay is not None)
        self.levels = None if levels is None else levels(dim, heads=memories, rngs=rngs)
        self.feature_map = None if feature_map is None else feature_map(key_dim, heads=heads, rngs=rngs)
        self.norm = None if norm is None else norm(value_dim, rngs=rngs)
        self.joint_norm = None if joint_norm is None else joint_norm(memories * value_dim, rngs=rngs)
        self.gate = None if gate is None else gate(dim, memories * value_dim, rngs=rngs)
        self.output = Linear(memories * value_dim, dim, bias=bias, axes=('heads', 'embed'), rngs=rngs)

    def __call__(
        self, x: Sequence, ctx: Context, state: LinearAttentionState | None = None
    ) -> tuple[Sequence, LinearAttentionState | None]:
        q, k, v, preludes = self._project(x, ctx, state)
        k, v, terms = self._gated(x, k, v)
        if self.normalizer is not None:
            q, k, v = summable(q, k, v)
        if self.normalizer is not None and not self._counts_apart:
            # A column of ones among the values collects the sum of the weights.
            v = jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1)
        core: dict[str, Any] = {'scale': self.scale, 'implementation': self.implementation}
        turned_q, turned_k = q, k
        if self.turn is not None:
            turned_q, turned_k = (self.turn.rotate(each, ctx.positions) for each in (q, k))
        if not self.causal:
            y = self.write.both_ways(turned_q, turned_k, v, terms, segments=ctx.segments, **core)
            if self.turn is not None:
                total = self.write.both_ways(q, k, jnp.ones_like(v[..., :1]), terms, segments=ctx.segments, **core)
                y = jnp.concatenate([y, total], axis=-1)
        elif self.levels is not None:
            y, memory = read_by_level(
                lambda v, **run: self.write(q, k, v, terms, **run, **core),
                v,
                self.levels(x),
                state=None if state is None else state.memory,
                last=None if state is None else state.segment,
                segments=ctx.segments,
            )
        else:
            before = None if state is None else carried(state.memory, ctx.segments_or_ones(), state.segment)
            core['segments'] = ctx.segments
            if self._counts_apart:
                y, memory = with_sums_apart(
                    lambda state: self.write(turned_q, turned_k, v, terms, state=state, **core),
                    lambda state: self.write.sums(q, k, terms, state=state, **core),
                    before,
                )
            else:
                y, memory = self.write(q, k, v, terms, state=before, **core)
        if state is not None:
            state = LinearAttentionState(memory, preludes, ctx.segments_or_ones()[:, -1])
        return self.output(recomputed_beside_products(lambda y: self._read(y, x, ctx))(y)), state

    @property
    def _counts_apart(self) -> bool:
        """Whether sums of weights are a call of their own."""
        apart = counts_apart(self.value_dim) and self.write.counts and self.causal and self.levels is None
        return self.normalizer is not None and (apart or self.turn is not None)

    @property
    def divides_time(self) -> bool:
        return self.causal and self.levels is None

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> LinearAttentionState:
        """Returns an empty memory; its size depends on `length` where there are levels."""
        require_causal(self, self.causal)
        columns = self.value_dim + (self.normalizer is not None) + self.write.beside
        shape = (self.heads * self.values_per_key, self._features(), columns)
        memory: State
        if self.levels is None:
            memory = jnp.zeros((batch, *shape), wide_dtype(dtype))
        else:
            memory = no_levels(batch, min(levels_of(length), self.levels.count - 1), shape, dtype)
        return LinearAttentionState(memory, states_of(self.preludes, batch, dtype), no_segment(batch))

    def _features(self) -> int:
        if self.feature_map is None:
            return self.key_dim
        key = jax.ShapeDtypeStruct((1, 1, self.heads, self.key_dim), jnp.float32)
        _, features = jax.eval_shape(self.feature_map.features, key, key, jax.ShapeDtypeStruct((1, 1), jnp.int32))
        return features.shape[-1]

    def _project(
        self, x: Sequence, ctx: Context, state: LinearAttentionState | None
    ) -> tuple[Queries, Keys, Values, tuple[State, ...]]:
        projected = [linear(x) for linear in (self.query, self.key, self.value)]
        before = None if state is None else state.preludes
        projected, preludes = behind_preludes(self.preludes, projected, ctx.segments, before)
        widths = (self.key_dim, self.key_dim, self.value_dim)
        q, k, v = (y.reshape(*x.shape[:2], -1, width) for y, width in zip(projected, widths, strict=True))
        if self.position is not None:
            q, k = self.position.rotate(q, ctx.positions), self.position.rotate(k, ctx.positions)
        if self.feature_map is not None:
            q, k = self.feature_map.features(q, k, ctx.positions)
            q = q if self.causal else within_span(self.feature_map, q, ctx.segments)
        if self.values_per_key > 1:
            q, k = (jnp.repeat(features, self.values_per_key, axis=2) for features in (q, k))
        return q, k, v, preludes

    def _gated(self, x: Sequence, k: Keys, v: Values) -> tuple[Keys, Values, Terms]:
        log_decay = None if self.decay is None else self.decay(x)
        if log_decay is not None and log_decay.ndim == 4 and log_decay.shape[-1] != k.shape[-1]:
            raise UserError(
                f'{type(self.decay).__name__} has a decay for each of {log_decay.shape[-1]} channels of a key, and '
                f'{type(self.feature_map).__name__} makes {k.shape[-1]} features of them; choose a decay of heads, '
                'such as StepDecay, or a feature_map that keeps their number'
            )
        return (k, v, Terms(log_decay)) if self.gates is None else self.gates(x, k, v, log_decay)

    def _read(self, y: Heads, x: Sequence, ctx: Context) -> Float[Array, 'b t f']:
        if self.normalizer is not None:
            y = self.normalizer(y[..., :-1], y[..., -1]).astype(x.dtype)
        if self.growth is not None:
            keys = ctx.positions + 1 if self.causal else document_sizes(ctx.segments, *x.shape[:2])
            factor = self.growth(keys.astype(wide_dtype(x.dtype)), self.value_dim)
            y = (factor[..., None, None] * y).astype(x.dtype)
        if self.norm is not None:
            y = self.norm(y)
        y = y.reshape(*x.shape[:2], -1)
        if self.joint_norm is not None:
            y = self.joint_norm(y)
        return y if self.gate is None else y * self.gate(x)


def _head_channels(name: str, ratio: float, dim: int, heads: int) -> int:
    channels = ratio * dim / heads
    if channels < 1 or channels != int(channels):
        raise UserError(f'{name}_ratio {ratio} of dim {dim} over {heads} heads is {channels}, not a whole number')
    return int(channels)
