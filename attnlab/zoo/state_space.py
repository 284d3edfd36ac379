"""State-space models, selective and structured."""

import dataclasses

from attnlab.blocks.layer import MixersAlone
from attnlab.config import spec
from attnlab.mixers.combine import Backwards, SideBySide
from attnlab.mixers.state_space.selective import SelectiveSSM, SelectiveSystem, StateSpaceDual
from attnlab.mixers.state_space.structured import StructuredSSM
from attnlab.mixers.state_space.trapezoidal import TrapezoidalSSM
from attnlab.nn.levels import LevelWeights
from attnlab.nn.norms import RMSNorm
from attnlab.nn.preludes import ShortConv
from attnlab.nn.readouts import GatedReadout, SelfGate
from attnlab.nn.systems import DiagonalSystem, LowRankSystem, RingSystem, SharedSystem
from attnlab.zoo.recipe import LOG_LINEAR, UNTOUCHED_SCALED, Recipe, Start

MAMBA = Start(maps=UNTOUCHED_SCALED)
"""As in the released code: PyTorch's linear maps, the last of every block over the root of the number of blocks."""

EXACT = spec(GatedReadout, activation='gelu_exact')
"""What follows S4 and S4D, whose released code has PyTorch's GELU."""

NARROW_MAMBA = spec(SelectiveSSM, expand=1, prelude=spec(ShortConv, width=2, bias=True))

STATE_SPACE = {
    'mamba': Recipe(
        spec=spec(SelectiveSSM, prelude=spec(ShortConv, bias=True)),
        cite='Gu and Dao 2023, https://arxiv.org/abs/2312.00752',
        causal=True,
        streaming=True,
        packed=True,
        sequence=True,
        layer=MixersAlone(),
        small={'state': 4},
        knobs={'state': 'state'},
        smallest_state=1,
        start=MAMBA,
        notes=(
            'The input enters as dt B x, as in the released code; the paper writes a zero-order hold. Eigenvalues '
            'below zero (Grazzi et al. 2024, https://arxiv.org/abs/2411.12537): eigenvalues=signed, a scan of all '
            'states that takes their memory a token. Biases of the convolution start at zero, with init=paper too. '
            'Linear maps have three times the variance of theirs unless init=paper.'
        ),
    ),
    's_mamba': Recipe(
        spec=spec(SideBySide, mixers=(NARROW_MAMBA, spec(Backwards, mixers=(NARROW_MAMBA,))), scales=(1.0, 1.0)),
        cite='Wang et al. 2024, https://arxiv.org/abs/2403.11144',
        bidirectional=True,
        packed=True,
        small={'state': 4},
        knobs={'state': 'state'},
        smallest_state=1,
        notes=(
            'Two mambas as wide as the model, with convolutions of two tokens, one of which reads from the end; their '
            'outputs are added. In the paper its tokens are the variates of a series: `system=s_mamba` of '
            'configs/series.py. The layers of the paper have layer norms after the branches. The same of any other '
            'causal row that has no bidirectional form is `zoo=bi_NAME`, such as `bi_mamba2`.'
        ),
    ),
    'mamba2': Recipe(
        spec=spec(StateSpaceDual, prelude=spec(ShortConv, bias=True), norm=spec(RMSNorm, eps=1e-5)),
        cite='Dao and Gu 2024, https://arxiv.org/abs/2405.21060',
        causal=True,
        streaming=True,
        packed=True,
        sequence=True,
        layer=MixersAlone(),
        small={'head_dim': 8, 'state': 4},
        knobs={'heads': 'head_dim', 'state': 'state'},
        smallest_state=16,
        start=MAMBA,
        notes=(
            'One group of B and C, 128 states, heads of 64 channels, which must divide twice the width. Biases of the '
            'convolution start at zero, with init=paper too. Linear maps have three times the variance of theirs '
            'unless init=paper.'
        ),
    ),
    'log_linear_mamba2': Recipe(
        spec=spec(
            StateSpaceDual,
            prelude=spec(ShortConv, bias=True),
            levels=spec(LevelWeights),
            norm=spec(RMSNorm, eps=1e-5),
        ),
        cite='Guo et al. 2025, https://arxiv.org/abs/2506.04761',
        causal=True,
        streaming=True,
        packed=True,
        small={'head_dim': 8, 'state': 4},
        knobs={'heads': 'head_dim', 'state': 'state'},
        smallest_state=16,
        start=dataclasses.replace(LOG_LINEAR, arguments={**LOG_LINEAR.arguments, 'rates': 'counted'}),
        notes=(
            'mamba2 whose past is divided into blocks of doubling length, each read with a weight of its own. Every '
            'level is a run of the core. Levels count from the first token of a document that is seen, and reach over '
            '16,384 tokens: levels.count=15. Weights of levels have a map of their own. Every mixer is followed by a '
            'channel mixer, as in the released models. Rates of decay start as those of mamba2, drawn; the released '
            'code has 1, 2, 3 and so on over the heads, which rates=counted and init=paper do. init=paper starts '
            'linear maps and the convolution with a standard deviation of 0.006, as the configs of its models do, and '
            'the last of every branch as PyTorch has it, over the root of their number.'
        ),
    ),
    'mamba3': Recipe(
        spec=spec(TrapezoidalSSM),
        cite='Lahoti et al. 2026, https://arxiv.org/abs/2603.15569',
        causal=True,
        streaming=True,
        packed=True,
        slow=True,
        small={'head_dim': 8, 'state': 8},
        knobs={'heads': 'head_dim', 'state': 'state'},
        smallest_state=16,
        notes=(
            'One input and output a head (SISO), half of the 128 states rotated. Rates of decay as in the present '
            'released code; earlier releases had -softplus. One group of B and C; heads of 64 channels must divide '
            'twice the width. With `norm=spec(HeadRMSNorm, apart=True)` it has the norm that the code offers before '
            'the gate. Linear maps start as those of other recipes.'
        ),
    ),
    'mamba3_mimo': Recipe(
        spec=spec(TrapezoidalSSM, rank=4),
        cite='Lahoti et al. 2026, https://arxiv.org/abs/2603.15569',
        causal=True,
        streaming=True,
        packed=True,
        slow=True,
        small={'head_dim': 8, 'state': 8, 'rank': 2},
        knobs={'heads': 'head_dim', 'state': 'state'},
        smallest_state=16,
        notes=(
            'mamba3 with four writes and reads a token and head (MIMO), by one run of the core over four times the '
            'tokens. Neighbouring channels are rotated together, as in SISO; the released kernels for MIMO pair the '
            'halves of B and C, which is the same up to the order of channels.'
        ),
    ),
    's4': Recipe(
        spec=spec(StructuredSSM, system=spec(LowRankSystem), readout=EXACT),
        cite='Gu et al. 2022, https://arxiv.org/abs/2111.00396',
        causal=True,
        bidirectional=True,
        sequence=True,
        streaming=True,
        packed=True,
        small={'state': 8},
        knobs={'state': 'state'},
        smallest_state=4,
        notes=(
            'A convolution in training, a recurrence in a stream. LegS, or other bases of HiPPO by `system.starts`: '
            '`legt`, `fout`, several in turn over the channels with `system.copies`. As in the released code P is tied '
            'to its conjugate, and a gated map follows. One state matrix serves all channels, the default of its '
            'configs; those of the arena by Gu et al. 2023 have one a channel, `system.copies=None`, as have the paper '
            'and `size=full` of configs/long_range.py. Outputs C are trained as the recurrence reads them, at every '
            'length, where the code trains them for one length, truncated; they have no weight decay but at '
            '`size=full`, and inputs B are not clipped. Bidirectional, one set of dynamics is read by two sets of '
            'outputs, as in the released code. The papers on long sequences have no channel mixers, those on text do.'
        ),
    ),
    's4d': Recipe(
        spec=spec(StructuredSSM, system=spec(DiagonalSystem), readout=EXACT),
        cite='Gu et al. 2022, https://arxiv.org/abs/2206.11893',
        causal=True,
        bidirectional=True,
        sequence=True,
        streaming=True,
        packed=True,
        small={'state': 8},
        knobs={'state': 'state'},
        smallest_state=4,
        notes=(
            'S4D-Lin with a zero-order hold, a set of modes a channel as in the short version of the released code. '
            '`system.starts` may be `legs`, `lin`, `inv`, `quad`, `random` or `real`, `system.method` bilinear. B is '
            'trained, as in the long version; it starts without the half of the theory. Outputs C and bidirectional '
            'reading as in `s4`.'
        ),
    ),
    's6': Recipe(
        spec=spec(StructuredSSM, system=spec(SelectiveSystem), state=16, readout=EXACT),
        cite='Gu and Dao 2023, https://arxiv.org/abs/2312.00752',
        causal=True,
        sequence=True,
        streaming=True,
        packed=True,
        small={'state': 4},
        knobs={'state': 'state'},
        smallest_state=1,
        notes=(
            'The selective state space of `mamba` in the place of the system of `s4`, as in the table of the paper on '
            "selective copying: without Mamba's gate, short convolution and wider channels. What surrounds the system, "
            "`D` and the gated map, is that of `s4`; the released code has Mamba's block alone."
        ),
    ),
    's5': Recipe(
        spec=spec(StructuredSSM, system=spec(SharedSystem, blocks=4, greatest=-1e-4), readout=spec(SelfGate)),
        cite='Smith et al. 2023, https://arxiv.org/abs/2208.04933',
        causal=True,
        bidirectional=True,
        sequence=True,
        streaming=True,
        packed=True,
        small={'state': 8},
        knobs={'state': 'state'},
        smallest_state=8,
        notes=(
            '`state` counts real states, twice the modes. Outputs C start truncated normal in the basis of LegS, one '
            'of three starts of the released code (`system.outputs`), and have no weight decay but at `size=full` of '
            'configs/long_range.py; of its readouts `half_glu1` follows, `half_glu2` with `readout.multiplied=given`. '
            'Real parts of eigenvalues are clipped at -1e-4, as the released code recommends for lengths without '
            'bound. `system.greatest=None` leaves them free, as its scripts but that of CIFAR-10 and `size=full` do, '
            'and training may then move them to growth.'
        ),
    ),
    'lru': Recipe(
        spec=spec(StructuredSSM, system=spec(RingSystem)),
        cite='Orvieto et al. 2023, https://arxiv.org/abs/2303.06349',
        causal=True,
        bidirectional=True,
        sequence=True,
        streaming=True,
        packed=True,
        small={'state': 8},
        knobs={'state': 'state'},
        smallest_state=8,
        notes=(
            '`state` counts complex modes. The ring is `system.low` to `system.high`, with angles up to `system.turn`: '
            'the paper tunes them by task, down to a tenth of pi for long memories. No code was released by the '
            'authors; inputs B and gains are of the group of time scales, as in a widely used reimplementation, where '
            'outputs C have weight decay, here none.'
        ),
    ),
}
