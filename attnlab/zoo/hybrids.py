"""Hybrids: a pattern of layers, repeated over the depth of a stack."""

from attnlab.blocks.layer import MixerAndMLP
from attnlab.config import spec
from attnlab.functional.normalizers import SumNormalizer
from attnlab.mixers.combine import SideBySide
from attnlab.mixers.linear.attention import LinearAttention
from attnlab.mixers.linear.write import Delta
from attnlab.mixers.softmax.attention import Attention
from attnlab.mixers.softmax.latent import LatentAttention
from attnlab.mixers.state_space.selective import SelectiveSSM, StateSpaceDual
from attnlab.nn.decays import SlopeDecay, StepDecay
from attnlab.nn.decoupled import SharedKey
from attnlab.nn.feature_maps import Taylor, UnitNorm
from attnlab.nn.gates import OutputGate, WriteStrength
from attnlab.nn.initialization import Initialization
from attnlab.nn.norms import OffsetRMSNorm, RMSNorm
from attnlab.nn.positions import Rope
from attnlab.nn.preludes import Activation, ShortConv
from attnlab.zoo.linear import LINEAR
from attnlab.zoo.recipe import UNTOUCHED_SCALED, Recipe, Start, depth_below
from attnlab.zoo.recurrent import RECURRENT
from attnlab.zoo.softmax.parts import PARTS
from attnlab.zoo.state_space import STATE_SPACE

RG_LRU = RECURRENT['rg_lru'].spec
MAMBA = STATE_SPACE['mamba'].spec
NORMED_MAMBA = spec(SelectiveSSM, prelude=spec(ShortConv, bias=True), select_norm=spec(RMSNorm))
MAMBA2 = STATE_SPACE['mamba2'].spec

TAYLOR = spec(LinearAttention, key_dim=16, feature_map=Taylor(), normalizer=SumNormalizer(eps=1e-12), scale=1.0)

GATED_DELTA_NET = spec(
    LinearAttention,
    value_ratio=2.0,
    values_per_key=2,
    prelude=spec(ShortConv),
    feature_map=UnitNorm(),
    decay=spec(StepDecay),
    gates=spec(WriteStrength),
    write=Delta(),
    norm=spec(RMSNorm),
    gate=spec(OutputGate),
)
LIGHTNING = spec(
    LinearAttention,
    prelude=spec(Activation),
    decay=spec(SlopeDecay),
    scale=1.0,
    joint_norm=spec(RMSNorm),
    gate=spec(OutputGate, activation='sigmoid'),
)


HYBRIDS = {
    'based': Recipe(
        spec=(TAYLOR, spec(Attention, position=Rope(), window=64)),
        cite='Arora et al. 2024, https://arxiv.org/abs/2402.18668',
        causal=True,
        streaming=True,
        packed=True,
        sequence=True,
        smallest_state=8,
        notes=(
            'Linear attention with the Taylor map on keys of 16 channels, and attention in a window, by turns; '
            'products of two channels are kept once, 153 features instead of 273. The models of the paper have gated '
            'short convolutions in most layers, as `conv=1` gives them in configs/recall.py.'
        ),
    ),
    'griffin': Recipe(
        spec=(RG_LRU, RG_LRU, spec(Attention, kv_heads=1, position=Rope(fraction=0.5), window=1024)),
        cite='De et al. 2024, https://arxiv.org/abs/2402.19427',
        causal=True,
        streaming=True,
        packed=True,
        sequence=True,
        notes=(
            'Two recurrent layers, then local multi-query attention, half of whose channels are rotated. The window '
            'counts the query itself, 1024 keys; the released code sees one more. The output map of attention has no '
            'bias; theirs has one. Output maps are scaled by depth as theirs with init=paper.'
        ),
        start=Start(maps=Initialization(residual=4.0)),
    ),
    'samba': Recipe(
        spec=(MAMBA, spec(Attention, position=Rope(), window=2048)),
        cite='Ren et al. 2024, https://arxiv.org/abs/2406.07522',
        causal=True,
        streaming=True,
        packed=True,
        sequence=True,
        small={'state': 4},
        knobs={'heads': 'heads', 'state': 'state'},
        start=Start(maps=UNTOUCHED_SCALED),
        notes=(
            'Every layer is followed by a channel mixer, the Mamba layer too, as in the paper. init=paper starts as '
            "the released code does: PyTorch's linear maps, the last of every branch over the root of their number."
        ),
    ),
    'jamba': Recipe(
        spec=(*[NORMED_MAMBA] * 4, spec(Attention, kv_heads=1), *[NORMED_MAMBA] * 3),
        cite='Lieber et al. 2024, https://arxiv.org/abs/2403.19887',
        causal=True,
        streaming=True,
        packed=True,
        sequence=True,
        small={'state': 4},
        knobs={'heads': 'heads', 'state': 'state'},
        notes=(
            'One layer of attention in eight, the fifth, without positions; fewer layers than five have none of it. '
            'Every layer is followed by the channel mixer of other recipes, where the paper has a mixture of experts '
            'in every other one. Norms of steps, inputs and outputs within the Mamba layers are theirs. One key/value '
            'head; theirs one for every four.'
        ),
    ),
    'minimax_01': Recipe(
        spec=(*[LIGHTNING] * 7, spec(Attention, kv_heads=1, position=Rope(fraction=0.5))),
        cite='MiniMax 2025, https://arxiv.org/abs/2501.08313',
        causal=True,
        streaming=True,
        packed=True,
        sequence=True,
        notes=(
            'Seven layers of lightning attention, then one of softmax attention; fewer layers than eight have none of '
            'it. Decays are those of the first layer in all; in the paper they weaken with depth, counted over all '
            'layers, as with init=paper, which leaves the rest as it is. Pre-norm, and the channel mixer of other '
            'recipes, where the paper has post-norm with scaled branches and a mixture of experts. One key/value head; '
            'theirs one for every eight.'
        ),
        start=Start(by_layer={'decay.depth': depth_below}),
    ),
    'qwen3_next': Recipe(
        spec=(*[GATED_DELTA_NET] * 3, PARTS['gated_attention_qwen'].spec),
        cite='Qwen Team 2025, https://qwen.ai/blog?id=qwen3-next',
        causal=True,
        streaming=True,
        packed=True,
        sequence=True,
        layer=MixerAndMLP(norm=spec(OffsetRMSNorm)),
        notes=(
            'As in the released code: three gated delta layers, whose keys serve two values each, to one of gated '
            'attention, a quarter of whose channels is rotated; gains of norms are 1 + w but for those of what is '
            'read from memories. Biases of the steps of decays start as those of Mamba-2, in the released code at 1. '
            'The final norm and the channel mixer are those of other recipes, the latter where theirs is a mixture of '
            'experts. One key/value head; theirs one for every eight, of twice the channels.'
        ),
    ),
    'kimi_linear': Recipe(
        spec=(*[LINEAR['kda'].spec] * 3, spec(LatentAttention, position=SharedKey(), rank_ratio=0.25)),
        cite='Kimi Team 2025, https://arxiv.org/abs/2510.26692',
        causal=True,
        streaming=True,
        packed=True,
        sequence=True,
        layer=MixerAndMLP(norm=spec(RMSNorm, eps=1e-5)),
        notes=(
            'Three layers of kda to one of latent attention without positions, as mla with nothing rotated. The output '
            'gate has a bias, as in flash-linear-attention; that of the released model has none: gate.bias=False. '
            'Together heads are as wide as the model; the released ones, 32 of 128 channels, 1.78 times its 2,304. The '
            'channel mixer of other recipes, where the paper has a mixture of experts.'
        ),
    ),
    'nemotron_h': Recipe(
        spec=(*[MAMBA2] * 5, spec(Attention, kv_heads=1)),
        cite='NVIDIA 2025, https://arxiv.org/abs/2504.03624',
        causal=True,
        streaming=True,
        packed=True,
        sequence=True,
        small={'head_dim': 8, 'state': 4},
        knobs={'heads': 'heads', 'state': 'state'},
        notes=(
            'Five Mamba-2 layers to one of attention, without positions, as in the middle of the released 8B model, '
            'whose first attention follows four; fewer layers than six have none of it. Every layer is followed by the '
            'channel mixer of other recipes; theirs, W_2 relu(W_1 x)^2, does not follow the fifth. One B and one C '
            'serve all heads, and norms of Mamba-2 are over all of them; theirs come in eight groups. Rates of decay '
            'are drawn as those of mamba2, where the released code has 1, 2, 3 and so on over the heads. One key/value '
            'head; theirs one for every four.'
        ),
    ),
    'xlstm': Recipe(
        spec=(*[LINEAR['mlstm'].spec] * 7, RECURRENT['slstm'].spec),
        cite='Beck et al. 2024, https://arxiv.org/abs/2405.04517',
        causal=True,
        streaming=True,
        packed=True,
        notes=(
            'xLSTM[7:1]: seven mlstm layers to one of slstm, which is the last of every eight; fewer layers have none '
            'of it. The paper has those of slstm near both ends, of 48 layers 3, 5, 7, 40, 42 and 44. Other ratios are '
            'patterns: `zoo=mlstm+slstm` is [1:1]. Every layer is followed by the channel mixer of other recipes; in '
            'the paper mLSTM stands within a projection to twice the width, without one, and sLSTM is followed by a '
            'network of four thirds of the width.'
        ),
    ),
    'hymba': Recipe(
        spec=spec(
            SideBySide,
            mixers=(spec(Attention, kv_heads=1, position=Rope(), window=1024), NORMED_MAMBA),
            norm=spec(RMSNorm),
        ),
        cite='Dong et al. 2024, https://arxiv.org/abs/2411.13676',
        causal=True,
        streaming=True,
        packed=True,
        sequence=True,
        small={'state': 4},
        knobs={},
        slow=True,
        notes=(
            'Attention in a window and Mamba side by side in every layer, the mean of their normalised outputs. Each '
            'has maps of its own, in and out, and the norms follow the latter; in the paper one map leads into both, '
            'and one out of the mean of what they have read, of twice the width. Mamba has norms of its steps, inputs '
            'and outputs, as theirs, and a convolution of four tokens, theirs of three. Without its meta tokens, the '
            'global attention of its first, middle and last layers, and keys shared between layers. The window is of '
            '1,024 tokens with its own, theirs of one more. One key/value head.'
        ),
    ),
    'falcon_h1': Recipe(
        spec=spec(
            SideBySide,
            mixers=(
                spec(StateSpaceDual, prelude=spec(ShortConv, bias=True), norm=None),
                spec(Attention, kv_heads=1, position=Rope(base=1e11)),
            ),
            scales=(1.0, 1.0),
        ),
        cite='TII 2025, https://arxiv.org/abs/2507.22448',
        causal=True,
        streaming=True,
        packed=True,
        sequence=True,
        small={'head_dim': 8, 'state': 4},
        knobs={},
        slow=True,
        notes=(
            'Mamba-2 and attention side by side in every layer, their outputs added; `scales` are the multipliers of '
            'the outputs, those of inputs, keys and projections are one. Mamba-2 has no norm, as in the released '
            'models, and twice the width of the model; theirs is narrower, and states of 256 channels. Rates of decay '
            'and steps start drawn as those of mamba2, in the released code at 1, 2, 3 and so on over the heads and '
            'with biases of 1. One key/value head, theirs two to eight.'
        ),
    ),
}
