"""Third-order attention: weights over pairs of keys."""

from attnlab.config import spec
from attnlab.mixers.softmax.third_order import TaylorThirdOrderAttention, ThirdOrderAttention
from attnlab.zoo.recipe import Recipe

THIRD_ORDER = {
    'third_order': Recipe(
        spec=spec(ThirdOrderAttention),
        cite='Alman and Song 2024, https://arxiv.org/abs/2310.04064',
        causal=True,
        bidirectional=True,
        mirrored=True,
        streaming=True,
        packed=True,
        implementations=(),
        slow=True,
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
        slow=True,
        notes=(
            'The near-linear form for bounded entries: the polynomial is that of Taylor, of degree 2, where the paper '
            'takes the one of least degree for its error. The scale is one over the key channels, which keeps scores '
            'small, as the approximation wants.'
        ),
    ),
}
