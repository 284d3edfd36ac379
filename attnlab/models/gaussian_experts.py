"""A model that is a mixture of linear experts alone, with the density of its predictions."""

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from attnlab.blocks.block import Stage
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.models.heads.head import wide
from attnlab.models.whole_rows import WholeRows
from attnlab.nn.experts import Gate
from attnlab.nn.parameter import param
from attnlab.nn.planted import PlantedExperts
from attnlab.typing import DropoutKey, Features, State


class GaussianExperts(WholeRows):
    """`p(y | x) = sum_e pi_e(x) N(y; A_e x + b_e, s_e^2)`, all experts asked for every point, `pi` as planted.

    It starts near the planted mixture, at `start` standard deviations in every number: the theory is of the likeliest
    parameters, not of whether descent finds them. With more experts than are planted, expert `i` starts at the planted
    one `i` modulo their number. Nguyen, Nguyen and Ho 2023, https://arxiv.org/abs/2305.03288. Implements
    `attnlab.models.predictor.Predictor`: every position is a point.

    Args:
      vocab: ignored; there is one output.
      planted: the mixture, whose gate it has.
      experts: the number of experts, a multiple of those planted.
      start: see above.
      dtype: of inputs; parameters are float32.

    Raises `UserError` for another number of experts, and a negative start.
    """

    outputs = 1

    def __init__(
        self,
        vocab: int,
        *,
        planted: PlantedExperts,
        experts: int = 4,
        start: float = 0.3,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        del vocab
        copies, rest = divmod(experts, planted.experts)
        if rest or not copies:
            raise UserError(f'experts is {experts}; it must be a multiple of those planted, {planted.experts}')
        if start < 0:
            raise UserError(f'start is {start}; it must be at least 0')
        self.gate: Gate = planted.gate
        self.dtype = jnp.dtype(dtype)
        rows, deviations = planted.router(), np.full(planted.experts, math.log(planted.noise))
        router = np.concatenate([rows[: planted.experts]] * copies + [rows[planted.experts :]])
        self.router = self._near(router, start, rngs)
        self.maps, self.log_deviations = (
            self._near(np.concatenate([each] * copies), start, rngs) for each in (planted.maps(), deviations)
        )

    def hidden(
        self, inputs: Features, ctx: Context, state: State | None = None
    ) -> tuple[Float[Array, 'b t d'], State | None]:
        """The points themselves, and no state."""
        del ctx, state
        return inputs.astype(self.dtype), None

    def pooled(self, inputs: Features, ctx: Context) -> Float[Array, 'b d']:
        """The mean of the points of a row."""
        del ctx
        return jnp.mean(inputs.astype(self.dtype), axis=1)

    def losses(
        self, hidden: Float[Array, '*b 2'], targets: Float[Array, '*b'], key: DropoutKey | None = None
    ) -> Float[Array, '*b']:
        """`-log p(target)` in nats, in training too."""
        del key
        spread = jnp.broadcast_to(self.log_deviations[...], (*targets.shape, len(self.log_deviations[...])))
        apart = (wide(targets)[..., None] - self.means(hidden)) * jnp.exp(-spread)
        logarithms = -jnp.square(apart) / 2 - spread - math.log(2 * math.pi) / 2
        return -jax.nn.logsumexp(self._log_shares(hidden) + logarithms, axis=-1)

    def logits(self, hidden: Float[Array, '*b 2']) -> Float[Array, '*b 1']:
        """The mean of the density, in float32."""
        return jnp.sum(jnp.exp(self._log_shares(hidden)) * self.means(hidden), axis=-1, keepdims=True)

    def means(self, hidden: Float[Array, '*b 2']) -> Float[Array, '*b e']:
        """`A_e x + b_e` of every expert, in float32."""
        maps = self.maps[...]
        products = jnp.einsum('... d, e d -> ... e', wide(hidden), maps[:, :2])
        return products + jnp.broadcast_to(maps[:, 2], products.shape)

    def shares(self, hidden: Float[Array, '*b 2']) -> Float[Array, '*b e']:
        """`pi` of every expert, in float32."""
        return self.gate.affinities(self.gate.scores(wide(hidden), self.router[...]))

    def stages(self, inputs: Features, ctx: Context) -> Iterator[Stage]:
        """The shares of the experts, and what they predict."""
        x = self.hidden(inputs, ctx)[0]
        yield Stage('shares', self.shares(x))
        yield Stage('means', self.means(x))

    def _log_shares(self, hidden: Float[Array, '*b 2']) -> Float[Array, '*b e']:
        return jnp.log(jnp.maximum(self.shares(hidden), jnp.finfo(jnp.float32).tiny))

    def _near(self, values: np.ndarray, start: float, rngs: nnx.Rngs) -> nnx.Param:
        def near(key: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
            return jnp.asarray(values, dtype) + start * jax.random.normal(key, shape, dtype)

        return param(near, values.shape, axes=(None,) * values.ndim, group='vector', rngs=rngs)
