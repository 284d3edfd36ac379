"""Attention that keeps what few keys lack, call by call against the written definition in float64 with numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.mixers.softmax.attention import Attention
from attnlab.mixers.softmax.reused import Reuse, ReusedAttention
from attnlab.nn.norms import HeadRMSNorm
from attnlab.nn.temperatures import LogLength
from attnlab.testing.contract import cast_parameters
from attnlab.testing.noise import perturbed
from pallas_kernels import Sigmoid

DIM, HEADS, LENGTH = 8, 2, 12
REUSE = Reuse(share=0.5, first=2, every=3, drift=0.04)


def inputs(calls, moved=0.05):
    rng = np.random.default_rng(0)
    first = rng.standard_normal((LENGTH, DIM))
    return [first + moved * call * rng.standard_normal((LENGTH, DIM)) for call in range(calls)]


def run(reuse, xs):
    """The outputs of calls one after the other, and those of the attention itself."""
    with jax.enable_x64(True):
        attention = cast_parameters(
            perturbed(Attention(DIM, heads=HEADS, bias=True, causal=False, rngs=nnx.Rngs(0))), jnp.float64
        )
        mixer, ctx = ReusedAttention(attention, reuse), Context.full(1, LENGTH)
        state = mixer.init_state(1, LENGTH, jnp.float64)
        call = jax.jit(lambda x, state: mixer(x, ctx, state))
        found = []
        for x in xs:
            y, state = call(jnp.asarray(x)[None], state)
            found.append(np.asarray(y)[0])
        whole = [np.asarray(attention(jnp.asarray(x)[None], ctx)[0])[0] for x in xs]
        return attention, found, whole


def mapped(linear, x):
    return x @ np.asarray(linear.weight[...]) + np.asarray(linear.bias[...])


def read(attention, x, near=None, mass=None):
    """What heads read, mapped; and the weights over all keys."""
    q, k, v = (
        mapped(part, x).reshape(LENGTH, HEADS, -1).swapaxes(0, 1)
        for part in (attention.query, attention.key, attention.value)
    )
    numerators = np.exp(q @ k.swapaxes(1, 2) / np.sqrt(DIM // HEADS))
    kept = numerators if near is None else np.where(near, numerators, 0)
    weights = kept / kept.sum(axis=-1, keepdims=True)
    y = weights @ v if mass is None else mass[..., None] * (weights @ v)
    return mapped(attention.output, y.swapaxes(0, 1).reshape(LENGTH, DIM)), weights


def test_calls_are_those_of_the_paper():
    """Calls 0, 1, 3 and 6 read all keys; mass and residual are of the last of these, and the mass drifts."""
    xs = inputs(8)
    attention, found, _ = run(REUSE, xs)
    places = np.arange(LENGTH)
    near = np.abs(places[:, None] - places[None]) <= 3
    for call, x in enumerate(xs):
        if call in (0, 1, 3, 6):
            expected, weights = read(attention, x)
            mass = np.where(near, weights, 0).sum(axis=-1)
            residual = expected - read(attention, x, near, mass)[0]
        else:
            expected = read(attention, x, near, mass)[0] + residual
            mass = mass + 0.04
        np.testing.assert_allclose(found[call], expected, rtol=1e-9, atol=1e-11)


def test_few_keys_have_the_weights_that_they_have_among_all():
    """A temperature goes by the number of all keys where few of them are read, too."""
    attention = perturbed(Attention(DIM, heads=HEADS, temperature=LogLength, causal=False, rngs=nnx.Rngs(0)))
    reuse = Reuse(share=0.5, first=1, every=2, drift=0.0, kept='mass')
    mixer, ctx = ReusedAttention(attention, reuse), Context.full(1, LENGTH)
    x = jnp.asarray(3 * inputs(1)[0], jnp.float32)[None]
    _, state = mixer(x, ctx, mixer.init_state(1, LENGTH, jnp.float32))
    y, _ = mixer(x, ctx, state)
    weights, places = attention.read_weights(x, ctx)[0], np.arange(LENGTH)
    near = np.where(np.abs(places[:, None] - places[None]) <= 3, weights, 0)
    read = np.einsum('bhts,bshv->bthv', near, attention.value(x).reshape(1, LENGTH, HEADS, -1))
    np.testing.assert_allclose(y, attention.written(jnp.asarray(read), x), atol=1e-5)


def test_what_is_kept_brings_few_keys_nearer_to_all():
    """On tokens that hardly move most of what few keys lack is what they lacked before."""
    errors = {}
    for kept in ('mass and residual', 'nothing'):
        reuse = dataclasses.replace(REUSE, share=0.17, first=1, every=9, drift=0.0, kept=kept)
        _, found, whole = run(reuse, inputs(4, moved=0.02))
        errors[kept] = [np.abs(one - other).mean() for one, other in zip(found, whole, strict=True)][1:]
    assert max(errors['mass and residual']) < 0.3 * min(errors['nothing'])


def test_the_same_tokens_again_give_the_same():
    _, found, whole = run(dataclasses.replace(REUSE, first=1, every=9), [inputs(1)[0]] * 2)
    np.testing.assert_allclose(found, whole, rtol=1e-9, atol=1e-11)


def test_few_keys_that_are_all_keys_lack_nothing():
    xs = inputs(3, moved=1.0)
    for kept in ('mass and residual', 'mass', 'nothing'):
        _, found, whole = run(Reuse(share=2, first=1, every=9, drift=0.0, kept=kept), xs)
        np.testing.assert_allclose(found, whole, rtol=1e-9, atol=1e-11)
    _, drifted, whole = run(Reuse(share=2, first=1, every=9, drift=0.1, kept='mass'), xs)
    assert not np.allclose(drifted[2], whole[2])


def test_without_a_state_it_is_the_attention():
    attention = Attention(DIM, heads=HEADS, causal=False, rngs=nnx.Rngs(0))
    x, ctx = jnp.asarray(inputs(1)[0], jnp.float32)[None], Context.full(1, LENGTH)
    y, state = ReusedAttention(attention, REUSE)(x, ctx)
    np.testing.assert_array_equal(y, attention(x, ctx)[0])
    assert state is None


@pytest.mark.parametrize(
    ('make', 'sentence'),
    [
        (lambda: Reuse(share=0.0), 'share of Reuse is 0.0; it must be above 0 and at most 2'),
        (
            lambda: Reuse(kept='residual'),
            "kept of Reuse is 'residual'; it must be 'mass and residual' or 'mass' or 'nothing'",
        ),
        (lambda: wrapped(), 'reuse between calls is for softmax attention to all keys on both sides'),
        (lambda: wrapped(causal=False, weights=Sigmoid()), 'reuse between calls is for softmax attention'),
        (lambda: wrapped(causal=False, norm=HeadRMSNorm), 'without a sink and a norm of what heads have read'),
    ],
)
def test_mistakes_are_named(make, sentence):
    with pytest.raises(UserError, match=sentence):
        make()


def wrapped(**options):
    return ReusedAttention(Attention(DIM, heads=HEADS, rngs=nnx.Rngs(0), **options), REUSE)
