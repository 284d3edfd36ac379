"""The common arguments of cores whose state is a matrix, checked and in canonical form."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import arguments, packing, precision
from pallas_kernels.cost import CallCost


class Canonical(NamedTuple):
    """The arguments of the forms of a core besides q, k and v.

    Attributes:
      sizes: of the letters `b t h k v`.
      dtype: the type that states, decays and sums are computed in.
      log_decay: `b t h k`, of size 1 where it is constant; or `None`.
      state: `b h k v`.
      starts: the tokens that forget the past, bool `b t`; or `None`.
      scale: factor of the queries.
    """

    sizes: dict[str, int]
    dtype: jnp.dtype
    log_decay: jax.Array | None
    state: jax.Array
    starts: jax.Array | None
    scale: float

    def cost(self, of: Callable[..., CallCost], v: jax.Array) -> Callable[..., CallCost]:
        """The cost of the call, a function of `implementation=`, from that of the core."""
        sizes = {letter: self.sizes[letter] for letter in 'bthkv'}
        decay = None if self.log_decay is None else 'vector' if self.log_decay.shape[3] > 1 else 'scalar'
        return functools.partial(of, **sizes, decay=decay, itemsize=v.dtype.itemsize)


def canonical(
    core: str,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array | None,
    scale: float | None,
    state: jax.Array | None,
    segments: jax.Array | None,
    implementation: str | None,
    **by_head: jax.Array,
) -> Canonical:
    """Checks and completes the arguments of a core; `by_head` are numbers of every step and head, `b t h`.

    Raises:
      ValueError: for shapes that do not fit; where the reference is named, for log decays above 0, unless traced.
      TypeError: for arrays that are not floating point, or non-integer `segments`.
    """
    sizes = arguments.match(core, {}, q=(q, 'b t hq k'), k=(k, 'b t hk k'), v=(v, 'b t hv v'))
    arguments.check_channels(core, sizes['k'])
    sizes['h'] = max(sizes['hq'], sizes['hk'], sizes['hv'])
    numbers = {name: (array, 'b t h') for name, array in by_head.items()}
    sizes = arguments.match(core, sizes, **numbers, state=(state, 'b h k v'), segments=(segments, 'b t'))
    for name, array in (('q', q), ('k', k), ('v', v)):
        arguments.check_multiple(core, name, array.shape[2], sizes['h'], 'the call')
    arguments.check_floating(core, q=q, k=k, v=v, **by_head, log_decay=log_decay, state=state)
    arguments.check_integer(core, segments=segments)

    dtype = precision.accumulator(q, k, v, *by_head.values(), log_decay, state)
    log_decay = _canonical_decay(core, log_decay, sizes, dtype)
    arguments.check_not_positive(core, implementation, log_decay=log_decay)
    if state is None:
        state = jnp.zeros((sizes['b'], sizes['h'], sizes['k'], sizes['v']), dtype)
    return Canonical(
        sizes=sizes,
        dtype=dtype,
        log_decay=log_decay,
        state=state.astype(dtype),
        starts=None if segments is None else packing.starts(segments),
        scale=sizes['k'] ** -0.5 if scale is None else scale,
    )


def _canonical_decay(
    core: str, log_decay: jax.Array | None, sizes: dict[str, int], dtype: jnp.dtype
) -> jax.Array | None:
    """The log decays as `b t h k`, dimensions along which they are constant of size 1; `None` stays `None`."""
    if log_decay is None:
        return None
    if log_decay.ndim == 1:
        arguments.match(core, sizes, log_decay=(log_decay, 'h'))
        log_decay = log_decay[None, None, :, None]
    elif log_decay.ndim == 3:
        arguments.match(core, sizes, log_decay=(log_decay, 'b t h'))
        log_decay = log_decay[..., None]
    else:
        arguments.match(core, sizes, log_decay=(log_decay, 'b t h k'))
    return log_decay.astype(dtype)
