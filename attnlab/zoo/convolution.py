"""Convolutions."""

from attnlab.config import spec
from attnlab.mixers.convolution.gated import GatedConvolution
from attnlab.nn.initialization import Initialization
from attnlab.zoo.recipe import PYTORCH, Recipe, Start

CONVOLUTION = {
    'base_conv': Recipe(
        spec=spec(GatedConvolution),
        cite='Arora et al. 2023, https://arxiv.org/abs/2312.04927',
        causal=True,
        streaming=True,
        packed=True,
        sequence=True,
        implementations=(),
        knobs={},
        start=Start(maps=Initialization(linear=PYTORCH)),
        notes=(
            'With three taps, as the paper puts it before the mixers it compares on recall, and the skip connection of '
            'the released code; without the long convolution of its other form. Biases start at zero; with '
            'init=paper the linear map starts as in PyTorch.'
        ),
    ),
}
