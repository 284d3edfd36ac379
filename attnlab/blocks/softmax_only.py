"""A residual block whose only nonlinearity is softmax, with a penalty on the entropy of its rows."""

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float

from attnlab.context import PADDING, Context
from attnlab.errors import UserError
from attnlab.functional.attend import attend, look
from attnlab.functional.cache import Entries, KeyValueCache, empty_cache
from attnlab.functional.entropy import row_entropy
from attnlab.functional.penalty import penalised
from attnlab.functional.precision import wide_dtype
from attnlab.functional.reach import Reach
from attnlab.functional.rotary import rotated_channels
from attnlab.mixers.mixer import Mixer, require_causal
from attnlab.nn.heads import by_head, head_channels
from attnlab.nn.parameter import param
from attnlab.nn.positions import Rope
from attnlab.nn.projections import Linear
from attnlab.signature import checked_fields
from attnlab.typing import Heads, Keys, Queries, Sequence, Values


@checked_fields
@dataclasses.dataclass(frozen=True)
class EntropyMargin:
    """The penalty `weight mean_h d_h^2 1[|d_h| > margin log T]` a token, `d_h = mean_i H_hi - theta_h log T`.

    `H_hi` is the entropy of the weights of query `i`, averaged over the `T` queries of a row of the batch, and `theta`
    the head's target fraction of the maximum. Jha and Reagen 2025, https://arxiv.org/abs/2501.03489, algorithm 1.
    Raises `UserError` for a negative weight.
    """

    weight: float = 1e-5
    margin: float = 0.2

    def __post_init__(self) -> None:
        _check_weight(self)

    def __call__(
        self, entropy: Float[Array, 'b t h'], theta: Float[Array, 'h'], real: Bool[Array, 'b t']
    ) -> Float[Array, '']:
        """Returns the penalty, summed over the real tokens."""
        highest = jnp.log(jnp.asarray(entropy.shape[1], entropy.dtype))
        counts = jnp.sum(real, axis=1).astype(entropy.dtype)
        means = jnp.sum(jnp.where(real[..., None], entropy, 0.0), axis=1) / jnp.maximum(counts, 1)[:, None]
        excess = _beyond(means - (theta * highest)[None], self.margin * highest)
        return self.weight * jnp.sum(counts * jnp.mean(excess, axis=-1))


@checked_fields
@dataclasses.dataclass(frozen=True)
class EntropyMarginPerQuery:
    """The penalty of the released code: the sum of the squared deviations of all rows.

    `weight sum_i mean_h d_hi^2 1[|d_hi| > margin log T]` over all rows of all sequences, `d_hi = H_hi - theta_h log T`,
    added to the mean loss, so that it grows with the batch. https://github.com/Nandan91/entropy-guided-attention-llm.
    Raises `UserError` for a negative weight.
    """

    weight: float = 1e-5
    margin: float = 0.2

    def __post_init__(self) -> None:
        _check_weight(self)

    def __call__(
        self, entropy: Float[Array, 'b t h'], theta: Float[Array, 'h'], real: Bool[Array, 'b t']
    ) -> Float[Array, '']:
        """Returns the penalty times the number of real tokens, by which `penalised` divides."""
        highest = jnp.log(jnp.asarray(entropy.shape[1], entropy.dtype))
        excess = _beyond(entropy - (theta * highest)[None, None], self.margin * highest)
        return self.weight * jnp.sum(real) * jnp.sum(jnp.where(real, jnp.mean(excess, axis=-1), 0.0))


def _check_weight(penalty: EntropyMargin | EntropyMarginPerQuery) -> None:
    if penalty.weight < 0:
        raise UserError(f'weight of {type(penalty).__name__} is {penalty.weight}; it must be at least 0')


def _beyond(deviation: Float[Array, '*b'], margin: Float[Array, '']) -> Float[Array, '*b']:
    """The squared deviation where it exceeds the margin, else zero."""
    return jnp.square(jnp.where(jnp.abs(deviation) > margin, deviation, 0.0))


class SoftmaxOnlyBlock(Mixer):
    """A whole layer without norms or activations, `z = x + attention(x)`, then `y = beta z + z W / alpha`.

    The scores of query `i` of head `h` are divided by a learned temperature `t_hi`; `alpha` and `beta` are learned
    numbers, and `W` is a feed-forward network whose two maps, without a nonlinearity between them, are merged. In
    training (`ctx.deterministic` is False) and without a state a penalty on the entropy of the rows is added to the
    gradient. Jha and Reagen 2024, https://arxiv.org/abs/2410.13060, and 2025, https://arxiv.org/abs/2501.03489.

    The state is a cache of keys and values; a call that goes beyond its `length` gives NaN, and so does a position that
    has no temperature.

    Raises `UserError` for sizes that do not divide, a temperature that is not positive, and a row longer than there are
    temperatures.

    Args:
      dim: model width.
      heads: query heads.
      length: how many positions have a temperature.
      temperature: their initial value.
      position: how positions enter the scores; `None`: not at all.
      penalty: on the entropies; `None`: none.
      threshold: initial value of `theta`, a head's target fraction of the highest entropy.
      bias: whether the linear maps have one.
      causal: whether a query sees no later key.
      implementation: of the core; `None`: the default of the platform.
      rngs: draws the parameters.
    """

    goes_on = True

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        length: int = 4096,
        temperature: float = 1.0,
        position: Rope | None = None,
        penalty: EntropyMargin | EntropyMarginPerQuery | None = EntropyMargin(),
        threshold: float = 0.5,
        bias: bool = False,
        causal: bool = True,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        if temperature <= 0:
            raise UserError(f'temperature of SoftmaxOnlyBlock is {temperature}; it must be positive')
        self.heads, self.channels = heads, head_channels(dim, heads)
        if position is not None:
            rotated_channels(self.channels, position.fraction)
        self.position, self.penalty = position, penalty
        self.reach, self.implementation = Reach(causal), implementation
        self.query, self.key, self.value = (Linear(dim, dim, bias=bias, rngs=rngs) for _ in range(3))
        self.output = Linear(dim, dim, bias=bias, axes=('heads', 'embed'), rngs=rngs)
        self.feed_forward = Linear(dim, dim, bias=bias, axes=('embed', 'mlp'), rngs=rngs)

        def constant(value: float, *shape: int) -> nnx.Param:
            axes = ('heads', None)[: len(shape)]
            return param(nnx.initializers.constant(value), shape, axes=axes, group='vector', rngs=rngs)

        self.temperature = constant(temperature, heads, length)
        self.alpha, self.beta = constant(1.0), constant(1.0)
        self.theta = None if penalty is None else constant(threshold, heads)

    def __call__(
        self, x: Sequence, ctx: Context, state: KeyValueCache | None = None
    ) -> tuple[Sequence, KeyValueCache | None]:
        q, k, v = self._project(x, ctx)
        inverse = 1 / self._temperatures(ctx, wide_dtype(x.dtype))
        view = look(Entries(k, v, ctx.segments_or_ones()), ctx, self.reach, state)
        y = attend(
            q, view.entries.keys, view.entries.values, view, temperature=inverse, implementation=self.implementation
        )
        if state is None and not ctx.deterministic:
            y = self._penalised(y, q, k, inverse, ctx)
        z = x + self.output(y.reshape(x.shape))
        # In the type of the scalars, so that their gradients are summed over tokens in float32.
        y = self.beta[...] * z + self.feed_forward(z) / self.alpha[...]
        return y.astype(x.dtype), view.cache

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> KeyValueCache:
        """Returns an empty cache of `length` slots."""
        require_causal(self, self.reach.causal)
        return empty_cache(
            batch, length, kv_heads=self.heads, key_dim=self.channels, value_dim=self.channels, dtype=dtype
        )

    def _project(self, x: Sequence, ctx: Context) -> tuple[Queries, Keys, Values]:
        q, k, v = (by_head(linear(x), self.heads) for linear in (self.query, self.key, self.value))
        if self.position is not None:
            q, k = self.position.rotate(q, ctx.positions), self.position.rotate(k, ctx.positions)
        return q, k, v

    def _temperatures(self, ctx: Context, dtype: DTypeLike) -> Float[Array, 'b t h']:
        length = self.temperature.shape[1]
        if ctx.positions.shape[1] > length:
            raise UserError(
                f'a row has {ctx.positions.shape[1]} tokens; length, which counts temperatures, is {length}'
            )
        found = jnp.take(self.temperature[...].astype(dtype), ctx.positions, axis=1, mode='fill', fill_value=jnp.nan)
        return jnp.moveaxis(found, 0, -1)

    def _penalised(self, y: Heads, q: Queries, k: Keys, inverse: Float[Array, 'b t h'], ctx: Context) -> Heads:
        if self.penalty is None or self.theta is None:
            return y
        entropy = row_entropy(q.astype(inverse.dtype) * inverse[..., None], k, reach=self.reach, segments=ctx.segments)
        real = ctx.segments_or_ones() != PADDING
        penalty = self.penalty(entropy, self.theta[...].astype(entropy.dtype), real)
        return penalised(y, penalty, jnp.sum(real), ctx.labels)
