"""Fast weights: a linear memory that is trained while it reads, on a loss of its own, by mini-batches of tokens."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional.documents import places_after
from attnlab.functional.precision import wide_dtype
from attnlab.functional.recomputed import recomputed_beside_products
from attnlab.functional.recurrences import document_starts, no_segment
from attnlab.mixers.mixer import Mixer
from attnlab.nn.fast_weights import Descent, InnerLoss, Memory, Plan
from attnlab.nn.feature_maps import FeatureMap
from attnlab.nn.heads import by_head, head_channels
from attnlab.nn.parameter import param
from attnlab.nn.positions import Rope
from attnlab.nn.preludes import Prelude, behind_preludes, preludes_for, states_of
from attnlab.nn.projections import Linear
from attnlab.typing import Heads, Keys, Queries, Segments, Sequence, State, Values

BLOCK = 64
"""How many tokens are computed again in the backward pass of a stream, instead of the weights after each."""


class FastWeightsState(NamedTuple):
    """What a layer remembers of a stream.

    Attributes:
      memory: float32 or float64.
      place: how many tokens the latest mini-batch has, `b`.
      preludes: the states of the preludes of queries, keys and, unless these are tied, values; empty without preludes.
      segment: the segment of the last token, `b`; -1 before the first.
    """

    memory: Memory
    place: Int[Array, ' b']
    preludes: tuple[State, ...]
    segment: Int[Array, ' b']


class FastWeights(Mixer):
    """Multi-head fast weights, `y_t = W_o (g_t * norm(read(W_t^T q_t)))`: a memory `W` trained by gradient descent,

        W_t = descent(W_{t-1}, D_1 .. D_t)        D_j = d loss(W_0^T k_j; k_j, v_j) / d W_0

    where `W_0` are the weights before the mini-batch of token `j`, `chunk` tokens counted from the first of the
    document, so that the gradients of a mini-batch are products of matrices. What a document starts from is learned,
    like all else, by the gradient of the model's loss through the descent. Memories and descents are in float32 or
    better. Sun et al. 2024, https://arxiv.org/abs/2407.04620; Behrouz, Zhong and Mirrokni 2024,
    https://arxiv.org/abs/2501.00663.

    A stream, and rows with several documents, whose mini-batches start anywhere, go token by token.

    Raises `UserError` for heads that do not divide the width, and where called, for a feature map that changes the
    number of channels.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        loss: Callable[..., InnerLoss],
        descent: Callable[..., Descent],
        chunk: int = 16,
        bias: bool = False,
        tied: bool = False,
        prelude: Callable[..., Prelude] | None = None,
        feature_map: Callable[..., FeatureMap] | None = None,
        position: Rope | None = None,
        norm: Callable[..., nnx.Module] | None = None,
        joint_norm: Callable[..., nnx.Module] | None = None,
        gate: Callable[..., nnx.Module] | None = None,
        rngs: nnx.Rngs,
    ):
        """Makes the projections and the parts that have parameters.

        Args:
          dim: model width.
          heads: how many memories, each from and to `dim / heads` channels.
          loss: made as `loss(channels, heads=, rngs=)`; see `attnlab.nn.fast_weights`.
          descent: made as `descent(dim, heads=, channels=, chunk=, rngs=)`.
          chunk: tokens of a mini-batch.
          bias: whether memories have one, `W^T k + c`, trained likewise.
          tied: whether queries and keys have one projection, which preludes of their own tell apart, and values have no
            prelude.
          prelude: made as `prelude(features, rngs=)`, one each for queries, keys and values.
          feature_map: made as `feature_map(channels, heads=, rngs=)`; keeps the number of channels.
          position: rotates queries and keys by their place in the mini-batch.
          norm: made as `norm(channels, rngs=)`, one for all heads, applied to each.
          joint_norm: made as `joint_norm(dim, rngs=)`, applied to all heads together.
          gate: made as `gate(dim, dim, rngs=)`; multiplies the read.
          rngs: draws the parameters.
        """
        self.heads, self.channels, self.chunk = heads, head_channels(dim, heads), chunk
        self.position = position
        self.query = Linear(dim, dim, rngs=rngs)
        self.key = None if tied else Linear(dim, dim, rngs=rngs)
        self.value = Linear(dim, dim, rngs=rngs)
        self.preludes = preludes_for(prelude, *(dim,) * (2 if tied else 3), rngs=rngs)
        self.feature_map = None if feature_map is None else feature_map(self.channels, heads=heads, rngs=rngs)
        self.loss = loss(self.channels, heads=heads, rngs=rngs)
        self.descent = descent(dim, heads=heads, channels=self.channels, chunk=chunk, rngs=rngs)
        shape, axes = (heads, self.channels, self.channels), ('heads', None, None)
        self.start = param(nnx.initializers.normal(0.02), shape, axes=axes, rngs=rngs)
        zeros = nnx.initializers.zeros
        self.bias = param(zeros, (heads, 1, self.channels), axes=axes, group='vector', rngs=rngs) if bias else None
        self.norm = None if norm is None else norm(self.channels, rngs=rngs)
        self.joint_norm = None if joint_norm is None else joint_norm(dim, rngs=rngs)
        self.gate = None if gate is None else gate(dim, dim, rngs=rngs)
        self.output = Linear(dim, dim, axes=('heads', 'embed'), rngs=rngs)

    def __call__(
        self, x: Sequence, ctx: Context, state: FastWeightsState | None = None
    ) -> tuple[Sequence, FastWeightsState | None]:
        starts, place = self._places(x, ctx.segments, state)
        (q, k, v), preludes = self._project(x, ctx, place, state)
        rates = self.descent.rates(x, place)
        if state is None and ctx.segments is None:
            y = self._by_chunk(q, k, v, rates)
        else:
            before = self._new(x.shape[0], q.dtype) if state is None else state.memory
            y, memory = self._by_token(q, k, v, rates, before, starts, place == 0)
            if state is not None:
                segment = ctx.segments_or_ones()[:, -1]
                state = FastWeightsState(memory, (place[:, -1] + 1) % self.chunk, preludes, segment)
        return self.output(recomputed_beside_products(lambda y: self._read(y, x))(y.astype(x.dtype))), state

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> FastWeightsState:
        """Returns the state before the first token, whose memory is not read: a document starts from what is learned.

        Its size does not depend on `length`.
        """
        preludes = states_of(self.preludes, batch, dtype)
        places = jnp.zeros((batch,), jnp.int32)
        return FastWeightsState(self._new(batch, wide_dtype(dtype)), places, preludes, no_segment(batch))

    def _new(self, batch: int, dtype: DTypeLike) -> Memory:
        shape = (batch, self.heads, self.channels + (self.bias is not None), self.channels)
        return Memory(*(jnp.zeros(shape, dtype) for _ in Memory._fields))

    def _places(
        self, x: Sequence, segments: Segments | None, state: FastWeightsState | None
    ) -> tuple[Bool[Array, 'b t'], Int[Array, 'b t']]:
        """Which tokens start a document, and the place of every token in its mini-batch."""
        segments = jnp.ones(x.shape[:2], jnp.int32) if segments is None else segments
        starts = document_starts(segments, None if state is None else state.segment)
        return starts, places_after(starts, None if state is None else state.place) % self.chunk

    def _project(
        self, x: Sequence, ctx: Context, place: Int[Array, 'b t'], state: FastWeightsState | None
    ) -> tuple[tuple[Queries, Keys, Values], tuple[State, ...]]:
        query = self.query(x)
        projected = [query, query if self.key is None else self.key(x), self.value(x)]
        before = None if state is None else state.preludes
        projected, preludes = behind_preludes(self.preludes, projected, ctx.segments, before)
        wide = wide_dtype(x.dtype)
        q, k, v = (by_head(y, self.heads).astype(wide) for y in projected)
        if self.feature_map is not None:
            q, k = self.feature_map.features(q, k, place)
            if k.shape[-1] != self.channels:
                raise UserError(
                    f'feature_map of FastWeights makes {k.shape[-1]} features of {self.channels} channels; it must '
                    'keep their number, as UnitNorm() does'
                )
        if self.position is not None:
            q, k = self.position.rotate(q, place), self.position.rotate(k, place)
        return (q, k, v), preludes

    def _initial(self, dtype: DTypeLike) -> Float[Array, 'h m v']:
        start = self.start[...].astype(dtype)
        return start if self.bias is None else jnp.concatenate([start, self.bias[...].astype(dtype)], axis=1)

    def _inputs(self, x: Heads) -> Float[Array, 'b t h m']:
        return x if self.bias is None else jnp.concatenate([x, jnp.ones_like(x[..., :1])], axis=-1)

    def _by_chunk(self, q: Queries, k: Keys, v: Values, rates: Any) -> Heads:
        """Mini-batch after mini-batch, one document a row."""
        b, t = q.shape[:2]
        size = min(t, self.chunk)

        def chunks(x: Array) -> Array:
            x = jnp.pad(x, ((0, 0), (0, -t % size)) + ((0, 0),) * (x.ndim - 2))
            return jnp.moveaxis(x.reshape(b, -1, size, *x.shape[2:]), 1, 0)

        def mini_batch(before: tuple[Array, Array], given: tuple[Array, Array, Array, Any]) -> Any:
            weights, momentum = before
            q, k, v, rates = given
            asking, keys, plan = self._inputs(q), self._inputs(k), self.descent.plan(rates)
            gradients = self.loss.gradient(_apply(weights, keys), k, v)
            scores = plan.steps * jnp.einsum('bchm,bjhm->bhcj', asking, keys, precision='highest')
            z = plan.kept[..., None] * _apply(weights, asking)
            z = z - jnp.einsum('bhcj,bjhv->bchv', scores, gradients, precision='highest')
            if plan.added is not None:
                z = z + plan.added[..., None] * _apply(momentum, asking)
            return _after(plan, weights, momentum, keys, gradients), self.loss.read(z, q)

        weights = jnp.broadcast_to(self._initial(q.dtype)[None], self._new(b, q.dtype).start.shape)
        given = jax.tree.map(chunks, (q, k, v, rates))
        _, y = jax.lax.scan(jax.checkpoint(mini_batch), (weights, jnp.zeros_like(weights)), given)
        return jnp.moveaxis(y, 0, 1).reshape(b, -1, *y.shape[3:])[:, :t]

    def _by_token(
        self,
        q: Queries,
        k: Keys,
        v: Values,
        rates: Any,
        memory: Memory,
        starts: Bool[Array, 'b t'],
        first: Bool[Array, 'b t'],
    ) -> tuple[Heads, Memory]:
        """Token after token, from the memory before; `first` are those of mini-batches, `starts` those of documents."""
        initial = self._initial(q.dtype)[None]

        def token(memory: Memory, given: tuple[Array, Array, Array, Any, Array, Array]) -> tuple[Memory, Array]:
            q, k, v, rates, starts, first = given
            starts, first = starts[:, None, None, None], first[:, None, None, None]
            weights = jnp.where(starts, initial, memory.weights)
            momentum = jnp.where(starts, jnp.zeros_like(memory.momentum), memory.momentum)
            start = jnp.where(first, weights, memory.start)
            keys = self._inputs(k[:, None])
            gradients = self.loss.gradient(_apply(start, keys), k[:, None], v[:, None])
            gradient = jnp.moveaxis(keys, 1, -1) * jnp.moveaxis(gradients, 1, -2)
            rates = jax.tree.map(lambda rate: rate[..., None, None], rates)
            memory = self.descent.advance(Memory(start, weights, momentum), gradient, rates, first)
            z = _apply(memory.weights, self._inputs(q[:, None]))
            return memory, self.loss.read(z, q[:, None])[:, 0]

        given = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), (q, k, v, rates, starts, first))
        run = jax.checkpoint(lambda memory, given: jax.lax.scan(token, memory, given))
        steps, reads = q.shape[1], []
        whole = steps - steps % BLOCK
        if whole or not steps:
            blocks = jax.tree.map(lambda x: x[:whole].reshape(-1, BLOCK, *x.shape[1:]), given)
            memory, y = jax.lax.scan(run, memory, blocks)
            reads.append(y.reshape(whole, *y.shape[2:]))
        if whole < steps:
            memory, y = run(memory, jax.tree.map(lambda x: x[whole:], given))
            reads.append(y)
        return jnp.moveaxis(jnp.concatenate(reads), 0, 1), memory

    def _read(self, y: Heads, x: Sequence) -> Sequence:
        y = y if self.norm is None else self.norm(y)
        y = y.reshape(x.shape)
        y = y if self.joint_norm is None else self.joint_norm(y)
        return y if self.gate is None else y * self.gate(x)


def _apply(weights: Float[Array, 'b h m v'], x: Float[Array, 'b c h m']) -> Float[Array, 'b c h v']:
    return jnp.einsum('bchm,bhmv->bchv', x, weights, precision='highest')


def _after(
    plan: Plan,
    weights: Float[Array, 'b h m v'],
    momentum: Float[Array, 'b h m v'],
    keys: Float[Array, 'b c h m'],
    gradients: Heads,
) -> tuple[Float[Array, 'b h m v'], Float[Array, 'b h m v']]:
    """Weights and momentum after a mini-batch."""

    def moved(kept: Float[Array, 'b h'], matrix: Array, steps: Float[Array, 'b c h']) -> Array:
        stepped = jnp.einsum('bchm,bchv->bhmv', steps[..., None] * keys, gradients, precision='highest')
        return kept[..., None, None] * matrix - stepped

    after = moved(plan.kept[:, -1], weights, jnp.moveaxis(plan.steps[:, :, -1], 1, -1))
    if plan.added is None or plan.momentum_kept is None or plan.momentum_steps is None:
        return after, momentum
    after = after + plan.added[:, -1, :, None, None] * momentum
    return after, moved(plan.momentum_kept, momentum, plan.momentum_steps)
