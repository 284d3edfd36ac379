"""Gated linear attention both ways over an image, beside what is near in two dimensions."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional import cores
from attnlab.functional.grids import flatten, required_grid, unflatten
from attnlab.functional.precision import wide_dtype
from attnlab.functional.recomputed import recomputed
from attnlab.mixers.mixer import TwoSided
from attnlab.nn.convolutions import DepthwiseConv
from attnlab.nn.decays import fading
from attnlab.nn.heads import by_head, head_channels
from attnlab.nn.norms import RMSNorm
from attnlab.nn.projections import Linear
from attnlab.typing import Heads, Sequence


class VisionGatedLinearAttention(TwoSided):
    """Gated linear attention from both ends of the row of patches, with decays of its own each way, and a local branch.

        u = silu(conv(x))    q, k, v = u W_q, u W_k, u W_v    log a, log c = logsigmoid(u W_1 W_2 + e) / 16
        S_t = diag(a_t) S_{t-1} + k_t v_t^T    R_t = diag(c_t) R_{t+1} + k_t v_t^T
        o_t = (S_t + R_t)^T q_t / (2 sqrt(k))
        y = W_o silu(s norm(o) + (1 - s) norm(u))    s = sigmoid(u W_s + g)

    `conv` is depthwise, 3 x 3, without bias; queries and keys have half of the channels. Each norm is the root mean
    square of the channels of a head, with a gain of its own. A token reads itself whole and every other at half.
    Liao et al. 2024, https://arxiv.org/abs/2405.18425.

    Raises `UserError` for heads that do not divide `dim / 2`, for a temperature that is not positive, and without a
    grid of two axes.

    Args:
      dim: model width.
      heads: number of heads.
      rank: columns of `W_1`.
      temperature: by which logarithms of decays are divided.
      activated: whether there is a `silu` behind the convolution and before `W_o`; the larger models have none.
      implementation: of the core; `None`: the default of the platform.
      rngs: draws the parameters.
    """

    convolves = True

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        rank: int = 16,
        temperature: float = 16.0,
        activated: bool = True,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        if dim % 2:
            raise UserError(f'dim of VisionGatedLinearAttention is {dim}; it must be even: keys have half of it')
        if temperature <= 0:
            raise UserError(f'temperature of VisionGatedLinearAttention is {temperature}; it must be positive')
        self.heads, self.channels = heads, head_channels(dim, heads)
        head_channels(dim // 2, heads)
        self.temperature, self.activated, self.implementation = temperature, activated, implementation
        self.conv = DepthwiseConv(dim, bias=False, rngs=rngs)
        self.query, self.key = (Linear(dim, dim // 2, rngs=rngs) for _ in range(2))
        self.value = Linear(dim, dim, rngs=rngs)
        self.narrow = Linear(dim, rank, axes=('embed', None), rngs=rngs)
        self.decay = Linear(rank, dim, bias=True, axes=(None, 'heads'), rngs=rngs)
        self.share = Linear(dim, dim, bias=True, rngs=rngs)
        self.far, self.near = (RMSNorm(self.channels, rngs=rngs) for _ in range(2))
        self.output = Linear(dim, dim, axes=('heads', 'embed'), rngs=rngs)

    def __call__(self, x: Sequence, ctx: Context, state: None = None) -> tuple[Sequence, None]:
        grid = required_grid(ctx, type(self).__name__, axes=2)
        u = self._active(flatten(self.conv(unflatten(x, grid)), grid))
        q, k, v = (by_head(linear(u), self.heads) for linear in (self.query, self.key, self.value))
        decays = fading(self.decay(self.narrow(u)), self.temperature)
        forwards, backwards = (by_head(each, self.heads) for each in jnp.split(decays, 2, axis=-1))
        core: dict[str, Any] = {'implementation': self.implementation}
        past, _ = cores.linear_attention(q, k, v, forwards, **core)
        reversed_ = (jnp.flip(each, 1) for each in (q, k, v, backwards))
        future, _ = cores.linear_attention(*reversed_, **core)
        read = (past + jnp.flip(future, 1)) / 2
        y = _mixed(by_head(self.share(u), self.heads), self.far(read), self.near(by_head(u, self.heads)))
        return self.output(self._active(y.reshape(x.shape))), None

    def _active(self, x: Sequence) -> Sequence:
        return recomputed(jax.nn.silu)(x) if self.activated else x


@recomputed
def _mixed(logits: Heads, far: Heads, near: Heads) -> Heads:
    share = jax.nn.sigmoid(logits.astype(wide_dtype(logits.dtype))).astype(logits.dtype)
    return share * far + (1 - share) * near
