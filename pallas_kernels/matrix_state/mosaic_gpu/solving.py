"""Both passes over the chunks of a core that are solved by a triangular inverse, on Hopper GPUs.

What a chunk does is computed for all chunks at once, see `Solved`. `sweep` then runs over the chunks of a sequence in
order and writes the state at each and the values that its steps write. For the gradients it runs from the last chunk to
the first, and those of what chunks do are products of what both sweeps found, 16-bit as these.
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp

from pallas_kernels.matrix_state import decays
from pallas_kernels.matrix_state.mosaic_gpu.sweep import Sweep, sweep
from pallas_kernels.matrix_state.mosaic_gpu.tiles import TILE, fill
from pallas_kernels.target import Target


class Documents(NamedTuple):
    """Where chunks forget the past.

    Attributes:
      runs: how often, up to each step, `b 1 l c 1`; `None`: never.
      rows: `b h l 8 c`, see there; with the decays, where these are one for all key channels.
    """

    runs: jax.Array | None
    rows: jax.Array


class More(NamedTuple):
    """What is written besides the values that are solved for, 16-bit.

    Attributes:
      keys: under which it is in the state after the chunk, `b h l c k`.
      values: `b h l c v`.
      among: what a step reads of it for its query, `b h l c c`.
    """

    keys: jax.Array
    values: jax.Array
    among: jax.Array


class Solved(NamedTuple):
    """What chunks do after applying their inverse, 16-bit except for the factor.

    Attributes:
      among: weight of a step's write in a step's read for its query, `b h l c c`.
      q: queries that read the state before the chunk, `b h l c k`.
      writes: the keys under which values are in the state after the chunk, `b h l c k`.
      factor: decay of the state before the chunk over the chunk, `b h l 1 k` or `b h l 1 1`, float32.
      written: the values that steps would write to a zero state, `b h l c v`.
      reads: keys whose reads of the state before are added to these, `b h l c k`.
      more: what else is written; or `None`.
    """

    among: jax.Array
    q: jax.Array
    writes: jax.Array
    factor: jax.Array
    written: jax.Array
    reads: jax.Array
    more: More | None = None


def forward(here: Target, solved: Solved, state: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The state before every chunk, `b h l k v`, the values that steps write, `b h t v`, and the last state."""
    more = () if solved.more is None else (join(solved.more.keys), join(solved.more.values))
    given = Sweep(reads=join(solved.reads), adds=join(solved.writes), values=join(solved.written), more=more)
    return sweep(here, given, solved.factor, state, backward=False)


def backward(
    here: Target, solved: Solved, states: jax.Array, values: jax.Array, do: jax.Array, dfinal: jax.Array
) -> tuple[Solved, jax.Array]:
    """The gradients of what chunks do, and of the state before the first, from those of outputs and of the last state.

    `do` is `b h l c v`, 16-bit; `states` and `values` are those of `forward`.
    """
    dtype = do.dtype

    def product(letters: str, left: jax.Array, right: jax.Array) -> jax.Array:
        return jnp.einsum(letters, left, right, preferred_element_type=dtype)

    dstates, dvalues, dstate = sweep(
        here,
        Sweep(
            reads=join(solved.writes),
            adds=join(solved.reads),
            values=join(product('bhlts,bhltv->bhlsv', solved.among, do)),
            more=(join(solved.q), join(do)),
        ),
        solved.factor,
        dfinal,
        backward=True,
    )
    values, dvalues = cut(values), cut(dvalues)
    held = jnp.einsum('bhlkv,bhlkv->bhlk', states, dstates, preferred_element_type=jnp.float32)[:, :, :, None]
    more = solved.more
    if more is not None:
        read = product('bhlts,bhltv->bhlsv', more.among, do)
        more = More(
            keys=product('bhlsv,bhlkv->bhlsk', more.values, dstates),
            values=read + product('bhlsk,bhlkv->bhlsv', more.keys, dstates),
            among=product('bhltv,bhlsv->bhlts', do, more.values),
        )
    found = Solved(
        among=product('bhltv,bhlsv->bhlts', do, values),
        q=product('bhltv,bhlkv->bhltk', do, states),
        writes=product('bhlsv,bhlkv->bhlsk', values, dstates),
        factor=held if solved.factor.shape == held.shape else jnp.sum(held, axis=-1, keepdims=True),
        written=dvalues,
        reads=product('bhlsv,bhlkv->bhlsk', dvalues, states),
        more=more,
    )
    return found, dstate


def documents(log_decay: jax.Array | None, starts: jax.Array | None, sizes: tuple[int, int, int]) -> Documents:
    """From `b h t k` and `b t`, of a call of the sizes `b h t`."""
    b, h, t = sizes
    shared = log_decay is not None and log_decay.shape[3] == 1
    found = decays.rows(log_decay if shared else None, starts, pl.cdiv(t, TILE) * TILE, TILE)
    return Documents(
        runs=None if starts is None else jnp.cumsum(numbers(starts[:, None, :, None]), axis=3, dtype=jnp.int32),
        rows=jnp.broadcast_to(found, (b, h, *found.shape[2:])),
    )


def decays_of(log_decay: jax.Array | None, sizes: tuple[int, int, int]) -> jax.Array | None:
    """Log decays, `b h t k`, in whole chunks: `b h l c 1`, or `b h t k` where key channels have their own."""
    if log_decay is None:
        return None
    spread = jnp.broadcast_to(log_decay, (*sizes, log_decay.shape[3]))
    return numbers(spread) if log_decay.shape[3] == 1 else fill(spread)


def decay_gradient(gradient: jax.Array | None, t: int, channels: int) -> jax.Array | None:
    """That of `decays_of`, as `b h t k`, for so many key channels."""
    if gradient is None or gradient.ndim == 4:
        return None if gradient is None else gradient[:, :, :t, :channels]
    return join(gradient)[:, :, :t]


def numbers(array: jax.Array) -> jax.Array:
    """`b h t n` in whole chunks, `b h l c n`."""
    return cut(jnp.pad(array, ((0, 0), (0, 0), (0, -array.shape[2] % TILE), (0, 0))))


def of_heads(array: jax.Array, h: int) -> jax.Array:
    """What heads may share, for all of them, `b h l c k`, float32."""
    return cut(jnp.repeat(array.astype(jnp.float32), h // array.shape[1], axis=1))


def cut(array: jax.Array) -> jax.Array:
    """`b h t k` as `b h l c k`."""
    b, h, t, k = array.shape
    return array.reshape(b, h, t // TILE, TILE, k)


def join(array: Any) -> jax.Array:
    """`b h l c k` as `b h t k`."""
    b, h, l, c, k = array.shape
    return array.reshape(b, h, l * c, k)
