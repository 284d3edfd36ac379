"""Models of few bits go on from a state as they read a sequence in one pass."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.config import build
from attnlab.context import Context
from attnlab.nn.projections import Linear
from attnlab.quantize import formats as quantization
from attnlab.quantize.formats import QuantizedLinear, quantized
from attnlab.testing.contract import cast_parameters
from attnlab.zoo import ZOO, Recipe

DIM, LENGTH = 16, 12
FIRST = {recipe.pattern[0].target: name for name, recipe in reversed(ZOO.items()) if recipe.streaming}
"""A recipe for every class of mixers that can be streamed."""

EVERY_TIME = [name for name in sorted(FIRST.values()) if not ZOO[name].slow][:3]
"""Checked every time; the others, which read linear maps alike in both forms, nightly."""


@pytest.fixture(scope='module', autouse=True)
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


@pytest.mark.parametrize(
    'name',
    [pytest.param(name, marks=() if name in EVERY_TIME else pytest.mark.slow) for name in sorted(FIRST.values())],
)
def test_a_rounded_mixer_goes_on_from_a_state_as_in_one_pass(name: str, monkeypatch):
    # A grid that stays the same in every call: the range of a call depends on which tokens it has.
    monkeypatch.setattr(quantization, 'quantized_activations', lambda x, bits: jnp.round(4 * x) / 4)
    mixer = small(ZOO[name])
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, LENGTH, DIM)))
    run = jax.jit(lambda graphdef, params, *inputs: nnx.merge(graphdef, params)(*inputs), static_argnums=0)
    rounded = nnx.split(quantized(mixer, 4))
    expected = run(*rounded, x, Context.full(2, LENGTH))[0]
    state, outputs, start = mixer.init_state(2, LENGTH, x.dtype), [], 0
    for steps in (4, *(1,) * 4, 4):
        part = slice(start, start + steps)
        y, state = run(*rounded, x[:, part], Context.full(2, steps, start=jnp.int32(start)), state)
        outputs.append(y)
        start += steps
    np.testing.assert_allclose(jnp.concatenate(outputs, axis=1), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('name', sorted(FIRST.values()))
def test_no_linear_map_of_a_mixer_is_left_out(name: str):
    mixer = nnx.eval_shape(lambda: quantized(small(ZOO[name]), 4))
    rounded = [module for _, module in nnx.iter_modules(mixer) if isinstance(module, QuantizedLinear)]
    linear = [module for _, module in nnx.iter_modules(mixer) if isinstance(module, Linear)]
    # Maps of heads to themselves, all that sLSTM has, are no linear maps of the width, and stay as they are.
    assert len(rounded) == len(linear)
