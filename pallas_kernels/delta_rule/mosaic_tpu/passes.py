"""The Pallas form of `delta_rule` for TPUs: a grid over batch, heads and groups of chunks, the groups in order.

The state stays in VMEM from one group to the next, transposed, `v k`. The state before each group is kept
for the backward pass, `t / group * k * v` numbers a head. The backward pass reruns a group forward, holding the states
before its chunks and the triangular inverses, and then its chunks, like the groups, from the last to the first; the
gradients of a chunk are computed by JAX from `chunk.step`.
"""

import functools
from collections.abc import Callable

from pallas_kernels.delta_rule import vjp
from pallas_kernels.delta_rule.mosaic_tpu.backward import backward
from pallas_kernels.delta_rule.mosaic_tpu.forward import forward
from pallas_kernels.target import Target


@functools.lru_cache
def form(here: Target) -> Callable[..., vjp.Outputs]:
    """The differentiable form for a device."""
    return vjp.differentiable(functools.partial(forward, here), functools.partial(backward, here))
