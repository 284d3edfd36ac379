"""Convolutions."""

from attnlab.config import spec
from attnlab.mixers.convolution.gated import GatedConvolution
from attnlab.mixers.convolution.hyena import Hyena
from attnlab.nn.filters import ImplicitFilter
from attnlab.nn.initialization import Gaussian, Initialization
from attnlab.nn.preludes import ShortConv
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
    'hyena': Recipe(
        spec=spec(
            Hyena,
            filters=spec(ImplicitFilter, bands=16),
            prelude=spec(ShortConv, width=3, activation=None, bias=True),
        ),
        cite='Poli et al. 2023, https://arxiv.org/abs/2302.10866',
        causal=True,
        streaming=True,
        packed=True,
        sequence=True,
        implementations=('reference', 'xla', 'mosaic_tpu'),
        small={'length': 24},
        knobs={},
        start=Start(
            maps=Initialization(linear=Gaussian(0.02), residual=1.0),
            arguments={'filters.frequency': 14.0},
        ),
        notes=(
            'Of order 2. `length` is the unit of the filters, to be set to the rows of training. Filters read 33 '
            'features of the lag, as in the language models of the paper; its models of recall have 5 '
            '(filters.bands=2). Features are not trained. init=paper starts linear maps, those of the filters too, '
            'with a standard deviation of 0.02, the last of every branch over the root of their number, and the sine '
            'frequencies of the filters at 14, as in those language models. A stream keeps all inputs of the '
            'convolution; a step reads those of its block, and once a block (512 tokens of 16,384) all are convolved. '
            'Documents of a row are kept apart exactly.'
        ),
    ),
}
