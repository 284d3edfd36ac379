"""Named inputs of the cores, shared by tests and benchmarks: from a name to arrays, the same ones every time."""

import dataclasses
import math
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.attention.maps import Softmax

Runs = tuple[tuple[int, int], ...]
"""A row as (segment, length) of its documents in order; segment 0 is padding."""


class Call(NamedTuple):
    """The arguments of a core by name: `arrays` have gradients, `options` have none."""

    arrays: dict[str, jax.Array]
    options: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """A call of `attention`; `s`, `g` and `v` are `t`, `h` and `k` where `None`.

    Attributes:
      added: those of 'slopes' and 'log_forget' that are given.
      bias: letters of its shape, such as '1 h 1 s'; a fifth of it is minus infinity, and its first query sees nothing.
    """

    b: int
    t: int
    h: int
    k: int
    s: int | None = None
    g: int | None = None
    v: int | None = None
    causal: bool = True
    window: int | None = None
    sinks: int = 0
    documents: tuple[Runs, ...] | None = None
    key_documents: tuple[Runs, ...] | None = None
    added: tuple[str, ...] = ()
    bias: str | None = None
    soft_cap: float | None = None

    def sizes(self) -> dict[str, int]:
        """The size of every dimension letter."""
        s, g, v = (self.s or self.t), (self.g or self.h), (self.v or self.k)
        return {'b': self.b, 't': self.t, 's': s, 'h': self.h, 'g': g, 'k': self.k, 'v': v}


@dataclasses.dataclass(frozen=True)
class LinearScanCase:
    """A call of `linear_scan` with an incoming state.

    Attributes:
      decay: letters of its shape, such as 'd' or '1 t 1'.
      complex: those of 'x', 'decay' and 'state' that are complex.
    """

    b: int
    t: int
    d: int
    decay: str = 'b t d'
    complex: tuple[str, ...] = ()
    documents: tuple[Runs, ...] | None = None
    reverse: bool = False


@dataclasses.dataclass(frozen=True)
class SelectiveScanCase:
    """A call of `selective_scan` with an incoming state and a skip."""

    b: int
    t: int
    d: int
    n: int
    documents: tuple[Runs, ...] | None = None


@dataclasses.dataclass(frozen=True)
class LinearAttentionCase:
    """A call of `linear_attention` with an incoming state.

    Attributes:
      heads: those of q, of k and of v.
      decay: letters of the shape of the log decays, such as 'h' or 'b t h k'; `None`: no decay.
      strength: the log decays lie between minus twice this and 0.
      sudden: a tenth of the log decays are -50, and the others a thousandth of what they were.
    """

    b: int
    t: int
    k: int
    v: int
    heads: tuple[int, int, int] = (2, 2, 2)
    decay: str | None = None
    strength: float = 0.2
    sudden: bool = False
    documents: tuple[Runs, ...] | None = None


@dataclasses.dataclass(frozen=True)
class CrossEntropyCase:
    """A call of `cross_entropy` with `n` tokens of width `d` and `o` classes."""

    n: int
    d: int
    o: int
    z_loss: float = 0.0
    soft_cap: float | None = None


PACKED_37: tuple[Runs, ...] = (((1, 16), (2, 1), (3, 15), (0, 5)), ((1, 3), (2, 5), (3, 24), (4, 5)))
PACKED_67: tuple[Runs, ...] = (((1, 32), (2, 1), (3, 31), (0, 3)), ((1, 5), (2, 40), (3, 22)))

ATTENTION = {
    'two': AttentionCase(b=1, t=2, h=2, k=16),
    'one query': AttentionCase(b=2, t=1, s=37, h=4, g=2, k=16),
    'prime': AttentionCase(b=2, t=37, h=4, g=2, k=16, v=24),
    'wide': AttentionCase(b=1, t=24, h=2, k=128, v=64, causal=False),
    'narrow values': AttentionCase(b=1, t=19, h=6, g=2, k=64, v=16),
    'more keys': AttentionCase(b=1, t=11, s=29, h=2, k=16),
    'more queries': AttentionCase(b=1, t=29, s=11, h=2, k=16),
    'window': AttentionCase(b=1, t=37, h=2, k=16, window=5),
    'sinks': AttentionCase(b=1, t=37, h=2, k=16, window=6, sinks=3),
    'two-sided window': AttentionCase(b=1, t=31, s=37, h=2, k=16, causal=False, window=4),
    'packed': AttentionCase(b=2, t=37, h=2, k=16, documents=PACKED_37),
    'two packings': AttentionCase(
        b=1,
        t=12,
        s=21,
        h=2,
        k=16,
        causal=False,
        documents=(((1, 8), (2, 3), (4, 1)),),
        key_documents=(((2, 8), (1, 13)),),
    ),
    'bias': AttentionCase(b=2, t=23, h=4, g=2, k=16, bias='b h t s'),
    'bias of keys': AttentionCase(b=2, t=23, h=4, g=2, k=16, causal=False, bias='1 h 1 s'),
    'slopes': AttentionCase(b=1, t=23, s=29, h=4, g=2, k=16, causal=False, added=('slopes',)),
    'forgetting': AttentionCase(b=2, t=37, h=4, g=2, k=16, added=('log_forget',)),
    'soft cap': AttentionCase(b=1, t=23, h=2, k=16, soft_cap=1.5),
    'everything': AttentionCase(
        b=2,
        t=37,
        h=4,
        g=2,
        k=32,
        v=16,
        window=9,
        sinks=2,
        documents=PACKED_37,
        added=('slopes', 'log_forget'),
        bias='b 1 t s',
        soft_cap=2.0,
    ),
    'long': AttentionCase(b=1, t=1100, h=2, g=1, k=16, v=8, window=300, sinks=4),
}

LINEAR_SCAN = {
    'one': LinearScanCase(b=2, t=1, d=3),
    'two': LinearScanCase(b=1, t=2, d=5),
    'whole tiles': LinearScanCase(b=2, t=16, d=8),
    'prime': LinearScanCase(b=2, t=37, d=5),
    'constant': LinearScanCase(b=2, t=37, d=5, decay='d'),
    'constant in whole tiles': LinearScanCase(b=2, t=16, d=5, decay='d'),
    'one decay a step': LinearScanCase(b=2, t=19, d=5, decay='b t 1', reverse=True),
    'one decay': LinearScanCase(b=2, t=19, d=5, decay='1 1 1', reverse=True),
    'reverse': LinearScanCase(b=2, t=37, d=5, reverse=True),
    'packed': LinearScanCase(b=2, t=37, d=5, documents=PACKED_37),
    'packed, reverse': LinearScanCase(b=2, t=37, d=5, decay='d', documents=PACKED_37, reverse=True),
    'complex': LinearScanCase(b=2, t=37, d=5, decay='d', complex=('x', 'decay', 'state'), documents=PACKED_37),
    'complex decay': LinearScanCase(b=2, t=13, d=5, complex=('decay',), reverse=True),
    'complex input': LinearScanCase(b=2, t=13, d=5, complex=('x',)),
}

SELECTIVE_SCAN = {
    'one': SelectiveScanCase(b=2, t=1, d=3, n=4),
    'two': SelectiveScanCase(b=1, t=2, d=5, n=1),
    'whole tiles': SelectiveScanCase(b=2, t=64, d=3, n=16),
    'prime': SelectiveScanCase(b=2, t=37, d=5, n=3),
    'packed': SelectiveScanCase(b=2, t=67, d=5, n=4, documents=PACKED_67),
}

LINEAR_ATTENTION = {
    'one': LinearAttentionCase(b=2, t=1, k=3, v=4, decay='b t h'),
    'two': LinearAttentionCase(b=1, t=2, k=3, v=2, decay='b t h k'),
    'no decay': LinearAttentionCase(b=2, t=37, k=16, v=8),
    'constant': LinearAttentionCase(b=2, t=37, k=8, v=8, decay='h'),
    'constant in whole tiles': LinearAttentionCase(b=1, t=64, k=8, v=8, decay='h'),
    'scalar': LinearAttentionCase(b=2, t=37, k=8, v=16, decay='b t h'),
    'vector': LinearAttentionCase(b=2, t=37, k=8, v=16, decay='b t h k'),
    'vector in whole tiles': LinearAttentionCase(b=1, t=64, k=8, v=8, decay='b t h k'),
    'wide': LinearAttentionCase(b=1, t=19, k=128, v=64, decay='b t h'),
    'shared queries and keys': LinearAttentionCase(b=2, t=37, k=8, v=8, heads=(1, 1, 4), decay='b t h'),
    'grouped': LinearAttentionCase(b=2, t=37, k=8, v=8, heads=(4, 2, 2), decay='b t h'),
    'grouped vector': LinearAttentionCase(b=1, t=37, k=8, v=8, heads=(4, 1, 2), decay='b t h k'),
    'threes and twos': LinearAttentionCase(b=1, t=19, k=4, v=4, heads=(6, 2, 3)),
    'packed': LinearAttentionCase(b=2, t=67, k=8, v=8, documents=PACKED_67),
    'packed constant': LinearAttentionCase(b=2, t=67, k=8, v=8, decay='h', documents=PACKED_67),
    'packed scalar': LinearAttentionCase(b=2, t=67, k=8, v=8, decay='b t h', documents=PACKED_67),
    'packed vector': LinearAttentionCase(b=2, t=67, k=8, v=8, decay='b t h k', documents=PACKED_67),
    'strong scalar': LinearAttentionCase(b=1, t=67, k=8, v=8, decay='b t h', strength=25.0),
    'strong vector': LinearAttentionCase(b=1, t=67, k=8, v=8, decay='b t h k', strength=25.0),
    'sudden scalar': LinearAttentionCase(b=1, t=67, k=8, v=8, decay='b t h', sudden=True),
    'sudden vector': LinearAttentionCase(
        b=2, t=67, k=8, v=8, decay='b t h k', strength=2.0, sudden=True, documents=PACKED_67
    ),
}

CROSS_ENTROPY = {
    'one': CrossEntropyCase(n=1, d=3, o=2),
    'prime': CrossEntropyCase(n=37, d=16, o=101),
    'soft cap': CrossEntropyCase(n=37, d=16, o=101, soft_cap=2.0),
    'z-loss': CrossEntropyCase(n=37, d=16, o=101, z_loss=1e-2),
    'both': CrossEntropyCase(n=37, d=16, o=101, z_loss=1e-2, soft_cap=2.0),
    'many classes': CrossEntropyCase(n=131, d=8, o=4099, z_loss=1e-3),
    'many tokens': CrossEntropyCase(n=2053, d=8, o=67, soft_cap=5.0),
}


def attention(name: str, dtype: DTypeLike = jnp.float32) -> Call:
    """Returns the call of `ATTENTION[name]` with arrays of `dtype`."""
    case = ATTENTION[name]
    sizes = case.sizes()
    arrays = {
        'q': _normal(name, 'q', _shape('b t h k', sizes), dtype),
        'k': _normal(name, 'k', _shape('b s g k', sizes), dtype),
        'v': _normal(name, 'v', _shape('b s g v', sizes), dtype),
    }
    if 'slopes' in case.added:
        arrays['slopes'] = (0.5 ** (1 + jnp.arange(case.h))).astype(dtype)
    if 'log_forget' in case.added:
        arrays['log_forget'] = jax.nn.log_sigmoid(2 + _normal(name, 'log_forget', _shape('b t h', sizes), dtype))
    if case.bias is not None:
        arrays['bias'] = _bias(name, _shape(case.bias, sizes), dtype)
    options: dict[str, Any] = {'causal': case.causal, 'window': case.window, 'sinks': case.sinks}
    if case.documents is not None:
        queries = segments(case.documents)
        options['segments'] = queries if case.key_documents is None else (queries, segments(case.key_documents))
    if case.soft_cap is not None:
        options['weights'] = Softmax(soft_cap=case.soft_cap)
    return Call(arrays, options)


def linear_scan(name: str, dtype: DTypeLike = jnp.float32) -> Call:
    """Returns the call of `LINEAR_SCAN[name]`: `x` and `decay` of `dtype` or complex, `state` of float32 at least."""
    case = LINEAR_SCAN[name]
    sizes = {'b': case.b, 't': case.t, 'd': case.d}
    modulus = jax.nn.sigmoid(1 + _normal(name, 'decay', _shape(case.decay, sizes), jnp.float32))
    arrays = {
        'x': _normal(name, 'x', _shape('b t d', sizes), dtype),
        'decay': modulus.astype(dtype),
        'state': _normal(name, 'state', _shape('b d', sizes), jnp.promote_types(dtype, jnp.float32)),
    }
    for part in case.complex:
        angle = _normal(name, f'{part} angle', arrays[part].shape, jnp.float32)
        arrays[part] = jax.lax.complex(arrays[part] * jnp.cos(angle), arrays[part] * jnp.sin(angle))
    return Call(arrays, {'reverse': case.reverse, **_segments(case.documents)})


def selective_scan(name: str, dtype: DTypeLike = jnp.float32) -> Call:
    """Returns the call of `SELECTIVE_SCAN[name]`: parameters and state of float32 at least, the rest of `dtype`."""
    case = SELECTIVE_SCAN[name]
    sizes = {'b': case.b, 't': case.t, 'd': case.d, 'n': case.n}
    wide = jnp.promote_types(dtype, jnp.float32)
    arrays = {
        'x': _normal(name, 'x', _shape('b t d', sizes), dtype),
        'dt': jax.nn.softplus(_normal(name, 'dt', _shape('b t d', sizes), dtype) - 1),
        'A': -jnp.exp(_normal(name, 'A', _shape('d n', sizes), wide)),
        'B': _normal(name, 'B', _shape('b t n', sizes), dtype),
        'C': _normal(name, 'C', _shape('b t n', sizes), dtype),
        'D': _normal(name, 'D', _shape('d', sizes), wide),
        'state': _normal(name, 'state', _shape('b d n', sizes), wide),
    }
    return Call(arrays, _segments(case.documents))


def linear_attention(name: str, dtype: DTypeLike = jnp.float32) -> Call:
    """Returns the call of `LINEAR_ATTENTION[name]`: q, k and v of `dtype`, log decays and state of float32 at least."""
    case = LINEAR_ATTENTION[name]
    hq, hk, hv = case.heads
    sizes = {'b': case.b, 't': case.t, 'h': max(case.heads), 'k': case.k, 'v': case.v, 'hq': hq, 'hk': hk, 'hv': hv}
    wide = jnp.promote_types(dtype, jnp.float32)
    arrays = {
        'q': _normal(name, 'q', _shape('b t hq k', sizes), dtype),
        'k': _normal(name, 'k', _shape('b t hk k', sizes), dtype),
        'v': _normal(name, 'v', _shape('b t hv v', sizes), dtype),
        'state': _normal(name, 'state', _shape('b h k v', sizes), wide),
    }
    if case.decay is not None:
        shape = _shape(case.decay, sizes)
        decay = -2 * case.strength * jax.random.uniform(_key(name, 'log_decay'), shape)
        if case.sudden:
            decay = jnp.where(jax.random.bernoulli(_key(name, 'sudden'), 0.1, shape), -50.0, decay / 1000)
        arrays['log_decay'] = decay.astype(wide)
    return Call(arrays, _segments(case.documents))


def cross_entropy(name: str, dtype: DTypeLike = jnp.float32) -> Call:
    """Returns the call of `CROSS_ENTROPY[name]`; the first label is the first class, the last label the last class."""
    case = CROSS_ENTROPY[name]
    sizes = {'n': case.n, 'd': case.d, 'o': case.o}
    arrays = {
        'hidden': _normal(name, 'hidden', _shape('n d', sizes), dtype),
        'embedding': _normal(name, 'embedding', _shape('o d', sizes), dtype),
    }
    labels = jax.random.randint(_key(name, 'labels'), (case.n,), 0, case.o).at[0].set(0).at[-1].set(case.o - 1)
    return Call(arrays, {'labels': labels, 'z_loss': case.z_loss, 'soft_cap': case.soft_cap})


def segments(rows: tuple[Runs, ...]) -> jax.Array:
    """Returns the segments of every token, int32 `b t`."""
    return jnp.array([[segment for segment, length in row for _ in range(length)] for row in rows], jnp.int32)


def _segments(rows: tuple[Runs, ...] | None) -> dict[str, jax.Array]:
    return {} if rows is None else {'segments': segments(rows)}


def _shape(letters: str, sizes: dict[str, int]) -> tuple[int, ...]:
    return tuple(1 if letter == '1' else sizes[letter] for letter in letters.split())


def _key(name: str, argument: str) -> jax.Array:
    return jax.random.key(zlib.crc32(f'{name}/{argument}'.encode()))


def _normal(name: str, argument: str, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    # Drawn in float32 whatever the type, so that the types hold the same numbers.
    return jax.random.normal(_key(name, argument), shape, jnp.float32).astype(dtype)


def _bias(name: str, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    hidden = jax.random.bernoulli(_key(name, 'hidden'), 0.2, shape)
    if shape[2] > 1:
        hidden = hidden.at[:, :, 0].set(True)
    return jnp.where(hidden, -math.inf, _normal(name, 'bias', shape, dtype))
