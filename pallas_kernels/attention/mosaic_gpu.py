"""The form of `attention` for Hopper GPUs: one blockwise template, forward and backward, in Pallas Mosaic GPU.

Every block of threads has 128 rows of the matrix of scores and goes over the tiles of columns in which any of them may
be visible (Dao, 2023, arXiv 2307.08691; Shah et al., 2024, arXiv 2407.08608). The output and the gradients of the
queries are sums over keys, those of keys and values sums over queries, in kernels of their own: nothing is added up by
two blocks, and the order of every sum is fixed. Products are of 16-bit factors and summed in float32, like everything
between them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels import mosaic_gpu, tiling
from pallas_kernels.attention import hopper_backward, hopper_forward, vjp
from pallas_kernels.attention.hopper import PAD, Arrays, Call
from pallas_kernels.attention.maps import Statistics
from pallas_kernels.attention.problem import Operands, Rule, join_heads, split_heads
from pallas_kernels.target import Target

CHANNELS = 64
"""Channels are padded to a multiple of it, 128 bytes of shared memory."""

GRID = 65535
"""The most blocks of threads along the second and third axis of a grid."""


@functools.lru_cache
def form(here: Target) -> vjp.Form:
    """Returns the form of `attention` for a device."""
    return vjp.differentiable(functools.partial(_forward, here), functools.partial(_backward, here))


def refusal(here: Target, rule: Rule, operands: Operands) -> str | None:
    """Why a call cannot be served; `None`: it can."""
    b, g, r, t, k = operands.q.shape
    s, v = operands.v.shape[2:]
    types = {str(array.dtype) for array in (operands.q, operands.k, operands.v)}
    if types not in ({'bfloat16'}, {'float16'}):
        return (
            f'q, k and v have type {", ".join(sorted(types))}; expected bfloat16 or float16 alike, since products of '
            'float32 would keep 10 bits'
        )
    if operands.dtype() != jnp.float32:
        return f'the call is computed in {operands.dtype()}; expected float32'
    if 0 in (b, t, s, k, v):
        return f'b={b}, t={t}, s={s}, k={k} and v={v}; expected none of them 0'
    if max(b, g * r) > GRID:
        return f'b={b} and h={g * r}; expected at most {GRID}'
    if _tile(rule, operands) is None:
        return f'k={k} and v={v} at {r} query heads a group; expected at most 256 channels, or fewer heads'
    return mosaic_gpu.capability_refusal(here)


def _forward(here: Target, rule: Rule, operands: Operands, given: Statistics) -> vjp.Kept:
    arrays, tile = _arrays(operands), _tile(rule, operands)
    call = _call(here, rule, operands, axis=0, step=tile.forward)
    if not rule.weights.surveys:
        output, statistics = hopper_forward.weighted_sum(call, arrays, hopper_forward.online(call))
        statistics = tuple(_rows(vector, operands)[..., None] for vector in statistics)
        return vjp.Kept(_output(output, operands), statistics)

    vectors = tuple(_vector(array[..., 0], 1) for array in given)
    weights = (rule.weights.recompute, *((rule.weights.companion,) if rule.weights.has_companion else ()))
    sums = [
        hopper_forward.weighted_sum(call, arrays, hopper_forward.known(call, weigh, vectors))[0] for weigh in weights
    ]
    output, *companion = (_output(array, operands) for array in sums)
    return vjp.Kept(output, given, *companion)


def _backward(here: Target, rule: Rule, operands: Operands, kept: vjp.Kept, doutput: jax.Array) -> Operands:
    arrays, tile = _arrays(operands), _tile(rule, operands)
    delta, companion_delta = vjp.deltas(kept, doutput)
    known = hopper_backward.Known(
        statistics=tuple(_vector(array[..., 0], 1) for array in kept.statistics),
        delta=_vector(delta[..., 0]),
        companion_delta=None if companion_delta is None else _vector(companion_delta[..., 0]),
    )
    doutput = _matrix(join_heads(doutput.astype(operands.v.dtype)))

    call = _call(here, rule, operands, axis=0, step=tile.query_gradients)
    # Every tile of the gradients of a bias has to be written.
    call = dataclasses.replace(call, skips=arrays.bias is None)
    of_queries = hopper_backward.query_gradients(call, arrays, known, doutput)

    call = _call(here, rule, operands, axis=1, step=tile.key_gradients)
    if arrays.bias is not None:
        arrays = arrays._replace(bias=arrays.bias.swapaxes(2, 3))
    turns = ((True, True),) if tile.together else ((True, False), (False, True))
    parts = [
        hopper_backward.key_gradients(call, arrays, known, doutput, of_keys=of_keys, of_values=of_values)
        for of_keys, of_values in turns
    ]
    return _gradients(operands, of_queries, parts[0]._replace(v=parts[-1].v))


def _tile(rule: Rule, operands: Operands) -> tiling.HopperAttentionTile | None:
    k, v = (-(-array.shape[-1] // CHANNELS) * CHANNELS for array in (operands.k, operands.v))
    kinds = (operands.query_forget, operands.query_segments, operands.bias)
    return tiling.attention_hopper(
        k,
        v,
        operands.q.shape[2],
        vectors=sum(array is not None for array in kinds),
        numbers=len(rule.weights.statistics) + 1 + rule.weights.has_companion,
        bias=_bias_kind(operands) == 'matrix',
    )


def _call(here: Target, rule: Rule, operands: Operands, *, axis: int, step: int) -> Call:
    t, s = operands.q.shape[3], operands.k.shape[2]
    hides = operands.query_segments is not None or operands.bias is not None
    return Call(here, rule, t, s, axis, step, hides)


def _bias_kind(operands: Operands) -> str | None:
    """What the bias is given as: 'queries' or 'keys', a vector, or a 'matrix'."""
    if operands.bias is None:
        return None
    t, s = operands.bias.shape[3:]
    return 'queries' if s == 1 else 'keys' if t == 1 else 'matrix'


def _arrays(operands: Operands) -> Arrays:
    """The operands as the kernels take them."""
    queries, keys, bias = {}, {}, None
    if operands.query_forget is not None and operands.key_forget is not None:
        queries['forget'], keys['forget'] = operands.query_forget[..., 0], operands.key_forget[..., 0, :]
    if operands.query_segments is not None and operands.key_segments is not None:
        queries['segments'], keys['segments'] = operands.query_segments[..., 0], operands.key_segments[..., 0, :]
    match _bias_kind(operands):
        case 'queries':
            t = operands.q.shape[3]
            queries['bias'] = jnp.broadcast_to(operands.bias[..., 0], (*operands.bias.shape[:3], t))
        case 'keys':
            keys['bias'] = operands.bias[..., 0, :]
        case 'matrix':
            b, g, r, t, s = operands.bias.shape
            bias = _padded(operands.bias.reshape(b, g * r, t, s), (1, 1, PAD, PAD))
    return Arrays(
        q=_matrix(join_heads(operands.q)),
        k=_matrix(jnp.moveaxis(operands.k, 2, 1)),
        v=_matrix(jnp.moveaxis(operands.v, 2, 1)),
        queries={name: _vector(array) for name, array in queries.items()},
        keys={name: _vector(array) for name, array in keys.items()},
        slopes=None if operands.slopes is None else operands.slopes.reshape(-1).astype(jnp.float32),
        bias=bias,
    )


def _matrix(array: jax.Array) -> jax.Array:
    """An array `b t h k` in whole tiles."""
    return _padded(array, (1, PAD, 1, CHANNELS))


def _vector(array: jax.Array, fill: int = 0) -> jax.Array:
    """An array `b g r t` as a vector `b h t` in whole tiles, `fill` behind its end."""
    b, g, r, t = array.shape
    kind = jnp.float32 if jnp.issubdtype(array.dtype, jnp.floating) else jnp.int32
    return _padded(array.reshape(b, g * r, t).astype(kind), (1, 1, PAD), fill)


def _padded(array: jax.Array, multiples: tuple[int, ...], fill: int = 0) -> jax.Array:
    widths = [(0, -size % multiple) for size, multiple in zip(array.shape, multiples, strict=True)]
    return jnp.pad(array, widths, constant_values=fill)


def _rows(vector: jax.Array, operands: Operands) -> jax.Array:
    """A vector `b h t` of the kernels as `b g r t`."""
    b, g, r, t, _ = operands.q.shape
    return vector[:, :, :t].reshape(b, g, r, t)


def _output(array: jax.Array, operands: Operands) -> jax.Array:
    """An array `b t h v` of the kernels as `b g r t v`."""
    g, t, v = operands.v.shape[1], operands.q.shape[3], operands.v.shape[3]
    return split_heads(array[:, :t, :, :v], g)


def _gradients(
    operands: Operands, of_queries: hopper_backward.QueryGradients, of_keys: hopper_backward.KeyGradients
) -> Operands:
    """The gradients of the operands from those that the kernels return."""
    b, g, r, t, k = operands.q.shape
    s, v = operands.v.shape[2:]
    gradients = Operands(
        q=split_heads(of_queries.q[:, :t, :, :k], g),
        k=jnp.moveaxis(of_keys.k[:, :s, :, :k], 1, 2),
        v=jnp.moveaxis(of_keys.v[:, :s, :, :v], 1, 2),
    )
    rows = None if of_queries.sums is None else of_queries.sums[:, :, :t].reshape(b, g, r, t, 1)
    columns = None if of_keys.sums is None else of_keys.sums[:, :, :s].reshape(b, g, r, 1, s)
    if operands.query_forget is not None and rows is not None and columns is not None:
        gradients = gradients.replace(query_forget=rows, key_forget=-columns)
    if operands.slopes is not None:
        slopes = -jnp.sum(of_queries.distances[:, :, :t], axis=(0, 2))
        gradients = gradients.replace(slopes=slopes.reshape(1, g, r, 1, 1))
    match _bias_kind(operands):
        case 'queries':
            gradients = gradients.replace(bias=_sum_to(rows, operands.bias))
        case 'keys':
            gradients = gradients.replace(bias=_sum_to(columns, operands.bias))
        case 'matrix':
            matrix = of_queries.scores[:, :, :t, :s].reshape(b, g, r, t, s)
            gradients = gradients.replace(bias=_sum_to(matrix, operands.bias))
    return jax.tree.map(lambda gradient, operand: gradient.astype(operand.dtype), gradients, operands.floating())


def _sum_to(array: jax.Array, like: jax.Array) -> jax.Array:
    """Sums over the dimensions in which `like` has size 1."""
    axes = tuple(axis for axis, size in enumerate(like.shape) if size == 1)
    return jnp.sum(array, axis=axes, keepdims=True)
