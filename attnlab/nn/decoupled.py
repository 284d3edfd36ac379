"""Which part of a head is rotated by position, where all the rest is made from a compressed latent.

What is rotated cannot be compressed along with the rest: the rotation stands between the latent and the product of
query and key. So a head is split in two, and the rotated keys are kept as they are.
"""

import dataclasses

import numpy as np
from jax import Array
from jaxtyping import Float, Int

from attnlab.errors import UserError
from attnlab.functional.rotary import rotary_angles, rotate, turn
from attnlab.typing import Positions


@dataclasses.dataclass(frozen=True)
class DecoupledRope:
    """Rotated channels besides those of the head, `ratio` times as many, their key shared by all heads.

    Pairs are neighbouring channels. DeepSeek-AI 2024, https://arxiv.org/abs/2405.04434.
    """

    base: float = 10000.0
    ratio: float = 0.5

    def split(self, channels: int) -> tuple[int, int]:
        """Returns how many channels of a query or key are not rotated, all those of the head, and how many are."""
        return channels, max(2, 2 * round(self.ratio * channels / 2))

    def keys(self, heads: int) -> int:
        """Returns how many rotated keys a token has: one."""
        return 1

    def rotate(self, x: Float[Array, 'b t h k'], positions: Positions, channels: int) -> Float[Array, 'b t h k']:
        """Rotates the rotated channels of queries or keys, which alone are `x`, by their position in the document."""
        return rotate(x, positions, base=self.base, interleaved=True)


@dataclasses.dataclass(frozen=True)
class EliteRope:
    """Of the rotary frequencies of a head only a few are kept, a choice of its own for every head.

    Of a head with `n` channels pair `c` stands for channels `c` and `c + n/2`, rotated at frequency
    `base^(-2 c / n)`. `chunks` are the pairs that are rotated, a tuple for every head; `None`: `fraction` of them, at
    least one, spread evenly from the first to the last, the same in every head.
    Zhou et al. 2025, https://arxiv.org/abs/2503.01586.
    """

    base: float = 10000.0
    fraction: float = 0.125
    chunks: tuple[tuple[int, ...], ...] | None = None

    def split(self, channels: int) -> tuple[int, int]:
        """Returns how many channels of a query or key are not rotated, and how many are, together those of the head.

        Raises `UserError` unless every head rotates as many pairs, each one once, among those there are.
        """
        if channels % 2:
            raise UserError(f'a head of {channels} channels cannot be rotated in pairs; it wants an even number')
        pairs = channels // 2
        kept = max(1, round(self.fraction * pairs)) if self.chunks is None else len(self.chunks[0])
        for chunks in self.chunks or ():
            if len(set(chunks)) != kept or not set(chunks) <= set(range(pairs)):
                raise UserError(
                    f'chunks of a head are {chunks}; each wants {kept} different ones from 0 to {pairs - 1}, as many '
                    'as every other head'
                )
        return channels - 2 * kept, 2 * kept

    def keys(self, heads: int) -> int:
        """Returns how many rotated keys a token has: one for every head.

        Raises `UserError` unless there are chunks for so many heads.
        """
        if self.chunks is not None and len(self.chunks) != heads:
            raise UserError(f'chunks are given for {len(self.chunks)} heads; there are {heads}')
        return heads

    def table(self, heads: int, channels: int) -> Int[np.ndarray, 'h r']:
        """Returns the pairs that each of the heads rotates."""
        if self.chunks is not None:
            return np.asarray(self.chunks, np.int32).reshape(heads, -1)
        kept = self.split(channels)[1] // 2
        return np.tile(np.linspace(0, channels // 2 - 1, kept).astype(np.int32), (heads, 1))

    def rotate(self, x: Float[Array, 'b t h k'], positions: Positions, channels: int) -> Float[Array, 'b t h k']:
        """Rotates the rotated channels of queries or keys, which alone are `x`, of heads with so many `channels`.

        First stand the first channels of all pairs, then the second ones, in the order of `chunks`.
        """
        wide = np.promote_types(x.dtype, np.float32)
        angles = rotary_angles(positions, channels, self.base, wide)
        return turn(x, angles[:, :, self.table(x.shape[2], channels)])
