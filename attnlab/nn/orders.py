"""Orders in which scans read the tokens of an image."""

import abc
import dataclasses

import numpy as np
from jaxtyping import Int

from attnlab.functional.grids import Grid, numbered

Order = Int[np.ndarray, ' t']


class Orders(abc.ABC):
    """Four orders of the tokens of an image: along rows, along columns, and the reverses of these."""

    @abc.abstractmethod
    def along(self, grid: Grid) -> tuple[Order, Order]:
        """Returns the order along rows, and that along columns."""

    def four(self, grid: Grid) -> list[Order]:
        """Returns all orders; each holds the number of the token that is read at every step."""
        two = self.along(grid)
        return [*two, *(order[::-1] for order in two)]


@dataclasses.dataclass(frozen=True)
class Raster(Orders):
    """Every row from the left, every column from the top. Liu et al. 2024, https://arxiv.org/abs/2401.10166."""

    def along(self, grid: Grid) -> tuple[Order, Order]:
        numbers = numbered(grid)
        return numbers.reshape(-1), numbers.T.reshape(-1)


@dataclasses.dataclass(frozen=True)
class Snake(Orders):
    """Rows and columns by turns there and back, so that tokens that follow one another are next to each other.

    The first row is read from the left, the first column from its bottom. On squares with an even number of tokens a
    side, the only grids of the released code, these are its orders. Fu, Chen and Yu 2024,
    https://arxiv.org/abs/2408.02615.
    """

    def along(self, grid: Grid) -> tuple[Order, Order]:
        rows, columns = numbered(grid), numbered(grid).T[:, ::-1]
        return _there_and_back(rows), _there_and_back(columns)


def _there_and_back(lines: Int[np.ndarray, 'y x']) -> Order:
    """Lines one after the other, every second one from its end."""
    turned = lines.copy()
    turned[1::2] = turned[1::2, ::-1]
    return turned.reshape(-1)
