"""Norms: of the channels of a token, and a few over time as well (`looks_ahead`)."""

from collections.abc import Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from attnlab.errors import UserError
from attnlab.functional.measured import measured
from attnlab.functional.precision import wide_dtype
from attnlab.functional.recomputed import recomputed_method
from attnlab.module import Module
from attnlab.nn.parameter import Moving, buffer, param


class RMSNorm(Module):
    """Divides by the root mean square of the last axis: `y = g x / sqrt(mean(x^2) + eps)`, `g` learned, of size `dim`.

    Applied to `b t h k` it normalises each head, with one gain for all heads. The mean and the division are in float32
    or better; `y` has the type of `x`. Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467.
    """

    def __init__(self, dim: int, *, eps: float = 1e-6, rngs: nnx.Rngs):
        self.eps = eps
        self.scale = param(nnx.initializers.ones, (dim,), axes=(None,), group='vector', rngs=rngs)

    @recomputed_method
    def __call__(self, x: Float[Array, '*b d']) -> Float[Array, '*b d']:
        self.check_width(x, self.scale.shape[0])
        return _scaled_to_unit(x, jnp.broadcast_to(self.scale[...], x.shape), self.eps)


class SimpleRMSNorm(Module):
    """`RMSNorm` without a gain. Qin et al. 2023, https://arxiv.org/abs/2307.14995."""

    def __init__(self, dim: int, *, eps: float = 1e-6, rngs: nnx.Rngs):
        del dim, rngs
        self.eps = eps

    @recomputed_method
    def __call__(self, x: Float[Array, '*b d']) -> Float[Array, '*b d']:
        return _scaled_to_unit(x, jnp.ones_like(x), self.eps)


class LayerNorm(Module):
    """`y = g (x - mean(x)) / sqrt(var(x) + eps) + b` over the last axis; g and b are learned, of size `dim`.

    The variance is that of differences from the mean, in float32 or better. Ba, Kiros and Hinton 2016,
    https://arxiv.org/abs/1607.06450.
    """

    def __init__(self, dim: int, *, eps: float = 1e-5, rngs: nnx.Rngs):
        self.eps = eps
        self.scale = param(nnx.initializers.ones, (dim,), axes=(None,), group='vector', rngs=rngs)
        self.bias = param(nnx.initializers.zeros, (dim,), axes=(None,), group='vector', rngs=rngs)

    @recomputed_method
    def __call__(self, x: Float[Array, '*b d']) -> Float[Array, '*b d']:
        self.check_width(x, self.scale.shape[0])
        wide = x.astype(wide_dtype(x.dtype))
        apart = wide - jnp.mean(wide, axis=-1, keepdims=True)
        unit = apart * jax.lax.rsqrt(jnp.mean(jnp.square(apart), axis=-1, keepdims=True) + self.eps)
        return _affine(unit, self.scale, self.bias).astype(x.dtype)


class GlobalLayerNorm(LayerNorm):
    """`LayerNorm` whose mean and variance are over time and channels of a row, `b t d`: it looks at the whole row.

    Luo and Mesgarani 2019, https://arxiv.org/abs/1809.07454.
    """

    looks_ahead = True

    def __init__(self, dim: int, *, eps: float = 1e-8, rngs: nnx.Rngs):
        super().__init__(dim, eps=eps, rngs=rngs)

    @recomputed_method
    def __call__(self, x: Float[Array, 'b t d']) -> Float[Array, 'b t d']:
        self.check_width(x, self.scale.shape[0])
        wide = x.astype(wide_dtype(x.dtype))
        apart = wide - jnp.mean(wide, axis=(1, 2), keepdims=True)
        unit = apart * jax.lax.rsqrt(jnp.mean(jnp.square(apart), axis=(1, 2), keepdims=True) + self.eps)
        return _affine(unit, self.scale, self.bias).astype(x.dtype)


class CumulativeLayerNorm(LayerNorm):
    """`LayerNorm` whose mean and variance at a step are over all channels of it and of the steps before, `b t d`.

        m_t = sum_{s<=t, d} x_sd / (t d),   v_t = sum_{s<=t, d} x_sd^2 / (t d) - m_t^2

    Sums are in float32 or better. Luo and Mesgarani 2019, https://arxiv.org/abs/1809.07454.
    """

    def __init__(self, dim: int, *, eps: float = 1e-8, rngs: nnx.Rngs):
        super().__init__(dim, eps=eps, rngs=rngs)

    @recomputed_method
    def __call__(self, x: Float[Array, 'b t d']) -> Float[Array, 'b t d']:
        self.check_width(x, self.scale.shape[0])
        wide = x.astype(wide_dtype(x.dtype))
        count = jnp.arange(1, x.shape[1] + 1, dtype=wide.dtype).reshape(1, -1, 1)
        mean, square = (
            jnp.cumsum(jnp.mean(each, axis=2, keepdims=True), axis=1) / count for each in (wide, jnp.square(wide))
        )
        # The difference of two sums, which rounding makes negative where all numbers are nearly the same.
        variance = jnp.maximum(square - jnp.square(mean), 0.0)
        unit = (wide - mean) * jax.lax.rsqrt(variance + self.eps)
        return _affine(unit, self.scale, self.bias).astype(x.dtype)


class DynamicTanh(Module):
    """`y = g tanh(a x) + b` with a learned scalar `a`: no statistics at all. g and b are learned, of size `dim`.

    It keeps no scale, so `a` starts by place in the paper's language models, lower in wider ones (0.8 before attention
    and 0.2 elsewhere at 7B parameters); `alpha` is where it starts everywhere here. Zhu et al. 2025,
    https://arxiv.org/abs/2503.10622. Raises `UserError` for an `alpha` that is not positive.
    """

    def __init__(self, dim: int, *, alpha: float = 0.5, rngs: nnx.Rngs):
        if alpha <= 0:
            raise UserError(f'alpha of DynamicTanh is {alpha}; it must be positive')
        self.alpha = param(nnx.initializers.constant(alpha), (), axes=(), group='vector', rngs=rngs)
        self.scale = param(nnx.initializers.ones, (dim,), axes=(None,), group='vector', rngs=rngs)
        self.bias = param(nnx.initializers.zeros, (dim,), axes=(None,), group='vector', rngs=rngs)

    @recomputed_method
    def __call__(self, x: Float[Array, '*b d']) -> Float[Array, '*b d']:
        self.check_width(x, self.scale.shape[0])
        wide = x.astype(wide_dtype(x.dtype))
        squashed = jnp.tanh(self.alpha[...].astype(wide.dtype) * wide)
        return _affine(squashed, self.scale, self.bias).astype(x.dtype)


class EvoNormS0(Module):
    """`y = g x sigmoid(v x) / sqrt(var(x) + eps) + b`: normalisation and activation in one.

    The variance is over groups of channels of one token: over time, as over the pixels of the paper, it would look
    ahead. The mean is subtracted within the variance alone. g, v and b are learned, of size `dim`. Liu et al. 2020,
    https://arxiv.org/abs/2004.02967. Raises `UserError` for groups that do not divide the width.
    """

    def __init__(self, dim: int, *, groups: int = 1, eps: float = 1e-5, rngs: nnx.Rngs):
        if dim % groups:
            raise UserError(f'groups of EvoNormS0 is {groups}; it must divide dim, which is {dim}')
        self.groups, self.eps = groups, eps
        ones, zeros = nnx.initializers.ones, nnx.initializers.zeros
        self.scale, self.sharpness, self.bias = (
            param(start, (dim,), axes=(None,), group='vector', rngs=rngs) for start in (ones, ones, zeros)
        )

    @recomputed_method
    def __call__(self, x: Float[Array, '*b d']) -> Float[Array, '*b d']:
        self.check_width(x, self.scale.shape[0])
        wide = x.astype(wide_dtype(x.dtype))
        grouped = wide.reshape(*x.shape[:-1], self.groups, -1)
        inverse = jax.lax.rsqrt(jnp.var(grouped, axis=-1, keepdims=True) + self.eps)
        unit = (grouped * inverse).reshape(x.shape)
        gated = unit * jax.nn.sigmoid(wide * jnp.broadcast_to(self.sharpness[...].astype(wide.dtype), wide.shape))
        return _affine(gated, self.scale, self.bias).astype(x.dtype)


class EvoNormB0(Module):
    """`y = g x / max(sqrt(B + eps), v x + sqrt(I + eps)) + b`: normalisation and activation in one, of `b t d`.

    `I` is the variance of a channel over the tokens of a row, in the paper the pixels of an image; `B` that over all
    tokens of the batch in training, padding too, and otherwise a moving average, without bias, of those of training.
    So rows depend on each other in training, and tokens on later ones always: it suits images, and no model that
    predicts the next token. It is a norm of a `Block`, which tells it of training. g, v and b are learned, of size
    `dim`. Liu et al. 2020, https://arxiv.org/abs/2004.02967.
    """

    learns_in_training = True
    looks_ahead = True

    def __init__(self, dim: int, *, eps: float = 1e-5, decay: float = 0.9, rngs: nnx.Rngs):
        self.eps = eps
        ones, zeros = nnx.initializers.ones, nnx.initializers.zeros
        self.scale, self.sharpness, self.bias = (
            param(start, (dim,), axes=(None,), group='vector', rngs=rngs) for start in (ones, ones, zeros)
        )
        self.moments = buffer(jnp.ones(dim + 1), axes=(None,), moving=Moving(decay))

    def __call__(self, x: Float[Array, 'b t d']) -> Float[Array, 'b t d']:
        """Normalises by the moving average."""
        return self._normalised(x, self.moments[...][:-1])

    def in_training(self, x: Float[Array, 'b t d']) -> Float[Array, 'b t d']:
        """Normalises by the variance of the batch, which the average follows. Raises `UserError` for one token."""
        count = x.shape[0] * x.shape[1]
        if count < 2:
            raise UserError('a batch of one token has no variance; EvoNormB0 is trained on more')
        wide = x.astype(wide_dtype(x.dtype))
        variance = jnp.var(wide, axis=(0, 1))
        return measured(self._normalised(x, variance), variance * count / (count - 1), self.moments[...])

    def _normalised(self, x: Float[Array, 'b t d'], batch: Float[Array, ' d']) -> Float[Array, 'b t d']:
        self.check_width(x, self.scale.shape[0])
        wide = x.astype(wide_dtype(x.dtype))
        own = jnp.sqrt(jnp.var(wide, axis=1, keepdims=True) + self.eps)
        sharp = jnp.broadcast_to(self.sharpness[...].astype(wide.dtype), wide.shape) * wide
        spread = jnp.broadcast_to(jnp.sqrt(batch.astype(wide.dtype) + self.eps), wide.shape)
        return _affine(wide / jnp.maximum(spread, sharp + own), self.scale, self.bias).astype(x.dtype)


class NoNorm(Module):
    """`y = x`."""

    def __init__(self, dim: int, *, rngs: nnx.Rngs):
        del dim, rngs

    def __call__(self, x: Float[Array, '*b d']) -> Float[Array, '*b d']:
        return x


class HeadRMSNorm(Module):
    """`RMSNorm` of every head, `b t h k`, with one gain for all heads, or with `apart` one per head.

    Applied to queries and keys it bounds the scores (Henry et al. 2020, https://arxiv.org/abs/2010.04245; Gemma team
    2025, https://arxiv.org/abs/2503.19786).
    """

    def __init__(self, dim: int, *, heads: int, apart: bool = False, eps: float = 1e-6, rngs: nnx.Rngs):
        self.eps = eps
        shape, axes = ((heads, dim), ('heads', None)) if apart else ((1, dim), (None, None))
        self.scale = param(nnx.initializers.ones, shape, axes=axes, group='vector', rngs=rngs)

    @recomputed_method
    def __call__(self, x: Float[Array, 'b t h k']) -> Float[Array, 'b t h k']:
        return _scaled_to_unit(x, jnp.broadcast_to(self.scale[...][None, None], x.shape), self.eps)


class OffsetRMSNorm(Module):
    """`RMSNorm` whose gain is `1 + w`, with `w` from zero, of size `dim`.

    Weight decay on `w` pulls the gain to one. Gemma team 2024, https://arxiv.org/abs/2403.08295.
    """

    def __init__(self, dim: int, *, eps: float = 1e-6, rngs: nnx.Rngs):
        self.eps = eps
        self.offset = param(nnx.initializers.zeros, (dim,), axes=(None,), group='vector', rngs=rngs)

    @recomputed_method
    def __call__(self, x: Float[Array, '*b d']) -> Float[Array, '*b d']:
        self.check_width(x, self.offset.shape[0])
        return _scaled_to_unit(x, jnp.broadcast_to(1 + self.offset[...], x.shape), self.eps)


class HeadOffsetRMSNorm(OffsetRMSNorm):
    """`OffsetRMSNorm` of every head, `b t h k`, with one gain for all heads."""

    def __init__(self, dim: int, *, heads: int, eps: float = 1e-6, rngs: nnx.Rngs):
        del heads
        super().__init__(dim, eps=eps, rngs=rngs)


class GroupNorm(Module):
    """Every head, `b t h k`, less its mean and over its standard deviation, `y = g (x - mean) / sqrt(var + eps) + c`.

    `g`, which starts at `gain`, and `c`, left out without `bias`, are learned for every channel of every head. Wu and
    He 2018, https://arxiv.org/abs/1803.08494.
    """

    def __init__(
        self, dim: int, *, heads: int, eps: float = 1e-5, bias: bool = True, gain: float = 1.0, rngs: nnx.Rngs
    ):
        self.eps = eps
        start, zeros, axes = nnx.initializers.constant(gain), nnx.initializers.zeros, ('heads', None)
        self.scale = param(start, (heads, dim), axes=axes, group='vector', rngs=rngs)
        self.bias = param(zeros, (heads, dim), axes=axes, group='vector', rngs=rngs) if bias else None

    @recomputed_method
    def __call__(self, x: Float[Array, 'b t h k']) -> Float[Array, 'b t h k']:
        wide = x.astype(wide_dtype(x.dtype))
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        unit = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        unit = unit * self.scale[...].astype(unit.dtype)[None, None]
        if self.bias is not None:
            unit = unit + self.bias[...].astype(unit.dtype)[None, None]
        return unit.astype(x.dtype)


def _affine(x: Float[Array, '*b d'], scale: nnx.Param, bias: nnx.Param) -> Float[Array, '*b d']:
    """`scale x + bias` by channel."""
    gain, shift = (jnp.broadcast_to(each[...].astype(x.dtype), x.shape) for each in (scale, bias))
    return gain * x + shift


def _scaled_to_unit(x: Float[Array, '*b d'], gain: Float[Array, '*b d'], eps: float) -> Float[Array, '*b d']:
    wide = x.astype(wide_dtype(x.dtype))
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * inverse * gain.astype(wide.dtype)).astype(x.dtype)


NORMS: Mapping[str, type[Module]] = MappingProxyType(
    {'rmsnorm': RMSNorm, 'layernorm': LayerNorm, 'dyt': DynamicTanh, 'evonorm_s0': EvoNormS0, 'none': NoNorm}
)
"""Those of one token, by the names that configs have for them."""
