"""The parts of `delta_rule` within chunks on Hopper GPUs, mainly the triangular inverse."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.delta_rule.chunk import Chunk, Weights, inverse, weights
from pallas_kernels.delta_rule.products import Form, multiply
from pallas_kernels.matrix_state.mosaic_gpu import channel_decays
from pallas_kernels.matrix_state.mosaic_gpu.tiles import TILE
from pallas_kernels.matrix_state.mosaic_gpu.weights import weights as channel_weights
from pallas_kernels.target import Target

_FORM = Form(jnp.float32, jnp.float32)


class Steps(NamedTuple):
    """A call in whole chunks and tiles.

    Attributes:
      q: `b hq t k`.
      k: `b hk t k`.
      v: `b hv t v`.
      beta: float32, `b h l c 1`, zero in padding.
      log_decay: float32, zero there: `b h l c 1`, or `b h t k` where key channels have their own; or `None`.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    beta: jax.Array
    log_decay: jax.Array | None


class Documents(NamedTuple):
    """Where chunks forget the past.

    Attributes:
      runs: how often, up to each step, `b 1 l c 1`; `None`: never.
      rows: `b h l 8 c`, see there; with the decays, where these are one for all key channels.
    """

    runs: jax.Array | None
    rows: jax.Array


class Solved(NamedTuple):
    """The weights of chunks after applying their inverse, in the type of q except for the factor.

    Attributes:
      among: weight of a step's write in a step's read for its query, `b h l c c`.
      q: queries that read the state before the chunk, `b h l c k`.
      writes: the keys under which values are in the state after the chunk, `b h l c k`.
      factor: decay of the state before the chunk over the chunk, `b h l 1 k` or `b h l 1 1`, float32.
      written: the values that steps would write to a zero state, `b h l c v`.
      erases: keys whose reads of the state before are subtracted from these, `b h l c k`.
    """

    among: jax.Array
    q: jax.Array
    writes: jax.Array
    factor: jax.Array
    written: jax.Array
    erases: jax.Array


def solve(here: Target, documents: Documents, steps: Steps) -> Solved:
    does = _weights(here, documents, steps)
    solved = inverse(does.erased, here.platform)
    written = multiply(solved, steps.beta * of_heads(steps, steps.v), 'nn', _FORM)
    erases = multiply(solved, steps.beta * does.k, 'nn', _FORM)
    found = Solved(does.among, does.q, does.writes, does.factor, written, erases)
    return jax.tree.map(lambda array: array.astype(steps.q.dtype), found)._replace(factor=does.factor)


def _weights(here: Target, documents: Documents, steps: Steps) -> Weights:
    decay = steps.log_decay
    if decay is None or decay.ndim == 5:
        q, k = of_heads(steps, steps.q), of_heads(steps, steps.k)
        return weights(Chunk(q, k, steps.beta, decay, documents.runs), _FORM)
    given = channel_decays.Steps(steps.q, steps.k, decay, documents.rows)
    found = channel_weights(here, True, given)
    return Weights(
        among=cut(found.among),
        erased=steps.beta * cut(found.erased),
        q=cut(found.q),
        k=cut(found.k),
        writes=cut(found.writes),
        factor=channel_decays.factor(given)[:, :, :, None],
    )


def of_heads(steps: Steps, array: jax.Array) -> jax.Array:
    """What heads may share, for all of them, `b h l c k`, float32."""
    h = steps.beta.shape[1]
    return cut(jnp.repeat(array.astype(jnp.float32), h // array.shape[1], axis=1))


def cut(array: jax.Array) -> jax.Array:
    """`b h t k` as `b h l c k`."""
    b, h, t, k = array.shape
    return array.reshape(b, h, t // TILE, TILE, k)


def join(array: jax.Array) -> jax.Array:
    """`b h l c k` as `b h t k`."""
    b, h, l, c, k = array.shape
    return array.reshape(b, h, l * c, k)
