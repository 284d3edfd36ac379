"""What chunks of `delta_rule` do on Hopper GPUs, with decays of key channels."""

import jax
import jax.numpy as jnp

from pallas_kernels.delta_rule.chunk import Weights
from pallas_kernels.matrix_state.mosaic_gpu import channel_decays
from pallas_kernels.matrix_state.mosaic_gpu.inverse import inverse
from pallas_kernels.matrix_state.mosaic_gpu.rule import Steps
from pallas_kernels.matrix_state.mosaic_gpu.solving import Documents, Solved, cut, of_heads
from pallas_kernels.matrix_state.mosaic_gpu.weights import weights as channel_weights
from pallas_kernels.matrix_state.products import Form, multiply
from pallas_kernels.target import Target

_FORM = Form(jnp.float32, jnp.float32)


def solve(here: Target, documents: Documents, steps: Steps) -> Solved:
    """What chunks do; beta is the number that the rule has of steps."""
    (beta,) = steps.numbers
    does = _weights(here, documents, steps, beta)
    # Its columns times beta, rather than the rows of what it multiplies, which would be written once more in float32.
    solved = inverse(here, does.erased) * beta.swapaxes(3, 4)
    written = multiply(solved, of_heads(steps.v, beta.shape[1]), 'nn', _FORM)
    reads = -multiply(solved, does.k, 'nn', _FORM)
    found = Solved(does.among, does.q, does.writes, does.factor, written, reads)
    return jax.tree.map(lambda array: array.astype(steps.q.dtype), found)._replace(factor=does.factor)


def _weights(here: Target, documents: Documents, steps: Steps, beta: jax.Array) -> Weights:
    assert steps.log_decay is not None
    given = channel_decays.Steps(steps.q, steps.k, steps.log_decay, documents.rows)
    found = channel_weights(here, True, given)
    return Weights(
        among=cut(found.among),
        erased=beta * cut(found.erased),
        q=cut(found.q),
        k=cut(found.k),
        writes=cut(found.writes),
        factor=channel_decays.factor(given)[:, :, :, None],
    )
