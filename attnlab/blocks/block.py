"""One block for every mixer: a mixer and, unless the recipe has none, an MLP, each in a pre-norm residual branch."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from attnlab.context import Context
from attnlab.mixers.mixer import Mixer
from attnlab.nn.norms import RMSNorm
from attnlab.typing import Sequence, State


class Block(nnx.Module):
    """Residual pair of a sequence mixer and a channel mixer: `x += mixer(norm(x))`, then `x += mlp(norm(x))`.

    Args:
      dim: model width.
      mixer: makes the mixer, as `mixer(dim, rngs=rngs)`.
      mlp: makes the channel mixer, likewise; `None` leaves its branch out.
      norm: makes the norms.
      dropout: rate at which a branch's output is dropped in training.
    """

    def __init__(
        self,
        dim: int,
        *,
        mixer: Callable[..., Mixer],
        mlp: Callable[..., nnx.Module] | None = None,
        norm: Callable[..., nnx.Module] = RMSNorm,
        dropout: float = 0.0,
        rngs: nnx.Rngs,
    ):
        self.mixer_norm = norm(dim, rngs=rngs)
        self.mixer = mixer(dim, rngs=rngs)
        self.mlp_norm: Any = None if mlp is None else norm(dim, rngs=rngs)
        self.mlp: Any = None if mlp is None else mlp(dim, rngs=rngs)
        self.dropout = dropout

    def __call__(self, x: Sequence, ctx: Context, state: State | None = None) -> tuple[Sequence, State | None]:
        """Returns `(x, state)`, by the contract of a mixer."""
        y, state = self.mixer(self.mixer_norm(x), ctx, state)
        x = x + dropped(y, self.dropout, ctx.fold_in(0))
        if self.mlp is not None:
            x = x + dropped(self.mlp(self.mlp_norm(x)), self.dropout, ctx.fold_in(1))
        return x, state

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> State:
        """The mixer's state: nothing else in a block remembers."""
        return self.mixer.init_state(batch, length, dtype)


@dataclasses.dataclass(frozen=True)
class Stage:
    """A named intermediate value, for reports that must name where something happened."""

    name: str
    value: jax.Array


def mixer_of(block: nnx.Module) -> Any:
    """The mixer in a block; a class that is a whole residual block, and keeps the contract of a mixer, is its own."""
    return block.mixer if isinstance(block, Block) else block


def stages(block: Block | Mixer, x: Sequence, ctx: Context) -> list[Stage]:
    """The outputs of a block's parts in order, computed as the block computes them without dropout."""
    if not isinstance(block, Block):
        return [Stage('residual', block(x, ctx)[0])]
    normed = block.mixer_norm(x)
    y, _ = block.mixer(normed, ctx)
    x = x + y
    found = [Stage('mixer_norm', normed), Stage('mixer', y)]
    if block.mlp is not None:
        normed = block.mlp_norm(x)
        y = block.mlp(normed)
        found += [Stage('mlp_norm', normed), Stage('mlp', y)]
        x = x + y
    return [*found, Stage('residual', x)]


def dropped(x: Sequence, rate: float, ctx: Context) -> Sequence:
    """Inverted dropout: every element is zero with probability `rate`, the rest is scaled up by 1 / (1 - rate)."""
    if rate == 0.0 or ctx.deterministic:
        return x
    if ctx.dropout_key is None:
        raise ValueError('dropout wants a key: ctx.dropout_key is None and ctx.deterministic is False')
    keep = jax.random.bernoulli(ctx.dropout_key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))
