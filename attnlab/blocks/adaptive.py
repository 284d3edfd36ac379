"""A block whose branches are told what a row is about: adaptive norms with gates."""

from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from attnlab.blocks.block import Block, Branch, BranchName, Norm
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.mixers.mixer import Mixer
from attnlab.nn.norms import RMSNorm
from attnlab.nn.preludes import Prelude
from attnlab.nn.projections import Linear
from attnlab.typing import Sequence

BRANCHES: tuple[BranchName, ...] = get_args(BranchName)


class AdaptiveBlock(Block):
    """A block whose branches are scaled, shifted and gated by the condition of a row.

        x += g * branch(norm(x) * (1 + a) + b),   (b, a, g) = silu(c) W + d for every branch, W and d starting at zero

    `c` is `ctx.condition`. At first no branch adds anything. Peebles and Xie 2023, "DiT",
    https://arxiv.org/abs/2212.09748; so the blocks of Fu, Chen and Yu 2024, "LaMamba-Diff",
    https://arxiv.org/abs/2408.02615.

    Arguments are those of `Block`. Raises `UserError` where the context has no condition, or one of another width.
    """

    def __init__(
        self,
        dim: int,
        *,
        mixer: Callable[..., Mixer],
        mlp: Callable[..., nnx.Module] | None = None,
        norm: Callable[..., nnx.Module] = RMSNorm,
        dropout: float = 0.0,
        mixer_prelude: Callable[..., Prelude] | None = None,
        mlp_prelude: Callable[..., Prelude] | None = None,
        rngs: nnx.Rngs,
    ):
        preludes = {'mixer_prelude': mixer_prelude, 'mlp_prelude': mlp_prelude}
        super().__init__(dim, mixer=mixer, mlp=mlp, norm=norm, dropout=dropout, **preludes, rngs=rngs)
        wanted, zeros = 3 * dim * (1 if mlp is None else 2), nnx.initializers.zeros
        self.told = Linear(dim, wanted, bias=True, initializer=zeros, axes=('embed', None), rngs=rngs)

    def around(self, name: BranchName, norm: Norm, run: Branch, ctx: Context) -> tuple[Norm, Branch]:
        """The norm, scaled and shifted, and the branch, times its gate."""
        shift, scale, gate = self._told(name, ctx)

        def adapted(x: Sequence) -> Sequence:
            y = norm(x)
            return y * (1 + scale.astype(y.dtype)) + shift.astype(y.dtype)

        def added(x: Sequence) -> tuple[Sequence, Any]:
            y, state = run(x)
            return y * gate.astype(y.dtype), state

        return adapted, added

    def _told(self, name: BranchName, ctx: Context) -> list[Array]:
        """Shift, scale and gate of a branch, `b 1 d` each."""
        if ctx.condition is None:
            raise UserError(
                'ctx.condition is None, and an AdaptiveBlock is told by it; use inputs that make one, such as '
                'ToldPatches (told=norms of configs/images.py)'
            )
        every = self.told(jax.nn.silu(ctx.condition))[:, None]
        return jnp.split(jnp.split(every, len(self.connections), axis=-1)[BRANCHES.index(name)], 3, axis=-1)
