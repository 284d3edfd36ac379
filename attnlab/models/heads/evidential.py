"""A classification head that predicts a distribution over distributions of classes."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.scipy.special import digamma, gammaln
from jaxtyping import Float, Int

from attnlab.errors import UserError
from attnlab.losses import check_targets, nan_outside
from attnlab.models.heads.classification import ClassificationHead
from attnlab.models.heads.links import Evidence
from attnlab.typing import DropoutKey


class EvidentialHead(ClassificationHead):
    """A Dirichlet distribution over the probabilities of classes, of concentrations `a_k = 1 + softplus(x_k)`.

        objective: psi(S) - psi(a_y) + strength KL(Dir(b) || Dir(1)),   S = sum_k a_k

    The first part is the cross-entropy that is expected of a draw. `b` is `a` with the target's concentration set to
    1, so that evidence for other classes is pulled to none, and what has no evidence at all says so: `vacuity`. What
    is predicted, and reported, is the mean `a / S`. Sensoy, Kaplan and Kandemir 2018,
    https://arxiv.org/abs/1806.01768; such models are the prior networks of Malinin and Gales 2018,
    https://arxiv.org/abs/1802.10501. `vocab` is ignored. Raises `UserError` for a negative strength.
    """

    def __init__(self, dim: int, vocab: int, *, classes: int, strength: float = 0.1, rngs: nnx.Rngs):
        super().__init__(dim, vocab, classes=classes, rngs=rngs)
        if strength < 0:
            raise UserError(f'strength of EvidentialHead is {strength}; it must be at least 0')
        self.strength = strength

    def logits(self, hidden: Float[Array, '*b d']) -> Float[Array, '*b o']:
        """`log a`, in float32."""
        return Evidence().log_numerators(super().logits(hidden))

    def objective(self, hidden: Float[Array, '*b d'], targets: Int[Array, '*b'], key: DropoutKey) -> Float[Array, '*b']:
        """See the class."""
        del key
        check_targets(targets, self.classes)
        a = jnp.exp(self.logits(hidden))
        own = jax.nn.one_hot(targets, self.classes, dtype=a.dtype)
        expected = digamma(jnp.sum(a, axis=-1)) - digamma(jnp.sum(own * a, axis=-1))
        losses = expected + self.strength * from_uniform(own + (1 - own) * a)
        return nan_outside(losses, targets, self.classes)

    def vacuity(self, hidden: Float[Array, '*b d']) -> Float[Array, '*b']:
        """`o / S`: 1 where there is no evidence for any class, and less the more there is."""
        return self.classes / jnp.sum(jnp.exp(self.logits(hidden)), axis=-1)


def from_uniform(a: Float[Array, '*b o']) -> Float[Array, '*b']:
    """`KL(Dir(a) || Dir(1))`, of concentrations over the last axis.

    `log Gamma(S) - log Gamma(o) - sum_k log Gamma(a_k) + sum_k (a_k - 1) (psi(a_k) - psi(S))`, `S = sum_k a_k`.
    """
    total = jnp.sum(a, axis=-1, keepdims=True)
    constants = gammaln(total[..., 0]) - gammaln(jnp.asarray(a.shape[-1], a.dtype)) - jnp.sum(gammaln(a), axis=-1)
    return constants + jnp.sum((a - 1) * (digamma(a) - digamma(total)), axis=-1)
