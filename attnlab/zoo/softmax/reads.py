"""Reads with a structure of their own: compressed caches, differences of two maps, selections, reflected keys."""

from attnlab.config import spec
from attnlab.mixers.softmax.differential import DifferentialAttention
from attnlab.mixers.softmax.latent import LatentAttention
from attnlab.mixers.softmax.path import PathAttention
from attnlab.mixers.softmax.selective import SelectiveAttention
from attnlab.nn.decays import ForgetGate
from attnlab.nn.decoupled import DecoupledRope, EliteRope
from attnlab.nn.norms import RMSNorm
from attnlab.nn.positions import Rope
from attnlab.zoo.recipe import Recipe

READS = {
    'mla': Recipe(
        spec=spec(LatentAttention, position=DecoupledRope()),
        cite='DeepSeek-AI 2024, https://arxiv.org/abs/2405.04434',
        causal=True,
        bidirectional=True,
        streaming=True,
        packed=True,
        sequence=True,
        knobs={'heads': 'heads', 'state': 'rank'},
        notes=(
            'As in the released code: the latent has a norm, the rotated key none, pairs are neighbouring channels. '
            'The rotated channels are half those of a head, as in the paper. The latent has a quarter of the width, '
            'which at 16 heads is the four heads of the paper and DeepSeek-V2-Lite, and queries are not compressed, as '
            'in V2-Lite; the large model compresses them (query_rank). No rescaling for longer contexts.'
        ),
    ),
    'elitekv': Recipe(
        spec=spec(LatentAttention, position=EliteRope(), rank_ratio=0.375, norm=None),
        cite='Zhou et al. 2025, https://arxiv.org/abs/2503.01586',
        causal=True,
        bidirectional=True,
        streaming=True,
        packed=True,
        sequence=True,
        knobs={'heads': 'heads', 'state': 'rank'},
        notes=(
            "The paper's sizes for a quarter of the cache of LLaMA-2: an eighth of the frequencies, a latent of three "
            'eighths of the width. The paper converts a trained model, for which see attnlab.convert.elite; from '
            'scratch, frequencies are spread evenly, as in its uniform baseline. Multi-head only, as the paper.'
        ),
    ),
    'differential': Recipe(
        spec=spec(DifferentialAttention, position=Rope(interleaved=True), norm=spec(RMSNorm, eps=1e-5)),
        cite='Ye et al. 2025, https://arxiv.org/abs/2410.05258',
        causal=True,
        bidirectional=True,
        streaming=True,
        packed=True,
        sequence=True,
        notes=(
            'lambda_init is 0.8 in every layer, an alternative of the paper (section 2.1, ablated in 3.8) to its '
            '0.8 - 0.6 exp(-0.3 (l - 1)) in layer l. heads counts both of a pair, and so is that of the Transformer it '
            'is compared with; the released code counts pairs. Grouped, the first and the second keys of a pair stay '
            'apart, as in the released flash form; its naive form repeats neighbours.'
        ),
    ),
    'selective_attention': Recipe(
        spec=spec(SelectiveAttention, position=Rope()),
        cite='Leviathan, Kalman and Matias 2025, https://arxiv.org/abs/2410.02703',
        causal=True,
        streaming=True,
        packed=True,
        notes=(
            "Rests on re-implementations of the paper's listing; there is no released code. The first token of every "
            'document is protected. Rotary positions are our choice. The eviction of masked keys and the loss that '
            'asks for it are left out.'
        ),
    ),
    'path': Recipe(
        spec=spec(PathAttention),
        cite='Yang et al. 2025, https://arxiv.org/abs/2505.16381',
        causal=True,
        streaming=True,
        packed=True,
        slow=True,
        implementations=(),
        small={'rank': 4},
        knobs={'heads': 'heads'},
        notes='As many heads of keys as of queries, without norms of them. Keys are kept in float32. Plain JAX.',
    ),
    'path_fox': Recipe(
        spec=spec(PathAttention, forget=spec(ForgetGate)),
        cite='Yang et al. 2025, https://arxiv.org/abs/2505.16381',
        causal=True,
        streaming=True,
        packed=True,
        slow=True,
        implementations=(),
        small={'rank': 4},
        knobs={'heads': 'heads'},
        notes=(
            'path with forget gates, which are added after scores are divided by the root of the channels, as in '
            'forgetting attention; the released code divides both, which forget=ScaledForgetGate does.'
        ),
    ),
}
