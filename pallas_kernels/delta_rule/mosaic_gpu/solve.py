"""The parts of `delta_rule` within chunks on Hopper GPUs, mainly the triangular inverse."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.delta_rule.chunk import Chunk, Weights, weights
from pallas_kernels.delta_rule.products import Form, multiply
from pallas_kernels.matrix_state.mosaic_gpu import channel_decays
from pallas_kernels.matrix_state.mosaic_gpu.inverse import inverse
from pallas_kernels.matrix_state.mosaic_gpu.solving import Documents, Solved, cut, of_heads
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


def solve(here: Target, documents: Documents, steps: Steps) -> Solved:
    does = _weights(here, documents, steps)
    solved = inverse(here, does.erased)
    h = steps.beta.shape[1]
    written = multiply(solved, steps.beta * of_heads(steps.v, h), 'nn', _FORM)
    reads = -multiply(solved, steps.beta * does.k, 'nn', _FORM)
    found = Solved(does.among, does.q, does.writes, does.factor, written, reads)
    return jax.tree.map(lambda array: array.astype(steps.q.dtype), found)._replace(factor=does.factor)


def _weights(here: Target, documents: Documents, steps: Steps) -> Weights:
    decay = steps.log_decay
    if decay is None or decay.ndim == 5:
        q, k = (of_heads(array, steps.beta.shape[1]) for array in (steps.q, steps.k))
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
