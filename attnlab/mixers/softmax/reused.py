"""Attention of a model that is called again and again on nearly the same tokens, as a sampler of images calls one."""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional.precision import wide_dtype
from attnlab.functional.reach import Reach
from attnlab.mixers.mixer import Mixer
from attnlab.mixers.softmax.attention import Attention
from attnlab.signature import checked_fields
from attnlab.typing import Sequence
from pallas_kernels import Softmax


@checked_fields
@dataclasses.dataclass(frozen=True)
class Reuse:
    """What attention keeps from one call to the next, and when it reads all keys.

    Call `n`, from 0, reads all keys where `n < first` or `every` divides `n`, and refreshes what is kept. Chen et al.
    2025, https://arxiv.org/abs/2505.22918; numbers are those of its released code for CogVideoX, of 50 calls.

    Attributes:
      share: of the tokens of a row, those that a query reads in the other calls, around its own place: to each side
        half of them, rounded down; 2 is all.
      first: calls before the first that reads few keys.
      every: calls from one that reads all keys to the next.
      drift: added to the kept mass after every call that reads few keys.
      kept: 'mass and residual', or for comparisons 'mass' alone, or 'nothing'.

    Raises `UserError` for a share out of range.
    """

    share: float = 0.03125
    first: int = 15
    every: int = 5
    drift: float = 0.04
    kept: Literal['mass and residual', 'mass', 'nothing'] = 'mass and residual'

    def __post_init__(self) -> None:
        if not 0 < self.share <= 2:
            raise UserError(f'share of Reuse is {self.share}; it must be above 0 and at most 2, which is all')

    def reach(self, length: int) -> Reach:
        """Which keys a query reads, in rows of `length` tokens, where it does not read all."""
        return Reach(causal=False, window=int(length * self.share) // 2 + 1)


class ReusedState(NamedTuple):
    """What attention keeps between calls.

    Attributes:
      calls: how many there have been.
      mass: the weight that keys near a query have of all, float32 or float64, `b t h`.
      residual: what the output lacked, `b t d`.
    """

    calls: Int[Array, '']
    mass: Float[Array, 'b t h']
    residual: Float[Array, 'b t d']


class ReusedAttention(Mixer):
    """Re-ttention: few keys are read, and what they lack of the softmax over all is remembered from a call before.

        all keys:  y = W_o o(x),   rho_i = sum_{j near i} p_ij,   R = y - W_o (rho o_near(x))
        few keys:  y = W_o (rho o_near(x)) + R,   then rho = rho + drift

    `o` is what heads read, `o_near` with a softmax over keys near the query (`Reuse`). The state goes from one call on
    the whole row to the next, such as the steps of a sampler, not along the row; without a state all keys are read, as
    the attention that it is made of does. The mass is not clipped, as in the released code, and is kept in float32 or
    better, which that has in half precision. Chen et al. 2025, https://arxiv.org/abs/2505.22918.

    Raises `UserError` for attention that is no softmax over all keys to both sides, and for one with a norm of what
    heads have read, which would undo the mass.

    Args:
      attention: the attention.
      reuse: what is kept.
    """

    def __init__(self, attention: Attention, reuse: Reuse):
        plain = attention.weights == Softmax() and attention.sink is None and attention.norm is None
        if not plain or attention.reach != Reach(causal=False):
            raise UserError(
                'reuse between calls is for softmax attention to all keys on both sides, without a sink and a norm of '
                'what heads have read; build it with causal=False'
            )
        self.attention: Any = attention
        self.reuse = reuse

    def __call__(
        self, x: Sequence, ctx: Context, state: ReusedState | None = None
    ) -> tuple[Sequence, ReusedState | None]:
        """Reads all keys, or few and what is kept; with a state returns what is kept then."""
        if state is None:
            return self.attention(x, ctx)
        whole = (state.calls < self.reuse.first) | (state.calls % self.reuse.every == 0)
        y, mass, residual = jax.lax.cond(whole, self._refreshed, self._recalled, x, ctx, state)
        return y, ReusedState(state.calls + 1, mass, residual)

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> ReusedState:
        """The state before the first call, on rows of `length` tokens."""
        heads, dim = self.attention.heads, self.attention.output.weight.shape[-1]
        mass = jnp.ones((batch, length, heads), wide_dtype(dtype))
        return ReusedState(jnp.int32(0), mass, jnp.zeros((batch, length, dim), dtype))

    def _refreshed(self, x: Sequence, ctx: Context, state: ReusedState) -> tuple[Array, Array, Array]:
        """The output with all keys, and what is kept from now on."""
        y, _ = self.attention(x, ctx)
        weights, _ = self.attention.read_weights(x, ctx)
        places = jnp.arange(x.shape[1], dtype=jnp.int32)
        near = self.reuse.reach(x.shape[1]).within(places, places)
        mass = jnp.sum(jnp.where(near[None, None], weights.astype(state.mass.dtype), 0), axis=-1)
        mass = jnp.moveaxis(mass, 1, 2)
        return y, mass, (y - self._few(x, ctx, mass)).astype(state.residual.dtype)

    def _recalled(self, x: Sequence, ctx: Context, state: ReusedState) -> tuple[Array, Array, Array]:
        """The output with few keys, and the mass after its drift."""
        y = self._few(x, ctx, state.mass)
        if self.reuse.kept == 'mass and residual':
            y = y + state.residual.astype(y.dtype)
        return y, state.mass + self.reuse.drift, state.residual

    def _few(self, x: Sequence, ctx: Context, mass: Float[Array, 'b t h']) -> Sequence:
        """The output with the keys near a query alone, their weights times the mass."""
        y = self.attention.read(x, ctx, self.reuse.reach(x.shape[1]))
        if self.reuse.kept != 'nothing':
            y = (y * mass[..., None]).astype(x.dtype)
        return self.attention.written(y, x)
