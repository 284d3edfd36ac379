"""Weight maps: how the scores of one query become the weights of its keys; `base` has what a map must provide."""

from pallas_kernels.attention.maps.adaptive import AdaptiveSoftmax
from pallas_kernels.attention.maps.adjusted import NormalisedSelfAdjustSoftmax, SelfAdjustSoftmax
from pallas_kernels.attention.maps.base import Block, Reduce, Scaled, Statistics, WeightMap
from pallas_kernels.attention.maps.pointwise import Relu, Sigmoid, SquaredRelu
from pallas_kernels.attention.maps.ratios import PowerSoftmax, Softpick, StableMax, TaylorSoftmax
from pallas_kernels.attention.maps.softmax import ClippedSoftmax, ScalableSoftmax, Softmax
from pallas_kernels.attention.maps.sparse import Entmax, Entmax15, Sparsemax

__all__ = [
    'AdaptiveSoftmax',
    'Block',
    'ClippedSoftmax',
    'Entmax',
    'Entmax15',
    'NormalisedSelfAdjustSoftmax',
    'PowerSoftmax',
    'Reduce',
    'Relu',
    'ScalableSoftmax',
    'Scaled',
    'SelfAdjustSoftmax',
    'Sigmoid',
    'Softmax',
    'Softpick',
    'Sparsemax',
    'SquaredRelu',
    'StableMax',
    'Statistics',
    'TaylorSoftmax',
    'WeightMap',
]
