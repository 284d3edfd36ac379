"""Linear attention: memories of keys and values of a fixed size."""

import dataclasses

from attnlab.blocks.layer import MixersAlone
from attnlab.config import spec
from attnlab.functional.normalizers import FloorNormalizer, SumNormalizer
from attnlab.mixers.linear.agent import AgentAttention
from attnlab.mixers.linear.attention import LinearAttention
from attnlab.mixers.linear.fast_weights import FastWeights
from attnlab.mixers.linear.hashed import HashedAttention
from attnlab.mixers.linear.inline import InLine
from attnlab.mixers.linear.lizard import Lizard
from attnlab.mixers.linear.mesa import MesaNet
from attnlab.mixers.linear.mixed_chunk import MixedChunkAttention
from attnlab.mixers.linear.mlstm import MLSTM
from attnlab.mixers.linear.mlstm_block import MLSTMBlock
from attnlab.mixers.linear.norm_lin import NormLin
from attnlab.mixers.linear.rwkv6 import RWKV6
from attnlab.mixers.linear.rwkv7 import RWKV7
from attnlab.mixers.linear.slots import GatedSlots
from attnlab.mixers.linear.softmax_free import SoftmaxFreeAttention
from attnlab.mixers.linear.write import Delta, EarlyDelta, PreconditionedDelta
from attnlab.nn.decays import LowRankDecay, LowRankStepDecay, RetentionDecay, SlopeDecay, StepDecay
from attnlab.nn.fast_weights import AverageDescent, MomentumDescent, NormedResidual, SquaredError
from attnlab.nn.feature_maps import (
    CorrectedUnitNorm,
    CosFormer,
    EluPlusOne,
    Hedgehog,
    NormAware,
    PositiveRandomFeatures,
    SiluQueries,
    UnitNorm,
    UnitTaylor,
)
from attnlab.nn.gates import (
    ChannelStrengths,
    LowRankGate,
    MomentGates,
    OutputGate,
    PartialErase,
    RoutedGates,
    TiedKeys,
    WriteStrength,
)
from attnlab.nn.hashing import Clipped
from attnlab.nn.initialization import Initialization, Scaled
from attnlab.nn.levels import LevelWeights
from attnlab.nn.norms import HeadRMSNorm, LayerNorm, RMSNorm, SimpleRMSNorm
from attnlab.nn.positions import Rope
from attnlab.nn.preludes import Activation, ShortConv
from attnlab.zoo.recipe import (
    LOG_LINEAR,
    NARROW,
    NARROW_THROUGHOUT,
    PYTORCH,
    RWKV,
    UNTOUCHED,
    UNTOUCHED_SCALED,
    Recipe,
    Start,
    depth_below,
)

LINEAR = {
    'linear_transformer': Recipe(
        spec=spec(LinearAttention, feature_map=EluPlusOne(), normalizer=SumNormalizer(), scale=1.0, bias=True),
        cite='Katharopoulos et al. 2020, https://arxiv.org/abs/2006.16236',
        causal=True,
        bidirectional=True,
        mirrored=True,
        streaming=True,
        packed=True,
        sequence=True,
        notes=(
            'The denominator is offset by 1e-6, as in the released code; the paper has no offset: '
            'normalizer=SumNormalizer(eps=0.0). init=paper leaves '
            'the linear maps as PyTorch makes them, as the released code does.'
        ),
        start=UNTOUCHED,
    ),
    'retnet': Recipe(
        spec=spec(
            LinearAttention,
            decay=spec(RetentionDecay),
            position=Rope(),
            value_ratio=2.0,
            norm=spec(RMSNorm, eps=1e-5),
            gate=spec(OutputGate),
        ),
        cite='Sun et al. 2023, https://arxiv.org/abs/2307.08621',
        causal=True,
        bidirectional=True,
        streaming=True,
        packed=True,
        sequence=True,
        notes=(
            'Frequencies and pairs of channels as in rotary attention; the released code spaces the exponents of the '
            'frequencies to 1 inclusive and pairs neighbours: position=NeighbourRope(). The row scalings of the paper '
            'cancel in the norm and are left out; the norm has a gain. To equal attention in parameters the paper '
            'halves the channel mixer. init=paper draws queries, keys, values and gate five times less spread than the '
            'output map, as the released code did until it halved the latter; here the maps of the channel mixer are '
            'drawn so too, there as PyTorch makes them.'
        ),
        start=Start(
            maps=Initialization(
                linear=Scaled(gain=2**-5, mode='fan_avg', distribution='uniform'),
                output=Scaled(mode='fan_avg', distribution='uniform'),
            )
        ),
    ),
    'gla': Recipe(
        spec=spec(
            LinearAttention,
            decay=spec(LowRankDecay),
            key_ratio=0.5,
            norm=spec(RMSNorm, eps=1e-5),
            gate=spec(OutputGate),
        ),
        cite='Yang et al. 2024, https://arxiv.org/abs/2312.06635',
        causal=True,
        bidirectional=True,
        mirrored=True,
        streaming=True,
        packed=True,
        sequence=True,
        smallest_state=128,
        notes=(
            'RMSNorm on heads and no bias in the gate, as in the released code; the paper writes LayerNorm and a bias: '
            'norm=LayerNorm, gate.bias=true. The paper has four heads, and is causal only. init=paper starts all '
            'linear maps with a standard deviation of 0.02, as the released code does now.'
        ),
        start=NARROW,
    ),
    'cosformer': Recipe(
        spec=spec(LinearAttention, feature_map=CosFormer(), normalizer=FloorNormalizer(), scale=1.0, bias=True),
        cite='Qin et al. 2022, https://arxiv.org/abs/2202.08791',
        causal=True,
        bidirectional=True,
        mirrored=True,
        streaming=True,
        packed=True,
        sequence=True,
        notes=(
            'Distances are measured by feature_map.span, a number of tokens, where the paper has the length of the '
            'sequence: no prefix depends on what follows it. Tokens beyond it in their document give NaN, as weights '
            'would be negative; read both ways, all of such a document do. init=paper leaves the linear maps as '
            'PyTorch makes them, as the released code does.'
        ),
        start=UNTOUCHED,
    ),
    'taylorshift': Recipe(
        spec=spec(
            LinearAttention,
            key_dim=16,
            feature_map=spec(UnitTaylor),
            normalizer=SumNormalizer(eps=0.0),
            scale=1.0,
            bias=True,
        ),
        cite='Nauen, Palacio and Dengel 2024, https://arxiv.org/abs/2403.02920',
        causal=True,
        bidirectional=True,
        mirrored=True,
        streaming=True,
        packed=True,
        sequence=True,
        notes=(
            'The efficient form, also where the direct one would take fewer operations: up to about as many tokens as '
            'the square of the channels of a head. Reads are not multiplied by the root of tokens over channels, which '
            'the models of the paper do: growth=RootGrowth(), with the channels of a value and, where causal, the '
            'tokens up to the query. The paper is bidirectional only. Keys have 16 channels a head: features grow with '
            'their square. init=paper starts linear maps with a standard deviation of 0.02, as timm, on which the '
            'released code stands.'
        ),
        small={'key_dim': 6},
        start=NARROW,
    ),
    'hedgehog': Recipe(
        spec=spec(
            LinearAttention, feature_map=spec(Hedgehog, bias=True), normalizer=SumNormalizer(eps=1e-12), scale=1.0
        ),
        cite='Zhang et al. 2024, https://arxiv.org/abs/2402.04347',
        causal=True,
        bidirectional=True,
        mirrored=True,
        streaming=True,
        packed=True,
        sequence=True,
        notes=(
            'Trained from scratch, with a softmax of features and one of their negatives, as in the later code of the '
            'authors, LoLCATs, whose maps have no biases. The paper defines exponentials in the place of both: '
            'feature_map=SignedExponentials, which has no biases. In flash-linear-attention one map, with biases as '
            'here, serves all heads, and features and negatives are doubled and have one softmax together: '
            'feature_map=JointHedgehog; its layer divides by a norm of heads, not by sums of weights: normalizer=None, '
            'norm=RMSNorm with eps=1e-5, scale=None. The paper also converts trained softmax attention, by '
            'distillation of its weights.'
        ),
    ),
    'ecoformer': Recipe(
        spec=spec(HashedAttention, bias=True),
        cite='Liu et al. 2022, https://arxiv.org/abs/2209.09004',
        causal=True,
        bidirectional=True,
        mirrored=True,
        streaming=True,
        packed=True,
        small={'bits': 8, 'anchors': 9},
        knobs={'heads': 'heads', 'state': 'bits'},
        surrogate={'codes': spec(Clipped)},
        notes=(
            'Codes of 16 bits from kernels of 25 anchors. Training fits the hash before its first step, to rows of '
            'training, once; models of several stacks, such as layout=pyramid, and other uses of a model that was not '
            'trained have a random hash. The paper fits it at the '
            'first batch of a model whose attention was trained before: config.start copies parameters from such a '
            'run. The spread of the kernel is that of the fit, so that tokens are coded one by one; the released code '
            'has that of the row at hand: spread=document, with causal=False. The causal form is ours. Every key '
            'weighs bits + 1 more than the product of codes; the code adds that to denominators for every key, and to '
            'numerators for the own value alone: shift=own. Signs and sums are multiplied as other numbers are: no '
            'kernel makes use of bits. Gradients of codes are straight through.'
        ),
    ),
    'nalaformer': Recipe(
        spec=spec(
            LinearAttention,
            feature_map=NormAware(),
            normalizer=SumNormalizer(),
            scale=1.0,
            joint_norm=spec(LayerNorm),
            gate=spec(OutputGate, bias=True),
            bias=True,
        ),
        cite='Meng et al. 2025, https://arxiv.org/abs/2506.21137',
        causal=True,
        bidirectional=True,
        mirrored=True,
        streaming=True,
        packed=True,
        sequence=True,
        notes=(
            'Features as in the released code: positive and negative parts, where the first version of the paper has '
            'cosines and sines. Sums of weights are offset by 1e-6; in the code their means are. Without the rotation '
            'by place of what is summed, but not of the weights it is divided by, which on one axis '
            'turn=NeighbourRope(parts=2) has, and without the convolution of values, which is that of images: '
            'nalaformer_2d. Keys, queries, values and gate are separate maps. init=paper leaves linear maps as PyTorch '
            'makes them, as the released code does.'
        ),
        start=UNTOUCHED,
    ),
    'inline': Recipe(
        spec=spec(InLine),
        cite='Han et al. 2024, https://arxiv.org/abs/2412.06590',
        bidirectional=True,
        packed=True,
        notes=(
            'Bidirectional, as in the paper. Of the local residual, 3 x 3 in images, the form in one dimension: three '
            'neighbours. Queries and keys are not mapped, the default of the released code; feature_map= maps them. '
            'init=paper starts linear maps with a standard deviation of 0.02, as the released code does, but not those '
            'that make the factors of the residual.'
        ),
        knobs={'heads': 'heads'},
        start=NARROW,
    ),
    'agent': Recipe(
        spec=spec(AgentAttention),
        cite='Han et al. 2024, https://arxiv.org/abs/2312.08874',
        bidirectional=True,
        packed=True,
        slow=True,
        implementations=(),
        notes=(
            'Bidirectional, as in the paper. Agents are means of the queries of as many stretches of the document; in '
            'images, of a square. Of the biases by place the coarse ones, resized to the document, seven values in one '
            'dimension; those of rows and columns are left out. A row has one document, besides padding; documents= '
            'says how many more. init=paper starts linear maps with a standard deviation of 0.02, as the released code '
            'does.'
        ),
        small={'agents': 4, 'documents': 4},
        knobs={'heads': 'heads'},
        start=NARROW,
    ),
    'norm_lin': Recipe(
        spec=spec(NormLin),
        cite='Yue et al. 2025, https://arxiv.org/abs/2505.08550',
        bidirectional=True,
        packed=True,
        slow=True,
        implementations=(),
        notes=(
            'The mixer of OLinear, there between the variates of a panel of series; here between places, of which '
            'length= says how many. A shorter document has the first rows and columns, whose rows are made to sum to '
            'one again. One matrix for all channels; no dropout of weights. The block is that of other recipes. A row '
            'has one document, besides padding; documents= says how many more. init=paper leaves linear maps as '
            'PyTorch makes them, as the released code does.'
        ),
        small={'length': 160, 'documents': 4},
        knobs={},
        start=UNTOUCHED,
    ),
    'soft': Recipe(
        spec=spec(SoftmaxFreeAttention),
        cite='Lu et al. 2021, https://arxiv.org/abs/2110.11945',
        bidirectional=True,
        packed=True,
        slow=True,
        implementations=(),
        notes=(
            'Bidirectional, as in the paper. Landmarks and the convolution of values in one dimension, of 16 and 5 '
            'tokens, as in the second stage of the models of images; one landmark a stride, the last of what is left. '
            'Newton steps as in the released code: 20, a ridge of 0.01, gradients of the inverse itself. The block is '
            'that of other recipes. A row has one document, besides padding; documents= says how many more. init=paper '
            'starts linear maps with a standard deviation of 0.02, as the released code does.'
        ),
        small={'stride': 4, 'documents': 4},
        knobs={'heads': 'heads'},
        start=NARROW,
    ),
    'soft_plus': Recipe(
        spec=spec(SoftmaxFreeAttention, normalised=True),
        cite='Lu et al. 2024, https://arxiv.org/abs/2207.03341',
        bidirectional=True,
        packed=True,
        slow=True,
        implementations=(),
        notes=(
            'SOFT++: soft whose inverse is divided by the roots of the row sums of the kernel of landmarks. That '
            'inverse is computed as in soft, with its ridge; the released code has none there, halves a longer first '
            'step while it is too long, and differentiates the iterations: ridge=0, newton=BacktrackedStep(), which '
            'does so for every document, not for the whole batch. init=paper is that of `soft`.'
        ),
        small={'stride': 4, 'documents': 4},
        knobs={'heads': 'heads'},
        start=NARROW,
    ),
    'performer': Recipe(
        spec=spec(
            LinearAttention,
            feature_map=spec(PositiveRandomFeatures, eps=1e-6, redraw=1000),
            normalizer=SumNormalizer(eps=1e-12),
            scale=1.0,
            bias=True,
        ),
        cite='Choromanski et al. 2021, https://arxiv.org/abs/2009.14794',
        causal=True,
        bidirectional=True,
        mirrored=True,
        streaming=True,
        packed=True,
        sequence=True,
        notes=(
            'Features are drawn anew every thousand steps of training (feature_map.redraw); the paper names no number. '
            'An evaluation or a checkpoint soon after a draw has features that parameters have not been trained with. '
            'There are channels times their logarithm of them, as in a port that is widely used; the released code has '
            '256: feature_map.count. '
            'Keys are not scaled by the largest feature of the sequence, which a causal model must not know.'
        ),
    ),
    'lightning': Recipe(
        spec=spec(
            LinearAttention,
            prelude=spec(Activation),
            decay=spec(SlopeDecay),
            scale=1.0,
            joint_norm=spec(SimpleRMSNorm),
            gate=spec(LowRankGate, bias=False),
        ),
        cite='Qin et al. 2024, https://arxiv.org/abs/2401.04658',
        causal=True,
        bidirectional=True,
        mirrored=True,
        streaming=True,
        packed=True,
        sequence=True,
        notes=(
            'The mixer of TransNormerLLM (Qin et al. 2023, https://arxiv.org/abs/2307.14995) in its first layer, in '
            'the form released with the kernels (https://arxiv.org/abs/2405.17381): SiLU of values too, a gate through '
            'a bottleneck; the first code had neither, a gate of one linear map, and rotated the first layer. There '
            'decays weaken with depth, as with init=paper; else they are those of the first layer in all, and '
            'decay.depth says how far down a layer is. The rank of the gate is a sixteenth of the width; the paper has '
            'the channels of a head: gate.rank. The norm is without a gain, as in the paper; released with the kernels '
            'is LayerNorm: joint_norm=LayerNorm. init=paper starts linear maps with a standard deviation of 0.02, as '
            'the first code did.'
        ),
        start=Start(maps=NARROW.maps, by_layer={'decay.depth': depth_below}),
    ),
    'hgrn2': Recipe(
        spec=spec(LinearAttention, feature_map=SiluQueries(), gates=spec(TiedKeys), joint_norm=spec(RMSNorm, eps=1e-5)),
        cite='Qin et al. 2024, https://arxiv.org/abs/2404.07904',
        causal=True,
        bidirectional=True,
        mirrored=True,
        streaming=True,
        packed=True,
        sequence=True,
        smallest_state=128,
        notes=(
            'The lower bound of the forget gate is zero, as in the first layer of the paper. init=paper learns one for '
            'every layer and channel as the paper does, which increases with depth (gates.bound=learned), and '
            'starts linear maps with a standard deviation of 0.02, as the released code does. The paper has heads of '
            '128 channels.'
        ),
        start=Start(maps=NARROW.maps, arguments={'gates.bound': 'learned'}),
    ),
    'gsa': Recipe(
        spec=spec(GatedSlots),
        cite='Zhang et al. 2024, https://arxiv.org/abs/2409.07146',
        causal=True,
        streaming=True,
        packed=True,
        slow=True,
        sequence=True,
        implementations=('reference', 'xla'),
        smallest_state=64,
        notes=(
            'Two passes of linear attention; scores of slots are plain JAX, and kernels read their values. 64 slots '
            'and four heads in the paper. init=paper starts linear maps with a standard deviation of 0.02, as the '
            'released code does.'
        ),
        small={'slots': 6},
        knobs={'heads': 'heads', 'state': 'slots'},
        start=NARROW,
    ),
    'raven': Recipe(
        spec=spec(GatedSlots, gates=spec(RoutedGates), key_norm=spec(HeadRMSNorm, eps=1e-5)),
        cite='"Raven" 2026, https://github.com/goombalab/raven',
        causal=True,
        streaming=True,
        packed=True,
        slow=True,
        sequence=True,
        implementations=('reference', 'xla'),
        notes=(
            'gsa whose tokens change 32 of the 64 slots of a head, by gates.chosen, and leave the others bit for bit '
            'as they were. The weights of the chosen add up to one, so that each fades by a thirty-second of the step '
            'of the head; the text has a factor there, one in the code and in small models. Gumbel noise on the router '
            'in training alone: gates.noise. The released code offers the decay of gsa in place of that of Mamba-2, '
            'gates.decay=ChannelDecay, weights that are a softmax over all slots, gates.scores=softmax, an output gate '
            'behind a norm of every head, gate=OutputGate, and rotated keys, position=Rope(). It has a bias of the '
            'router for the choice alone too, which is left out, since nothing there trains it, and a router of two '
            'maps. init=paper starts linear maps with a standard deviation of 0.02, as flash-linear-attention does.'
        ),
        small={'slots': 6, 'gates': spec(RoutedGates, chosen=3)},
        knobs={'heads': 'heads', 'state': 'slots'},
        smallest_state=64,
        start=NARROW,
    ),
    'lizard': Recipe(
        spec=spec(Lizard),
        cite='Nguyen et al. 2025, https://arxiv.org/abs/2507.09025',
        causal=True,
        streaming=True,
        packed=True,
        slow=True,
        notes=(
            'Trained from scratch; the paper makes it of trained softmax attention, by distillation. It prints the '
            'logits of the tokens without a value where their exponentials are meant. Not said there, and chosen here: '
            'gates and those logits for every head, one factor of the window for all, 1 at first, and no rotation in '
            'the window (position=Rope() has it).'
        ),
        small={'metas': 2},
        knobs={'heads': 'heads'},
    ),
    'flash': Recipe(
        spec=spec(MixedChunkAttention, bias=True),
        cite='Hua et al. 2022, https://arxiv.org/abs/2202.10447',
        causal=True,
        streaming=True,
        packed=True,
        slow=True,
        layer=MixersAlone(),
        # With these channels squared ReLUs of every pair are above zero in most draws of the contract.
        small={'key_dim': 10, 'chunk': 4},
        knobs={'state': 'key_dim'},
        notes=(
            'gau in chunks of 256 tokens, counted from the first of a document, linear across chunks. Products are '
            'divided by the tokens of a chunk, those across chunks too, as in a port that is widely used; no code was '
            'released. Positions are rotary, and the relative bias of a chunk is in offsets, as in gau; causal only. '
            'The paper is named for it (FLASH), and has two units in the place of a layer.'
        ),
    ),
    'delta_net': Recipe(
        spec=spec(
            LinearAttention,
            prelude=spec(ShortConv),
            feature_map=UnitNorm(),
            gates=spec(WriteStrength),
            write=Delta(),
            norm=spec(RMSNorm, eps=1e-5),
        ),
        cite='Yang et al. 2024, https://arxiv.org/abs/2406.06484',
        causal=True,
        streaming=True,
        packed=True,
        sequence=True,
        notes=(
            'Keys and queries of length one, after a convolution and SiLU; the rule of Schlag et al. 2021, '
            'https://arxiv.org/abs/2102.11174, divides positive features by their sum: feature_map=SumNorm(). '
            'Eigenvalues below zero: gates.scale=2. No output gate, which the released code offers: gate=OutputGate. '
            'init=paper starts linear maps and convolutions with a standard deviation of 0.02, as that code does.'
        ),
        start=NARROW_THROUGHOUT,
    ),
    'gated_delta_net': Recipe(
        spec=spec(
            LinearAttention,
            key_ratio=0.75,
            value_ratio=1.5,
            prelude=spec(ShortConv),
            feature_map=UnitNorm(),
            decay=spec(StepDecay),
            gates=spec(WriteStrength),
            write=Delta(),
            norm=spec(RMSNorm, eps=1e-5),
            gate=spec(OutputGate),
        ),
        cite='Yang et al. 2025, https://arxiv.org/abs/2412.06464',
        causal=True,
        streaming=True,
        packed=True,
        sequence=True,
        smallest_state=256,
        notes=(
            'Values twice as wide as keys, as in the paper. Eigenvalues below zero: gates.scale=2. The strength of '
            'writes has a bias in the code of the authors, which gates.bias=true gives, none here and in '
            'flash-linear-attention. init=paper leaves '
            'linear maps as PyTorch makes them, the last ones of channel mixers over the root of the branches, as the '
            'authors do; flash-linear-attention starts maps and convolutions with 0.02.'
        ),
        start=Start(maps=Initialization(linear=PYTORCH, mlp=UNTOUCHED_SCALED)),
    ),
    'log_linear_gated_delta_net': Recipe(
        spec=spec(
            LinearAttention,
            key_ratio=0.75,
            value_ratio=1.5,
            prelude=spec(ShortConv),
            feature_map=UnitNorm(),
            decay=spec(StepDecay),
            gates=spec(WriteStrength),
            write=Delta(),
            levels=spec(LevelWeights),
            norm=spec(RMSNorm, eps=1e-5),
            gate=spec(OutputGate),
        ),
        cite='Guo et al. 2025, https://arxiv.org/abs/2506.04761',
        causal=True,
        streaming=True,
        packed=True,
        notes=(
            'gated_delta_net whose past is divided into blocks of doubling length, each read with a weight of its own. '
            'Every level is a run of the core. Levels count from the first token of a document that is seen, and reach '
            'over 16,384 tokens: levels.count=15. init=paper starts linear maps and convolutions with a standard '
            'deviation of 0.006, as the configs of its models do, and the last of every branch as PyTorch has it, over '
            'the root of their number.'
        ),
        start=LOG_LINEAR,
    ),
    'kda': Recipe(
        spec=spec(
            LinearAttention,
            prelude=spec(ShortConv),
            feature_map=UnitNorm(),
            decay=spec(LowRankStepDecay),
            gates=spec(WriteStrength),
            write=Delta(),
            norm=spec(RMSNorm, eps=1e-5),
            gate=spec(LowRankGate),
        ),
        cite='Kimi Team 2025, https://arxiv.org/abs/2510.26692',
        causal=True,
        streaming=True,
        packed=True,
        sequence=True,
        smallest_state=128,
        notes=(
            'The mixer of Kimi Linear without its layers of attention. The rank of the output gate is a sixteenth of '
            'the width; theirs is the channels of a head, a sixteenth in flash-linear-attention as it stands, an '
            'eighteenth in the released model, 128 of 2,304: gate.rank. Log decays above -5, the safe gate of '
            'flash-linear-attention: decay.floor=-5.0. init=paper starts linear maps and convolutions with a standard '
            'deviation of 0.02, as flash-linear-attention does.'
        ),
        start=NARROW_THROUGHOUT,
    ),
    'gated_delta_product': Recipe(
        spec=spec(
            LinearAttention,
            key_ratio=0.75,
            value_ratio=1.5,
            prelude=spec(ShortConv),
            feature_map=UnitNorm(),
            decay=spec(StepDecay),
            gates=spec(WriteStrength, scale=2.0),
            write=Delta(steps=2),
            norm=spec(RMSNorm, eps=1e-5),
            gate=spec(OutputGate),
        ),
        cite='Siems et al. 2025, https://arxiv.org/abs/2502.10297',
        causal=True,
        streaming=True,
        packed=True,
        sequence=True,
        smallest_state=256,
        notes=(
            'Two writes a token, with eigenvalues down to -1. Sizes are those of gated_delta_net. init=paper starts '
            'linear maps and convolutions with a standard deviation of 0.02, as the released code does.'
        ),
        start=NARROW_THROUGHOUT,
    ),
    'mlstm': Recipe(
        spec=spec(MLSTM),
        cite='Beck et al. 2024, https://arxiv.org/abs/2405.04517',
        causal=True,
        streaming=True,
        packed=True,
        slow=True,
        notes=(
            'The layer of xLSTM 7B (Beck et al. 2025, https://arxiv.org/abs/2503.13427): no convolution, gates of the '
            'input alone, the block of other recipes; the block of the first paper is mlstm_block. The norm of heads '
            'has offsets. Linear maps start as those of other recipes.'
        ),
    ),
    'mlstm_block': Recipe(
        spec=spec(MLSTMBlock, prelude=spec(ShortConv, bias=True)),
        cite='Beck et al. 2024, https://arxiv.org/abs/2405.04517',
        causal=True,
        streaming=True,
        packed=True,
        slow=True,
        layer=MixersAlone(),
        # With gates near one norms take their bias out again, and its gradient is rounding.
        small={'input_bias': -10.0},
        knobs={'heads': 'heads'},
        notes=(
            'The block of the first xLSTM, of which mlstm is the later layer: in channels twice as wide, behind a '
            'convolution, with gates of queries, keys and values, and a gate of the block in the place of a channel '
            'mixer. The paper has four heads; the released code rounds inner widths up to multiples of 64. Linear maps '
            'start as those of other recipes.'
        ),
    ),
    'gated_delta_net2': Recipe(
        spec=spec(
            LinearAttention,
            prelude=spec(ShortConv),
            feature_map=UnitNorm(),
            decay=spec(LowRankStepDecay),
            gates=spec(ChannelStrengths),
            write=Delta(),
            norm=spec(RMSNorm, eps=1e-5),
            gate=spec(LowRankGate, activation='silu'),
        ),
        cite='"Gated DeltaNet-2" 2026, https://arxiv.org/abs/2605.22791',
        causal=True,
        streaming=True,
        packed=True,
        sequence=True,
        smallest_state=128,
        notes=(
            'kda with a strength for every channel of keys that erase and of values that are written, and SiLU for the '
            'output gate, as in the code of the authors; flash-linear-attention has the sigmoid of kda: '
            'gate.activation=sigmoid. The rank of the gate is a sixteenth of the width; theirs is the channels of a '
            'head: gate.rank. Eigenvalues below zero: gates.scale=2. init=paper draws the maps of mixers as theirs, '
            'uniform by Xavier with a gain of 2^(-5/2); channel mixers start as those of gated_delta_net.'
        ),
        start=Start(
            maps=Initialization(linear=Scaled(gain=2**-5, mode='fan_avg', distribution='uniform'), mlp=UNTOUCHED_SCALED)
        ),
    ),
    'comba': Recipe(
        spec=spec(
            LinearAttention,
            key_ratio=0.75,
            value_ratio=1.5,
            prelude=spec(ShortConv),
            feature_map=spec(CorrectedUnitNorm, start=0.731),
            decay=spec(StepDecay),
            gates=spec(PartialErase),
            write=EarlyDelta(),
            norm=spec(RMSNorm, eps=1e-5),
            gate=spec(OutputGate, activation='sigmoid'),
        ),
        cite='Hu et al. 2025, https://arxiv.org/abs/2506.02475',
        causal=True,
        streaming=True,
        packed=True,
        sequence=True,
        smallest_state=256,
        notes=(
            'The memory is erased before it decays, and by a part, learned for every head, of the key of length one. '
            'In the released code a norm undoes that part: gates=WriteStrength. What queries are corrected by is one '
            'learned number a head, which starts at the product of the two of the paper. init=paper starts linear maps '
            'and convolutions with a standard deviation of 0.02, as the released code does.'
        ),
        start=NARROW_THROUGHOUT,
    ),
    'preconditioned_gdn': Recipe(
        spec=spec(
            LinearAttention,
            key_ratio=0.75,
            value_ratio=1.5,
            prelude=spec(ShortConv),
            feature_map=UnitNorm(),
            decay=spec(StepDecay),
            gates=spec(MomentGates),
            write=PreconditionedDelta(),
            norm=spec(RMSNorm, eps=1e-5),
            gate=spec(OutputGate),
        ),
        cite='"Preconditioned DeltaNet" 2026, https://arxiv.org/abs/2604.21100',
        causal=True,
        streaming=True,
        packed=True,
        sequence=True,
        smallest_state=256,
        notes=(
            'gated_delta_net that writes along keys scaled by a running second moment of their channels. The form with '
            'a decay for every channel: decay=LowRankStepDecay. init=paper starts linear maps and convolutions with a '
            'standard deviation of 0.02, as the released code does.'
        ),
        start=NARROW_THROUGHOUT,
    ),
    'rwkv6': Recipe(
        spec=spec(RWKV6),
        cite='Peng et al. 2024, https://arxiv.org/abs/2404.05892',
        causal=True,
        streaming=True,
        packed=True,
        sequence=True,
        slow=True,
        notes=(
            'The time mixing of Finch. The channel mixing is that of the other recipes. Starting values depend on the '
            'place of the layer: all start as the first, or with init=paper each as its own, gains of the norm too, '
            'which are smaller the earlier the layer. init=paper starts linear maps as the released code does: '
            'orthogonal, those of keys and gate a tenth as large, the last of every branch at zero. The paper has '
            'heads of 64 channels.'
        ),
        small={'rank': 4, 'mix_rank': 4},
        knobs={'heads': 'heads'},
        start=dataclasses.replace(RWKV, arguments={'orthogonal': 0.1}),
    ),
    'rwkv7': Recipe(
        spec=spec(RWKV7),
        cite='Peng et al. 2025, https://arxiv.org/abs/2503.14456',
        causal=True,
        streaming=True,
        packed=True,
        slow=True,
        sequence=True,
        notes=(
            'The time mixing. The channel mixing is that of the other recipes. What depends on the other layers is the '
            "paper's with init=paper: values of the first layer are mixed into those of all others, which without it "
            'are their own, and starting values, gains of the norm too, are those of the place of the layer, where '
            'without it all start as the first. init=paper also starts linear maps as training in the released code '
            'does: orthogonal, those of keys a tenth as large, the last of every branch at zero. Ranks are those of '
            'the present code. The paper has heads of 64 channels.'
        ),
        small={'rank': 4, 'gate_rank': 4},
        knobs={'heads': 'heads'},
        start=dataclasses.replace(RWKV, arguments={'start': 'orthogonal', 'value_residual': True}),
    ),
    'ttt_linear': Recipe(
        spec=spec(
            FastWeights,
            loss=spec(NormedResidual),
            descent=spec(AverageDescent),
            bias=True,
            position=Rope(interleaved=True),
            joint_norm=spec(LayerNorm, eps=1e-6),
        ),
        cite='Sun et al. 2024, https://arxiv.org/abs/2407.04620',
        causal=True,
        streaming=True,
        packed=True,
        slow=True,
        implementations=(),
        notes=(
            'The layer that the released code puts into Transformers. In that for the blocks of Mamba queries and keys '
            'are convolutions of one projection, with biases and without activations, values have none, and a gate is '
            'by GELU: tied=True, prelude=ShortConv with activation=None and bias=True, gate=OutputGate with '
            'activation=gelu. Before it those blocks add a convolution of the normalised stream, which is left out. '
            'Streams, and rows of several documents, go token by token. init=paper starts linear maps with a standard '
            'deviation of 0.02, as the released code does; memories always start so.'
        ),
        small={'chunk': 4},
        knobs={'heads': 'heads'},
        start=NARROW,
    ),
    'titans_linear': Recipe(
        spec=spec(
            FastWeights,
            loss=spec(SquaredError),
            descent=spec(MomentumDescent),
            prelude=spec(ShortConv),
            feature_map=UnitNorm(),
            norm=spec(RMSNorm, eps=1e-5),
            gate=spec(OutputGate),
        ),
        cite='Behrouz, Zhong and Mirrokni 2024, https://arxiv.org/abs/2501.00663',
        causal=True,
        streaming=True,
        packed=True,
        slow=True,
        implementations=(),
        notes=(
            'The long-term memory alone, linear, without attention beside it. There is no released code. Not said, and '
            'chosen here: one rate, momentum and forgetting a head; rates that add up to at most one gradient in a '
            'mini-batch of 16 tokens; a learned start; norm and gate as in gated_delta_net. Streams, and rows of '
            'several documents, go token by token.'
        ),
        small={'chunk': 4},
        knobs={'heads': 'heads'},
    ),
    'mesa_net': Recipe(
        spec=spec(MesaNet, prelude=spec(ShortConv)),
        cite='von Oswald et al. 2025, https://arxiv.org/abs/2506.05233',
        causal=True,
        streaming=True,
        packed=True,
        slow=True,
        implementations=('reference', 'xla', 'mosaic_tpu'),
        notes=(
            'Thirty conjugate gradients, in prompts and token by token, from zero; the released code starts single '
            'tokens from a guess, which guess=true does, and adds 1e-5 to denominators, which offset=1e-5 does and '
            'which keeps outputs a per cent or two from those of the solution (its kernel for single tokens adds it to '
            'sizes of residuals too). init=paper starts linear maps and convolutions with a standard deviation of '
            '0.02, as that code does.'
        ),
        knobs={'heads': 'heads'},
        start=NARROW_THROUGHOUT,
    ),
}
