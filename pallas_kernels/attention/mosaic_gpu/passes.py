"""The form of `attention` for Hopper GPUs: one blockwise template, forward and backward, in Pallas Mosaic GPU.

Every block of threads has 128 rows of the matrix of scores and goes over the tiles of columns in which any of them may
be visible (Dao, 2023, arXiv 2307.08691; Shah et al., 2024, arXiv 2407.08608). The output and the gradients of the
queries are sums over keys, those of keys and values sums over queries, in kernels of their own: no sum is
shared by two blocks, and the order of every sum is fixed. Products are of 16-bit factors and summed in float32, like
everything between them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import tiling, tuning
from pallas_kernels.attention import chosen, vjp
from pallas_kernels.attention.maps import Relu, SquaredRelu, Statistics
from pallas_kernels.attention.mosaic_gpu import output_sm90, sm90
from pallas_kernels.attention.mosaic_gpu.key_gradients_sm90 import KeyGradients, key_gradients
from pallas_kernels.attention.mosaic_gpu.known import Known
from pallas_kernels.attention.mosaic_gpu.query_gradients_sm90 import QueryGradients, query_gradients
from pallas_kernels.attention.mosaic_gpu.sm90 import PAD, Arrays, Call
from pallas_kernels.attention.problem import Operands, Rule, join_heads, segments_refusal, split_heads
from pallas_kernels.mosaic_gpu import launch
from pallas_kernels.mosaic_gpu.padding import to_multiples
from pallas_kernels.target import Target
from pallas_kernels.tiling import AttentionTile

UNBOUNDED = (Relu, SquaredRelu)
"""The maps whose weights, which kernels round to the type of the values, may be of any size."""

CHANNELS = 64
"""Channels are padded to a multiple of it, 128 bytes of shared memory."""


@functools.lru_cache
def form(here: Target) -> vjp.Form:
    """Returns the form of `attention` for a device."""
    return vjp.differentiable(*in_passes(here))


def in_passes(here: Target) -> vjp.Passes:
    """Returns the two passes for a device."""
    return vjp.Passes(functools.partial(_forward, here), functools.partial(_backward, here), exact=True)


def refusal(here: Target, rule: Rule, operands: Operands) -> str | None:
    """The reason why a call cannot be served, or `None`."""
    b, g, r, t, k = operands.q.shape
    s, v = operands.v.shape[2:]
    types = {str(array.dtype) for array in (operands.q, operands.k, operands.v)}
    if types not in ({'bfloat16'}, {'float16'}):
        return (
            f'q, k and v have type {", ".join(sorted(types))}; expected bfloat16 or float16 alike, since products of '
            'float32 would keep 10 bits'
        )
    if types == {'float16'} and isinstance(rule.weights, UNBOUNDED):
        return (
            f'q, k and v have type float16 and the weights are {type(rule.weights).__name__}, which have no bound; '
            'expected bfloat16, since weights and their sums may be above 65504'
        )
    if operands.dtype() != jnp.float32:
        return f'the call is computed in {operands.dtype()}; expected float32'
    reason = segments_refusal(operands) or chosen.refusal(rule, PAD)
    if reason is not None:
        return reason
    if 0 in (b, t, s, k, v):
        return f'b={b}, t={t}, s={s}, k={k} and v={v}; expected none of them 0'
    grid = launch.grid_refusal(b=b, h=g * r, rows=-(-max(t, s) // PAD))
    if grid is not None:
        return grid
    if tiling.attention_hopper(**_sizes(rule, operands)) is None:
        return f'k={k} and v={v} at {r} query heads a group; expected at most 256 channels, or fewer heads'
    return launch.capability_refusal(here) or _assembler_refusal(here, rule)


def _assembler_refusal(here: Target, rule: Rule) -> str | None:
    """CUDA's assembler from 12.8 to 12.9.0 miscompiles causal masks; JAX's own kernel also rejects these versions."""
    version = _runtime()
    if here.interpret or not rule.causal or version is None or not 12080 <= version < 12091:
        return None
    major, minor = version // 1000, version % 1000 // 10
    return f'causal masks, which the assembler of CUDA {major}.{minor} miscompiles; expected CUDA before 12.8, or 13'


@functools.cache
def _runtime() -> int | None:
    """The version of the CUDA runtime and its assembler, 12080 for 12.8; `None` where JAX knows none."""
    try:
        from jax._src.lib import cuda_versions
    except ImportError:
        return None
    return None if cuda_versions is None else cuda_versions.cuda_runtime_get_version()


def _forward(here: Target, rule: Rule, operands: Operands, given: Statistics) -> vjp.Residuals:
    arrays, tile = _arrays(operands), _tile(here, rule, operands)
    call = _call(here, rule, operands, axis=0, step=tile.forward)
    arrays = _within_reach(call, arrays, operands)
    if not rule.weights.surveys:
        output, statistics = output_sm90.weighted_sum(call, arrays, output_sm90.online(call))
        return vjp.Residuals(_output(output, operands), tuple(_rows(vector, operands) for vector in statistics))

    vectors = tuple(_vector(array[..., 0], 1) for array in given)
    weights = (rule.weights.recompute, *((rule.weights.companion,) if rule.weights.has_companion else ()))
    sums = [output_sm90.weighted_sum(call, arrays, output_sm90.known(call, weigh, vectors))[0] for weigh in weights]
    output, *companion = (_output(array, operands) for array in sums)
    return vjp.Residuals(output, given, *companion)


def _backward(here: Target, rule: Rule, operands: Operands, kept: vjp.Residuals, doutput: jax.Array) -> Operands:
    arrays, tile = _arrays(operands), _tile(here, rule, operands)
    delta, companion_delta = vjp.deltas(kept, doutput)
    known = Known(
        statistics=tuple(_vector(array[..., 0], 1) for array in kept.statistics),
        delta=_vector(delta[..., 0]),
        companion_delta=None if companion_delta is None else _vector(companion_delta[..., 0]),
    )
    doutput = _matrix(join_heads(doutput.astype(operands.v.dtype)))

    # Every tile of the gradient of a bias must be written.
    call = _call(here, rule, operands, axis=0, step=tile.query_gradients, skips=arrays.bias is None)
    of_queries = query_gradients(call, _within_reach(call, arrays, operands), known, doutput)

    call = _call(here, rule, operands, axis=1, step=tile.key_gradients)
    arrays = _within_reach(call, arrays, operands)
    if arrays.bias is not None:
        arrays = arrays._replace(bias=arrays.bias.swapaxes(2, 3))
    turns = ((True, True),) if tile.together else ((True, False), (False, True))
    parts = [
        key_gradients(call, arrays, known, doutput, of_keys=of_keys, of_values=of_values)
        for of_keys, of_values in turns
    ]
    return _gradients(operands, of_queries, parts[0]._replace(v=parts[-1].v))


def tiled_by(here: Target, rule: Rule, operands: Operands) -> str:
    """Where the tile of a call is from, see `tuning.source`."""
    return tuning.source(here, tiling.attention_hopper, **_sizes(rule, operands))


def _sizes(rule: Rule, operands: Operands) -> dict[str, Any]:
    """The arguments of the rule of tiles."""
    k, v = (-(-array.shape[-1] // CHANNELS) * CHANNELS for array in (operands.k, operands.v))
    added = sum(array is not None for array in (operands.query_forget, operands.slopes, operands.bias, operands.chosen))
    return {
        'k': k,
        'v': v,
        'r': operands.q.shape[2],
        # Documents are read in few tiles; beside others they spill registers there.
        'vectors': added + (added > 0 and operands.query_segments is not None),
        'numbers': len(rule.weights.statistics) + 1 + rule.weights.has_companion,
        'bias': _varies(operands.bias) == 'both',
    }


def _tile(here: Target, rule: Rule, operands: Operands) -> tiling.HopperAttentionTile:
    tile = tuning.tile(here, tiling.attention_hopper, **_sizes(rule, operands))
    assert tile is not None, 'a call that was refused'
    return tile


def _call(here: Target, rule: Rule, operands: Operands, *, axis: int, step: int, skips: bool = True) -> Call:
    t, s = operands.q.shape[3], operands.k.shape[2]
    hides = operands.bias is not None or operands.chosen is not None
    return Call(here, rule, t, s, axis, step, hides, skips)


def _within_reach(call: Call, arrays: Arrays, operands: Operands) -> Arrays:
    """The arrays of a kernel, with where documents are, or with what queries chose and in which tiles that is."""
    if operands.chosen is None:
        return arrays._replace(reach=_reach(call, operands))
    tile = AttentionTile(PAD, call.step) if call.axis == 0 else AttentionTile(call.step, PAD)
    found = chosen.words_of(operands, PAD)
    lists = chosen.lists_of(call.rule, found, (call.t, call.s), tile, by=call.axis) if call.skips else None
    words = to_multiples(found.words, (1, 1, 1, PAD))
    if call.axis == 0:
        words = words.reshape(*words.shape[:3], -1, sm90.ROWS)
    keys = {**arrays.keys, 'bits': _vector(found.bits[:, None, None])}
    return arrays._replace(keys=keys, words=words, lists=lists)


def _reach(call: Call, operands: Operands) -> sm90.Reach | None:
    """Which tiles of columns the documents of every block of rows may be in."""
    if operands.query_segments is None or operands.key_segments is None or not call.skips:
        return None
    return sm90.reach(call, operands.query_segments[:, 0, 0, :, 0], operands.key_segments[:, 0, 0, 0])


def _arrays(operands: Operands) -> Arrays:
    """The operands as the kernels take them."""
    queries, keys = {}, {}
    if operands.query_forget is not None and operands.key_forget is not None:
        queries['forget'], keys['forget'] = operands.query_forget[..., 0], operands.key_forget[..., 0, :]
    if operands.query_segments is not None and operands.key_segments is not None:
        queries['segments'], keys['segments'] = operands.query_segments[..., 0], operands.key_segments[..., 0, :]
    arrays = Arrays(
        q=_matrix(join_heads(operands.q)),
        k=_matrix(jnp.moveaxis(operands.k, 2, 1)),
        v=_matrix(jnp.moveaxis(operands.v, 2, 1)),
        queries={name: _vector(array) for name, array in queries.items()},
        keys={name: _vector(array) for name, array in keys.items()},
        slopes=None if operands.slopes is None else operands.slopes.reshape(-1).astype(jnp.float32),
    )
    return arrays if operands.bias is None else _with_bias(arrays, operands.bias, operands.q.shape[3])


def _varies(bias: jax.Array | None) -> str | None:
    """The dimensions along which a bias `b g r t s` varies: 'queries', 'keys', or 'both'; `None`: there is none."""
    if bias is None:
        return None
    t, s = bias.shape[3:]
    return 'queries' if s == 1 else 'keys' if t == 1 else 'both'


def _with_bias(arrays: Arrays, bias: jax.Array, t: int) -> Arrays:
    b, g, r = bias.shape[:3]
    match _varies(bias):
        case 'queries':
            vector = _vector(jnp.broadcast_to(bias[..., 0], (b, g, r, t)))
            return arrays._replace(queries={**arrays.queries, 'bias': vector})
        case 'keys':
            return arrays._replace(keys={**arrays.keys, 'bias': _vector(bias[..., 0, :])})
        case _:
            return arrays._replace(bias=to_multiples(bias.reshape(b, g * r, *bias.shape[3:]), (1, 1, PAD, PAD)))


def _matrix(array: jax.Array) -> jax.Array:
    """An array `b t h k` in whole tiles."""
    return to_multiples(array, (1, PAD, 1, CHANNELS))


def _vector(array: jax.Array, fill: int = 0) -> jax.Array:
    """An array `b g r t` as a vector `b h t` in whole tiles, padded with `fill`."""
    b, g, r, t = array.shape
    kind = jnp.float32 if jnp.issubdtype(array.dtype, jnp.floating) else jnp.int32
    return to_multiples(array.reshape(b, g * r, t).astype(kind), (1, 1, PAD), fill)


def _rows(vector: jax.Array, operands: Operands) -> jax.Array:
    """A vector `b h t` of the kernels as `b g r t 1`."""
    b, g, r, t, _ = operands.q.shape
    return vector[:, :, :t].reshape(b, g, r, t, 1)


def _output(array: jax.Array, operands: Operands) -> jax.Array:
    """An array `b t h v` of the kernels as `b g r t v`."""
    g, t, v = operands.v.shape[1], operands.q.shape[3], operands.v.shape[3]
    return split_heads(array[:, :t, :, :v], g)


def _gradients(operands: Operands, of_queries: QueryGradients, of_keys: KeyGradients) -> Operands:
    """The gradients of the operands from those that the kernels return."""
    b, g, r, t, k = operands.q.shape
    s, v = operands.v.shape[2:]
    gradients = Operands(
        q=split_heads(of_queries.q[:, :t, :, :k], g),
        k=jnp.moveaxis(of_keys.k[:, :s, :, :k], 1, 2),
        v=jnp.moveaxis(of_keys.v[:, :s, :, :v], 1, 2),
    )
    rows = None if of_queries.sums is None else _rows(of_queries.sums, operands)
    columns = None if of_keys.sums is None else of_keys.sums[:, :, :s].reshape(b, g, r, 1, s)
    if operands.query_forget is not None and rows is not None and columns is not None:
        gradients = gradients.replace(query_forget=rows, key_forget=-columns)
    if operands.slopes is not None:
        slopes = -jnp.sum(of_queries.distances[:, :, :t], axis=(0, 2))
        gradients = gradients.replace(slopes=slopes.reshape(1, g, r, 1, 1))
    if operands.bias is not None:
        match _varies(operands.bias):
            case 'queries':
                every = rows
            case 'keys':
                every = columns
            case _:
                every = of_queries.scores[:, :, :t, :s].reshape(b, g, r, t, s)
        gradients = gradients.replace(bias=_sum_to(every, operands.bias))
    return jax.tree.map(lambda gradient, operand: gradient.astype(operand.dtype), gradients, operands.floating())


def _sum_to(array: Any, like: jax.Array) -> jax.Array:
    """Sums over the dimensions in which `like` has size 1."""
    axes = tuple(axis for axis, size in enumerate(like.shape) if size == 1)
    return jnp.sum(array, axis=axes, keepdims=True)
