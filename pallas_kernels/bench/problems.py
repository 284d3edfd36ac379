"""The benchmark problems: calls of every core, and of heads, at model sizes, and the alternatives a user would run."""

import dataclasses
import functools
import importlib
import importlib.util
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from pallas_kernels import cost, target
from pallas_kernels.attention import maps

Arrays = dict[str, jax.Array]
Contender = Callable[..., Any]

OURS = 'pallas_kernels'
"""The contender that is called as users call it, with no implementation named; ratios are against it."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call of a core, and the functions that compute it.

    Attributes:
      core: the core.
      name: the call, with its sizes.
      arrays: the arguments that have gradients.
      contenders: by name, functions of `arrays`.
      flops: operations of the forward pass by its definition.
      bytes: of its arguments and results, each moved once.
      result_bytes: of its results, as far as `bytes` has them: losses and what is chosen are small beside arguments.
      exponentials: by its definition, of the forward pass and of both; none of heads, beside products.
    """

    core: str
    name: str
    arrays: Arrays
    contenders: dict[str, Contender]
    flops: float
    bytes: float
    result_bytes: float = 0
    exponentials: tuple[int, int] = (0, 0)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a device's problems; `attended` are batch, length and heads of attention."""

    b: int
    t: int
    h: int
    k: int
    width: int
    long: int
    attended: tuple[int, int, int]
    rows: int
    row: int
    tokens: int
    model: int
    vocab: int
    dtype: Any


CPU = Sizes(
    b=4, t=2048, h=4, k=64, width=256, long=8192, attended=(1, 4096, 2), rows=2048, row=4096,
    tokens=2048, model=256, vocab=50_000, dtype=jnp.float32,
)  # fmt: skip
ACCELERATOR = Sizes(
    b=2, t=8192, h=16, k=128, width=2048, long=8192, attended=(2, 8192, 16), rows=16384, row=8192,
    tokens=16384, model=2048, vocab=50_304, dtype=jnp.bfloat16,
)  # fmt: skip
SMALL = Sizes(
    b=1, t=128, h=2, k=16, width=32, long=128, attended=(1, 128, 2), rows=64, row=128,
    tokens=64, model=32, vocab=512, dtype=jnp.float32,
)  # fmt: skip


MAPS: tuple[maps.WeightMap, ...] = (
    maps.Softmax(),
    maps.Softmax(soft_cap=50.0),
    maps.ScalableSoftmax(),
    maps.SelfAdjustSoftmax(),
    maps.NormalisedSelfAdjustSoftmax(),
    maps.Softpick(),
    maps.Sigmoid(bias=-8.0),
    maps.Relu(),
    maps.PowerSoftmax(),
    maps.StableMax(),
    maps.TaylorSoftmax(),
    maps.ClippedSoftmax(gamma=-0.001),
    maps.Sparsemax(),
    maps.Entmax15(),
)
"""The weight maps timed, plain softmax first."""

WITHOUT_EXPONENTIALS = (
    maps.Relu,
    maps.PowerSoftmax,
    maps.StableMax,
    maps.TaylorSoftmax,
    maps.Sparsemax,
    maps.Entmax15,
)


def problems(core: str, sizes: Sizes) -> Iterator[Problem]:
    """The problems of a core."""
    return _PROBLEMS[core](sizes)


def _softmax(z: Sizes) -> Iterator[Problem]:
    x = _normal(0, (z.rows, z.row), z.dtype)
    contenders: dict[str, Contender] = {
        OURS: pallas_kernels.softmax,
        **_forms(pallas_kernels.softmax),
        'jax.nn.softmax': jax.nn.softmax,
    }
    contenders = {name: _of('x', contender) for name, contender in contenders.items()}
    call = cost.softmax(n=z.rows, o=z.row)
    flops, taken = call.model.forward.flops, _exponentials(call)
    yield Problem('softmax', f'{z.rows} x {z.row}', {'x': x}, contenders, flops, 2 * x.nbytes, x.nbytes, taken)


def _softmax_topk(z: Sizes) -> Iterator[Problem]:
    x = _normal(0, (z.rows, z.row), z.dtype)

    def separate(x: jax.Array) -> Any:
        return jax.lax.top_k(jax.nn.softmax(x), 8)

    ours = functools.partial(pallas_kernels.softmax_topk, k=8)
    contenders: dict[str, Contender] = {OURS: ours, **_forms(ours), 'jax.lax.top_k of jax.nn.softmax': separate}
    contenders = {name: _of('x', contender) for name, contender in contenders.items()}
    call = cost.softmax_topk(n=z.rows, o=z.row, k=8)
    flops, taken = call.model.forward.flops, _exponentials(call)
    size = f'{z.rows} x {z.row}, k 8'
    yield Problem('softmax_topk', size, {'x': x}, contenders, flops, x.nbytes, exponentials=taken)


def _attention(z: Sizes) -> Iterator[Problem]:
    b, t, h = z.attended
    arrays = {name: _normal(place, (b, t, h, z.k), z.dtype) for place, name in enumerate('qkv')}
    call = cost.attention(b=b, t=t, s=t, h=h, g=h, k=z.k, v=z.k)
    flops = call.model.forward.flops
    size = f'b {b}, t {t}, h {h}, k {z.k}, causal'
    result = arrays['v'].nbytes
    moved = sum(array.nbytes for array in arrays.values()) + result
    taken = _exponentials(call)
    for weights in MAPS:
        name = repr(weights) if weights.soft_cap else type(weights).__name__
        ours = functools.partial(pallas_kernels.attention, weights=weights)
        contenders: dict[str, Contender] = {OURS: ours, **_forms(ours)}
        contenders |= _library_attention() if name == 'Softmax' else {'Softmax': pallas_kernels.attention}
        exponentials = (0, 0) if isinstance(weights, WITHOUT_EXPONENTIALS) else taken
        yield Problem('attention', f'{name}: {size}', arrays, contenders, flops, moved, result, exponentials)

    ours = functools.partial(pallas_kernels.attention, chosen=_choices(b, t, h), block=BLOCK)
    contenders = {OURS: ours, **_forms(ours), 'all keys': pallas_kernels.attention}
    pairs = b * h * sum(_read(i) for i in range(t))
    flops, taken = 4 * pairs * z.k, (pairs, taken[1] // taken[0] * pairs)
    yield Problem('attention', f'chosen blocks of {BLOCK}: {size}', arrays, contenders, flops, moved, result, taken)


BLOCK, CHOSEN = 64, 16
"""Keys of a block, and how many blocks a query chooses of those up to its own."""


def _choices(b: int, t: int, g: int) -> jax.Array:
    """The first, the query's own and the one before it, and others by chance, the same for 64 queries in a row."""
    blocks = -(-t // BLOCK)
    own, number = jnp.arange(blocks)[:, None], jnp.arange(blocks)[None]
    drawn = jax.random.uniform(jax.random.key(3), (b, g, blocks, blocks))
    drawn = jnp.where((number == 0) | (number >= own - 1), 2.0, drawn)
    drawn = jnp.where(number <= own, drawn, -1.0)
    place = jnp.argsort(jnp.argsort(-drawn, axis=-1), axis=-1)
    chosen = (place < CHOSEN) & (drawn >= 0)
    return jnp.repeat(jnp.moveaxis(chosen, 1, 2), BLOCK, axis=1)[:, :t]


def _read(query: int) -> int:
    """How many keys it sees."""
    return min(query + 1, (CHOSEN - 1) * BLOCK + query % BLOCK + 1)


def _library_attention() -> dict[str, Contender]:
    def library(q: jax.Array, k: jax.Array, v: jax.Array, *, implementation: Any = None) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)

    found: dict[str, Contender] = {'jax.nn.dot_product_attention': library}
    if target.current().platform == 'gpu':
        found['cuDNN'] = functools.partial(library, implementation='cudnn')
    if importlib.util.find_spec('tokamax') is not None:
        found['tokamax'] = _tokamax_attention
    return found


def _tokamax_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Its kernel is named, since by default it may run another form."""
    attend = importlib.import_module('tokamax').dot_product_attention
    return attend(q, k, v, is_causal=True, implementation='mosaic')


def _linear_scan(z: Sizes) -> Iterator[Problem]:
    shape = (z.b, z.long, z.width)
    arrays = {'x': _normal(0, shape, z.dtype), 'decay': jax.nn.sigmoid(3 + _normal(1, shape, z.dtype))}

    def associative(x: jax.Array, decay: jax.Array) -> jax.Array:
        def join(left: Any, right: Any) -> Any:
            return left[0] * right[0], right[0] * left[1] + right[1]

        return jax.lax.associative_scan(join, (decay, x), axis=1)[1]

    ours = pallas_kernels.linear_scan
    contenders = {
        OURS: _first(ours),
        **{name: _first(form) for name, form in _forms(ours).items()},
        'jax.lax.associative_scan': associative,
    }
    size = f'b {z.b}, t {z.long}, d {z.width}'
    x = arrays['x']
    yield Problem('linear_scan', size, arrays, contenders, 2 * x.size, 3 * x.nbytes, x.nbytes)


def _long_conv(z: Sizes) -> Iterator[Problem]:
    x, kernel = _normal(0, (z.b, z.long, z.width), z.dtype), _normal(1, (z.long, z.width), jnp.float32)

    def transformed(x: jax.Array, kernel: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        spectrum = jnp.fft.rfft(wide, 2 * z.long, axis=1) * jnp.fft.rfft(kernel, 2 * z.long, axis=0)[None]
        return jnp.fft.irfft(spectrum, 2 * z.long, axis=1)[:, : z.long].astype(x.dtype)

    ours = pallas_kernels.long_conv
    arrays = {'x': x, 'kernel': kernel}
    contenders: dict[str, Contender] = {OURS: ours, 'jax.numpy.fft': transformed}
    moved = 2 * x.nbytes + kernel.nbytes
    flops = cost.long_conv(b=z.b, t=z.long, d=z.width, w=z.long).model.forward.flops
    size = f'b {z.b}, t {z.long}, d {z.width}'
    yield Problem('long_conv', size, arrays, contenders, flops, moved, x.nbytes)
    documents = jnp.broadcast_to(jnp.arange(z.long) // (z.long // 8), (z.b, z.long))
    packed = functools.partial(ours, segments=documents)
    yield Problem('long_conv', f'{size}, 8 documents', arrays, {OURS: packed, **_forms(packed)}, flops, moved, x.nbytes)


def _short_conv(z: Sizes) -> Iterator[Problem]:
    x, taps = _normal(0, (z.b, z.long, z.width), z.dtype), _normal(1, (4, z.width), jnp.float32)

    def by_library(x: jax.Array, taps: jax.Array) -> jax.Array:
        wide = jax.lax.conv_general_dilated(
            x,
            taps.astype(x.dtype)[:, None],
            window_strides=(1,),
            padding=((3, 0),),
            dimension_numbers=('NTC', 'TIO', 'NTC'),
            feature_group_count=z.width,
            preferred_element_type=jnp.float32,
        )
        return jax.nn.silu(wide).astype(x.dtype)

    ours = functools.partial(pallas_kernels.short_conv, activation='silu')
    contenders: dict[str, Contender] = {OURS: ours, **_forms(ours), 'jax.lax.conv_general_dilated': by_library}
    call = cost.short_conv(b=z.b, t=z.long, d=z.width, w=4, activation='silu')
    flops, taken = call.model.forward.flops, _exponentials(call)
    size = f'b {z.b}, t {z.long}, d {z.width}, w 4, silu'
    yield Problem('short_conv', size, {'x': x, 'taps': taps}, contenders, flops, 2 * x.nbytes, x.nbytes, taken)


def _selective_scan(z: Sizes) -> Iterator[Problem]:
    d, n = z.width, 16
    arrays = {
        'x': _normal(0, (z.b, z.t, d), z.dtype),
        'dt': jax.nn.softplus(_normal(1, (z.b, z.t, d), z.dtype) - 3),
        'A': -jnp.broadcast_to(jnp.arange(1.0, n + 1), (d, n)),
        'B': _normal(2, (z.b, z.t, n), z.dtype),
        'C': _normal(3, (z.b, z.t, n), z.dtype),
    }
    ours = pallas_kernels.selective_scan
    contenders = {OURS: _first(ours), **{name: _first(form) for name, form in _forms(ours).items()}}
    contenders |= _of_jla(_jax_selective_scan)
    if z.dtype == jnp.float32:
        contenders['lax.scan of the definition'] = _first(functools.partial(ours, implementation='reference'))
    call, result = cost.selective_scan(b=z.b, t=z.t, d=d, n=n), arrays['x'].nbytes
    flops, taken = call.model.forward.flops, _exponentials(call)
    size = f'b {z.b}, t {z.t}, d {d}, n {n}'
    yield Problem('selective_scan', size, arrays, contenders, flops, 3 * result, result, taken)


def _linear_attention(z: Sizes) -> Iterator[Problem]:
    kinds = {'no decay': 'simple_gla', 'scalar': 'simple_gla', 'vector': 'gla'}
    for kind, theirs in kinds.items():
        arrays = _recurrent(z, kind)
        yield _recurrence(z, 'linear_attention', kind, arrays, theirs)


def _delta_rule(z: Sizes) -> Iterator[Problem]:
    kinds = {'no decay': 'deltanet', 'scalar': 'gated_deltanet', 'vector': 'kda'}
    for kind, theirs in kinds.items():
        arrays = _recurrent(z, kind)
        arrays['k'] /= jnp.linalg.norm(arrays['k'].astype(jnp.float32), axis=-1, keepdims=True).astype(z.dtype)
        arrays['beta'] = jax.nn.sigmoid(_normal(5, (z.b, z.t, z.h), z.dtype))
        yield _recurrence(z, 'delta_rule', kind, arrays, theirs)
    arrays['gates'] = jax.nn.sigmoid(_normal(6, arrays['k'].shape, z.dtype))
    yield _recurrence(z, 'delta_rule', 'vector, erase keys', arrays, 'gdn2', _erasing_by_gates, erase=True)


def _erasing_by_gates(*, gates: jax.Array, **arrays: Any) -> Any:
    """Erase keys are keys times gates, as Gated DeltaNet-2 has them: so third parties take them."""
    return pallas_kernels.delta_rule(**arrays, erase=gates * arrays['k'])


def _diagonal_low_rank(z: Sizes) -> Iterator[Problem]:
    arrays = _recurrent(z, 'vector')
    a = _normal(5, arrays['k'].shape, jnp.float32)
    a /= jnp.linalg.norm(a, axis=-1, keepdims=True)
    arrays['a'] = -a.astype(z.dtype)
    arrays['b'] = (jax.nn.sigmoid(_normal(6, a.shape, jnp.float32)) * a).astype(z.dtype)
    yield _recurrence(z, 'diagonal_low_rank', 'vector', arrays, 'rwkv7', keys=2)
    del arrays['b']
    arrays['k'] = (jax.nn.sigmoid(_normal(6, a.shape[:3], jnp.float32))[..., None] * a).astype(z.dtype)
    yield _recurrence(z, 'diagonal_low_rank', 'vector, b is k', arrays, 'rwkv7')


def _recurrent(z: Sizes, kind: str) -> Arrays:
    shape = (z.b, z.t, z.h, z.k)
    arrays = {name: _normal(place, shape, z.dtype) for place, name in enumerate('qkv')}
    decays = {'scalar': shape[:3], 'vector': shape}
    if kind in decays:
        arrays['log_decay'] = jax.nn.log_sigmoid(3 + _normal(4, decays[kind], jnp.float32))
    return arrays


def _recurrence(
    z: Sizes,
    core: str,
    kind: str,
    arrays: Arrays,
    theirs: str,
    ours: Callable[..., Any] | None = None,
    **counted: Any,
) -> Problem:
    """A problem of a core with a state `k v`; `counted` is what else its cost is asked for.

    `theirs` is the kind of call of jax-linear-attention; `ours` calls the core by these arrays where it takes others.
    """
    ours = ours or getattr(pallas_kernels, core)
    contenders = {OURS: _first(ours), **{name: _first(form) for name, form in _forms(ours).items()}}
    if target.current().platform == 'cpu':
        contenders['lax.scan of the definition'] = _first(functools.partial(ours, implementation='reference'))
    contenders |= _of_jla(functools.partial(_jax_linear_attention, theirs))
    result = arrays['v'].nbytes
    moved = sum(array.nbytes for array in arrays.values()) + result
    decay = None if 'log_decay' not in arrays else 'scalar' if arrays['log_decay'].ndim == 3 else 'vector'
    call = getattr(cost, core)(b=z.b, t=z.t, h=z.h, k=z.k, v=z.k, decay=decay, **counted)
    flops, taken = call.model.forward.flops, _exponentials(call)
    return Problem(core, f'{kind}: b {z.b}, t {z.t}, h {z.h}, k {z.k}', arrays, contenders, flops, moved, result, taken)


def _jax_linear_attention(
    kind: str, q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array | None = None, **gates: jax.Array
) -> jax.Array:
    """Its call of a kind, given the arguments of our core, and scaled as ours."""
    if kind == 'simple_gla' and log_decay is None:
        # It has no kind without decays; those of one a head are the fewest.
        log_decay = jnp.zeros(q.shape[:3], jnp.float32)
    if kind == 'rwkv7':
        given = {'w': log_decay, 'a': gates['a'], 'b': gates.get('b', k)}
    elif kind == 'gdn2':
        beta = gates['beta'][..., None]
        given = {'g': log_decay, 'b': beta * gates['gates'], 'w': jnp.broadcast_to(beta, v.shape)}
    else:
        given = {'g': log_decay, 'beta': gates.get('beta')}
    given = {name: array for name, array in given.items() if array is not None}
    return _jla(kind, q, k, v, **given, scale=q.shape[-1] ** -0.5)


def _jax_selective_scan(x: jax.Array, dt: jax.Array, A: jax.Array, B: jax.Array, C: jax.Array) -> jax.Array:
    return _jla('mamba1', C, B, x, dt=dt, a=A, backward='kernel')


def _of_jla(contender: Contender) -> dict[str, Contender]:
    """Built for Hopper and pinned to one version of JAX: timed where it is installed."""
    return {} if importlib.util.find_spec('jla') is None else {'jax-linear-attention': contender}


def _jla(kind: str, *arrays: jax.Array, **options: Any) -> jax.Array:
    """Its kernels are named, since by default it falls back to plain JAX silently."""
    return importlib.import_module('jla.ops').linear_attention(kind, *arrays, **options, impl='mosaic_gpu')[0]


def _asked(z: Sizes) -> tuple[dict[str, jax.Array], jax.Array]:
    """Hidden states, the embedding of a vocabulary that they are compared with, and their labels."""
    hidden = _normal(0, (z.tokens, z.model), z.dtype)
    embedding = 1 / math.sqrt(z.model) * _normal(1, (z.vocab, z.model), z.dtype)
    return {'hidden': hidden, 'embedding': embedding}, jax.random.randint(jax.random.key(2), (z.tokens,), 0, z.vocab)


def _cross_entropy(z: Sizes) -> Iterator[Problem]:
    arrays, labels = _asked(z)

    ours = functools.partial(pallas_kernels.cross_entropy, labels=labels)
    contenders: dict[str, Contender] = {OURS: ours, **_forms(ours), 'dense logits': _dense(labels)}
    flops = 2 * z.tokens * z.model * z.vocab
    moved = sum(array.nbytes for array in arrays.values())
    taken = _exponentials(cost.cross_entropy(n=z.tokens, d=z.model, o=z.vocab))
    size = f'n {z.tokens}, d {z.model}, o {z.vocab}'
    yield Problem('cross_entropy', size, arrays, contenders, flops, moved, exponentials=taken)


def _mixture_of_softmaxes(z: Sizes) -> Iterator[Problem]:
    """The mixture of Yang et al. 2018, https://arxiv.org/abs/1711.03953, by a loss a component."""
    components = 4
    n = z.tokens // components
    scale = 1 / math.sqrt(z.model)
    arrays = {
        'contexts': _normal(0, (n, components, z.model), z.dtype),
        'prior': _normal(1, (n, components), jnp.float32),
        'embedding': scale * _normal(2, (z.vocab, z.model), z.dtype),
    }
    labels = jax.random.randint(jax.random.key(3), (n,), 0, z.vocab)

    def ours(
        contexts: jax.Array, prior: jax.Array, embedding: jax.Array, implementation: str | None = None
    ) -> jax.Array:
        flat, repeated = contexts.reshape(-1, z.model), jnp.repeat(labels, components)
        each = pallas_kernels.cross_entropy(flat, embedding, repeated, implementation=implementation)
        return -jax.nn.logsumexp(jax.nn.log_softmax(prior) - each.reshape(n, components), axis=1)

    def dense(contexts: jax.Array, prior: jax.Array, embedding: jax.Array) -> jax.Array:
        logits = jnp.einsum('nmd,od->nmo', contexts, embedding, preferred_element_type=jnp.float32)
        mixed = jax.nn.logsumexp(jax.nn.log_softmax(prior)[..., None] + jax.nn.log_softmax(logits), axis=1)
        return -jnp.take_along_axis(mixed, labels[:, None], axis=1)[:, 0]

    contenders: dict[str, Contender] = {OURS: ours, **_forms(ours), 'dense logits': dense}
    flops = 2 * n * components * z.model * z.vocab
    moved = sum(array.nbytes for array in arrays.values())
    size = f'n {n}, components {components}, d {z.model}, o {z.vocab}'
    yield Problem('mixture_of_softmaxes', size, arrays, contenders, flops, moved)


def _sampled_softmax(z: Sizes) -> Iterator[Problem]:
    """The estimate of Jean et al. 2015, https://arxiv.org/abs/1412.2007, against what it estimates."""
    drawn_count = min(512, z.vocab // 8)
    arrays, labels = _asked(z)
    drawn = jax.random.randint(jax.random.key(3), (drawn_count,), 0, z.vocab)

    def sampled(hidden: jax.Array, embedding: jax.Array) -> jax.Array:
        """Classes drawn evenly, whose correction is one number for all."""
        own = jnp.sum(hidden.astype(jnp.float32) * embedding[labels].astype(jnp.float32), axis=1)
        others = jnp.einsum('nd,md->nm', hidden, embedding[drawn], preferred_element_type=jnp.float32)
        others = others + math.log(z.vocab / drawn_count)
        others = jnp.where(drawn[None] == labels[:, None], -jnp.inf, others)
        return jnp.logaddexp(jax.nn.logsumexp(others, axis=1), own) - own

    whole = functools.partial(pallas_kernels.cross_entropy, labels=labels)
    contenders: dict[str, Contender] = {OURS: sampled, 'all classes, fused': whole, 'dense logits': _dense(labels)}
    flops = 2 * z.tokens * z.model * (drawn_count + 1)
    # What the drawn rows and those of labels take, not the whole matrix.
    moved = arrays['hidden'].nbytes + (drawn_count + z.tokens) * z.model * arrays['embedding'].itemsize
    size = f'n {z.tokens}, d {z.model}, {drawn_count} of {z.vocab}'
    yield Problem('sampled_softmax', size, arrays, contenders, flops, moved)


def _augment_and_reduce(z: Sizes) -> Iterator[Problem]:
    """The bound of Ruiz et al. 2018, https://arxiv.org/abs/1802.04220, by two draws, against what it bounds."""
    drawn_count = min(512, z.vocab // 8)
    arrays, labels = _asked(z)
    draws = jax.random.randint(jax.random.key(3), (2, drawn_count), 0, z.vocab)

    def bound(hidden: jax.Array, embedding: jax.Array) -> jax.Array:
        own = jnp.sum(hidden.astype(jnp.float32) * embedding[labels].astype(jnp.float32), axis=1)

        def log_odds(drawn: jax.Array) -> jax.Array:
            others = jnp.einsum('nd,md->nm', hidden, embedding[drawn], preferred_element_type=jnp.float32)
            others = others - own[:, None] + math.log(z.vocab / drawn_count)
            others = jnp.where(drawn[None] == labels[:, None], -jnp.inf, others)
            return jnp.logaddexp(jax.nn.logsumexp(others, axis=1), 0)

        log_eta = jax.lax.stop_gradient(log_odds(draws[1]))
        return log_eta - 1 + jnp.exp(log_odds(draws[0]) - log_eta)

    whole = functools.partial(pallas_kernels.cross_entropy, labels=labels)
    contenders: dict[str, Contender] = {OURS: bound, 'all classes, fused': whole, 'dense logits': _dense(labels)}
    flops = 2 * z.tokens * z.model * (2 * drawn_count + 1)
    moved = arrays['hidden'].nbytes + (2 * drawn_count + z.tokens) * z.model * arrays['embedding'].itemsize
    size = f'n {z.tokens}, d {z.model}, twice {drawn_count} of {z.vocab}'
    yield Problem('augment_and_reduce', size, arrays, contenders, flops, moved)


def _partial_fc(z: Sizes) -> Iterator[Problem]:
    """The head of An et al. 2022, https://arxiv.org/abs/2203.15565, its draw included, against that of all classes."""
    kept_count = min(z.vocab, max(z.vocab // 10, z.tokens))
    arrays = {
        'hidden': _normal(0, (z.tokens, z.model), z.dtype),
        'centres': _normal(1, (z.vocab, z.model), z.dtype),
    }
    labels = jax.random.randint(jax.random.key(2), (z.tokens,), 0, z.vocab)

    def losses(hidden: jax.Array, centres: jax.Array, classes: jax.Array) -> jax.Array:
        """The angle to the own centre is widened by a half, as in ArcFace, and what is divided by is of `classes`."""
        cosines = jnp.einsum('nd,od->no', _unit(hidden), _unit(centres))
        sines = jnp.sqrt(jnp.maximum(1 - jnp.square(cosines), 1e-6))
        own = classes[None] == labels[:, None]
        logits = 64 * jnp.where(own, cosines * math.cos(0.5) - sines * math.sin(0.5), cosines)
        return jax.nn.logsumexp(logits, axis=1) - jnp.sum(jnp.where(own, logits, 0), axis=1)

    def partial(hidden: jax.Array, centres: jax.Array) -> jax.Array:
        drawn = jax.random.uniform(jax.random.key(3), (z.vocab,)).at[labels].add(2)
        classes = jax.lax.top_k(drawn, kept_count)[1]
        return losses(hidden, centres[classes], classes)

    def whole(hidden: jax.Array, centres: jax.Array) -> jax.Array:
        return losses(hidden, centres, jnp.arange(z.vocab))

    contenders: dict[str, Contender] = {OURS: partial, 'all classes': whole}
    flops = 2 * z.tokens * z.model * kept_count
    moved = arrays['hidden'].nbytes + kept_count * z.model * arrays['centres'].itemsize
    size = f'n {z.tokens}, d {z.model}, {kept_count} of {z.vocab}'
    yield Problem('partial_fc', size, arrays, contenders, flops, moved)


_PROBLEMS: dict[str, Callable[[Sizes], Iterator[Problem]]] = {
    'softmax': _softmax,
    'softmax_topk': _softmax_topk,
    'attention': _attention,
    'linear_scan': _linear_scan,
    'long_conv': _long_conv,
    'short_conv': _short_conv,
    'selective_scan': _selective_scan,
    'linear_attention': _linear_attention,
    'delta_rule': _delta_rule,
    'diagonal_low_rank': _diagonal_low_rank,
    'cross_entropy': _cross_entropy,
    'mixture_of_softmaxes': _mixture_of_softmaxes,
    'sampled_softmax': _sampled_softmax,
    'augment_and_reduce': _augment_and_reduce,
    'partial_fc': _partial_fc,
}
CORES = tuple(_PROBLEMS)


def _dense(labels: jax.Array) -> Contender:
    """The loss of a linear head whose logits are stored."""

    def losses(hidden: jax.Array, embedding: jax.Array) -> jax.Array:
        logits = jnp.einsum('nd,od->no', hidden, embedding, preferred_element_type=jnp.float32)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)[:, 0]

    return losses


def _unit(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return wide / jnp.linalg.norm(wide, axis=-1, keepdims=True)


def _forms(ours: Contender) -> dict[str, Contender]:
    """The portable implementation as a contender, where there is a kernel."""
    if target.current().platform == 'cpu':
        return {}
    return {f'{OURS}, xla': functools.partial(ours, implementation='xla')}


def _exponentials(call: cost.CallCost) -> tuple[int, int]:
    """Those of the definition, in the forward pass and in both."""
    forward = call.model.forward.exponentials
    return forward, forward + call.model.backward.exponentials


def _first(function: Contender) -> Contender:
    """The first result only, as not every contender returns the state."""
    return lambda **arrays: function(**arrays)[0]


def _of(name: str, function: Contender) -> Contender:
    return lambda **arrays: function(arrays[name])


def _normal(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)
