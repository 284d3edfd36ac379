"""Which values a parameter takes."""

import pytest

from attnlab.config import build, spec
from attnlab.errors import UserError
from attnlab.module import Module


class Lagged(Module):
    """A class with whole numbers whose defaults are no sizes."""

    def __init__(self, dim: int, *, lag: int = 0, axis: int = -1, heads: int = 4):
        self.taken = dim, lag, axis, heads


def test_a_whole_number_may_be_what_its_default_is():
    assert Lagged(8, lag=0, axis=-1).taken == build(spec(Lagged))(8).taken == (8, 0, -1, 4)


@pytest.mark.parametrize(('given', 'least'), [({'lag': -1}, 0), ({'axis': -2}, -1), ({'heads': 0}, 1), ({'dim': 0}, 1)])
def test_below_it_nothing_is_taken(given, least):
    [(name, value)] = given.items()
    said = f'{value}; it must be a whole number of at least {least}$'
    with pytest.raises(UserError, match=f'^{name} of Lagged is {said}'):
        Lagged(**given)
    with pytest.raises(UserError, match=rf'^config\.{name} is {said}'):
        build(spec(Lagged, **given))
