"""Losses of classification by hand and in their limits, and mistakes named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.errors import UserError
from attnlab.losses import softmax_loss
from attnlab.models.heads.fourier import FourierHead
from attnlab.models.heads.margin import ArcFaceHead
from attnlab.models.heads.registry import CLASSIFIERS
from attnlab.models.heads.surrogates import CompSum, LabelRobust, SurrogateHead
from attnlab.testing.noise import noise, perturbed

SCORES, TARGETS = 2 * noise(6, 4), jnp.asarray([0, 1, 2, 3, 0, 1], jnp.int32)
OWN = jnp.take_along_axis(SCORES, TARGETS[:, None], axis=1)
OTHERS = jnp.sum(jnp.exp(SCORES - OWN), axis=1) - 1


@pytest.mark.parametrize(
    ('tau', 'expected'),
    [(0.0, OTHERS), (1.0, jnp.log1p(OTHERS)), (1.5, 2 - 2 / jnp.sqrt(1 + OTHERS)), (2.0, OTHERS / (1 + OTHERS))],
)
def test_comp_sum_losses(tau, expected):
    np.testing.assert_allclose(CompSum(tau).losses(SCORES, TARGETS), expected, rtol=1e-4)


def test_label_robust_losses_have_the_limits_of_the_paper():
    violations = SCORES - OWN
    np.testing.assert_allclose(
        LabelRobust().losses(SCORES, TARGETS), softmax_loss(SCORES, TARGETS) - np.log(4), rtol=1e-4, atol=1e-5
    )
    largest = LabelRobust(lam=1e-3, margin=0.5).losses(SCORES, TARGETS)
    moved = violations + 0.5 * (1 - jax.nn.one_hot(TARGETS, 4))
    np.testing.assert_allclose(largest, jnp.max(moved, axis=1), atol=5e-3)
    np.testing.assert_allclose(LabelRobust(lam=1e4).losses(SCORES, TARGETS), jnp.mean(violations, axis=1), atol=5e-3)


def test_temperatures_are_positive_and_lower_for_what_is_certain():
    found = LabelRobust(adapt=1.5)._temperature(jnp.array([[0.0, 0, 0, 0], [1, 0, 0, 0], [90, 0, 0, 0]]))
    assert found[0] == 1 and 0.3 < found[2] < found[1] < 1


def test_a_surrogate_is_trained_on_and_cross_entropy_reported():
    head = SurrogateHead(3, 1, classes=4, surrogate=CompSum(2.0), rngs=nnx.Rngs(0))
    hidden = noise(6, 3)
    found = head.objective(hidden, TARGETS, jax.random.key(0))
    np.testing.assert_allclose(found, 1 - jnp.exp(-head.losses(hidden, TARGETS)), rtol=1e-5)


def test_a_margin_moves_the_angle_of_the_target_and_never_helps_it():
    head = ArcFaceHead(3, 1, classes=2, scale=1.0, margin=0.5, rngs=nnx.Rngs(0))
    head.weight[...] = jnp.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    angles = np.linspace(0.1, np.pi - 0.01, 40)
    hidden = jnp.asarray(3 * np.stack([np.cos(angles), np.sin(angles), 0 * angles], axis=1), jnp.float32)
    zero = jnp.zeros(40, jnp.int32)
    np.testing.assert_allclose(head.logits(hidden)[:, 0], np.cos(angles), atol=1e-5)
    logits = np.stack([np.cos(angles + 0.5), 0 * angles], axis=1)
    found, before = head.objective(hidden, zero, jax.random.key(0)), angles < np.pi - 0.5
    np.testing.assert_allclose(found[before], softmax_loss(jnp.asarray(logits, jnp.float32), zero)[before], atol=1e-5)
    assert (np.diff(found) > 0).all()
    assert (found > head.losses(hidden, zero)).all()
    gradient = jax.grad(lambda hidden: jnp.sum(head.objective(hidden, zero, jax.random.key(0))))
    assert (
        np.isfinite(gradient(jnp.array([[1.0, 0.0, 0.0]] * 40))).all()
        and np.isfinite(gradient(jnp.zeros((40, 3)))).all()
    )


def test_a_density_of_no_waves_is_uniform_and_its_integral_one():
    head = perturbed(FourierHead(3, 1, classes=40, frequencies=6, rngs=nnx.Rngs(0)))
    chances = jnp.exp(head.logits(noise(5, 3)))
    np.testing.assert_allclose(jnp.sum(chances, axis=1), 1 + 40e-5, rtol=1e-5)
    assert chances.min() >= 1e-5 * (1 - 1e-6)
    a = np.asarray(head.linear(noise(5, 3)))
    a = a[:, :7] + 1j * a[:, 7:]
    z = np.arange(40) / 20 - 39 / 40
    density = np.abs(a @ np.exp(1j * np.pi * np.outer(np.arange(7), z))) ** 2 / (2 * np.sum(np.abs(a) ** 2, 1)[:, None])
    np.testing.assert_allclose(chances, density / 20 + 1e-5, rtol=1e-4, atol=1e-7)
    head.linear.bias[...] = jnp.zeros(14).at[0].set(1.0)
    np.testing.assert_allclose(jnp.exp(head.logits(jnp.zeros((1, 3)))), 1 / 40 + 1e-5, rtol=1e-5)


def test_the_penalty_of_roughness_is_in_the_gradient_alone():
    head = perturbed(FourierHead(3, 1, classes=12, frequencies=2, roughness=0.1, rngs=nnx.Rngs(0)))
    hidden, targets, key = noise(1, 3), jnp.zeros(1, jnp.int32), jax.random.key(0)
    np.testing.assert_array_equal(head.objective(hidden, targets, key), head.losses(hidden, targets))

    def whole(hidden):
        a = head.linear(hidden)[0]
        a = a[:3] + 1j * a[3:]
        sizes = [jnp.abs(jnp.sum(jnp.conj(a[: 3 - k]) * a[k:])) ** 2 for k in (1, 2)]
        return jnp.sum(head.losses(hidden, targets)) + 0.2 * 2 * np.pi**2 * (sizes[0] + 4 * sizes[1])

    found = jax.grad(lambda hidden: jnp.sum(head.objective(hidden, targets, key)))(hidden)
    np.testing.assert_allclose(found, jax.grad(whole)(hidden), rtol=1e-4)


MISTAKES = {
    'a negative tau': (lambda: CompSum(-0.5), 'tau of CompSum is -0.5; it must be at least 0'),
    'no temperature': (lambda: LabelRobust(lam=0.0), 'lam of LabelRobust is 0.0; it must be positive'),
    'temperatures below zero': (lambda: LabelRobust(adapt=1.0), 'adapt of LabelRobust is 1.0; it must be greater'),
    'no scale': (lambda: ArcFaceHead(2, 1, classes=2, scale=0.0, rngs=nnx.Rngs(0)), 'scale is 0.0; it must be pos'),
    'half a turn': (lambda: ArcFaceHead(2, 1, classes=2, margin=4.0, rngs=nnx.Rngs(0)), 'margin is 4.0; it must be fr'),
    'aliases': (
        lambda: FourierHead(2, 1, classes=4, frequencies=2, rngs=nnx.Rngs(0)),
        'frequencies is 2; it must be l',
    ),
    'smoothness below zero': (
        lambda: FourierHead(2, 1, classes=4, roughness=-1.0, rngs=nnx.Rngs(0)),
        'roughness is -1.0; it must be at least 0',
    ),
}


@pytest.mark.parametrize('case', MISTAKES)
def test_mistakes_are_named_in_one_line(case):
    call, sentence = MISTAKES[case]
    with pytest.raises(UserError, match=sentence) as caught:
        call()
    assert '\n' not in str(caught.value)


def test_rows_of_classes_say_what_is_reported():
    assert all('reported' in row.notes for row in CLASSIFIERS.values() if not row.exact)
