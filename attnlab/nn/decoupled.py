"""The part of a head that is rotated by position when the rest is computed from a compressed latent.

Rotated channels cannot be compressed with the rest: the rotation comes between the latent and the product of
query and key. So a head is split in two, and the rotated keys are cached uncompressed.
"""

import dataclasses

import numpy as np
from jax import Array
from jaxtyping import Float, Int

from attnlab.errors import UserError
from attnlab.functional.precision import wide_dtype
from attnlab.functional.rotary import check_share, rotary_angles, rotate, rotate_by_angles
from attnlab.signature import checked_fields
from attnlab.typing import Positions


@checked_fields
@dataclasses.dataclass(frozen=True)
class DecoupledRope:
    """Additional rotated channels, `ratio` times as many as a head has; their key is shared by all heads.

    Pairs are neighbouring channels. DeepSeek-AI 2024, https://arxiv.org/abs/2405.04434.
    """

    base: float = 10000.0
    ratio: float = 0.5

    def split(self, channels: int) -> tuple[int, int]:
        """Returns the numbers of unrotated channels of a query or key, those of the head, and of rotated channels.

        Raises `UserError` for a ratio that is not positive.
        """
        if self.ratio <= 0:
            raise UserError(f'ratio is {self.ratio}; it must be above 0: additional channels per channel of a head')
        return channels, max(2, 2 * round(self.ratio * channels / 2))

    def keys(self, heads: int) -> int:
        """Returns the number of rotated keys of a token: one."""
        return 1

    def rotate(self, x: Float[Array, 'b t h k'], positions: Positions, channels: int) -> Float[Array, 'b t h k']:
        """Rotates `x`, the rotated channels of queries or keys, by position in the document."""
        return rotate(x, positions, base=self.base, interleaved=True)


@checked_fields
@dataclasses.dataclass(frozen=True)
class SharedKey:
    """Additional channels, `ratio` times as many as a head has, whose key is shared by all heads, as `DecoupledRope`'s.

    Nothing is rotated: the layers between tell positions. Kimi Team 2025, https://arxiv.org/abs/2510.26692.
    """

    ratio: float = 0.5

    def split(self, channels: int) -> tuple[int, int]:
        """Returns the numbers of channels of a query or key that are of its head, and that are shared."""
        return DecoupledRope(ratio=self.ratio).split(channels)

    def keys(self, heads: int) -> int:
        """Returns the number of shared keys of a token: one."""
        return 1

    def rotate(self, x: Float[Array, 'b t h k'], positions: Positions, channels: int) -> Float[Array, 'b t h k']:
        """Returns `x`."""
        return x


@checked_fields
@dataclasses.dataclass(frozen=True)
class EliteRope:
    """Keeps only a few of the rotary frequencies, chosen for every head.

    Pair `c` of a head with `n` channels is channels `c` and `c + n/2`, rotated at frequency
    `base^(-2 c / n)`. `chunks` are the rotated pairs, a tuple for every head; `None`: `fraction` of them, at
    least one, spread evenly from the first to the last, the same in every head.
    Zhou et al. 2025, https://arxiv.org/abs/2503.01586.
    """

    base: float = 10000.0
    fraction: float = 0.125
    chunks: tuple[tuple[int, ...], ...] | None = None

    def split(self, channels: int) -> tuple[int, int]:
        """Returns the numbers of unrotated and rotated channels of a query or key, which add up to those of the head.

        Raises `UserError` unless all heads rotate the same number of pairs, distinct and within range, for chunks of
        no head, and for a fraction that is not above 0 and at most 1.
        """
        if channels % 2:
            raise UserError(f'a head of {channels} channels cannot be rotated in pairs; it must have an even number')
        if self.chunks is None:
            check_share(self.fraction)
        elif not self.chunks:
            raise UserError('chunks are (); they must be a tuple of pairs for every head, or None for an even choice')
        pairs = channels // 2
        kept = max(1, round(self.fraction * pairs)) if self.chunks is None else len(self.chunks[0])
        for chunks in self.chunks or ():
            if len(set(chunks)) != kept or not set(chunks) <= set(range(pairs)):
                raise UserError(
                    f'chunks of a head are {chunks}; each must hold {kept} different ones from 0 to {pairs - 1}, '
                    'as many as every other head'
                )
        return channels - 2 * kept, 2 * kept

    def keys(self, heads: int) -> int:
        """Returns the number of rotated keys of a token: one for every head.

        Raises `UserError` unless there are chunks for `heads` heads.
        """
        if self.chunks is not None and len(self.chunks) != heads:
            raise UserError(f'chunks are given for {len(self.chunks)} heads; there are {heads}')
        return heads

    def table(self, heads: int, channels: int) -> Int[np.ndarray, 'h r']:
        """Returns the rotated pairs of each head."""
        if self.chunks is not None:
            return np.asarray(self.chunks, np.int32).reshape(heads, -1)
        kept = self.split(channels)[1] // 2
        return np.tile(np.linspace(0, channels // 2 - 1, kept).astype(np.int32), (heads, 1))

    def rotate(self, x: Float[Array, 'b t h k'], positions: Positions, channels: int) -> Float[Array, 'b t h k']:
        """Rotates `x`, the rotated channels of queries or keys, of heads with `channels` channels.

        The first channels of all pairs come first, then the second ones, in the order of `chunks`.
        """
        wide = wide_dtype(x.dtype)
        angles = rotary_angles(positions, channels, self.base, wide)
        return rotate_by_angles(x, angles[:, :, self.table(x.shape[2], channels)])
