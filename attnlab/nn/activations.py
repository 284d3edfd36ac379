"""Nonlinearities by name: elementwise functions, and those with parameters of their own."""

import abc
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float

from attnlab.errors import UserError, nearest
from attnlab.functional.precision import wide_dtype
from attnlab.functional.recomputed import recomputed, recomputed_method
from attnlab.module import Module
from attnlab.nn.parameter import param, starting_at

Activation = Callable[[jax.Array], jax.Array]


def elliott(x: Float[Array, '*b']) -> Float[Array, '*b']:
    """`x / (2 (1 + |x|)) + 1/2`."""
    return 0.5 * x / (1 + jnp.abs(x)) + 0.5


def average_biased_relu(x: Float[Array, '*b d']) -> Float[Array, '*b d']:
    """`max(0, x - mean(x))`, the mean over the last axis.

    The paper takes the mean of a feature map; over time it would look ahead. Dubey and Chakraborty 2021,
    https://arxiv.org/abs/1804.04512.
    """
    return jax.nn.relu(x - jnp.mean(x, axis=-1, keepdims=True))


@jax.custom_jvp
def normal_below(x: Float[Array, '*b']) -> Float[Array, '*b']:
    """The part of a standard normal below `x`, `erfc(-x / sqrt(2)) / 2`.

    Its derivative is the density as it is written. That of JAX's `erfc` cuts `x` after twelve bits and puts the rest
    back; XLA computes `x` for each of the two again, and where these differ in their last bit at a cut, the derivative
    is wrong by a thousandth.
    """
    return jax.lax.erfc(-x * math.sqrt(0.5)) / 2


@normal_below.defjvp
def _normal_density(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (dx,) = primals, tangents
    wide = x.astype(wide_dtype(x.dtype))
    density = jnp.exp(-jnp.square(wide) / 2) / math.sqrt(2 * math.pi)
    return normal_below(x), density.astype(x.dtype) * dx


def gelu_exact(x: Float[Array, '*b']) -> Float[Array, '*b']:
    """`x P(X <= x)` for a standard normal X; `gelu` is its tanh approximation.

    Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415.
    """
    return x * normal_below(x)


ACTIVATIONS: dict[str, Activation] = {
    'abrelu': average_biased_relu,
    'celu': jax.nn.celu,
    'elliott': elliott,
    'elu': jax.nn.elu,
    'gelu': jax.nn.gelu,
    'gelu_exact': gelu_exact,
    'identity': lambda x: x,
    'leaky_relu': jax.nn.leaky_relu,
    'lisht': lambda x: x * jnp.tanh(x),
    'mish': lambda x: x * jnp.tanh(jax.nn.softplus(x)),
    'relu': jax.nn.relu,
    'relu_squared': lambda x: jnp.square(jax.nn.relu(x)),
    'selu': jax.nn.selu,
    'sigmoid': jax.nn.sigmoid,
    'silu': jax.nn.silu,
    'softplus': jax.nn.softplus,
    'tanh': jnp.tanh,
}
"""`gelu` is the tanh approximation; `relu_squared` is of So et al. 2021, https://arxiv.org/abs/2109.08668, `mish` of
Misra 2020, https://arxiv.org/abs/1908.08681, `lisht` of Roy et al. 2023, https://arxiv.org/abs/1901.05894; the others
as compared by Dubey, Singh and Chaudhuri 2022, https://arxiv.org/abs/2109.14545."""


class Elementwise(Module):
    """A nonlinearity with parameters, each shared by all channels, in float32 or better.

    What all numbers of a layer share has a gradient that is summed over all of them, which 16 bits cannot hold.
    """

    @recomputed_method
    def __call__(self, x: Float[Array, '*b']) -> Float[Array, '*b']:
        return self._wide(x.astype(wide_dtype(x.dtype))).astype(x.dtype)

    @abc.abstractmethod
    def _wide(self, x: Float[Array, '*b']) -> Float[Array, '*b']:
        """The nonlinearity of numbers in float32 or better."""

    def _scalar(self, value: float, rngs: nnx.Rngs) -> nnx.Param:
        return param(nnx.initializers.constant(value), (), axes=(), group='vector', rngs=rngs)


class PReLU(Elementwise):
    """`max(0, x) + a min(0, x)`, a learned from 0.25. He et al. 2015, https://arxiv.org/abs/1502.01852."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.slope = self._scalar(0.25, rngs)

    def _wide(self, x: Float[Array, '*b']) -> Float[Array, '*b']:
        return jnp.maximum(x, 0) + self.slope[...].astype(x.dtype) * jnp.minimum(x, 0)


class Swish(Elementwise):
    """`x sigmoid(b x)`, b learned from 1. Ramachandran, Zoph and Le 2017, https://arxiv.org/abs/1710.05941."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.sharpness = self._scalar(1.0, rngs)

    def _wide(self, x: Float[Array, '*b']) -> Float[Array, '*b']:
        return x * jax.nn.sigmoid(self.sharpness[...].astype(x.dtype) * x)


class CRReLU(Elementwise):
    """`max(0, x) + e x exp(-x^2 / 2)`, e learned from 0.01. Sun et al. 2024, https://arxiv.org/abs/2405.12954."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.correction = self._scalar(0.01, rngs)

    def _wide(self, x: Float[Array, '*b']) -> Float[Array, '*b']:
        return jax.nn.relu(x) + self.correction[...].astype(x.dtype) * x * jnp.exp(-jnp.square(x) / 2)


class SRS(Elementwise):
    """`x / (x / a + exp(-x / b))`, learned from a = 5 and b = 3.

    There is no pole while `a > b / e`, so what is learned are the logarithms of b and of `a - b / e`; the released code
    adds 0.01 in three places instead. Zhou et al. 2020, https://arxiv.org/abs/2003.10028.
    """

    def __init__(self, *, rngs: nnx.Rngs):
        self.log_width = self._scalar(float(np.log(3)), rngs)
        self.log_rest = self._scalar(float(np.log(5 - 3 / np.e)), rngs)

    def _wide(self, x: Float[Array, '*b']) -> Float[Array, '*b']:
        width = jnp.exp(self.log_width[...].astype(x.dtype))
        height = width / np.e + jnp.exp(self.log_rest[...].astype(x.dtype))
        # Below 0 numerator and denominator are multiplied by exp(x / b): no exponential is greater than 1.
        above, below = jnp.maximum(x, 0), jnp.minimum(x, 0)
        scaled = below * jnp.exp(below / width)
        positive = above / (above / height + jnp.exp(-above / width))
        return jnp.where(x > 0, positive, scaled / (1 + scaled / height))


class PDELU(Elementwise):
    """`x` from 0 up, below `a (max(0, 1 + (1 - t) x)^(1 / (1 - t)) - 1)` with t = 0.9; a learned from 1.

    Cheng et al. 2020, https://doi.org/10.1016/j.neunet.2020.07.019.
    """

    def __init__(self, *, rngs: nnx.Rngs):
        self.height = self._scalar(1.0, rngs)

    def _wide(self, x: Float[Array, '*b']) -> Float[Array, '*b']:
        # Clipped before the power, which is whole, so that the derivative is 0 from -10 down.
        power = jnp.maximum(1 + 0.1 * jnp.minimum(x, 0), 0) ** 10
        return jnp.maximum(x, 0) + self.height[...].astype(x.dtype) * (power - 1)


class PAU(Elementwise):
    """`sum_{0..5} a_j x^j / (1 + |sum_{1..4} b_k x^k|)`, learned from within 0.03 of `max(0, x)` on [-3, 3].

    The start is the one that Molina, Schramowski and Kersting 2020, https://arxiv.org/abs/1907.06732, have for a ReLU.
    """

    def __init__(self, *, rngs: nnx.Rngs):
        above = np.array([0.02996348, 0.61690165, 2.37539147, 3.06608078, 1.52474449, 0.25281987], np.float32)
        below = np.array([1.19160814, 4.40811795, 0.91111034, 0.34885983], np.float32)
        self.above, self.below = (
            param(starting_at(start), start.shape, axes=(None,), group='vector', rngs=rngs) for start in (above, below)
        )

    def _wide(self, x: Float[Array, '*b']) -> Float[Array, '*b']:
        above = [self.above[...][place].astype(x.dtype) for place in range(6)]
        below = [self.below[...][place].astype(x.dtype) for place in range(4)]
        return _polynomial(x, above) / (1 + jnp.abs(x * _polynomial(x, below)))


def _polynomial(x: Float[Array, '*b'], coefficients: list[Array]) -> Float[Array, '*b']:
    """By Horner's rule, the constant first."""
    total = jnp.zeros_like(x)
    for coefficient in reversed(coefficients):
        total = total * x + coefficient
    return total


LEARNED: dict[str, Callable[..., Module]] = {
    'crrelu': CRReLU,
    'pau': PAU,
    'pdelu': PDELU,
    'prelu': PReLU,
    'srs': SRS,
    'swish': Swish,
}
"""Those with parameters, made as `LEARNED[name](rngs=rngs)`; channel mixers take them."""


def activation(name: str | Activation) -> Activation:
    """Returns the nonlinearity called `name`; one that is given itself (`attnlab.nn.core_units`) is returned as it is.

    Raises `UserError` naming the closest one for an unknown name.
    """
    if not isinstance(name, str):
        return name
    if name in LEARNED:
        raise UserError(f'activation {name!r} has parameters, and this part cannot hold any; channel mixers can')
    if name not in ACTIVATIONS:
        raise UserError(f'there is no activation {name!r}{nearest(name, ACTIVATIONS)}')
    return recomputed(ACTIVATIONS[name])


def learned(name: str | Activation, *, rngs: nnx.Rngs) -> Module | None:
    """Makes the nonlinearity called `name` if it has parameters. Raises `UserError` for an unknown name."""
    if not isinstance(name, str):
        return None
    if name in LEARNED:
        return LEARNED[name](rngs=rngs)
    if name not in ACTIVATIONS:
        raise UserError(f'there is no activation {name!r}{nearest(name, [*ACTIVATIONS, *LEARNED])}')
    return None
