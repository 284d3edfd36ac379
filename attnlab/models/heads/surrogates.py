"""Classification losses in the place of cross-entropy, and the linear head that is trained on one of them."""

import abc
import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from attnlab.errors import UserError
from attnlab.losses import check_targets, nan_outside, softmax_loss
from attnlab.models.heads.classification import ClassificationHead
from attnlab.signature import checked_fields
from attnlab.typing import DropoutKey

SMALLEST = 1e-24
"""Below a variance, whose root is differentiated."""


class Surrogate(abc.ABC):
    """A loss of the scores of classes; without parameters."""

    @abc.abstractmethod
    def losses(self, scores: Float[Array, '*b o'], targets: Int[Array, '*b']) -> Float[Array, '*b']:
        """One number per example."""


@checked_fields
@dataclasses.dataclass(frozen=True)
class CompSum(Surrogate):
    """`((1 + u)^(1 - tau) - 1) / (1 - tau)`, with `u = sum_{k != y} exp(x_k - x_y)`, and `log(1 + u)` at tau = 1.

    0 is the sum of exponentials, 1 cross-entropy, between 1 and 2 generalised cross-entropy, 2 the mean absolute
    error. Mao, Mohri and Zhong 2023, https://arxiv.org/abs/2304.07288. Raises `UserError` for a negative tau.
    """

    tau: float = 1.5

    def __post_init__(self) -> None:
        if self.tau < 0:
            raise UserError(f'tau of CompSum is {self.tau}; it must be at least 0')

    def losses(self, scores: Float[Array, '*b o'], targets: Int[Array, '*b']) -> Float[Array, '*b']:
        """See the class; from the cross-entropy, which is `log(1 + u)`."""
        entropy = softmax_loss(scores, targets)
        return entropy if self.tau == 1 else jnp.expm1((1 - self.tau) * entropy) / (1 - self.tau)


@checked_fields
@dataclasses.dataclass(frozen=True)
class LabelRobust(Surrogate):
    """`lam log(1/o sum_k exp((x_k - x_y + c 1[k != y]) / lam))`: the worst case over weights of labels near uniform.

    At lam = 1 without margin it is cross-entropy less `log o`; for small lam the largest margin violation, for large
    lam their mean. With `adapt` every example has a temperature of its own, found once from `lam` and not
    differentiated: `lam (1 - KL(softmax(x / lam) || uniform) / (adapt log o))`, lower for what is certain.
    Zhu, Ying and Yang 2023, https://arxiv.org/abs/2112.14869.

    Raises `UserError` unless `lam` is positive, and `adapt` greater than 1, so that temperatures are positive.
    """

    lam: float = 1.0
    margin: float = 0.0
    adapt: float | None = None

    def __post_init__(self) -> None:
        if self.lam <= 0:
            raise UserError(f'lam of LabelRobust is {self.lam}; it must be positive')
        if self.adapt is not None and self.adapt <= 1:
            raise UserError(f'adapt of LabelRobust is {self.adapt}; it must be greater than 1, or None')

    def losses(self, scores: Float[Array, '*b o'], targets: Int[Array, '*b']) -> Float[Array, '*b']:
        """See the class."""
        classes = scores.shape[-1]
        own = jax.nn.one_hot(targets, classes, dtype=scores.dtype)
        violations = scores - jnp.sum(own * scores, axis=-1, keepdims=True) + self.margin * (1 - own)
        temperature = self._temperature(scores)
        return temperature * (jax.nn.logsumexp(violations / temperature[..., None], axis=-1) - math.log(classes))

    def _temperature(self, scores: Float[Array, '*b o']) -> Float[Array, '*b']:
        if self.adapt is None:
            return jnp.full(scores.shape[:-1], self.lam, scores.dtype)
        logarithms = jax.nn.log_softmax(jax.lax.stop_gradient(scores) / self.lam)
        most = math.log(scores.shape[-1])
        divergence = most + jnp.sum(jnp.exp(logarithms) * logarithms, axis=-1)
        # Of a single class there is nothing to diverge from.
        return self.lam * (1 - divergence / (self.adapt * max(most, SMALLEST)))


@checked_fields
@dataclasses.dataclass(frozen=True)
class ZLoss(Surrogate):
    """`softplus(a (b - z)) / a`, with z the target's score less the mean of all, over their standard deviation.

    Neither shift nor scale of the scores matters. De Brebisson and Vincent 2016, https://arxiv.org/abs/1604.08859.
    Raises `UserError` unless `a` is positive.
    """

    a: float = 1.0
    b: float = 0.0

    def __post_init__(self) -> None:
        if self.a <= 0:
            raise UserError(f'a of ZLoss is {self.a}; it must be positive')

    def losses(self, scores: Float[Array, '*b o'], targets: Int[Array, '*b']) -> Float[Array, '*b']:
        """See the class."""
        centred = scores - jnp.mean(scores, axis=-1, keepdims=True)
        deviation = jnp.sqrt(jnp.mean(jnp.square(centred), axis=-1) + SMALLEST)
        own = jax.nn.one_hot(targets, scores.shape[-1], dtype=scores.dtype)
        z = jnp.sum(own * centred, axis=-1) / deviation
        return jax.nn.softplus(self.a * (self.b - z)) / self.a


class SurrogateHead(ClassificationHead):
    """A linear classification head trained on another loss than the cross-entropy, which it reports."""

    def __init__(self, dim: int, vocab: int, *, classes: int, surrogate: Surrogate, rngs: nnx.Rngs):
        super().__init__(dim, vocab, classes=classes, rngs=rngs)
        self.surrogate = surrogate

    def objective(self, hidden: Float[Array, '*b d'], targets: Int[Array, '*b'], key: DropoutKey) -> Float[Array, '*b']:
        """The surrogate of the scores."""
        del key
        check_targets(targets, self.classes)
        return nan_outside(self.surrogate.losses(self.logits(hidden), targets), targets, self.classes)
