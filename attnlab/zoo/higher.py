"""Mixers of the softmax family that are more, or less, than one softmax over the keys."""

from attnlab.blocks.softmax_only import SoftmaxOnlyBlock
from attnlab.blocks.unified import UnifiedBlocks
from attnlab.config import spec
from attnlab.mixers.softmax.routed import NativeSparseAttention
from attnlab.mixers.softmax.third_order import TaylorThirdOrderAttention, ThirdOrderAttention
from attnlab.nn.positions import Rope
from attnlab.zoo.recipe import Recipe

HIGHER = {
    'third_order': Recipe(
        spec=spec(ThirdOrderAttention),
        cite='Alman and Song 2024, https://arxiv.org/abs/2310.04064',
        causal=True,
        bidirectional=True,
        mirrored=True,
        streaming=True,
        packed=True,
        implementations=(),
        notes=(
            'The exact map, in cubic time; a window makes it practical. The paper defines the map alone: the causal '
            'form, the norms of queries and keys, and the scale, one over the square root of the key channels, are '
            'ours. No position encoding.'
        ),
    ),
    'third_order_taylor': Recipe(
        spec=spec(TaylorThirdOrderAttention),
        cite='Alman and Song 2024, https://arxiv.org/abs/2310.04064',
        causal=True,
        streaming=True,
        packed=True,
        implementations=(),
        notes=(
            'The near-linear form for bounded entries: the polynomial is that of Taylor, of degree 2, where the paper '
            'takes the one of least degree for its error. The scale is one over the key channels, which keeps scores '
            'small, as the approximation wants.'
        ),
    ),
    'uniattn': Recipe(
        spec=spec(UnifiedBlocks, position=Rope()),
        cite='Xiong et al. 2025, https://arxiv.org/abs/2502.00439',
        causal=True,
        bidirectional=True,
        streaming=True,
        packed=True,
        layer='blocks',
        notes=(
            'Whole layers, in groups of four. The paper converts a trained model, of which it groups the upper half of '
            'the layers (16 to 31 of 32), and fits the compensation to it; from scratch it starts at zero.'
        ),
    ),
    'aero': Recipe(
        spec=spec(SoftmaxOnlyBlock, position=Rope()),
        cite='Jha and Reagen 2024, https://arxiv.org/abs/2410.13060',
        causal=True,
        bidirectional=True,
        streaming=True,
        packed=True,
        layer='blocks',
        notes=(
            "Temperatures and penalty are defined in the authors' sequel, https://arxiv.org/abs/2501.03489. There "
            'temperatures start at 0.01 or 0.1, for weights that start at a deviation of 0.02; here at 1, for '
            'weights that start with the scale of their inputs. What theta, alpha and beta start at is not published: '
            '0.5, 1 and 1. The penalty is summed over layers, theirs is the mean; per head it is that of the mean '
            'entropy of a row of the batch, as in their algorithm 1, and EntropyMarginPerQuery is what their code does '
            'instead. Rotary positions, not learned ones; feed-forward maps are not pruned.'
        ),
    ),
    'nsa': Recipe(
        spec=spec(NativeSparseAttention, kv_heads=2, position=Rope()),
        cite='Yuan et al. 2025, https://arxiv.org/abs/2502.11089',
        causal=True,
        streaming=True,
        packed=True,
        notes=(
            'Two key/value heads; heads must be a multiple of them. The paper gives no sizes for the networks that '
            'compress and gate, nor where positions enter: compressed keys are rotated as if at the start of their '
            'block, as in https://github.com/XunhaoLai/native-sparse-attention-triton, whose gates are one linear map '
            '(OutputGate with a sigmoid). Kernels serve the compressed and the windowed branch; the selected one is '
            'plain JAX everywhere.'
        ),
    ),
}
