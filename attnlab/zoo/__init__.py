"""Named recipes: which class, which parts, which paper. Everything that iterates over variants iterates over `ZOO`."""

from attnlab.zoo.convolution import CONVOLUTION
from attnlab.zoo.hybrids import HYBRIDS
from attnlab.zoo.linear import LINEAR
from attnlab.zoo.recipe import Recipe, merged
from attnlab.zoo.recurrent import RECURRENT
from attnlab.zoo.softmax import SOFTMAX
from attnlab.zoo.spatial import SPATIAL
from attnlab.zoo.state_space import STATE_SPACE

__all__ = ['ZOO', 'Recipe']

ZOO: dict[str, Recipe] = merged(SOFTMAX, LINEAR, STATE_SPACE, RECURRENT, CONVOLUTION, SPATIAL, HYBRIDS)
"""Every recipe by the name the literature has for it."""
