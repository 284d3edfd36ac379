"""Gates of the output of a mixer, of the input and state of a recurrence, and of memories and slots."""

from collections.abc import Callable
from collections.abc import Sequence as Shape
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float

from attnlab.errors import UserError
from attnlab.functional.precision import wide_dtype
from attnlab.functional.recomputed import gated, recomputed, recomputed_method
from attnlab.module import Module
from attnlab.nn import bounds
from attnlab.nn.activations import activation as activation_called
from attnlab.nn.bounds import BoundKind
from attnlab.nn.decays import StepDecay
from attnlab.nn.heads import by_head, head_channels
from attnlab.nn.initialization import logit
from attnlab.nn.parameter import inverse_softplus, param
from attnlab.nn.projections import BlockDiagonal, Linear, default_rank
from attnlab.typing import DropoutKey, Heads, Keys, Sequence, Values


class OutputGate(Module):
    """The factor `f(x W + c)` of a mixer's output, one for each of `features` channels.

    Raises `UserError` for an unknown activation.
    """

    def __init__(self, dim: int, features: int, *, activation: str = 'silu', bias: bool = False, rngs: nnx.Rngs):
        activation_called(activation)
        self.activation = activation
        self.linear = Linear(dim, features, bias=bias, rngs=rngs)

    def __call__(self, x: Sequence) -> Float[Array, 'b t f']:
        return activation_called(self.activation)(self.linear(x))


class LowRankGate(Module):
    """The factor `f(x W_1 W_2 + c)` of a mixer's output, one for each of `features` channels.

    `W_1` has `rank` columns; `None`: a sixteenth of the width, rounded up. Raises `UserError` for an unknown
    activation. Kimi Team 2025, https://arxiv.org/abs/2510.26692.
    """

    def __init__(
        self,
        dim: int,
        features: int,
        *,
        rank: int | None = None,
        activation: str = 'sigmoid',
        bias: bool = True,
        rngs: nnx.Rngs,
    ):
        activation_called(activation)
        self.activation = activation
        rank = default_rank(dim, rank)
        self.down = Linear(dim, rank, axes=('embed', None), rngs=rngs)
        self.up = Linear(rank, features, bias=bias, axes=(None, 'heads'), rngs=rngs)

    def __call__(self, x: Sequence) -> Float[Array, 'b t f']:
        return activation_called(self.activation)(self.up(self.down(x)))


class ChannelGate(Module):
    """The factor `sigmoid(x W)` of every channel of the heads' outputs, from the whole input.

    Qiu et al. 2025, https://arxiv.org/abs/2505.06708.
    """

    def __init__(self, dim: int, *, heads: int, channels: int, rngs: nnx.Rngs):
        self.shape = (heads, channels)
        self.linear = Linear(dim, heads * channels, rngs=rngs)

    def __call__(self, x: Sequence) -> Heads:
        return jax.nn.sigmoid(self.linear(x)).reshape(*x.shape[:2], *self.shape)


class HeadGate(Module):
    """The factor `sigmoid(x W + c)` of every head, from the whole input; `c` starts where the gate is `start`.

    The form called "all heads" of Bondarenko et al. 2023, https://arxiv.org/abs/2306.12929.
    """

    def __init__(self, dim: int, *, heads: int, channels: int, start: float = 0.25, rngs: nnx.Rngs):
        del channels
        self.linear = Linear(dim, heads, rngs=rngs)
        self.bias = _bias_of(start, heads, rngs)

    def __call__(self, x: Sequence) -> Float[Array, 'b t h 1']:
        scores = self.linear(x)
        return _open(scores, self.bias)


class SliceGate(Module):
    """The factor `sigmoid(x_h . w_h + c_h)` of every head, `x_h` its share of the input.

    `c` starts where the gate is `start`. The linear form of Bondarenko et al. 2023, https://arxiv.org/abs/2306.12929.
    Raises `UserError` unless the heads divide the width.
    """

    def __init__(self, dim: int, *, heads: int, channels: int, start: float = 0.25, rngs: nnx.Rngs):
        del channels
        self.weight = _per_slice(dim, heads, 1, rngs)
        self.bias = _bias_of(start, heads, rngs)

    def __call__(self, x: Sequence) -> Float[Array, 'b t h 1']:
        return _open(_by_slice(x, self.weight)[..., 0], self.bias)


class SliceMLPGate(Module):
    """The factor `sigmoid(u_h . relu(x_h V_h + b_h) + c_h)` of every head, `x_h` its share of the input.

    The hidden width is a quarter of the share. The form called "MLP" of Bondarenko et al. 2023,
    https://arxiv.org/abs/2306.12929. Raises `UserError` unless the heads divide the width.
    """

    def __init__(self, dim: int, *, heads: int, channels: int, rngs: nnx.Rngs):
        del channels
        hidden = max(1, head_channels(dim, heads) // 4)
        self.up = _per_slice(dim, heads, hidden, rngs)
        self.up_bias = param(nnx.initializers.zeros, (heads, hidden), axes=('heads', None), group='vector', rngs=rngs)
        weight = nnx.initializers.variance_scaling(1.0, 'fan_in', 'normal', in_axis=1, out_axis=0)
        # One vector a head: as a matrix it would be orthogonalised over the heads.
        self.down = param(weight, (heads, hidden), axes=('heads', None), group='vector', rngs=rngs)
        self.bias = _bias_of(0.5, heads, rngs)

    def __call__(self, x: Sequence) -> Float[Array, 'b t h 1']:
        up = _by_slice(x, self.up)
        # Cast after it is spread over tokens, so that its gradient is summed over them in its own type.
        hidden = jax.nn.relu(up + jnp.broadcast_to(self.up_bias[...], up.shape).astype(up.dtype))
        return _open(jnp.einsum('bthf,hf->bth', hidden, self.down[...].astype(x.dtype)), self.bias)


def _per_slice(dim: int, heads: int, features: int, rngs: nnx.Rngs) -> nnx.Param:
    weight = nnx.initializers.variance_scaling(1.0, 'fan_in', 'normal', batch_axis=0)
    return param(weight, (heads, head_channels(dim, heads), features), axes=('heads', None, None), rngs=rngs)


def _by_slice(x: Sequence, weight: nnx.Param) -> Float[Array, 'b t h f']:
    slices = x.reshape(*x.shape[:2], weight.shape[0], -1)
    return jnp.einsum('bthk,hkf->bthf', slices, weight[...].astype(x.dtype))


def _bias_of(start: float, heads: int, rngs: nnx.Rngs) -> nnx.Param:
    return param(logit('the start of a gate', start), (heads,), axes=('heads',), group='vector', rngs=rngs)


def _open(scores: Float[Array, 'b t h'], bias: nnx.Param) -> Float[Array, 'b t h 1']:
    return jax.nn.sigmoid((scores + bias[...][None, None]).astype(scores.dtype))[..., None]


class Moment(NamedTuple):
    """How the second moment of every key channel fades and grows, and the level that it is compared to.

    Attributes:
      log_decay: of the moment, natural logarithm, at most 0.
      strength: how much the square of the key adds to it.
      level: a logarithm, one a head.
    """

    log_decay: Float[Array, 'b t h']
    strength: Float[Array, 'b t h']
    level: Float[Array, ' h']


class Terms(NamedTuple):
    """The terms of a step of a matrix-valued memory that its gates determine; `None` leaves a term out.

    Attributes:
      log_decay: natural logarithm of the memory's decay, at most 0: `h`, `b t h` or `b t h k`.
      strength: the strength of the write, `b t h`.
      erase: keys whose values are erased, `b t h k`; `None`: those under which is written.
      moment: the gates of the second moment of keys.
    """

    log_decay: Array | None = None
    strength: Float[Array, 'b t h'] | None = None
    erase: Keys | None = None
    moment: Moment | None = None


@runtime_checkable
class MemoryGates(Protocol):
    """Gates of a matrix-valued memory, made as `gates(dim, heads=, key_dim=, value_dim=, rngs=)`."""

    def __call__(self, x: Sequence, k: Keys, v: Values, log_decay: Array | None) -> tuple[Keys, Values, Terms]:
        """Returns the keys, the values and the terms; each may depend on `x` and on the other arguments."""


class WriteStrength(Module):
    """How much a write replaces, `b = scale * sigmoid(x W + c)`, one number a head, in float32 or better.

    `c` is left out without `bias`.

    With a `scale` of 2 the delta rule has eigenvalues in `(-1, 1)` instead of `(0, 1)` along its keys, which lets it
    track states: Grazzi et al. 2025, https://arxiv.org/abs/2411.12537. What rounding adds to that is taken back.
    Raises `UserError` for a `scale` that is not above 0 and at most 2.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        key_dim: int,
        value_dim: int,
        scale: float = 1.0,
        bias: bool = False,
        rngs: nnx.Rngs,
    ):
        del key_dim, value_dim
        self.scale = _stable_scale(scale, type(self))
        self.linear = Linear(dim, heads, bias=bias, rngs=rngs)

    def __call__(self, x: Sequence, k: Keys, v: Values, log_decay: Array | None) -> tuple[Keys, Values, Terms]:
        strength = self.scale * jax.nn.sigmoid(self.linear(x).astype(wide_dtype(x.dtype)))
        if self.scale > 1 and k.dtype.itemsize == 2:
            strength *= _less_rounding(jnp.ones((1, 1, 1), strength.dtype), k, k)
        return k, v, Terms(log_decay, strength)


class ChannelStrengths(Module):
    """A strength for every key channel that erases and every value channel that is written.

    `e = scale * sigmoid(x W_e) * k`, values times `sigmoid(x W_w)`. With a `scale` of 2 erasing may change signs.
    What rounding adds to that is taken back. Raises `UserError` for a `scale` that is not above 0 and at most 2, and
    for keys of other channels, such as the features of a map that makes more of them.
    "Gated DeltaNet-2" 2026, https://arxiv.org/abs/2605.22791.
    """

    def __init__(self, dim: int, *, heads: int, key_dim: int, value_dim: int, scale: float = 1.0, rngs: nnx.Rngs):
        self.scale, self.key_dim = _stable_scale(scale, type(self)), key_dim
        self.erase = Linear(dim, heads * key_dim, rngs=rngs)
        self.write = Linear(dim, heads * value_dim, rngs=rngs)

    def __call__(self, x: Sequence, k: Keys, v: Values, log_decay: Array | None) -> tuple[Keys, Values, Terms]:
        if k.shape[-1] != self.key_dim:
            raise UserError(
                f'ChannelStrengths has a strength for each of {self.key_dim} channels of a key, and the feature_map '
                f'makes {k.shape[-1]} features of them; choose gates=WriteStrength or a map that keeps their number'
            )
        erase = self.scale * gated(k, self.erase(x).reshape(k.shape), jax.nn.sigmoid)
        strength = None
        if self.scale > 1 and k.dtype.itemsize == 2:
            strength = _less_rounding(self._erased(x, k), k, erase)
        return k, gated(v, self.write(x).reshape(v.shape), jax.nn.sigmoid), Terms(log_decay, strength, erase)

    def _erased(self, x: Sequence, k: Keys) -> Float[Array, 'b t h']:
        """`k.e` of keys of length one, before it is rounded."""
        wide = wide_dtype(k.dtype)
        squares = jnp.square(k.astype(wide))
        opened = jax.nn.sigmoid(self.erase(x).reshape(k.shape).astype(wide))
        return self.scale * jnp.sum(opened * squares, axis=-1) / jnp.maximum(jnp.sum(squares, axis=-1), 0.5)


def _stable_scale(scale: float, gates: type) -> float:
    if not 0 < scale <= 2:
        raise UserError(f'the scale of {gates.__name__} is {scale}; it must be above 0 and at most 2')
    return scale


ROUNDED = 2.0**-7
"""A bound above the error that rounding to 16 bits makes in the squared length of a key of length one."""


def _less_rounding(wanted: Float[Array, '#b #t #h'], k: Keys, e: Keys) -> Float[Array, 'b t h']:
    """The factor of writes that makes `k.e` what is wanted of keys of length one, where 16 bits hold them; else one.

    An eigenvalue `1 - k.e` near -1 is carried beyond it by rounding, if by a thousandth, and what a memory holds for a
    token that repeats would grow without end.
    """
    length, erased = (jnp.sum(k.astype(wanted.dtype) * a.astype(wanted.dtype), axis=-1) for a in (k, e))
    rounded = (jnp.abs(length - 1) < ROUNDED) & (erased > 0)
    return jnp.where(rounded, wanted / jnp.where(rounded, erased, 1), 1)


class PartialErase(Module):
    """How much a write adds, `b = scale * sigmoid(x W)`, and what part of that it erases: `e = sigmoid(d) k`.

    One number `b` a head and token, and one learned number `d` a head, 1 at the start.
    Hu et al. 2025, https://arxiv.org/abs/2506.02475.
    """

    def __init__(self, dim: int, *, heads: int, key_dim: int, value_dim: int, scale: float = 1.0, rngs: nnx.Rngs):
        self.strength = WriteStrength(dim, heads=heads, key_dim=key_dim, value_dim=value_dim, scale=scale, rngs=rngs)
        self.part = param(nnx.initializers.ones, (heads,), axes=('heads',), group='dynamics', rngs=rngs)

    def __call__(self, x: Sequence, k: Keys, v: Values, log_decay: Array | None) -> tuple[Keys, Values, Terms]:
        k, v, terms = self.strength(x, k, v, log_decay)
        return k, v, terms._replace(erase=self._erase(k))

    @recomputed_method
    def _erase(self, k: Keys) -> Keys:
        part = jax.nn.sigmoid(self.part[...].astype(wide_dtype(k.dtype)))
        return part[None, None, :, None] * k


class MomentGates(Module):
    """The strength of writes, and gates of a second moment of the keys: a decay and a strength of its own, one a head.

    The decay is `StepDecay`, the strength `sigmoid(x W)`; the level starts at `level`.
    "Preconditioned DeltaNet" 2026, https://arxiv.org/abs/2604.21100.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        key_dim: int,
        value_dim: int,
        scale: float = 1.0,
        level: float = -0.2,
        rngs: nnx.Rngs,
    ):
        self.strength = WriteStrength(dim, heads=heads, key_dim=key_dim, value_dim=value_dim, scale=scale, rngs=rngs)
        self.decay = StepDecay(dim, heads=heads, key_dim=key_dim, rngs=rngs)
        self.growth = Linear(dim, heads, rngs=rngs)
        self.level = param(nnx.initializers.constant(level), (heads,), axes=('heads',), group='dynamics', rngs=rngs)

    def __call__(self, x: Sequence, k: Keys, v: Values, log_decay: Array | None) -> tuple[Keys, Values, Terms]:
        k, v, terms = self.strength(x, k, v, log_decay)
        wide = wide_dtype(x.dtype)
        growth = jax.nn.sigmoid(self.growth(x).astype(wide))
        return k, v, terms._replace(moment=Moment(self.decay(x), growth, self.level[...].astype(wide)))


def greatest_strength(gates: MemoryGates | None) -> float | None:
    """What the strength with which gates erase stays below; `None` for gates that are not of this module."""
    within = gates.strength if isinstance(gates, PartialErase) else gates
    return within.scale if isinstance(within, WriteStrength | ChannelStrengths) else None


class TiedKeys(Module):
    """Keys tied to the decays, `k = 1 - a`, `a = c + (1 - c) sigmoid(z)`, with the logits `z` in place of keys.

    `c` is `lower_bound`, from 0 to below 1, or with `bound='learned'` one of every channel that rises from layer to
    layer (`RisingBound`). Qin et al. 2024, https://arxiv.org/abs/2404.07904.
    Raises `UserError` for another `lower_bound`, or where a decay of its own is given.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        key_dim: int,
        value_dim: int,
        lower_bound: float = 0.0,
        bound: BoundKind = 'constant',
        rngs: nnx.Rngs,
    ):
        del dim, value_dim
        self.bound = bounds.lower_bound(
            'TiedKeys', bound, lower_bound, (heads, key_dim), axes=('heads', None), rngs=rngs
        )

    def __call__(self, x: Sequence, k: Keys, v: Values, log_decay: Array | None) -> tuple[Keys, Values, Terms]:
        if log_decay is not None:
            raise UserError('TiedKeys make the decay themselves; give their mixer decay=None')
        keys, log_decay = self._tied(k)
        return keys, v, Terms(log_decay)

    @recomputed_method
    def _tied(self, k: Keys) -> tuple[Keys, Float[Array, 'b t h k']]:
        logits = k.astype(wide_dtype(k.dtype))
        bound = bounds.bound_of(self.bound, logits)
        return ((1 - bound) * jax.nn.sigmoid(-logits)).astype(k.dtype), bounds.bounded_log_sigmoid(logits, bound)


class SlotGates(Protocol):
    """Gates of a memory of slots, made as `gates(dim, heads=, slots=, rngs=)`."""

    def __call__(self, x: Sequence, key: DropoutKey | None) -> Float[Array, 'b t h n']:
        """Returns the log decay of every slot, at most 0, in float32 or better; `key` draws noise, where there is."""


class RoutedGates(Module):
    """Log decays of slots of which a token changes a few: `w_n f`, `f` the decay of the head, `w` given by a router,

        s = sigmoid(x W)        w_n = s_n / (sum of s over the chosen slots)   where slot n is chosen, 0 elsewhere.

    With `scores='softmax'` `w_n` is the softmax of `x W` over all slots of the head where slot n is chosen. Chosen are
    the `chosen` slots of greatest `s` of a head, all where it has no more. `f` is made as `decay(dim, heads=, key_dim=,
    rngs=)`, `key_dim` the number of slots: of the head, or of every slot. In training standard Gumbel noise is added to
    `x W`. The choice has no gradient, but `w` has. Scores are computed in float32 or better, so that what is chosen
    does not depend on the type of the activations. "Raven" 2026, https://github.com/goombalab/raven.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        slots: int,
        chosen: int = 32,
        noise: bool = True,
        scores: Literal['sigmoid', 'softmax'] = 'sigmoid',
        decay: Callable[..., nnx.Module] = StepDecay,
        rngs: nnx.Rngs,
    ):
        self.heads, self.chosen, self.noise, self.scores = heads, chosen, noise, scores
        self.decay = decay(dim, heads=heads, key_dim=slots, rngs=rngs)
        self.router = Linear(dim, heads * slots, rngs=rngs)

    def __call__(self, x: Sequence, key: DropoutKey | None) -> Float[Array, 'b t h n']:
        wide = wide_dtype(x.dtype)
        logits = by_head(self.router(x.astype(wide)), self.heads)
        if self.noise and key is not None:
            logits = logits + jax.random.gumbel(key, logits.shape, wide)
        # Counted by comparisons, of equal scores the first, so that no device need gather what a sort would.
        index = jnp.arange(logits.shape[-1])
        ahead = (index[None, :] < index[:, None])[None, None, None] & (logits[..., None, :] == logits[..., :, None])
        place = jnp.sum(ahead | (logits[..., None, :] > logits[..., :, None]), axis=-1)
        decay = self.decay(x)
        shared = SHARED[self.scores]
        return shared(decay if decay.ndim == 4 else decay[..., None], logits, place < self.chosen)


class RealGates(Module):
    """The gates of the real-gated linear recurrent unit (RG-LRU), for `h_t = a_t h_{t-1} + b_t`.

        r = sigmoid(W_a x + c_a)    log a = -c r softplus(l)
        i = sigmoid(W_x x + c_x)    b = sqrt(1 - a^2) i x

    with `b = i x` at the first token of a document. `W_a` and `W_x` are block-diagonal, of `blocks` blocks; `c` is
    `sharpness`. At the start `a` at `r = 1` is uniform in `[low, high]`, and every block has fan-in variance.
    Raises `UserError` unless the number of blocks divides the width, `0 < low <= high < 1`, and for a sharpness that is
    not positive. De et al. 2024, https://arxiv.org/abs/2402.19427.
    """

    def __init__(
        self,
        dim: int,
        width: int,
        *,
        blocks: int = 16,
        sharpness: float = 8.0,
        low: float = 0.9,
        high: float = 0.999,
        rngs: nnx.Rngs,
    ):
        if dim != width:
            raise UserError(
                f'RealGates keep the width {dim} of their input, and the recurrence has {width}; put a lift before it'
            )
        if not 0 < low <= high < 1:
            raise UserError(f'RealGates start from {low} to {high}; decays must be above 0, in order, and below 1')
        if sharpness <= 0:
            raise UserError(f'sharpness of RealGates is {sharpness}; it must be above 0')
        self.sharpness = sharpness
        self.recurrence_gate = BlockDiagonal(width, blocks=blocks, rngs=rngs)
        self.input_gate = BlockDiagonal(width, blocks=blocks, rngs=rngs)

        def rate(key: jax.Array, shape: Shape[int], dtype: DTypeLike) -> Array:
            decay = jax.random.uniform(key, shape, minval=low, maxval=high)
            return inverse_softplus(-jnp.log(decay) / sharpness).astype(dtype)

        self.rate = param(rate, (width,), axes=('mlp',), group='dynamics', rngs=rngs)

    def __call__(
        self, x: Float[Array, 'b t d'], starts: Bool[Array, 'b t']
    ) -> tuple[Float[Array, 'b t d'], Float[Array, 'b t d']]:
        """Returns `b` and `a`, in float32 or better."""
        return self._opened(x, self.recurrence_gate(x), self.input_gate(x), starts)

    @recomputed_method
    def _opened(
        self,
        x: Float[Array, 'b t d'],
        kept: Float[Array, 'b t d'],
        taken: Float[Array, 'b t d'],
        starts: Bool[Array, 'b t'],
    ) -> tuple[Float[Array, 'b t d'], Float[Array, 'b t d']]:
        dtype = wide_dtype(x.dtype)
        rate = jax.nn.softplus(self.rate[...].astype(dtype))
        log_a = -self.sharpness * rate[None, None] * jax.nn.sigmoid(kept.astype(dtype))
        # Not zero even where the gate underflows, so that the gradient of the square root stays finite.
        left = jnp.maximum(-jnp.expm1(2 * log_a), jnp.finfo(dtype).tiny)
        multiplier = jnp.where(starts[..., None], jnp.ones_like(left), jnp.sqrt(left))
        return multiplier * jax.nn.sigmoid(taken.astype(dtype)) * x.astype(dtype), jnp.exp(log_a)


class MinGRUGates(Module):
    """The gates of the minimal gated recurrent unit, `a = 1 - z` and `b = z g(W_h x + c_h)`.

    They serve `h_t = a_t h_{t-1} + b_t`. `z` is `sigmoid(W_z x + c_z)`; `g(x)` is `x + 1/2` above zero and `sigmoid(x)`
    below, which keeps `h` positive. A document starts from `h_0 = g(0) = 1/2`: its first `b` has an extra `a / 2`.
    Feng et al. 2024, https://arxiv.org/abs/2410.01201.
    """

    def __init__(self, dim: int, width: int, *, rngs: nnx.Rngs):
        self.update = Linear(dim, width, bias=True, axes=('embed', 'mlp'), rngs=rngs)
        self.candidate = Linear(dim, width, bias=True, axes=('embed', 'mlp'), rngs=rngs)

    def __call__(
        self, x: Float[Array, 'b t d'], starts: Bool[Array, 'b t']
    ) -> tuple[Float[Array, 'b t f'], Float[Array, 'b t f']]:
        """Returns `b` and `a`, in float32 or better."""
        return _minimal_gru(self.update(x), self.candidate(x), starts)


class MinLSTMGates(Module):
    """The gates of the minimal LSTM, `a = f / (f + i)` and `b = i / (f + i) g(W_h x + c_h)`.

    They serve `h_t = a_t h_{t-1} + b_t`. `f` and `i` are `sigmoid(W x + c)`, each with its own maps; `g` and the start
    of a document are as in `MinGRUGates`. Feng et al. 2024, https://arxiv.org/abs/2410.01201.
    """

    def __init__(self, dim: int, width: int, *, rngs: nnx.Rngs):
        self.forget, self.input, self.candidate = (
            Linear(dim, width, bias=True, axes=('embed', 'mlp'), rngs=rngs) for _ in range(3)
        )

    def __call__(
        self, x: Float[Array, 'b t d'], starts: Bool[Array, 'b t']
    ) -> tuple[Float[Array, 'b t f'], Float[Array, 'b t f']]:
        """Returns `b` and `a`, in float32 or better."""
        return _minimal_lstm(self.forget(x), self.input(x), self.candidate(x), starts)


@recomputed
def _shared(
    decay: Float[Array, 'b t h #n'], logits: Float[Array, 'b t h n'], chosen: Bool[Array, 'b t h n']
) -> Float[Array, 'b t h n']:
    """The decay, times the part that every slot has of the scores of those chosen."""
    scores = jax.nn.sigmoid(logits)
    scores = jnp.where(chosen, scores, jnp.zeros_like(scores))
    return decay * (scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-9))


@recomputed
def _softened(
    decay: Float[Array, 'b t h #n'], logits: Float[Array, 'b t h n'], chosen: Bool[Array, 'b t h n']
) -> Float[Array, 'b t h n']:
    """The decay, times the softmax of all slots in those chosen."""
    return decay * jnp.where(chosen, jax.nn.softmax(logits, axis=-1), jnp.zeros_like(logits))


SHARED = {'sigmoid': _shared, 'softmax': _softened}
"""How much of the decay of a head every chosen slot has, by the name of its scores."""


@recomputed
def _minimal_gru(
    update: Float[Array, 'b t f'], candidate: Float[Array, 'b t f'], starts: Bool[Array, 'b t']
) -> tuple[Float[Array, 'b t f'], Float[Array, 'b t f']]:
    dtype = wide_dtype(update.dtype)
    keep = jax.nn.sigmoid(-update.astype(dtype))  # 1 - z without cancellation
    return _from_half(jax.nn.sigmoid(update.astype(dtype)), candidate.astype(dtype), keep, starts), keep


@recomputed
def _minimal_lstm(
    forget: Float[Array, 'b t f'],
    taken: Float[Array, 'b t f'],
    candidate: Float[Array, 'b t f'],
    starts: Bool[Array, 'b t'],
) -> tuple[Float[Array, 'b t f'], Float[Array, 'b t f']]:
    dtype = wide_dtype(forget.dtype)
    left, right = (jax.nn.log_sigmoid(logits.astype(dtype)) for logits in (forget, taken))
    keep = jax.nn.sigmoid(left - right)
    return _from_half(jax.nn.sigmoid(right - left), candidate.astype(dtype), keep, starts), keep


def _from_half(
    taken: Float[Array, 'b t f'],
    candidate: Float[Array, 'b t f'],
    keep: Float[Array, 'b t f'],
    starts: Bool[Array, 'b t'],
) -> Float[Array, 'b t f']:
    """What is taken of the candidates, and of the half that a document starts from."""
    return taken * positive(candidate) + jnp.where(starts[..., None], keep / 2, jnp.zeros_like(keep))


def positive(x: Float[Array, '*b']) -> Float[Array, '*b']:
    """The continuous, increasing map `g(x) = x + 1/2` for `x >= 0`, `sigmoid(x)` below."""
    return jnp.where(x >= 0, x + 0.5, jax.nn.sigmoid(x))
