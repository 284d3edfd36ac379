"""Gated recurrences: diagonal ones, and one that reads its own output."""

from attnlab.config import spec
from attnlab.mixers.recurrent.almost_linear import AlmostLinearRNN
from attnlab.mixers.recurrent.diagonal import DiagonalRecurrence
from attnlab.mixers.recurrent.hgrn import HGRN
from attnlab.mixers.recurrent.rat import RAT
from attnlab.mixers.recurrent.slstm import SLSTM
from attnlab.nn.gates import MinGRUGates, MinLSTMGates, OutputGate, RealGates
from attnlab.nn.initialization import Initialization
from attnlab.nn.norms import LayerNorm
from attnlab.nn.preludes import Lift, ShortConv
from attnlab.zoo.recipe import NARROW, PYTORCH, Recipe, Start

RECURRENT = {
    'rg_lru': Recipe(
        spec=spec(
            DiagonalRecurrence,
            gates=spec(RealGates),
            lift=spec(Lift),
            prelude=spec(ShortConv, activation=None, bias=True, gain=0.01),
            gate=spec(OutputGate, activation='gelu', bias=True),
            bias=True,
        ),
        cite='De et al. 2024, https://arxiv.org/abs/2402.19427',
        causal=True,
        streaming=True,
        packed=True,
        sequence=True,
        knobs={'state': 'width'},
        smallest_state=16,
        start=Start(maps=Initialization(residual=4.0)),
        notes=(
            'The recurrent block of Hawk and Griffin, as wide as the model as in the released RecurrentGemma; the '
            'paper widens it by a third. Decays start in [0.9, 0.999] as in the paper; the released code has their '
            'eighth roots there: gates.low=0.43 and gates.high=0.992 are near it. Its maps of the gates start with a '
            'variance of one over the full width, here over that of a block; its output maps are scaled by depth, as '
            'init=paper has them.'
        ),
    ),
    'mingru': Recipe(
        spec=spec(DiagonalRecurrence, gates=spec(MinGRUGates), bias=True),
        cite='Feng et al. 2024, https://arxiv.org/abs/2410.01201',
        causal=True,
        streaming=True,
        packed=True,
        sequence=True,
        knobs={'state': 'width'},
        start=Start(maps=Initialization(linear=PYTORCH)),
        notes=(
            'The recurrence with the output map, no wider than the model, without the convolution that some models of '
            'the paper put before it. A document starts from g(0) = 1/2, as in the listing of the paper for a first '
            'state of zero; the released code starts from nothing, or from a learned state. Both have the linear maps '
            'of PyTorch, which init=paper follows, but for biases, which start at zero.'
        ),
    ),
    'minlstm': Recipe(
        spec=spec(DiagonalRecurrence, gates=spec(MinLSTMGates), bias=True),
        cite='Feng et al. 2024, https://arxiv.org/abs/2410.01201',
        causal=True,
        streaming=True,
        packed=True,
        sequence=True,
        knobs={'state': 'width'},
        start=Start(maps=Initialization(linear=PYTORCH)),
        notes=(
            'With gates that are normalised to sum to one, so that lengths do not matter. No wider than the model, '
            'without a convolution, its documents starting from 1/2, as `mingru`.'
        ),
    ),
    'hgrn': Recipe(
        spec=spec(HGRN, norm=spec(LayerNorm), bias=True),
        cite='Qin et al. 2023, https://arxiv.org/abs/2311.04823',
        causal=True,
        streaming=True,
        packed=True,
        sequence=True,
        knobs={},
        notes=(
            'With a complex state, the gates, biases and norm of the first released version. The lower bound of forget '
            'gates is 0, as in the first layer of the paper. init=paper learns one for every layer and channel as the '
            'paper does, which increases with depth (bound=learned), and leaves the rest as it is; so does '
            '`size=full` of configs/long_range.py. The released form that reads both ways shares its maps; `bi_hgrn` '
            'is two whole mixers.'
        ),
        start=Start(arguments={'bound': 'learned'}),
    ),
    'slstm': Recipe(
        spec=spec(SLSTM, prelude=spec(ShortConv, bias=True)),
        cite='Beck et al. 2024, https://arxiv.org/abs/2405.04517',
        causal=True,
        streaming=True,
        packed=True,
        implementations=(),
        knobs={'heads': 'heads'},
        notes=(
            'Gates read the output of the step before through a map of every head, so that steps follow one another '
            'in training too, token by token. Forget gates are logistic, as in the released code; those of their '
            'biases that depend on the layer start as in the first. The norm of the heads has a bias. xLSTM[7:1] is '
            '`xlstm`.'
        ),
    ),
    'al_rnn': Recipe(
        spec=spec(AlmostLinearRNN),
        cite='Brenner et al. 2024, https://arxiv.org/abs/2410.14240',
        causal=True,
        streaming=True,
        packed=True,
        implementations=(),
        knobs={'state': 'width'},
        notes=(
            'As wide as the model, an eighth of the units rectified. The paper has an autonomous system that models a '
            'trajectory, trained by overwriting observed units every few steps; here the input drives every unit, and '
            'a linear map reads them all. Nothing bounds the state but what training makes of it: W starts small. '
            'Steps follow one another in training too.'
        ),
    ),
    'rat': Recipe(
        spec=spec(RAT),
        cite='Wei et al. 2025, https://arxiv.org/abs/2507.04416',
        causal=True,
        streaming=True,
        packed=True,
        small={'chunk': 4},
        knobs={'heads': 'heads'},
        notes=(
            'Chunks of 16 tokens, counted in every document. Scores of all tokens with all chunks are held at once. '
            'The hybrid of the paper with attention in a window, `zoo=rat+sliding_window`, is two layers in turn. '
            'init=paper starts linear maps with a standard deviation of 0.02, as the released code does.'
        ),
        start=NARROW,
    ),
}
