"""Calls of cores whose work is divided over virtual devices, compared with the same calls on one.

On more devices than the tests have, in a process of its own: `python -m tests.functional.divided data=2 tensor=4`; with
`mosaic_tpu` as the first word the calls in `KERNELS`, and in `AROUND` where time is divided, by interpreted kernels of
that form, with `mosaic_gpu` those in `AROUND` alone.
"""

import contextlib
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from attnlab.functional import cores
from attnlab.testing.tolerances import assert_close
from pallas_kernels import (
    PowerSoftmax,
    Relu,
    ScalableSoftmax,
    SelfAdjustSoftmax,
    Sigmoid,
    Softmax,
    Softpick,
    StableMax,
    TaylorSoftmax,
    dispatch,
    target,
)
from tests.functional.interpreter import let_devices_run_apart

if __name__ == '__main__':
    WORDS = sys.argv[1:]
    FORM = WORDS.pop(0) if WORDS[0] in dispatch.PLATFORM else None
    SIZES = {axis: int(size) for axis, size in (word.split('=') for word in WORDS)}
    jax.config.update('jax_num_cpu_devices', math.prod(SIZES.values()))
    jax.config.update('jax_default_matmul_precision', 'highest')

B, T, H, K, V, D, N = 4, 16, 4, 8, 4, 12, 3


class Call(NamedTuple):
    """A call of a core: what it is differentiated by, and what it is not."""

    core: Callable[..., Any]
    arrays: dict[str, jax.Array]
    options: dict[str, Any] = {}  # noqa: RUF012


def noise(name: str, *shape: int) -> jax.Array:
    """Normal numbers that the name alone decides on."""
    return jnp.asarray(np.random.default_rng(list(name.encode())).standard_normal(shape), jnp.float32)


def fading(name: str, *shape: int) -> jax.Array:
    """Logarithms of decays."""
    return -jax.nn.softplus(noise(name, *shape))


DOCUMENTS = jnp.asarray(np.sort(np.random.default_rng(0).integers(1, 4, (B, T))), jnp.int32)
ONE_KEY = {'q': noise('q', B, T, H, K), 'k': noise('k', B, T, 1, K), 'v': noise('v', B, T, 1, V)}
HEADS = {'q': noise('q', B, T, H, K), 'k': noise('k', B, T, 2, K) / 3, 'v': noise('v', B, T, 1, V)}
SELECTIVE = {
    'x': noise('x', B, T, D),
    'dt': jax.nn.softplus(noise('dt', B, T, D)),
    'A': fading('A', D, N),
    'B': noise('B', B, T, N),
    'C': noise('C', B, T, N),
    'D': noise('D', D),
}
LOSS = {'hidden': noise('hidden', B, T, 6), 'embedding': noise('embedding', D, 6)}
LABELS = jnp.asarray(np.random.default_rng(0).integers(-D, D, (B, T)), jnp.int32)

CALLS = {
    'attention': Call(cores.attention, ONE_KEY, {'segments': DOCUMENTS, 'implementation': 'xla'}),
    'attention, every term': Call(
        cores.attention,
        {
            'q': noise('q', B, T, H, K),
            'k': noise('k', B, T, 2, K),
            'v': noise('v', B, T, 2, V),
            'bias': noise('bias', 1, H, T, 1),
            'slopes': jnp.abs(noise('slopes', H)),
            'temperature': noise('temperature', B, T, H),
            'sink_scores': noise('sink', H),
        },
        {'segments': DOCUMENTS, 'window': 7},
    ),
    'attention that forgets': Call(
        cores.attention,
        ONE_KEY | {'log_forget': fading('forget', B, T, H), 'temperature': noise('temperature', H)},
        {'weights': ScalableSoftmax()},
    ),
    'attention to other keys': Call(
        cores.attention,
        ONE_KEY | {'q': noise('q', B, 3, H, K)},
        {'segments': (DOCUMENTS[:, :3], DOCUMENTS), 'causal': False},
    ),
    'linear scan': Call(
        cores.linear_scan,
        {'x': noise('x', B, T, D), 'decay': noise('decay', B, T, D), 'state': noise('state', B, D)},
        {'segments': DOCUMENTS},
    ),
    'linear scan, backwards and constant': Call(
        cores.linear_scan,
        {'x': noise('x', B, T, D), 'decay': noise('decay', D), 'state': noise('state', B, D)},
        {'reverse': True},
    ),
    'long convolution': Call(
        cores.long_conv, {'x': noise('x', B, T, D), 'kernel': noise('kernel', T, D)}, {'segments': DOCUMENTS}
    ),
    'long convolution of few channels': Call(
        cores.long_conv, {'x': noise('x', B, T, 3), 'kernel': noise('kernel', 5, 3)}, {}
    ),
    'short convolution': Call(
        cores.short_conv,
        {'x': noise('x', B, T, D), 'taps': noise('taps', 4, D), 'bias': noise('bias', D)},
        {'segments': DOCUMENTS, 'activation': 'silu'},
    ),
    'selective scan': Call(
        cores.selective_scan, SELECTIVE | {'state': noise('state', B, D, N)}, {'segments': DOCUMENTS}
    ),
    'linear attention': Call(cores.linear_attention, HEADS),
    'linear attention, scalar': Call(
        cores.linear_attention,
        HEADS | {'log_decay': fading('decay', B, T, H), 'state': noise('state', B, H, K, V)},
        {'segments': DOCUMENTS},
    ),
    'sums of linear attention': Call(
        cores.linear_attention_sums,
        {'q': HEADS['q'], 'k': HEADS['k'], 'log_decay': fading('decay', B, T, H), 'state': noise('state', B, H, K)},
        {'segments': DOCUMENTS},
    ),
    'rows of linear attention': Call(
        cores.linear_attention_rows,
        {
            'q': noise('q', B, T, H, V),
            'k': noise('k', B, T, H, K),
            'v': noise('v', B, T, H, V),
            'log_decay': fading('decay', B, T, H, K),
            'state': noise('state', B, H, K, V),
        },
        {'segments': DOCUMENTS},
    ),
    'linear attention, constant': Call(cores.linear_attention, HEADS | {'log_decay': fading('decay', H)}),
    'linear attention, vector': Call(
        cores.linear_attention, HEADS | {'log_decay': fading('decay', B, T, H, K)}, {'segments': DOCUMENTS}
    ),
    'delta rule': Call(
        cores.delta_rule,
        HEADS
        | {
            'beta': jax.nn.sigmoid(noise('beta', B, T, H)),
            'log_decay': fading('decay', B, T, H, K),
            'state': noise('state', B, H, K, V),
        },
        {'segments': DOCUMENTS},
    ),
    'delta rule with erase keys': Call(
        cores.delta_rule,
        HEADS | {'beta': jax.nn.sigmoid(noise('beta', B, T, H)), 'erase': noise('erase', B, T, 2, K) / 3},
        {'segments': DOCUMENTS},
    ),
    'diagonal plus low rank': Call(
        cores.diagonal_low_rank,
        HEADS
        | {
            'a': noise('a', B, T, 2, K) / 3,
            'b': noise('b', B, T, 2, K) / 3,
            'log_decay': fading('decay', B, T, H, K),
            'state': noise('state', B, H, K, V),
        },
        {'segments': DOCUMENTS},
    ),
    'cross entropy': Call(cores.cross_entropy, LOSS, {'labels': LABELS}),
    'cross entropy, every term': Call(cores.cross_entropy, LOSS, {'labels': LABELS, 'z_loss': 0.1, 'soft_cap': 2.0}),
    'short convolution past the device before': Call(
        cores.short_conv, {'x': noise('x', B, T, D), 'taps': noise('taps', 7, D)}, {'activation': 'silu'}
    ),
}

ON_EVERY_DEVICE = {
    'attention to chosen blocks': Call(
        cores.attention,
        {'q': noise('q', B, T, H, K), 'k': noise('k', B, T, 2, K), 'v': noise('v', B, T, 2, V)},
        {
            'segments': DOCUMENTS,
            'chosen': jnp.asarray(np.random.default_rng(1).random((B, T, 2, 6)) < 0.5),
            'block': 3,
        },
    )
}
"""Calls whose time is not divided."""

KERNELS = (
    'attention, every term',
    'linear scan',
    'selective scan',
    'linear attention, scalar',
    'linear attention, vector',
    'delta rule',
    'delta rule with erase keys',
    'diagonal plus low rank',
    'cross entropy',
)
"""A call of every core that has kernels and is divided over devices, and of what one does by kernels of its own."""

GROUPS = {'q': noise('q', B, T, H, K), 'k': noise('k', B, T, 2, K), 'v': noise('v', B, T, 2, V)}

RINGS = {
    'a ring, every term': Call(
        cores.attention,
        GROUPS
        | {
            'slopes': jnp.abs(noise('slopes', H)),
            'temperature': noise('temperature', B, T, H),
            'sink_scores': noise('sink', H),
            'log_forget': fading('forget', B, T, H),
        },
        {'segments': DOCUMENTS, 'weights': Softmax(soft_cap=3.0)},
    ),
    'few keys': Call(
        cores.attention,
        ONE_KEY | {'slopes': jnp.abs(noise('slopes', H)), 'sink_scores': noise('sink', H)},
        {'segments': DOCUMENTS, 'weights': Softmax(soft_cap=3.0)},
    ),
    'few keys, to both sides': Call(cores.attention, ONE_KEY, {'segments': DOCUMENTS, 'causal': False}),
    'a ring to both sides': Call(cores.attention, GROUPS, {'segments': DOCUMENTS, 'causal': False}),
    'a window over several devices': Call(
        cores.attention, GROUPS | {'log_forget': fading('forget', B, T, H)}, {'segments': DOCUMENTS, 'window': 4}
    ),
    'a ring that forgets, of a document whose number comes again': Call(
        cores.attention, GROUPS | {'log_forget': fading('forget', B, T, H)}, {'segments': DOCUMENTS % 2}
    ),
    'a window that forgets, of a document whose number comes again': Call(
        cores.attention,
        GROUPS | {'log_forget': fading('forget', B, T, H)},
        {'segments': DOCUMENTS % 2, 'window': T - 1},
    ),
    'a ring that forgets, behind large sums': Call(
        cores.attention,
        GROUPS | {'log_forget': fading('forget', B, T, H).at[:, 2].set(-3e5)},
        {'segments': DOCUMENTS},
    ),
    'a ring of a counting softmax': Call(
        cores.attention, GROUPS, {'weights': ScalableSoftmax(), 'segments': DOCUMENTS}
    ),
} | {
    f'a ring of {type(weights).__name__}': Call(cores.attention, GROUPS, {'weights': weights, 'segments': DOCUMENTS})
    for weights in (
        PowerSoftmax(epsilon=0.1),
        Relu(),
        SelfAdjustSoftmax(),
        Sigmoid(bias=-2.0),
        Softpick(epsilon=0.1),
        StableMax(),
        TaylorSoftmax(),
    )
}
"""Attention with what only divided time treats in ways of its own."""

AROUND = ('a ring, every term', 'a ring of Softpick', 'a ring to both sides')
"""Calls whose keys go around in a ring, in zig-zag but for the last: what kernels read of parts of them is combined."""


def mesh(**sizes: int) -> Mesh:
    """The mesh with these sizes, other axes being of one device."""
    axes = {'data': 1, 'fsdp': 1, 'tensor': 1, 'sequence': 1} | sizes
    devices = np.array(jax.devices()[: math.prod(axes.values())]).reshape(*axes.values())
    return Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * 4)


def compiled(function: Callable[..., Any], devices: Mesh | None, *, whole: bool = False) -> Callable[..., Any]:
    """The function compiled for `devices`, all of which are given whole arguments and, if asked, have whole results."""
    if devices is None:
        return jax.jit(function)
    everywhere = NamedSharding(devices, PartitionSpec())
    results = {'out_shardings': everywhere} if whole else {}
    return jax.jit(cores.on(devices, function), in_shardings=everywhere, **results)


def evaluate(call: Call, devices: Mesh | None, form: str | None = None) -> dict[str, np.ndarray]:
    """Outputs and gradients, along cotangents that are always the same ones; by interpreted kernels of a form."""
    integers = {name: option for name, option in call.options.items() if jax.tree.leaves(option)}
    integers = {name: value for name, value in integers.items() if hasattr(jax.tree.leaves(value)[0], 'shape')}
    options = {name: option for name, option in call.options.items() if name not in integers}
    if form is not None:
        options['implementation'] = form

    def run(arrays: dict[str, jax.Array], integers: dict[str, Any]) -> Any:
        outputs, pull = jax.vjp(lambda arrays: call.core(**arrays, **integers, **options), arrays)
        leaves = enumerate(jax.tree.leaves(outputs))
        cotangents = [noise(f'cotangent {place}', *y.shape).astype(y.dtype) for place, y in leaves]
        return outputs, pull(jax.tree.unflatten(jax.tree.structure(outputs), cotangents))[0]

    with contextlib.nullcontext() if form is None else target.compiling_for(target.interpreted(form)):
        outputs, gradients = compiled(run, devices, whole=True)(call.arrays, integers)
    named = {f'output {place}': y for place, y in enumerate(jax.tree.leaves(outputs))}
    named |= {f'gradient of {name}': gradient for name, gradient in gradients.items()}
    return {name: np.asarray(array) for name, array in named.items()}


def for_matrix_units(call: Call) -> Call:
    """A call of attention in one row, as the interpreter of GPU kernels is slow, and in 16 bits, as they multiply."""
    options = call.options | {'segments': call.options['segments'][:1]}
    arrays = {name: array[:1] if array.ndim > 1 else array for name, array in call.arrays.items()}
    return call._replace(arrays=arrays | {x: arrays[x].astype(jnp.bfloat16) for x in 'qkv'}, options=options)


def check(name: str, devices: Mesh, form: str | None = None) -> None:
    """Compares one call on `devices`, by interpreted kernels of a form, with the same numbers in float32 on one."""
    call = (CALLS | RINGS | ON_EVERY_DEVICE)[name]
    call = for_matrix_units(call) if form == 'mosaic_gpu' else call
    wide = call._replace(arrays={name: array.astype(jnp.float32) for name, array in call.arrays.items()})
    alone, divided = evaluate(wide, None), evaluate(call, devices, form)
    assert alone.keys() == divided.keys()
    dtype = next(iter(call.arrays.values())).dtype
    for what, array in divided.items():
        assert_close(array, alone[what], dtype=dtype, reduction=B * T * D, what=f'{name}: {what}')


if __name__ == '__main__':
    if FORM is not None:
        let_devices_run_apart()
    NAMES = {None: (*CALLS, *(RINGS if 'sequence' in SIZES else ())), 'mosaic_gpu': AROUND}
    for name in NAMES.get(FORM, (*KERNELS, *(AROUND if 'sequence' in SIZES else ()))):
        check(name, mesh(**SIZES), FORM)
