"""The parts of `diagonal_low_rank` within chunks on Hopper GPUs, mainly the triangular inverse; see `chunk`."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.diagonal_low_rank.chunk import Chunk, Weights, weights
from pallas_kernels.diagonal_low_rank.step import found
from pallas_kernels.matrix_state.decays import KEPT
from pallas_kernels.matrix_state.mosaic_gpu import channel_decays
from pallas_kernels.matrix_state.mosaic_gpu.inverse import inverse
from pallas_kernels.matrix_state.mosaic_gpu.rule import Steps
from pallas_kernels.matrix_state.mosaic_gpu.solving import Documents, More, Solved, cut, join, of_heads
from pallas_kernels.matrix_state.mosaic_gpu.weights import weights as channel_weights
from pallas_kernels.matrix_state.products import Form, multiply
from pallas_kernels.target import Target

_FORM = Form(jnp.float32, jnp.float32)


def solve(here: Target, documents: Documents, steps: Steps) -> Solved:
    """What chunks do: `values = T (B V) + T A~ S`, with `T` the inverse of `I - A`, or `T V` for `T (B V)`.

    The vectors that the rule has besides are a and, where it is not k, b.
    """
    dtype, h = steps.q.dtype, documents.rows.shape[1]
    does = _weights(here, documents, steps)
    solved, v = inverse(here, -does.earlier[0].astype(jnp.float32)), of_heads(steps.v, h)
    more, written = None, v
    if len(does.writes) == 2:
        written = multiply(does.earlier[1], v, 'nn', _FORM)
        more = More(keys=does.writes[1].astype(dtype), values=v.astype(dtype), among=does.among[1].astype(dtype))
    return Solved(
        among=does.among[0].astype(dtype),
        q=does.q.astype(dtype),
        writes=does.writes[0].astype(dtype),
        factor=does.factor,
        written=multiply(solved, written, 'nn', _FORM).astype(dtype),
        reads=multiply(solved, does.a, 'nn', _FORM).astype(dtype),
        more=more,
    )


def _keys(steps: Steps) -> tuple[jax.Array, ...]:
    """Those under which steps write what they read for `a`, and those of values where they are others."""
    return (*steps.vectors[1:], steps.k)


def _weights(here: Target, documents: Documents, steps: Steps) -> Weights:
    """In float32, or in 16 bits where decays are of key channels, but for the weights that are inverted."""
    h, decay = documents.rows.shape[1], steps.log_decay
    if decay is not None and decay.ndim == 4:
        return _by_channels(here, documents, steps, decay)
    q, a, *keys = (of_heads(array, h) for array in (steps.q, steps.vectors[0], *_keys(steps)))
    return weights(Chunk(q, a, tuple(keys), decay, documents.runs), functools.partial(found, _FORM))


def _by_channels(here: Target, documents: Documents, steps: Steps, decay: jax.Array) -> Weights:
    """The weights of queries and keys, and those of each `a` in the place of the query of the step before.

    There its reads have decayed up to that step, its own write included: what `a` reads of the state before its step.
    """
    h = documents.rows.shape[1]
    kept = documents.rows[..., KEPT, :, None]
    a, keys = cut(steps.vectors[0]), _keys(steps)
    ahead = join(jnp.concatenate([a[..., 1:, :], jnp.zeros_like(a[..., :1, :])], axis=3))

    def read(reads: jax.Array, key: jax.Array, among: DTypeLike | None = None) -> channel_decays.Weights:
        return channel_weights(here, False, channel_decays.Steps(reads, key, decay, documents.rows), among)

    def back(first: jax.Array, found: jax.Array) -> jax.Array:
        """A step later again, in chunks, after that of the first step; where a document starts nothing is read."""
        later = cut(found)[..., :-1, :]
        return kept.astype(found.dtype) * jnp.concatenate([first.astype(found.dtype), later], axis=3)

    by_q = [read(steps.q, key) for key in keys]
    by_a = [read(ahead, key, jnp.float32) for key in keys]
    first = jnp.repeat(a, h // a.shape[1], axis=1)[..., :1, :]
    return Weights(
        among=[cut(found.among) for found in by_q],
        earlier=[back(jnp.zeros_like(cut(found.among)[..., :1, :]), found.among) for found in by_a],
        q=cut(by_q[0].q),
        a=back(first, by_a[0].q),
        writes=[cut(found.writes) for found in by_q],
        factor=channel_decays.factor(channel_decays.Steps(steps.q, steps.k, decay, documents.rows))[:, :, :, None],
    )
