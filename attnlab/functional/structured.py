"""Linear time-invariant systems of every channel: their kernels, and their recurrence in chunks.

A system of n real states has a transition M, inputs w and outputs r a channel: `h_t = M h_{t-1} + w x_t`,
`y_t = r . h_t`. Complex modes are real and imaginary parts, those of one of each conjugate pair.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Complex, Float, Inexact, Int

from attnlab.functional import cores
from attnlab.functional.recurrences import document_starts
from attnlab.typing import Segments

CHUNK = 64
"""Steps of a chunk: where each state is written once a chunk, no more numbers are written than a row of inputs has."""

TURN = 201 / 32
"""The first eight bits of 2 pi."""


class Chunk(NamedTuple):
    """A system over `c` steps.

    Attributes:
      kernel: what an input gives to the output j steps later, `c d`.
      write: what input j gives to the state after the chunk, `c d n`.
      read: what the state before the chunk gives to output j, `c d n`.
      pass_on: from what every chunk writes, `b l d n`, whether a chunk begins in the document that it ends in,
        `b l` or `None`, and the state before the first: the state before every chunk, and after the last.
    """

    kernel: Float[Array, 'c d']
    write: Float[Array, 'c d n']
    read: Float[Array, 'c d n']
    pass_on: Callable[[Array, Array | None, Array], tuple[Array, Array]]


def parts(x: Inexact[Array, '*b n']) -> Float[Array, '*b m']:
    """Real and imaginary parts of complex numbers, one after the other; real numbers as they are."""
    return jnp.concatenate([x.real, x.imag], axis=-1) if jnp.iscomplexobj(x) else x


def from_parts(x: Float[Array, '*b m']) -> Complex[Array, '*b n']:
    """Complex numbers from their real and imaginary parts."""
    return jax.lax.complex(*jnp.split(x, 2, axis=-1))


def conjugate_parts(x: Inexact[Array, '*b n']) -> Float[Array, '*b m']:
    """What multiplies `parts` to give twice the real part of a product: `2 Re(x . y)`."""
    return 2 * parts(jnp.conj(x))


def powers(log_transition: Inexact[Array, 'd n'], exponents: Int[Array, ' c']) -> Inexact[Array, 'c d n']:
    """Powers, of at most 2^14, of complex or real transitions.

    An angle of thousands of turns would lose its fraction to rounding. Of that of one step the turns to eleven bits are
    taken, whose multiples are exact, as is their product with the first digits of a turn; what is left is small.
    """
    count = exponents.astype(log_transition.real.dtype)[:, None, None]
    if not jnp.iscomplexobj(log_transition):
        return jnp.exp(count * log_transition[None])
    coarse = jax.lax.stop_gradient(jnp.round(log_transition.imag / (2 * math.pi) * 2**11) / 2**11)
    fine = (log_transition.imag - coarse * TURN) - coarse * (2 * math.pi - TURN)
    whole = jnp.remainder(count * (coarse - jnp.round(coarse))[None], 1)
    angle = 2 * math.pi * whole + count * fine[None]
    return jnp.exp(jax.lax.complex(count * log_transition.real[None], angle))


def diagonal_kernel(
    log_transition: Inexact[Array, 'd n'], gains: Inexact[Array, 'd n'], length: int
) -> Float[Array, 't d']:
    """`K_t = 2 Re sum_n gains_n exp(t log_transition_n)`: a Vandermonde product, by powers of two lengths.

    Never more than about `n d sqrt(t)` numbers are held. Gu et al. 2022, https://arxiv.org/abs/2206.11893.
    """
    inner, outer = _two_lengths(length)
    far = conjugate_parts(gains[None] * powers(log_transition, inner * jnp.arange(outer)))
    near = parts(powers(log_transition, jnp.arange(inner)))
    kernel = jnp.einsum('idn,jdn->ijd', far, near, precision='highest')
    return kernel.reshape(outer * inner, -1)[:length]


def diagonal_chunk(
    log_transition: Inexact[Array, 'd n'], inputs: Inexact[Array, 'd n'], outputs: Inexact[Array, 'd n'], steps: int
) -> Chunk:
    """A system whose transition is diagonal, its logarithm given."""
    every = powers(log_transition, jnp.arange(steps + 1))
    read = outputs[None] * every

    def pass_on(written: Array, kept: Array | None, state: Array) -> tuple[Array, Array]:
        rows, count, *channels = written.shape
        written, state = (from_parts(x) if jnp.iscomplexobj(every) else x for x in (written, state))
        if count == 1:
            # In decoding, a transition near one would lose digits of slow modes over thousands of steps.
            past = state + jnp.expm1(steps * log_transition)[None] * state
            past = past if kept is None else jnp.where(kept[..., None], past, jnp.zeros_like(past))
            return parts(state)[:, None], parts(past + written[:, 0])
        decay = every[-1].reshape(1, 1, -1)
        if kept is not None:
            decay = jnp.where(kept[..., None], decay, jnp.zeros_like(decay))
        first = state.reshape(rows, -1)
        after, last = cores.linear_scan(written.reshape(rows, count, -1), decay, state=first)
        before = jnp.concatenate([first[:, None], after[:, :-1]], axis=1).reshape(rows, count, channels[0], -1)
        return parts(before), parts(last.reshape(rows, channels[0], -1))

    return Chunk(
        kernel=jnp.einsum('cdn,dn->cd', conjugate_parts(read[:-1]), parts(inputs), precision='highest'),
        write=parts(every[:-1][::-1] * inputs[None]),
        read=conjugate_parts(read[1:]),
        pass_on=pass_on,
    )


def dense_chunk(
    change: Float[Array, 'd n n'], inputs: Float[Array, 'd n'], outputs: Float[Array, 'd n'], steps: int
) -> Chunk:
    """A system whose transition is a matrix, given as what it changes, `M - I`: by products with its powers."""
    product = functools.partial(jnp.einsum, precision='highest')
    write, _ = _orbit(change, inputs, steps)
    ahead, _ = _orbit(jnp.swapaxes(change, 1, 2), outputs, steps + 1)
    whole = change_over(change, steps)

    def pass_on(written: Array, kept: Array | None, state: Array) -> tuple[Array, Array]:
        kept = jnp.ones(written.shape[:2], bool) if kept is None else kept

        def chunk(state: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
            written, kept = inputs
            past = state + product('dnm,bdm->bdn', whole, state)
            return jnp.where(kept[:, None, None], past, jnp.zeros_like(state)) + written, state

        last, before = jax.lax.scan(chunk, state, (written.swapaxes(0, 1), kept.T))
        return before.swapaxes(0, 1), last

    return Chunk(
        kernel=product('cdn,dn->cd', ahead[:-1], inputs),
        write=write[::-1],
        read=ahead[1:],
        pass_on=pass_on,
    )


def dense_kernel(
    change: Float[Array, 'd n n'], inputs: Float[Array, 'd n'], outputs: Float[Array, 'd n'], length: int
) -> Float[Array, 't d']:
    """`K_t = outputs . M^t inputs` of a transition that is a matrix, given as `M - I`, by powers of two lengths.

    Never more than about `n d (n + sqrt(t))` numbers are held at once. Errors of rounding stay small where M is a
    contraction.
    """
    inner, outer = _two_lengths(length)
    near, stride = _orbit(change, inputs, inner)
    far, _ = _orbit(jnp.swapaxes(stride, 1, 2), outputs, outer)
    kernel = jnp.einsum('idn,jdn->ijd', far, near, precision='highest')
    return kernel.reshape(outer * inner, -1)[:length]


def _two_lengths(length: int) -> tuple[int, int]:
    """A power of two near the square root of `length`, and how many times it fits, rounded up."""
    inner = 1 << (max(1, length - 1).bit_length() + 1) // 2
    return inner, -(-length // inner)


def _orbit(
    change: Float[Array, 'd n n'], vectors: Float[Array, 'd n'], count: int
) -> tuple[Float[Array, 'c d n'], Float[Array, 'd n n']]:
    """`M^j v` for j below `count`, and `M^c - I` for the least power of two c that is not below `count`."""
    found = vectors[None]
    while found.shape[0] < count:
        moved = found + jnp.einsum('dnm,cdm->cdn', change, found, precision='highest')
        found, change = jnp.concatenate([found, moved]), _joined(change, change)
    return found[:count], change


def change_over(change: Float[Array, 'd n n'], steps: int) -> Float[Array, 'd n n']:
    """`M^steps - I` of `M - I`, for at least 1 step, by squaring."""
    found = None
    while steps:
        if steps % 2:
            found = change if found is None else _joined(found, change)
        steps //= 2
        if steps:
            change = _joined(change, change)
    assert found is not None
    return found


def _joined(one: Float[Array, 'd n n'], other: Float[Array, 'd n n']) -> Float[Array, 'd n n']:
    """`(I + A) (I + B) - I`. Slow modes, whose transitions are nearly one, keep their digits in the difference."""
    return one + other + jnp.matmul(one, other, precision='highest')


def in_chunks(
    chunk_of: Callable[[int], Chunk],
    x: Float[Array, 'b t d'],
    segments: Segments | None,
    state: Float[Array, 'b d n'],
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, 'b t d'], Float[Array, 'b d n']]:
    """Runs a system from `state`, which is of the document of the first token; returns outputs and the state after.

    `chunk_of` gives the system over a number of steps: `CHUNK`, and what is left at the end of a row.
    """
    t = x.shape[1]
    if t == 0:
        return x, state
    whole = t - t % CHUNK
    runs = None
    if segments is not None:
        runs = jnp.cumsum(document_starts(segments), axis=1, dtype=jnp.int32)
    outputs = []
    for start, stop in ((0, whole), (whole, t)):
        if stop > start:
            steps = min(CHUNK, stop - start)
            inside = None if runs is None else runs[:, start:stop]
            before = None if runs is None else runs[:, max(0, start - 1)]
            piece, state = _chunks(chunk_of(steps), x[:, start:stop], inside, before, state, implementation)
            outputs.append(piece)
    return jnp.concatenate(outputs, axis=1), state


def _chunks(
    chunk: Chunk,
    x: Float[Array, 'b t d'],
    runs: Int[Array, 'b t'] | None,
    before: Int[Array, ' b'] | None,
    state: Float[Array, 'b d n'],
    implementation: str | None,
) -> tuple[Float[Array, 'b t d'], Float[Array, 'b d n']]:
    """Chunks of one length; `before` is the run of the token before the first."""
    rows, _, channels = x.shape
    steps = chunk.kernel.shape[0]
    blocks = x.reshape(rows, -1, steps, channels)
    written, kept, read = blocks, None, None
    if runs is not None and before is not None:
        inside = runs.reshape(rows, -1, steps)
        last = inside[:, :, -1]
        earlier = jnp.concatenate([before[:, None], last[:, :-1]], axis=1)
        written = jnp.where((inside == last[..., None])[..., None], blocks, jnp.zeros_like(blocks))
        kept, read = last == earlier, (inside == earlier[..., None])[..., None]
    states, state = chunk.pass_on(jnp.einsum('blcd,cdn->bldn', written, chunk.write, precision='highest'), kept, state)
    past = jnp.einsum('bldn,cdn->blcd', states, chunk.read, precision='highest')
    if read is not None:
        past = jnp.where(read, past, jnp.zeros_like(past))
    own = cores.long_conv(
        blocks.reshape(-1, steps, channels),
        chunk.kernel,
        segments=None if runs is None else runs.reshape(-1, steps),
        implementation=implementation,
    )
    return own.reshape(x.shape) + past.reshape(x.shape), state


class Bilinear(NamedTuple):
    """A bilinear discretisation with step 1 of `x' = (Lambda - P P^*) x + B u`, one of each conjugate pair.

    `M = (I - A / 2)^{-1} (I + A / 2)`, in real and imaginary parts, where `A` is a rotation and a scaling of every mode
    less `2 sum p p^T`, p the parts of a row of P.
    """

    eigenvalues: Complex[Array, 'd n']
    low_rank: Float[Array, 'r d m']

    @classmethod
    def of(cls, eigenvalues: Complex[Array, 'd n'], low_rank: Complex[Array, 'r d n']) -> 'Bilinear':
        """The discretisation of a system in units of its step."""
        return cls(eigenvalues, parts(low_rank))

    def applied(self, h: Float[Array, '*b d m']) -> Float[Array, '*b d m']:
        """`A h`."""
        moved = parts(_like(self.eigenvalues, h) * from_parts(h))
        for row in self.low_rank:
            p = _like(row, h)
            moved = moved - 2 * jnp.sum(p * h, axis=-1, keepdims=True) * p
        return moved

    def solve(self, h: Float[Array, '*b d m']) -> Float[Array, '*b d m']:
        """`(I - A / 2)^{-1} h`: one row of P after the other (Sherman and Morrison 1950)."""

        def normal(h: Array) -> Array:
            return parts(from_parts(h) / (1 - _like(self.eigenvalues, h) / 2))

        found = normal(h)
        directions: list[Array] = []
        for i, p in enumerate(self.low_rank):
            direction = normal(p)
            for earlier in range(i):
                direction = self._less(direction, earlier, directions[earlier])
            directions.append(direction)
            found = self._less(found, i, direction)
        return found

    def _less(self, h: Array, i: int, direction: Array) -> Array:
        p = self.low_rank[i]
        pivot = 1 + jnp.sum(p * direction, axis=-1, keepdims=True)
        return h - jnp.sum(_like(p, h) * h, axis=-1, keepdims=True) * _like(direction / pivot, h)

    def change(self, dtype: DTypeLike) -> Float[Array, 'd m m']:
        """`M - I = (I - A / 2)^{-1} A`, dense: the images of unit vectors."""
        unit = jnp.eye(self.low_rank.shape[-1], dtype=dtype)[:, None]
        images = self.solve(self.applied(jnp.broadcast_to(unit, (unit.shape[0], *self.low_rank.shape[1:]))))
        return jnp.moveaxis(images, 0, -1)


def _like(x: Array, h: Array) -> Array:
    """`x`, one for every channel, with leading dimensions as `h` has them."""
    return x.reshape((1,) * (h.ndim - 2) + x.shape)
