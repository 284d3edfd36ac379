"""Models of few bits go on from a state as they read a sequence in one pass."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.config import build
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.mixers.softmax.attention import Attention
from attnlab.nn.mlps import GatedMLP
from attnlab.nn.norms import RMSNorm
from attnlab.nn.parameter import Buffer
from attnlab.nn.projections import Linear
from attnlab.quantize.formats import Affine, Symmetric, format_called
from attnlab.quantize.layers import Quantization, QuantizedLinear, simulated
from attnlab.testing.contract import cast_parameters
from attnlab.testing.noise import noise
from attnlab.zoo import ZOO, Recipe

DIM, LENGTH = 16, 12
FIRST = {recipe.pattern[0].target: name for name, recipe in reversed(ZOO.items()) if recipe.streaming}
"""A recipe for every class of mixers that can be streamed."""

EVERY_TIME = [name for name in sorted(FIRST.values()) if not ZOO[name].slow][:3]
"""Checked every time; the others, which read linear maps alike in both forms, nightly."""


@dataclasses.dataclass(frozen=True)
class Quarters:
    """A grid that stays the same in every call: the range of a call depends on which tokens it has."""

    def rounded(self, x: Any) -> Any:
        return jnp.round(4 * x) / 4


@pytest.fixture
def exact() -> Iterator[None]:
    """In float64, so that no rounding error decides which way a number is rounded."""
    with jax.enable_x64(True):
        yield


def small(recipe: Recipe) -> Any:
    """The recipe's mixer with parameters that have moved a little from where they start, since some are zero there."""
    (mixer,) = recipe.reduced(heads=2)
    graphdef, params = nnx.split(build(mixer)(DIM, rngs=nnx.Rngs(0)))
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(0)
    moved = [leaf + 0.1 * jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype) for leaf in leaves]
    return cast_parameters(nnx.merge(graphdef, jax.tree.unflatten(tree, moved)), jnp.float64)


@pytest.mark.usefixtures('exact')
@pytest.mark.parametrize(
    'name',
    # sLSTM has maps of heads to themselves alone, none of which is a `Linear`.
    [
        pytest.param(name, marks=() if name in EVERY_TIME else pytest.mark.slow)
        for name in sorted(FIRST.values())
        if name != 'slstm'
    ],
)
def test_a_rounded_mixer_goes_on_from_a_state_as_in_one_pass(name: str):
    mixer = small(ZOO[name])
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, LENGTH, DIM)))
    run = jax.jit(lambda graphdef, params, *inputs: nnx.merge(graphdef, params)(*inputs), static_argnums=0)
    rounded = nnx.split(Quantization(Symmetric(4), Quarters())(mixer))
    expected = run(*rounded, x, Context.full(2, LENGTH))[0]
    state, outputs, start = mixer.init_state(2, LENGTH, x.dtype), [], 0
    for steps in (4, *(1,) * 4, 4):
        part = slice(start, start + steps)
        y, state = run(*rounded, x[:, part], Context.full(2, steps, start=jnp.int32(start)), state)
        outputs.append(y)
        start += steps
    np.testing.assert_allclose(jnp.concatenate(outputs, axis=1), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures('exact')
@pytest.mark.parametrize('name', sorted(FIRST.values()))
def test_no_linear_map_of_a_mixer_is_left_out(name: str):
    def make() -> Any:
        mixer = small(ZOO[name])
        # sLSTM has maps of heads to themselves alone.
        has_maps = any(isinstance(module, Linear) for _, module in nnx.iter_modules(mixer))
        return Quantization(Symmetric(4), Quarters())(mixer) if has_maps else mixer

    mixer = nnx.eval_shape(make)
    rounded = [module for _, module in nnx.iter_modules(mixer) if isinstance(module, QuantizedLinear)]
    linear = [module for _, module in nnx.iter_modules(mixer) if isinstance(module, Linear)]
    assert len(rounded) == len(linear)


@pytest.mark.parametrize('inputs', ['int8', 'mxe4m3', 'cross8'])
def test_a_call_beyond_the_cache_gives_nan_with_inputs_of_few_bits(inputs):
    model = nnx.Dict(mixer=Attention(8, heads=2, rngs=nnx.Rngs(0)))
    mixer = Quantization(inputs=format_called(inputs))(model).mixer
    x, state = jnp.ones((1, 5, 8)), mixer.init_state(1, 4, jnp.float32)
    y, state = mixer(x[:, :4], Context.full(1, 4), state)
    beyond, _ = mixer(x[:, 4:], Context.full(1, 1, start=4), state)
    assert jnp.isfinite(y).all() and jnp.isnan(beyond).all()


def test_every_linear_map_is_rounded_and_many_bits_change_nothing():
    x = jax.random.normal(jax.random.key(1), (2, 5, 16))
    plain = GatedMLP(16, rngs=nnx.Rngs(0))
    rounded = simulated(4)(GatedMLP(16, rngs=nnx.Rngs(0)))
    assert all(isinstance(part, QuantizedLinear) for part in (rounded.gate, rounded.up, rounded.down))
    weight = Symmetric(4, scope='tensor').rounded(plain.gate.weight[...])
    by_hand = plain.gate.apply(Affine(4, scope='tensor').rounded(x), weight)
    np.testing.assert_allclose(rounded.gate(x), by_hand, rtol=1e-6)
    np.testing.assert_allclose(simulated(16)(GatedMLP(16, rngs=nnx.Rngs(0)))(x), plain(x), atol=2e-3)
    assert np.abs(rounded(x) - plain(x)).max() > 0.05


def test_packed_weights_are_smaller_and_layers_of_a_stack_are_packed_alone():
    linear = Linear(64, 32, bias=True, rngs=nnx.Rngs(0))
    weight = jax.random.normal(jax.random.key(0), (3, 64, 32))
    expected = Symmetric(4, scope=32).rounded(weight[1].T).T
    linear.weight[...] = weight[1]
    alone = QuantizedLinear(linear, weights=Symmetric(4, scope=32), inputs=None)
    np.testing.assert_array_equal(alone.matrix(), expected)
    assert sum(array.nbytes for array in jax.tree.leaves(nnx.state(alone, Buffer))) == 64 * 32 // 2 + 4 * 64
    assert [leaf.shape for leaf in jax.tree.leaves(nnx.state(alone, nnx.Param))] == [(32,)]
    linear.weight = nnx.Param(weight)
    graphdef, state = nnx.split(QuantizedLinear(linear, weights=Symmetric(4, scope=32), inputs=None))
    one = jax.tree.map(lambda leaf: leaf[1] if leaf.shape[0] == 3 else leaf, state)
    np.testing.assert_array_equal(nnx.merge(graphdef, one).matrix(), expected)


def test_what_cannot_be_quantized_is_said():
    with pytest.raises(UserError, match='nothing is quantized: give a format'):
        Quantization()
    with pytest.raises(UserError, match='this model has no linear map'):
        simulated(4)(RMSNorm(4, rngs=nnx.Rngs(0)))
    mlp = simulated(4)(GatedMLP(16, rngs=nnx.Rngs(0)))
    with pytest.raises(UserError, match='this model is quantized; take the run'):
        simulated(4)(mlp)


def test_gradients_pass_inputs_that_are_rounded():
    """Analyses of a run of few bits ask for them; of the codes alone they are zero."""
    plain = Linear(4, 3, rngs=nnx.Rngs(0))
    x = noise(2, 4)
    rounded = QuantizedLinear(plain, weights=None, inputs=Symmetric(8))
    found, expected = (jax.grad(lambda x, linear=linear: jnp.sum(linear(x)))(x) for linear in (rounded, plain))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
