"""Each optimiser against its equations in numpy, float64; groups, overrides, stacked matrices."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from attnlab.config import build, spec
from attnlab.errors import UserError
from attnlab.nn.parameter import param
from attnlab.train.optimizer import AdamW, Group, Groups, Lion, Muon, Optimizer, Override, Rates
from attnlab.train.perpendicular import Perpendicular, perpendicular_gradient
from attnlab.train.schedule import Constant

STEPS = 4
RATE = 0.1
FLAT = Constant(warmup=0.0)


class Layer(nnx.Module):
    """One parameter of each group that a layer may have."""

    def __init__(self, *, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(1.0)
        self.bias = param(normal, (5,), axes=('mlp',), group='vector', rngs=rngs)
        self.decay = param(normal, (3,), axes=('state',), group='dynamics', rngs=rngs)
        self.weight = param(normal, (3, 5), axes=('embed', 'mlp'), rngs=rngs)


class Model(nnx.Module):
    """Two stacked layers and an embedding."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.embed = param(nnx.initializers.normal(1.0), (7, 3), axes=('vocab', 'embed'), group='embedding', rngs=rngs)
        self.layers = nnx.vmap(lambda key: Layer(rngs=nnx.Rngs(params=key)))(jax.random.split(rngs.params(), 2))


PATHS = ['embed', 'layers/bias', 'layers/decay', 'layers/weight']


@pytest.fixture
def params() -> nnx.State:
    return nnx.state(Model(rngs=nnx.Rngs(params=jax.random.key(0))))


def gradients(params: nnx.State) -> list[nnx.State]:
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(1)
    return [
        jax.tree.unflatten(tree, [jnp.asarray(rng.normal(size=p.shape), jnp.float32) for p in leaves])
        for _ in range(STEPS)
    ]


def run(optimizer: Optimizer, params: nnx.State, steps: list[nnx.State] | None = None) -> list[np.ndarray]:
    transform = optimizer.transform(params, STEPS)
    state = transform.init(params)
    update = jax.jit(transform.update)
    for grads in steps or gradients(params):
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(params)]


def wide(tree: nnx.State) -> list[np.ndarray]:
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]


def clipped(grads: nnx.State, clip: float | None) -> list[np.ndarray]:
    leaves = wide(grads)
    norm = np.sqrt(sum((g**2).sum() for g in leaves))
    return leaves if clip is None or norm < clip else [g * clip / norm for g in leaves]


def adamw(params: nnx.State, *, decay: list[float], rate: list[float], clip: float | None) -> list[np.ndarray]:
    values = wide(params)
    m, v = [0 * p for p in values], [0 * p for p in values]
    for count, grads in enumerate(gradients(params), 1):
        for i, g in enumerate(clipped(grads, clip)):
            m[i], v[i] = 0.9 * m[i] + 0.1 * g, 0.95 * v[i] + 0.05 * g**2
            direction = m[i] / (1 - 0.9**count) / (np.sqrt(v[i] / (1 - 0.95**count)) + 1e-8)
            values[i] = values[i] - RATE * rate[i] * (direction + decay[i] * values[i])
    return values


def assert_close(found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    for path, a, b in zip(PATHS, found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6, err_msg=path)


@pytest.mark.parametrize('clip', [None, 0.5, 100.0])
def test_adamw_follows_its_equations(params: nnx.State, clip: float | None):
    found = run(AdamW(peak_lr=RATE, schedule=FLAT, weight_decay=0.2, clip=clip), params)
    assert_close(found, adamw(params, decay=[0.2, 0.0, 0.0, 0.2], rate=[1, 1, 1, 1], clip=clip))


def test_groups_and_overrides_multiply_rate_and_decay(params: nnx.State):
    groups = Groups(dynamics=Group(lr=0.25, weight_decay=0.5), embedding=Group(lr=2.0))
    overrides = (
        Override('layers/*', lr=9.0),
        Override('*/weight', lr=0.0),
        Override('*/bias', lr=0.5, weight_decay=3.0),
    )
    optimizer = AdamW(peak_lr=RATE, schedule=FLAT, weight_decay=0.2, clip=None, groups=groups, overrides=overrides[1:])
    assert_close(run(optimizer, params), adamw(params, decay=[0.2, 0.6, 0.1, 0.2], rate=[2, 0.5, 0.25, 0], clip=None))
    first = dataclasses.replace(optimizer, overrides=(Override('layers/*', lr=9.0), *overrides))
    assert first.multipliers(params) == {
        PATHS[0]: Group(2.0),
        PATHS[1]: Group(0.5, 3.0),
        PATHS[2]: Group(9.0),
        PATHS[3]: Group(0.0),
    }


@pytest.mark.parametrize(('peak_lr', 'share'), [(RATE, 0.25), (2 * RATE, 0.125), (RATE / 10, 0.5)])
def test_the_rate_of_a_group_has_a_limit_whatever_the_peak(params: nnx.State, peak_lr: float, share: float):
    """As a multiplier of that much; also where a step that was compiled for another peak is told the rates."""
    groups = Groups(dynamics=Group(lr=0.5, most=RATE / 4))
    limited = AdamW(peak_lr=peak_lr, schedule=FLAT, clip=None, groups=groups)
    multiplied = dataclasses.replace(limited, groups=Groups(dynamics=Group(lr=share)))
    assert limited.rates.shares == pytest.approx((share,)) and multiplied.rates.shares == ()
    wanted = run(multiplied, params)
    assert_close(run(limited, params), wanted)
    compiled = dataclasses.replace(limited, peak_lr=3 * RATE)

    def updates(rates: Rates) -> Any:
        transform = compiled.transform(params, STEPS, rates)
        return transform.update(gradients(params)[0], transform.init(params), params)[0]

    transform = multiplied.transform(params, STEPS)
    expected, _ = transform.update(gradients(params)[0], transform.init(params), params)
    rates = jax.tree.map(np.float32, limited.rates)
    for a, b in zip(jax.tree.leaves(jax.jit(updates)(rates)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize('kind', [AdamW, Lion, Muon])
@pytest.mark.parametrize('clip', [None, 0.5])
def test_gradients_of_frozen_parameters_are_zero_before_the_clip(params: nnx.State, kind: type[Optimizer], clip):
    """Others move as if there were none, however large they are; what is kept has the places that it always had."""
    free = kind(peak_lr=RATE, schedule=FLAT, clip=clip)
    frozen = dataclasses.replace(free, overrides=(Override('*/weight', lr=0.0),))
    weights, others = [], []
    for factor in (0.0, np.inf):
        steps = gradients(params)
        for grads in steps:
            grads['layers']['weight'][...] = jnp.full_like(grads['layers']['weight'][...], factor)
        *other, weight = run(frozen, params, steps)
        others.append(other)
        weights.append(weight)
    for a, b in zip(*others, strict=True):
        np.testing.assert_array_equal(a, b)
    assert all((weight == wide(params)[3].astype(np.float32)).all() for weight in weights)
    structures = [jax.tree.structure(each.transform(params, STEPS).init(params)) for each in (free, frozen)]
    assert structures[0] == structures[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wild(AdamW):
    """No direction is finite."""

    def direction(self, params: nnx.State) -> optax.GradientTransformation:
        return optax.stateless(lambda updates, _: jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), updates))


@pytest.mark.parametrize('most', [None, 1e-3])
def test_a_frozen_parameter_stays_whatever_its_direction(params: nnx.State, most: float | None):
    groups = Groups(vector=Group(lr=0.0, most=most))
    embed, bias, *_ = run(Wild(peak_lr=RATE, schedule=FLAT, clip=None, groups=groups), params)
    np.testing.assert_array_equal(bias, wide(params)[1].astype(np.float32))
    assert np.isnan(embed).all()


def test_the_schedule_is_followed(params: nnx.State):
    optimizer = AdamW(peak_lr=RATE, schedule=Constant(warmup=4.0), weight_decay=0.0, clip=None)
    np.testing.assert_allclose(
        [optimizer.learning_rate(STEPS)(c) for c in range(4)], [0.025, 0.05, 0.075, 0.1], rtol=1e-6
    )
    transform = optimizer.transform(params, STEPS)
    updates, _ = transform.update(gradients(params)[0], transform.init(params), params)
    # The first step of Adam is the sign of the gradient, times the rate.
    for update, grad in zip(jax.tree.leaves(updates), jax.tree.leaves(gradients(params)[0]), strict=True):
        np.testing.assert_allclose(update, -0.025 * np.sign(grad), rtol=1e-5)


def test_lion_follows_its_equations(params: nnx.State):
    values, decay = wide(params), [0.2, 0.0, 0.0, 0.2]
    momentum = [0 * p for p in values]
    for grads in gradients(params):
        for i, g in enumerate(wide(grads)):
            values[i] = values[i] - RATE * (np.sign(0.9 * momentum[i] + 0.1 * g) + decay[i] * values[i])
            momentum[i] = 0.99 * momentum[i] + 0.01 * g
    assert_close(run(Lion(peak_lr=RATE, schedule=FLAT, weight_decay=0.2, clip=None), params), values)


def orthogonalised(matrix: np.ndarray) -> np.ndarray:
    x = matrix / np.linalg.norm(matrix)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def test_muon_orthogonalises_each_stacked_matrix_and_leaves_the_rest_to_adamw(params: nnx.State):
    optimizer = Muon(peak_lr=RATE, schedule=FLAT, weight_decay=0.2, clip=None)
    values = adamw(params, decay=[0.2, 0.0, 0.0, 0.2], rate=[1, 1, 1, 1], clip=None)
    weight = wide(params)[3]
    momentum = np.zeros_like(weight)
    for count, grads in enumerate(gradients(params), 1):
        g = wide(grads)[3]
        momentum = 0.95 * momentum + 0.05 * g
        nesterov = 0.95 * momentum / (1 - 0.95 ** (count + 1)) + 0.05 * g / (1 - 0.95**count)
        direction = np.stack([0.2 * np.sqrt(5) * orthogonalised(matrix) for matrix in nesterov])
        weight = weight - RATE * (direction + 0.2 * weight)
    with jax.default_matmul_precision('highest'):
        assert_close(run(optimizer, params), [*values[:3], weight])


def test_muon_of_stacked_layers_equals_muon_of_each(params: nnx.State):
    optimizer = Muon(peak_lr=RATE, schedule=FLAT, clip=None)
    together = run(optimizer, params)
    for index in range(2):
        alone = run(optimizer, layer(params, index), [layer(grads, index) for grads in gradients(params)])
        for whole, one in zip(together[1:], alone, strict=True):
            np.testing.assert_allclose(whole[index], one, rtol=2e-5, atol=2e-6)


def layer(tree: nnx.State, index: int) -> nnx.State:
    structure = jax.tree.structure(nnx.state(Layer(rngs=nnx.Rngs(params=jax.random.key(0)))))
    return jax.tree.unflatten(structure, [leaf[index] for leaf in jax.tree.leaves(tree['layers'])])


@pytest.mark.parametrize('kind', [AdamW, Lion, Muon])
def test_updates_are_reproducible_and_float32(params: nnx.State, kind: type[Optimizer]):
    optimizer = kind(peak_lr=RATE)
    first, second = run(optimizer, params), run(optimizer, params)
    assert all(a.tobytes() == b.tobytes() and a.dtype == np.float32 for a, b in zip(first, second, strict=True))
    state = jax.eval_shape(optimizer.transform(params, STEPS).init, params)
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} <= {jnp.dtype('float32'), jnp.dtype('int32')}


@pytest.mark.parametrize('kind', [AdamW, Lion, Muon])
def test_an_optimizer_survives_its_config(kind: type[Optimizer]):
    optimizer = kind(peak_lr=1e-3, overrides=(Override('*/bias', lr=0.0),), groups=Groups(dynamics=Group(lr=0.1)))
    config = spec(kind, peak_lr=1e-3, overrides=optimizer.overrides, groups=optimizer.groups)
    assert build(config) == optimizer
    config.groups.dynamics.lr = 0.2
    assert build(config).groups.dynamics == Group(lr=0.2)


def test_a_pattern_that_matches_nothing_names_the_nearest_path(params: nnx.State):
    optimizer = AdamW(peak_lr=RATE, overrides=(Override('layers/wieght', lr=0.0),))
    with pytest.raises(UserError, match=r"no parameter matches 'layers/wieght'; did you mean 'layers/weight'\?"):
        optimizer.transform(params, STEPS)


def test_a_parameter_of_an_unknown_group_is_named():
    params = nnx.State({'a': {'b': nnx.Param(jnp.ones(2), group='matrx', axes=('mlp',))}})
    with pytest.raises(UserError, match=r"parameter a/b is of group 'matrx'; it must be one of matrix, .*Linear$"):
        AdamW(peak_lr=RATE).transform(params, STEPS)


@pytest.mark.parametrize(
    'wrong', [{'peak_lr': 0.0}, {'peak_lr': 1.0, 'clip': 0.0}, {'peak_lr': 1.0, 'weight_decay': -1.0}]
)
def test_numbers_that_make_no_sense_are_refused(wrong: dict[str, float]):
    with pytest.raises(UserError, match='an optimizer needs'):
        AdamW(**wrong)
    with pytest.raises(UserError, match='multipliers'):
        Group(lr=-1.0)
    with pytest.raises(UserError, match=r'most of a group is 0\.0; it must be a learning rate above 0, or None'):
        Group(most=0.0)
    for momentum in (1.0, -0.1):
        with pytest.raises(UserError, match=f'momentum of an optimizer is {momentum}; it must be a number from 0 to'):
            Muon(peak_lr=1.0, momentum=momentum)
    for kind in (AdamW, Muon):
        for eps in (0.0, 1e-50, -1.0, np.inf, np.nan):
            with pytest.raises(
                UserError, match=rf'eps of an optimizer is {eps}; it must be a number of at least 1\.2e-38'
            ):
                kind(peak_lr=1.0, eps=eps)


@pytest.mark.parametrize('rescale', [False, True])
def test_perpendicular_gradient_by_hand(rescale):
    # The part of (3, 1) along (1, 1) is (2, 2); what is left, (1, -1), has norm sqrt(2) against sqrt(10).
    transform = perpendicular_gradient(rescale)
    params = {'a': jnp.array([1.0, 1.0]), 'zero': jnp.zeros(2), 'one': jnp.array([5.0])}
    grads = {'a': jnp.array([3.0, 1.0]), 'zero': jnp.array([1.0, 2.0]), 'one': jnp.array([7.0])}
    found, _ = transform.update(grads, transform.init(params), params)
    factor = 5**0.5 if rescale else 1
    np.testing.assert_allclose(found['a'], [factor, -factor], rtol=1e-6)
    np.testing.assert_allclose(found['zero'], [1, 2], rtol=1e-6)
    np.testing.assert_array_equal(found['one'], [7])
    with pytest.raises(ValueError, match='needs the parameters'):
        transform.update(grads, transform.init(params))


@pytest.mark.parametrize('rescale', [False, True])
def test_layers_that_are_stacked_are_projected_one_by_one(rescale, params):
    optimizer = AdamW(peak_lr=RATE, schedule=FLAT, clip=None, weight_decay=0.0, perpendicular=Perpendicular(rescale))
    plain = dataclasses.replace(optimizer, perpendicular=None)
    grads = gradients(params)[0]
    leaves, tree = jax.tree.flatten(grads)
    projected = []
    for (name, weights), gradient in zip(zip(PATHS, wide(params), strict=True), wide(grads), strict=True):
        for w, g in zip(weights, gradient, strict=True) if name.startswith('layers') else [(weights, gradient)]:
            size = np.linalg.norm(g)
            g -= np.sum(w * g) / np.sum(w * w) * w
            g *= size / np.linalg.norm(g) if rescale else 1
        projected.append(jnp.asarray(gradient, jnp.float32))
    assert len(leaves) == len(projected)
    expected = run(plain, params, [jax.tree.unflatten(tree, projected)])
    for one, other in zip(run(optimizer, params, [grads]), expected, strict=True):
        # The first direction of Adam is the sign of the gradient, unless that is tiny.
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def test_perpendicular_is_part_of_the_config():
    cfg = spec(AdamW, peak_lr=RATE, perpendicular=spec(Perpendicular))
    assert build(cfg).perpendicular == Perpendicular(rescale=False)
