"""A residual block that mixes no tokens: channel mixers alone, after one norm."""

from collections.abc import Callable, Iterator

from flax import nnx
from jax.typing import DTypeLike

from attnlab.blocks.block import PreNorm, Step, step
from attnlab.blocks.residual import Addition
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.nn.norms import LayerNorm
from attnlab.typing import Sequence, State


class MixerlessBlock(PreNorm):
    """Channel mixers one after the other, each a branch of what one norm gives: `x += f(norm(x))` for every `f`.

    `b t d` to `b t d`, every token by itself; nothing is remembered of a stream. With a `NormedGatedMLP` in the place
    of attention, and an `MLP` behind it or none, it is the block of Abdullah and Aydin 2024, "Activator",
    https://arxiv.org/abs/2405.15953, whose norm both branches share. Raises `UserError` without any network.

    Args:
      dim: model width.
      networks: each makes a channel mixer, as `network(dim, rngs=rngs)`.
      norm: makes the norm.
      rngs: draws the parameters.
    """

    def __init__(
        self,
        dim: int,
        *,
        networks: tuple[Callable[..., nnx.Module], ...],
        norm: Callable[..., nnx.Module] = LayerNorm,
        rngs: nnx.Rngs,
    ):
        if not networks:
            raise UserError('networks of MixerlessBlock is empty; it needs at least one')
        self.norm = norm(dim, rngs=rngs)
        self.networks = nnx.List([network(dim, rngs=rngs) for network in networks])

    def __call__(self, x: Sequence, ctx: Context, state: State | None = None) -> tuple[Sequence, State | None]:
        """Returns `(x, state)`, by the contract of a mixer."""
        *_, last = self.steps(x, ctx, state)
        return last.streams, state

    def steps(self, streams: Sequence, ctx: Context, state: State | None = None) -> Iterator[Step]:
        """Runs the networks one by one."""
        for index, network in enumerate(self.networks):
            name, branch = f'networks[{index}]', lambda x, network=network: (network(x), state)
            taken = step(name, streams, branch, norm=self.norm, connection=Addition(), ctx=ctx)
            yield taken
            streams = taken.streams

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> State:
        """Nothing."""
        del batch, length, dtype
        return ()
