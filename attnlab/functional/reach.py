"""Which keys a query may see: one definition for cores, full rows, caches, counts and penalties."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int, Shaped

import pallas_kernels
from attnlab.errors import UserError
from attnlab.typing import Positions, Segments


class Placed(NamedTuple):
    """The places of tokens in their stream, `t`, negative where there is none, and their documents, `b t`."""

    places: Int[Array, 't']
    segments: Segments


@dataclasses.dataclass(frozen=True)
class Reach:
    """Which keys queries see, by relative and absolute place.

    Raises `UserError` for a window below 1, or sinks without a window.

    Attributes:
      causal: whether a query sees no later key.
      window: how many keys it sees, its own included, and when not causal as many after it; `None`: all.
      sinks: how many of the first keys of the row it sees besides (Xiao et al. 2024, https://arxiv.org/abs/2309.17453).
    """

    causal: bool = True
    window: int | None = None
    sinks: int = 0

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise UserError(f'window is {self.window}; it counts the query itself, so it is at least 1')
        if self.sinks < 0:
            raise UserError(f'sinks is {self.sinks}; it counts keys, so it is at least 0')
        if self.sinks and self.window is None:
            raise UserError(f'sinks is {self.sinks} without a window: every key is seen already')

    @property
    def ring(self) -> int | None:
        """Slots of a cache that drops keys no later query sees; `None`: no key may be dropped."""
        return None if self.window is None else self.window + self.sinks

    def within(self, queries: Int[Array, 't'], keys: Int[Array, 's']) -> Bool[Array, 't s']:
        """Returns which keys each query sees, by their places in the stream, negative where there is none.

        With a window these are the keys less than `window` away, and the first `sinks` of the stream; under a
        causal mask none later than the query.
        """
        distance = queries[:, None] - keys[None, :]
        seen = (queries >= 0)[:, None] & (keys >= 0)[None, :]
        if self.causal:
            seen &= distance >= 0
        if self.window is not None:
            seen &= (jnp.abs(distance) < self.window) | (keys[None, :] < self.sinks)
        return seen

    def visible(self, queries: Placed, keys: Placed) -> Bool[Array, 'b t s']:
        """Returns which keys each query sees: those within reach and in its own document."""
        same = queries.segments[:, :, None] == keys.segments[:, None, :]
        return self.within(queries.places, keys.places)[None] & same

    def counts(self, positions: Positions, segments: Segments | None) -> Shaped[Array, 'b t']:
        """Returns how many keys each query of a call sees; when causal, from its position in the document."""
        if self.causal:
            return positions + 1 if self.ring is None else jnp.minimum(positions + 1, self.ring)
        counts = pallas_kernels.visible_counts(
            positions.shape[1], causal=False, window=self.window, sinks=self.sinks, segments=segments
        )
        return jnp.broadcast_to(counts[..., 0], positions.shape)

    def check_forgetting(self) -> None:
        """Raises `UserError` where forget gates are not defined."""
        if not self.causal:
            raise UserError('a forget gate needs causal attention: it sums what lies between a key and a later query')
        if self.sinks:
            raise UserError('sinks are there to stay, and a forget gate forgets them; give one of the two')

    def check_segments(self, segments: Segments | None) -> None:
        """Raises `UserError` for sinks together with segments."""
        if self.sinks and segments is not None:
            raise UserError(
                'attention with sinks takes no segments: sinks are the first keys of the row, not of a document'
            )
