"""Which channels are rotated where the rest is compressed, and by how much."""

import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.errors import UserError
from attnlab.functional.rotary import rotate
from attnlab.nn.decoupled import DecoupledRope, EliteRope, SharedKey
from attnlab.testing.noise import noise


def test_decoupled_channels_are_half_as_many_and_even():
    # 128 and 64 of DeepSeek-V2; an odd half is rounded, and two channels are the least.
    assert [DecoupledRope().split(channels) for channels in (128, 12, 2)] == [(128, 64), (12, 6), (2, 2)]
    assert DecoupledRope().split(10)[1] % 2 == 0
    assert DecoupledRope().keys(16) == 1


def test_decoupled_pairs_are_neighbours():
    x, positions = noise(1, 5, 2, 4), jnp.arange(5, dtype=jnp.int32)[None]
    expected = rotate(x, positions, base=100.0, interleaved=True)
    np.testing.assert_array_equal(DecoupledRope(base=100.0).rotate(x, positions, 8), expected)


def test_elite_pairs_keep_the_frequencies_they_had():
    # Heads of six channels at base 1000: frequencies 1, 1/10 and 1/100.
    rope = EliteRope(base=1000.0, chunks=((2, 0), (1, 2)))
    x, positions = noise(1, 1, 2, 4), jnp.full((1, 1), 7, jnp.int32)
    y = np.asarray(rope.rotate(x, positions, 6))[0, 0]
    for head, frequencies in enumerate([(0.01, 1.0), (0.1, 0.01)]):
        first, second = np.asarray(x)[0, 0, head, :2], np.asarray(x)[0, 0, head, 2:]
        cos, sin = np.cos(7 * np.array(frequencies)), np.sin(7 * np.array(frequencies))
        expected = [*(first * cos - second * sin), *(second * cos + first * sin)]
        np.testing.assert_allclose(y[head], expected, rtol=1e-5, atol=1e-6)


def test_all_pairs_in_order_are_plain_rotation():
    x, positions = noise(2, 5, 3, 8), jnp.arange(10, dtype=jnp.int32).reshape(2, 5)
    y = EliteRope(chunks=((0, 1, 2, 3),) * 3).rotate(x, positions, 8)
    np.testing.assert_allclose(y, rotate(x, positions), rtol=1e-6, atol=1e-6)


def test_without_a_choice_an_eighth_is_spread_evenly():
    # LLaMA-2's heads of 128 channels keep 8 of 64 pairs, the first and the last among them.
    assert EliteRope().split(128) == (112, 16)
    np.testing.assert_array_equal(EliteRope().table(2, 128), [[0, 9, 18, 27, 36, 45, 54, 63]] * 2)
    assert EliteRope().split(4) == (2, 2)


@pytest.mark.parametrize(
    ('chunks', 'message'),
    [
        (((0, 1), (2,)), r'chunks of a head are \(2,\); each must hold 2 different ones from 0 to 3'),
        (((0, 0), (1, 2)), r'chunks of a head are \(0, 0\)'),
        (((0, 4), (1, 2)), r'chunks of a head are \(0, 4\)'),
        ((), r'chunks are \(\); they must be a tuple of pairs for every head'),
    ],
)
def test_chunks_that_do_not_fit_are_named(chunks: tuple, message: str):
    with pytest.raises(UserError, match=message):
        EliteRope(chunks=chunks).split(8)


def test_chunks_are_wanted_for_every_head():
    with pytest.raises(UserError, match='chunks are given for 2 heads; there are 3'):
        EliteRope(chunks=((0,), (1,))).keys(3)
    with pytest.raises(UserError, match='a head of 7 channels'):
        EliteRope().split(7)


@pytest.mark.parametrize('part', [DecoupledRope, SharedKey])
def test_channels_come_to_those_of_a_head(part: type):
    for ratio in (0.0, -0.5):
        with pytest.raises(UserError, match=f'ratio is {ratio}; it must be above 0: additional channels'):
            part(ratio=ratio).split(8)


@pytest.mark.parametrize('fraction', [0.0, -1.0, 2.0])
def test_a_share_of_the_pairs_is_kept(fraction: float):
    with pytest.raises(UserError, match=f'fraction is {fraction}; rotary positions turn a share'):
        EliteRope(fraction=fraction).split(8)
    assert EliteRope(fraction=fraction, chunks=((0,),)).split(8) == (6, 2)
