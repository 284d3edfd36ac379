"""Weight maps: how the scores of one query become the weights of its keys; `base` has what a map must provide."""

from pallas_kernels.attention.maps.base import Block, Reduce, Statistics, WeightMap
from pallas_kernels.attention.maps.pointwise import Relu, Sigmoid
from pallas_kernels.attention.maps.softmax import Softmax

__all__ = ['Block', 'Reduce', 'Relu', 'Sigmoid', 'Softmax', 'Statistics', 'WeightMap']
