"""Residual convolutions at the points of a block, and the argument of configs that puts them there."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.blocks.block import Block
from attnlab.config import build
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.mixers.convolution.gated import GatedConvolution
from attnlab.mixers.linear.inline import LocalResidual
from attnlab.mixers.mixer import Mixer
from attnlab.mixers.softmax.attention import Attention
from attnlab.mixers.spatial.linear import GridInLine
from attnlab.nn.convolutions import CentredConv, DepthwiseConv
from attnlab.nn.mlps import ConvolvedMLP, GatedMLP
from attnlab.nn.norms import HeadRMSNorm
from attnlab.nn.preludes import Canon, ShortConv
from attnlab.testing.contract import Subject, claimed
from attnlab.testing.noise import noise, perturbed
from attnlab.zoo import ZOO
from attnlab.zoo.chosen import chosen_recipe, convolved
from configs import recall

DIM = 16

CHECKS = {
    'decoding': True,
    'bfloat16': False,
    'gradients': False,
    'no look-ahead': False,
    'packing': False,
    'padding': False,
    'streaming packed': False,
}
"""What is asked of mixers with a prelude that their rows are without, and whether every time or nightly."""


def block(points: str, dim: int = DIM, *, rngs: nnx.Rngs) -> Block:
    attention = functools.partial(Attention, heads=2, prelude=Canon if 'B' in points else None)
    return Block(
        dim,
        mixer=attention,
        mlp=functools.partial(ConvolvedMLP if 'D' in points else GatedMLP, hidden=8),
        mixer_prelude=Canon if 'A' in points else None,
        mlp_prelude=Canon if 'C' in points else None,
        rngs=rngs,
    )


def taps(module: nnx.Module) -> list[nnx.Param]:
    return [part.conv.taps for _, part in nnx.iter_modules(module) if isinstance(part, Canon)]


def test_convolutions_without_taps_change_nothing():
    everywhere, nowhere = block('ABCD', rngs=nnx.Rngs(0)), block('', rngs=nnx.Rngs(1))
    assert len(taps(everywhere)) == 6
    for each in taps(everywhere):
        each[...] = jnp.zeros_like(each[...])
    for part in ('query', 'key', 'value', 'output'):
        nnx.update(getattr(nowhere.mixer, part), nnx.state(getattr(everywhere.mixer, part)))
    nnx.update(nowhere.mlp, nnx.state(everywhere.mlp.network))
    x = noise(2, 6, DIM)
    np.testing.assert_array_equal(everywhere(x, Context.full(2, 6))[0], nowhere(x, Context.full(2, 6))[0])


def test_convolutions_stand_behind_the_norms_and_within_the_network():
    made, x, ctx = block('ACD', rngs=nnx.Rngs(0)), noise(2, 6, DIM), Context.full(2, 6)

    def canon(part: Canon, y: jnp.ndarray) -> jnp.ndarray:
        late = [jnp.pad(y, ((0, 0), (3 - i, 0), (0, 0)))[:, : y.shape[1]] for i in range(4)]
        return y + sum(part.conv.taps[i][None, None] * late[i] for i in range(4))

    y = x + made.mixer(canon(made.mixer_prelude, made.mixer_norm(x)), ctx)[0]
    z, network = canon(made.mlp_prelude, made.mlp_norm(y)), made.mlp.network
    both = canon(made.mlp.prelude, jnp.concatenate([network.gate(z), network.up(z)], axis=-1))
    y = y + network.down(both[..., :8] / (1 + jnp.exp(-both[..., :8])) * both[..., 8:])
    np.testing.assert_allclose(made(x, ctx)[0], y, rtol=2e-5, atol=2e-5)


def test_taps_start_within_a_half():
    start = Canon(1000, rngs=nnx.Rngs(0)).conv.taps[...]
    assert 0.49 < float(jnp.abs(start).max()) <= 0.5 and abs(float(start.std()) - 12**-0.5) < 0.01


@functools.lru_cache
def subject() -> Subject:
    return Subject(functools.partial(block, 'ABCD'), DIM)


@pytest.mark.parametrize('what', ['streaming', 'streaming packed'])
def test_a_block_with_all_points_keeps_the_contract(what):
    claimed(causal=True, bidirectional=False, streaming=True, packed=True)[what](subject())


AT_B = ('ecoformer', 'inline', 'agent', 'norm_lin', 'soft', 'gsa', 'lizard', 'mlstm', 'path', 'moba')
"""The first row of each class of mixer that has no convolution before it in its own row, and takes one."""


def made_at_b(name: str, dim: int, *, rngs: nnx.Rngs, conv: str = 'B', **sizes: Any) -> Mixer:
    return build(convolved(ZOO[name], conv).reduced(**sizes)[0])(dim, rngs=rngs)


@functools.lru_cache(maxsize=1)
def subject_at_b(name: str) -> Subject:
    recipe = ZOO[name]
    made = functools.partial(made_at_b, name)
    smooth = functools.partial(made, **recipe.surrogate) if recipe.surrogate else None
    return Subject(made, causal=recipe.causal, surrogate=smooth)


@pytest.mark.parametrize(
    ('name', 'what'),
    [
        pytest.param(
            name, what, marks=[pytest.mark.xdist_group(f'{name} at B'), *([] if always else [pytest.mark.slow])]
        )
        for name in AT_B
        for what, always in CHECKS.items()
        if ZOO[name].causal or what not in ('decoding', 'no look-ahead', 'streaming packed')
    ],
)
def test_mixers_that_take_them_keep_the_contract(name, what):
    claims = ('causal', 'bidirectional', 'streaming', 'packed')
    claimed(**{claim: getattr(ZOO[name], claim) for claim in claims})[what](subject_at_b(name))


class Behind(nnx.Module):
    """A projection and the prelude behind it."""

    def __init__(self, linear: nnx.Module, prelude: Canon):
        self.linear, self.prelude = linear, prelude

    def __call__(self, x):
        return self.prelude(self.linear(x), None)[0]


@pytest.mark.parametrize('name', AT_B)
def test_at_b_they_are_of_the_projections(name):
    """All that the mixer has, and of nothing else."""
    made = perturbed(made_at_b(name, DIM, rngs=nnx.Rngs(0)), 0.1)
    bare = made_at_b(name, DIM, conv='0', rngs=nnx.Rngs(1))
    parts = nnx.state(made)
    del parts['preludes']
    nnx.update(bare, parts)
    order = ('value', 'query', 'key') if name in ('agent', 'soft') else ('query', 'key', 'value')
    projections = [each for each in order if hasattr(bare, each)]
    assert len(made.preludes) == len(projections) and not bare.preludes
    for each, prelude in zip(projections, made.preludes, strict=True):
        setattr(bare, each, Behind(getattr(bare, each), prelude))
    x, ctx = noise(2, 12, DIM), Context.full(2, 12)
    np.testing.assert_array_equal(jax.jit(made)(x, ctx)[0], jax.jit(bare)(x, ctx)[0])


def test_an_argument_puts_them_in_any_recipe_or_takes_them_out():
    mha, delta = (convolved(chosen_recipe(name), 'canon') for name in ('mha', 'gated_delta_net'))
    assert mha.layer.points == delta.layer.points == 'ABCD'
    assert mha.spec[0].prelude.target.endswith('.Canon') and delta.spec[0].prelude.target.endswith('.ShortConv')
    bare = convolved(chosen_recipe('gated_delta_net'), 'none').spec[0].prelude
    assert bare.target.endswith('.Activation') and bare.name == 'silu'
    assert ZOO['gated_delta_net'].spec.prelude.target.endswith('.ShortConv')
    assert convolved(ZOO['gla'], '0') is ZOO['gla']
    alternating = recall.get_config('zoo=gla,conv=1').model.stack.blocks
    assert [each.mixer.target.rpartition('.')[2] for each in alternating] == ['GatedConvolution', 'LinearAttention']


@pytest.mark.parametrize('name', ZOO)
def test_without_convolutions_there_is_none_or_it_says_so(name):
    """But that which is a convolution as a whole."""
    try:
        recipe = convolved(ZOO[name], 'none')
    except UserError as error:
        assert 'keeps a convolution, which is no argument of it; choose conv=0' in str(error)
        recipe = ZOO[name]
        assert any(convolutions(recipe))
    else:
        assert not any(convolutions(recipe))


def convolutions(recipe):
    for mixer in build(recipe.reduced()):
        made = nnx.eval_shape(lambda mixer=mixer: mixer(32, rngs=nnx.Rngs(0)))
        for _, part in nnx.iter_modules(made):
            if not isinstance(made, GatedConvolution):
                yield isinstance(part, ShortConv | DepthwiseConv | CentredConv | LocalResidual | GridInLine)


def test_at_b_a_convolution_stands_behind_norms_of_queries_and_keys():
    made = Attention(DIM, heads=2, prelude=Canon, qk_norm=HeadRMSNorm, position=None, rngs=nnx.Rngs(0))
    x = noise(1, 6, DIM)
    q, k, v, *_ = made._project(x, Context.full(1, 6), None)
    plain = {name: getattr(made, name)(x).reshape(1, 6, 2, -1) for name in ('query', 'key', 'value')}
    expected = made.query_norm(plain['query']), made.key_norm(plain['key']), plain['value']
    for found, part, flat in zip((q, k, v), made.preludes, expected, strict=True):
        np.testing.assert_allclose(found.reshape(1, 6, -1), part(flat.reshape(1, 6, -1), None)[0], rtol=1e-6)


@pytest.mark.parametrize(
    ('zoo', 'conv', 'message'),
    [
        ('mha', 'AE', 'conv=AE must be 0, 1, none, canon, or points among ABCD'),
        ('mha', 'AA', 'each at most once'),
        ('uniattn', 'A', 'blocks that wire their own branches take none'),
        ('mla', 'B', 'needs a mixer with a prelude; .* has none: choose conv=ACD, or conv=A for layers'),
        ('path', 'none', r'conv=none: .*\.PathAttention keeps a convolution'),
        ('mamba', 'AD', 'are at channel mixers, and layers of this model have none; choose AB'),
    ],
)
def test_what_has_no_such_points_says_so(zoo, conv, message):
    with pytest.raises(UserError, match=message):
        convolved(chosen_recipe(zoo), conv)
