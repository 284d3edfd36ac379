import numpy as np
import pytest

from attnlab.data.synthetic.problem import Examples
from attnlab.data.synthetic.regression import LinearRegression, represented, ridge_predictions


def points(row, problem):
    return row['tokens'][::2, : problem.dim].astype(np.float64), row['targets'].astype(np.float64)


def averaged(problem, length, count=500):
    source = Examples(problem, length, baselines=True)
    rows = [source[i] for i in range(count)]
    names = ('baseline/ridge', 'baseline/gradient_step', 'baseline/zero')
    return {name.partition('/')[2]: np.mean([row[name] for row in rows], axis=0) for name in names}


@pytest.mark.parametrize('outputs', [1, 3])
def test_without_noise_the_points_determine_the_function(outputs):
    problem = LinearRegression(dim=4, outputs=outputs)
    for i in range(20):
        row = Examples(problem, 24)[i]
        x, y = points(row, problem)
        weights, _, rank, _ = np.linalg.lstsq(x[:6], y[:6])
        assert rank == 4
        np.testing.assert_allclose(x @ weights, y, atol=1e-4)
        np.testing.assert_array_equal(row['tokens'][1::2, :outputs], row['targets'])
        assert not row['tokens'][1::2, outputs:].any() and not row['tokens'][::2, 4:].any()
        assert row['at'].tolist() == list(range(0, 24, 2))


def test_sparse_weights():
    problem = LinearRegression(dim=6, nonzero=2)
    supports = set()
    for i in range(60):
        x, y = points(Examples(problem, 24)[i], problem)
        weights = np.linalg.lstsq(x, y)[0][:, 0]
        supports.add(tuple(np.flatnonzero(abs(weights) > 1e-3)))
    assert {len(support) for support in supports} == {2} and len(supports) > 10


def test_covariance_noise_and_representation():
    source = Examples(LinearRegression(dim=3, decay=1.0), 2000)
    variances = np.mean([source[i]['tokens'][::2].var(axis=0) for i in range(20)], axis=0)
    np.testing.assert_allclose(variances, np.array([6, 3, 2]) * 3 / 11, rtol=0.05)
    noisy = LinearRegression(dim=3, noise=0.5)
    x, y = points(Examples(noisy, 4000)[0], noisy)
    assert np.std(y - x @ np.linalg.lstsq(x, y)[0]) == pytest.approx(0.5, rel=0.1)
    shaped = LinearRegression(dim=3, layers=2)
    x, y = points(Examples(shaped, 400)[0], shaped)
    assert np.std(y - x @ np.linalg.lstsq(x, y)[0]) > 0.1, 'not linear in x'
    other, _ = points(Examples(shaped, 400)[1], shaped)
    np.testing.assert_allclose(represented(other, 2) ** 2 @ np.ones((3, 1)), np.full((200, 1), 3.0))


@pytest.mark.parametrize('penalty', [0.0, 0.3])
def test_ridge_is_that_of_the_normal_equations(penalty):
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((12, 4)), rng.standard_normal((12, 2))
    if penalty == 0.0:
        y = x @ rng.standard_normal((4, 2))
    found = ridge_predictions(x, y, penalty)
    for i in range(12):
        before = x[:i]
        if penalty:
            weights = np.linalg.solve(before.T @ before + penalty * np.eye(4), before.T @ y[:i])
        else:
            weights = np.linalg.pinv(before) @ y[:i] if i else np.zeros((4, 2))
        np.testing.assert_allclose(found[i], x[i] @ weights, atol=1e-9)


def test_baselines_are_where_theory_puts_them():
    """One step after n points: d (1 - n / (n + d + 1 + s^2)) + s^2, by Mahankali, Hashimoto and Ma."""
    d, noise, n = 5, 0.5, np.arange(20)
    found = averaged(LinearRegression(dim=d, noise=noise), 40)
    expected = d * (1 - n / (n + d + 1 + noise**2)) + noise**2
    np.testing.assert_allclose(found['gradient_step'], expected, rtol=0.25)
    np.testing.assert_allclose(found['gradient_step'].mean(), expected.mean(), rtol=0.06)
    np.testing.assert_allclose(found['zero'].mean(), d + noise**2, rtol=0.08)
    assert (found['ridge'] < found['gradient_step'] * 1.02).all() and found['ridge'][-1] < 0.5
    clean = averaged(LinearRegression(dim=d), 40, 200)
    assert clean['ridge'][5:].max() < 1e-6 < clean['ridge'][4]


def test_the_preconditioner_is_the_best_one():
    """No scaling of the step along either axis does better, inputs anisotropic."""
    problem = LinearRegression(dim=2, decay=2.0, noise=0.5)
    source = Examples(problem, 12)
    rows = [points(source[i], problem) for i in range(4000)]
    x, y = (np.stack(part) for part in zip(*rows, strict=True))
    spectrum = np.array([4.0, 1.0]) * 2 / 5
    best = 1 / (6 * spectrum + 2 + 0.25)
    moments = np.einsum('b n d, b n o -> b d', x[:, :5], y[:, :5])

    def error(scale):
        return np.mean((np.sum(x[:, 5] * scale * moments, axis=1) - y[:, 5, 0]) ** 2)

    for axis in (0, 1):
        for factor in (0.7, 1.4):
            changed = best.copy()
            changed[axis] *= factor
            assert error(changed) > error(best)


def test_the_step_on_a_representation_is_between_ridge_and_zero():
    """Of three layers, whose features are far from white: as `regression_representation` has them."""
    found = averaged(LinearRegression(layers=3), 80, 300)
    assert found['ridge'].mean() < found['gradient_step'].mean() < 0.5 * found['zero'].mean()
    assert (found['gradient_step'][1:] < found['zero'][1:]).all()


def test_the_preconditioner_of_a_representation_is_the_best_one():
    """No matrix fitted to what is asked after 7 points does better, decay and noise included."""
    problem = LinearRegression(dim=3, layers=2, decay=1.0, noise=0.5)
    source = Examples(problem, 16, baselines=True)
    rows = [source[i] for i in range(6000)]
    x, y = (np.stack(part) for part in zip(*(points(row, problem) for row in rows), strict=True))
    features = represented(x.reshape(-1, 3), 2).reshape(x.shape)
    moments = np.einsum('b n d, b n o -> b d', features[:, :7], y[:, :7])
    products = (features[:, 7, :, None] * moments[:, None, :]).reshape(len(rows), -1)
    fitted = np.linalg.lstsq(products, y[:, 7, 0])[0]
    best = np.mean((products @ fitted - y[:, 7, 0]) ** 2)
    assert best < np.mean([row['baseline/gradient_step'][7] for row in rows]) < 1.01 * best
