"""A classification head for examples with several labels, and losses under which these do not compete."""

import abc
import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int

from attnlab.errors import UserError
from attnlab.functional.indices import check_indices
from attnlab.models.heads.classification import ClassificationHead
from attnlab.signature import checked_fields
from attnlab.typing import DropoutKey

HALVINGS = 40
"""How often the interval of the threshold is halved: below the spacing of float32, whatever the scores."""


class LabelsLoss(abc.ABC):
    """A loss of the scores of classes, some of which are labels; without parameters."""

    @abc.abstractmethod
    def losses(self, scores: Float[Array, '*b o'], labels: Bool[Array, '*b o']) -> Float[Array, '*b']:
        """One number per example, 0 without labels."""


@dataclasses.dataclass(frozen=True)
class Decoupled(LabelsLoss):
    """The mean over labels l of `log(exp(x_l) + sum_{k no label} exp(x_k)) - x_l`: other labels are left out.

    With one label it is cross-entropy. Gupta et al. 2024, https://arxiv.org/abs/2310.10636.
    """

    def losses(self, scores: Float[Array, '*b o'], labels: Bool[Array, '*b o']) -> Float[Array, '*b']:
        """See the class."""
        others = jax.nn.logsumexp(jnp.where(labels, -jnp.inf, scores), axis=-1, keepdims=True)
        return _mean(jax.nn.softplus(others - scores), labels)


@checked_fields
@dataclasses.dataclass(frozen=True)
class SoftTopK(LabelsLoss):
    """The mean over labels l of `-log sigmoid(alpha (x_l + t))`, with the t for which all sigmoids sum to `k`.

    `k=None` is the number of labels of the example. The derivative of t is that of the equation it solves.
    Gupta et al. 2024, https://arxiv.org/abs/2310.10636. Raises `UserError` unless `alpha` is positive.
    """

    k: int | None = None
    alpha: float = 1.0

    def __post_init__(self) -> None:
        if self.alpha <= 0:
            raise UserError(f'alpha of SoftTopK is {self.alpha}; it must be positive')

    def losses(self, scores: Float[Array, '*b o'], labels: Bool[Array, '*b o']) -> Float[Array, '*b']:
        """See the class."""
        count = jnp.sum(labels, axis=-1, keepdims=True).astype(scores.dtype)
        wanted = jnp.full_like(count, self.k) if self.k is not None else count
        return _mean(-jax.nn.log_sigmoid(self.alpha * (scores + self.threshold(scores, wanted))), labels)

    def threshold(self, scores: Float[Array, '*b o'], wanted: Float[Array, '*b one']) -> Float[Array, '*b one']:
        """`t`, by halving an interval, and its derivative."""

        def total(t: Array) -> Array:
            return jnp.sum(jax.nn.sigmoid(self.alpha * (scores + t)), axis=-1, keepdims=True)

        def halve(_: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
            low, high = ends
            middle = (low + high) / 2
            few = total(middle) < wanted
            return jnp.where(few, middle, low), jnp.where(few, high, middle)

        fixed = jax.lax.stop_gradient(scores)
        # So far below, all sigmoids together are under exp(-10), and each is above 1 - exp(-10) so far above.
        beyond = (10 + math.log(scores.shape[-1])) / self.alpha
        low = -jnp.max(fixed, axis=-1, keepdims=True) - beyond
        high = -jnp.min(fixed, axis=-1, keepdims=True) + beyond
        found = jax.lax.stop_gradient(sum(jax.lax.fori_loop(0, HALVINGS, halve, (low, high))) / 2)
        # A step of Newton's from the solution is nothing, but has the derivative of the solution.
        sigmoids = jax.lax.stop_gradient(jax.nn.sigmoid(self.alpha * (scores + found)))
        slope = self.alpha * jnp.sum(sigmoids * (1 - sigmoids), axis=-1, keepdims=True)
        return found - (total(found) - wanted) / jnp.maximum(slope, jnp.finfo(slope.dtype).tiny)


def _mean(each: Float[Array, '*b o'], labels: Bool[Array, '*b o']) -> Float[Array, '*b']:
    return jnp.sum(jnp.where(labels, each, 0), axis=-1) / jnp.maximum(jnp.sum(labels, axis=-1), 1)


class MultiLabelHead(ClassificationHead):
    """A linear classification head for examples with several labels, trained on `loss`; reports the decoupled one.

    Targets are one label per hidden state, or `p` of them, -1 in the places of those that are missing.
    """

    missing = True

    def __init__(self, dim: int, vocab: int, *, classes: int, loss: LabelsLoss, rngs: nnx.Rngs):
        super().__init__(dim, vocab, classes=classes, rngs=rngs)
        if isinstance(loss, SoftTopK) and loss.k is not None and loss.k >= classes:
            raise UserError(f'k of SoftTopK is {loss.k} of {classes} classes; it must be fewer, or None')
        self.loss = loss

    def losses(self, hidden: Float[Array, '*b d'], targets: Int[Array, '...']) -> Float[Array, '*b']:
        """`Decoupled`, which with one label is cross-entropy in nats."""
        return self._of(Decoupled(), hidden, targets)

    def objective(
        self, hidden: Float[Array, '*b d'], targets: Int[Array, '...'], key: DropoutKey
    ) -> Float[Array, '*b']:
        """The loss chosen."""
        del key
        return self._of(self.loss, hidden, targets)

    def _of(self, loss: LabelsLoss, hidden: Array, targets: Array) -> Array:
        one = targets.ndim < hidden.ndim
        # A single one must not be missing.
        lowest = 0 if one else -1
        check_indices('targets', targets, self.classes, 'classes', lowest)
        each = targets[..., None] if one else targets
        labels = jnp.any(jax.nn.one_hot(each, self.classes, dtype=jnp.bool_), axis=-2)
        wrong = jnp.any((each >= self.classes) | (each < lowest), axis=-1)
        return jnp.where(wrong, jnp.nan, loss.losses(self.logits(hidden), labels))
