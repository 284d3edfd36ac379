"""The form of `delta_rule` for Hopper: interpreted on this machine, and lowered for a device that is not there."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import delta_rule, dispatch, target, tiling
from pallas_kernels.cases import delta_rule as cases
from tests.kernels import matrix_state

TILES = cases.Case(
    b=1, t=130, k=80, v=70, heads=(2, 1, 2), decay='b t h', documents=(((1, 64), (2, 30), (3, 36)),)
)  # fmt: skip
"""Several chunks, and tiles of keys and of values, not all full; documents that end with a chunk and inside one."""

NAMES = (*cases.KERNEL, 'shared queries and keys', 'grouped', 'reflecting')
SERVED = [*NAMES, 'tiles', 'vector in tiles']
CALLS = [
    (name, dtype)
    for name in SERVED
    for dtype in (jnp.bfloat16, jnp.float16)
    # What decays to less than 6e-8 on its way into a product is zero in float16, where the reference has it.
    if (name, dtype) != ('strong scalar', jnp.float16)
]
QUICK = [('tiles', jnp.bfloat16), ('threes and twos of six', jnp.bfloat16)]


@pytest.fixture(autouse=True)
def tiles(monkeypatch):
    monkeypatch.setitem(cases.CASES, 'tiles', TILES)
    monkeypatch.setitem(cases.CASES, 'vector in tiles', dataclasses.replace(TILES, decay='b t h k'))
    monkeypatch.setitem(
        cases.CASES, 'tiles that copies refill', dataclasses.replace(TILES, t=330, v=200, documents=None)
    )
    refilled = dataclasses.replace(TILES, t=70, k=8, v=200, heads=(1, 1, 1), documents=None, decay='b t h k')
    monkeypatch.setitem(cases.CASES, 'vector that copies refill', refilled)


def check(comparison, name, dtype):
    matrix_state.check_kernel(comparison, delta_rule, 'mosaic_gpu', name, cases.call(name, dtype), cases.CASES[name])


@pytest.mark.parametrize(
    ('name', 'dtype'),
    [
        pytest.param(*call, marks=() if call in QUICK else pytest.mark.slow, id=f'{call[0]}-{call[1].__name__}')
        for call in CALLS
    ],
)
def test_interpreted_is_the_reference(name, dtype, comparison):
    check(comparison, name, dtype)


@pytest.mark.slow
@pytest.mark.usefixtures('watched_for_races')
@pytest.mark.parametrize('name', ['tiles', 'vector in tiles', 'tiles that copies refill', 'vector that copies refill'])
def test_copies_and_products_do_not_race(name, comparison):
    check(comparison, name, jnp.bfloat16)


@pytest.mark.slow
def test_twice_the_same_bits(comparison):
    comparison.check_same_bits(delta_rule, cases.call('vector in tiles', jnp.bfloat16), 'mosaic_gpu')


def sized(k, v=200, **decay):
    """A call with documents and so many channels of keys and of values, which heads share."""
    q = jax.ShapeDtypeStruct((1, 1000, 2, k), jnp.float16)
    shared, v = (jax.ShapeDtypeStruct((1, 1000, 1, size), jnp.float16) for size in (k, v))
    beta = jax.ShapeDtypeStruct((1, 1000, 2), jnp.float16)
    segments = jax.ShapeDtypeStruct((1, 1000), jnp.int32)
    return {'q': q, 'k': shared, 'v': v, 'beta': beta, 'segments': segments, **decay}


SIZES = {name: call.arrays for name, call in cases.real().items()} | {f'{k} channels': sized(k) for k in (130, 256)}
SIZES['all that fit'] = sized(256, 704)
SIZES['vector, more values'] = sized(130, 1024, log_decay=jax.ShapeDtypeStruct((1, 1000, 2, 130), jnp.float32))


@pytest.mark.parametrize(
    'name', [pytest.param(name, marks=() if name == 'k=128, vector' else pytest.mark.slow) for name in SIZES]
)
def test_lowered_for_hopper(name):
    def both(arrays, segments):
        found, pull = jax.vjp(lambda arrays: delta_rule(**arrays, segments=segments), arrays)
        return found, pull(found)

    arrays = dict(SIZES[name])
    segments = arrays.pop('segments', None)
    with target.compiling_for(target.H100), dispatch.ledger() as entries:
        lowered = jax.jit(both).trace(arrays, segments).lower(lowering_platforms=('cuda',))
    assert [entry.implementation for entry in entries] == ['mosaic_gpu']
    # Forward: chunks, states and outputs. Backward: chunks and states again, what queries do, the gradients of states,
    # of values, of queries and of keys. With decays of key channels a chunk is two kernels, its weights and what it
    # does of them, both times, and their gradients are three: of steps, of states, and of the arguments of weights.
    assert lowered.as_text().count('custom_call @mosaic_gpu') == (12 if 'vector' in name else 10)


@pytest.mark.parametrize('k', range(1, 257, 15))
@pytest.mark.parametrize('keys', [2, 3])
def test_chunks_fit_shared_memory(k, keys):
    stages, parts, tile = tiling.delta_rule_hopper(k, keys), -(-k // 64), 64 * 64 * 2
    step = keys * parts * tile + (keys - 1) * tile + parts * 64 * 4
    assert stages >= 1
    assert stages * step + (parts + 1) * tile < tiling.SHARED_MEMORY


def test_a_chunk_with_many_channels_of_values_is_refused_but_with_decays_of_key_channels():
    def run(v, *decay, **others):
        q, beta = jax.ShapeDtypeStruct((1, 2, 1, 8), jnp.bfloat16), jax.ShapeDtypeStruct((1, 2, 1), jnp.bfloat16)
        values = jax.ShapeDtypeStruct((1, 2, 1, v), jnp.bfloat16)
        return jax.eval_shape(
            functools.partial(delta_rule, implementation='mosaic_gpu'), q, q, values, beta, *decay, **others
        )

    with target.compiling_for(target.H100):
        run(704)
        run(705, jax.ShapeDtypeStruct((1, 2, 1, 8), jnp.float32))
        run(705, erase=jax.ShapeDtypeStruct((1, 2, 1, 8), jnp.bfloat16))
        with pytest.raises(NotImplementedError, match='v has 705 channels; expected at most 704 with one decay a head'):
            run(705, jax.ShapeDtypeStruct((1, 2, 1), jnp.float32))


@pytest.mark.parametrize(
    ('here', 'k', 'dtype', 'message'),
    [
        (target.H100, 8, jnp.float32, 'q, k and v have type float32, .* expected bfloat16 or float16'),
        (target.H100, 257, jnp.bfloat16, 'q and k have 257 channels; expected at most 256'),
        (dataclasses.replace(target.H100, capability='8.0'), 8, jnp.bfloat16, r'expected 9\.0'),
    ],
)
def test_refusals(here, k, dtype, message):
    q, beta = jax.ShapeDtypeStruct((1, 2, 1, k), dtype), jax.ShapeDtypeStruct((1, 2, 1), dtype)
    with target.compiling_for(here), pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(functools.partial(delta_rule, implementation='mosaic_gpu'), q, q, q, beta)
