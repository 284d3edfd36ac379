"""Gated diagonal recurrences."""

from attnlab.config import spec
from attnlab.mixers.recurrent.diagonal import DiagonalRecurrence
from attnlab.nn.gates import MinGRUGates, OutputGate, RealGates
from attnlab.nn.initialization import Initialization
from attnlab.nn.preludes import Lift, ShortConv
from attnlab.zoo.recipe import PYTORCH, Recipe, Start

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
            'state of zero; other code starts from nothing. Its listings have the linear maps of PyTorch, which '
            'init=paper follows, but for biases, which start at zero.'
        ),
    ),
}
