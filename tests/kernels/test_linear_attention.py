import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import linear_attention, tiling
from pallas_kernels.cases import linear_attention as cases

NARROW = ('shared queries and keys', 'packed scalar', 'packed vector', 'strong vector')
SMALL = ('two', 'threes and twos', 'packed constant')
GROUPED = ('no decay', 'constant', 'scalar', 'grouped vector', 'packed scalar', 'sudden vector')
DOCUMENTS = ('packed', 'packed constant', 'packed scalar', 'sudden vector')


def by_hand(q, k, v, state, log_decay=None, segments=None):
    b, t, h = *q.shape[:2], state.shape[1]
    S, o = state.copy(), np.zeros((b, t, h, v.shape[3]))
    for row in range(b):
        for i in range(t):
            new = i > 0 and segments is not None and segments[row, i] != segments[row, i - 1]
            for head in range(h):
                own = {'q': q[row, i, head * q.shape[2] // h], 'k': k[row, i, head * k.shape[2] // h]}
                if new:
                    S[row, head] = 0
                elif log_decay is not None:
                    decay = log_decay[head] if log_decay.ndim == 1 else log_decay[row, i, head]
                    S[row, head] *= np.exp(np.broadcast_to(decay, own['k'].shape))[:, None]
                S[row, head] += np.outer(own['k'], v[row, i, head * v.shape[2] // h])
                o[row, i, head] = S[row, head].T @ own['q'] / np.sqrt(q.shape[3])
    return o, S


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles so small that a short call has several groups of several chunks."""
    monkeypatch.setattr(tiling, 'linear_attention', lambda *_, vector: tiling.ChunkTile(steps=8, group=16))


def check(comparison, core, name, call, case, implementation='xla'):
    h = max(case.heads)
    # An element of a state adds steps up; an output adds key channels up besides.
    reduction = case.t * max(case.k, case.v)
    everything = reduction * case.b if case.decay == 'h' else reduction
    shared = reduction * h
    comparison.check(
        core, name, call, reduction, implementation=implementation, q=shared, k=shared, v=shared, log_decay=everything
    )


@pytest.mark.parametrize('name', cases.CASES)
def test_reference_is_the_definition(name, in_double):
    with jax.enable_x64(True):
        call = in_double(cases.call(name))
        actual = jax.jit(functools.partial(linear_attention, **call.options, implementation='reference'))(**call.arrays)
        numbers = {name: np.asarray(array) for name, array in {**call.arrays, **call.options}.items()}
        for one, other in zip(actual, by_hand(**numbers), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('implementation', ['reference', 'xla'])
def test_numbers_worked_out_by_hand(implementation):
    def steps(*rows):
        return jnp.array(rows, jnp.float32)[None, :, None, :]

    half = jnp.log(jnp.array([[[[1.0, 0.5]], [[0.5, 0.25]]]]))
    o, state = linear_attention(
        steps([1, 2], [1, 1]), steps([1, 0], [3, 1]), steps([10], [1]), half, scale=2.0,
        state=jnp.array([[[[4.0], [8.0]]]]), implementation=implementation,
    )  # fmt: skip
    # S_1 = (4 + 1 * 10, 8 / 2 + 0 * 10) = (14, 4), read by (1, 2): 22.
    # S_2 = (14 / 2 + 3 * 1, 4 / 4 + 1 * 1) = (10, 2), read by (1, 1): 12.
    np.testing.assert_allclose(o[0, :, 0, 0], [44, 24], rtol=1e-6)
    np.testing.assert_allclose(state[0, 0, :, 0], [10, 2], rtol=1e-6)


@pytest.mark.parametrize('name', SMALL)
def test_gradients_of_the_reference_are_differences(name, differences):
    differences(linear_attention, cases.call(name))


@pytest.mark.parametrize(
    ('name', 'dtype'),
    [(name, jnp.float32) for name in cases.CASES] + [(name, jnp.bfloat16) for name in NARROW],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_xla_is_the_reference(name, dtype, comparison):
    check(comparison, linear_attention, name, cases.call(name, dtype), cases.CASES[name])


@pytest.mark.parametrize('name', GROUPED)
def test_groups_of_chunks_are_the_reference(name, small_tiles, comparison):
    check(comparison, linear_attention, name, cases.call(name), cases.CASES[name])


def test_the_vector_form_with_one_decay_for_all_channels_is_the_scalar_reference(comparison):
    call = cases.call('packed scalar')
    q = call.arrays['q']

    def spread(log_decay, *, implementation, **arguments):
        if implementation == 'xla':
            log_decay = jnp.broadcast_to(log_decay[..., None], (*log_decay.shape, q.shape[3]))
        return linear_attention(log_decay=log_decay, implementation=implementation, **arguments)

    check(comparison, spread, 'spread', call, cases.CASES['packed scalar'])


@pytest.mark.parametrize(('decay', 'cuts'), [('scalar', (1,)), ('scalar', (5, 32)), ('vector', (32,))])
def test_pieces_are_the_whole_forward_and_backward(decay, cuts, comparison):
    pieces = list(zip((0, *cuts), (*cuts, 37), strict=True))

    def in_pieces(state, *, implementation, **inputs):
        if implementation == 'reference':
            return linear_attention(state=state, implementation=implementation, **inputs)
        outputs = []
        for start, end in pieces:
            piece = {name: array[:, start:end] for name, array in inputs.items()}
            o, state = linear_attention(state=state, implementation='xla', **piece)
            outputs.append(o)
        return jnp.concatenate(outputs, axis=1), state

    check(comparison, in_pieces, decay, cases.call(decay), cases.CASES[decay])


@pytest.mark.parametrize('name', ['scalar', 'sudden vector'])
def test_under_vmap_and_remat(name, comparison):
    call = cases.call(name)

    def mapped(*, implementation, **arguments):
        if implementation == 'reference':
            return linear_attention(implementation=implementation, **arguments)

        def row(arguments):
            arguments = {name: array[None] for name, array in arguments.items()}
            return linear_attention(implementation='xla', **arguments)

        return jax.tree.map(lambda array: array[:, 0], jax.vmap(jax.checkpoint(row))(arguments))

    check(comparison, mapped, f'mapped {name}', call, cases.CASES[name])


@pytest.mark.parametrize('name', DOCUMENTS)
def test_nothing_passes_between_documents_or_from_the_future(name):
    call = cases.call(name)
    segments = np.asarray(call.options['segments'])
    per_token = {n: a for n, a in call.arrays.items() if n != 'state' and a.ndim > 1}
    rest = {n: a for n, a in call.arrays.items() if n not in per_token}

    @jax.jit
    def gradients(at):
        def output(inputs):
            o, _ = linear_attention(**inputs, **rest, **call.options, implementation='xla')
            return jnp.sum(jax.lax.dynamic_index_in_dim(o, at, axis=1))

        return jax.grad(output)(per_token)

    tokens = np.arange(segments.shape[1])
    for at in (4, 31, 32, 40, 66):
        seen = (segments == segments[:, at : at + 1]) & (tokens <= at)
        for argument, gradient in gradients(at).items():
            size = np.abs(np.asarray(gradient)).max(axis=tuple(range(2, gradient.ndim)))
            assert not size[~seen].any(), f'{argument} at {np.argwhere((size > 0) & ~seen)[0]} reaches step {at}'
            assert argument == 'log_decay' or size[:, at].all()


@pytest.mark.parametrize('decay', [None, 'scalar', 'vector'])
def test_no_steps_at_all(decay):
    call = cases.call('no decay' if decay is None else decay)
    inputs = {name: array[:, :0] for name, array in call.arrays.items() if name != 'state'}
    for implementation in ('reference', 'xla'):

        def run(state, implementation=implementation):
            return linear_attention(**inputs, state=state, implementation=implementation)

        (o, final), pull = jax.vjp(run, call.arrays['state'])
        assert o.shape[:3] == (2, 0, 2)
        np.testing.assert_array_equal(final, call.arrays['state'])
        np.testing.assert_array_equal(pull((o, final))[0], final)


@pytest.mark.parametrize('implementation', ['reference', 'xla'])
def test_types_and_defaults(implementation):
    call = cases.call('grouped vector', jnp.bfloat16)
    without = {**call.arrays, 'state': None}
    given = {**call.arrays, 'state': jnp.zeros((1, 4, 8, 8))}
    run = jax.jit(functools.partial(linear_attention, implementation=implementation), static_argnames='scale')
    o, state = run(**without)
    assert o.dtype == jnp.bfloat16
    assert state.dtype == jnp.float32
    for one, other in zip((o, state), run(**given, scale=8**-0.5), strict=True):
        np.testing.assert_array_equal(one, other)


def test_memory_is_linear_in_length():
    """Four times the steps take about four times the memory of the backward pass; a square would take sixteen."""

    def bytes_of(t):
        inputs = [jax.ShapeDtypeStruct((1, t, 2, *last), jnp.float32) for last in ((16,), (16,), (16,), ())]
        loss = jax.grad(lambda *arrays: jnp.sum(linear_attention(*arrays)[0] ** 2), argnums=(0, 1, 2, 3))
        return jax.jit(loss).lower(*inputs).compile().memory_analysis().temp_size_in_bytes

    assert bytes_of(32768) < 5 * bytes_of(8192)


@pytest.mark.parametrize('name', ['packed scalar', 'sudden vector'])
def test_twice_the_same_bits(name, comparison):
    call = cases.call(name)
    first, second = (comparison.evaluate(linear_attention, call, 'xla') for _ in range(2))
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name])


@pytest.mark.parametrize(
    ('arguments', 'error', 'message'),
    [
        ({'q': jnp.zeros((1, 2, 3))}, ValueError, r'linear_attention: q has shape \(1, 2, 3\); expected b t hq k'),
        ({'k': jnp.zeros((1, 2, 2, 4))}, ValueError, r'k has shape .*; expected b t hk k with b=1, t=2, k=3'),
        ({'v': jnp.zeros((1, 3, 2, 2))}, ValueError, r'v has shape \(1, 3, 2, 2\); expected b t hv v with b=1, t=2'),
        ({'v': jnp.zeros((1, 2, 3, 2)), 'state': None}, ValueError, 'q has 2 heads; expected a divisor of the 3 heads'),
        ({'log_decay': jnp.zeros(3)}, ValueError, r'log_decay has shape \(3,\); expected h with h=2'),
        ({'log_decay': jnp.zeros((1, 2))}, ValueError, r'log_decay has shape \(1, 2\); expected b t h k'),
        ({'log_decay': jnp.zeros((1, 2, 2, 2))}, ValueError, r'expected b t h k with b=1, t=2, h=2, k=3'),
        ({'state': jnp.zeros((1, 2, 2, 3))}, ValueError, r'state has shape \(1, 2, 2, 3\); expected b h k v'),
        ({'segments': jnp.zeros((2, 2), jnp.int32)}, ValueError, r'segments has shape \(2, 2\); expected b t'),
        ({'segments': jnp.zeros((1, 2))}, TypeError, 'segments has type float32 .*; expected an integer type'),
        ({'q': jnp.zeros((1, 2, 2, 3), int)}, TypeError, 'q has type int32 .*; expected a floating-point type'),
        ({'implementation': 'cuda'}, ValueError, "implementation is 'cuda'; expected None or one of"),
        ({'implementation': 'mosaic_tpu'}, NotImplementedError, "'mosaic_tpu' cannot serve: this version has no"),
    ],
)  # fmt: skip
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        linear_attention(**{**cases.call('two').arrays, **arguments})
