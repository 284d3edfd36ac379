"""Write rules: what a key does to a matrix-valued memory before a query reads it."""

import abc
import dataclasses
import math
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from attnlab.errors import UserError
from attnlab.functional import cores
from attnlab.functional.precision import wide_dtype
from attnlab.functional.recomputed import recomputed, recomputed_method
from attnlab.nn.gates import (
    ChannelStrengths,
    MemoryGates,
    MomentGates,
    PartialErase,
    Terms,
    greatest_strength,
)
from attnlab.signature import checked_fields
from attnlab.typing import Heads, Keys, Queries, Values

Memory = Float[Array, 'b h m v']


class WriteRule(abc.ABC):
    """Runs a memory over a sequence: from `S_{t-1}` to `S_t` by the key, the value and the terms, then a read by `q_t`.

    `core` are the arguments that all cores share: `scale` of the queries (`None`: one over the square root of the key
    channels), `state` before the first token (`None`: empty), `segments`, `implementation`.

    Attributes:
      unread: of the class, gates that give what it would not read.
    """

    unread: ClassVar[tuple[type, ...]] = (MomentGates,)

    @property
    def steps(self) -> int:
        """How many keys and values a token has for every head of queries; keys are `b t (steps h) k`."""
        return 1

    @property
    def beside(self) -> int:
        """How many columns a memory has beside those of values."""
        return 0

    @property
    def counts(self) -> bool:
        """Whether it can give the sums of the weights of reads (`sums`)."""
        return False

    def check_gates(self, gates: MemoryGates | None, *, decays: bool) -> None:
        """Raises `UserError` for gates that give what it would not read, and those with which it would not be stable.

        `decays` says whether the memory does.
        """
        del decays
        if isinstance(gates, self.unread):
            raise UserError(
                f'{type(self).__name__} does not read all that {type(gates).__name__} give; choose another write rule, '
                'or gates=WriteStrength'
            )

    @abc.abstractmethod
    def __call__(self, q: Queries, k: Keys, v: Values, terms: Terms, **core: Any) -> tuple[Heads, Memory]:
        """Returns the reads `scale S_t^T q_t` and the last memory, in float32 or wider."""

    def sums(
        self, q: Queries, k: Keys, terms: Terms, **core: Any
    ) -> tuple[Float[Array, 'b t h'], Float[Array, 'b h m']]:
        """Returns what a value of one would be read as, and its column of the last memory; `state` is that column."""
        raise UserError(f'{type(self).__name__} has no sums of weights; a normalizer needs write=Additive()')

    def both_ways(self, q: Queries, k: Keys, v: Values, terms: Terms, **core: Any) -> Heads:
        """Returns the reads of queries that see their whole document. Raises `UserError` if the rule cannot."""
        raise UserError(f'{type(self).__name__} writes in order; a bidirectional mixer needs write=Additive()')


@checked_fields
@dataclasses.dataclass(frozen=True)
class Additive(WriteRule):
    """Adds: `S_t = diag(a_t) S_{t-1} + b_t k_t v_t^T`, decay `a` and strength `b`, each one where gates give none.

    Both ways, every pair of tokens counts once, decayed by what lies between; the strength is that of the key's token.
    """

    unread = (MomentGates, PartialErase, ChannelStrengths)

    def __call__(self, q: Queries, k: Keys, v: Values, terms: Terms, **core: Any) -> tuple[Heads, Memory]:
        return cores.linear_attention(q, k, _weighted(v, terms), terms.log_decay, **core)

    @property
    def counts(self) -> bool:
        return True

    def sums(
        self, q: Queries, k: Keys, terms: Terms, **core: Any
    ) -> tuple[Float[Array, 'b t h'], Float[Array, 'b h m']]:
        k = k if terms.strength is None else terms.strength.astype(k.dtype)[..., None] * k
        return cores.linear_attention_sums(q, k, terms.log_decay, **core)

    def both_ways(self, q: Queries, k: Keys, v: Values, terms: Terms, **core: Any) -> Heads:
        """The past, the token itself and the future: a scan each way, less the token itself, which both include."""
        v, log_decay, segments, scale = _weighted(v, terms), terms.log_decay, core['segments'], core['scale']
        past, _ = cores.linear_attention(q, k, v, log_decay, **core)
        if log_decay is not None and log_decay.ndim > 1:
            log_decay = jnp.flip(log_decay, 1)
        core = core | {'segments': None if segments is None else jnp.flip(segments, 1)}
        future, _ = cores.linear_attention(jnp.flip(q, 1), jnp.flip(k, 1), jnp.flip(v, 1), log_decay, **core)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        own = (scale * jnp.sum(q * k, axis=-1, keepdims=True)).astype(v.dtype) * v
        return past + jnp.flip(future, 1) - own


@checked_fields
@dataclasses.dataclass(frozen=True)
class Delta(WriteRule):
    """Replaces what the memory holds for the key: `S_t = (I - b_t k_t k_t^T) diag(a_t) S_{t-1} + b_t k_t v_t^T`.

    The decay `a` is one where gates give none; they have to give the strength `b`, or an erase key `e` of its own, or
    both: `S_t = (I - b_t k_t e_t^T) diag(a_t) S_{t-1} + b_t k_t v_t^T`, `b` then one where they give none. Without `e`
    it is stable for `b |k|^2` from 0 to 2: the eigenvalue along the key is `1 - b |k|^2`, and above 1 it changes the
    sign of what was there.
    Schlag et al. 2021, https://arxiv.org/abs/2102.11174; Yang et al. 2024, https://arxiv.org/abs/2406.06484.

    With `steps` above 1 a token has that many keys, values and strengths, as so many times the heads, and makes as many
    writes, one after the other: the memory decays before the first and is read after the last.
    Siems et al. 2025, https://arxiv.org/abs/2502.10297.
    """

    steps: int = 1

    def __call__(self, q: Queries, k: Keys, v: Values, terms: Terms, **core: Any) -> tuple[Heads, Memory]:
        strength = _strength(terms, k)
        if self.steps == 1:
            return cores.delta_rule(q, k, v, strength, terms.log_decay, erase=terms.erase, **core)
        b, t, n = *k.shape[:2], self.steps
        k, v, strength = (a.reshape(b, t * n, a.shape[2] // n, *a.shape[3:]) for a in (k, v, strength))
        erase = None if terms.erase is None else terms.erase.reshape(k.shape)
        segments = core['segments']
        core = core | {'segments': None if segments is None else jnp.repeat(segments, n, axis=1)}
        log_decay = None if terms.log_decay is None else _before_first(terms.log_decay, b, t, n)
        y, memory = cores.delta_rule(jnp.repeat(q, n, axis=1), k, v, strength, log_decay, erase=erase, **core)
        return y[:, n - 1 :: n], memory


@checked_fields
@dataclasses.dataclass(frozen=True)
class EarlyDelta(WriteRule):
    """Erases before it decays: `S_t = diag(a_t) S_{t-1} + b_t k_t (v_t - S_{t-1}^T e_t)^T`, `e` the key or one's own.

    The decay `a` is one where gates give none; they have to give the strength `b` or the erase key `e`, or both. The
    memory that is erased has not decayed, so that with decays the transition is no product of two: the eigenvalue along
    a key of length one is `a - b`, and with strengths above one what a memory holds for a token that repeats may grow.
    Hu et al. 2025, https://arxiv.org/abs/2506.02475.

    Raises `UserError` for gates whose `scale` is above 1 beside a decay.
    """

    def check_gates(self, gates: MemoryGates | None, *, decays: bool) -> None:
        super().check_gates(gates, decays=decays)
        scale = greatest_strength(gates)
        if decays and scale is not None and scale > 1:
            raise UserError(
                f'the scale of {type(gates).__name__} is {scale}; where EarlyDelta erases a memory that then decays, '
                'it must be at most 1'
            )

    def __call__(self, q: Queries, k: Keys, v: Values, terms: Terms, **core: Any) -> tuple[Heads, Memory]:
        strength = _strength(terms, k)[..., None]
        reads = _erased(strength, k if terms.erase is None else terms.erase).astype(k.dtype)
        return cores.diagonal_low_rank(q, k, strength.astype(v.dtype) * v, reads, None, terms.log_decay, **core)


@checked_fields
@dataclasses.dataclass(frozen=True)
class PreconditionedDelta(WriteRule):
    """Writes along keys that are scaled by how much their channels were used, and erases along the keys themselves:

        m_t = c_t m_{t-1} + d_t k_t^2        r = log(m_t + 1e-6) - level        p_t = base^(-r / (1 + |r|)) k_t
        S_t = (I - b_t p_t k_t^T) diag(a_t) S_{t-1} + b_t p_t v_t^T

    The decay `c`, the strength `d` and the level are those of the term `moment`, which gates have to give besides the
    strength `b`; the moment `m` of every channel is a column beside the memory. With keys of length one it is stable
    for `b * base` up to 2. "Preconditioned DeltaNet" 2026, https://arxiv.org/abs/2604.21100.

    Raises `UserError` for a `base` that is not from 1 to 2, and for `MomentGates` whose `scale` times it is above 2.
    """

    unread = ()
    base: float = 1.5

    def __post_init__(self) -> None:
        if not 1 <= self.base <= 2:
            raise UserError(f'the base of PreconditionedDelta is {self.base}; it must be from 1 to 2')

    def check_gates(self, gates: MemoryGates | None, *, decays: bool) -> None:
        if isinstance(gates, MomentGates) and gates.strength.scale * self.base > 2:
            raise UserError(
                f'the scale of MomentGates is {gates.strength.scale} and the base of PreconditionedDelta {self.base}; '
                f'their product must be at most 2'
            )

    @property
    def beside(self) -> int:
        return 1

    def __call__(
        self, q: Queries, k: Keys, v: Values, terms: Terms, **core: Any
    ) -> tuple[Heads, Float[Array, 'b h m u']]:
        if terms.moment is None:
            raise UserError('PreconditionedDelta needs a second moment of keys; give its mixer gates=MomentGates')
        state, (b, t, h, n) = core.pop('state', None), k.shape
        moment = terms.moment
        decay = jnp.broadcast_to(jnp.exp(moment.log_decay)[..., None], k.shape)
        moments, last = cores.linear_scan(
            _squared(moment.strength, k).reshape(b, t, h * n),
            decay.reshape(b, t, h * n),
            state=None if state is None else state[..., -1].reshape(b, h * n),
            segments=core.get('segments'),
            implementation=core.get('implementation'),
        )
        written = self._written(moments.reshape(k.shape), moment.level, k)
        memory = None if state is None else state[..., :-1]
        strength = _strength(terms, k)
        y, memory = cores.delta_rule(q, written, v, strength, terms.log_decay, erase=k, state=memory, **core)
        return y, jnp.concatenate([memory, last.reshape(b, h, n, 1).astype(memory.dtype)], axis=-1)

    @recomputed_method
    def _written(self, moments: Float[Array, 'b t h k'], level: Float[Array, ' h'], k: Keys) -> Keys:
        relative = jnp.log(moments + 1e-6) - level[None, None, :, None]
        factor = jnp.exp(-math.log(self.base) * relative / (1 + jnp.abs(relative)))
        return (factor * k.astype(moments.dtype)).astype(k.dtype)


@recomputed
def _squared(strength: Float[Array, 'b t h'], k: Keys) -> Float[Array, 'b t h k']:
    return strength[..., None] * jnp.square(k.astype(wide_dtype(k.dtype)))


@recomputed
def _erased(strength: Float[Array, 'b t h 1'], k: Keys) -> Keys:
    return -strength * k


def _strength(terms: Terms, k: Keys) -> Float[Array, 'b t h']:
    """Raises `UserError` where gates give neither a strength nor an erase key."""
    if terms.strength is not None:
        return terms.strength
    if terms.erase is None:
        raise UserError('the delta rule needs a write strength; give its mixer gates such as WriteStrength')
    return jnp.ones(k.shape[:3], k.dtype)


def _before_first(log_decay: Array, b: int, t: int, n: int) -> Float[Array, 'b s h *k']:
    """Log decays of the first of every `n` writes, zero at the others."""
    if log_decay.ndim == 1:
        log_decay = jnp.broadcast_to(log_decay, (b, t, *log_decay.shape))
    others = [(0, 0), (0, 0), (0, n - 1)] + [(0, 0)] * (log_decay.ndim - 2)
    return jnp.pad(log_decay[:, :, None], others).reshape(b, t * n, *log_decay.shape[2:])


def _weighted(v: Values, terms: Terms) -> Values:
    return v if terms.strength is None else terms.strength.astype(v.dtype)[..., None] * v
