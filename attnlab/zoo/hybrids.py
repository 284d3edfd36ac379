"""Hybrids: a pattern of layers, repeated over the depth of a stack."""

from attnlab.config import spec
from attnlab.functional.normalizers import SumNormalizer
from attnlab.mixers.linear.attention import LinearAttention
from attnlab.mixers.softmax.attention import Attention
from attnlab.nn.feature_maps import Taylor
from attnlab.nn.initialization import Initialization
from attnlab.nn.positions import Rope
from attnlab.zoo.recipe import PYTORCH, Recipe, Start
from attnlab.zoo.recurrent import RECURRENT
from attnlab.zoo.state_space import STATE_SPACE

RG_LRU = RECURRENT['rg_lru'].spec
MAMBA = STATE_SPACE['mamba'].spec

TAYLOR = spec(LinearAttention, key_dim=16, feature_map=Taylor(), normalizer=SumNormalizer(eps=1e-12), scale=1.0)

HYBRIDS = {
    'based': Recipe(
        spec=(TAYLOR, spec(Attention, position=Rope(), window=64)),
        cite='Arora et al. 2024, https://arxiv.org/abs/2402.18668',
        causal=True,
        streaming=True,
        packed=True,
        sequence=True,
        notes=(
            'Linear attention with the Taylor map on keys of 16 channels, and attention in a window, by turns; '
            'products of two channels are kept once, 153 features instead of 273. The models of the paper have gated '
            'short convolutions in most layers, as `conv=1` gives them in configs/recall.py.'
        ),
    ),
    'griffin': Recipe(
        spec=(RG_LRU, RG_LRU, spec(Attention, kv_heads=1, position=Rope(fraction=0.5), window=1024)),
        cite='De et al. 2024, https://arxiv.org/abs/2402.19427',
        causal=True,
        streaming=True,
        packed=True,
        sequence=True,
        notes=(
            'Two recurrent layers, then local multi-query attention, half of whose channels are rotated. The window '
            'counts the query itself, 1024 keys; the released code sees one more. The output map of attention has no '
            'bias; theirs has one. Output maps are scaled by depth as theirs with init=paper.'
        ),
        start=Start(maps=Initialization(residual=4.0)),
    ),
    'samba': Recipe(
        spec=(MAMBA, spec(Attention, position=Rope(), window=2048)),
        cite='Ren et al. 2024, https://arxiv.org/abs/2406.07522',
        causal=True,
        streaming=True,
        packed=True,
        sequence=True,
        small={'state': 4},
        knobs={'heads': 'heads', 'state': 'state'},
        start=Start(maps=Initialization(linear=PYTORCH, residual=1.0)),
        notes=(
            'Every layer is followed by a channel mixer, the Mamba layer too, as in the paper. init=paper starts as '
            "the released code does: PyTorch's linear maps, the last of every branch over the root of their number."
        ),
    ),
}
