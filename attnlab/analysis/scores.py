"""How sure a classifier is: scores of single inputs, larger where they look more like what it was trained on.

Logits are `b o`, features (the vectors that the head reads) `b d`; all in float64.
"""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.special import logsumexp, softmax
from scipy.stats import rankdata

RIDGE = 1e-4
"""Added to a covariance, as a share of its mean variance, so that few examples suffice for its inverse."""


def max_probability(logits: Float[np.ndarray, 'b o']) -> Float[np.ndarray, 'b']:
    """`max_o softmax(f)_o` (Hendrycks and Gimpel 2017, https://arxiv.org/abs/1610.02136)."""
    return np.max(softmax(logits, axis=1), axis=1)


def max_logit(logits: Float[np.ndarray, 'b o']) -> Float[np.ndarray, 'b']:
    """`max_o f_o`."""
    return np.max(logits, axis=1)


def negative_entropy(logits: Float[np.ndarray, 'b o']) -> Float[np.ndarray, 'b']:
    """`sum_o p_o log p_o`, in nats."""
    logs = logits - logsumexp(logits, axis=1, keepdims=True)
    return np.sum(np.exp(logs) * logs, axis=1)


def energy(logits: Float[np.ndarray, 'b o']) -> Float[np.ndarray, 'b']:
    """`log sum_o exp(f_o)`, minus the energy of Liu et al. 2020, https://arxiv.org/abs/2010.03759, at temperature 1."""
    return logsumexp(logits, axis=1)


@dataclasses.dataclass(frozen=True, eq=False)
class Mahalanobis:
    """`max_c -1/2 (x - m_c)^T P (x - m_c)`: class means, and the inverse of one covariance of all classes.

    Lee et al. 2018, https://arxiv.org/abs/1807.03888, of the last features alone, the input as it is. Of predicted
    tokens the classes are the tokens that came next. With one class, of the mean features of texts, it is the distance
    of Ren et al. 2023, https://arxiv.org/abs/2209.15558.
    """

    means: Float[np.ndarray, 'c d']
    precision: Float[np.ndarray, 'd d']

    @classmethod
    def fitted(cls, features: Float[np.ndarray, 'b d'], labels: Int[np.ndarray, 'b']) -> 'Mahalanobis':
        """From examples of training; classes without examples have no mean."""
        classes, places = np.unique(labels, return_inverse=True)
        means = np.stack([features[labels == label].mean(axis=0) for label in classes])
        centred = features - means[places]
        covariance = centred.T @ centred / len(features)
        # Of classes of one example each nothing is known of how they spread: distances are as they are.
        ridge = RIDGE * (np.trace(covariance) / len(covariance) or 1.0)
        return cls(means, np.linalg.inv(covariance + ridge * np.eye(len(covariance))))

    def score(self, features: Float[np.ndarray, 'b d']) -> Float[np.ndarray, 'b']:
        """The scores of inputs."""
        # Squares of whitened differences, never all differences at once: there are as many classes as tokens.
        white = np.linalg.cholesky(self.precision)
        x, means = (features - self.means.mean(axis=0)) @ white, (self.means - self.means.mean(axis=0)) @ white
        return np.max(x @ means.T - 0.5 * np.sum(means**2, axis=1), axis=1) - 0.5 * np.sum(x**2, axis=1)


@dataclasses.dataclass(frozen=True, eq=False)
class VirtualLogit:
    """ViM: `logsumexp(f) - alpha |R^T (x - o)|`, `R` what the principal directions of training leave of the features.

    `o = -pinv(W) b` is where all logits are zero, and `alpha` makes the mean residual of training as large as its mean
    largest logit. Wang et al. 2022, https://arxiv.org/abs/2203.10807.
    """

    origin: Float[np.ndarray, 'd']
    rest: Float[np.ndarray, 'd r']
    alpha: float

    @classmethod
    def fitted(
        cls,
        features: Float[np.ndarray, 'b d'],
        logits: Float[np.ndarray, 'b o'],
        weight: Float[np.ndarray, 'd o'],
        bias: Float[np.ndarray, 'o'],
    ) -> 'VirtualLogit':
        """From examples of training and the head, `logits = x weight + bias`; half of the directions are principal.

        Of 768 features and more 512, of 2,048 and more 1,000, as there.
        """
        dim = features.shape[1]
        kept = 1000 if dim >= 2048 else 512 if dim >= 768 else dim // 2
        origin = -np.linalg.pinv(weight.T) @ bias
        centred = features - origin
        _, directions = np.linalg.eigh(centred.T @ centred / len(centred))
        rest = directions[:, : dim - kept]
        residual = np.linalg.norm(centred @ rest, axis=1)
        return cls(origin, rest, float(np.mean(max_logit(logits)) / max(np.mean(residual), 1e-30)))

    def score(self, features: Float[np.ndarray, 'b d'], logits: Float[np.ndarray, 'b o']) -> Float[np.ndarray, 'b']:
        """The scores of inputs."""
        return energy(logits) - self.alpha * np.linalg.norm((features - self.origin) @ self.rest, axis=1)


@dataclasses.dataclass(frozen=True, eq=False)
class RelativeUncertainty:
    """`-p^T D p`, `D` learned from right and wrong answers: how their probabilities are spread over pairs of classes.

        D ~ relu(E[p p^T | wrong] - E[p p^T | right]) off the diagonal, 0 on it

    scaled to norm one. Of all symmetric matrices of that size, not negative and zero on the diagonal, it has the
    largest difference of means between wrong and right answers, both weighing as much (Dadalto et al. 2023,
    https://arxiv.org/abs/2306.01710, with their lambda of one half).
    """

    matrix: Float[np.ndarray, 'o o']

    @classmethod
    def fitted(cls, logits: Float[np.ndarray, 'b o'], is_right: Bool[np.ndarray, 'b']) -> 'RelativeUncertainty':
        """From answers of which some are right and some are wrong; raises ValueError where they are not."""
        if not 0 < is_right.sum() < len(is_right):
            raise ValueError('answers are all right or all wrong, which leaves nothing to tell apart')
        p = softmax(logits, axis=1)
        wrong, known = (each.T @ each / len(each) for each in (p[~is_right], p[is_right]))
        matrix = np.maximum(wrong - known, 0) * (1 - np.eye(p.shape[1]))
        return cls(matrix / max(float(np.linalg.norm(matrix)), 1e-30))

    def score(self, logits: Float[np.ndarray, 'b o']) -> Float[np.ndarray, 'b']:
        """The scores of outputs."""
        p = softmax(logits, axis=1)
        return -np.sum((p @ self.matrix) * p, axis=1)


POWERS = (1.5, 2.0, 2.5, 3.0)
"""Norms that `ConjNorm` chooses among."""


@dataclasses.dataclass(frozen=True, eq=False)
class ConjNorm:
    """`log sum_c exp(-d(x, m_c))`, `d` the Bregman divergence of `|x|_p^2 / 2`, `m_c` means of classes.

        d(x, m) = |x|_p^2 / 2 - |m|_p^2 / 2 - (x - m)^T g(m),  g(m) = |m|_p^(2 - p) sign(m) |m|^(p - 1)

    With p = 2 it is half of the squared distance. Features are divided by their root mean square on training; p is
    that which tells training best from itself with channels exchanged between rows. Peng et al. 2024,
    https://arxiv.org/abs/2402.17888, who choose p by a validation set and estimate the normaliser, which is one
    constant for all inputs and left out here.
    """

    means: Float[np.ndarray, 'c d']
    scale: float
    power: float

    @classmethod
    def fitted(
        cls, features: Float[np.ndarray, 'b d'], labels: Int[np.ndarray, 'b'], powers: tuple[float, ...] = POWERS
    ) -> 'ConjNorm':
        """From examples of training; classes without examples have no mean."""
        scale = max(float(np.sqrt(np.mean(np.sum(features**2, axis=1)))), 1e-30)
        means = np.stack([features[labels == label].mean(axis=0) for label in np.unique(labels)]) / scale
        rng = np.random.default_rng(0)
        mixed = np.stack([rng.permutation(column) for column in features.T], axis=1)
        made = [cls(means, scale, power) for power in powers]
        return max(made, key=lambda each: auroc(each.score(features), each.score(mixed)))

    def score(self, features: Float[np.ndarray, 'b d']) -> Float[np.ndarray, 'b']:
        """The scores of inputs."""
        x, p = features / self.scale, self.power
        sizes = np.linalg.norm(self.means, p, axis=1)
        slope = np.maximum(sizes, 1e-30)[:, None] ** (2 - p) * np.sign(self.means) * np.abs(self.means) ** (p - 1)
        divergence = (
            0.5 * np.linalg.norm(x, p, axis=1)[:, None] ** 2
            - 0.5 * sizes[None] ** 2
            - (x @ slope.T - np.sum(self.means * slope, axis=1))
        )
        return logsumexp(-divergence, axis=1)


def agreement(members: Float[np.ndarray, 'm b o']) -> Float[np.ndarray, 'b']:
    """Minus the mutual information of class and member, `H(mean p) - mean H(p)`: 0 where all members say the same.

    Lakshminarayanan et al. 2017, https://arxiv.org/abs/1612.01474; Depeweg et al. 2018, https://arxiv.org/abs/1710.07283.
    """
    together = negative_entropy(mean_logits(members))
    return together - np.mean([negative_entropy(each) for each in members], axis=0)


def mean_logits(members: Float[np.ndarray, 'm b o']) -> Float[np.ndarray, 'b o']:
    """The logarithms of the mean probabilities of members."""
    logs = members - logsumexp(members, axis=2, keepdims=True)
    return logsumexp(logs, axis=0) - np.log(len(members))


def auroc(inside: Float[np.ndarray, 'b'], outside: Float[np.ndarray, 'c']) -> float:
    """The probability that a score inside is larger than one outside, ties counting half."""
    ranks = rankdata(np.concatenate([inside, outside]))[: len(inside)]
    return float((np.sum(ranks) - len(inside) * (len(inside) + 1) / 2) / (len(inside) * len(outside)))


def false_positives(inside: Float[np.ndarray, 'b'], outside: Float[np.ndarray, 'c'], kept: float = 0.95) -> float:
    """The share outside that passes the threshold which `kept` of the scores inside pass."""
    order = np.sort(inside)[::-1]
    threshold = order[int(np.ceil(kept * len(order))) - 1]
    return float(np.mean(outside >= threshold))


def right(logits: Float[np.ndarray, 'b o'], labels: Int[np.ndarray, 'b']) -> Bool[np.ndarray, 'b']:
    """Whether the likeliest class is the label."""
    return np.argmax(logits, axis=1) == labels
