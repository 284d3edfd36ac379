"""A core whose work is divided over devices gives the numbers of one device."""

import functools
import os
import pathlib
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.errors import UserError
from attnlab.functional import cores, sequence
from attnlab.runs.collectives import exchanges
from pallas_kernels import ClippedSoftmax, Entmax15, Relu, ScalableSoftmax, Sigmoid, Softmax
from tests.functional import divided

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision('highest'):
        yield


ROWS = (
    'attention, every term',
    'attention to chosen blocks',
    'attention to other keys',
    'linear attention, scalar',
    'cross entropy, every term',
)
"""Calls whose rows are divided every time; heads, channels or classes of all calls are."""


NIGHTLY = ('diagonal plus low rank', *divided.RINGS)
EVERY_TIME = ('a ring, every term', 'a ring of Softpick')


def nightly(names):
    """The names, those of calls that are dear to compile, or much like another, marked as slow."""
    return [
        pytest.param(name, marks=pytest.mark.slow if name in NIGHTLY and name not in EVERY_TIME else ())
        for name in names
    ]


@pytest.mark.parametrize('name', nightly(divided.CALLS | divided.ON_EVERY_DEVICE))
def test_two_devices_agree_with_one(name):
    divided.check(name, divided.mesh(tensor=2))
    if name in ROWS:
        divided.check(name, divided.mesh(data=2))


def test_attention_to_chosen_blocks_has_no_form_that_divides_time():
    call = divided.ON_EVERY_DEVICE['attention to chosen blocks']
    with pytest.raises(UserError, match='attention to chosen blocks has no form that divides time'):
        divided.evaluate(call, divided.mesh(sequence=2))


@pytest.mark.parametrize('name', nightly(divided.CALLS | divided.RINGS))
def test_time_over_two_devices_agrees_with_one(name):
    divided.check(name, divided.mesh(sequence=2))


def test_a_ring_divides_sums_beyond_the_range_of_float16_before_it_rounds_them():
    q, v = jnp.ones((1, 16, 1, 4), jnp.float16), jnp.full((1, 16, 1, 4), 8192, jnp.float16)
    read = functools.partial(cores.attention, weights=Relu(), scale=0.5)
    output = divided.compiled(read, divided.mesh(sequence=2))(q, q, v)
    assert output.dtype == jnp.float16
    np.testing.assert_array_equal(output, 16384.0)


def test_slopes_of_16_bits_are_of_the_same_distances_in_a_ring():
    """Positions are not rounded to the eight digits of bfloat16: beyond 256 neighbours would be as far as others."""
    q, v = jnp.zeros((1, 2048, 1, 4)), divided.noise('v', 1, 2048, 1, 4)
    read = functools.partial(cores.attention, slopes=jnp.full(1, 0.5, jnp.bfloat16))
    np.testing.assert_allclose(divided.compiled(read, divided.mesh(sequence=2))(q, q, v), read(q, q, v), atol=1e-5)


def test_queries_of_16_bits_are_rounded_once_behind_both_of_their_factors_in_a_ring():
    q, k = (divided.noise(name, 2, 16, 2, 8).astype(jnp.bfloat16) for name in 'qk')
    v, temperature = divided.noise('v', 2, 16, 2, 4), jnp.asarray([1.3, 0.7], jnp.bfloat16)
    read = functools.partial(cores.attention, weights=ScalableSoftmax(), temperature=temperature)
    np.testing.assert_allclose(divided.compiled(read, divided.mesh(sequence=2))(q, k, v), read(q, k, v), atol=1e-5)


def test_gates_behind_large_sums_have_all_of_their_digits_in_a_ring():
    """Of a sum of -3e5 neighbours in float32 are 0.03 apart, which the gates of a row of 400,000 tokens come to."""
    q, k, v = (divided.noise(name, 2, 16, 1, 4) for name in 'qkv')
    gates = divided.fading('gates', 2, 16, 1).at[:, 2].set(-3e5)
    # The first row is one document; in the second another goes on over the edge of the devices, with sums of its own.
    segments = jnp.asarray([[1] * 16, [1] * 5 + [2] * 11], jnp.int32)
    for known in (None, segments):
        read = functools.partial(cores.attention, log_forget=gates, segments=known)
        found = divided.compiled(read, divided.mesh(sequence=2))(q, k, v)
        np.testing.assert_allclose(found, read(q, k, v), atol=1e-5)


@pytest.mark.parametrize(
    ('name', 'axis'),
    [
        ('attention', 'tensor'),
        ('linear attention, scalar', 'fsdp'),
        ('linear scan', 'sequence'),
        ('cross entropy', 'tensor'),
        *(pytest.param(name, 'sequence', marks=pytest.mark.slow) for name in divided.AROUND),
        *(
            pytest.param(name, axis, marks=pytest.mark.slow)
            for name in divided.KERNELS
            for axis in ('data', 'tensor', 'sequence')
            if (name, axis) not in {('linear scan', 'sequence'), ('cross entropy', 'tensor')}
        ),
    ],
)
def test_two_devices_with_kernels_agree_with_one(name, axis):
    divided.check(name, divided.mesh(**{axis: 2}), 'mosaic_tpu')


def choices(n: int, name: str, **options) -> list[str]:
    """How a call of attention has its time divided over `n` devices that are not there."""
    call = (divided.CALLS | divided.RINGS)[name]
    mesh = jax.sharding.AbstractMesh((n,), ('sequence',), axis_types=(jax.sharding.AxisType.Auto,))
    with sequence.choices() as found, jax.sharding.use_abstract_mesh(mesh):
        jax.eval_shape(lambda arrays: call.core(**arrays, **call.options | options), call.arrays)
    return [str(choice) for choice in found]


def test_how_attention_divides_time_is_said():
    assert choices(2, 'attention') == [
        'attention: keys and values of all devices, gathered, causal work dealt out in zig-zag '
        '(3,072 bytes, own queries and outputs 6,144)'
    ]
    assert choices(4, 'attention') == [
        'attention: keys and values in a ring, causal work dealt out in zig-zag '
        '(weights over some of the keys combine: Softmax)'
    ]
    assert choices(4, 'a window over several devices') == [
        'attention: keys and values of the 1 devices before (a window of 4)'
    ]
    assert choices(2, 'attention', weights=Entmax15()) == [
        'attention: keys and values of all devices, gathered (weights over some of the keys do not combine: Entmax15)'
    ]
    assert choices(16, 'attention') == [
        'attention: keys and values of all devices, gathered (1 tokens a device have no halves)'
    ]


@pytest.mark.slow
def test_few_keys_gathered_move_fewer_bytes_than_in_a_ring(monkeypatch):
    call = divided.CALLS['attention']

    def moved():
        def run(arrays):
            outputs, pull = jax.vjp(lambda arrays: call.core(**arrays, **call.options), arrays)
            return pull(outputs)

        compiled = divided.compiled(run, divided.mesh(sequence=2)).lower(call.arrays).compile()
        return sum(exchange.bytes for exchange in exchanges(compiled.as_text()))

    gathered = moved()
    monkeypatch.setattr(sequence, '_bytes', lambda x: 0)
    assert gathered < moved()


def test_a_short_convolution_is_given_the_tokens_at_the_edge_alone():
    call = divided.CALLS['short convolution']
    function = divided.compiled(lambda arrays: call.core(**arrays, **call.options), divided.mesh(sequence=2))
    found = exchanges(function.lower(call.arrays).compile().as_text())
    assert {exchange.kind for exchange in found} == {'collective-permute'}
    # Of every row three tokens of all channels, and their documents.
    assert sum(exchange.bytes for exchange in found) == 4 * divided.B * 3 * (divided.D + 1)


def test_the_first_device_sees_nothing_of_the_last_without_documents_too():
    divided.check('short convolution past the device before', divided.mesh(sequence=2))


def test_causal_work_in_a_ring_is_the_same_on_every_device_and_little_of_it_hidden():
    """Of 8 pairs of pieces that two devices have with all keys, five are worked on, two of them half hidden."""
    q = divided.noise('q', 1, 256, 2, 32)

    def operations(weights):
        read = functools.partial(cores.attention, weights=weights, scale=1.0)
        return divided.compiled(read, divided.mesh(sequence=2)).lower(q, q, q).compile().cost_analysis()['flops']

    assert operations(Softmax()) < 0.7 * operations(ClippedSoftmax())


def primitives(function, *arrays):
    """The names of the primitives a function is made of."""
    return {equation.primitive.name for equation in jax.make_jaxpr(function)(*arrays).eqns}


def test_one_device_adds_nothing():
    x = divided.noise('x', 2, 5, 4)
    scan = functools.partial(cores.linear_scan, decay=x)
    assert 'shard_map' in primitives(cores.on(divided.mesh(data=2), scan), x)
    assert 'shard_map' not in primitives(cores.on(divided.mesh(data=1), scan), x)
    assert 'shard_map' not in primitives(scan, x)


def test_what_does_not_divide_is_whole_and_said():
    q, k = divided.noise('q', 1, 3, 3, 4), divided.noise('k', 1, 3, 1, 4)
    expected = cores.attention(q, k, k)
    with cores.undivided() as found:
        actual = divided.compiled(cores.attention, divided.mesh(tensor=2))(q, k, k)
    assert [str(entry) for entry in found] == ['attention: heads 3 over tensor 2']
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    with cores.undivided() as found:
        jax.eval_shape(cores.on(divided.mesh(data=2), cores.attention), q, k, k)
    assert [str(entry) for entry in found] == ['attention: rows 1 over data 2']


def test_one_query_of_several_keys_is_not_divided():
    q, k, bias = divided.noise('q', 1, 1, 2, 4), divided.noise('k', 1, 8, 2, 4), divided.noise('bias', 1, 1, 1, 8)
    segments = jnp.ones((1, 1), jnp.int32), jnp.asarray([[1, 1, 1, 2, 1, 1, 2, 1]], jnp.int32)
    call = functools.partial(cores.attention, causal=False, segments=segments, bias=bias)
    np.testing.assert_allclose(divided.compiled(call, divided.mesh(sequence=2))(q, k, k), call(q, k, k), rtol=1e-6)


def test_one_key_of_several_queries_is_read_once():
    """Under weights that add up to no one in particular, every device would add it again."""
    q, k, v = divided.noise('q', 1, 8, 2, 4), divided.noise('k', 1, 1, 2, 4), divided.noise('v', 1, 1, 2, 4)
    call = functools.partial(cores.attention, weights=Sigmoid(), causal=False)
    np.testing.assert_allclose(divided.compiled(call, divided.mesh(sequence=2))(q, k, v), call(q, k, v), rtol=1e-6)


def test_classes_that_do_not_exist_have_no_loss():
    hidden, embedding = divided.noise('hidden', 5, 3), divided.noise('embedding', 6, 3)
    labels = jnp.asarray([0, 5, 6, -6, -7], jnp.int32)
    losses = divided.compiled(cores.cross_entropy, divided.mesh(tensor=2))(hidden, embedding, labels)
    # Compiled: labels whose values are at hand are refused.
    np.testing.assert_allclose(losses, jax.jit(cores.cross_entropy)(hidden, embedding, labels), rtol=1e-5)
    assert np.isnan(losses).tolist() == [False, False, True, False, True]


@pytest.mark.parametrize('sureness', [0.0, 8.0])
def test_a_label_of_thousands_of_tokens_has_its_gradient_in_few_bits(sureness):
    """A sum of thousands in bfloat16 stands still; where predictions are sure, two such sums would cancel."""
    hidden = (1 + divided.noise('hidden', 4096, 8) / 4).astype(jnp.bfloat16)
    embedding = (divided.noise('embedding', 16, 8) / 4).at[0].add(sureness / 8).astype(jnp.bfloat16)
    labels = jnp.zeros(4096, jnp.int32)

    def gradients(hidden, embedding):
        return jax.grad(lambda *arrays: cores.cross_entropy(*arrays, labels).sum(), (0, 1))(hidden, embedding)

    expected = gradients(hidden.astype(jnp.float32), embedding.astype(jnp.float32))
    found = divided.compiled(gradients, divided.mesh(tensor=2))(hidden, embedding)
    for wide, narrow in zip(expected, found, strict=True):
        error = np.linalg.norm(narrow.astype(np.float32) - wide) / np.linalg.norm(wide)
        assert error < 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    'sizes',
    [
        ('data=4',),
        ('tensor=4',),
        ('fsdp=2', 'tensor=2'),
        ('data=2', 'fsdp=2', 'tensor=2'),
        ('data=2', 'tensor=4'),
        ('sequence=4',),
        ('sequence=8',),
        ('mosaic_tpu', 'fsdp=2', 'tensor=2'),
        ('mosaic_tpu', 'data=2', 'fsdp=2', 'tensor=2'),
        ('mosaic_tpu', 'sequence=4'),
        ('mosaic_tpu', 'sequence=8'),
        ('mosaic_gpu', 'sequence=2'),
        ('mosaic_gpu', 'sequence=4'),
    ],
    ids='-'.join,
)
def test_more_devices_agree_with_one(sizes):
    command = [sys.executable, '-m', 'tests.functional.divided', *sizes]
    # A thread a warpgroup of every device, and those that wait for the others.
    environment = os.environ | {'NPROC': '64'}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=3600)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize('axis', ['data', 'sequence'])
def test_two_processes_with_kernels_agree_with_one(axis):
    with socket.socket() as found:
        found.bind(('localhost', 0))
        port = str(found.getsockname()[1])
    commands = [
        [sys.executable, '-m', 'tests.functional.processes', port, index, axis, 'linear scan'] for index in '01'
    ]
    processes = [subprocess.Popen(command, cwd=ROOT, text=True, stderr=subprocess.PIPE) for command in commands]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=600)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
