"""In-context regression of functions from several families, beside the Bayes-optimal prediction and its certainty."""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
from scipy.special import log_softmax, logsumexp

from attnlab.data.synthetic.problem import Example, Problem, require, require_length
from attnlab.data.synthetic.regression import posterior_predictions, represented

FEATURES: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    'linear': lambda x: represented(x, 0),
    'squares': lambda x: (np.square(x, dtype=np.float64) - 1) / np.sqrt(2),
    'network': lambda x: represented(x, 3),
}
"""Of points `n dim`, as many numbers, whose squares add up to `dim` on average: no family is known by its scale."""


@dataclasses.dataclass(frozen=True)
class Family:
    """Functions `f(x) = w . phi(x)`, `w ~ N(0, I)`, whose values are seen with noise.

    Attributes:
      name: of the family.
      phi: one of FEATURES: the point itself, its squares, or a fixed random network of three layers.
      noise: standard deviation of the noise, above 0.
    """

    name: str
    phi: str = 'linear'
    noise: float = 0.5


MIXED = (Family('linear'), Family('squares', 'squares'), Family('network', 'network'))
NOISY = (Family('quiet', noise=0.1), Family('noisy', noise=1.0))


@dataclasses.dataclass(frozen=True)
class FunctionMixture(Problem):
    """Alternating points and values, as in `LinearRegression`, of a function of a family that is drawn for the example.

        x_1 y_1 x_2 y_2 ...      y_i = f(x_i) + noise e_i,   f of a family,   x_i ~ N(0, I),   label at x_i: y_i

    All families are as likely. Baselines are squared errors of predictions from the points before:

    - `bayes`: the posterior mean, `sum_k p_k m_k`: `m_k` the mean given that the function is of family `k`, and `p_k`
      how likely that is by then. No predictor has a smaller error on average. Exact, since families are Gaussian.
    - `only_NAME`: `m_k`, the prediction of one who takes all functions to be of one family.
    - `zero`: predicting zero.

    Attributes:
      dim: size of `x`.
      families: what is drawn from, and what `bayes` believes.
      drawn: the names of those that are drawn; empty: all. In evaluation each is a slice, `family=NAME`.

    Source: Panwar, Ahuja and Goyal, "In-Context Learning through the Bayesian Prism", 2024,
    https://arxiv.org/abs/2306.04891; a fixed representation: Guo et al., 2023, https://arxiv.org/abs/2310.10616.
    """

    dim: int = 5
    families: tuple[Family, ...] = MIXED
    drawn: tuple[str, ...] = ()

    @property
    def vocab(self) -> int:
        return 1

    @property
    def features(self) -> int:
        return self.dim

    def check(self, length: int) -> None:
        require(self, 'dim', self.dim >= 1, 'a whole number of at least 1')
        names = [family.name for family in self.families]
        require(self, 'families', 0 < len(names) == len(set(names)), 'at least one family, with different names')
        known = all(family.phi in FEATURES for family in self.families)
        require(self, 'families', known, f'families whose phi is one of {", ".join(FEATURES)}')
        require(self, 'families', all(family.noise > 0 for family in self.families), 'families with noise above 0')
        require(self, 'drawn', set(self.drawn) <= set(names), f'empty, or some of {", ".join(names)}')
        require_length(self, length, length >= 2 and length % 2 == 0, 'an even number, two tokens a point')

    def labels(self, length: int) -> int:
        return length // 2

    def generate(self, rng: np.random.Generator, length: int) -> Example:
        count = length // 2
        families = [family for family in self.families if not self.drawn or family.name in self.drawn]
        family = families[rng.integers(len(families))]
        x = rng.standard_normal((count, self.dim)).astype(np.float32)
        noise = family.noise * rng.standard_normal((count, 1))
        y = FEATURES[family.phi](x) @ rng.standard_normal((self.dim, 1)) + noise
        tokens = np.zeros((length, self.dim), np.float32)
        tokens[::2], tokens[1::2, :1] = x, y
        return Example(tokens, np.arange(0, length, 2), y.astype(np.float32))

    def variants(self, length: int) -> dict[str, Problem]:
        del length
        if len(self.families) == 1 or self.drawn:
            return {}
        return {f'family={one.name}': dataclasses.replace(self, drawn=(one.name,)) for one in self.families}

    def beliefs(self, example: Example) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What is known at every point from the points before it: log probabilities, means and variances, `n k`.

        A family's mean and variance are those of the value, its noise included, given that the function is of it; its
        probability follows from how likely it made the values before, by Bayes' rule.
        """
        x, y = example.tokens[::2], example.targets.astype(np.float64)
        found = [posterior_predictions(FEATURES[one.phi](x), y, one.noise**2) for one in self.families]
        means = np.concatenate([mean for mean, _ in found], axis=1)
        variances = np.stack([variance for _, variance in found], axis=1)
        likely = np.cumsum(log_normal(y, means, variances), axis=0)
        before = np.concatenate([np.zeros_like(likely[:1]), likely[:-1]])
        return log_softmax(before, axis=1), means, variances

    def baselines(self, example: Example) -> dict[str, np.ndarray]:
        y = example.targets[:, 0].astype(np.float64)
        log_weights, means, _ = self.beliefs(example)
        predictions = {
            'bayes': np.sum(np.exp(log_weights) * means, axis=1),
            **{f'only_{one.name}': mean for one, mean in zip(self.families, means.T, strict=True)},
            'zero': np.zeros_like(y),
        }
        return {name: np.square(prediction - y) for name, prediction in predictions.items()}


@dataclasses.dataclass(frozen=True)
class FunctionDensity(FunctionMixture):
    """`FunctionMixture` whose answer is a density of the value: how sure one may be, and not only of what.

    By default functions are linear, and half of them are seen with ten times the noise, which has to be found out.
    Baselines are negative log-likelihoods in nats, `-log p(y_i)`:

    - `bayes`: of the exact posterior, `sum_k p_k N(m_k, v_k)`. No density has a smaller one on average.
    - `one_normal`: of the normal density with mean and variance of that, the best that one normal density does.
    - `only_NAME`: of `N(m_k, v_k)`.
    - `prior`: of the exact density where nothing was seen.

    Source: Mueller et al., "Transformers Can Do Bayesian Inference", 2022, https://arxiv.org/abs/2112.10510.
    """

    families: tuple[Family, ...] = NOISY

    def baselines(self, example: Example) -> dict[str, np.ndarray]:
        y = example.targets.astype(np.float64)
        log_weights, means, variances = self.beliefs(example)
        weights, densities = np.exp(log_weights), log_normal(y, means, variances)
        mean = np.sum(weights * means, axis=1, keepdims=True)
        variance = np.sum(weights * (variances + np.square(means - mean)), axis=1, keepdims=True)
        phis = [FEATURES[one.phi](example.tokens[::2]) for one in self.families]
        first = [np.square(phi).sum(axis=1) + one.noise**2 for phi, one in zip(phis, self.families, strict=True)]
        unseen = log_normal(y, np.zeros_like(means), np.stack(first, axis=1)) - np.log(len(first))
        found = {
            'bayes': logsumexp(log_weights + densities, axis=1),
            'one_normal': log_normal(y, mean, variance)[:, 0],
            **{f'only_{one.name}': density for one, density in zip(self.families, densities.T, strict=True)},
            'prior': logsumexp(unseen, axis=1),
        }
        return {name: -density for name, density in found.items()}


def log_normal(y: np.ndarray, mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """The logarithm of the normal density."""
    return -(np.square(y - mean) / variance + np.log(2 * np.pi * variance)) / 2
