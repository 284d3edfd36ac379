"""Native products: integers exactly, floating-point numbers of eight bits by their own arithmetic."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.cli import main
from attnlab.errors import UserError
from attnlab.nn.projections import Linear
from attnlab.quantize.formats import Affine, Floating, Symmetric
from attnlab.quantize.layers import Quantization, QuantizedLinear


@pytest.mark.parametrize(
    ('weights', 'inputs'),
    [(Symmetric(8), Symmetric(8)), (Symmetric(4), Symmetric(8)), (Floating('e4m3'), Floating('e5m2'))],
)
def test_products_are_those_of_the_numbers(weights, inputs):
    linear, x = Linear(40, 6, bias=True, rngs=nnx.Rngs(0)), jax.random.normal(jax.random.key(0), (2, 3, 40))
    linear.bias[...] = jnp.arange(6.0)
    native = QuantizedLinear(linear, weights=weights, inputs=inputs, native=True)
    numbers = np.asarray(inputs.rounded(x), np.float64) @ np.asarray(native.matrix(), np.float64) + np.arange(6.0)
    np.testing.assert_allclose(native(x), numbers, rtol=1e-5, atol=1e-5)
    kind = 'i8' if isinstance(weights, Symmetric) else 'f8'
    program = jax.jit(native).lower(x).as_text()
    assert any('dot_general' in line and kind in line.replace('xi8', 'i8') for line in program.splitlines()) or (
        'f8E4M3FN' in program and 'dot_general' in program
    )


def test_formats_that_no_device_multiplies_are_refused():
    for weights, inputs in ((Symmetric(8), Affine(8)), (Symmetric(8, scope=32), Symmetric(8)), (Symmetric(8), None)):
        with pytest.raises(UserError, match='native products are of weights and inputs of eight bits'):
            Quantization(weights, inputs, native=True)


def test_the_command_refuses_what_has_no_codes(capsys):
    assert main(['quantize', '--workdir=nowhere', '--out=nowhere', '--native', '--sparse=0.5']) == 2
    assert '--native takes products of codes; give --weights and --inputs' in capsys.readouterr().err
