"""Links, functions g in the place of the exponential, `p_j = g(x_j) / sum_i g(x_i)`, and a vocabulary head for them."""

import abc
import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from attnlab.errors import UserError
from attnlab.functional import chunked
from attnlab.losses import check_targets, nan_outside, softmax_loss, stablemax_logits
from attnlab.models.heads.head import Head, linear_logits, output_weight
from attnlab.signature import checked_fields


class Link(abc.ABC):
    """A positive function g of a score; without parameters."""

    @abc.abstractmethod
    def log_numerators(self, scores: Float[Array, '*b o']) -> Float[Array, '*b o']:
        """`log g(x)`, whose softmax are the probabilities."""


@dataclasses.dataclass(frozen=True)
class StableMax(Link):
    """`g(x) = x + 1` from 0 up and `1 / (1 - x)` below. Prieto et al. 2025, https://arxiv.org/abs/2501.04697."""

    def log_numerators(self, scores: Float[Array, '*b o']) -> Float[Array, '*b o']:
        """`sign(x) log(1 + |x|)`."""
        return stablemax_logits(scores)


@dataclasses.dataclass(frozen=True)
class Taylor(Link):
    """`g(x) = 1 + x + x^2 / 2`, at least 1/2. De Brebisson and Vincent 2016, https://arxiv.org/abs/1511.05042."""

    def log_numerators(self, scores: Float[Array, '*b o']) -> Float[Array, '*b o']:
        """`log((1 + x)^2 / 2 + 1 / 2)`, which cancels nowhere."""
        return jnp.log(0.5 * jnp.square(1 + scores) + 0.5)


@checked_fields
@dataclasses.dataclass(frozen=True)
class Spherical(Link):
    """`g(x) = x^2 + eps`. De Brebisson and Vincent 2016, https://arxiv.org/abs/1511.05042.

    Raises `UserError` unless `eps` is positive.
    """

    eps: float = 1e-2

    def __post_init__(self) -> None:
        if self.eps <= 0:
            raise UserError(f'eps of Spherical is {self.eps}; it must be positive')

    def log_numerators(self, scores: Float[Array, '*b o']) -> Float[Array, '*b o']:
        """`log(x^2 + eps)`."""
        return jnp.log(jnp.square(scores) + self.eps)


@dataclasses.dataclass(frozen=True)
class SigSoftmax(Link):
    """`g(x) = exp(x) sigmoid(x)`. Kanai et al. 2018, https://arxiv.org/abs/1805.10829."""

    def log_numerators(self, scores: Float[Array, '*b o']) -> Float[Array, '*b o']:
        """`x + log sigmoid(x)`."""
        return scores + jax.nn.log_sigmoid(scores)


@dataclasses.dataclass(frozen=True)
class Evidence(Link):
    """`g(x) = 1 + softplus(x)`, the concentration of a Dirichlet distribution, whose mean are the probabilities.

    Sensoy, Kaplan and Kandemir 2018, https://arxiv.org/abs/1806.01768, with the softplus in the place of a ReLU.
    """

    def log_numerators(self, scores: Float[Array, '*b o']) -> Float[Array, '*b o']:
        """`log(1 + softplus(x))`."""
        return jnp.log1p(jax.nn.softplus(scores))


class LinkHead(Head):
    """A linear map to the vocabulary with another link than the softmax; scores are stored for some tokens at once."""

    def __init__(self, dim: int, vocab: int, *, link: Link, rngs: nnx.Rngs):
        self.link = link
        self.weight = output_weight(dim, vocab, rngs)

    def losses(self, hidden: Float[Array, '*b d'], targets: Int[Array, '*b']) -> Float[Array, '*b']:
        """`-log p(target)` in nats."""
        check_targets(targets, self.weight.shape[0])
        losses = chunked.over_tokens(lambda x, y: softmax_loss(self.logits(x), y), hidden, targets)
        return nan_outside(losses, targets, self.weight.shape[0])

    def logits(self, hidden: Float[Array, '*b d']) -> Float[Array, '*b o']:
        """`log g` of the scores, in float32."""
        return self.link.log_numerators(linear_logits(hidden, self.weight[...]))
