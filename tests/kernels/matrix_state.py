"""What cores whose state is a matrix are held to, each alike; `cases` is the module of the named calls of a core."""

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.testing.cores import Core, target_of
from pallas_kernels.cases.drawing import Call
from tests.kernels.conftest import Comparison


def check(comparison: Comparison, core: Core, name: str, call: Call, case: Any, *, implementation: str = 'xla') -> None:
    """Compares with the reference; a result is judged by its own type."""
    # An element of a state adds steps up; an output adds key channels up besides.
    reduction = case.t * max(case.k, case.v)
    everything = reduction * case.b if case.decay == 'h' else reduction
    shared = dict.fromkeys('qkvab', reduction * max(case.heads))
    comparison.check(core, name, call, reduction, implementation=implementation, log_decay=everything, **shared)


def check_kernel(comparison: Comparison, core: Core, implementation: str, name: str, call: Call, case: Any) -> None:
    """As `check`; but what comes of products of 16-bit numbers is as exact as these, whatever type it is kept in."""
    reduction = case.t * max(case.k, case.v) * (case.b if case.decay == 'h' else max(case.heads))
    dtype = call.arrays['q'].dtype
    comparison.check(core, name, call, reduction, implementation=implementation, dtype=dtype)


def check_one_decay_for_all_channels(comparison: Comparison, core: Core, cases: ModuleType) -> None:
    """The vector form, given the same decay for all channels, is the reference of the scalar form."""
    call = cases.call('packed scalar')
    q = call.arrays['q']

    def spread(log_decay, *, implementation, **arguments):
        if implementation == 'xla':
            log_decay = jnp.broadcast_to(log_decay[..., None], (*log_decay.shape, q.shape[3]))
        return core(log_decay=log_decay, implementation=implementation, **arguments)

    check(comparison, spread, 'spread', call, cases.CASES['packed scalar'])


def check_pieces(comparison: Comparison, core: Core, cases: ModuleType, name: str, cuts: Sequence[int]) -> None:
    """Pieces of a sequence, each from the state of the one before, are the whole, forward and backward."""
    pieces = list(zip((0, *cuts), (*cuts, 37), strict=True))

    def in_pieces(state, *, implementation, **inputs):
        if implementation == 'reference':
            return core(state=state, implementation=implementation, **inputs)
        outputs = []
        for start, end in pieces:
            piece = {name: array[:, start:end] for name, array in inputs.items()}
            o, state = core(state=state, implementation='xla', **piece)
            outputs.append(o)
        return jnp.concatenate(outputs, axis=1), state

    check(comparison, in_pieces, name, cases.call(name), cases.CASES[name])


def check_vmap_and_remat(comparison: Comparison, core: Core, cases: ModuleType, name: str) -> None:
    """Rows that are mapped over, with what is inside computed again, are the rows of one call."""

    def mapped(*, implementation, **arguments):
        if implementation == 'reference':
            return core(implementation=implementation, **arguments)

        def row(arguments):
            arguments = {name: array[None] for name, array in arguments.items()}
            return core(implementation='xla', **arguments)

        return jax.tree.map(lambda array: array[:, 0], jax.vmap(jax.checkpoint(row))(arguments))

    check(comparison, mapped, f'mapped {name}', cases.call(name), cases.CASES[name])


def check_reach(core: Core, call: Call, steps: Sequence[int], implementation: str) -> None:
    """An output has gradients for its own document up to its own step, and for nothing else."""
    segments = np.asarray(call.options['segments'])
    per_token = {n: a for n, a in call.arrays.items() if n != 'state' and a.ndim > 1}
    rest = {n: a for n, a in call.arrays.items() if n not in per_token}

    @jax.jit
    def gradients(at):
        def output(inputs):
            o, _ = core(**inputs, **rest, **call.options, implementation=implementation)
            return jnp.sum(jax.lax.dynamic_index_in_dim(o, at, axis=1))

        return jax.grad(output)(per_token)

    tokens = np.arange(segments.shape[1])
    for at in steps:
        seen = (segments == segments[:, at : at + 1]) & (tokens <= at)
        with target_of(implementation):
            found = gradients(at)
        for argument, gradient in found.items():
            size = np.abs(np.asarray(gradient)).max(axis=tuple(range(2, gradient.ndim)))
            assert not size[~seen].any(), f'{argument} at {np.argwhere((size > 0) & ~seen)[0]} reaches step {at}'
            assert argument == 'log_decay' or size[:, at].all(), f'{argument} does not reach step {at}, its own'


def check_no_steps(core: Core, call: Call) -> None:
    """Of no steps the state is the one given, and so is its gradient."""
    inputs = {name: array[:, :0] for name, array in call.arrays.items() if name != 'state'}
    rows, heads, _, channels = call.arrays['state'].shape
    for implementation in ('reference', 'xla', 'mosaic_tpu'):

        def run(state, implementation=implementation):
            return core(**inputs, state=state, implementation=implementation)

        with target_of(implementation):
            (o, final), pull = jax.vjp(run, call.arrays['state'])
        assert o.shape == (rows, 0, heads, channels), implementation
        np.testing.assert_array_equal(final, call.arrays['state'])
        np.testing.assert_array_equal(pull((o, final))[0], final)


def check_types_and_defaults(core: Core, cases: ModuleType, implementation: str) -> None:
    """Outputs have the type of the inputs, states float32; no state is one of zeros."""
    call = cases.call('grouped vector', jnp.bfloat16)
    without = {**call.arrays, 'state': None}
    given = {**call.arrays, 'state': jnp.zeros((1, 4, 8, 8))}
    run = jax.jit(functools.partial(core, implementation=implementation), static_argnames='scale')
    o, state = run(**without)
    assert o.dtype == jnp.bfloat16
    assert state.dtype == jnp.float32
    for one, other in zip((o, state), run(**given, scale=8**-0.5), strict=True):
        np.testing.assert_array_equal(one, other)


def check_memory_is_linear(core: Core, *letters: str) -> None:
    """Four times the steps take about four times the memory of the backward pass; a square would take sixteen.

    `letters` of an array are those of its shape: 'bthk' or 'bth'.
    """

    def bytes_of(t):
        sizes = {'b': 1, 't': t, 'h': 2, 'k': 16}
        inputs = [jax.ShapeDtypeStruct([sizes[letter] for letter in one], jnp.float32) for one in letters]
        loss = jax.grad(lambda *arrays: jnp.sum(core(*arrays)[0] ** 2), argnums=tuple(range(len(letters))))
        return jax.jit(loss).lower(*inputs).compile().memory_analysis().temp_size_in_bytes

    assert bytes_of(32768) < 5 * bytes_of(8192)
