"""Orders of the tokens of an image, against what the paper's figure and its released paths say of them."""

import numpy as np
import pytest

from attnlab.nn.orders import Raster, Snake

GRIDS = [(4, 4), (3, 5), (4, 3), (1, 4)]


@pytest.mark.parametrize('orders', [Raster(), Snake()], ids=['raster', 'snake'])
@pytest.mark.parametrize('grid', GRIDS, ids=str)
def test_every_order_has_every_token_once(orders, grid):
    found = orders.four(grid)
    assert len(found) == 4
    for order in found:
        assert sorted(order) == list(range(grid[0] * grid[1]))
    assert all((found[place] == found[place + 2][::-1]).all() for place in range(2))


@pytest.mark.parametrize('grid', GRIDS, ids=str)
def test_a_snake_goes_from_a_token_to_one_beside_it(grid):
    for order in Snake().four(grid):
        places = np.stack(np.unravel_index(order, grid), axis=-1)
        assert (np.abs(np.diff(places, axis=0)).sum(axis=1) == 1).all()


def test_snakes_of_an_even_square_start_where_the_paper_starts():
    rows, columns, rows_back, columns_back = Snake().four((4, 4))
    assert rows.tolist() == [0, 1, 2, 3, 7, 6, 5, 4, 8, 9, 10, 11, 15, 14, 13, 12]
    assert columns.tolist() == [12, 8, 4, 0, 1, 5, 9, 13, 14, 10, 6, 2, 3, 7, 11, 15]
    assert (rows_back[0], columns_back[0]) == (12, 15)
