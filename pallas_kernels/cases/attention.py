"""Named calls of `attention`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.attention import maps
from pallas_kernels.cases import drawing


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of `attention`; `s`, `g` and `v` are `t`, `h` and `k` where `None`.

    Attributes:
      added: which of 'slopes', 'log_forget', 'temperature' and 'sink_scores' are given.
      bias: letters of its shape, such as '1 h 1 s'; a fifth of it is minus infinity, and its first query sees nothing.
      whole: queries and keys hold whole numbers, and the bias is 10000 or -10000 but for the first query, which sees
        nothing: large scores without rounding errors.
      block: keys of a block; every query chooses its own, and half of them a third of the others. `None`: none does.
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
    documents: tuple[drawing.Runs, ...] | None = None
    key_documents: tuple[drawing.Runs, ...] | None = None
    added: tuple[str, ...] = ()
    bias: str | None = None
    whole: bool = False
    block: int | None = None
    weights: maps.WeightMap = maps.Softmax()

    def sizes(self) -> dict[str, int]:
        """The size of every dimension letter."""
        s, g, v = (self.s or self.t), (self.g or self.h), (self.v or self.k)
        return {'b': self.b, 't': self.t, 's': s, 'h': self.h, 'g': g, 'k': self.k, 'v': v}


CASES = {
    'two': Case(b=1, t=2, h=2, k=16),
    'one query': Case(b=2, t=1, s=37, h=4, g=2, k=16),
    'prime': Case(b=2, t=37, h=4, g=2, k=16, v=24),
    'wide': Case(b=1, t=24, h=2, k=128, v=64, causal=False),
    'narrow values': Case(b=1, t=19, h=6, g=2, k=64, v=16),
    'more keys': Case(b=1, t=11, s=29, h=2, k=16),
    'more queries': Case(b=1, t=29, s=11, h=2, k=16),
    'window': Case(b=1, t=37, h=2, k=16, window=5),
    'sinks': Case(b=1, t=37, h=2, k=16, window=6, sinks=3),
    'endless window': Case(b=1, t=9, h=2, k=16, window=2**31, sinks=2**31),
    'two-sided window': Case(b=1, t=31, s=37, h=2, k=16, causal=False, window=4),
    'packed': Case(b=2, t=37, h=2, k=16, documents=drawing.PACKED_37),
    'two packings': Case(
        b=1,
        t=12,
        s=21,
        h=2,
        k=16,
        causal=False,
        documents=(((1, 8), (2, 3), (4, 1)),),
        key_documents=(((2, 8), (1, 13)),),
    ),
    'bias': Case(b=2, t=23, h=4, g=2, k=16, bias='b h t s'),
    'bias of keys': Case(b=2, t=23, h=4, g=2, k=16, causal=False, bias='1 h 1 s'),
    'slopes': Case(b=1, t=23, s=29, h=4, g=2, k=16, causal=False, added=('slopes',)),
    'forgetting': Case(b=2, t=37, h=4, g=2, k=16, added=('log_forget',)),
    'soft cap': Case(b=1, t=23, h=2, k=16, weights=maps.Softmax(soft_cap=1.5)),
    'temperature': Case(b=2, t=23, h=4, g=2, k=16, added=('temperature',)),
    'learned sink': Case(b=2, t=23, h=4, g=2, k=16, added=('sink_scores',), bias='b h t s'),
    'large': Case(b=1, t=21, h=2, k=16, bias='1 1 t s', whole=True),
    'tiles': Case(b=1, t=150, h=2, g=1, k=32, documents=(((1, 64), (2, 1), (3, 63), (4, 22)),)),
    'whole tiles of documents': Case(
        b=2, t=450, h=2, g=1, k=16, documents=(((1, 300), (2, 22), (3, 128)), ((1, 256), (2, 64), (1, 130)))
    ),
    'everything': Case(
        b=2,
        t=37,
        h=4,
        g=2,
        k=32,
        v=16,
        window=9,
        sinks=2,
        documents=drawing.PACKED_37,
        added=('slopes', 'log_forget'),
        bias='b 1 t s',
        weights=maps.Softmax(soft_cap=2.0),
    ),
    'masked': Case(
        b=1,
        t=21,
        s=29,
        h=4,
        g=2,
        k=32,
        v=16,
        causal=False,
        window=12,
        sinks=2,
        added=('slopes',),
        bias='b h t s',
    ),
    'chosen blocks': Case(b=2, t=150, h=4, g=2, k=16, block=8),
    'chosen blocks of documents': Case(
        b=2,
        t=150,
        h=2,
        g=1,
        k=32,
        block=7,
        documents=(((1, 64), (2, 1), (3, 5), (4, 58), (1, 22)), ((1, 20), (2, 129), (3, 1))),
    ),
    'blind rows': Case(b=1, t=300, s=11, h=2, k=16),
    'keys that nobody sees': Case(b=1, t=11, s=300, h=2, k=16, window=5),
    'long': Case(b=1, t=1100, h=2, g=1, k=16, v=8, window=300, sinks=4),
}


MAPS = {
    'scalable softmax': maps.ScalableSoftmax(0.43),
    'self-adjust': maps.SelfAdjustSoftmax(),
    'normalised self-adjust': maps.NormalisedSelfAdjustSoftmax(),
    'softpick': maps.Softpick(),
    'sigmoid': maps.Sigmoid(-3.0),
    'relu': maps.Relu(),
    'squared relu': maps.SquaredRelu(),
    'power': maps.PowerSoftmax(),
    'stablemax': maps.StableMax(),
    'taylor': maps.TaylorSoftmax(),
    'clipped': maps.ClippedSoftmax(1.1, -0.03),
    'adaptive temperature': maps.AdaptiveSoftmax(),
    'sparsemax': maps.Sparsemax(),
    'entmax 1.5': maps.Entmax15(),
    'entmax 1.2': maps.Entmax(1.2, soft_cap=3.0),
}
"""Every weight map but the softmax."""

KERNEL = (
    'two',
    'one query',
    'prime',
    'narrow values',
    'more keys',
    'more queries',
    'sinks',
    'endless window',
    'two-sided window',
    'packed',
    'two packings',
    'bias',
    'bias of keys',
    'slopes',
    'forgetting',
    'everything',
    'masked',
    'large',
    'tiles',
    'whole tiles of documents',
    'chosen blocks',
    'chosen blocks of documents',
    'blind rows',
    'keys that nobody sees',
)
"""The cases that every kernel serves; in 'masked', used with every map, no query sees a single key, where some maps are
ill-conditioned. In 'blind rows' whole tiles of queries see no key, in 'keys that nobody sees' no query sees whole tiles
of keys."""


def call(name: str, dtype: DTypeLike = jnp.float32, weights: maps.WeightMap | None = None) -> drawing.Call:
    """Returns the call of `CASES[name]` with arrays of `dtype`, with other weights where they are given."""
    case = CASES[name]
    sizes = case.sizes()
    arrays = {
        'q': drawing.normal(name, 'q', drawing.shape('b t h k', sizes), dtype),
        'k': drawing.normal(name, 'k', drawing.shape('b s g k', sizes), dtype),
        'v': drawing.normal(name, 'v', drawing.shape('b s g v', sizes), dtype),
    }
    if 'slopes' in case.added:
        arrays['slopes'] = (0.5 ** (1 + jnp.arange(case.h))).astype(dtype)
    if 'log_forget' in case.added:
        arrays['log_forget'] = jax.nn.log_sigmoid(
            2 + drawing.normal(name, 'log_forget', drawing.shape('b t h', sizes), dtype)
        )
    if 'temperature' in case.added:
        arrays['temperature'] = 1 + drawing.normal(name, 'temperature', drawing.shape('b t h', sizes), dtype) / 2
    if 'sink_scores' in case.added:
        arrays['sink_scores'] = drawing.normal(name, 'sink_scores', (case.h,), dtype)
    if case.bias is not None and not case.whole:
        arrays['bias'] = drawing.hidden(name, drawing.shape(case.bias, sizes), dtype)
    if case.whole:
        arrays |= {name: jnp.clip(jnp.round(arrays[name]), -1, 1) for name in ('q', 'k')}
        signs = jnp.sign(drawing.normal(name, 'bias', drawing.shape(str(case.bias), sizes), dtype))
        arrays['bias'] = (10_000 * signs).at[:, :, 0].set(-jnp.inf)
    options: dict[str, Any] = {'causal': case.causal, 'window': case.window, 'sinks': case.sinks}
    if case.documents is not None:
        queries = drawing.segments(case.documents)
        options['segments'] = queries if case.key_documents is None else (queries, drawing.segments(case.key_documents))
    if case.block is not None:
        options |= {'block': case.block, 'chosen': _choices(name, case, options.get('segments'))}
    options['weights'] = case.weights if weights is None else weights
    if case.whole:
        options['scale'] = 1.0
    return drawing.Call(arrays, options)


def _choices(name: str, case: Case, segments: jax.Array | None) -> jax.Array:
    """Every query's own block and a third of the others, those to come too; half of the queries choose no other."""
    assert case.block is not None
    places = jnp.arange(case.t)[None]
    new = jnp.zeros_like(places, bool) if segments is None else jnp.diff(segments, axis=1, prepend=segments[:, :1]) != 0
    own = (places - jax.lax.cummax(jnp.where(new, places, 0), axis=1)) // case.block
    numbers = jnp.arange(-(-case.t // case.block))
    shape = (case.b, case.t, case.g or case.h, len(numbers))
    others = (drawing.uniform(name, 'chosen', shape) < 1 / 3) & (places % 32 < 16)[:, :, None, None]
    return others | (own[:, :, None, None] == numbers[None, None, None])


def real() -> dict[str, drawing.Call]:
    """Calls at model sizes, shapes only; models are trained with documents."""
    alone = {f'k={k}': _real(k) for k in (64, 128)}
    documents = {f'k={k}, documents': _real(k, documents=True) for k in (64, 128)}
    chosen = drawing.abstract('b t g n', {'b': 4, 't': 8192, 'g': 16, 'n': 128}, jnp.bool_)
    choices = {'chosen': chosen, 'block': 64}
    called = documents['k=128, documents']
    return alone | documents | {'k=128, chosen blocks': called._replace(options=called.options | choices)}


def every_map() -> dict[str, drawing.Call]:
    """The first call of `real()` with every weight map, the softmax itself first."""
    weights = {'softmax': maps.Softmax(), 'soft cap': maps.Softmax(soft_cap=50.0)} | MAPS
    return {name: _real(64)._replace(options={'weights': each}) for name, each in weights.items()}


def _real(k: int, *, documents: bool = False) -> drawing.Call:
    sizes = {'b': 4, 't': 8192, 'h': 16, 'k': k}
    segments = {'segments': drawing.abstract('b t', sizes, jnp.int32)} if documents else {}
    arrays = {name: drawing.abstract('b t h k', sizes, jnp.bfloat16) for name in ('q', 'k', 'v')}
    return drawing.Call(arrays, segments)
