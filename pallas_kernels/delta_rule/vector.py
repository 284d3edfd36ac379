"""Products within chunks of `delta_rule` with a decay for every key channel, in the portable form.

With G the decays summed, a step t reads a key s through `sum_k k_tk k_sk exp(G_tk - G_sk)`. Around the middle of the
chunk this is one product of `k exp(G - G_middle)` and `k exp(G_middle - G)`, as long as neither overflows. Where decays
are too strong for that, chunks are read by blocks of a few steps.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.matrix_state.blocks import reads_by_blocks
from pallas_kernels.matrix_state.chunks import MODERATE, by_decay, since, since_first, until
from pallas_kernels.matrix_state.products import EXACT, Form

Products = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
"""Of queries and of keys with keys, `l b h c c`, arbitrary but finite for later keys; and the log decays up to
each step and after it, `l b h c k`."""


class Saved(NamedTuple):
    """q, k and the log decays, `l b h c k`, their sums from the middle of the chunk to each step, and the runs."""

    q: jax.Array
    k: jax.Array
    log_decay: jax.Array
    decay: jax.Array
    runs: jax.Array | None


def products(
    q: jax.Array, k: jax.Array, log_decay: jax.Array, form: Form, *, runs: jax.Array | None = None
) -> Products:
    """See `chunk.by_halves`; `runs` as in `chunk.Chunk`, `l b 1 c 1`, keep the gradients of documents apart."""
    del form  # The types are what they should be.
    return _products(q, k, log_decay, runs)


@jax.custom_vjp
def _products(q: jax.Array, k: jax.Array, log_decay: jax.Array, runs: jax.Array | None) -> Products:
    return _save(q, k, log_decay, runs)[0]


def _save(q: jax.Array, k: jax.Array, log_decay: jax.Array, runs: jax.Array | None) -> tuple[Products, Saved]:
    middle = (log_decay.shape[3] - 1) // 2
    total = since_first(log_decay)
    saved = Saved(q, k, log_decay, total - total[:, :, :, middle : middle + 1], runs)
    return by_decay(_moderate, _at_once, _any, (saved,), rows=1), saved


def _pull(saved: Saved, gradients: Products) -> tuple[jax.Array | None, ...]:
    def moderate(saved: Saved, gradients: Products) -> jax.Array:
        del gradients
        return _moderate(saved)

    return (*by_decay(moderate, _pull_at_once, _pull_any, (saved, gradients), rows=1), None)


_products.defvjp(_save, _pull)


def _moderate(saved: Saved) -> jax.Array:
    """Sums of decays are largest at the ends."""
    first, last = saved.decay[:, :, :, 0], saved.decay[:, :, :, -1]
    return jnp.max(jnp.maximum(first, -last), initial=0) <= MODERATE


def _at_once(saved: Saved) -> Products:
    """One product around the middle of the chunk."""
    q, k, log_decay, decay, _ = saved
    reach, keys = jnp.exp(decay), (k * jnp.exp(-decay)).swapaxes(3, 4)
    first, last = decay[:, :, :, :1], decay[:, :, :, -1:]
    return (q * reach) @ keys, (k * reach) @ keys, decay - first + log_decay[:, :, :, :1], last - decay


def _pull_at_once(saved: Saved, gradients: Products) -> tuple[jax.Array, ...]:
    """The decay of step t is in each product of a step at or after t and a key before t, so that its
    gradient is the sum, over the steps from t on, of reads times their gradients minus keys times theirs.
    """
    q, k, _, decay, runs = saved
    by_q, by_k, dsince, duntil = gradients
    reach, stays = jnp.exp(decay), jnp.exp(-decay)
    keys = k * stays
    dq, dread = reach * (by_q @ keys), reach * (by_k @ keys)
    by_q, by_k = (jax.lax.optimization_barrier(array.swapaxes(3, 4)) for array in (by_q, by_k))
    dkeys = stays * (by_q @ (q * reach) + by_k @ (k * reach))
    at = q * dq + k * (dread - dkeys) + dsince
    return dq, dread + dkeys, _sums(at, duntil, runs)


def _sums(from_here: jax.Array, before: jax.Array, runs: jax.Array | None) -> jax.Array:
    """For every step, the sum of the first array from it on and of the second before it, `l b h c k`.

    Within runs, so that not even rounding errors pass between documents: over a whole document the first is zero.
    """
    if runs is None:
        return from_here + until(from_here) + since(before) - before
    here = (runs == runs.swapaxes(3, 4)).astype(from_here.dtype)
    later, earlier = jnp.triu(here), jnp.tril(here, -1)
    return jnp.matmul(later, from_here, precision=EXACT) + jnp.matmul(earlier, before, precision=EXACT)


def _any(saved: Saved) -> Products:
    """For any decays."""
    return _by_blocks(*saved[:3])


def _pull_any(saved: Saved, gradients: Products) -> tuple[jax.Array, ...]:
    return jax.vjp(_by_blocks, *saved[:3])[1](gradients)


def _by_blocks(q: jax.Array, k: jax.Array, log_decay: jax.Array) -> Products:
    (by_q,), (by_k,) = reads_by_blocks((q, k), (), (k,), log_decay)
    return by_q, by_k, since(log_decay), until(log_decay)
