"""Mixers of images: tokens on a grid, and rows that papers on images introduced."""

from attnlab.blocks.layer import MixerAndMLP, MixersAlone
from attnlab.config import spec, spec_of
from attnlab.mixers.combine import Backwards
from attnlab.mixers.linear.mlstm_block import MLSTMBlock
from attnlab.mixers.softmax.attention import Attention
from attnlab.mixers.spatial.cascaded import LocalAttentionAndScan
from attnlab.mixers.spatial.factorised import FactorisedAttention
from attnlab.mixers.spatial.gated import VisionGatedLinearAttention
from attnlab.mixers.spatial.linear import (
    GridAgentAttention,
    GridInLine,
    GridNormAwareAttention,
    GridSoftmaxFreeAttention,
)
from attnlab.mixers.spatial.planes import PlaneAttention
from attnlab.mixers.spatial.polarized import PolarizedAttention
from attnlab.mixers.spatial.reduced import EmbeddingFreeAttention, PooledReduction, ReducedAttention, StridedReduction
from attnlab.mixers.spatial.windows import NeighbourhoodAttention, WindowAttention
from attnlab.mixers.state_space.two_sided import CrossScanSSM, TwoWaySSM
from attnlab.mixers.state_space.variates import VariateTimeSSM
from attnlab.nn.convolutions import DepthwiseConv, NormedPatchMap, PatchMerging
from attnlab.nn.initialization import Gaussian, Initialization
from attnlab.nn.norms import HeadRMSNorm, LayerNorm
from attnlab.nn.orders import Snake
from attnlab.nn.positions import GridRope
from attnlab.nn.preludes import ShortConv
from attnlab.zoo.recipe import NARROW, PYTORCH, UNTOUCHED, Hierarchy, Recipe, Start
from attnlab.zoo.state_space import MAMBA
from pallas_kernels import Relu

HEADS = {'heads': 'heads'}

SNAKES = spec(CrossScanSSM, state=1, orders=Snake(), conv=spec(DepthwiseConv, bias=False))
"""The scans of LaMamba, each from a token to one next to it."""

VIL = spec(MLSTMBlock, prelude=spec(ShortConv, bias=True))
"""What Vision-LSTM has in every layer."""

SWIN_T = Hierarchy(
    dim=96,
    widths=(1, 2, 4, 8),
    depths=(2, 2, 6, 2),
    heads=(3, 6, 12, 24),
    mlp=(4, 4, 4, 4),
    merge=spec(PatchMerging),
    stem=spec(NormedPatchMap),
    norm=spec(LayerNorm),
    positions=False,
)
PVT_TINY = Hierarchy(
    dim=64,
    widths=(1, 2, 5, 8),
    depths=(2, 2, 2, 2),
    heads=(1, 2, 5, 8),
    mlp=(8, 8, 4, 4),
    arguments=tuple({'reduction': {'ratio': ratio}} for ratio in (8, 4, 2, 1)),
    merge=spec(NormedPatchMap),
    stem=spec(NormedPatchMap),
    norm=spec(LayerNorm, eps=1e-6),
    positions=True,
)

SPATIAL = {
    'swin': Recipe(
        spec=(spec(WindowAttention), spec(WindowAttention, shifted=True)),
        cite='Liu et al. 2021, https://arxiv.org/abs/2103.14030',
        hierarchy=SWIN_T,
        start=Start(maps=Initialization(linear=Gaussian()), merge=Gaussian(), stem=PYTORCH),
        bidirectional=True,
        grid=True,
        small={'side': 3},
        knobs=HEADS,
        notes=(
            'Two layers, of windows and of shifted ones, repeated: give stacks an even depth. `layout=paper` of '
            'configs/images.py is Swin-T, whose channel mixers have biases and whose layers are dropped at random in '
            'training. Grids are filled up to whole windows, and what fills them is not read; forbidden keys '
            'have weight zero, where the released code subtracts 100. init=paper draws linear maps with a deviation of '
            '0.02, as the released code does.'
        ),
    ),
    'neighbourhood': Recipe(
        spec=spec(NeighbourhoodAttention),
        cite='Hassani et al. 2023, https://arxiv.org/abs/2204.07143',
        bidirectional=True,
        grid=True,
        implementations=(),
        small={'side': 3},
        knobs=HEADS,
        notes=(
            'With the relative bias of the paper, which fused kernels of the authors have left out. Keys are gathered, '
            'in plain JAX; `dilation=2` is DiNAT. Grids with an axis shorter than `side * dilation` are refused. The '
            'strided form, in which blocks of queries share their keys, is left out.'
        ),
    ),
    'pvt': Recipe(
        spec=spec(ReducedAttention, reduction=spec(StridedReduction)),
        cite='Wang et al. 2021, https://arxiv.org/abs/2102.12122',
        hierarchy=PVT_TINY,
        start=Start(
            maps=Initialization(linear=Gaussian()),
            arguments={'reduction.start': spec_of(PYTORCH)},
            merge=PYTORCH,
            stem=PYTORCH,
        ),
        bidirectional=True,
        grid=True,
        knobs=HEADS,
        notes=(
            'Spatial-reduction attention at one ratio, 2; the paper has 8, 4, 2, 1 in stages of falling resolution: '
            '`layout=paper` of configs/images.py is PVT-Tiny, but for biases of channel mixers and its class token. '
            'Rows and columns beyond the last whole block are no keys, as in the paper. init=paper draws linear maps '
            'with a deviation of 0.02, and convolutions as PyTorch does, as the released code.'
        ),
    ),
    'pvt_linear': Recipe(
        spec=spec(ReducedAttention, reduction=spec(PooledReduction)),
        cite='Wang et al. 2022, https://arxiv.org/abs/2106.13797',
        bidirectional=True,
        grid=True,
        small={'reduction': spec(PooledReduction, side=3)},
        knobs=HEADS,
        notes=(
            '49 keys whatever the size of the grid. Without the convolution within the channel mixers of PVTv2; its '
            'overlapping patches are `stem=overlap` of configs/images.py, without those between resolutions.'
        ),
    ),
    'embedding_free': Recipe(
        spec=spec(EmbeddingFreeAttention),
        cite='Yu et al. 2024, https://arxiv.org/abs/2407.17261',
        bidirectional=True,
        grid=True,
        knobs=HEADS,
        notes=(
            'That of the encoder, at one ratio of pooling, 2. A trained model can be built again with `factor=2`, a '
            'quarter of the keys: no parameter depends on it. Without the convolution within the channel mixers, and '
            'the overlapping patches between resolutions.'
        ),
    ),
    'polarized': Recipe(
        spec=spec(PolarizedAttention),
        cite='Liu et al. 2021, https://arxiv.org/abs/2107.00782',
        bidirectional=True,
        mirrored=True,
        packed=True,
        implementations=(),
        knobs={},
        notes=(
            'The parallel layout, in the form of the paper: the released code takes the softmax of the spatial gate '
            'over places, which leaves it near one half. The paper puts it into convolutional blocks; here it is the '
            'mixer of a layer.'
        ),
    ),
    'polarized_sequential': Recipe(
        spec=spec(PolarizedAttention, join='sequential'),
        cite='Liu et al. 2021, https://arxiv.org/abs/2107.00782',
        bidirectional=True,
        mirrored=True,
        packed=True,
        implementations=(),
        knobs={},
        notes='The sequential layout; otherwise as `polarized`.',
    ),
    'fasa': Recipe(
        spec=spec(FactorisedAttention),
        cite='Qin et al. 2023, https://arxiv.org/abs/2312.08614',
        bidirectional=True,
        grid=True,
        small={'heads': 2, 'side': 3},
        knobs=HEADS,
        slow=True,
        notes=(
            'The means of windows are those of the paper: the released code flattens places and channels before it '
            'pools, which mixes them where there are several windows. At one ratio, 2; the paper has 8, 4, 2, 1 by '
            'stage. The width must be a multiple of 16, and heads divide seven sixteenths of it. Grids that a '
            'reflection cannot fill up to whole windows are refused. Without the convolution within the channel '
            'mixers, and the overlapping patches between resolutions.'
        ),
    ),
    'vig': Recipe(
        spec=spec(VisionGatedLinearAttention),
        cite='Liao et al. 2024, https://arxiv.org/abs/2405.18425',
        bidirectional=True,
        grid=True,
        knobs=HEADS,
        notes=(
            'As ViG-T; the larger models are `activated=False`. Channel mixers, stem and initial values are the '
            "config's."
        ),
    ),
    'condaformer': Recipe(
        spec=(spec(PlaneAttention), spec(PlaneAttention, shifted=True)),
        cite='Duan et al. 2023, https://arxiv.org/abs/2312.11112',
        bidirectional=True,
        grid=True,
        sparse=True,
        implementations=(),
        small={'heads': 4, 'side': 3},
        knobs=HEADS,
        notes=(
            'On whole volumes, on images, which have a depth of 1, and on volumes some of whose places are empty '
            '(`voxels=occupied` of configs/images.py): windows and convolutions then read occupied ones alone, as '
            'those of sparse points do, at the cost of all. Two layers, of windows and of shifted ones, repeated. '
            'Layer norms stand where the paper normalises over the batch, and offsets are whole tokens, where points '
            'of the paper have places between voxels. Layers are of one width and resolution, where the paper has them '
            'in the first half of a U-Net, with pooling on coarser grids between.'
        ),
    ),
    'segman': Recipe(
        spec=spec(LocalAttentionAndScan),
        cite='Fu et al. 2025, https://arxiv.org/abs/2412.11890',
        bidirectional=True,
        grid=True,
        small={'side': 3},
        knobs=HEADS,
        slow=True,
        notes=(
            'The mixer of all stages but the last, whose attention is global. A layer norm stands where the paper '
            'normalises over the batch; neighbourhoods have 7 tokens a side, theirs 11, 9, 7 by stage; the '
            'convolutions around a layer are not part of it.'
        ),
    ),
    'agent_2d': Recipe(
        spec=spec(GridAgentAttention),
        cite='Han et al. 2024, https://arxiv.org/abs/2312.08874',
        bidirectional=True,
        grid=True,
        implementations=(),
        small={'side': 2},
        knobs=HEADS,
        slow=True,
        notes=(
            '`agent` on images: pools, biases and the convolution of values in two dimensions. Without the tables of '
            'whole rows and columns, which are as long as one grid has sides and fit no other: on grids of more than '
            '7 tokens a side biases are coarser than those of the paper. init=paper is that of `agent`.'
        ),
        start=NARROW,
    ),
    'inline_2d': Recipe(
        spec=spec(GridInLine),
        cite='Han et al. 2024, https://arxiv.org/abs/2412.06590',
        bidirectional=True,
        grid=True,
        implementations=(),
        knobs=HEADS,
        slow=True,
        notes=('`inline` on images: the residual is of the 3 x 3 tokens around. init=paper is that of `inline`.'),
        start=NARROW,
    ),
    'soft_2d': Recipe(
        spec=spec(GridSoftmaxFreeAttention),
        cite='Lu et al. 2021, https://arxiv.org/abs/2110.11945',
        bidirectional=True,
        grid=True,
        implementations=(),
        knobs=HEADS,
        slow=True,
        notes=(
            '`soft` on images: landmarks of 2 x 2 tokens, where the paper has 8, 4, 2 a side by stage, and a '
            'convolution of 3 x 3, theirs 9, 5, 3. The layers of the paper are post-norm. init=paper is that of `soft`.'
        ),
        start=NARROW,
    ),
    'nalaformer_2d': Recipe(
        spec=spec(GridNormAwareAttention),
        cite='Meng et al. 2025, https://arxiv.org/abs/2506.21137',
        bidirectional=True,
        grid=True,
        implementations=(),
        knobs=HEADS,
        slow=True,
        notes=(
            '`nalaformer` as released for images: rotation by place of what is summed, and the convolution of values. '
            'Without the convolutions around a layer, and the softmax layers of the late stages. init=paper leaves '
            'linear maps as PyTorch makes them, as the released code does.'
        ),
        start=UNTOUCHED,
    ),
    'vim': Recipe(
        spec=spec(TwoWaySSM, prelude=spec(ShortConv, bias=True)),
        cite='Zhu et al. 2024, https://arxiv.org/abs/2401.09417',
        bidirectional=True,
        packed=True,
        layer=MixersAlone(),
        small={'state': 4},
        knobs={'state': 'state'},
        smallest_state=1,
        start=MAMBA,
        notes=(
            'Both directions are halved, as in the released configs; the paper sums them. The class token of the paper '
            'stands in the middle: `token=middle` in configs/images.py.'
        ),
    ),
    'vision_lstm': Recipe(
        spec=(VIL, spec(Backwards, mixers=(VIL,))),
        cite='Alkin et al. 2024, https://arxiv.org/abs/2406.04303',
        bidirectional=True,
        packed=True,
        layer=MixersAlone(),
        small={'input_bias': -10.0},
        knobs={'heads': 'heads'},
        slow=True,
        notes=(
            'Blocks of `mlstm_block` that read from the first token and from the last by turns, with the causal '
            'convolution of the first version: in the second it is one of 3 x 3 on the grid, and linear maps and norms '
            'have biases. All sizes of the paper have four heads. Images are classified by the mean of the tokens, '
            'there by the first and the last. Linear maps start as those of other recipes.'
        ),
    ),
    'vmamba': Recipe(
        spec=spec(CrossScanSSM),
        cite='Liu et al. 2024, https://arxiv.org/abs/2401.10166',
        bidirectional=True,
        grid=True,
        small={'state': 4},
        knobs={'state': 'state'},
        smallest_state=1,
        slow=True,
        notes=(
            'The gated form of the first version, with 16 states and twice the width. The released T, S and B have '
            'one state and no gate, and most of them the width of the model.'
        ),
    ),
    'chimera': Recipe(
        spec=spec(VariateTimeSSM),
        cite='Behrouz, Santacatterina and Zabih 2024, https://arxiv.org/abs/2406.04320',
        bidirectional=True,
        grid=True,
        layer=MixersAlone(),
        small={'state': 2},
        knobs={'heads': 'heads', 'state': 'state'},
        smallest_state=1,
        slow=True,
        notes=(
            'For series: the rows of the grid are variates, its columns times (`inputs=grid` of configs/series.py, or '
            '`system=chimera`). No code was released. Diagonal matrices, where the paper has companion-like ones along '
            'time; couplings are rates, by which neither pair of factors exceeds one in sum, which the paper does not '
            'say; B and C are shared by the channels of a head, and inputs enter by the step times B, where the '
            'paper holds them (zero order). It looks both ways over variates, and back in time. Variates are swept one '
            'after the other, so that the depth grows with their number; the paper scans both axes at once.'
        ),
    ),
    'lamamba': Recipe(
        spec=(SNAKES, spec(WindowAttention, side=8), SNAKES, spec(WindowAttention, side=8, shifted=True)),
        cite='Fu, Chen and Yu 2024, https://arxiv.org/abs/2408.02615',
        layer=MixerAndMLP(mixers=2),
        bidirectional=True,
        grid=True,
        small={'side': 3},
        knobs=HEADS,
        slow=True,
        notes=(
            'A layer is scans, then attention in windows, then a channel mixer, each a branch; windows are shifted in '
            'every second layer: give stacks an even depth. With `told=norms` time and label of a diffusion model set '
            'scales, shifts and gates of the branches, as in the paper; by default they are told with the pixels. '
            'Layers are of one width, where the paper has a U-Net of them.'
        ),
    ),
    'relu_vit': Recipe(
        spec=spec(Attention, weights=Relu(), qk_norm=spec(HeadRMSNorm), bias=True, causal=False),
        cite='Wortsman et al. 2023, https://arxiv.org/abs/2309.08586',
        bidirectional=True,
        mirrored=True,
        packed=True,
        notes=(
            '`relu_attention` as on images: both ways, so divided by the length, with a norm of queries and keys, by '
            'their root mean square where the paper has a layer norm.'
        ),
    ),
    'axial_rope': Recipe(
        spec=spec(Attention, position=GridRope(), bias=True, causal=False),
        cite='Heo et al. 2024, https://arxiv.org/abs/2403.13298',
        bidirectional=True,
        grid=True,
        notes='Attention with rotary positions on both axes (RoPE-Axial); not with the learned angles of RoPE-Mixed.',
    ),
}
