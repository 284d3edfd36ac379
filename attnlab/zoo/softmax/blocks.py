"""Attention that comes as whole layers, with residual branches of its own."""

from attnlab.blocks.layer import WholeLayers
from attnlab.blocks.softmax_only import SoftmaxOnlyBlock
from attnlab.blocks.unified import UnifiedBlocks
from attnlab.config import spec
from attnlab.nn.positions import Rope
from attnlab.zoo.recipe import Recipe

BLOCKS = {
    'uniattn': Recipe(
        spec=spec(UnifiedBlocks, position=Rope()),
        cite='Xiong et al. 2025, https://arxiv.org/abs/2502.00439',
        causal=True,
        bidirectional=True,
        streaming=True,
        packed=True,
        sequence=True,
        layer=WholeLayers(),
        small={'layers': 2},
        knobs={},
        slow=True,
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
        layer=WholeLayers(),
        knobs={},
        slow=True,
        notes=(
            "Temperatures and penalty are defined in the authors' sequel, https://arxiv.org/abs/2501.03489. There "
            'temperatures start at 0.01 or 0.1, for weights that start at a deviation of 0.02; here at 1, for '
            'weights that start with the scale of their inputs. What theta, alpha and beta start at is not published: '
            '0.5, 1 and 1. The penalty is summed over layers, theirs is the mean; per head it is that of the mean '
            'entropy of a row of the batch, as in their algorithm 1, and EntropyMarginPerQuery is what their code does '
            'instead. Rotary positions, not learned ones; feed-forward maps are not pruned.'
        ),
    ),
}
