"""MesaNet: a linear map from keys to values, fitted to the past anew at every token."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Int

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional.precision import wide_dtype
from attnlab.functional.recomputed import recomputed_beside_products
from attnlab.functional.recurrences import carried, no_segment
from attnlab.functional.ridge import Regression, ridge_regression
from attnlab.mixers.mixer import Mixer
from attnlab.nn.decays import ForgetGate
from attnlab.nn.feature_maps import UnitNorm
from attnlab.nn.heads import by_head, head_channels
from attnlab.nn.norms import RMSNorm
from attnlab.nn.parameter import param
from attnlab.nn.preludes import Prelude, ShortConv, behind_preludes, preludes_for, states_of
from attnlab.nn.projections import Linear
from attnlab.typing import Heads, Sequence, State

LEAST = 0.25
"""The least ridge, which bounds how ill-conditioned what is solved can be."""


class MesaState(NamedTuple):
    """What a layer remembers of a stream.

    Attributes:
      regression: what keys have in common with each other and with values.
      convs: the states of the preludes of queries and of keys; empty without preludes.
      segment: the segment of the last token, `b`; -1 before the first.
    """

    regression: Regression
    convs: tuple[State, ...]
    segment: Int[Array, ' b']


class MesaNet(Mixer):
    """The layer of MesaNet, `y_t = W_o (g_t * norm(S_t^T (P_t + diag(l))^-1 q_t))`, of every head

        P_t = a_t P_{t-1} + b_t k_t k_t^T        S_t = a_t S_{t-1} + b_t k_t v_t^T

    with gates of the input, `a = sigmoid(W_a x + c)` and `b = sigmoid(W_b x + d)`. Queries and keys are of length one,
    after a prelude, short convolutions and SiLU; values are projected alone. The ridge `l` is learned for every channel
    of a key, at least 0.25 and 1 at first. The inverse is applied by conjugate gradients (`functional.ridge`).
    von Oswald et al. 2025, https://arxiv.org/abs/2506.05233.

    Raises `UserError` for heads that do not divide the width and an offset below zero.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        steps: int = 30,
        offset: float = 0.0,
        guess: bool = False,
        prelude: Callable[..., Prelude] | None = ShortConv,
        gate: Callable[..., nnx.Module] | None = None,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        """Makes the projections and the parts.

        Args:
          dim: model width.
          heads: each of `dim / heads` key and value channels.
          steps: of conjugate gradients.
          offset: what they add to denominators.
          guess: whether those of a single token of a stream begin at what the diagonal alone would give, not at zero.
          prelude: made as `prelude(dim, rngs=)`, one each for queries and keys; `None`: none.
          gate: made as `gate(dim, dim, rngs=)`; multiplies the read; `None`: no gate.
          implementation: of the core; `None`: the default of the platform.
          rngs: draws the parameters.
        """
        self.heads, self.channels = heads, head_channels(dim, heads)
        if offset < 0:
            raise UserError(f'offset of MesaNet is {offset}; it must be at least 0')
        self.steps, self.offset, self.guess, self.implementation = steps, offset, guess, implementation
        self.query, self.key, self.value = (Linear(dim, dim, rngs=rngs) for _ in range(3))
        self.convs = preludes_for(prelude, dim, dim, rngs=rngs)
        self.forget = ForgetGate(dim, heads=heads, rngs=rngs)
        self.strength = Linear(dim, heads, bias=True, rngs=rngs)
        start = nnx.initializers.constant(math.log(math.expm1(1 - LEAST)))
        shape, axes = (heads, self.channels), ('heads', None)
        self.ridge = param(start, shape, axes=axes, group='dynamics', rngs=rngs)
        self.norm = RMSNorm(self.channels, eps=1e-5, rngs=rngs)
        self.gate = None if gate is None else gate(dim, dim, rngs=rngs)
        self.output = Linear(dim, dim, axes=('heads', 'embed'), rngs=rngs)

    def __call__(self, x: Sequence, ctx: Context, state: MesaState | None = None) -> tuple[Sequence, MesaState | None]:
        wide, before = wide_dtype(x.dtype), None
        projected, convs = behind_preludes(
            self.convs, [self.query(x), self.key(x)], ctx.segments, None if state is None else state.convs
        )
        q, k = (UnitNorm().wide(by_head(y, self.heads)) for y in projected)
        if state is not None:
            segments = ctx.segments_or_ones()
            before = Regression(*(carried(each, segments, state.segment) for each in state.regression))
        read, regression = ridge_regression(
            q,
            k,
            by_head(self.value(x), self.heads),
            jax.nn.sigmoid(self.strength(x).astype(wide)),
            self.forget(x),
            jax.nn.softplus(self.ridge[...].astype(wide)) + LEAST,
            steps=self.steps,
            offset=self.offset,
            guess=self.guess,
            state=before,
            segments=ctx.segments,
            implementation=self.implementation,
        )
        if state is not None:
            state = MesaState(regression, convs, ctx.segments_or_ones()[:, -1])
        return self.output(recomputed_beside_products(lambda y: self._read(y, x))(read.astype(x.dtype))), state

    def _read(self, y: Heads, x: Sequence) -> Sequence:
        y = self.norm(y).reshape(x.shape)
        return y if self.gate is None else y * self.gate(x)

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> MesaState:
        """Returns an empty regression; its size does not depend on `length`."""
        shape = (batch, self.heads, self.channels, self.channels)
        keys, values = (jnp.zeros(shape, wide_dtype(dtype)) for _ in range(2))
        return MesaState(Regression(keys, values), states_of(self.convs, batch, dtype), no_segment(batch))
