"""What is put around the weight map: norms, gates, forget gates, penalties, positions, windows.

Where nothing else is said, positions are rotary, as in `mha`, so that rows of a comparison differ in one thing.
"""

from attnlab.config import spec
from attnlab.functional.penalty import Penalised
from attnlab.mixers.softmax.shaped import ShapedAttention
from attnlab.nn.decays import ForgetGate
from attnlab.nn.gates import ChannelGate, HeadGate, SliceGate, SliceMLPGate
from attnlab.nn.initialization import Initialization
from attnlab.nn.norms import HeadOffsetRMSNorm, HeadRMSNorm
from attnlab.nn.penalties import RowPenalty
from attnlab.nn.positions import Rope
from attnlab.nn.preludes import TokenShift
from attnlab.nn.temperatures import RootLength
from attnlab.zoo.recipe import PYTORCH, Recipe, Start
from attnlab.zoo.softmax.row import attention_with
from pallas_kernels import Relu, Softmax

PARTS = {
    'shaped_attention': Recipe(
        spec=spec(ShapedAttention, position=Rope()),
        cite='Noci et al. 2023, https://arxiv.org/abs/2306.17759; He and Hofmann 2024, https://arxiv.org/abs/2311.01906',
        causal=True,
        bidirectional=True,
        streaming=True,
        packed=True,
        sequence=True,
        notes=(
            'The causal form with trainable gains of the second paper: all gains and, with them, every head start as '
            'the identity. The first has no residual branch beside it; the block here has.'
        ),
    ),
    'reluformer': attention_with(
        'Shen et al. 2023, https://arxiv.org/abs/2302.06461',
        'gamma is learned for every head and starts at 1. The two terms of the loss that the paper adds, with weight 1 '
        'each and a margin of 0.7 log n, as a re-implementation has them: the paper was read in summary only.',
        claims={'sequence': False},
        weights=Penalised(Relu(), RowPenalty()),
        temperature=spec(RootLength),
    ),
    'soft_cap': attention_with(
        'Gemma team 2024, https://arxiv.org/abs/2408.00118',
        'Scores are bounded to 50, as in the paper.',
        weights=Softmax(soft_cap=50.0),
    ),
    'qk_norm': attention_with(
        'Henry et al. 2020, https://arxiv.org/abs/2010.04245; Gemma team 2025, https://arxiv.org/abs/2503.19786',
        'The root mean square norm of Gemma 3 and Qwen 3, one gain for all heads and the scale kept; the first paper '
        'has a norm of length one and a learned scale.',
        qk_norm=spec(HeadRMSNorm),
    ),
    'gated_attention': attention_with(
        'Bondarenko, Nagel and Blankevoort 2023, https://arxiv.org/abs/2306.12929',
        'The linear form: a gate for each head from its own share of the channels; it starts at 0.25, as for OPT.',
        gate=spec(SliceGate),
    ),
    'gated_attention_mlp': attention_with(
        'Bondarenko, Nagel and Blankevoort 2023, https://arxiv.org/abs/2306.12929',
        'The MLP form, as for BERT.',
        gate=spec(SliceMLPGate),
    ),
    'gated_attention_all_heads': attention_with(
        'Bondarenko, Nagel and Blankevoort 2023, https://arxiv.org/abs/2306.12929',
        'The form in which every gate sees all channels. Gates start at a quarter, as those of the linear form; with '
        'init=paper at a half and with the linear maps of PyTorch, where the released code leaves them.',
        start=Start(maps=Initialization(linear=PYTORCH), arguments={'gate.start': 0.5}),
        gate=spec(HeadGate),
    ),
    'gated_attention_qwen': attention_with(
        'Qiu et al. 2025, https://arxiv.org/abs/2505.06708; Qwen Team 2025, https://qwen.ai/blog?id=qwen3-next',
        'The attention layer of qwen3_next: a gate for every channel of what heads have read, from the whole input, '
        'the elementwise one of the paper; norms of queries and keys with gains 1 + w; a quarter of the channels '
        'rotated; one key/value head. In a hybrid of that kind: `zoo=3*gated_delta_net+gated_attention_qwen`.',
        claims={'small': {'heads': 2}},
        kv_heads=1,
        qk_norm=spec(HeadOffsetRMSNorm),
        position=Rope(base=1e7, fraction=0.25),
        gate=spec(ChannelGate),
    ),
    'forgetting': attention_with(
        'Lin et al. 2025, https://arxiv.org/abs/2503.02130',
        'Without positions, as in the paper, whose linear maps start with a standard deviation of 0.02; here with '
        'fan-in variance.',
        claims={'bidirectional': False},
        position=None,
        forget=spec(ForgetGate),
    ),
    'forgetting_pro': attention_with(
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
    'rope_partial': attention_with(
        'Su et al. 2021, https://arxiv.org/abs/2104.09864; Black et al. 2022, https://arxiv.org/abs/2204.06745',
        'A quarter of the channels of every head is rotated, as in GPT-NeoX-20B.',
        claims={'small': {'heads': 2}},
        position=Rope(fraction=0.25),
    ),
    'window_sinks': attention_with(
        'Xiao et al. 2024, https://arxiv.org/abs/2309.17453',
        'A window of 128 keys and the first 4 of the row. Positions are those of the text; the paper counts them '
        'inside the cache.',
        claims={'bidirectional': False, 'packed': False, 'sequence': False},
        window=128,
        sinks=4,
    ),
}
