import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.blocks.block import Block, dropped
from attnlab.blocks.residual import Plain
from attnlab.config import build, from_plain, plain, spec
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.mixers.recurrent.diagonal import DiagonalRecurrence
from attnlab.mixers.softmax.attention import Attention
from attnlab.models.stack import Stack, missing_layers, stack_spec
from attnlab.nn.mlps import GatedMLP
from attnlab.testing.noise import noise
from attnlab.zoo import ZOO
from attnlab.zoo.chosen import chosen_recipe
from pallas_kernels import target

DIM, DEPTH = 8, 5


def stack(**settings):
    blocks = (
        spec(Block, mixer=spec(Attention, heads=2), mlp=spec(GatedMLP, hidden=12)),
        spec(Block, mixer=ZOO['mingru'].spec),
    )
    return build(spec(Stack, depth=DEPTH, blocks=blocks, **settings))(DIM, rngs=nnx.Rngs(0))


def inputs(t=7):
    return noise(2, t, DIM), Context.full(2, t)


def test_layers_follow_the_pattern_each_with_parameters_of_its_own():
    layers = list(stack().layers())
    assert [type(layer.mixer) for layer in layers] == [Attention, DiagonalRecurrence] * 2 + [Attention]
    first, second = (next(iter(jax.tree.leaves(nnx.state(layers[i].mlp)))) for i in (0, 2))
    assert first.shape == second.shape and not np.allclose(first, second)


def test_scanned_and_unrolled_agree_in_value_and_gradient_over_one_parameter_layout():
    x, ctx = inputs()
    results = []
    for settings in (
        {'loop': 'unroll'},
        {'loop': 'scan'},
        {'loop': 'scan', 'remat': True},
        {'loop': 'unroll', 'remat': True},
    ):
        graphdef, params = nnx.split(stack(**settings))

        def loss(params, graphdef=graphdef):
            return jnp.sum(nnx.merge(graphdef, params)(x, ctx)[0] ** 2)

        results.append(jax.jit(jax.value_and_grad(loss))(params))
    for value, gradient in results[1:]:
        np.testing.assert_allclose(value, results[0][0], rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), gradient, results[0][1])


@pytest.mark.parametrize('loop', ['unroll', 'scan'])
def test_layers_taken_apart_are_the_same_function(loop):
    x, ctx = inputs()
    whole, alone = stack(loop=loop), stack(loop=loop)
    alone.take_apart()
    assert len(alone.blocks) == DEPTH
    for one, other in zip(whole.layers(), alone.layers(), strict=True):
        jax.tree.map(np.testing.assert_array_equal, nnx.state(one), nnx.state(other))
    np.testing.assert_allclose(alone(x, ctx)[0], whole(x, ctx)[0], rtol=1e-6, atol=1e-6)
    streamed = [model(x, ctx, model.init_state(2, 7, x.dtype))[0] for model in (alone, whole)]
    np.testing.assert_array_equal(*streamed)


def test_layers_are_scanned_where_the_program_is_compiled_for_an_accelerator():
    x, ctx = inputs()
    graphdef, params = nnx.split(stack())

    def loops() -> bool:
        traced = jax.make_jaxpr(lambda params: nnx.merge(graphdef, params)(x, ctx)[0])(params)
        return any(e.primitive.name == 'scan' and e.params['length'] == DEPTH // 2 for e in traced.jaxpr.eqns)

    assert not loops()
    with target.compiling_for(target.TPU_V5E):
        assert loops()


def test_stacks_saved_before_there_were_other_residuals_are_plain():
    config = spec(Stack, depth=1, blocks=(spec(Block, mixer=spec(Attention, heads=2)),))
    saved = plain(config)
    del saved['residual']
    assert plain(from_plain(saved)) == plain(config)
    assert type(build(from_plain(saved))(DIM, rngs=nnx.Rngs(0)).residual) is Plain


def test_a_stack_hands_its_state_on():
    x, ctx = inputs()
    model = stack()
    whole, none = model(x, ctx)
    state = model.init_state(2, 7, jnp.float32)
    first, state = model(x[:, :3], Context.full(2, 3), state)
    second, state = model(x[:, 3:], Context.full(2, 4, start=3), state)
    assert none is None
    np.testing.assert_allclose(jnp.concatenate([first, second], axis=1), whole, rtol=1e-5, atol=1e-5)


def test_dropout_is_unbiased_and_off_when_deterministic():
    x = jnp.ones((64, 32, 8))
    ctx = Context(positions=Context.full(64, 32).positions, deterministic=False, dropout_key=jax.random.key(0))
    y = dropped(x, 0.25, ctx)
    kept = float(jnp.mean(y > 0))
    np.testing.assert_allclose(y[y > 0], 4 / 3, rtol=1e-6)
    assert abs(kept - 0.75) < 4 * (0.75 * 0.25 / x.size) ** 0.5
    assert dropped(x, 0.25, Context.full(64, 32)) is x


def test_layers_drop_independently():
    _, ctx = inputs()
    ctx = Context(positions=ctx.positions, deterministic=False, dropout_key=jax.random.key(0))
    keys = {tuple(jax.random.key_data(ctx.fold_in(i).dropout_key).tolist()) for i in range(DEPTH)}
    assert len(keys) == DEPTH


@pytest.mark.parametrize(
    ('name', 'depth', 'missing'),
    [
        ('2*gla+mha', 3, []),
        ('2*gla+mha', 2, ['Attention']),
        ('gla+mha+gla', 2, []),
        ('mha+nope', 1, ['Attention with position=None']),
        ('mha+mingru+gla', 1, ['DiagonalRecurrence', 'LinearAttention']),
        ('uniattn', 1, []),
        ('lamamba', 2, []),
        ('lamamba', 1, ['WindowAttention with shifted=True']),
    ],
)
def test_layers_that_a_stack_is_too_shallow_for_are_named(name, depth, missing):
    recipe = chosen_recipe(name)
    made = stack_spec(recipe.sized(heads=2, window=4), layer=recipe.layer, depth=depth, mlp=spec(GatedMLP))
    assert missing_layers(made) == missing


def test_a_layer_may_have_several_mixers_before_its_channel_mixer():
    recipe = chosen_recipe('lamamba')
    mixers = recipe.sized(heads=2)
    made = stack_spec(mixers, layer=recipe.layer, depth=6, mlp=spec(GatedMLP))
    assert made.depth == 12 and recipe.layer.period(mixers) == 2
    assert [block.mlp is None for block in made.blocks] == [True, False, True, False]
    assert [block.mixer for block in made.blocks] == list(mixers)
    with pytest.raises(UserError, match='a layer has 2 mixers; a pattern of 3 does not fill whole layers'):
        recipe.layer.pattern(mixers[:3], depth=2, mlp=None)


def test_errors():
    with pytest.raises(UserError, match=r"loop in .*'scan'.* got 5, 2 blocks, 'scann'"):
        stack(loop='scann')
