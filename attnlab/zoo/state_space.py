"""Selective state-space models."""

from attnlab.blocks.layer import MixersAlone
from attnlab.config import spec
from attnlab.mixers.state_space.selective import SelectiveSSM, StateSpaceDual
from attnlab.nn.initialization import Initialization
from attnlab.nn.norms import RMSNorm
from attnlab.nn.preludes import ShortConv
from attnlab.zoo.recipe import PYTORCH, Recipe, Start

MAMBA = Start(maps=Initialization(linear=PYTORCH, residual=1.0))
"""As in the released code: PyTorch's linear maps, the last of every block over the root of the number of blocks."""

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
            'The input enters as dt B x, as in the released code; the paper writes a zero-order hold. Biases of the '
            'convolution start at zero, and linear maps three times as far spread as theirs, unless init=paper.'
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
            'convolution start at zero, and linear maps three times as far spread as theirs, unless init=paper.'
        ),
    ),
}
