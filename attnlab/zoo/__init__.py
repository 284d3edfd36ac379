"""Named recipes: which class, which parts, which paper. Everything that iterates over variants iterates over `ZOO`."""

from attnlab.zoo.attention import ATTENTION
from attnlab.zoo.recipe import Recipe

__all__ = ['ZOO', 'Recipe', 'merge']


def merge(*families: dict[str, Recipe]) -> dict[str, Recipe]:
    """Returns the rows of all families under their names. Raises ValueError when two of them share one."""
    rows = [row for family in families for row in family.items()]
    names = [name for name, _ in rows]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f'recipes named twice: {", ".join(twice)}')
    return dict(rows)


ZOO: dict[str, Recipe] = merge(ATTENTION)
"""Every recipe by the name the literature has for it."""
