import numpy as np
import pytest
from scipy.special import log_softmax
from scipy.stats import multivariate_normal

from attnlab.data.synthetic.families import FEATURES, MIXED, Family, FunctionDensity, FunctionMixture
from attnlab.data.synthetic.problem import Examples
from attnlab.errors import UserError


def averaged(problem, length=24, count=600):
    source = Examples(problem, length, baselines=True)
    rows = [source[i] for i in range(count)]
    names = [name for name in rows[0] if name.startswith('baseline/')]
    return {name.partition('/')[2]: np.mean([row[name] for row in rows]) for name in names}


def test_beliefs_are_those_of_the_joint_density():
    """By conditioning the joint normal density of all values, one family at a time, instead of point by point."""
    problem = FunctionMixture(dim=3, families=(*MIXED, Family('still', noise=0.1)))
    example = problem.generate(np.random.default_rng(0), 14)
    log_weights, means, variances = problem.beliefs(example)
    y, evidence = example.targets[:, 0].astype(np.float64), np.zeros((7, 4))
    for k, family in enumerate(problem.families):
        phi = FEATURES[family.phi](example.tokens[::2])
        joint = phi @ phi.T + family.noise**2 * np.eye(7)
        for n in range(7):
            if n:
                evidence[n, k] = multivariate_normal(np.zeros(n), joint[:n, :n]).logpdf(y[:n])
            gain = np.linalg.solve(joint[:n, :n], joint[:n, n]) if n else np.zeros(0)
            assert means[n, k] == pytest.approx(gain @ y[:n], abs=1e-9)
            assert variances[n, k] == pytest.approx(joint[n, n] - gain @ joint[:n, n], rel=1e-9)
    np.testing.assert_allclose(log_weights, log_softmax(evidence, axis=1), atol=1e-8)


def test_nobody_errs_less_than_bayes():
    found = averaged(FunctionMixture())
    bayes = found.pop('bayes')
    assert found.keys() == {'only_linear', 'only_squares', 'only_network', 'zero'}
    assert all(bayes < 0.9 * error for error in found.values())


@pytest.mark.parametrize('families', [None, MIXED])
def test_no_density_is_better_than_the_posterior(families):
    found = averaged(FunctionDensity() if families is None else FunctionDensity(families=families))
    bayes = found.pop('bayes')
    assert all(bayes < nats - 0.01 for nats in found.values())
    assert found['one_normal'] < found['prior'], 'some of it can be said by a variance'


def test_families_are_alike_in_scale_and_are_slices():
    problem = FunctionMixture()
    parts = problem.variants(24)
    assert list(parts) == ['family=linear', 'family=squares', 'family=network']
    drawn = {name: averaged(part) for name, part in parts.items()}
    for name, found in drawn.items():
        own = found[f'only_{name.removeprefix("family=")}']
        assert found['zero'] == pytest.approx(5.25, rel=0.15)
        assert own < found['bayes'] < min(error for other, error in found.items() if other != 'bayes' and error != own)


def test_mistakes_are_named():
    for problem, said in (
        (FunctionMixture(families=()), 'families of FunctionMixture'),
        (FunctionMixture(families=(Family('a', 'cubes'),)), 'whose phi is one of linear, squares, network'),
        (FunctionDensity(families=(Family('a', noise=0.0),)), 'noise above 0'),
        (FunctionMixture(drawn=('cubic',)), 'some of linear, squares, network'),
    ):
        with pytest.raises(UserError, match=said):
            problem.check(24)
