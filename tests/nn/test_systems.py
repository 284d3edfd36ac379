"""Linear systems against dense matrices, and their two modes against each other."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.errors import UserError
from attnlab.functional.structured import (
    CHUNK,
    Bilinear,
    conjugate_parts,
    dense_kernel,
    parts,
)
from attnlab.nn.parameter import GROUPS
from attnlab.nn.systems import DiagonalSystem, LowRankSystem, RingSystem, SharedSystem, System
from attnlab.testing.jaxprs import equations
from attnlab.testing.noise import noise, perturbed
from attnlab.testing.tolerances import tolerance

DIM, STATE = 4, 8

MADE = {
    'lin': lambda rngs, causal=True: DiagonalSystem(DIM, state=STATE, causal=causal, rngs=rngs),
    'legs and inv, bilinear': lambda rngs, causal=True: DiagonalSystem(
        DIM, state=STATE, starts=('legs', 'inv'), copies=2, method='bilinear', causal=causal, rngs=rngs
    ),
    'real': lambda rngs, causal=True: DiagonalSystem(DIM, state=STATE, starts=('real',), causal=causal, rngs=rngs),
    's4': lambda rngs, causal=True: LowRankSystem(DIM, state=STATE, causal=causal, rngs=rngs),
    's4, legt and fout': lambda rngs, causal=True: LowRankSystem(
        DIM, state=STATE, starts=('legt', 'fout'), copies=2, causal=causal, rngs=rngs
    ),
    's5': lambda rngs, causal=True: SharedSystem(DIM, state=STATE, blocks=2, causal=causal, rngs=rngs),
    'ring': lambda rngs, causal=True: RingSystem(DIM, state=STATE, causal=causal, rngs=rngs),
}


def numbers(parameter) -> np.ndarray:
    value = np.asarray(parameter[...], np.float64)
    return value[..., 0] + 1j * value[..., 1] if value.shape[-1] == 2 else value[..., 0] + 0j


def dense(system: System) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """For every channel, or once for all: transition, inputs and outputs, both of each conjugate pair."""
    if isinstance(system, RingSystem):
        rate, angle, gain = (
            np.exp(np.asarray(p[...], np.float64)) for p in (system.log_rate, system.log_angle, system.log_gain)
        )
        return [(np.diag(np.exp(-rate + 1j * angle)), gain[:, None] * numbers(system.B), numbers(system.C))]
    step = np.exp(np.asarray(system.log_step[...], np.float64))
    if isinstance(system, SharedSystem):
        A = np.asarray(system.A_real[...], np.float64) + 1j * np.asarray(system.A_imag[...], np.float64)
        decay = np.exp(step * A)
        return [(np.diag(decay), ((decay - 1) / A)[:, None] * numbers(system.B), 2 * numbers(system.C))]
    found = []
    for d in range(DIM):
        copy = d % system.A_real.shape[0]
        A = -np.exp(np.asarray(system.A_real[...], np.float64)[copy]) + 0j
        if system.A_imag is not None:
            A = A + 1j * np.asarray(system.A_imag[...], np.float64)[copy]
        B, C, P = numbers(system.B)[copy], numbers(system.C)[d], np.zeros((0, len(A)))
        if isinstance(system, LowRankSystem):
            P = numbers(system.P)[:, copy]
        A, B, C, P = (np.concatenate([each, each.conj()], axis=-1) for each in (A, B, C, P))
        matrix = step[d] * (np.diag(A) - P.T @ P.conj())
        one = np.eye(len(A))
        if isinstance(system, DiagonalSystem) and system.method == 'zoh':
            found.append((np.diag(np.exp(step[d] * A)), (np.exp(step[d] * A) - 1) / A * B, C))
        else:
            left = np.linalg.inv(one - matrix / 2)
            found.append((left @ (one + matrix / 2), left @ (step[d] * B), C))
    return found


def by_hand(system: System, x: np.ndarray) -> np.ndarray:
    """One document, `t d`, as a loop over tokens."""
    systems, y = dense(system), np.zeros(x.shape)
    for d, (matrix, inputs, outputs) in enumerate(systems):
        h = np.zeros(len(matrix), complex)
        for t in range(len(x)):
            h = matrix @ h + (inputs * x[t, d] if len(systems) > 1 else inputs @ x[t])
            if len(systems) > 1:
                y[t, d] = (outputs @ h).real
            else:
                y[t] = (outputs @ h).real
    return y


@pytest.mark.parametrize('name', MADE)
def test_convolution_and_recurrence_are_the_dense_system(name):
    """A row of one document, longer than a chunk; one of several, in one pass and in pieces."""
    with jax.enable_x64(True):
        system = perturbed(MADE[name](nnx.Rngs(0)), 0.1)
        whole = jax.jit(lambda x, segments: system(x, segments)[0])
        going = jax.jit(lambda x, segments, state: system(x, segments, state))
        length = CHUNK + 13
        x = noise(2, length, DIM, dtype=jnp.float64)
        segments = jnp.asarray(np.repeat([[1, 2, 3], [1, 2, 2]], [5, 40, length - 45], axis=1), jnp.int32)
        expected = np.zeros(x.shape)
        for row, starts in enumerate(((0, 5, 45), (0, 5))):
            for start, stop in zip(starts, (*starts[1:], length), strict=True):
                expected[row, start:stop] = by_hand(system, np.asarray(x[row, start:stop]))
        np.testing.assert_allclose(whole(x, segments), expected, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(whole(x[1:, 5:], None)[0], expected[1, 5:], rtol=1e-9, atol=1e-9)
        state, pieces = system.init_state(2, jnp.float64), []
        for start, stop in ((0, 5), (5, 45), (45, 46), (46, length)):
            # The state is of the document of the first token, which a mixer sees to.
            kept = jnp.asarray([start == 46, start > 5]).reshape(2, *(1,) * (state.ndim - 1))
            state = jnp.where(kept, state, 0)
            y, state = going(x[:, start:stop], segments[:, start:stop], state)
            pieces.append(y)
        np.testing.assert_allclose(np.concatenate(pieces, 1), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('name', ['lin', 's4, legt and fout', 's5', 'ring'])
def test_both_ways_one_set_of_dynamics_is_read_by_two_sets_of_outputs(name):
    """What comes later is the system with the other outputs, from the end; of S4's own token the first alone tells."""
    with jax.enable_x64(True):
        system = perturbed(MADE[name](nnx.Rngs(0), causal=False), 0.1)
        x = noise(1, 17, DIM, dtype=jnp.float64)
        segments = jnp.asarray(np.repeat([[1, 2]], [6, 11], axis=1), jnp.int32)
        found, state = jax.jit(lambda x: system(x, segments))(x)
        assert state is None
        forwards, expected = system.C[...], np.zeros((17, DIM))
        for start, stop in ((0, 6), (6, 17)):
            document = np.asarray(x[0, start:stop])
            system.C[...] = forwards
            expected[start:stop] = by_hand(system, document)
            system.C[...] = system.C_later[...]
            later = by_hand(system, document[::-1])[::-1]
            if isinstance(system, SharedSystem | RingSystem):
                expected[start:stop] += later
            else:
                expected[start : stop - 1] += later[1:]
        np.testing.assert_allclose(found[0], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('starts', [('legs',), ('legt', 'fout')])
def test_the_kernel_has_the_papers_generating_function(starts):
    """`sum_t K_t z^t`, cut off after a row, on the unit circle: Cauchy products and the identity of Woodbury."""
    length = 2 * CHUNK + 1
    with jax.enable_x64(True):
        system = perturbed(
            LowRankSystem(DIM, state=STATE, starts=starts, copies=len(starts), low=0.1, causal=True, rngs=nnx.Rngs(0))
        )
        impulse = jnp.zeros((1, length, DIM)).at[:, 0].set(1)
        kernel = np.asarray(jax.jit(lambda x: system(x, None)[0])(impulse)[0])
        eigenvalues, low_rank, inputs = (np.asarray(each) for each in system.scaled(jnp.float64))
    z = np.exp(-2j * np.pi * np.arange(length) / length)
    for d, (matrix, _, C) in enumerate(dense(system)):
        A, B, *rows = (np.append(each[d], each[d].conj()) for each in (eigenvalues, inputs, *low_rank))
        P, cut = np.stack(rows), C - C @ np.linalg.matrix_power(matrix, length)
        poles = 1 / (2 * (1 - z) / (1 + z) - A[:, None])
        ends = np.einsum('n,nw,rn->wr', cut, poles, P), np.einsum('rn,nw,n->wr', P.conj(), poles, B)
        within = np.eye(len(P)) + np.einsum('rn,nw,sn->wrs', P.conj(), poles, P)
        correction = np.einsum('wr,wr->w', ends[0], np.linalg.solve(within, ends[1][..., None])[..., 0])
        found = 2 / (1 + z) * (np.einsum('n,nw,n->w', cut, poles, B) - correction)
        np.testing.assert_allclose(kernel[:, d], np.fft.ifft(found).real, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ('start', 'length'),
    [
        ('fout', 4096),
        *(pytest.param(start, 4096, marks=pytest.mark.slow) for start in ('legs', 'legt')),
        *(pytest.param(start, 16384, marks=pytest.mark.slow) for start in ('legs', 'legt', 'fout')),
    ],
)
def test_in_float32_long_kernels_and_their_gradients_keep_their_digits(start, length):
    """Modes of finite windows hardly decay without their low rank, and sums over modes would lose every digit."""
    graphdef, params = nnx.split(LowRankSystem(2, state=64, starts=(start,), causal=True, rngs=nnx.Rngs(0)))
    along = np.random.default_rng(1).standard_normal((length, 2))

    def kernel(params, dtype):
        system = nnx.merge(graphdef, params)
        eigenvalues, low_rank, inputs = system.scaled(dtype)
        found, (_, _, _, outputs) = Bilinear.of(eigenvalues, low_rank), system.continuous(dtype)
        return dense_kernel(found.change(dtype), found.solve(parts(inputs)), conjugate_parts(outputs), length)

    def both(dtype):
        typed = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), dtype), params)
        found, pull = jax.vjp(jax.jit(lambda params: kernel(params, dtype)), typed)
        return jax.tree.leaves((found, pull(jnp.asarray(along, dtype))))

    single = both(jnp.float32)
    with jax.enable_x64(True):
        double = both(jnp.float64)
    for one, other in zip(single, double, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance(jnp.float32, length) * np.abs(other).max())


@pytest.mark.slow
@pytest.mark.parametrize('start', ['lin', 'inv', 'legs', 'real', 'bilinear', 's4', 'legt', 'fout'])
def test_in_float32_the_modes_agree_over_4096_steps(start):
    if start in ('s4', 'legt', 'fout'):
        system = LowRankSystem(8, state=64, starts=('legs' if start == 's4' else start,), causal=True, rngs=nnx.Rngs(0))
    else:
        method = 'bilinear' if start == 'bilinear' else 'zoh'
        starts = ('legs' if start == 'bilinear' else start,)
        system = DiagonalSystem(8, state=64, starts=starts, method=method, causal=True, rngs=nnx.Rngs(0))
    x = noise(1, 4096, 8)
    convolved = jax.jit(lambda x: system(x, None)[0])(x)
    stepped = jax.jit(lambda x: system(x, None, system.init_state(1, x.dtype))[0])(x)
    assert float(jnp.max(jnp.abs(convolved - stepped))) < 1e-4 * float(jnp.max(jnp.abs(stepped)))

    def token(state, x):
        y, state = system(x[:, None], None, state)
        return state, y[:, 0]

    _, decoded = jax.jit(lambda x: jax.lax.scan(token, system.init_state(1, x.dtype), jnp.swapaxes(x, 0, 1)))(x)
    difference = jnp.abs(convolved - jnp.swapaxes(decoded, 0, 1))
    assert float(jnp.max(difference)) < 1e-4 * float(jnp.max(jnp.abs(stepped)))


@pytest.mark.parametrize('kind', [DiagonalSystem, LowRankSystem])
def test_16384_steps_in_convolution_mode(kind):
    """Traced, forward and backward: nothing is as large as the states of all steps, a sixteenth of that at most."""
    length, channels, state = 16_384, 4, 64
    system = kind(channels, state=state, causal=True, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(system)

    def total(params, x):
        return jnp.sum(nnx.merge(graphdef, params)(x, None)[0])

    x = jax.ShapeDtypeStruct((1, length, channels), jnp.float32)
    traced = jax.make_jaxpr(jax.value_and_grad(total, argnums=(0, 1)))(params, x)
    greatest = max(math.prod(out.aval.shape) for equation in equations(traced.jaxpr) for out in equation.outvars)
    assert length * channels <= greatest <= length * channels * state / 16


def test_time_scales_are_of_the_group_dynamics():
    for name, make in MADE.items():
        found = dict(nnx.to_flat_state(nnx.state(make(nnx.Rngs(0)), nnx.Param)))
        groups = {path[-1]: variable.get_metadata()['group'] for path, variable in found.items()}
        assert set(groups.values()) <= set(GROUPS)
        assert {groups[key] for key in groups if key != 'C'} == {'dynamics'}, name


def test_steps_and_rings_start_where_they_should():
    step = jnp.exp(DiagonalSystem(512, state=2, causal=True, rngs=nnx.Rngs(0)).log_step[...])
    assert 1e-3 <= step.min() < 2e-3 and 0.05 < step.max() <= 0.1001
    ring = RingSystem(64, state=512, low=0.9, high=0.99, turn=0.3, causal=True, rngs=nnx.Rngs(0))
    radius = jnp.exp(-jnp.exp(ring.log_rate[...]))
    assert radius.min() >= 0.9 and radius.max() <= 0.9901 and jnp.exp(ring.log_angle[...]).max() <= 0.3
    np.testing.assert_allclose(jnp.exp(2 * ring.log_gain[...]), 1 - radius**2, rtol=1e-3)


def test_random_modes_are_drawn():
    """Speeds are exponentials of normal numbers, others from run to run and from layer to layer; beside them 'lin'."""
    stream = nnx.Rngs(0)
    made = [
        DiagonalSystem(64, state=64, starts=('random', 'lin'), causal=True, rngs=rngs)
        for rngs in (stream, stream, nnx.Rngs(1))
    ]
    speeds = np.stack([-system.A_imag[...] for system in made])
    assert abs(np.log(speeds[:, ::2]).mean()) < 0.05 and abs(np.log(speeds[:, ::2]).std() - 1) < 0.05
    assert len(np.unique(speeds[:, ::2])) > 0.99 * speeds[:, ::2].size
    np.testing.assert_allclose(speeds[:, 1::2], np.broadcast_to(np.pi * np.arange(32), (3, 32, 32)), rtol=1e-6)


def test_outputs_of_real_modes_are_the_real_parts_of_complex_ones():
    for starts in (('real',), ('lin',)):
        system = DiagonalSystem(256, state=64, starts=starts, causal=True, rngs=nnx.Rngs(0))
        assert abs(2 * float(np.square(system.C[...]).mean()) - 1) < 0.03


def test_maps_of_s5_start_as_in_the_released_code():
    """In the basis of LegS `B` is real and `C` complex, each part of variance one over the states."""
    system = SharedSystem(256, state=128, blocks=4, causal=True, rngs=nnx.Rngs(0))
    for parameter, count in ((system.B, 1), (system.C, 2)):
        assert abs(128 * float((np.abs(numbers(parameter)) ** 2).mean()) / count - 1) < 0.03


@pytest.mark.parametrize(('outputs', 'variance'), [('map', 2 / (128 * 256)), ('modes', 1.0)])
def test_outputs_of_s5_start_as_the_released_code_offers(outputs, variance):
    """`lecun_normal` has the fan-in of all channels and states; `complex_normal` is of the modes."""
    system = SharedSystem(256, state=128, blocks=4, outputs=outputs, causal=False, rngs=nnx.Rngs(0))
    for parameter in (system.C, system.C_later):
        assert abs(float((np.abs(numbers(parameter)) ** 2).mean()) / variance - 1) < 0.03


def test_eigenvalues_of_s5_are_clipped_on_request():
    """One that grows is read as one that decays by the greatest real part, the others as they are."""
    free, clipped = (
        SharedSystem(4, state=8, greatest=greatest, causal=True, rngs=nnx.Rngs(0)) for greatest in (None, -0.1)
    )
    x = noise(1, 9, 4)
    np.testing.assert_array_equal(free(x, None)[0], clipped(x, None)[0])
    for system in (free, clipped):
        system.A_real[...] = system.A_real[...].at[0].set(0.2)
    assert not np.allclose(free(x, None)[0], clipped(x, None)[0])
    free.A_real[...] = free.A_real[...].at[0].set(-0.1)
    np.testing.assert_array_equal(free(x, None)[0], clipped(x, None)[0])


@pytest.mark.parametrize(
    ('make', 'message'),
    [
        (
            lambda rngs: DiagonalSystem(4, state=8, starts=('line',), causal=True, rngs=rngs),
            "'line'; did you mean 'lin'",
        ),
        (
            lambda rngs: DiagonalSystem(4, state=8, starts=('real', 'lin'), causal=True, rngs=rngs),
            'real modes stand alone',
        ),
        (lambda rngs: DiagonalSystem(4, state=8, copies=3, causal=True, rngs=rngs), 'copies is 3 for 4 channels'),
        (
            lambda rngs: LowRankSystem(4, state=8, starts=('legs', 'fout'), causal=True, rngs=rngs),
            'copies is 1 for 4 channels',
        ),
        (lambda rngs: DiagonalSystem(4, state=8, low=1.0, causal=True, rngs=rngs), 'steps from 1.0 to 0.1'),
        (lambda rngs: SharedSystem(4, state=8, blocks=3, causal=True, rngs=rngs), 'state is 8 with 3 blocks'),
        (
            lambda rngs: SharedSystem(4, state=8, outputs='all', causal=True, rngs=rngs),
            "outputs of SharedSystem is 'all'; it must be",
        ),
        (lambda rngs: RingSystem(4, state=8, low=0.9, high=1.0, causal=True, rngs=rngs), 'a ring from 0.9 to 1.0'),
        (
            lambda rngs: RingSystem(4, state=8, turn=0.0, causal=True, rngs=rngs),
            'turn of RingSystem is 0.0; it must be',
        ),
    ],
)
def test_mistakes_are_named(make, message):
    with pytest.raises(UserError, match=message):
        make(nnx.Rngs(0))
