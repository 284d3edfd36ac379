"""In-context regression: predict an unknown function at a point from earlier points."""

import dataclasses
import functools

import numpy as np

from attnlab.data.synthetic.problem import Example, Problem, fitting, require, require_length

SINGULAR = 1e-9
"""Variance, in units of the prior's, below which a prediction counts as certain."""

MEASURED = 65_536
"""Points that the second moments of a representation are measured on."""


@dataclasses.dataclass(frozen=True)
class LinearRegression(Problem):
    """Alternating points `x` and values `y`; at each `x`, its `y` is predicted from the points before it.

        x_1 y_1 x_2 y_2 ...      y_i = W phi(x_i) + noise e_i,   x_i ~ N(0, S),   e_i ~ N(0, I),   label at x_i: y_i

    `W` (`outputs dim`) is drawn anew for every example, N(0, 1), all but `nonzero` columns set to zero. `S` is diagonal
    with trace `dim`, eigenvalue `j` (from 1) proportional to `j^-decay`: `decay=0` is isotropic. `phi` is the identity,
    or with `layers` a fixed random network: `h <- leaky_relu(V_l h)`, `V_l` of variance one over `dim`, its output
    scaled to norm `sqrt(dim)`. A value is written in the first `outputs` of a token's numbers, the rest zero.

    Baselines, on `phi(x)`, from the points before:

    - `ridge`: `argmin_w sum_j (y_j - w . x_j)^2 + l |w|^2`, `l = noise^2 / E[w^2]`; without noise, its limit, the
      minimum-norm solution. For dense `W` no predictor is better.
    - `gradient_step`: one step of gradient descent from zero with the best preconditioner for so many points `n`,
      `((n + 1) S + (trace S + l) I)^-1`, the most that one layer of linear attention can do. On a representation it is
      `((n - 1) C + (dim + l) I)^-1`, with `C = E[phi phi']`: it is `E[A] E[A^2 + l A]^-1` for `A = sum_j phi_j phi_j'`,
      and a `phi` of fixed norm has `E[(phi phi')^2] = dim C`, where points of a normal distribution have
      `2 S^2 + (trace S) S`. `C` is measured, on the same 65,536 points always.
    - `zero`: predicting zero.

    Attributes:
      dim: size of `x`.
      outputs: size of `y`; each is a separate task.
      noise: standard deviation of the noise.
      decay: of the eigenvalues of the inputs' covariance.
      nonzero: columns of `W` that are not zero; `None` for all.
      layers: of the fixed representation; 0 for none.

    Source: Garg et al., "What Can Transformers Learn In-Context? A Case Study of Simple Function Classes", 2022,
    https://arxiv.org/abs/2208.01066; the gradient step: Mahankali, Hashimoto and Ma, 2023,
    https://arxiv.org/abs/2307.03576, and Ahn et al., 2023, https://arxiv.org/abs/2306.00297; the representation: Guo et
    al., 2023, https://arxiv.org/abs/2310.10616.
    """

    dim: int = 20
    outputs: int = 1
    noise: float = 0.0
    decay: float = 0.0
    nonzero: int | None = None
    layers: int = 0

    @property
    def vocab(self) -> int:
        return self.outputs

    @property
    def features(self) -> int:
        return max(self.dim, self.outputs)

    def check(self, length: int) -> None:
        require(self, 'dim', self.dim >= 1, 'a whole number of at least 1')
        require(self, 'outputs', self.outputs >= 1, 'a whole number of at least 1')
        require(self, 'noise', self.noise >= 0, 'a number of at least 0')
        require(self, 'decay', self.decay >= 0, 'a number of at least 0')
        whole = f'a whole number from 1 to dim = {self.dim}, or None'
        require(self, 'nonzero', self.nonzero is None or 1 <= self.nonzero <= self.dim, whole)
        require(self, 'layers', self.layers >= 0, 'a whole number of at least 0')
        require_length(self, length, length >= 2 and length % 2 == 0, 'an even number, two tokens a point')

    def labels(self, length: int) -> int:
        return length // 2

    def generate(self, rng: np.random.Generator, length: int) -> Example:
        count = length // 2
        x = (rng.standard_normal((count, self.dim)) * np.sqrt(self._spectrum)).astype(np.float32)
        weights = rng.standard_normal((self.dim, self.outputs))
        weights[rng.permutation(self.dim)[self._active :]] = 0
        y = represented(x, self.layers) @ weights + self.noise * rng.standard_normal((count, self.outputs))
        tokens = np.zeros((length, self.features), np.float32)
        tokens[::2, : self.dim] = x
        tokens[1::2, : self.outputs] = y
        return Example(tokens, np.arange(0, length, 2), y.astype(np.float32))

    def variants(self, length: int) -> dict[str, Problem]:
        changed = {
            'noise=1': dataclasses.replace(self, noise=1.0),
            'decay=1': dataclasses.replace(self, decay=1.0),
        }
        return fitting(length, {name: variant for name, variant in changed.items() if variant != self})

    def baselines(self, example: Example) -> dict[str, np.ndarray]:
        x = represented(example.tokens[::2, : self.dim], self.layers)
        y = example.targets.astype(np.float64)
        predictions = {
            'ridge': ridge_predictions(x, y, self._penalty),
            'gradient_step': self._step_predictions(x, y),
            'zero': np.zeros_like(y),
        }
        return {name: ((prediction - y) ** 2).mean(axis=1) for name, prediction in predictions.items()}

    @property
    def _active(self) -> int:
        return self.dim if self.nonzero is None else self.nonzero

    @property
    def _penalty(self) -> float:
        return self.noise**2 * self.dim / self._active

    @property
    def _spectrum(self) -> np.ndarray:
        return _spectrum(self.dim, self.decay)

    def _step_predictions(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        before = np.arange(len(x))[:, None]
        spectrum, times = self._spectrum, before + 1
        if self.layers:
            spectrum, directions = _principal(self.dim, self.layers, self.decay)
            x, times = x @ directions, np.maximum(before - 1, 0)
        moments = np.cumsum(x[:, :, None] * y[:, None, :], axis=0)
        moments = np.concatenate([np.zeros_like(moments[:1]), moments[:-1]])
        scale = 1 / (times * spectrum + self.dim + self._penalty)
        return np.einsum('n d, n d, n d o -> n o', x, scale, moments)


def represented(x: np.ndarray, layers: int) -> np.ndarray:
    """A fixed random network of points, of norm `sqrt(dim)`, `n dim`; with no layers the points themselves."""
    hidden = x.astype(np.float64)
    for weight in _layers(x.shape[1], layers):
        hidden = hidden @ weight
        hidden = np.maximum(hidden, 0.1 * hidden)
    if layers:
        hidden *= np.sqrt(x.shape[1]) / np.linalg.norm(hidden, axis=1, keepdims=True)
    return hidden


def ridge_predictions(x: np.ndarray, y: np.ndarray, penalty: float) -> np.ndarray:
    """The ridge-regression prediction at each point from the points before it, `n o`; see `posterior_predictions`."""
    return posterior_predictions(x, y, penalty)[0]


def posterior_predictions(x: np.ndarray, y: np.ndarray, penalty: float) -> tuple[np.ndarray, np.ndarray]:
    """Mean `n o` and variance `n` of the value at each point, given the points before it, by recursive least squares.

        y_i = w . x_i + e_i,   w ~ N(0, I),   e_i ~ N(0, penalty)

    The mean is the prediction of ridge regression; with `penalty` 0 it is that of the minimum-norm solution.
    """
    covariance, weights = np.eye(x.shape[1]), np.zeros((x.shape[1], y.shape[1]))
    predictions, variances = np.empty_like(y), np.empty(len(y))
    for i, (point, value) in enumerate(zip(x, y, strict=True)):
        predictions[i] = point @ weights
        direction = covariance @ point
        variances[i] = point @ direction + penalty
        if variances[i] > SINGULAR * (point @ point):
            weights += np.outer(direction, value - predictions[i]) / variances[i]
            covariance -= np.outer(direction, direction) / variances[i]
    return predictions, variances


def _spectrum(dim: int, decay: float) -> np.ndarray:
    """The variances of the inputs."""
    eigenvalues = np.arange(1, dim + 1) ** -decay
    return eigenvalues * dim / eigenvalues.sum()


@functools.lru_cache(maxsize=8)
def _principal(dim: int, layers: int, decay: float) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues and eigenvectors of the second moments of the representation, measured."""
    x = np.random.default_rng((dim, layers, 1)).standard_normal((MEASURED, dim)) * np.sqrt(_spectrum(dim, decay))
    features = represented(x, layers)
    variances, directions = np.linalg.eigh(features.T @ features / MEASURED)
    return variances, directions


@functools.lru_cache(maxsize=8)
def _layers(dim: int, count: int) -> list[np.ndarray]:
    """The weights of the fixed representation, a part of the problem."""
    rng = np.random.default_rng((dim, count))
    return [rng.standard_normal((dim, dim)) / np.sqrt(dim) for _ in range(count)]
