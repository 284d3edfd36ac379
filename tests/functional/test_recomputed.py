"""What is kept for a backward pass: the arguments of a part, not what it computed of them in float32."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from attnlab.config import build, spec
from attnlab.context import Context
from attnlab.functional.dense import ScoreRows, softmax
from attnlab.functional.recomputed import gated, recomputed_beside_products
from attnlab.models.stack import stack_spec
from attnlab.nn import norms
from attnlab.nn.activations import ACTIVATIONS, activation
from attnlab.nn.decays import StepSize
from attnlab.nn.dense_maps import StickBreaking
from attnlab.nn.feature_maps import NormAware, UnitNorm
from attnlab.nn.gates import OutputGate
from attnlab.nn.mlps import GatedMLP
from attnlab.nn.preludes import ShortConv
from attnlab.zoo import ZOO

B, T, D = 2, 64, 32
RNGS = nnx.Rngs(0)


def _convolved(conv, segments, x):
    return conv(x, segments)[0]


PARTS = {
    **{norm.__name__: norm(D, rngs=RNGS) for norm in (*norms.NORMS.values(), norms.OffsetRMSNorm, norms.SimpleRMSNorm)},
    'GlobalLayerNorm': norms.GlobalLayerNorm(D, rngs=RNGS),
    'CumulativeLayerNorm': norms.CumulativeLayerNorm(D, rngs=RNGS),
    **{name: activation(name) for name in ACTIVATIONS},
    'StepSize': StepSize(D, rngs=RNGS),
    'ShortConv': functools.partial(_convolved, ShortConv(D, bias=True, rngs=RNGS), None),
    'ShortConv, documents': functools.partial(_convolved, ShortConv(D, rngs=RNGS), jnp.ones((B, T), jnp.int32)),
}
OF_HEADS = {
    'HeadRMSNorm': norms.HeadRMSNorm(D, heads=3, rngs=RNGS),
    'GroupNorm': norms.GroupNorm(D, heads=3, rngs=RNGS),
    'UnitNorm': lambda x: UnitNorm().features(x, x, jnp.zeros((B, T), jnp.int32))[0],
    'UnitNorm, wide': UnitNorm().wide,
    'NormAware': lambda x: NormAware().features(x, x, jnp.zeros((B, T), jnp.int32))[0],
}


def kept(function, *arrays):
    """The arrays with an entry for every token and channel that the backward pass of a function reads."""
    found = jax.eval_shape(lambda *arrays: jax.vjp(function, *arrays)[1], *arrays)
    return [leaf for leaf in jax.tree.leaves(found) if math.prod(leaf.shape) >= B * T * D]


@pytest.mark.parametrize('part', [*PARTS, *OF_HEADS])
def test_a_part_keeps_its_input_alone(part):
    function = {**PARTS, **OF_HEADS}[part]
    x = jax.ShapeDtypeStruct((B, T, D) if part in PARTS else (B, T, 3, D), jnp.bfloat16)
    assert [(leaf.shape, leaf.dtype) for leaf in kept(function, x)] in ([], [(x.shape, x.dtype)])


def test_a_gate_keeps_its_two_inputs():
    x = jax.ShapeDtypeStruct((B, T, D), jnp.bfloat16)
    assert [leaf.dtype for leaf in kept(gated, x, x)] == [jnp.bfloat16] * 2


def products(function, *arrays):
    """How many a gradient takes."""
    gradient = jax.grad(lambda *arrays: jnp.sum(function(*arrays), dtype=jnp.float32), argnums=(0, 1))
    return str(jax.make_jaxpr(gradient)(*arrays)).count('dot_general')


def test_a_gate_keeps_what_its_map_gave_and_takes_no_product_again():
    norm, gate = norms.RMSNorm(D, rngs=RNGS), OutputGate(D, D, rngs=RNGS)

    def opened(y, x):
        return norm(y) * gate(x)

    x, again = jax.ShapeDtypeStruct((B, T, D), jnp.bfloat16), recomputed_beside_products(opened)
    assert len(kept(again, x, x)) == 2 < len(kept(opened, x, x))
    assert products(again, x, x) == products(opened, x, x) == 2


@pytest.mark.parametrize(
    ('weigh', 'types'),
    [
        (softmax, ['float32']),
        (
            lambda *rows: StickBreaking(heads=3, rngs=RNGS)(ScoreRows(*rows, None, jnp.arange(T)), None),
            ['bool', 'float32'],
        ),
    ],
)
def test_rows_keep_their_weights_or_scores_alone(weigh, types):
    rows = (jax.ShapeDtypeStruct((B, 3, T, T), dtype) for dtype in (jnp.float32, bool))
    assert sorted(str(leaf.dtype) for leaf in kept(weigh, *rows)) == types


LAYERS = {
    'mha': 32,
    'gla': 25,
    'gated_delta_net': 30,
    'mamba2': 83,
    'mamba': 54,
    'rg_lru': 31,
    'mingru': 25,
    'hgrn2': 28,
    'rwkv7': 42,
    'gau': 112,
    'nalaformer': 31,
    'hgrn': 36,
    'mamba3': 75,
    'stick_breaking': 47,
}
"""Arrays like its input, in bfloat16, that a layer may keep; norms alone would be 14 more."""


@pytest.mark.parametrize('recipe', LAYERS)
def test_a_layer_keeps_little_more_than_what_its_products_read(recipe):
    row = ZOO[recipe]
    stack = build(stack_spec(row.sized(heads=2), layer=row.layer, depth=1, mlp=spec(GatedMLP)))(D, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(stack)

    def run(params, x):
        return nnx.merge(graphdef, params)(x, Context.full(B, T))[0]

    x = jax.ShapeDtypeStruct((B, T, D), jnp.bfloat16)
    found = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in kept(run, params, x))
    assert found / (2 * B * T * D) <= LAYERS[recipe]
