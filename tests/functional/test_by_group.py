"""Rows of one network each, block by block, against each row alone."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.functional import by_group
from attnlab.testing.noise import noise
from pallas_kernels import target

NETWORKS, WIDTH, HIDDEN = 3, 4, 5
PARAMETERS = noise(NETWORKS, WIDTH, HIDDEN), noise(NETWORKS, HIDDEN, WIDTH)


def network(x, up, down):
    # Of no zeros it makes no zeros, and so shows a row that is not there.
    return jnp.cos(x @ up) @ down


def row_by_row(rows, groups, parameters):
    """Every network of every row, and of these the row's own."""
    found = jnp.stack([network(rows, *(each[group] for each in parameters)) for group in range(NETWORKS)])
    return sum(jnp.where((groups == group)[:, None], found[group], 0) for group in range(NETWORKS))


def with_gradients(function, rows, groups, parameters):
    return jax.value_and_grad(lambda *given: jnp.sum(jnp.sin(function(given[0], groups, given[1]))), (0, 1))(
        rows, parameters
    )


CPU = target.Target('cpu', 'cpu')

GROUPS = {
    'of all': ([2, 0, 1, 1, 0, 2, 2, 1, 0, 2, 1], True),
    'of one': ([1] * 11, True),
    'two without a row': ([2] * 4, True),
    'some elsewhere': ([3, 0, 3, 1, 0, 3, 2, 1, 0, 2, 1], False),
    'all elsewhere': ([3] * 5, False),
    'one row': ([1], True),
}


@pytest.mark.parametrize('size', [1, 2, 4, 16])
@pytest.mark.parametrize('case', GROUPS)
def test_every_row_is_its_own_networks(case, size):
    groups, whole = GROUPS[case]
    rows, groups = noise(len(groups), WIDTH), jnp.array(groups)
    blocks = functools.partial(by_group.in_blocks, network, size=size, whole=whole)
    expected = with_gradients(row_by_row, rows, groups, PARAMETERS)
    found = jax.jit(functools.partial(with_gradients, blocks))(rows, groups, PARAMETERS)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, expected)
    np.testing.assert_allclose(
        blocks(rows, groups, PARAMETERS), row_by_row(rows, groups, PARAMETERS), rtol=1e-5, atol=1e-6
    )


def test_there_is_room_however_rows_fall():
    """For every way in which up to seven rows fall on three networks, and once with not a block to spare."""
    for rows, size in itertools.product(range(1, 8), (1, 2, 3, 4)):
        loads = [load for load in itertools.product(range(rows + 1), repeat=NETWORKS) if sum(load) == rows]
        needed = max(sum(-(-load // size) for load in each) for each in loads)
        assert by_group.number_of_blocks(rows, NETWORKS, size) == needed, (rows, size)


def test_rows_can_be_mapped_over():
    rows, groups = noise(2, 6, WIDTH), jnp.array([[0, 1, 2, 3, 1, 0], [3, 3, 1, 1, 1, 2]])
    blocks = functools.partial(by_group.in_blocks, network, size=2, whole=False)
    mapped = functools.partial(jax.vmap, in_axes=(0, 0, None))
    expected = with_gradients(mapped(row_by_row), rows, groups, PARAMETERS)
    found = with_gradients(mapped(blocks), rows, groups, PARAMETERS)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, expected)


def test_gradients_of_parameters_are_summed_in_more_than_16_bits():
    """Two thousand blocks of one network, of which a sum in bfloat16 would stop growing at 256."""
    rows, parameters = jnp.ones((2048, 1), jnp.bfloat16), (jnp.ones((1, 1, 1), jnp.bfloat16),)

    def total(parameters):
        scaled = by_group.in_blocks(
            lambda x, scale: x @ scale, rows, jnp.zeros(2048, jnp.int32), parameters, size=1, whole=True
        )
        return jnp.sum(scaled.astype(jnp.float32))

    assert jax.grad(total)(parameters)[0].item() == 2048


@pytest.mark.parametrize(
    ('device', 'rows', 'size'), [(CPU, 64, 16), (CPU, 4096, 64), (target.H100, 65536, 1024), (target.H100, 64, 64)]
)
def test_blocks_grow_with_the_rows_of_a_network(device, rows, size):
    with target.compiling_for(device):
        assert by_group.rows_of_a_block(rows, 8) == size
    assert by_group.number_of_blocks(65536, 8, 1024) * 1024 <= 1.25 * 65536
