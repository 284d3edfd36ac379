"""The computation of one chunk in the Pallas kernels of `linear_attention`, on values, for every kind of decay."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.matrix_state.decays import RUN


class Chunk(NamedTuple):
    """The inputs of one chunk: q, k `c k` and v `c v`, and its decays.

    Attributes:
      rows: `8 c`, see `rows`.
      columns: the same, transposed.
      runs: of these the number of document starts up to each step, `c 1`; or `None`.
      log_decay: `c k`, or `None`: the decays are those of the rows.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    rows: jax.Array
    columns: jax.Array
    runs: jax.Array | None
    log_decay: jax.Array | None


class Decays(NamedTuple):
    """The decays from the state before a chunk to its steps, from these to the state after it, and between the states.

    `c 1` and `1 1`, or `c k` and `1 k`; `since` are then the log decays up to each step, within runs.
    """

    reach: jax.Array
    write: jax.Array
    factor: jax.Array
    since: jax.Array | None = None


class Pulled(NamedTuple):
    """The gradients from the scores of a chunk: dq and dk, `c k`, and of the log decays as rows `1 c`, or as `c k`."""

    dq: jax.Array
    dk: jax.Array
    dlog_decay: jax.Array


def dot(left: jax.Array, right: jax.Array, contracted: str = 'nn') -> jax.Array:
    """Products in float32, of a matrix or (t) its transpose with another."""
    axes = {'nn': (1, 0), 'nt': (1, 1), 'tn': (0, 0)}[contracted]
    precision = jax.lax.Precision.HIGHEST if right.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(
        left.astype(right.dtype),
        right,
        (((axes[0],), (axes[1],)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def iotas(shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """The indices along both axes of a matrix."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, 0), jax.lax.broadcasted_iota(jnp.int32, shape, 1)


def visible(chunk: Chunk) -> jax.Array:
    """Which steps, along rows, a step reads."""
    c = chunk.rows.shape[1]
    at, read = iotas((c, c))
    return of_run(chunk, at >= read)


def of_run(chunk: Chunk, pairs: jax.Array) -> jax.Array:
    """Those of pairs of steps, `c c`, that are in the same document."""
    return pairs if chunk.runs is None else pairs & (chunk.runs == chunk.rows[RUN : RUN + 1])
