"""Maps from scores to weights in the place of the softmax, with sinks and temperatures, all in one attention class.

Where nothing else is said, positions are rotary, as in `mha`, so that rows of a comparison differ in one thing.
"""

from attnlab.config import spec
from attnlab.nn.dense_maps import AdaptiveEntmax, GumbelSoftmax, NoisySoftmax, StickBreaking
from attnlab.nn.sinks import LearnedSink
from attnlab.nn.temperatures import LogLength
from attnlab.zoo.softmax.row import attention_with
from pallas_kernels import (
    ClippedSoftmax,
    Entmax15,
    NormalisedSelfAdjustSoftmax,
    PowerSoftmax,
    Relu,
    SelfAdjustSoftmax,
    Sigmoid,
    Softpick,
    Sparsemax,
    StableMax,
    TaylorSoftmax,
)

MAPS = {
    'learned_sink': attention_with(
        'OpenAI 2025, https://arxiv.org/abs/2508.10925',
        'One score a head in the denominator, without a value; starts at 0, where it adds one (the "off-by-one" '
        'softmax). The paper gives no start.',
        sink=spec(LearnedSink),
    ),
    'sigmoid_attention': attention_with(
        'Ramapuram et al. 2025, https://arxiv.org/abs/2409.04431',
        'The bias is minus the logarithm of a training length of 1024, a constant as in the released code; set '
        '`weights.bias` for another length. Without LayerScale and the norm of the output.',
        weights=Sigmoid(bias=-6.9314718),
    ),
    'relu_attention': attention_with(
        'Wortsman et al. 2023, https://arxiv.org/abs/2309.08586',
        'Divided by the number of keys that the query sees; the paper, on images, divides by the length of the row. '
        'Without its norm of queries and keys, which is the part `qk_norm`.',
        weights=Relu(),
    ),
    'softpick': attention_with('Zuhri, Fuadi and Aji 2025, https://arxiv.org/abs/2504.20966', weights=Softpick()),
    'ssmax': attention_with(
        'Nakanishi 2025, https://arxiv.org/abs/2501.19399',
        'One learned scale a head, without weight decay; it starts such that the factor is one on average up to a '
        'length of 1024. The start in the paper was not found; re-implementations start at 0.43 or 1. Under a window '
        '`n` counts the window.',
        temperature=spec(LogLength),
    ),
    'ssmax_bias': attention_with(
        'Nakanishi 2025, https://arxiv.org/abs/2501.19399',
        'With the bias of the variant that trains best; at longer lengths it extrapolates worse than `ssmax`.',
        temperature=spec(LogLength, bias=True),
    ),
    'sa_softmax': attention_with(
        'Zheng et al. 2025, https://arxiv.org/abs/2502.18277',
        'The form without a denominator: weights have any sign and grow with the scores.',
        weights=SelfAdjustSoftmax(),
    ),
    'sa_softmax_normalised': attention_with(
        'Zheng et al. 2025, https://arxiv.org/abs/2502.18277',
        'The form divided by the span of the scores; gradients flow through both ends of it.',
        weights=NormalisedSelfAdjustSoftmax(),
    ),
    'power_softmax': attention_with(
        'Zimerman et al. 2024, https://arxiv.org/abs/2410.09457',
        'The fourth power, as in the language models of the paper. The map is even: a score far below zero weighs as '
        'much as one far above. Without the thousandth that the paper adds to the denominator, `weights.epsilon`, of '
        'which the core takes no gradient.',
        weights=PowerSoftmax(epsilon=0.0),
    ),
    'stablemax': attention_with(
        'Prieto et al. 2025, https://arxiv.org/abs/2501.04697',
        'The paper has it as the output of a classifier (`attnlab.losses`); here it is the map of attention.',
        weights=StableMax(),
    ),
    'taylor_softmax': attention_with(
        'de Brebisson and Vincent 2016, https://arxiv.org/abs/1511.05042',
        'Of second order, computed as it stands; attention of linear cost is another recipe.',
        weights=TaylorSoftmax(),
    ),
    'clipped_softmax': attention_with(
        'Bondarenko, Nagel and Blankevoort 2023, https://arxiv.org/abs/2306.12929',
        'gamma is -12 over a training length of 512, as for OPT in the paper; a constant, not a function of the '
        'length at hand.',
        weights=ClippedSoftmax(zeta=1.0, gamma=-12 / 512),
    ),
    'sparsemax': attention_with('Martins and Astudillo 2016, https://arxiv.org/abs/1602.02068', weights=Sparsemax()),
    'entmax15': attention_with(
        'Peters, Niculae and Martins 2019, https://arxiv.org/abs/1905.05702', weights=Entmax15()
    ),
    'adaptive_entmax': attention_with(
        'Correia, Niculae and Martins 2019, https://arxiv.org/abs/1909.00015',
        'alpha is one plus a sigmoid, as in the paper; in the released code the sigmoid is applied once, at the start '
        '(`weights.direct`). Holds whole rows.',
        claims={'implementations': (), 'sequence': False},
        weights=spec(AdaptiveEntmax),
    ),
    'gumbel_softmax': attention_with(
        'Jang, Gu and Poole 2017, https://arxiv.org/abs/1611.01144',
        'Draws in training, at a constant temperature of 1; the paper anneals it. Evaluated without noise. Holds whole '
        'rows.',
        claims={'implementations': (), 'sequence': False},
        weights=spec(GumbelSoftmax),
    ),
    'gumbel_softmax_hard': attention_with(
        'Jang, Gu and Poole 2017, https://arxiv.org/abs/1611.01144',
        'Straight-through: in training every query reads one key. Evaluated by the mean of the samples, the softmax.',
        claims={'implementations': (), 'sequence': False},
        weights=spec(GumbelSoftmax, hard=True),
    ),
    'noisy_softmax': attention_with(
        'Chen, Deng and Du 2017, https://arxiv.org/abs/1708.03769',
        'An extension: the paper lowers the logit of the label in a classifier; here it is the greatest score of a '
        'row, in training. Holds whole rows.',
        claims={'implementations': (), 'sequence': False},
        weights=spec(NoisySoftmax),
    ),
    'stick_breaking': attention_with(
        'Tan et al. 2024, https://arxiv.org/abs/2410.17980',
        'Without positions: weights go by order. What is left of the stick reads nothing; the paper also has a form '
        'that gives it to the own value: weights.remainder=true. Holds whole rows.',
        claims={'implementations': (), 'sequence': False, 'bidirectional': False},
        position=None,
        weights=spec(StickBreaking),
    ),
}
