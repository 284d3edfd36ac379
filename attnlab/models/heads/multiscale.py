"""A head that forecasts a series at several resolutions, and mixes the forecasts."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from attnlab.errors import UserError
from attnlab.models.heads.affine import AffineHead
from attnlab.models.heads.head import Head, wide
from attnlab.nn.parameter import param


class MultiscaleHead(Head):
    """A forecast at every scale, `y_i = h_i W_i + b_i` of `vocab / 2^i` steps, and their mixture.

        y = sum_i p_i repeat(y_i, 2^i),   loss = sum_i p_i mean (y_i - pool(target, 2^i))^2,   p = softmax(w)

    A hidden state is the vectors of the scales, `2^(scales - i)` parts of it of scale i, the finest first. Means over
    `2^i` steps vary less than steps, so that their losses are smaller and `p` tends to coarse scales the more, the more
    noise there is. Qiao et al. 2025, https://arxiv.org/abs/2506.14087.

    Args:
      dim: of all vectors together.
      vocab: steps of a forecast.
      scales: beside the finest.
      rngs: draws the parameters.

    Raises `UserError` for a horizon that is not a multiple of `2^scales`, and vectors that cannot be divided so.
    """

    degree = 2

    def __init__(self, dim: int, vocab: int, *, scales: int, rngs: nnx.Rngs):
        parts = 2 ** (scales + 1) - 1
        if vocab % 2**scales or dim % parts:
            raise UserError(
                f'a MultiscaleHead of {scales} scales beside the finest has a horizon of {vocab} and vectors of {dim} '
                f'channels; these must be multiples of {2**scales} and {parts}'
            )
        self.scales = scales
        self.widths = tuple(2 ** (scales - scale) * dim // parts for scale in range(scales + 1))
        self.heads = nnx.List([AffineHead(width, vocab >> scale, rngs=rngs) for scale, width in enumerate(self.widths)])
        self.weights = param(nnx.initializers.zeros, (scales + 1,), axes=(None,), group='vector', rngs=rngs)

    def losses(self, hidden: Float[Array, '*b d'], targets: Float[Array, '*b o']) -> Float[Array, '*b']:
        """The mean squared errors of all scales, weighed."""
        found = [
            jnp.mean(jnp.square(forecast - pooled(targets, 2**scale)), axis=-1)
            for scale, forecast in enumerate(self.forecasts(hidden))
        ]
        return jnp.tensordot(jnp.stack(found, axis=-1), self.shares().astype(found[0].dtype), axes=1)

    def logits(self, hidden: Float[Array, '*b d']) -> Float[Array, '*b o']:
        """The mixture, in float32."""
        found = [jnp.repeat(one, 2**scale, axis=-1) for scale, one in enumerate(self.forecasts(hidden))]
        return jnp.tensordot(jnp.stack(found, axis=-1), self.shares().astype(found[0].dtype), axes=1)

    def forecasts(self, hidden: Float[Array, '*b d']) -> list[Array]:
        """The logits of every scale, the finest first, in float32."""
        borders = [sum(self.widths[:place]) for place in range(1, len(self.widths))]
        parts = jnp.split(wide(hidden), borders, axis=-1)
        return [head.logits(part) for head, part in zip(self.heads, parts, strict=True)]

    def shares(self) -> Float[Array, 'n']:
        """What each scale has in the mixture."""
        return jax.nn.softmax(self.weights[...])


def pooled(x: Float[Array, '*b t'], count: int) -> Array:
    """Means over `count` steps of the last axis, of which it is a multiple."""
    return jnp.mean(x.reshape(*x.shape[:-1], -1, count), axis=-1)
