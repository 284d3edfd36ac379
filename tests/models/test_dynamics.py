"""A model of a trajectory: the forced map by hand, what gradients do not pass, and its regions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.models.dynamics import AlmostLinearDynamics
from attnlab.models.predictor import Dynamical
from attnlab.testing.contract.gradients import compare_with_differences
from attnlab.testing.noise import noise, perturbed

ROWS = 8


def made(**sizes):
    sizes = {'state': 5, 'rectified': 2, 'forcing': 3} | sizes
    return perturbed(AlmostLinearDynamics(2, **sizes, dtype='float32', rngs=nnx.Rngs(0)), 0.3)


def predicted(model, rows, key=None):
    return model.hidden(rows, Context(Context.full(*rows.shape[:2]).positions, dropout_key=key))[0]


def test_predictions_are_of_the_state_before_a_row_overwrites_it():
    model, rows = made(), noise(2, ROWS, 2)
    assert isinstance(model, Dynamical)
    diagonal, recurrent, offset = (np.asarray(each[...]) for each in (model.diagonal, model.recurrent, model.offset))
    for b in range(2):
        z = np.concatenate([rows[b, 0], np.asarray(rows[b, 0]) @ np.asarray(model.unobserved.weight[...])])
        for t in range(ROWS):
            if t % 3 == 0:
                z[:2] = rows[b, t]
            z = diagonal * z + np.where(np.arange(5) < 3, z, np.maximum(z, 0)) @ recurrent + offset
            np.testing.assert_allclose(predicted(model, rows)[b, t], z[:2], rtol=1e-4, atol=1e-5)


def test_what_overwrites_passes_no_gradient_back_and_what_does_not_is_not_read():
    """All units are observed: after a row that overwrites them nothing depends on rows before it."""
    model, rows = made(state=2, rectified=1), noise(1, ROWS, 2)
    reach = np.abs(jax.jacobian(lambda rows: predicted(model, rows)[0])(rows)[:, :, 0]).max(axis=(1, 3))
    assert (np.flatnonzero(reach.any(axis=0)) == [0, 3, 6]).all()
    for row in (0, 3, 6):
        assert (np.flatnonzero(reach[:, row]) == np.arange(row, min(row + 3, ROWS))).all()


def test_noise_is_for_training_alone():
    model, rows = made(noise=0.5), noise(1, ROWS, 2)
    np.testing.assert_array_equal(predicted(model, rows), predicted(made(), rows))
    assert jnp.abs(predicted(model, rows, jax.random.key(0)) - predicted(model, rows)).max() > 0.01


@pytest.mark.parametrize('forcing', [3, ROWS + 1], ids=['forced', 'entered once'])
def test_gradients_are_those_of_differences(forcing):
    """Of all parameters and of the rows: what overwrites is read as it is, which a difference sees too."""
    with jax.enable_x64(True):
        graphdef, params = nnx.split(made(forcing=forcing))
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params)
        rows, targets = noise(1, ROWS, 2, dtype=jnp.float64), noise(1, ROWS, 2, seed=1, dtype=jnp.float64)

        def loss(inputs):
            params, rows = inputs
            model = nnx.merge(graphdef, params)
            return jnp.sum(model.losses(predicted(model, rows), targets))

        compare_with_differences('dynamics', loss, (params, rows))
        # Nothing is left without a gradient.
        found = jax.jit(jax.grad(loss))((params, rows))[0]
        assert all(np.abs(leaf).max() > 1e-6 for leaf in jax.tree.leaves(found))


def test_regions_are_the_signs_of_the_rectified_units():
    state = jnp.asarray([[1.0, 1, 1, -1, -1], [-1, 1, 1, 1, -1], [1, 1, 1, -1, 1], [1, 1, 1, 2, 3]])
    assert made().region(state).tolist() == [[0], [1], [2], [3]]
    assert made(rectified=0).region(state).tolist() == [[0]] * 4
    # More signs than a whole number of 32 bits has.
    one = jnp.eye(40)
    assert len(np.unique(made(state=42, rectified=40).region(jnp.pad(one, ((0, 0), (2, 0)))), axis=0)) == 40
    step = jax.jacobian(lambda z: made().step(z[None])[0])
    np.testing.assert_array_equal(step(state[0]), step(2 * state[0]))
    assert np.abs(step(state[0]) - step(state[1])).max() > 0.01


@pytest.mark.parametrize(
    ('make', 'sentence'),
    [
        (lambda: made(state=1), 'state is 1 with 2 rectified units; it must be at least the 2 numbers of a row'),
        (lambda: made(rectified=6), 'state is 5 with 6 rectified units'),
        (lambda: made(noise=-1.0), 'forcing is 3 and noise -1.0'),
        (lambda: predicted(made(), noise(1, 4, 3)), 'rows of the task have 3 numbers; config.model is for 2'),
        (lambda: made().sample(noise(1, 2), jax.random.key(0), temperature=1.0, top_p=1.0), 'predicts numbers'),
    ],
)
def test_mistakes_are_named(make, sentence):
    with pytest.raises(UserError, match=sentence):
        make()
