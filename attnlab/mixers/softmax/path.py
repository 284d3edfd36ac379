"""PaTH attention: positions are products of reflections that depend on the input."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from attnlab.context import Context
from attnlab.functional.dense import softmax
from attnlab.functional.precision import wide_dtype
from attnlab.mixers.mixer import Mixer
from attnlab.nn.feature_maps import UnitNorm
from attnlab.nn.heads import by_head, head_channels
from attnlab.nn.preludes import ConvState, Prelude, ShortConv, behind_preludes, preludes_for, states_of
from attnlab.nn.projections import Linear
from attnlab.typing import Heads, Keys, Queries, Segments, Sequence, State, Values

CHUNK = 64
"""The most tokens whose reflections are multiplied out at a time."""


class MovedKeys(NamedTuple):
    """What queries to come see of the past; slot `i` holds token `i` of the stream.

    Attributes:
      keys: reflected by all tokens since; float32 or float64.
      values: as they are.
      segments: documents.
      forgotten: the sum of the logarithms of forget gates of all tokens since; float32 or float64.
      consumed: number of tokens so far.
    """

    keys: Float[Array, 'b s h k']
    values: Float[Array, 'b s h k']
    segments: Int[Array, 'b s']
    forgotten: Float[Array, 'b s h']
    consumed: Int[Array, '']


class PathState(NamedTuple):
    """What a layer remembers of a stream.

    Attributes:
      past: keys and values.
      conv: the inputs that the convolution still needs.
      preludes: the states of the preludes of queries, keys and values; empty without preludes.
    """

    past: MovedKeys
    conv: ConvState
    preludes: tuple[State, ...]


class PathAttention(Mixer):
    """Causal softmax attention with scores `q_i . H_i H_(i-1) .. H_(j+1) k_j / sqrt(k)`, `H_l = I - b_l w_l w_l^T`:

        w = unit(silu(conv(x W_1 W_2)))        b = 2 sigmoid(x W_b + c)

    of every head, `W_1` a bottleneck. With `forget`, the logarithms of the gates of the tokens after the key, up to the
    query, are added to the score. Keys are kept as later tokens have reflected them. Yang et al. 2025,
    https://arxiv.org/abs/2505.16381.

    The state holds the `length` tokens it was made for, and a call that goes beyond gives NaN.

    Raises `UserError` for heads that do not divide the width.

    Args:
      dim: model width.
      heads: each of `dim / heads` channels.
      rank: columns of the bottleneck.
      width: of the convolution.
      prelude: made as `prelude(dim, rngs=)`, one each for queries, keys and values; not for `w`.
      forget: made as `forget(dim, heads=, rngs=)`; gives the logarithms of forget gates, `b t h`, from the input.
      rngs: draws the parameters.
    """

    convolves = True

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        rank: int = 32,
        width: int = 3,
        prelude: Callable[..., Prelude] | None = None,
        forget: Callable[..., nnx.Module] | None = None,
        rngs: nnx.Rngs,
    ):
        self.heads, self.channels = heads, head_channels(dim, heads)
        self.query, self.key, self.value = (Linear(dim, dim, rngs=rngs) for _ in range(3))
        self.preludes = preludes_for(prelude, dim, dim, dim, rngs=rngs)
        self.down = Linear(dim, rank, axes=('embed', None), rngs=rngs)
        self.up = Linear(rank, dim, axes=(None, 'heads'), rngs=rngs)
        self.conv = ShortConv(dim, width=width, rngs=rngs)
        self.strength = Linear(dim, heads, bias=True, rngs=rngs)
        self.forget = None if forget is None else forget(dim, heads=heads, rngs=rngs)
        self.output = Linear(dim, dim, axes=('heads', 'embed'), rngs=rngs)

    def __call__(self, x: Sequence, ctx: Context, state: PathState | None = None) -> tuple[Sequence, PathState | None]:
        wide, (b, t, _) = wide_dtype(x.dtype), x.shape
        (q, k, v), preludes = behind_preludes(
            self.preludes,
            (linear(x) for linear in (self.query, self.key, self.value)),
            ctx.segments,
            None if state is None else state.preludes,
            lambda y: by_head(y, self.heads),
        )
        axes, conv = self.conv(self.up(self.down(x)), ctx.segments, None if state is None else state.conv)
        axes = UnitNorm().wide(by_head(axes, self.heads))
        strength = 2 * jax.nn.sigmoid(self.strength(x).astype(wide))
        log_forget = jnp.zeros_like(strength) if self.forget is None else self.forget(x)
        past = self._nothing(b, t, x.dtype) if state is None else state.past
        y, past = path_attention(
            q.astype(wide), k.astype(wide), v, axes, strength, log_forget, past=past, segments=ctx.segments_or_ones()
        )
        y = self.output(y.reshape(x.shape))
        if conv is None:
            return y, None
        return jnp.where(past.consumed > past.segments.shape[1], jnp.nan, y), PathState(past, conv, preludes)

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> PathState:
        """Returns an empty past of `length` slots."""
        past, conv = self._nothing(batch, length, dtype), self.conv.init_state(batch, dtype)
        return PathState(past, conv, states_of(self.preludes, batch, dtype))

    def _nothing(self, batch: int, length: int, dtype: DTypeLike) -> MovedKeys:
        shape, wide = (batch, length, self.heads), wide_dtype(dtype)
        return MovedKeys(
            jnp.zeros((*shape, self.channels), wide),
            jnp.zeros((*shape, self.channels), dtype),
            jnp.zeros(shape[:2], jnp.int32),
            jnp.zeros(shape, wide),
            jnp.zeros((), jnp.int32),
        )


def path_attention(
    q: Queries,
    k: Keys,
    v: Values,
    axes: Float[Array, 'b t h k'],
    strength: Float[Array, 'b t h'],
    log_forget: Float[Array, 'b t h'],
    *,
    past: MovedKeys,
    segments: Segments,
) -> tuple[Heads, MovedKeys]:
    """Returns the reads of queries that follow `past`, and the past after them.

    Scores are `q_i . H_i .. H_(j+1) k_j / sqrt(k)` plus the logarithms of the forget gates of the tokens after j up to
    i, with `H_l = I - strength_l axes_l axes_l^T`. In chunks of tokens, whose reflections one triangular system
    multiplies out; each is computed again in the backward pass. Yang et al. 2025, https://arxiv.org/abs/2505.16381.
    """
    b, t = q.shape[:2]
    # No more tokens at a time than there are slots; one that finds none left is for the caller to see.
    size = max(1, min(CHUNK, past.segments.shape[1]))
    whole = t - t % size
    given, chunk, reads = (q, k, v, axes, strength, log_forget, segments), jax.checkpoint(_chunk), []
    if whole or not t:

        def chunks(x: Array) -> Array:
            return jnp.moveaxis(x[:, :whole].reshape(b, -1, size, *x.shape[2:]), 1, 0)

        past, y = jax.lax.scan(chunk, past, jax.tree.map(chunks, given))
        reads.append(jnp.moveaxis(y, 0, 1).reshape(b, whole, *y.shape[3:]))
    if whole < t:
        past, y = chunk(past, jax.tree.map(lambda x: x[:, whole:], given))
        reads.append(y)
    return jnp.concatenate(reads, axis=1), past


def _chunk(past: MovedKeys, given: tuple[Array, ...]) -> tuple[MovedKeys, Array]:
    q, k, v, axes, strength, log_forget, segments = given
    t, scale = q.shape[1], q.shape[-1] ** -0.5
    same = (segments[:, :, None] == segments[:, None])[:, None]
    lower = jnp.tril(jnp.ones((1, 1, t, t), bool))
    within, before = same & lower, same & jnp.tril(lower, -1)

    def products(x: Heads, y: Heads, mask: Array) -> Float[Array, 'b h t t']:
        return jnp.where(mask, jnp.einsum('bihk,bjhk->bhij', x, y, precision='highest'), 0)

    # With T = (I + diag(b) W W^T)^-1, below the diagonal, H_i .. H_1 = I - W^T T diag(b) W.
    by_row = jnp.moveaxis(strength, 2, 1)[..., None]
    system = jnp.eye(t, dtype=q.dtype)[None, None] + by_row * products(axes, axes, before)
    known = jnp.concatenate([by_row * jnp.swapaxes(axes, 1, 2), by_row * products(axes, k, before)], axis=-1)
    solved = jax.lax.linalg.triangular_solve(system, known, left_side=True, lower=True, unit_diagonal=True)
    reflected, mixed = solved[..., : q.shape[-1]], solved[..., q.shape[-1] :]

    met = products(q, axes, within)
    moved = q - jnp.einsum('bhij,bhjk->bihk', met, reflected, precision='highest')
    # Within documents, so that what one forgets is no term of another.
    forgotten = jnp.einsum('bij,bjh->bhi', within[:, 0].astype(q.dtype), log_forget, precision='highest')
    own = products(q, k, within) - jnp.einsum('bhij,bhjl->bhil', met, mixed, precision='highest')
    own = scale * own + forgotten[..., :, None] - forgotten[..., None, :]
    earlier = scale * jnp.einsum('bihk,bjhk->bhij', moved, past.keys, precision='highest')
    earlier = earlier + forgotten[..., :, None] + jnp.moveaxis(past.forgotten, 2, 1)[..., None, :]
    there = jnp.arange(past.segments.shape[1], dtype=jnp.int32) < past.consumed
    known_before = ((segments[:, :, None] == past.segments[:, None]) & there[None, None])[:, None]

    scores, visible = (
        jnp.concatenate([jnp.broadcast_to(x, (*own.shape[:3], x.shape[-1])) for x in pair], axis=-1)
        for pair in ((earlier, own), (known_before, within))
    )
    weights = softmax(jnp.where(visible, scores, 0), visible).astype(v.dtype)
    y = jnp.einsum('bhij,bjhk->bihk', weights, jnp.concatenate([past.values.astype(v.dtype), v], axis=1))

    # Keys of documents that ended stay as they are: moved by those of others they would grow beyond all numbers.
    met = jnp.where(known_before, jnp.einsum('bjhk,bhik->bhij', past.keys, reflected, precision='highest'), 0)
    moved_keys = past.keys - jnp.einsum('bhij,bihk->bjhk', met, axes, precision='highest')
    keys = k - jnp.einsum('bhij,bihk->bjhk', mixed, axes, precision='highest')
    last = jnp.moveaxis(forgotten, 1, 2)

    def placed(old: Array, new: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), past.consumed, 1)

    return MovedKeys(
        placed(moved_keys, keys),
        placed(past.values, v),
        placed(past.segments, segments),
        placed(past.forgotten + last[:, -1:], last[:, -1:] - last),
        past.consumed + t,
    ), y
