"""Decays for every key channel: the ways of computing them are chosen for every row of the batch."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from attnlab.testing.tolerances import assert_close
from pallas_kernels import target
from pallas_kernels.diagonal_low_rank import chunk
from pallas_kernels.matrix_state import vector
from pallas_kernels.matrix_state.chunks import MODERATE
from pallas_kernels.matrix_state.mosaic_gpu import channel_decays


def drawn(*shape: int, place: int) -> jax.Array:
    return jax.random.normal(jax.random.key(place), shape) / 4


@pytest.mark.parametrize('core', ['linear_attention', 'delta_rule', 'diagonal_low_rank'])
def test_strong_decays_of_one_row_change_no_bit_of_another(core):
    b, t, h, k = 2, 24, 1, 8
    q, keys, v, a = (drawn(b, t, h, k, place=place) for place in range(4))
    further = {'linear_attention': (), 'delta_rule': (jnp.full((b, t, h), 0.5),), 'diagonal_low_rank': (a,)}[core]
    weights = drawn(b, t, h, k, place=4)

    @jax.jit
    def measured(log_decay: jax.Array) -> list[jax.Array]:
        def loss(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
            y, _ = getattr(pallas_kernels, core)(*arrays, *further, log_decay=log_decay, implementation='xla')
            return jnp.vdot(weights, y), y

        (_, y), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, keys, v)
        return [y, *gradients]

    gentle = jnp.full((b, t, h, k), -0.1)
    strong = gentle.at[1].set(-MODERATE)
    ours = measured(gentle), measured(strong)
    for one, other in zip(*ours, strict=True):
        np.testing.assert_array_equal(one[0], other[0])
        assert np.abs(one[1] - other[1]).max() > 1e-3 and np.isfinite(other).all()


def evaluated_as(
    core: str, further: tuple[jax.Array, ...], segments: jax.Array | None = None
) -> Callable[..., list[jax.Array]]:
    """From a form's name and q, k, v and log decays to the outputs and the gradients of these."""

    @functools.partial(jax.jit, static_argnums=0)
    def evaluated(implementation: str, *arrays: jax.Array) -> list[jax.Array]:
        def loss(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
            *arrays, log_decay = arrays
            options = {'log_decay': log_decay, 'segments': segments, 'implementation': implementation}
            y, _ = getattr(pallas_kernels, core)(*arrays, *further, **options)
            return jnp.vdot(drawn(*y.shape, place=4), y), y

        (_, y), gradients = jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(*arrays)
        return [y, *gradients]

    return evaluated


def agree(evaluated: Callable[..., list[jax.Array]], *arrays: jax.Array) -> None:
    """The portable form and the definition."""
    _, t, _, k = arrays[0].shape
    found, expected = evaluated('xla', *arrays), evaluated('reference', *arrays)
    for one, other, what in zip(found, expected, ('y', 'dq', 'dk', 'dv', 'dlog_decay'), strict=True):
        assert_close(one, other, dtype=jnp.float32, reduction=t * k, what=what)


@pytest.mark.parametrize('documents', [False, True])
@pytest.mark.parametrize('core', ['linear_attention', 'delta_rule', 'diagonal_low_rank'])
def test_rows_of_every_strength_are_the_reference(core, documents):
    """Both forms in a batch, and one for all of it."""
    b, t, h, k = 3, 64, 2, 8
    q, keys, v, a = (4 * drawn(b, t, h, k, place=place) for place in range(4))
    further = {'linear_attention': (), 'delta_rule': (jnp.full((b, t, h), 0.5),), 'diagonal_low_rank': (a / 8,)}[core]
    begins = jnp.zeros((b, t), int).at[:, jnp.array([5, 21, 22, 48])].set(1)
    segments = jnp.cumsum(begins, axis=1) if documents else None

    arrays = q, keys / jnp.linalg.norm(keys, axis=-1, keepdims=True), v
    measured = evaluated_as(core, further, segments)
    for strengths in ((0.1, 3.5, 40.0), (3.5, 3.5, 3.5)):
        log_decay = -jnp.array(strengths)[:, None, None, None] * jnp.exp(drawn(b, t, h, k, place=5))
        agree(measured, *arrays, log_decay)


@pytest.mark.parametrize('channels', [1, 8], ids=['scalar', 'vector'])
@pytest.mark.parametrize('core', ['linear_attention', 'delta_rule', 'diagonal_low_rank'])
def test_a_step_that_forgets_all_leaves_the_others_their_decays(core, channels):
    """In the portable form, which sums decays: beside one of -1e9 others would be lost, first in a chunk or within."""
    b, t, h, k = 4, 64, 1, 8
    q, keys, v, a = (4 * drawn(b, t, h, k, place=place) for place in range(4))
    further = {'linear_attention': (), 'delta_rule': (jnp.full((b, t, h), 0.5),), 'diagonal_low_rank': (a / 8,)}[core]
    log_decay = jnp.full((b, t, h, channels), -0.05)
    for row, (step, strong) in enumerate(((0, -1e9), (40, -1e9), (32, -1e5), (5, -1e5))):
        log_decay = log_decay.at[row, step].set(strong)
    log_decay = log_decay if channels > 1 else log_decay[..., 0]

    agree(evaluated_as(core, further), q, keys / jnp.linalg.norm(keys, axis=-1, keepdims=True), v, log_decay)


@pytest.mark.parametrize('core', ['delta_rule', 'diagonal_low_rank'])
def test_the_least_number_is_a_decay_that_forgets_all_in_kernels_for_tpus(core):
    """Its parts of 16 bits are infinite, which sums of other steps would be nothing times."""
    q, k, v, a = (drawn(1, 8, 1, 8, place=place).astype(jnp.bfloat16) for place in range(4))
    further = {'delta_rule': jnp.full((1, 8, 1), 0.5), 'diagonal_low_rank': a}[core]

    @jax.jit
    def read(strong: jax.Array) -> jax.Array:
        log_decay = jnp.full((1, 8, 1), -0.1).at[0, 3].set(strong)
        run = getattr(pallas_kernels, core)
        return run(q, k, v, further, log_decay=log_decay, implementation='mosaic_tpu')[0]

    with target.compiling_for(target.interpreted('mosaic_tpu')):
        least, strong = (np.asarray(read(jnp.float32(x)), float) for x in (jnp.finfo(jnp.float32).min, -200))
    assert np.isfinite(least).all()
    np.testing.assert_array_equal(least, strong)


def blocks(dtype):
    """Log decays, `1 64 1 192`, of 64 channels for every level, a hair above the least that it allows in a half."""
    least = -channel_decays.bound(dtype) * 0.999
    steps = jnp.arange(64)
    whole = jnp.where(steps % 32 == 5, least, -1e-4)
    some = jnp.where(steps % 8 == 3, least, -1e-4)
    strong = jnp.where(steps % 8 == 3, 1.1 * least, -1e-4)
    return jnp.repeat(jnp.stack([whole, some, strong], axis=1), 64, axis=1)[None, :, None].astype(jnp.float32)


@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float16])
def test_blocks_are_as_long_as_decays_allow(dtype):
    found = channel_decays.levels(jnp.moveaxis(blocks(dtype), 2, 1), dtype)
    assert found[0, 0, 0, 0, :3].tolist() == list(channel_decays.LEVELS)


@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float16])
def test_every_length_of_blocks_is_the_reference(dtype):
    """On the kernels for Hopper, interpreted, in value and gradients; some decays are sudden, and most are none."""
    q, k = (4 * drawn(1, 64, 1, 192, place=place) for place in range(2))
    v, weights = (4 * drawn(1, 64, 1, 8, place=place) for place in range(2, 4))
    arrays = [array.astype(dtype) for array in (q, k, v)]

    def evaluated(implementation, *arrays):
        def loss(*arrays):
            q, k, v, log_decay = arrays
            o, _ = pallas_kernels.linear_attention(q, k, v, log_decay, implementation=implementation)
            return jnp.vdot(weights.astype(o.dtype), o).astype(log_decay.dtype), o

        (_, o), gradients = jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(*arrays)
        return [o, *gradients]

    with target.compiling_for(target.interpreted('mosaic_gpu')):
        ours = evaluated('mosaic_gpu', *arrays, blocks(dtype))
    with jax.enable_x64(True):
        exact = evaluated('reference', *(jnp.asarray(array, jnp.float64) for array in (*arrays, blocks(dtype))))
    for found, expected, what in zip(ours, exact, ('o', 'dq', 'dk', 'dv', 'dlog_decay'), strict=True):
        assert_close(found, expected, dtype=dtype, reduction=64 * 192, what=what)


@pytest.mark.parametrize('documents', [False, True])
def test_one_product_is_what_blocks_of_steps_are(documents):
    """Values and gradients, those written out against those that are derived, in float64."""
    l, b, h, c, k = 2, 2, 1, 32, 4
    with jax.enable_x64(True):
        q, a, key, other, log_decay = (drawn(l, b, h, c, k, place=place).astype(jnp.float64) for place in range(5))
        runs, log_decay = None, -jnp.abs(log_decay)
        if documents:
            begins = (
                jnp.zeros((l, b, 1, c, 1), bool).at[0, 0, 0, jnp.array([0, 5, 6])].set(True).at[:, 1, 0, 9].set(True)
            )
            runs, log_decay = jnp.cumsum(begins, axis=3, dtype=jnp.int32), jnp.where(begins, 0, log_decay)

        def pulled(found: Callable[[vector.Steps], vector.Found]) -> tuple:
            def weighed(*arrays: jax.Array) -> chunk.Weights:
                q, a, key, other, log_decay = arrays
                given = chunk.Chunk(q, a, (key, other), log_decay, runs)
                return chunk.weights(given, lambda _: found(vector.Steps((q,), (a,), (key, other), log_decay, runs)))

            does, pull = jax.vjp(weighed, q, a, key, other, log_decay)
            places = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), does)
            return does, pull(places)

        ours, theirs = (jax.tree.leaves(pulled(found)) for found in (vector.found, vector.by_blocks))
        for one, another in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(one, another, rtol=1e-9, atol=1e-11)
