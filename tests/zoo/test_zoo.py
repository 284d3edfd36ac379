"""Recipes as data, and mixers made from them by name."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from ml_collections import ConfigDict

import attnlab
from attnlab.config import build, spec, takes
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.mixers.combine import within
from attnlab.mixers.mixer import Mixer
from attnlab.mixers.softmax.attention import Attention
from attnlab.testing.contract.grids import nearly_square
from attnlab.typing import State
from attnlab.zoo import ZOO, Recipe
from attnlab.zoo.recipe import merged
from pallas_kernels import dispatch, target
from tests.chosen import FIRST

RNGS = nnx.Rngs(0)


def shapes(
    make: Callable[..., Mixer], x: jax.ShapeDtypeStruct, grid: bool = False
) -> tuple[jax.ShapeDtypeStruct, State | None]:
    """Traces what making a mixer and calling it, perhaps on a grid, returns; nothing is drawn or compiled."""

    def call(x: jax.Array) -> tuple[jax.Array, State | None]:
        ctx = Context.full(*x.shape[:2])
        shape = nearly_square(x.shape[1]) if grid else None
        return make(rngs=nnx.Rngs(0))(x, dataclasses.replace(ctx, grid=shape))

    return jax.eval_shape(call, x)


@pytest.mark.parametrize('recipe', [pytest.param(recipe, id=name) for name, recipe in ZOO.items()])
def test_a_row_is_complete(recipe: Recipe):
    assert recipe.causal or recipe.bidirectional
    assert 'https://' in recipe.cite
    assert all(isinstance(mixer, ConfigDict) for mixer in recipe.pattern)
    assert not recipe.implementations or {'reference', 'xla'} <= set(recipe.implementations)


@pytest.mark.parametrize('recipe', [pytest.param(recipe, id=name) for name, recipe in ZOO.items()])
def test_small_sizes_and_knobs_are_arguments_of_its_mixers(recipe: Recipe):
    taken = {name for mixer in recipe.pattern for each in within(mixer) for name in takes(each)}
    assert taken >= {*recipe.small, *recipe.knobs.values()}
    assert recipe.knobs.keys() <= {'heads', 'state'}


@pytest.mark.parametrize(
    ('implementation', 'here'),
    [('mosaic_gpu', target.H100), ('mosaic_tpu', target.TPU_V5E)],
    ids=lambda each: str(each)[:10],
)
@pytest.mark.parametrize(
    'recipe',
    [
        pytest.param(recipe, id=name, marks=() if name in FIRST.values() else pytest.mark.slow)
        for name, recipe in ZOO.items()
    ],
)
def test_kernels_serve_the_recipes_that_say_so(recipe: Recipe, implementation: str, here: target.Target):
    x = jax.ShapeDtypeStruct((2, 256, 512), jnp.bfloat16)  # At 128 kernels would serve the values of gau.
    chosen = set()
    pattern = recipe.sized(heads=8)
    for layer in (mixer for place, mixer in enumerate(pattern) if mixer not in pattern[:place]):
        with target.compiling_for(here), dispatch.ledger() as entries:
            shapes(functools.partial(build(layer), 512), x, recipe.grid)
        # A prelude is not told `implementation`, and its core has no kernel for TPUs.
        chosen |= {entry.implementation for entry in entries if entry.core != 'short_conv'}
    if implementation in recipe.implementations or not recipe.implementations:
        assert chosen == ({implementation} if recipe.implementations else set())
    else:  # Of several cores some may have a kernel.
        assert 'xla' in chosen and chosen <= {'xla', implementation}


@pytest.mark.parametrize('name', [name for name, recipe in ZOO.items() if len(recipe.pattern) == 1])
def test_every_single_mixer_can_be_made_by_name(name: str):
    takes_heads = any('heads' in takes(mixer) for mixer in within(ZOO[name].spec))
    heads = {'heads': ZOO[name].small.get('heads', 4)} if takes_heads else {}
    make = functools.partial(attnlab.make_mixer, name, 32, **heads)
    length = 64 if ZOO[name].grid else 3
    y, state = shapes(make, jax.ShapeDtypeStruct((1, length, 32), jnp.float32), ZOO[name].grid)
    assert y.shape == (1, length, 32) and state is None


def test_overrides_take_the_place_of_the_recipe():
    mixer = attnlab.make_mixer('gqa', 32, heads=8, kv_heads=4, position=None, rngs=RNGS)
    assert isinstance(mixer, Attention)
    assert (mixer.heads, mixer.kv_heads, mixer.position) == (8, 4, None)
    attention, mamba = attnlab.make_mixer('hymba', 32, heads=4, window=3, state=5, norm=None, rngs=RNGS).mixers
    assert (attention.heads, attention.reach.window, mamba.A_log.shape[1]) == (4, 3, 5)


@pytest.mark.parametrize(
    ('name', 'arguments', 'message'),
    [
        ('mhaa', {}, "no recipe 'mhaa'; did you mean 'mha'"),
        ('mha', {'head': 4}, "'mha' takes no argument 'head'; did you mean 'heads'"),
        ('mha', {}, "'mha' needs a value for heads"),
        ('hymba', {}, "'hymba' needs a value for heads"),
        ('hymba', {'head': 4}, "'hymba' takes no argument 'head'; did you mean 'heads'"),
        ('griffin', {}, "'griffin' is a pattern of 3 layers"),
    ],
)
def test_mistakes_are_named(name: str, arguments: dict, message: str):
    with pytest.raises(UserError, match=message):
        attnlab.make_mixer(name, 32, rngs=RNGS, **arguments)


def kinds(mixers: tuple[ConfigDict, ...]) -> list[str]:
    return [mixer.target.rpartition('.')[2] for mixer in mixers]


@pytest.mark.parametrize(
    ('name', 'pattern'),
    [
        ('xlstm', ['MLSTM'] * 7 + ['SLSTM']),
        ('nemotron_h', ['StateSpaceDual'] * 5 + ['Attention']),
        ('falcon_h1', ['SideBySide']),
        ('s_mamba', ['SideBySide']),
        ('qwen3_next', ['LinearAttention'] * 3 + ['Attention']),
        ('kimi_linear', ['LinearAttention'] * 3 + ['LatentAttention']),
        ('jamba', ['SelectiveSSM'] * 4 + ['Attention'] + ['SelectiveSSM'] * 3),
        ('minimax_01', ['LinearAttention'] * 7 + ['Attention']),
    ],
)
def test_patterns_of_hybrids_are_those_of_their_papers(name: str, pattern: list[str]):
    assert kinds(ZOO[name].pattern) == pattern


def test_what_stands_side_by_side_is_added():
    """Mamba-2 and attention in falcon_h1; in s_mamba two of Mamba as wide as the model, one of them from the end."""
    falcon, both = (ZOO[name].spec for name in ('falcon_h1', 's_mamba'))
    assert kinds(falcon.mixers) == ['StateSpaceDual', 'Attention']
    assert kinds(both.mixers) == ['SelectiveSSM', 'Backwards'] and kinds(both.mixers[1].mixers) == ['SelectiveSSM']
    for mixer in (falcon, both):
        assert mixer.scales == (1.0, 1.0) and mixer.norm is None
    assert falcon.mixers[0].norm is None and [both.mixers[0].expand, both.mixers[1].mixers[0].expand] == [1, 1]


def test_attention_that_reads_both_ways_says_so():
    """But for rows whose order the causal mask alone tells, and whose sinks begin a stream."""
    silent = [
        name
        for name, recipe in ZOO.items()
        if len(recipe.pattern) == 1 and recipe.causal and not recipe.bidirectional
        for mixer in recipe.pattern
        if mixer.target == spec(Attention).target and mixer.position is not None and not mixer.sinks
    ]
    assert silent == []


def test_two_recipes_of_one_name_are_refused():
    with pytest.raises(ValueError, match='two recipes are called mha'):
        merged({'mha': ZOO['mha']}, {'mha': ZOO['gqa']})
