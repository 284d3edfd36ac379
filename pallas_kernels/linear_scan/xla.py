"""The portable form of `linear_scan`."""

import jax
import jax.numpy as jnp

from pallas_kernels import precision, target, tiling
from pallas_kernels.linear_scan import vjp
from pallas_kernels.linear_scan.vjp import Step


def forward(x: jax.Array, decay: jax.Array, state: jax.Array, reverse: bool, step: Step) -> tuple[jax.Array, jax.Array]:
    """Returns the output of every step, `b t *d`, and the last carry, `b *d`; decay is broadcastable to x."""
    if x.shape[1] == 0:
        return x, state
    tile = tiling.linear_scan(x.shape[1], target.current().platform)
    if tile is None:
        return in_parallel(x, decay, state, reverse, step)
    return _in_order(x, decay, state, reverse, step, tile.steps)


_differentiable = vjp.differentiable(forward)


def linear_scan(x: jax.Array, decay: jax.Array, state: jax.Array, reverse: bool) -> tuple[jax.Array, jax.Array]:
    """Returns every h, `b t *d`, and the last one computed, `b *d`; decay is broadcastable to x, of the same rank."""
    operands = (x, decay, state)
    x, decay, state = (array.astype(precision.accumulator(*operands)) for array in operands)
    return _differentiable(x, decay, state, reverse)


def _in_order(
    x: jax.Array, decay: jax.Array, state: jax.Array, reverse: bool, step: Step, steps: int
) -> tuple[jax.Array, jax.Array]:
    """A loop over groups of steps, unrolled within a group."""
    t = x.shape[1]
    order = range(steps)[::-1] if reverse else range(steps)
    if t % steps:  # Padding steps do not change the state.
        behind = ((0, 0), (0, -t % steps)) + ((0, 0),) * (x.ndim - 2)
        decay = jnp.broadcast_to(decay, (decay.shape[0], t, *decay.shape[2:]))
        x, decay = jnp.pad(x, behind), jnp.pad(decay, behind, constant_values=1)

    def group(carry: tuple[jax.Array, jax.Array], i: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        state, outputs = carry
        xs = jax.lax.dynamic_slice_in_dim(x, i * steps, steps, axis=1)
        decays = decay if decay.shape[1] == 1 else jax.lax.dynamic_slice_in_dim(decay, i * steps, steps, axis=1)
        found = {}
        for j in order:
            state, found[j] = step(state, decays[:, j if decay.shape[1] > 1 else 0], xs[:, j])
        group = jnp.stack([found[j] for j in range(steps)], axis=1)
        return (state, jax.lax.dynamic_update_slice_in_dim(outputs, group, i * steps, axis=1)), None

    groups = jnp.arange(x.shape[1] // steps)
    (final, outputs), _ = jax.lax.scan(group, (state, jnp.zeros_like(x)), groups, reverse=reverse)
    return outputs[:, :t], final


def in_parallel(
    x: jax.Array, decay: jax.Array, state: jax.Array, reverse: bool, step: Step
) -> tuple[jax.Array, jax.Array]:
    """Merges pairs of neighbouring steps, in logarithmically many rounds (Blelloch, 1990)."""
    first, last = (-1, 0) if reverse else (0, -1)
    decay = jnp.broadcast_to(decay, x.shape)

    def merge(earlier: tuple[jax.Array, jax.Array], later: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return later[0] * earlier[0], later[0] * earlier[1] + later[1]

    written, _ = step(jnp.zeros_like(x), decay, x)
    written = written.at[:, first].add(decay[:, first] * state)
    _, carries = jax.lax.associative_scan(merge, (decay, written), axis=1, reverse=reverse)
    _, outputs = step(vjp.shifted(carries, state, reverse), decay, x)
    return outputs, carries[:, last]
