"""Attention that chooses which keys it reads."""

from attnlab.config import spec
from attnlab.mixers.softmax.block_routed import BlockRoutedAttention
from attnlab.mixers.softmax.routed import NativeSparseAttention
from attnlab.nn.positions import Rope
from attnlab.zoo.recipe import Recipe

SPARSE = {
    'nsa': Recipe(
        spec=spec(NativeSparseAttention, kv_heads=2, position=Rope()),
        cite='Yuan et al. 2025, https://arxiv.org/abs/2502.11089',
        causal=True,
        streaming=True,
        packed=True,
        small={'compressed_block': 4, 'compressed_stride': 2, 'selected_block': 4, 'selected_blocks': 4},
        slow=True,
        notes=(
            'Two key/value heads; heads must be a multiple of them. The paper gives no sizes for the networks that '
            'compress and gate, nor where positions enter: compressed keys are rotated as if at the start of their '
            'block, as in https://github.com/XunhaoLai/native-sparse-attention-triton, whose gates are one linear map '
            '(OutputGate with a sigmoid). With a state the selected branch is plain JAX.'
        ),
    ),
    'moba': Recipe(
        spec=spec(BlockRoutedAttention, position=Rope()),
        cite='Lu et al. 2025, https://arxiv.org/abs/2502.13189',
        causal=True,
        streaming=True,
        packed=True,
        small={'block': 4, 'blocks': 4},
        slow=True,
        knobs={'heads': 'heads'},
        notes=(
            'Blocks of 256 tokens, of which a query reads four, as many key heads as query heads. Generated tokens '
            'read as prompts do; the paper reads all keys there. With a state it is plain JAX.'
        ),
    ),
}
