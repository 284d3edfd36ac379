"""Every form of every core under the transformations of JAX: each gives what the plain call gives."""

import contextlib
import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pallas_kernels
from attnlab.testing.tolerances import assert_close
from pallas_kernels import dispatch, target

SHARED = ('A', 'D', 'bias', 'embedding', 'kernel', 'taps')
"""The arguments that all rows of a batch share."""

CASES = {
    'softmax': 'prime',
    'softmax_topk': 'prime',
    'attention': 'prime',
    'linear_scan': 'prime',
    'long_conv': 'prime',
    'selective_scan': 'prime',
    'linear_attention': 'scalar',
    'delta_rule': 'scalar',
    'diagonal_low_rank': 'vector',
    'cross_entropy': 'prime',
    'short_conv': 'packed',
}
HEADS = {'attention': 2, 'linear_attention': 2, 'delta_rule': 2, 'diagonal_low_rank': 2}
"""The axis along which heads run, in the cores that have them; in a state it is one."""

PORTABLE = [
    pytest.param((core, 'xla'), id=f'{core} xla', marks=pytest.mark.slow if core == 'diagonal_low_rank' else ())
    for core in CASES
]
"""The forms that run anywhere; what takes five seconds to compile is nightly."""
KERNELS = [
    pytest.param((core, form), id=f'{core} {form}')
    for core in CASES
    for form in dispatch.PLATFORM
    if importlib.util.find_spec(f'pallas_kernels.{core}.{form}')
]
INTERPRETED = [pytest.param(*case.values, id=case.id, marks=pytest.mark.slow) for case in KERNELS]


def over_each(forms):
    """Every form over batch and over heads: one of the two every time, in turn, the other nightly."""
    return [
        pytest.param(
            *form.values, over, id=f'{form.id}-{over}', marks=form.marks if place == turn % 2 else pytest.mark.slow
        )
        for turn, form in enumerate(forms)
        for place, over in enumerate(('batch', 'heads'))
    ]


def parts(core, implementation):
    """A core with its implementation named, and its arguments."""
    # The matrix units of GPUs take 16-bit numbers.
    dtype = jnp.bfloat16 if implementation == 'mosaic_gpu' else jnp.float32
    call = importlib.import_module(f'pallas_kernels.cases.{core}').call(CASES[core], dtype)
    options = {name: value for name, value in call.options.items() if not isinstance(value, jax.Array)}
    arrays = call.arrays | {name: value for name, value in call.options.items() if name not in options}
    return functools.partial(getattr(pallas_kernels, core), implementation=implementation, **options), arrays


@pytest.fixture
def form(request):
    """A core, its function, its arguments; kernels are interpreted."""
    core, implementation = request.param
    interpreted = contextlib.nullcontext()
    if implementation in dispatch.PLATFORM:
        interpreted = target.compiling_for(target.interpreted(implementation))
    with interpreted:
        yield core, *parts(core, implementation)


def with_gradients(function, arrays):
    """The outputs of a call and the gradients along themselves, of its floating-point arguments."""
    floating = {name: array for name, array in arrays.items() if jnp.issubdtype(array.dtype, jnp.inexact)}
    rest = {name: array for name, array in arrays.items() if name not in floating}

    def outputs(floating):
        leaves = jax.tree.leaves(function(**floating, **rest))
        return [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]

    found, pull = jax.vjp(outputs, floating)
    return found, pull(found)[0]


def check(actual, expected):
    actual, expected = jax.tree.leaves_with_path(actual), jax.tree.leaves(expected)
    assert len(actual) == len(expected)
    for (path, one), other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype
        assert_close(one, other, dtype=one.dtype, reduction=64, what=jax.tree_util.keystr(path))


@pytest.mark.parametrize('form', [*PORTABLE, *INTERPRETED], indirect=True)
def test_two_runs_give_the_same_bits(form):
    _, function, arrays = form
    run = jax.jit(functools.partial(with_gradients, function))
    for one, other in zip(jax.tree.leaves(run(arrays)), jax.tree.leaves(run(arrays)), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize('form', [*PORTABLE, *INTERPRETED], indirect=True)
def test_vmap(form):
    _, function, arrays = form
    run = functools.partial(with_gradients, function)
    twice = {name: jnp.stack([array, array[::-1]]) for name, array in arrays.items() if name not in SHARED}
    shared = {name: array for name, array in arrays.items() if name in SHARED}
    together = jax.jit(jax.vmap(lambda twice: run(twice | shared)))(twice)
    for place in (0, 1):
        alone = jax.jit(run)({name: array[place] for name, array in twice.items()} | shared)
        check(jax.tree.map(lambda array, place=place: array[place], together), alone)


@pytest.mark.parametrize('form', PORTABLE, indirect=True)
def test_remat_inside_scan(form):
    _, function, arrays = form
    check(
        jax.jit(functools.partial(with_gradients, scanned(function)))(arrays),
        jax.jit(functools.partial(with_gradients, function))(arrays),
    )


def scanned(function):
    """The function twice in a scan, its insides computed again for the backward pass."""

    def twice(**arrays):
        def step(carry, _):
            return carry, jax.checkpoint(function)(**arrays)

        return jax.tree.map(lambda array: array[1], jax.lax.scan(step, 0, length=2)[1])

    return twice


@pytest.mark.parametrize(('form', 'over'), over_each(PORTABLE), indirect=['form'])
def test_shard_map(form, over):
    core, function, arrays = form
    arrays = divisible(core, arrays, over)
    check(
        jax.jit(functools.partial(with_gradients, parted(core, function, over)))(arrays),
        jax.jit(functools.partial(with_gradients, function))(arrays),
    )


@pytest.mark.parametrize(('form', 'over'), over_each(KERNELS))
def test_kernels_lower_inside_all_of_them(form, over):
    # Interpreters do not know remat; that of GPUs takes several devices only as in tests/train/divided.py.
    core, implementation = form
    platform, here = {'mosaic_gpu': ('cuda', target.H100), 'mosaic_tpu': ('tpu', target.TPU_V5E)}[implementation]
    function, arrays = parts(core, implementation)
    arrays = divisible(core, arrays, over)
    run = functools.partial(with_gradients, parted(core, scanned(function), over))
    with target.compiling_for(here):
        lowered = jax.jit(run).trace(arrays).lower(lowering_platforms=(platform,)).as_text()
    assert {'cuda': 'mosaic_gpu', 'tpu': 'tpu_custom_call'}[platform] in lowered


def divisible(core, arrays, over):
    """Arguments whose batch, or whose heads, two devices can share."""
    if over == 'batch':
        return {name: array if name in SHARED else array[: len(array) // 2 * 2] for name, array in arrays.items()}
    if core not in HEADS:
        pytest.skip('a core without heads')
    # Every head with keys of its own, so that heads can be parted.
    most = max(array.shape[_heads(core, name)] for name, array in arrays.items())
    repeats = {name: most // array.shape[_heads(core, name)] for name, array in arrays.items()}
    return {name: jnp.repeat(array, repeats[name], _heads(core, name)) for name, array in arrays.items()}


def parted(core, function, over):
    """The function on two devices, each of which has half of the batch or of the heads."""

    def half(name):
        if over == 'batch':
            return P() if name in SHARED else P('part')
        return P(*[None] * _heads(core, name), 'part')

    def on_two(**arrays):
        def part(arrays):
            found = function(**arrays)
            return found if isinstance(found, tuple) else (found,)

        mesh = jax.make_mesh((2,), ('part',), axis_types=(jax.sharding.AxisType.Auto,))
        alone = ('attention', 'long_conv', 'short_conv', 'softmax', 'cross_entropy')
        names = ('o',) if core in alone else ('o', 'state')
        # Kernels do not say along which axes of the mesh their results vary.
        return jax.shard_map(
            part,
            mesh=mesh,
            in_specs=({name: half(name) for name in arrays},),
            out_specs=tuple(half(name) for name in names),
            check_vma=False,
        )(arrays)

    return on_two


def _heads(core, name):
    return 1 if name == 'state' else HEADS[core]


NOTHING = {
    'softmax': {'x': 'b t 5'},
    'softmax_topk': {'x': 'b t 5'},
    'attention': {'q': 'b t 4 8', 'k': 'b t 2 8', 'v': 'b t 2 8'},
    'linear_scan': {'x': 'b t 5', 'decay': 'b t 5', 'state': 'b 5'},
    'long_conv': {'x': 'b t 5', 'kernel': '3 5'},
    'short_conv': {'x': 'b t 5', 'taps': '3 5', 'bias': '5'},
    'selective_scan': {
        'x': 'b t 5',
        'dt': 'b t 5',
        'A': '5 4',
        'B': 'b t 4',
        'C': 'b t 4',
        'D': '5',
        'state': 'b 5 4',
    },
    'linear_attention': {
        'q': 'b t 4 8',
        'k': 'b t 4 8',
        'v': 'b t 4 8',
        'log_decay': 'b t 4 8',
        'state': 'b 4 8 8',
    },
    'linear_attention_rows': {
        'q': 'b t 4 8',
        'k': 'b t 4 8',
        'v': 'b t 4 8',
        'log_decay': 'b t 4 8',
        'state': 'b 4 8 8',
    },
    'linear_attention_sums': {'q': 'b t 4 8', 'k': 'b t 2 8', 'log_decay': 'b t 4', 'state': 'b 4 8'},
    'delta_rule': {
        'q': 'b t 4 8',
        'k': 'b t 4 8',
        'v': 'b t 4 8',
        'beta': 'b t 4',
        'log_decay': 'b t 4',
        'state': 'b 4 8 8',
    },
    'diagonal_low_rank': {
        'q': 'b t 4 8',
        'k': 'b t 4 8',
        'v': 'b t 4 8',
        'a': 'b t 4 8',
        'b': 'b t 4 8',
        'state': 'b 4 8 8',
    },
    'cross_entropy': {'hidden': 'n 8', 'embedding': '5 8'},
}
NOTHING |= {
    f'{core} by channel': NOTHING[core] | {'log_decay': 'b t 4 8'} for core in ('delta_rule', 'diagonal_low_rank')
}
"""The arguments of cores of b rows of t tokens, one of which is none."""

OPTIONS = {'softmax_topk': {'k': 2}, 'cross_entropy': {'labels': np.zeros(0, np.int32)}}
WITHOUT_DOCUMENTS = ('softmax', 'softmax_topk', 'cross_entropy')


@pytest.mark.parametrize('packed', [False, True], ids=['', 'packed'])
@pytest.mark.parametrize(('b', 't'), [(2, 0), (0, 3)], ids=['no tokens', 'no rows'])
@pytest.mark.parametrize('core', NOTHING)
def test_nothing_at_all(core, b, t, packed):
    if packed and core in WITHOUT_DOCUMENTS:
        pytest.skip('a core without documents')
    options = OPTIONS.get(core, {}) | ({'segments': jnp.zeros((b, t), jnp.int32)} if packed else {})
    sizes = {'b': b, 't': t, 'n': b * t}
    given = {
        name: tuple(sizes[size] if size in sizes else int(size) for size in letters.split())
        for name, letters in NOTHING[core].items()
    }
    for here, dtype in ((target.current(), jnp.float32), (target.H100, jnp.bfloat16), (target.TPU_V5E, jnp.bfloat16)):
        for implementation in ('reference', 'xla', None):
            function = functools.partial(
                getattr(pallas_kernels, core.split()[0]), implementation=implementation, **options
            )
            arrays = {name: jnp.ones(shape, dtype) for name, shape in given.items()}
            run = functools.partial(with_gradients, function)
            with target.compiling_for(here):
                shapes = jax.eval_shape(run, arrays)
            assert shapes[0][0].shape[:2] == ((0,) if core == 'cross_entropy' else (b, t))
            assert {name: gradient.shape for name, gradient in shapes[1].items()} == given
            if here == target.current() and implementation is not None:
                (_, *states), gradients = run(arrays)
                for name, gradient in gradients.items():
                    np.testing.assert_array_equal(gradient, 1.0 if name == 'state' else 0.0, strict=False)
                for state in states:
                    np.testing.assert_array_equal(state, 1.0)
