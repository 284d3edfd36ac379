"""Maps from scores to weights in the place of the softmax, and what is put around it, all in one attention class.

Where nothing else is said, positions are rotary, as in `mha`, so that rows of a comparison differ in one thing.
"""

from typing import Any

from attnlab.config import spec
from attnlab.mixers.softmax.attention import Attention
from attnlab.nn.decays import ForgetGate
from attnlab.nn.dense_maps import AdaptiveEntmax, GumbelSoftmax, NoisySoftmax
from attnlab.nn.gates import ChannelGate, HeadGate, SliceGate, SliceMLPGate
from attnlab.nn.norms import HeadRMSNorm
from attnlab.nn.penalties import RowPenalty
from attnlab.nn.positions import Rope
from attnlab.nn.preludes import TokenShift
from attnlab.nn.reads import ShapedRead
from attnlab.nn.sinks import LearnedSink
from attnlab.nn.temperatures import LogLength, RootLength
from attnlab.zoo.recipe import Recipe
from pallas_kernels import (
    ClippedSoftmax,
    Entmax15,
    NormalisedSelfAdjustSoftmax,
    PowerSoftmax,
    Relu,
    SelfAdjustSoftmax,
    Sigmoid,
    Softmax,
    Softpick,
    Sparsemax,
    StableMax,
    TaylorSoftmax,
)


def _row(cite: str, notes: str = '', *, claims: dict[str, Any] | None = None, **parts: Any) -> Recipe:
    """Multi-head attention with rotary positions and these parts."""
    everything = {'causal': True, 'bidirectional': True, 'streaming': True, 'packed': True}
    return Recipe(
        spec=spec(Attention, **{'position': Rope(), **parts}), cite=cite, notes=notes, **(everything | (claims or {}))
    )


SOFTMAX = {
    'learned_sink': _row(
        'OpenAI 2025, https://arxiv.org/abs/2508.10925',
        'One score a head in the denominator, without a value; starts at 0, where it adds one (the "off-by-one" '
        'softmax). The paper gives no start.',
        sink=spec(LearnedSink),
    ),
    'sigmoid_attention': _row(
        'Ramapuram et al. 2025, https://arxiv.org/abs/2409.04431',
        'The bias is minus the logarithm of a training length of 1024, a constant as in the released code; set '
        '`weights.bias` for another length. Without LayerScale and the norm of the output.',
        weights=Sigmoid(bias=-6.9314718),
    ),
    'relu_attention': _row(
        'Wortsman et al. 2023, https://arxiv.org/abs/2309.08586',
        'Divided by the number of keys that the query sees; the paper, on images, divides by the length of the row. '
        'Without its norm of queries and keys, which is the part `qk_norm`.',
        weights=Relu(),
    ),
    'softpick': _row('Zuhri, Fuadi and Aji 2025, https://arxiv.org/abs/2504.20966', weights=Softpick()),
    'ssmax': _row(
        'Nakanishi 2025, https://arxiv.org/abs/2501.19399',
        'One learned scale a head, without weight decay; it starts such that the factor is one on average up to a '
        'length of 1024. The start in the paper was not found; re-implementations start at 0.43 or 1. Under a window '
        '`n` counts the window.',
        temperature=spec(LogLength),
    ),
    'ssmax_bias': _row(
        'Nakanishi 2025, https://arxiv.org/abs/2501.19399',
        'With the bias of the variant that trains best; at longer lengths it extrapolates worse than `ssmax`.',
        temperature=spec(LogLength, bias=True),
    ),
    'sa_softmax': _row(
        'Zheng et al. 2025, https://arxiv.org/abs/2502.18277',
        'The form without a denominator: weights have any sign and grow with the scores.',
        weights=SelfAdjustSoftmax(),
    ),
    'sa_softmax_normalised': _row(
        'Zheng et al. 2025, https://arxiv.org/abs/2502.18277',
        'The form divided by the span of the scores; gradients flow through both ends of it.',
        weights=NormalisedSelfAdjustSoftmax(),
    ),
    'power_softmax': _row(
        'Zimerman et al. 2024, https://arxiv.org/abs/2410.09457',
        'The fourth power, as in the language models of the paper. The map is even: a score far below zero weighs as '
        'much as one far above. Without the thousandth that the paper adds to the denominator, `weights.epsilon`, of '
        'which the core takes no gradient.',
        weights=PowerSoftmax(epsilon=0.0),
    ),
    'stablemax': _row(
        'Prieto et al. 2025, https://arxiv.org/abs/2501.04697',
        'The paper has it as the output of a classifier (`attnlab.losses`); here it is the map of attention.',
        weights=StableMax(),
    ),
    'taylor_softmax': _row(
        'de Brebisson and Vincent 2016, https://arxiv.org/abs/1511.05042',
        'Of second order, computed as it stands; attention of linear cost is another recipe.',
        weights=TaylorSoftmax(),
    ),
    'clipped_softmax': _row(
        'Bondarenko, Nagel and Blankevoort 2023, https://arxiv.org/abs/2306.12929',
        'gamma is -12 over a training length of 512, as for OPT in the paper; a constant, not a function of the '
        'length at hand.',
        weights=ClippedSoftmax(zeta=1.0, gamma=-12 / 512),
    ),
    'sparsemax': _row('Martins and Astudillo 2016, https://arxiv.org/abs/1602.02068', weights=Sparsemax()),
    'entmax15': _row('Peters, Niculae and Martins 2019, https://arxiv.org/abs/1905.05702', weights=Entmax15()),
    'adaptive_entmax': _row(
        'Correia, Niculae and Martins 2019, https://arxiv.org/abs/1909.00015',
        'alpha is one plus a sigmoid, as in the paper; in the released code the sigmoid is applied once, at the start '
        '(`weights.direct`). Holds whole rows.',
        claims={'implementations': ()},
        weights=spec(AdaptiveEntmax),
    ),
    'gumbel_softmax': _row(
        'Jang, Gu and Poole 2017, https://arxiv.org/abs/1611.01144',
        'Draws in training, at a constant temperature of 1; the paper anneals it. Evaluated without noise. Holds whole '
        'rows.',
        claims={'implementations': ()},
        weights=spec(GumbelSoftmax),
    ),
    'gumbel_softmax_hard': _row(
        'Jang, Gu and Poole 2017, https://arxiv.org/abs/1611.01144',
        'Straight-through: in training every query reads one key. Evaluated by the mean of the samples, the softmax.',
        claims={'implementations': ()},
        weights=spec(GumbelSoftmax, hard=True),
    ),
    'noisy_softmax': _row(
        'Chen, Deng and Du 2017, https://arxiv.org/abs/1708.03769',
        'An extension: the paper lowers the logit of the label in a classifier; here it is the greatest score of a '
        'row, in training. Holds whole rows.',
        claims={'implementations': ()},
        weights=spec(NoisySoftmax),
    ),
    'shaped_attention': _row(
        'Noci et al. 2023, https://arxiv.org/abs/2306.17759; He and Hofmann 2024, https://arxiv.org/abs/2311.01906',
        'The causal form with trainable gains of the second paper: all gains and, with them, every head start as the '
        'identity. The first has no residual branch beside it; the block here has.',
        read=spec(ShapedRead),
    ),
    'reluformer': _row(
        'Shen et al. 2023, https://arxiv.org/abs/2302.06461',
        'gamma is learned for every head and starts at 1. The two terms of the loss that the paper adds, with weight 1 '
        'each and a margin of 0.7 log n, as a re-implementation has them: the paper was read in summary only.',
        claims={'bidirectional': False},
        weights=Relu(),
        temperature=spec(RootLength),
        penalty=spec(RowPenalty),
    ),
    'soft_cap': _row(
        'Gemma team 2024, https://arxiv.org/abs/2408.00118',
        'Scores are bounded to 50, as in the paper.',
        weights=Softmax(soft_cap=50.0),
    ),
    'qk_norm': _row(
        'Henry et al. 2020, https://arxiv.org/abs/2010.04245; Gemma team 2025, https://arxiv.org/abs/2503.19786',
        'The root mean square norm of Gemma 3 and Qwen 3, one gain for all heads and the scale kept; the first paper '
        'has a norm of length one and a learned scale.',
        qk_norm=spec(HeadRMSNorm),
    ),
    'gated_attention': _row(
        'Bondarenko, Nagel and Blankevoort 2023, https://arxiv.org/abs/2306.12929',
        'The linear form: a gate for each head from its own share of the channels; it starts at 0.25, as for OPT.',
        gate=spec(SliceGate),
    ),
    'gated_attention_mlp': _row(
        'Bondarenko, Nagel and Blankevoort 2023, https://arxiv.org/abs/2306.12929',
        'The MLP form, as for BERT.',
        gate=spec(SliceMLPGate),
    ),
    'gated_attention_all_heads': _row(
        'Bondarenko, Nagel and Blankevoort 2023, https://arxiv.org/abs/2306.12929',
        'The form in which every gate sees all channels.',
        gate=spec(HeadGate),
    ),
    'forgetting': _row(
        'Lin et al. 2025, https://arxiv.org/abs/2503.02130',
        'Without positions, as in the paper, whose linear maps start with a standard deviation of 0.02; here with '
        'fan-in variance.',
        claims={'bidirectional': False},
        position=None,
        forget=spec(ForgetGate),
    ),
    'forgetting_pro': _row(
        'Lin et al. 2025, https://arxiv.org/abs/2503.02130',
        'The Pro block: shifted keys and values, norms of queries and keys, norm and gate of what heads have read. '
        'The paper makes the MLP narrower to pay for the gate; here it is that of every recipe.',
        claims={'bidirectional': False},
        position=None,
        forget=spec(ForgetGate),
        shift=spec(TokenShift),
        qk_norm=spec(HeadRMSNorm, apart=True, eps=1e-5),
        norm=spec(HeadRMSNorm, apart=True),
        gate=spec(ChannelGate),
    ),
    'rope_partial': _row(
        'Su et al. 2021, https://arxiv.org/abs/2104.09864; Black et al. 2022, https://arxiv.org/abs/2204.06745',
        'A quarter of the channels of every head is rotated, as in GPT-NeoX-20B.',
        position=Rope(fraction=0.25),
    ),
    'window_sinks': _row(
        'Xiao et al. 2024, https://arxiv.org/abs/2309.17453',
        'A window of 128 keys and the first 4 of the row. Positions are those of the text; the paper counts them '
        'inside the cache.',
        claims={'bidirectional': False, 'packed': False},
        window=128,
        sinks=4,
    ),
}
