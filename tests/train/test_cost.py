import jax
import jax.numpy as jnp
import pytest

from attnlab.train.cost import flops_per_token, implementations, state_bytes
from attnlab.train.setup import prepare
from configs.language import get_config

DIM, DEPTH, LENGTH, HIDDEN, VOCAB = 64, 4, 128, 192, 256


def setup(loop, zoo='mha'):
    config = get_config(f'zoo={zoo}')
    with config.unlocked():
        config.update(batch_size=2, length=LENGTH)
        config.model.dim = DIM
        config.model.stack.update(depth=DEPTH, loop=loop)
    return prepare(config)


@pytest.mark.parametrize('loop', ['unroll', 'scan'])
def test_flops_are_those_of_the_matrix_products_however_layers_are_looped(loop):
    per_layer = 2 * (4 * DIM * DIM + 3 * DIM * HIDDEN) + 2 * 2 * LENGTH * DIM
    products = 3 * (DEPTH * per_layer + 2 * DIM * VOCAB)
    assert products < flops_per_token(setup(loop)) < 1.3 * products


def test_state_bytes_are_measured():
    bytes_each = 4 * DIM * 2 * DEPTH
    assert state_bytes(setup('unroll'), 256) == pytest.approx(256 * bytes_each, rel=0.02)


def test_implementations_name_what_runs_and_why_others_do_not():
    (entry,) = implementations(setup('unroll'))
    assert (entry.layers, entry.mixer, entry.core) == ((0, 1, 2, 3), 'Attention', 'attention')
    assert entry.implementation == 'xla' and {name for name, _ in entry.refused} == {'mosaic_gpu', 'mosaic_tpu'}


def test_a_scan_of_a_scan_is_counted_in_full():
    from attnlab.train.cost import _cost, _repeats

    def twice(x, w):
        def outer(carry, _):
            return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), carry, None, length=3)[0], None

        return jax.lax.scan(outer, x, None, length=5)[0]

    x = jnp.ones((32, 32))
    traced = jax.jit(twice).trace(x, x)
    counted = _cost(traced.lower()) + sum(_repeats(traced.jaxpr))
    assert counted == pytest.approx(15 * 2 * 32**3, rel=0.05)
