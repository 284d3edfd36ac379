"""The softmax family: attention, other maps and parts in it, and other reads."""

from attnlab.zoo.recipe import merged
from attnlab.zoo.softmax.baselines import BASELINES
from attnlab.zoo.softmax.blocks import BLOCKS
from attnlab.zoo.softmax.maps import MAPS
from attnlab.zoo.softmax.parts import PARTS
from attnlab.zoo.softmax.reads import READS
from attnlab.zoo.softmax.sparse import SPARSE
from attnlab.zoo.softmax.third_order import THIRD_ORDER
from attnlab.zoo.softmax.units import UNITS

SOFTMAX = merged(BASELINES, MAPS, PARTS, READS, THIRD_ORDER, BLOCKS, SPARSE, UNITS)
"""The recipes of the family, in the order of the tables."""
