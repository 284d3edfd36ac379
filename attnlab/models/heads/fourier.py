"""A head over bins of a real number, whose probabilities are those of a smooth density."""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from attnlab.errors import UserError
from attnlab.losses import check_targets, softmax_loss
from attnlab.models.heads.head import Head, in_gradient_only, wide
from attnlab.nn.projections import Linear
from attnlab.typing import DropoutKey

LEAST = 1e-5
"""Added to the probability of every bin before the logarithm, as in the released code."""


class FourierHead(Head):
    """`p(z) = |sum_l a_l exp(i pi l z)|^2 / (2 sum_l |a_l|^2)` on [-1, 1], read at the middles of `classes` equal bins.

    `a`, of `frequencies + 1` complex numbers, is a linear map of the hidden state, started at a hundredth of its usual
    size. Training may add the gradient of `2 roughness sum_k 2 pi^2 k^2 |c_k|^2`, with `c_k = sum_l conj(a_l) a_{l+k}`.
    Computed in float32 without complex numbers. Gillman et al. 2025, https://arxiv.org/abs/2410.22269.
    `vocab` is ignored.

    Raises `UserError` for as many frequencies as half of the bins, which alias, and for a negative roughness.
    """

    def __init__(
        self,
        dim: int,
        vocab: int,
        *,
        classes: int,
        frequencies: int | None = None,
        roughness: float = 0.0,
        rngs: nnx.Rngs,
    ):
        del vocab
        frequencies = max(1, (classes - 1) // 4) if frequencies is None else frequencies
        if 2 * frequencies >= classes:
            raise UserError(f'frequencies is {frequencies}; it must be less than half of the {classes} bins')
        if roughness < 0:
            raise UserError(f'roughness is {roughness}; it must be at least 0')
        self.classes, self.frequencies, self.roughness = classes, frequencies, roughness
        start = nnx.initializers.variance_scaling(1e-4, 'fan_in', 'normal')
        numbers = 2 * (frequencies + 1)
        self.linear = Linear(
            dim, numbers, bias=True, initializer=start, axes=('embed', None), group='embedding', rngs=rngs
        )

    def losses(self, hidden: Float[Array, '*b d'], targets: Int[Array, '*b']) -> Float[Array, '*b']:
        """`-log p(bin)` in nats."""
        check_targets(targets, self.classes)
        return softmax_loss(self.logits(hidden), targets)

    def objective(self, hidden: Float[Array, '*b d'], targets: Int[Array, '*b'], key: DropoutKey) -> Float[Array, '*b']:
        """The losses, with the gradient of the penalty besides."""
        del key
        losses = self.losses(hidden, targets)
        if self.roughness == 0:
            return losses
        real, imaginary = self._coefficients(hidden)
        penalty = jnp.zeros_like(losses)
        for k in range(1, self.frequencies + 1):
            ahead, behind = (jnp.roll(each, -k, axis=-1)[..., :-k] for each in (real, imaginary))
            there, back = real[..., :-k], imaginary[..., :-k]
            size = jnp.sum(there * ahead + back * behind, -1) ** 2 + jnp.sum(there * behind - back * ahead, -1) ** 2
            penalty = penalty + 2 * np.pi**2 * k**2 * size
        return losses + in_gradient_only(2 * self.roughness * penalty)

    def logits(self, hidden: Float[Array, '*b d']) -> Float[Array, '*b o']:
        """`log(p + 1e-5)` of the probabilities of the bins, in float32."""
        real, imaginary = self._coefficients(hidden)
        middles = (2 * np.arange(self.classes) + 1) / self.classes - 1
        angles = np.pi * np.outer(np.arange(self.frequencies + 1), middles)
        cosine, sine = (jnp.asarray(each, real.dtype) for each in (np.cos(angles), np.sin(angles)))
        # Sums of less than half as many frequencies as bins: over the middles they add up as the integral does.
        density = jnp.square(real @ cosine - imaginary @ sine) + jnp.square(real @ sine + imaginary @ cosine)
        norm = jnp.sum(jnp.square(real) + jnp.square(imaginary), axis=-1, keepdims=True)
        there, uniform = norm > jnp.finfo(norm.dtype).tiny, 1 / self.classes
        # The quotient is differentiated where it is not taken, too, and has no derivative at a norm near zero.
        chances = jnp.where(there, density / jnp.where(there, norm, 1) * uniform, uniform)
        return jnp.log(chances + LEAST)

    def _coefficients(self, hidden: Float[Array, '*b d']) -> tuple[Float[Array, '*b k'], Float[Array, '*b k']]:
        """Real and imaginary parts of a."""
        real, imaginary = jnp.split(self.linear(wide(hidden)), 2, axis=-1)
        return real, imaginary
