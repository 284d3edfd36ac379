"""Softmax attention: the baselines every other mixer is measured against."""

from attnlab.config import spec
from attnlab.mixers.softmax.attention import Attention
from attnlab.nn.positions import Alibi, Rope
from attnlab.zoo.recipe import Recipe

BASELINES = {
    'mha': Recipe(
        spec=spec(Attention, position=Rope()),
        cite='Vaswani et al. 2017, https://arxiv.org/abs/1706.03762',
        causal=True,
        bidirectional=True,
        streaming=True,
        packed=True,
        sequence=True,
        notes='Rotary positions (Su et al. 2021, https://arxiv.org/abs/2104.09864), not sinusoidal ones; no biases.',
    ),
    'gqa': Recipe(
        spec=spec(Attention, kv_heads=2, position=Rope()),
        cite='Ainslie et al. 2023, https://arxiv.org/abs/2305.13245',
        causal=True,
        bidirectional=True,
        streaming=True,
        packed=True,
        sequence=True,
        notes='Two key/value heads; heads must be a multiple of them.',
    ),
    'mqa': Recipe(
        spec=spec(Attention, kv_heads=1, position=Rope()),
        cite='Shazeer 2019, https://arxiv.org/abs/1911.02150',
        causal=True,
        bidirectional=True,
        streaming=True,
        packed=True,
        sequence=True,
    ),
    'sliding_window': Recipe(
        spec=spec(Attention, position=Rope(), window=128),
        cite='Beltagy, Peters and Cohan 2020, https://arxiv.org/abs/2004.05150',
        causal=True,
        bidirectional=True,
        streaming=True,
        packed=True,
        sequence=True,
        notes='The window counts the query itself: 128 keys. Bidirectional, a query sees 127 keys to either side.',
    ),
    'nope': Recipe(
        spec=spec(Attention),
        cite='Kazemnejad et al. 2023, https://arxiv.org/abs/2305.19466',
        causal=True,
        streaming=True,
        packed=True,
        sequence=True,
        notes='No position encoding: the causal mask alone tells positions apart, so there is no bidirectional form.',
    ),
    'alibi': Recipe(
        spec=spec(Attention, position=Alibi()),
        cite='Press, Smith and Lewis 2022, https://arxiv.org/abs/2108.12409',
        causal=True,
        bidirectional=True,
        mirrored=True,
        streaming=True,
        packed=True,
        sequence=True,
        notes='Bidirectional, the penalty is symmetric in the distance.',
    ),
}
