"""65,536 tokens in bfloat16 through weak gates and through strong ones, beside the same program in float32.

By every recipe of one mixer whose state does not grow, or by levels only, and the layers of hybrids that no other row
has. What the program computes is not checked here: float32 would be as wrong.
"""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.config import spec, spec_of
from attnlab.context import Context
from attnlab.mixers.linear.attention import LinearAttention
from attnlab.mixers.linear.write import Delta
from attnlab.nn.feature_maps import CosFormer, UnitNorm
from attnlab.nn.gates import ChannelStrengths, WriteStrength
from attnlab.nn.levels import LevelWeights
from attnlab.testing.contract.narrow import is_constant
from attnlab.testing.contract.subject import Subject
from attnlab.testing.noise import noise, perturbed
from attnlab.zoo import ZOO
from attnlab.zoo.softmax import SOFTMAX
from tests.test_contract import make

LENGTH = 65_536
DIM = 16
WEAK, STRONG = 0.1, 3.0
"""How large inputs are in the first half, whose gates hardly depend on them, and in the second, which they saturate."""

WINDOW = 1024
"""Tokens whose error is measured together."""

EPS = float(jnp.finfo(jnp.bfloat16).eps)

AMPLIFYING = {'ttt_linear'}
"""Recipes that make as much of the rounding of their inputs as of the inputs: their numbers are only to be finite.

What its memory reads of given queries, keys and values is compared in `mixers/linear/test_fast_weights.py`.
"""

OPENED = {
    'gla': ('decay.up',),
    'rwkv6': ('decay.down', 'decay.up'),
    'rwkv7': ('decay.down', 'decay.up', 'rate.down', 'rate.up'),
    'mlstm': ('input_gate', 'forget_gate'),
}
"""Maps of gates that start at zero, or so small that gates would be the same for inputs of any size."""

STEEP = {'gla': 8.0}
"""How many times as large those maps are where logits are divided: by 16, after which no decay was below e^-1."""

LEVELLED = {'log_linear_gated_delta_net', 'log_linear_mamba2'}
"""Recipes whose state grows with the logarithm of the sequence."""

SIZED = {
    'cosformer': {'feature_map': spec_of(CosFormer(span=LENGTH))},
    **{name: {'levels': spec(LevelWeights, count=17)} for name in LEVELLED},
}
"""What recipes are given that are made for shorter documents."""

RECIPES = {
    **{name: row for name, row in ZOO.items() if row.causal and row.streaming and len(row.pattern) == 1},
    **{
        f'the first layer of {name}': dataclasses.replace(ZOO[name], spec=ZOO[name].pattern[0])
        for name in ('based', 'qwen3_next')
    },
}

GROWING = (SOFTMAX.keys() - {'sliding_window', 'window_sinks', 'third_order_taylor', 'mega', 'seqboat'}) | {
    *('hyena', 'rat', 'falcon_h1')
}
"""Recipes whose state grows with the sequence."""


@pytest.mark.slow
@pytest.mark.parametrize('name', RECIPES)
def test_a_long_sequence_in_bfloat16_stays_near_float32(name):
    mixer = perturbed(make(RECIPES[name], DIM, rngs=nnx.Rngs(0), **SIZED.get(name, {})), 0.02)
    for place, part in enumerate(OPENED.get(name, ())):
        weight = operator.attrgetter(part)(mixer).weight
        weight[...] = STEEP.get(name, 1.0) * noise(*weight.shape, seed=place) / weight.shape[0] ** 0.5
    assert is_constant(Subject(lambda dim, rngs: mixer, DIM)) == (name not in GROWING | LEVELLED)
    if name in GROWING:
        return
    size = np.where(np.arange(LENGTH) < LENGTH // 2, WEAK, STRONG)[None, :, None]
    x = (noise(1, LENGTH, DIM) * size).astype(jnp.bfloat16)
    run = jax.jit(lambda x: mixer(x, Context.full(1, LENGTH))[0])
    nudged = x.astype(jnp.float32) * (1 + EPS / 2 * noise(1, LENGTH, DIM, seed=1))
    with jax.default_matmul_precision('highest'):
        narrow, wide, moved = (np.asarray(run(each), np.float32) for each in (x, x.astype(jnp.float32), nudged))
    jax.clear_caches()
    assert np.isfinite(narrow).all()
    error, owed = (by_window(each, wide) for each in (narrow, moved))
    # What rounding of the inputs has moved by then; later inputs excuse nothing.
    reach = np.maximum.accumulate(owed)
    if name in AMPLIFYING:
        assert reach[-1] > 0.25, f'moves by {reach[-1]:.1%}: it is no longer AMPLIFYING'
        return
    assert reach[-1] < 0.25, f'amplifies rounding to {reach[-1]:.1%}: bfloat16 says nothing here'
    bound = 2 * EPS + 4 * reach
    worst = (error - bound).argmax()
    assert error[worst] <= bound[worst], (
        f'{error[worst]:.1%} in window {worst} of {len(error)}; bound {bound[worst]:.1%}'
    )


@pytest.mark.parametrize('write', [WriteStrength, ChannelStrengths])
def test_a_repeated_token_does_not_grow_in_bfloat16(write):
    """Eigenvalues so near -1 that rounding of a key carries some beyond."""
    channels, length = 64, 16_384
    for seed in range(3):
        mixer = LinearAttention(
            channels,
            heads=1,
            feature_map=UnitNorm(),
            gates=functools.partial(write, scale=2.0),
            write=Delta(),
            rngs=nnx.Rngs(seed),
        )
        opened = mixer.gates.linear if write is WriteStrength else mixer.gates.erase
        opened.weight[...] = jnp.zeros_like(opened.weight[...]).at[0].set(8.0)
        token = noise(1, 1, channels, seed=seed).at[..., 0].set(1.0)
        x = jnp.broadcast_to(token, (1, length, channels)).astype(jnp.bfloat16)
        run = jax.jit(lambda x, m=mixer: m(x, Context.full(1, length), m.init_state(1, length, x.dtype))[1].memory)
        narrow, wide = (np.asarray(run(each), np.float32) for each in (x, x.astype(jnp.float32)))
        assert np.linalg.norm(narrow - wide) < 0.02 * np.linalg.norm(wide), seed


def by_window(actual, expected):
    """Relative errors of windows, since a norm of what is read makes that of a read near zero as large as it likes."""
    parts = (np.linalg.norm(each.reshape(-1, WINDOW * DIM), axis=1) for each in (actual - expected, expected))
    error, size = parts
    return error / size
