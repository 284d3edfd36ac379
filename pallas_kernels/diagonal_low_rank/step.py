"""The step of one chunk of `diagonal_low_rank` in a kernel; see `chunk`. States are transposed, `v k`."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.diagonal_low_rank.chunk import Chunk, weights
from pallas_kernels.matrix_state.halves import Summed, earlier_by_halves, with_own
from pallas_kernels.matrix_state.inverse import inverse_again
from pallas_kernels.matrix_state.places import steps_after, steps_before
from pallas_kernels.matrix_state.products import Form, added_up, multiply, multiply_with_rest
from pallas_kernels.matrix_state.vector import Found, Parts


def step(
    chunk: Chunk, v: jax.Array, state: jax.Array, form: Form, solved: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns what one chunk reads, `c v`, the state after it, `v k` as that before, and the computed inverse.

    `solved` is that inverse, if it was kept.
    """
    does = weights(chunk, functools.partial(found, form))
    solved = inverse_again(-does.earlier[0], solved, form)
    written = v if len(chunk.keys) == 1 else multiply(does.earlier[1], v, 'nn', form)
    values = multiply_with_rest(solved, written + multiply(does.a, state, 'nt', form), 'nn', form)
    o = multiply(does.q, state, 'nt', form) + multiply(does.among[0], values, 'nn', form)
    after = does.factor * state + multiply(values, does.writes[0], 'tn', form)
    if len(chunk.keys) == 2:
        o += multiply(does.among[1], v, 'nn', form)
        after += multiply(v, does.writes[1], 'tn', form)
    return o, after, solved


def found(form: Form, chunk: Chunk) -> Found:
    """What steps read and write, with log decays summed over exactly the steps between, as in `delta_rule`.

    No exponent is above 0. Sums run over the starts of documents too, where masks hide what comes of them.
    """
    q, a, keys, log_decay, _ = chunk
    if log_decay is None:
        return Found(_plain(q, a, keys, form), (q, a), keys)
    if log_decay.shape[-1] == 1:
        products, sums = _scalar(q, a, keys, log_decay, form)
    else:
        (by_q, by_a), sums = earlier_by_halves((q,), (a,), keys, log_decay, form)
        by_q = [with_own(weight, q, key) for weight, key in zip(by_q, keys, strict=True)]
        products = tuple(by_q), tuple(by_a)
    now, before, later = (jnp.exp(decay) for decay in sums)
    return Found(products, (q * now, a * before), tuple(key * later for key in keys))


def _plain(q: jax.Array, a: jax.Array, keys: Parts, form: Form) -> tuple[Parts, ...]:
    return tuple(tuple(multiply(x, key, 'nt', form) for key in keys) for x in (q, a))


def _scalar(
    q: jax.Array, a: jax.Array, keys: Parts, log_decay: jax.Array, form: Form
) -> tuple[tuple[Parts, ...], Summed]:
    row = log_decay.swapaxes(-1, -2)
    sums = Summed(
        *(jnp.sum(jnp.where(which, row, 0), axis=-1, keepdims=True)
          for which in (~steps_after(q), steps_before(q), steps_after(q)))
    )  # fmt: skip
    # Over the steps after j up to i, or up to that before i: a sum for every pair, so that small sums stay exact.
    later = jnp.where(steps_before(q), log_decay, 0)

    def between(which: jax.Array) -> jax.Array:
        return jnp.exp(added_up(jnp.broadcast_to(jnp.where(which, 1.0, 0.0), later.shape), later, form))

    by_q, by_a = _plain(q, a, keys, form)
    reads, reads_before = between(~steps_after(q)), between(steps_before(q))
    return (tuple(weight * reads for weight in by_q), tuple(weight * reads_before for weight in by_a)), sums
