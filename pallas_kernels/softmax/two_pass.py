"""`softmax` in two readings of a row instead of three: exponentials as mantissas and powers of two do not overflow.

    exp(x) = p 2^n,  n = round(x / ln 2),  p = exp(x - n ln 2) from 0.7 to 1.42

The first reading adds up terms as a mantissa and a power of two, for which no largest score need be known; the second
computes mantissas and powers again (Dukhan and Ablavatski, 2020, arXiv 2001.04438). It runs where it is named: in XLA
on a CPU the sum of pairs is no vector operation, and a row in cache is read for nothing, so that it takes five times
the processor time of the definition, for half of its traffic.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import precision
from pallas_kernels.softmax import vjp, xla

LOG2 = {4: (0.693359375, -2.12194440e-4), 8: (6.93147180369123816490e-01, 1.90821492927058770002e-10)}
"""ln 2 by bytes of a number, in two parts: products of the first with whole numbers are exact, to 2^15 and 2^20.

Beyond, for scores above 22,000 in float32, the error of a weight grows to that of the score itself.
"""

NOTHING = -(2.0**23)
"""The power of two of entries that do not count, whose mantissa is 0."""


class Terms(NamedTuple):
    """Numbers `mantissa 2^power`, the power a whole number in floating point."""

    mantissa: jax.Array
    power: jax.Array


def forward(x: jax.Array, where: jax.Array | None) -> jax.Array:
    """Returns the softmax over the last axis; see `reference.softmax`."""
    scores = x.astype(precision.accumulator(x))
    terms = _terms(scores, where)
    zero, nothing = (jnp.asarray(number, scores.dtype) for number in (0, NOTHING))
    total, pivot = jax.lax.reduce(tuple(terms), (zero, nothing), _add, (x.ndim - 1,))
    # The barrier keeps the compiler from storing the terms, which take twice the memory of the scores.
    terms = _terms(jax.lax.optimization_barrier(scores), where)
    factor = 1 / jnp.where(total == 0, 1, total)
    weights = terms.mantissa * factor[..., None] * _power_of_two(terms.power - pivot[..., None])
    return weights.astype(x.dtype)


def _terms(scores: jax.Array, where: jax.Array | None) -> Terms:
    """The exponentials of scores; what is not selected, and minus infinity, is 0."""
    counted = scores != -math.inf
    if where is not None:
        counted &= where
    scores = jnp.where(counted, scores, 0)
    high, low = LOG2[scores.dtype.itemsize]
    power = jnp.round(scores * (1 / math.log(2)))
    mantissa = jnp.exp((scores - power * high) - power * low)
    return Terms(jnp.where(counted, mantissa, 0), jnp.where(counted, power, NOTHING))


def _add(one: tuple[jax.Array, jax.Array], other: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The sum of two terms, to the larger of their powers."""
    (p, m), (q, n) = one, other
    power = jnp.maximum(m, n)
    return p * _power_of_two(m - power) + q * _power_of_two(n - power), power


def _power_of_two(power: jax.Array) -> jax.Array:
    """2 to the whole numbers, at most 0, by their bits; 0 below the smallest normal number."""
    kind = jnp.finfo(power.dtype)
    whole = {4: jnp.int32, 8: jnp.int64}[power.dtype.itemsize]
    bits = jnp.maximum(power - (kind.minexp - 1), 0).astype(whole) << kind.nmant
    return jax.lax.bitcast_convert_type(bits, power.dtype)


softmax = vjp.differentiable(forward, xla.backward)
