import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.errors import UserError
from attnlab.nn.preludes import ShortConv
from attnlab.testing.noise import noise
from pallas_kernels import dispatch


def conv_of_ones(taps: list[float], **kwargs) -> ShortConv:
    conv = ShortConv(1, width=len(taps), activation=None, rngs=nnx.Rngs(0), **kwargs)
    conv.taps[...] = jnp.asarray(taps)[:, None]
    return conv


def row(values: list[float]) -> jax.Array:
    return jnp.asarray(values)[None, :, None]


def test_the_last_tap_meets_the_token_itself():
    conv = conv_of_ones([1.0, 10.0, 100.0])
    y, state = conv(row([1.0, 2.0, 3.0, 4.0]), None)
    np.testing.assert_array_equal(y[0, :, 0], [100.0, 210.0, 321.0, 432.0])
    assert state is None


def test_taps_do_not_reach_into_another_document():
    conv = conv_of_ones([1.0, 10.0, 100.0])
    y, _ = conv(row([1.0, 2.0, 3.0, 4.0, 5.0]), jnp.asarray([[1, 1, 2, 2, 2]]))
    np.testing.assert_array_equal(y[0, :, 0], [100.0, 210.0, 300.0, 430.0, 543.0])


def test_bias_and_activation_follow_the_sum():
    conv = ShortConv(2, width=1, activation='relu', bias=True, rngs=nnx.Rngs(0))
    conv.taps[...] = jnp.asarray([[2.0, 2.0]])
    conv.bias[...] = jnp.asarray([1.0, -7.0])
    y, _ = conv(jnp.asarray([[[3.0, 3.0]]]), None)
    np.testing.assert_array_equal(y[0, 0], [7.0, 0.0])


@pytest.mark.parametrize('splits', [(1, 2, 3, 4, 5, 6), (2,), (5,), (1, 6)])
@pytest.mark.parametrize('segments', [[1] * 7, [1, 1, 2, 2, 2, 0, 0], [0, 0, 1, 1, 1, 1, 2], [1, 2, 1, 1, 2, 2, 1]])
@pytest.mark.parametrize('activation', ['identity', 'gelu'])
def test_any_split_gives_what_one_pass_gives(splits: tuple[int, ...], segments: list[int], activation: str):
    conv = ShortConv(3, bias=True, activation=activation, rngs=nnx.Rngs(0))
    x = noise(1, 7, 3)
    segments = jnp.asarray([segments])
    whole, _ = conv(x, segments)
    state, pieces = conv.init_state(1, jnp.float32), []
    for start, stop in zip((0, *splits), (*splits, 7), strict=True):
        y, state = conv(x[:, start:stop], segments[:, start:stop], state)
        pieces.append(y)
    np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), whole, rtol=1e-6, atol=1e-6)
    assert state.inputs.shape == (1, 3, 3)


@pytest.mark.parametrize('activation', ['silu', 'gelu'])
def test_a_segment_that_comes_again_is_another_document(activation: str):
    conv = ShortConv(2, width=3, activation=activation, rngs=nnx.Rngs(0))
    x = noise(1, 3, 2)
    alone, _ = conv(x[:, 2:], None)
    for state in (None, conv.init_state(1, jnp.float32)):
        y, _ = conv(x, jnp.asarray([[1, 2, 1]]), state)
        np.testing.assert_allclose(y[:, 2:], alone, rtol=1e-6, atol=1e-6)


def test_a_stream_without_segments_is_one_document():
    conv = conv_of_ones([1.0, 10.0])
    first, state = conv(row([1.0]), None, conv.init_state(1, jnp.float32))
    second, _ = conv(row([2.0]), None, state)
    np.testing.assert_array_equal(jnp.concatenate([first, second], axis=1)[0, :, 0], [10.0, 21.0])


def test_taps_start_with_the_variance_asked_for():
    for gain in (1 / 3, 0.01):
        taps = ShortConv(10_000, width=4, gain=gain, rngs=nnx.Rngs(0)).taps[...]
        np.testing.assert_allclose(jnp.var(taps), gain / 4, rtol=0.05)
        assert jnp.abs(taps).max() <= (3 * gain / 4) ** 0.5  # A third: one over the root of the width.


def test_mistakes_are_named():
    with pytest.raises(UserError, match='width of ShortConv is 0; it must be a whole number of at least 1'):
        ShortConv(2, width=0, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match=r'gain of ShortConv is -1.0; it must be at least 0'):
        ShortConv(2, gain=-1.0, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match="no activation 'sulu'; did you mean 'selu' or 'silu'"):
        ShortConv(2, activation='sulu', rngs=nnx.Rngs(0))


def test_sums_are_rounded_once():
    conv = ShortConv(3, bias=True, rngs=nnx.Rngs(0))
    x = noise(2, 9, 3, dtype=jnp.bfloat16)
    exact, _ = conv(x.astype(jnp.float32), None)
    np.testing.assert_array_equal(conv(x, None)[0], exact.astype(jnp.bfloat16))


def test_without_a_state_it_is_the_core_whose_activation_it_has():
    def cores_of(*, decoding: bool = False, **kwargs) -> list[str]:
        conv = ShortConv(3, rngs=nnx.Rngs(0), **kwargs)
        with dispatch.ledger() as entries:
            conv(noise(1, 9, 3), None, conv.init_state(1, jnp.float32) if decoding else None)
        return [entry.core for entry in entries]

    assert cores_of() == cores_of(activation=None) == ['short_conv']
    assert cores_of(activation='relu') == cores_of(decoding=True) == []
