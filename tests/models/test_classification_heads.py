"""Losses of classification by hand and in their limits, and mistakes named."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from scipy.optimize import brentq
from scipy.special import digamma, expit
from scipy.stats import dirichlet

from attnlab.config import build
from attnlab.errors import UserError
from attnlab.functional import cores
from attnlab.losses import softmax_loss
from attnlab.models.heads.classification import ClassificationHead
from attnlab.models.heads.contrastive import BlockContrastiveHead
from attnlab.models.heads.distributional import LEVELS, AtomsHead, ImplicitQuantiles
from attnlab.models.heads.evidential import EvidentialHead
from attnlab.models.heads.fourier import FourierHead
from attnlab.models.heads.gumbel import GumbelHead
from attnlab.models.heads.margin import DRAWN, ArcFaceHead, PartialFC, WrappedCauchyHead
from attnlab.models.heads.masked import MaskedSoftmaxHead
from attnlab.models.heads.multilabel import Decoupled, MultiLabelHead, SoftTopK
from attnlab.models.heads.noisy import NOISE, NoisySoftmaxHead
from attnlab.models.heads.registry import CLASSIFIERS, REGRESSORS
from attnlab.models.heads.surrogates import CompSum, LabelRobust, SurrogateHead, ZLoss
from attnlab.testing.noise import noise, perturbed
from attnlab.train.partition import Axes, state_shardings

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


def test_a_single_class_has_a_temperature_and_no_loss():
    losses, gradient = jax.value_and_grad(lambda x: LabelRobust(adapt=2.0).losses(x, jnp.zeros(3, int)).sum())(
        jnp.array([[-2.0], [0.0], [5.0]])
    )
    assert losses == 0 and not gradient.any()


@pytest.mark.parametrize('lam', [0.5, 2.0])
def test_adapted_temperatures_are_those_of_the_losses(lam):
    scores = np.asarray(SCORES, np.float64)
    chances = np.exp(scores / lam) / np.exp(scores / lam).sum(axis=1, keepdims=True)
    divergence = np.sum(chances * np.log(4 * chances), axis=1)
    temperatures = lam * (1 - divergence / (2.5 * np.log(4)))
    assert np.ptp(temperatures) > 0.05
    violations = scores - scores[np.arange(6), TARGETS][:, None] + 0.2 * (np.arange(4) != np.asarray(TARGETS)[:, None])
    expected = temperatures * np.log(np.mean(np.exp(violations / temperatures[:, None]), axis=1))
    found = LabelRobust(lam=lam, margin=0.2, adapt=2.5).losses(SCORES, TARGETS)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ('name', 'surrogate'),
    [
        ('generalised_cross_entropy', CompSum(1.7)),
        ('mean_absolute_error', CompSum(2.0)),
        ('label_robust', LabelRobust(margin=0.1)),
        ('adaptive_label_robust', LabelRobust(adapt=2.0)),
        ('z_loss', ZLoss(a=1.0, b=0.0)),
    ],
)
def test_a_row_trains_on_what_its_notes_say(name, surrogate):
    head = perturbed(build(CLASSIFIERS[name].spec)(3, 1, classes=4, rngs=nnx.Rngs(0)), 0.5)
    hidden = noise(6, 3)
    expected = surrogate.losses(head.logits(hidden), TARGETS)
    np.testing.assert_allclose(head.objective(hidden, TARGETS, jax.random.key(0)), expected, rtol=1e-5, atol=1e-6)


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


def test_no_waves_at_all_are_a_uniform_density_without_a_gradient():
    head = FourierHead(3, 1, classes=12, rngs=nnx.Rngs(0))
    hidden, targets = noise(2, 3).at[1].set(0), jnp.zeros(2, jnp.int32)

    def weighted(hidden, head, second):
        return jnp.vdot(jnp.array([1.0, second]), head.losses(hidden, targets))

    np.testing.assert_allclose(head.losses(hidden, targets)[1], np.log(12), rtol=1e-5)
    found, of_weights = jax.grad(weighted, argnums=(0, 1))(hidden, head, 0.0)
    assert found[0].any() and not found[1].any() and all(jnp.isfinite(x).all() for x in jax.tree.leaves(of_weights))
    np.testing.assert_array_equal(jax.grad(weighted)(hidden, head, 1.0), found)


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
    'no classes': (lambda: PartialFC(2, 1, classes=2, share=0.0, rngs=nnx.Rngs(0)), 'share is 0.0; it must be above 0'),
    'no scale of densities': (
        lambda: WrappedCauchyHead(2, 1, classes=2, scale=-1.0, rngs=nnx.Rngs(0)),
        'scale is -1.0; it must be positive',
    ),
    'a share beyond all': (
        lambda: BlockContrastiveHead(2, 1, classes=2, share=1.5, rngs=nnx.Rngs(0)),
        'share is 1.5; it must be from 0 to 1',
    ),
    'noise that helps': (
        lambda: NoisySoftmaxHead(2, 1, classes=2, strength=-0.1, rngs=nnx.Rngs(0)),
        'strength is -0.1; it must be at least 0',
    ),
    'evidence that is rewarded': (
        lambda: EvidentialHead(2, 1, classes=2, strength=-0.1, rngs=nnx.Rngs(0)),
        'strength of EvidentialHead is -0.1; it must be at least 0',
    ),
    'as many as there are': (
        lambda: MultiLabelHead(2, 1, classes=3, loss=SoftTopK(k=3), rngs=nnx.Rngs(0)),
        'k of SoftTopK is 3 of 3 classes; it must be fewer',
    ),
    'no slope': (lambda: SoftTopK(alpha=0.0), 'alpha of SoftTopK is 0.0; it must be positive'),
    'no scores': (lambda: ZLoss(a=0.0), 'a of ZLoss is 0.0; it must be positive'),
    'no range': (
        lambda: AtomsHead(2, 1, low=1.0, high=1.0, rngs=nnx.Rngs(0)),
        'atoms is 51, from 1.0 to 1.0; it must be at least 2',
    ),
    'no quadratic part': (lambda: ImplicitQuantiles(2, 1, kappa=0.0, rngs=nnx.Rngs(0)), 'kappa is 0.0; it must be pos'),
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


def test_partial_fc_with_all_classes_is_arcface():
    whole = perturbed(ArcFaceHead(3, 1, classes=4, scale=2.0, rngs=nnx.Rngs(0)), 1.0)
    some = PartialFC(3, 1, classes=4, scale=2.0, share=1.0, rngs=nnx.Rngs(0))
    some.weight[...] = whole.weight[...]
    hidden, key = noise(6, 3), jax.random.key(0)
    np.testing.assert_allclose(some.objective(hidden, TARGETS, key), whole.objective(hidden, TARGETS, key), rtol=1e-5)


@pytest.mark.parametrize('parts', [1, 2])
def test_partial_fc_keeps_the_classes_of_the_batch_and_others_up_to_its_share(parts: int):
    head = PartialFC(3, 1, classes=40, share=0.2, rngs=nnx.Rngs(0))
    for targets, count in ((jnp.asarray([3, 3, 25], jnp.int32), 8), (jnp.arange(12, dtype=jnp.int32), 12)):
        places, kept = head._kept(targets, jax.random.key(0), parts)
        chosen = np.asarray(places + 40 // parts * jnp.arange(parts)[:, None])[np.asarray(kept)].tolist()
        assert set(targets.tolist()) <= set(chosen) and len(chosen) == len(set(chosen))
        # Of two parts the second has none of the twelve, and draws its own four.
        assert len(chosen) == (count if parts == 1 or count == 8 else 16)


def test_partial_fc_draws_others_evenly_and_anew_for_every_key():
    head, targets = PartialFC(3, 1, classes=20, share=0.3, rngs=nnx.Rngs(0)), jnp.asarray([7, 7], jnp.int32)
    places, kept = jax.vmap(lambda key: head._kept(targets, key, 1))(jax.random.split(jax.random.key(0), 400))
    assert np.asarray(kept).all() and places.shape == (400, 1, 6)
    counts = np.bincount(np.asarray(places).ravel(), minlength=20)
    others = np.delete(counts, 7)
    # Five of nineteen others each time: 105 expected of each, with a deviation of 9.
    assert counts[7] == 400 and others.sum() == 2000 and np.abs(others - 2000 / 19).max() < 5 * 9
    first, again, second = (head.objective(noise(2, 3), targets, jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, second)


def test_partial_fc_on_two_devices_is_arcface_among_the_classes_that_each_keeps():
    """Classes are divided: each device draws among its own, and their normalisers are one; others have no gradient."""
    classes, margin, scale = 40, 0.3, 4.0
    head = perturbed(PartialFC(3, 1, classes=classes, share=0.2, scale=scale, margin=margin, rngs=nnx.Rngs(0)), 1.0)
    graphdef, params = nnx.split(head)
    hidden, key = noise(3, 3), jax.random.key(5)
    targets = jnp.asarray([3, 3, 25], jnp.int32)

    def objective(params):
        losses = nnx.merge(graphdef, params).objective(hidden, targets, key)
        return jnp.vdot(jnp.asarray([1.0, 2.0, -0.5]), losses), losses

    mesh = Axes(data=1, tensor=2).make(jax.devices()[:2])
    placed = jax.device_put(params, state_shardings(params, mesh))
    assert not placed['weight'][...].sharding.is_fully_replicated
    (_, losses), found = jax.jit(cores.on(mesh, jax.value_and_grad(objective, has_aux=True)))(placed)

    places, there = head._kept(targets, jax.random.fold_in(key, DRAWN), 2)
    kept = np.sort(np.asarray(places + 20 * jnp.arange(2)[:, None])[np.asarray(there)])
    assert (kept < 20).sum() == (kept >= 20).sum() == 4

    def expected(weight):
        unit = weight[kept] / jnp.linalg.norm(weight[kept], axis=1, keepdims=True)
        angles = jnp.arccos((hidden / jnp.linalg.norm(hidden, axis=1, keepdims=True)) @ unit.T)
        own = jnp.asarray(kept[None] == np.asarray(targets)[:, None])
        # Beyond pi less the margin the cosine goes on as a line.
        moved = jnp.where(angles + margin < np.pi, jnp.cos(angles + margin), jnp.cos(angles) - margin * np.sin(margin))
        logits = scale * jnp.where(own, moved, jnp.cos(angles))
        losses = jax.nn.logsumexp(logits, axis=1) - jnp.sum(jnp.where(own, logits, 0), axis=1)
        return jnp.vdot(jnp.asarray([1.0, 2.0, -0.5]), losses), losses

    (_, wanted), slopes = jax.value_and_grad(expected, has_aux=True)(params['weight'][...])
    np.testing.assert_allclose(losses, wanted, rtol=1e-4)
    np.testing.assert_allclose(found['weight'][...], slopes, rtol=1e-3, atol=1e-4)
    assert (np.abs(np.asarray(found['weight'][...])).max(axis=1) > 0).tolist() == [i in kept for i in range(classes)]


def test_a_wrapped_cauchy_score_at_its_class_and_opposite():
    head = WrappedCauchyHead(2, 1, classes=1, scale=3.0, rngs=nnx.Rngs(0))
    head.weight[...], head.widths[...] = jnp.array([[2.0, 0.0]]), jnp.zeros(1)
    found = head.logits(jnp.array([[5.0, 0.0], [-1.0, 0.0]]))[:, 0]
    np.testing.assert_allclose(found, [3 * 3 / (2 * np.pi), 3 / 3 / (2 * np.pi)], rtol=1e-5)


def test_gumbel_scores_start_at_equal_chances_and_are_told_apart_one_by_one():
    head = GumbelHead(3, 1, classes=4, rngs=nnx.Rngs(0))
    zero, target = jnp.zeros((1, 3)), jnp.zeros(1, jnp.int32)
    np.testing.assert_allclose(jnp.exp(head.logits(zero)), 0.25, rtol=1e-5)
    found = head.objective(zero, target, jax.random.key(0))
    np.testing.assert_allclose(found, -np.log(0.25) - 3 * np.log(0.75), rtol=1e-5)
    head.linear.bias[...] = jnp.array([-50.0, 50.0, 0.0, 0.0])
    assert np.isfinite(jax.grad(lambda x: jnp.sum(head.objective(x, target, jax.random.key(0))))(zero)).all()


def test_means_of_classes_that_are_the_same_are_pushed_apart():
    head = BlockContrastiveHead(3, 1, classes=4, rngs=nnx.Rngs(0))
    one = jnp.ones((3, 3))
    found = head.apart(one, jnp.asarray([0, 2, 2], jnp.int32))
    np.testing.assert_allclose(found, np.log(1 + np.exp(0.2)) / 4, rtol=1e-5)
    assert head.apart(one, jnp.asarray([1, 1, 1], jnp.int32)) == 0


def test_a_share_of_what_is_trained_on_pushes_means_apart():
    head = BlockContrastiveHead(3, 1, classes=4, share=0.3, sharpness=0.7, width=5, rngs=nnx.Rngs(0))
    hidden, targets = noise(4, 3), np.array([0, 2, 3, 2])
    projected = np.asarray(head.project(hidden), np.float64)
    means = np.stack([projected[targets == each].mean(axis=0) for each in (0, 2, 3)])
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    alike = 0.7 * means @ means.T
    # Of a class itself the exponential is 1.
    np.fill_diagonal(alike, 0)
    apart = np.mean(np.log(np.exp(alike).sum(axis=1))) / 4
    expected = 0.7 * np.asarray(head.losses(hidden, jnp.asarray(targets, jnp.int32))) + 0.3 * apart
    found = head.objective(hidden, jnp.asarray(targets, jnp.int32), jax.random.key(0))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_the_noise_of_a_softmax_lowers_the_target_in_training_alone():
    head, key, hidden = (
        NoisySoftmaxHead(3, 1, classes=4, strength=0.4, rngs=nnx.Rngs(0)),
        jax.random.key(3),
        noise(6, 3),
    )
    weight, x = np.asarray(head.weight[...], np.float64), np.asarray(hidden, np.float64)
    scores, rows = x @ weight.T, np.arange(6)
    xi = np.abs(np.asarray(jax.random.normal(jax.random.fold_in(key, NOISE), (6,)), np.float64))
    assert np.ptp(xi) > 0.1
    lengths = np.linalg.norm(x, axis=1) * np.linalg.norm(weight, axis=1)[np.asarray(TARGETS)]
    lowered = scores.copy()
    lowered[rows, TARGETS] -= 0.4 * (lengths - scores[rows, TARGETS]) * xi
    for found, logits in ((head.objective(hidden, TARGETS, key), lowered), (head.losses(hidden, TARGETS), scores)):
        expected = np.log(np.exp(logits).sum(axis=1)) - logits[rows, TARGETS]
        np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.parametrize(('mask', 'moves'), [(None, [True, False, True, False]), (1.0, [True, False, True, False])])
def test_classes_that_do_not_occur_are_left_alone(mask: float | None, moves: list[bool]):
    head = MaskedSoftmaxHead(3, 1, classes=4, mask=mask, rngs=nnx.Rngs(0))
    hidden, targets = noise(3, 3), jnp.asarray([0, 2, 2], jnp.int32)
    graphdef, params = nnx.split(head)

    def loss(params):
        return jnp.sum(nnx.merge(graphdef, params).objective(hidden, targets, jax.random.key(0)))

    value, gradients = jax.value_and_grad(loss)(params)
    gradient = gradients['linear']['bias'][...]
    scores = np.asarray(head.logits(hidden))
    kept = np.where([True, False, True, False], scores, -np.inf if mask is None else mask)
    np.testing.assert_allclose(value, np.sum(softmax_loss(jnp.asarray(kept), targets)), rtol=1e-5)
    assert (np.asarray(gradient) != 0).tolist() == moves


def test_labels_do_not_compete():
    scores, labels = jnp.array([[1.0, 2.0, -1.0, 0.5]]), jnp.array([[True, True, False, False]])
    e = np.exp(np.asarray(scores[0]))
    expected = np.mean([np.log(1 + (e[2] + e[3]) / e[label]) for label in (0, 1)])
    np.testing.assert_allclose(Decoupled().losses(scores, labels), [expected], rtol=1e-5)
    assert Decoupled().losses(scores, jnp.zeros((1, 4), bool)) == 0


def test_sigmoids_of_a_soft_top_k_sum_to_k_and_its_derivative_is_that_of_the_equation():
    loss, scores = SoftTopK(k=2, alpha=1.5), noise(1, 6)
    t = loss.threshold(scores, jnp.full((1, 1), 2.0))
    sigmoids = jax.nn.sigmoid(1.5 * (scores + t))
    np.testing.assert_allclose(jnp.sum(sigmoids), 2, rtol=1e-5)
    found = jax.grad(lambda scores: jnp.sum(loss.threshold(scores, jnp.full((1, 1), 2.0))))(scores)
    slopes = sigmoids * (1 - sigmoids)
    np.testing.assert_allclose(found, -slopes / jnp.sum(slopes), rtol=1e-4)


def test_a_soft_top_k_is_solved_for_many_classes():
    """All of about one score, as they are when training begins."""
    loss, scores = SoftTopK(), 0.1 * noise(1, 50_000)
    t = loss.threshold(scores, jnp.ones((1, 1)))
    np.testing.assert_allclose(jnp.sum(jax.nn.sigmoid(loss.alpha * (scores + t))), 1, rtol=1e-4)


@pytest.mark.parametrize('k', [None, 3])
def test_a_soft_top_k_is_trained_on_the_sigmoids_beyond_its_threshold(k):
    head = MultiLabelHead(3, 1, classes=5, loss=SoftTopK(k=k, alpha=1.5), rngs=nnx.Rngs(0))
    hidden, labels = noise(2, 3), np.array([[0, 2], [3, -1]])
    expected = []
    for row, own in zip(np.asarray(head.logits(hidden), np.float64), labels, strict=True):
        own = own[own >= 0]
        threshold = brentq(lambda t, row=row, own=own: np.sum(expit(1.5 * (row + t))) - (k or len(own)), -50, 50)
        expected.append(-np.mean(np.log(expit(1.5 * (row[own] + threshold)))))
    found = head.objective(hidden, jnp.asarray(labels, jnp.int32), jax.random.key(0))
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    row = build(CLASSIFIERS['soft_top_k'].spec)(3, 1, classes=5, rngs=nnx.Rngs(0))
    assert row.loss == SoftTopK(k=None, alpha=1.0)


def test_several_labels_of_an_example_may_be_missing():
    head = MultiLabelHead(3, 1, classes=4, loss=SoftTopK(), rngs=nnx.Rngs(0))
    hidden = noise(2, 3)
    labels = jnp.asarray([[0, 2], [3, -1]], jnp.int32)
    both = head.losses(hidden, labels)
    one = head.losses(hidden[1:], jnp.asarray([3], jnp.int32))
    np.testing.assert_allclose(both[1:], one, rtol=1e-5)
    np.testing.assert_allclose(one, softmax_loss(head.logits(hidden[1:]), jnp.asarray([3], jnp.int32)), rtol=1e-5)
    with pytest.raises(UserError, match='targets are from 1 to 5; there are 4 classes, so they must be from -1 to 3'):
        head.losses(hidden, labels + 2)


def test_evidence_for_other_classes_is_penalised_and_none_is_said():
    head = EvidentialHead(2, 1, classes=3, strength=0.5, rngs=nnx.Rngs(0))
    hidden, targets = jnp.asarray([[0.5, -1.0], [1.0, 2.0]]), jnp.asarray([0, 2], jnp.int32)
    a = np.exp(np.asarray(head.logits(hidden), np.float64))
    np.testing.assert_allclose(a, 1 + np.log1p(np.exp(np.asarray(head.linear(hidden), np.float64))), rtol=1e-5)
    expected = []
    for row, target in zip(a, targets, strict=True):
        others = row.copy()
        others[target] = 1
        # The density of Dir(1) is 2 everywhere.
        apart = -dirichlet.entropy(others) - np.log(2)
        expected.append(digamma(row.sum()) - digamma(row[target]) + 0.5 * apart)
    found = head.objective(hidden, targets, jax.random.key(0))
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    np.testing.assert_allclose(head.losses(hidden, targets), -np.log(a[[0, 1], [0, 2]] / a.sum(1)), rtol=1e-4)
    np.testing.assert_allclose(head.vacuity(hidden), 3 / a.sum(1), rtol=1e-5)
    head.linear.bias[...] = jnp.full(3, -50.0)
    np.testing.assert_allclose(head.vacuity(jnp.zeros((1, 2))), 1)


def test_a_z_loss_ignores_shift_and_scale():
    np.testing.assert_allclose(
        ZLoss().losses(3 * SCORES + 5, TARGETS), ZLoss().losses(SCORES, TARGETS), rtol=1e-4, atol=1e-5
    )
    scores = jnp.array([[1.0, -1.0]])
    np.testing.assert_allclose(ZLoss(a=2.0, b=0.5).losses(scores, TARGETS[:1]), np.log1p(np.exp(-1)) / 2, rtol=1e-5)


def test_a_number_is_divided_between_two_atoms_of_which_it_is_the_mean():
    head = AtomsHead(3, 1, atoms=5, low=-2.0, high=2.0, rngs=nnx.Rngs(0))
    hidden = noise(4, 3)
    logarithms = np.asarray(jax.nn.log_softmax(head._scores(hidden)))[:, 0]
    found = head.losses(hidden, jnp.array([[-2.0], [0.25], [9.0], [1.0]]))
    expected = [
        -logarithms[0, 0], -(0.75 * logarithms[1, 2] + 0.25 * logarithms[1, 3]), -logarithms[2, 4], -logarithms[3, 3]
    ]  # fmt: skip
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(head.logits(hidden)[:, 0], np.exp(logarithms) @ np.arange(-2, 3), rtol=1e-4, atol=1e-6)


def test_quantiles_are_asked_for_at_their_levels():
    head = perturbed(ImplicitQuantiles(3, 1, waves=4, levels=2, kappa=0.5, rngs=nnx.Rngs(0)))
    hidden = noise(1, 3)
    low, high = np.asarray(head.quantiles(hidden, jnp.array([[0.25, 0.75]])))[0, :, 0]
    waves = np.cos(np.pi * np.arange(4) * np.array([[0.25], [0.75]]))
    described = np.maximum(waves @ np.asarray(head.level.weight) + np.asarray(head.level.bias), 0)
    expected = (np.append(hidden, 1.0) * described) @ np.asarray(head.linear.weight) + np.asarray(head.linear.bias)
    np.testing.assert_allclose([low, high], expected[:, 0], rtol=1e-5)
    np.testing.assert_allclose(head.logits(hidden)[0, 0], (low + high) / 2, rtol=1e-5)
    found = head.losses(hidden, jnp.full((1, 1), max(low, high) + 2))
    linear = [0.5 * (max(low, high) + 2 - each - 0.25) / 0.5 for each in (low, high)]
    np.testing.assert_allclose(found, [(0.25 * linear[0] + 0.75 * linear[1]) / 2], rtol=1e-5)


def test_quantiles_hold_their_share_of_targets_that_spread_alike_everywhere():
    """Of a linear map with errors of deviation 0.35, as of normalised windows, four fifths lie between 0.1 and 0.9."""
    hidden = noise(2048, 4)
    targets = hidden[:, :1] + 0.35 * noise(2048, 1, seed=1)
    graphdef, params = nnx.split(build(REGRESSORS['iqn'].spec)(4, 1, rngs=nnx.Rngs(0)))
    optimizer = optax.adam(optax.cosine_decay_schedule(3e-2, 300))

    def loss(params, key):
        return jnp.mean(nnx.merge(graphdef, params).objective(hidden[:1024], targets[:1024], key))

    def step(carry, key):
        params, state = carry
        updates, state = optimizer.update(jax.grad(loss)(params, key), state)
        return (optax.apply_updates(params, updates), state), None

    keys = jax.random.split(jax.random.key(0), 300)
    params = jax.jit(lambda params: jax.lax.scan(step, (params, optimizer.init(params)), keys)[0][0])(params)
    ends = nnx.merge(graphdef, params).quantiles(hidden[1024:], jnp.tile(jnp.array([[0.1, 0.9]]), (1024, 1)))
    inside = (ends[:, 0] <= targets[1024:]) & (targets[1024:] <= ends[:, 1])
    assert np.mean(inside) == pytest.approx(0.8, abs=0.05)


def test_quantiles_are_trained_at_levels_drawn_for_every_prediction():
    head = perturbed(ImplicitQuantiles(3, 1, waves=4, drawn=6, levels=2, kappa=0.5, rngs=nnx.Rngs(0)))
    hidden, targets, key = noise(5, 3), noise(5, 1, seed=1), jax.random.key(2)
    levels = jax.random.uniform(jax.random.fold_in(key, LEVELS), (5, 6))
    apart = np.asarray(targets, np.float64) - np.asarray(head.quantiles(hidden, levels), np.float64)[..., 0]
    huber = np.where(np.abs(apart) <= 0.5, apart**2 / 2, 0.5 * (np.abs(apart) - 0.25))
    expected = np.mean(np.abs(np.asarray(levels) - (apart < 0)) * huber / 0.5, axis=1)
    np.testing.assert_allclose(head.objective(hidden, targets, key), expected, rtol=1e-4, atol=1e-6)


def test_smoothing_is_cross_entropy_with_shares_of_every_class():
    head = ClassificationHead(8, 1, classes=3, smoothing=0.3, rngs=nnx.Rngs(0))
    hidden, targets = noise(5, 8), jnp.asarray([0, 1, 2, 2, 0])
    logs = jax.nn.log_softmax(head.logits(hidden), axis=-1)
    shares = 0.7 * jax.nn.one_hot(targets, 3) + 0.1
    objective = head.objective(hidden, targets, jax.random.key(0))
    np.testing.assert_allclose(objective, -jnp.sum(shares * logs, axis=-1), rtol=1e-5)
    np.testing.assert_allclose(head.losses(hidden, targets), -logs[jnp.arange(5), targets], rtol=1e-5)
    with pytest.raises(UserError, match='smoothing of ClassificationHead is 1'):
        ClassificationHead(8, 1, classes=3, smoothing=1.0, rngs=nnx.Rngs(0))


def test_logits_of_16_bit_vectors_are_accumulated_in_32():
    """Rounded to 16 bits, the largest of a thousand classes are often equal, and the first would be taken."""
    head = ClassificationHead(64, 50, classes=1000, rngs=nnx.Rngs(0))
    hidden = (3 * noise(64, 64)).astype(jnp.bfloat16)
    logits = head.logits(hidden)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, head.logits(hidden.astype(jnp.float32)), rtol=1e-6, atol=1e-5)
    assert (np.sum(logits == jnp.max(logits, axis=1, keepdims=True), axis=1) == 1).all()
