"""The form of `diagonal_low_rank` for Hopper, and erase keys by it: interpreted here, and lowered for a device that is
not there."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import delta_rule, diagonal_low_rank, target
from pallas_kernels.cases import diagonal_low_rank as cases
from tests.kernels import matrix_state

DOCUMENTS = (((1, 64), (2, 30), (3, 36)),)
"""Those that end with a chunk and inside one."""
TILES = cases.Case(b=1, t=130, k=80, v=70, heads=(2, 1, 2), decay='b t h', documents=DOCUMENTS)
"""Several chunks, and tiles of keys and of values, not all full."""
NEW = {
    'small vector': cases.Case(
        b=1, t=70, k=8, v=8, heads=(1, 1, 1), decay='b t h k', documents=(((1, 40), (2, 24), (3, 6)),)
    ),
    'tiles': TILES,
    'tiles tied': dataclasses.replace(TILES, decay='b t h k', tied=True),
    'vector in tiles': dataclasses.replace(TILES, decay='b t h k'),
}
SERVED = (*cases.KERNEL, 'grouped', 'constant', 'strong vector', *NEW)
QUICK = 'small vector'


@pytest.fixture(autouse=True)
def tiles(monkeypatch):
    for name, case in NEW.items():
        monkeypatch.setitem(cases.CASES, name, case)


@pytest.mark.parametrize(
    'name', [pytest.param(name, marks=() if name == QUICK else pytest.mark.slow) for name in SERVED]
)
def test_interpreted_is_the_reference(name, comparison):
    matrix_state.check_kernel(
        comparison, diagonal_low_rank, 'mosaic_gpu', name, cases.call(name, jnp.bfloat16), cases.CASES[name]
    )


@pytest.mark.slow
@pytest.mark.parametrize('name', ['small vector', 'tiles'])
def test_interpreted_in_float16_is_the_reference(name, comparison):
    matrix_state.check_kernel(
        comparison, diagonal_low_rank, 'mosaic_gpu', name, cases.call(name, jnp.float16), cases.CASES[name]
    )


@pytest.mark.slow
@pytest.mark.parametrize('name', ['no decay', 'packed scalar', 'reflecting vector', 'vector in tiles', 'sudden vector'])
def test_erase_keys_of_their_own(name, comparison):
    matrix_state.check_kernel(
        comparison, delta_rule, 'mosaic_gpu', f'erase {name}', cases.erasing(name, jnp.bfloat16), cases.CASES[name]
    )


@pytest.mark.slow
def test_twice_the_same_bits(comparison):
    comparison.check_same_bits(diagonal_low_rank, cases.call('small vector', jnp.bfloat16), 'mosaic_gpu')


def real(tied):
    call = cases.real()['k=128']
    arrays = {name: array for name, array in call.arrays.items() if name != 'b' or not tied}
    return call._replace(arrays=arrays)


@pytest.mark.parametrize(
    ('tied', 'kernels'),
    [
        # Of queries and of what erases with every key: forward, and again for the gradients, which have as many. Then
        # the chunks, the sweep and the reads; the first two again, and back what of queries stays within chunks, the
        # sweep, chunks, and states. With two keys the gradients of values are reads too.
        pytest.param(True, 2 * 3 + 9, id='one key'),
        pytest.param(False, 4 * 3 + 10, id='two keys', marks=pytest.mark.slow),
    ],
)
def test_lowered_for_hopper(tied, kernels, lowered_for_gpu):
    lowered = lowered_for_gpu(diagonal_low_rank, real(tied))
    assert [entry.implementation for entry in lowered.entries] == ['mosaic_gpu']
    assert lowered.kernels() == kernels


@pytest.mark.parametrize(
    ('here', 'k', 'dtype', 'message'),
    [
        (target.H100, 8, jnp.float32, 'operands have type float32, .* expected bfloat16 or float16'),
        (target.H100, 257, jnp.bfloat16, 'q and k have 257 channels; expected at most 256'),
        (dataclasses.replace(target.H100, capability='10.0'), 8, jnp.bfloat16, r'expected 9\.0'),
    ],
)
def test_refusals(here, k, dtype, message):
    """Of what is read for `a` too, and of erase keys."""
    q, other = (jax.ShapeDtypeStruct((1, 2, 1, k), kind) for kind in (jnp.bfloat16, dtype))
    beta = jax.ShapeDtypeStruct((1, 2, 1), jnp.bfloat16)
    with target.compiling_for(here):
        with pytest.raises(NotImplementedError, match=message):
            jax.eval_shape(functools.partial(diagonal_low_rank, implementation='mosaic_gpu'), q, q, q, other)
        with pytest.raises(NotImplementedError, match=message):
            jax.eval_shape(
                lambda q, beta, erase: delta_rule(q, q, q, beta, erase=erase, implementation='mosaic_gpu'),
                q, beta, other,
            )  # fmt: skip
