import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.errors import UserError
from attnlab.mixers.linear.mlstm import MLSTM
from attnlab.mixers.linear.slots import GatedSlots
from attnlab.mixers.recurrent.slstm import SLSTM
from attnlab.mixers.spatial.gated import VisionGatedLinearAttention
from attnlab.nn.decays import LowRankDecay
from attnlab.nn.fast_weights import AverageDescent, MomentumDescent
from attnlab.nn.gates import (
    ChannelStrengths,
    HeadGate,
    MinGRUGates,
    OutputGate,
    RealGates,
    WriteStrength,
    positive,
)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_output_gate():
    gate = OutputGate(1, 1, activation='silu', bias=True, rngs=nnx.Rngs(0))
    gate.linear.weight[...] = jnp.asarray([[2.0]])
    gate.linear.bias[...] = jnp.asarray([1.0])
    np.testing.assert_allclose(gate(jnp.asarray([[[3.0]]])), 7 * sigmoid(7.0), rtol=1e-6)


def test_real_gates_by_hand():
    gates = RealGates(1, 1, blocks=1, rngs=nnx.Rngs(0))
    for linear in (gates.recurrence_gate, gates.input_gate):
        linear.weight[...] = jnp.zeros((1, 1, 1))
    gates.input_gate.bias[...] = jnp.asarray([np.log(3.0)])
    gates.rate[...] = jnp.asarray([0.0])
    # r = 1/2 and softplus(0) = log 2, so a = 2^-4; i = 3/4.
    taken, kept = gates(jnp.asarray([[[2.0], [2.0]]]), jnp.asarray([[True, False]]))
    np.testing.assert_allclose(kept[0, :, 0], [1 / 16, 1 / 16], rtol=1e-6)
    np.testing.assert_allclose(taken[0, :, 0], [1.5, 1.5 * np.sqrt(1 - 1 / 256)], rtol=1e-6)


def test_real_gates_start_with_slow_decays():
    gates = RealGates(16_000, 16_000, blocks=16_000, rngs=nnx.Rngs(0))
    slowest = jnp.exp(-8 * jax.nn.softplus(gates.rate[...]))
    assert slowest.min() >= 0.8999 and slowest.max() <= 0.9991
    np.testing.assert_allclose(slowest.mean(), (0.9 + 0.999) / 2, rtol=1e-3)


def test_gradient_of_closed_real_gates_is_finite():
    gates = RealGates(1, 1, blocks=1, rngs=nnx.Rngs(0))
    gates.recurrence_gate.bias[...] = jnp.asarray([-1e4])  # The gate underflows: a = 1, and the root is of zero.
    graphdef, parameters = nnx.split(gates)

    def total(parameters, x):
        taken, kept = nnx.merge(graphdef, parameters)(x, jnp.asarray([[True, False]]))
        return jnp.sum(taken) + jnp.sum(kept)

    for leaf in jax.tree.leaves(jax.grad(total, argnums=(0, 1))(parameters, jnp.ones((1, 2, 1)))):
        assert jnp.isfinite(leaf).all()


def test_min_gru_gates_by_hand():
    gates = MinGRUGates(1, 1, rngs=nnx.Rngs(0))
    gates.update.weight[...] = jnp.asarray([[0.0]])
    gates.update.bias[...] = jnp.asarray([np.log(3.0)])
    gates.candidate.weight[...] = jnp.asarray([[1.0]])
    # z = 3/4; candidates 2 + 1/2 and sigmoid(-1); the first token also keeps a quarter of h_0 = 1/2.
    taken, kept = gates(jnp.asarray([[[2.0], [-1.0]]]), jnp.asarray([[True, False]]))
    np.testing.assert_allclose(kept[0, :, 0], [0.25, 0.25], rtol=1e-6)
    np.testing.assert_allclose(taken[0, :, 0], [0.75 * 2.5 + 0.125, 0.75 * sigmoid(-1.0)], rtol=1e-6)


def test_positive_is_continuous_and_positive():
    np.testing.assert_allclose(positive(jnp.asarray([-20.0, 0.0, 3.0])), [sigmoid(-20.0), 0.5, 3.5], rtol=1e-6)
    assert positive(jnp.asarray([-1e-7])) == pytest.approx(0.5, abs=1e-6)


def test_mistakes_are_named():
    with pytest.raises(UserError, match='3 blocks do not divide a width of 8'):
        RealGates(8, 8, blocks=3, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match='keep the width 8 of their input, and the recurrence has'):
        RealGates(8, 16, rngs=nnx.Rngs(0))
    for given in ({'high': 1.1}, {'low': -0.5}, {'low': 0.99, 'high': 0.9}):
        with pytest.raises(UserError, match=r'RealGates start from .*; decays must be above 0, in order, and below 1'):
            RealGates(8, 8, blocks=2, **given, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match=r'sharpness of RealGates is 0.0; it must be above 0'):
        RealGates(8, 8, blocks=2, sharpness=0.0, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ('made', 'given', 'said'),
    [
        (
            WriteStrength,
            {'key_dim': 4, 'value_dim': 4, 'scale': 3.0},
            r'scale of WriteStrength is 3.0; it must be above 0',
        ),
        (ChannelStrengths, {'key_dim': 4, 'value_dim': 4, 'scale': -1.0}, r'ChannelStrengths is -1.0; .* at most 2'),
        (HeadGate, {'channels': 4, 'start': 1.0}, r'the start of a gate is 1.0; it must be above 0 and below 1'),
        (MomentumDescent, {'channels': 4, 'chunk': 2, 'forget': 0.0}, r'forget of MomentumDescent is 0.0; .* below 1'),
        (LowRankDecay, {'key_dim': 4, 'temperature': 0.0}, 'temperature of LowRankDecay is 0.0; it must be positive'),
        (GatedSlots, {'temperature': 0.0}, 'temperature of GatedSlots is 0.0; it must be positive'),
        (MLSTM, {'cap': 0.0}, 'cap of MLSTM is 0.0; it must be positive'),
        (
            VisionGatedLinearAttention,
            {'temperature': -16.0},
            r'temperature of VisionGatedLinearAttention is -16.0; it must be positive',
        ),
        (AverageDescent, {'channels': 4, 'chunk': 2, 'rate': -1.0}, r'rate of AverageDescent is -1.0; it must be posi'),
        (SLSTM, {'power': -0.3}, r'power of SLSTM is -0.3; it must be at least 0'),
    ],
)
def test_numbers_out_of_bounds_are_named(made, given, said):
    with pytest.raises(UserError, match=said):
        made(8, heads=2, rngs=nnx.Rngs(0), **given)
