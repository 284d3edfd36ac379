"""The cores of sequence mixing: few, fused, differentiable. Needs JAX and nothing else."""

from pallas_kernels.arguments import checking_values
from pallas_kernels.attention.api import attention, visible_counts
from pallas_kernels.attention.maps import (
    AdaptiveSoftmax,
    ClippedSoftmax,
    Entmax,
    Entmax15,
    NormalisedSelfAdjustSoftmax,
    PowerSoftmax,
    Relu,
    ScalableSoftmax,
    SelfAdjustSoftmax,
    Sigmoid,
    Softmax,
    Softpick,
    Sparsemax,
    SquaredRelu,
    StableMax,
    TaylorSoftmax,
    WeightMap,
)
from pallas_kernels.attention.parts import Part, PartGradients, attention_part, attention_part_gradients
from pallas_kernels.cross_entropy.api import cross_entropy, cross_entropy_part
from pallas_kernels.delta_rule.api import delta_rule
from pallas_kernels.diagonal_low_rank.api import diagonal_low_rank
from pallas_kernels.linear_attention.api import linear_attention, linear_attention_rows
from pallas_kernels.linear_attention.sums import linear_attention_sums
from pallas_kernels.linear_scan.api import linear_scan
from pallas_kernels.long_conv.api import long_conv
from pallas_kernels.selective_scan.api import selective_scan
from pallas_kernels.short_conv.api import short_conv
from pallas_kernels.softmax.api import softmax
from pallas_kernels.softmax_topk.api import softmax_topk

__all__ = [
    'AdaptiveSoftmax',
    'ClippedSoftmax',
    'Entmax',
    'Entmax15',
    'NormalisedSelfAdjustSoftmax',
    'Part',
    'PartGradients',
    'PowerSoftmax',
    'Relu',
    'ScalableSoftmax',
    'SelfAdjustSoftmax',
    'Sigmoid',
    'Softmax',
    'Softpick',
    'Sparsemax',
    'SquaredRelu',
    'StableMax',
    'TaylorSoftmax',
    'WeightMap',
    'attention',
    'attention_part',
    'attention_part_gradients',
    'checking_values',
    'cross_entropy',
    'cross_entropy_part',
    'delta_rule',
    'diagonal_low_rank',
    'linear_attention',
    'linear_attention_rows',
    'linear_attention_sums',
    'linear_scan',
    'long_conv',
    'selective_scan',
    'short_conv',
    'softmax',
    'softmax_topk',
    'visible_counts',
]
