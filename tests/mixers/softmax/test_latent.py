"""Attention to latents against its equations written out, and its absorbed form against that with keys and values."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import attnlab
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.mixers.softmax.latent import LatentAttention
from attnlab.nn.decoupled import DecoupledRope, EliteRope, SharedKey
from attnlab.testing.contract import context
from attnlab.testing.noise import noise
from attnlab.testing.tolerances import assert_close
from attnlab.zoo import ZOO

DECOUPLED = DecoupledRope()
ELITE = EliteRope(chunks=((0, 2), (1, 0)))


def latent_attention(dim=12, heads=2, position=DECOUPLED, **kwargs) -> LatentAttention:
    return LatentAttention(dim, heads=heads, position=position, rngs=nnx.Rngs(0), **kwargs)


@functools.partial(jax.jit, static_argnums=0)
def apply(graphdef, params, x, ctx, state=None):
    return nnx.merge(graphdef, params)(x, ctx, state)


def run(mixer: LatentAttention, x, ctx: Context | None = None) -> np.ndarray:
    x = jnp.asarray(x, jnp.float32)
    return np.asarray(apply(*nnx.split(mixer), x, Context.full(*x.shape[:2]) if ctx is None else ctx)[0])


def stream(mixer: LatentAttention, x: jax.Array, pieces, ctx: Context | None = None, length: int | None = None):
    ctx = Context.full(*x.shape[:2]) if ctx is None else ctx
    state, outputs, start = mixer.init_state(x.shape[0], length or x.shape[1], x.dtype), [], 0
    for steps in pieces:
        part = slice(start, start + steps)
        segments = None if ctx.segments is None else ctx.segments[:, part]
        piece = dataclasses.replace(ctx, positions=ctx.positions[:, part], segments=segments)
        y, state = apply(*nnx.split(mixer), x[:, part], piece, state)
        outputs.append(y)
        start += steps
    return jnp.concatenate(outputs, axis=1), state


def numbers(state) -> int:
    """What is kept of one token, besides its segment."""
    entries = state.entries
    return sum(array.size for array in (entries.latents, entries.keys)) // entries.segments.size


def rms(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def rotated(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Neighbouring channels as complex numbers."""
    z = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)
    return np.stack([z.real, z.imag], axis=-1).reshape(x.shape)


def test_the_equations_of_the_paper_written_out():
    mixer = latent_attention(key_dim=4, value_dim=3, rank=5, query_rank=6)
    x = np.asarray(noise(1, 6, 12), np.float64)[0]
    latent = rms(x @ _weight(mixer.down))
    angles = np.arange(6)[:, None] * 1.0  # Two rotated channels: one frequency, 1.
    shared = rotated(x @ _weight(mixer.key), angles)
    q = (rms(x @ _weight(mixer.query.down)) @ _weight(mixer.query.up)).reshape(6, 2, 6)
    up = _weight(mixer.up).reshape(5, 2, 7)
    heads = []
    for h in range(2):
        k, v = latent @ up[:, h, :4], latent @ up[:, h, 4:]
        scores = (q[:, h, :4] @ k.T + rotated(q[:, h, 4:], angles) @ shared.T) / np.sqrt(6)
        weights = np.exp(scores) * np.tril(np.ones((6, 6)))
        heads.append(weights / weights.sum(axis=1, keepdims=True) @ v)
    expected = np.concatenate(heads, axis=1) @ _weight(mixer.output)
    assert_close(run(mixer, x[None])[0], expected, dtype=jnp.float32, reduction=12 * 6, what='y')


def _weight(linear) -> np.ndarray:
    return np.asarray(linear.weight[...], np.float64)


def test_with_equal_scores_a_token_reads_the_mean_of_the_latents():
    mixer = latent_attention(2, 1, key_dim=2, rank=2)
    mixer.query.weight[...] = jnp.zeros_like(mixer.query.weight[...])
    mixer.down.weight[...] = mixer.output.weight[...] = jnp.eye(2)
    mixer.up.weight[...] = jnp.concatenate([jnp.ones((2, 2)), jnp.eye(2)], axis=1)
    # Divided by their root mean squares, 5 / sqrt(2) and 1, the tokens are (3, 4) sqrt(2) / 5 and (1, -1).
    y = run(mixer, [[[3.0, 4.0], [1.0, -1.0]]])
    first, second = np.array([3.0, 4.0]) * np.sqrt(2) / 5, np.array([1.0, -1.0])
    np.testing.assert_allclose(y[0], [first, (first + second) / 2], rtol=1e-5)


@pytest.mark.parametrize(
    'kwargs',
    [{'query_rank': 3, 'value_dim': 4}, {'position': ELITE, 'norm': None, 'rank': 5}],
    ids=['decoupled', 'elite'],
)
def test_absorbed_steps_give_what_keys_and_values_give(kwargs: dict):
    mixer, x = latent_attention(key_dim=6, **kwargs), noise(2, 11, 12)
    ctx = context(((1, 4), (2, 7)), ((1, 9), (2, 2)))
    expected = run(mixer, x, ctx)
    for pieces in ((1,) * 11, (4, 1, 1, 1, 4)):
        y, state = stream(mixer, x, pieces, ctx)
        assert_close(y, expected, dtype=x.dtype, reduction=12 * 11, what=f'{pieces}')
    assert int(state.consumed) == 11


def test_only_relative_positions_count():
    for position in (DECOUPLED, ELITE):
        mixer, x = latent_attention(position=position), noise(1, 9, 12)
        shifted = run(mixer, x, Context.full(1, 9, start=37))
        assert_close(shifted, run(mixer, x), dtype=jnp.float32, reduction=12 * 37, what='y')
        stretched = run(mixer, x, Context(positions=2 * jnp.arange(9, dtype=jnp.int32)[None]))
        assert np.abs(stretched - run(mixer, x)).max() > 1e-3


def test_what_is_kept_of_a_token_is_what_the_papers_say():
    def kept(name: str, dim: int, heads: int, **kwargs) -> int:
        mixer = nnx.eval_shape(lambda: attnlab.make_mixer(name, dim, heads=heads, rngs=nnx.Rngs(0), **kwargs))
        state = mixer.init_state(2, 3, jnp.bfloat16)
        assert all(array.dtype == jnp.bfloat16 for array in state.entries[:2])
        return numbers(state)

    # DeepSeek-V2-Lite: 4 heads of 128 and half of one, whatever the number of heads; V2 has the same.
    assert kept('mla', 2048, 16) == 512 + 64
    assert kept('mla', 5120, 128, key_dim=128, rank=512, query_rank=1536) == 512 + 64
    # LLaMA-2-7B with 8 of 64 frequencies and a latent of 1536: a quarter of 2 * 4096.
    assert kept('elitekv', 4096, 32) == 2 * 8 * 32 + 1536 == 2 * 4096 // 4


def test_going_beyond_the_length_gives_nan_from_there_on():
    mixer, x = latent_attention(), noise(1, 6, 12)
    y, state = stream(mixer, x, (3, 1, 1, 1), length=4)
    assert np.isfinite(y[:, :4]).all() and np.isnan(y[:, 4:]).all()
    with pytest.raises(UserError, match='6 tokens do not fit in a state of length 4'):
        mixer(x, Context.full(1, 6), state)


def test_mistakes_are_named():
    with pytest.raises(UserError, match='heads is 5; it must divide dim, which is 12'):
        latent_attention(heads=5)
    with pytest.raises(UserError, match='chunks are given for 2 heads; there are 3'):
        latent_attention(heads=3, key_dim=6, position=ELITE)
    with pytest.raises(UserError, match=r'rank_ratio of LatentAttention is -0\.5; it must be above 0'):
        latent_attention(rank_ratio=-0.5)
    with pytest.raises(UserError, match='cannot be streamed'):
        latent_attention(causal=False).init_state(1, 8, jnp.float32)


def test_a_shared_key_that_is_not_rotated_has_no_position():
    x = noise(2, 5, 12)
    nowhere = dataclasses.replace(Context.full(2, 5), positions=jnp.zeros((2, 5), jnp.int32))
    shared = run(latent_attention(position=SharedKey()), x)
    np.testing.assert_array_equal(shared, run(latent_attention(), x, nowhere))
    assert not np.array_equal(shared, run(latent_attention(), x))


@pytest.mark.parametrize('name', ['mla', 'elitekv'])
def test_matching_by_the_state_turns_the_latent_and_leaves_heads_as_they_are(name):
    def measured(size):
        mixer = attnlab.make_mixer(name, 32, heads=4, rngs=nnx.Rngs(0), **{ZOO[name].knobs['state']: size})
        kept = jax.eval_shape(lambda: mixer.init_state(1, 10, jnp.float32))
        return sum(leaf.size for leaf in jax.tree.leaves(kept)), mixer.query.weight.shape

    (less, queries), (more, same) = measured(16), measured(24)
    assert more - less == 8 * 10 and queries == same
