"""What mixers remember: how far back the input still matters, how large a state grows and how fast it forgets.

All of it is measured from the outside, by derivatives of a mixer's call, so that it means the same for attention,
recurrences and convolutions: no mixer is asked for its decays.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int

from attnlab.blocks.block import Block, mixer_of
from attnlab.context import PADDING, Context
from attnlab.mixers.mixer import Mixer
from attnlab.models.layers import entered, layers
from attnlab.models.predictor import Stacked
from attnlab.quantize.states import without_storage
from attnlab.typing import Features, Segments, Sequence, State, Tokens


class Call(NamedTuple):
    """What the mixer of a layer is called with."""

    x: Sequence
    ctx: Context


def mixers(model: Stacked) -> list[Mixer]:
    """The mixer of every layer, without what stores its state; a block that has none is its own."""
    return [without_storage(mixer_of(layer)) for _, layer in layers(model)]


def calls(model: Stacked, inputs: Tokens | Features, ctx: Context) -> list[Call]:
    """What the mixer of every layer is called with in a pass: after norm and prelude, where there are any."""
    streams, ctx = entered(model, inputs, ctx)
    found: list[Call] = []
    for index, layer in layers(model):
        own, ctx = model.stack.told(index, layer, streams, ctx)
        if isinstance(layer, Block):
            layer.mixer = _Noted(layer.mixer, found.append)  # type: ignore[assignment]
        else:
            found.append(Call(streams, own))
        streams, _ = layer(streams, own.fold_in(index))
    return found


class _Noted(nnx.Module):
    """A mixer of which it is noted what it is called with."""

    def __init__(self, mixer: Any, note: Callable[[Call], None]):
        self.mixer, self.note = mixer, note

    def __call__(self, x: Array, ctx: Context, state: Any = None) -> tuple[Array, Any]:
        # What values depend on is part of the call.
        self.note(Call(x, ctx.unaided()))
        return self.mixer(x, ctx, state)


def influence(
    function: Callable[[Sequence], Sequence], x: Sequence, targets: Int[Array, 'n'], key: Array
) -> Float[Array, 'n b t']:
    """Squared sizes `|dy_i / dx_j|_F^2` of the derivatives of outputs `i`, the targets, by inputs `j`.

    Estimated without bias as `|u^T dy_i / dx_j|^2`, `u` drawn from plus and minus one once for every target and row
    (Hutchinson 1990). Exact where the derivative is a multiple of a rotation.
    """
    y, pull = jax.vjp(function, x)
    signs = jax.random.rademacher(key, (len(targets), y.shape[0], y.shape[2]), y.dtype)

    def one(each: tuple[Array, Array]) -> Array:
        target, sign = each
        (back,) = pull(jnp.zeros_like(y).at[:, target].set(sign))
        return jnp.sum(jnp.square(jnp.abs(back).astype(jnp.float32)), axis=-1)

    return jax.lax.map(one, (targets, signs))


class ByDistance(NamedTuple):
    """Sums of squared influences by distance, and how many were added; of several calls they add up."""

    total: Float[Array, ' s']
    pairs: Float[Array, ' s']

    def strengths(self) -> Float[np.ndarray, ' s']:
        """Roots of means; 0 at distances at which there was nothing."""
        total, pairs = (np.asarray(each, np.float64) for each in self)
        return np.sqrt(total / np.where(pairs > 0, pairs, 1))


def by_distance(
    squares: Float[Array, 'n b t'], targets: Int[Array, 'n'], segments: Segments, *, longest: int, two_sided: bool
) -> ByDistance:
    """Influences by how far back the input lies, from 0 to before `longest`, inside of documents.

    `two_sided`: of inputs ahead as well, at the same distances. Targets that are padding are left out.
    """
    places = jnp.arange(squares.shape[2])
    back = targets[:, None] - places[None]
    distance = jnp.abs(back) if two_sided else back
    own = segments[:, targets].T
    there = (
        (own[..., None] == segments[None])
        & (own[..., None] != PADDING)
        & ((distance >= 0) & (distance < longest))[:, None]
    )
    where = jnp.broadcast_to(jnp.clip(distance, 0, longest - 1)[:, None], there.shape).ravel()
    total, pairs = (
        jax.ops.segment_sum(values.ravel(), where, longest)
        for values in (jnp.where(there, squares, 0), there.astype(jnp.float32))
    )
    return ByDistance(total, pairs)


def mean_distance(strengths: Float[np.ndarray, ' s']) -> float:
    """`sum_s s i_s / sum_s i_s`, in tokens, of influences by distance: 0 where a token sees itself alone."""
    total = float(np.sum(strengths))
    return float(np.sum(np.arange(len(strengths)) * strengths)) / total if total else 0.0


def reach(strengths: Float[np.ndarray, ' s'], share: float = 0.9) -> int:
    """The least distance within which this share of the sum of influences lies."""
    sums = np.cumsum(strengths)
    return int(np.searchsorted(sums, share * (1 - 1e-12) * sums[-1]))


class Carried(NamedTuple):
    """What became of an array of a state, token by token; by head where it has the axes rows, heads and two more.

    Attributes:
      norms: Euclidean norms after every token, `b t h`, `h` being 1 where there are no heads.
      kept: how much of the `n` numbers of the array that were not zero before a token is in it afterwards: the root of
        `|J|_F^2 / n`, `J` the derivative of the one by the other, estimated as `|J^T u|^2 / n` as influences are; exact
        of diagonal derivatives, and 1 where all was zero.
    """

    norms: Float[Array, 'b t h']
    kept: Float[Array, 'b t h']


def carried(mixer: Mixer, x: Sequence, ctx: Context, key: Array) -> dict[str, Carried]:
    """The arrays of a mixer's state by name, as tokens are read one by one.

    For `S_t = a_t S_{t-1} + k_t v_t^T` what is kept is `a_t`; for decays by channel about the root of the mean of their
    squares; for a delta rule about the root of `|I - b_t k_t k_t^T|_F^2 / k`; for a cache 1. What one array gives
    another, as states with a running maximum do, is not counted. Raises `UserError` for a mixer that keeps no state.
    """
    batch, length, _ = x.shape
    start = mixer.init_state(batch, length, x.dtype)
    leaves, tree = jax.tree.flatten(start)
    paths = [jax.tree_util.keystr(path, simple=True, separator='.') for path, _ in jax.tree.leaves_with_path(start)]
    known = [place for place, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]

    def step(leaves: list[Array], token: tuple[Array, Array]) -> tuple[list[Array], Any]:
        number, x = token
        here = ctx.token(number)

        def advance(real: list[Array]) -> tuple[list[Array], list[Array]]:
            whole = list(leaves)
            for place, leaf in zip(known, real, strict=True):
                whole[place] = leaf
            after = jax.tree.leaves(mixer(x[:, None], here, jax.tree.unflatten(tree, whole))[1])
            return [after[place] for place in known], after

        real, pull, after = jax.vjp(advance, [leaves[place] for place in known], has_aux=True)
        found = []
        for index, place in enumerate(known):
            drawn = jax.random.fold_in(jax.random.fold_in(key, number), place)
            asked = jax.random.rademacher(drawn, real[index].shape, jnp.float32).astype(real[index].dtype)
            (back,) = pull([asked if other == index else jnp.zeros_like(leaf) for other, leaf in enumerate(real)])
            # A slot that is still empty has nothing to lose.
            full = leaves[place] != 0
            counted = _norm(full.astype(jnp.float32))
            kept = _norm(jnp.where(full, back[index], 0)) / jnp.where(counted > 0, counted, 1)
            found.append(Carried(_norm(real[index]), jnp.where(counted > 0, kept, 1)))
        return after, found

    _, found = jax.lax.scan(step, leaves, (jnp.arange(length), jnp.swapaxes(x, 0, 1)))
    return {
        paths[place] or 'state': Carried(*(jnp.swapaxes(each, 0, 1) for each in one))
        for place, one in zip(known, found, strict=True)
    }


def continued(segments: Segments) -> Bool[Array, 'b t']:
    """Whether a token goes on with the document of the token before it."""
    same = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != PADDING)
    return jnp.concatenate([jnp.zeros_like(same, shape=(len(segments), 1)), same], axis=1)


def half_life(kept: Float[np.ndarray, ' n']) -> float | None:
    """Tokens after which half is left, at the geometric mean of the shares that a token leaves; `None` if it is all."""
    if np.min(kept) <= 0:
        return 0.0
    rate = -float(np.mean(np.log(kept)))
    # One token that is kept to within rounding says nothing of half-lives of millions.
    return float(np.log(2)) / rate if rate > 1e-6 else None


def _norm(x: State) -> Float[Array, 'b h']:
    """By row, and by head where there are heads, which come second of four axes."""
    squares = jnp.square(jnp.abs(x).astype(jnp.float32))
    return jnp.sqrt(jnp.sum(squares.reshape(len(x), x.shape[1] if x.ndim == 4 else 1, -1), axis=-1))
