"""Gated units of one attention head, which take the place of attention and channel mixer."""

from attnlab.blocks.layer import MixersAlone
from attnlab.config import spec
from attnlab.mixers.softmax.gated_unit import GatedAttentionUnit, Mega
from attnlab.mixers.softmax.sparse_unit import SparseGatedUnit
from attnlab.zoo.recipe import NARROW, Recipe

UNITS = {
    'gau': Recipe(
        spec=spec(GatedAttentionUnit, bias=True),
        cite='Hua et al. 2022, https://arxiv.org/abs/2202.10447',
        causal=True,
        bidirectional=True,
        streaming=True,
        packed=True,
        implementations=('reference', 'xla', 'mosaic_tpu'),
        layer=MixersAlone(),
        small={'key_dim': 6, 'length': 24},
        knobs={'state': 'key_dim'},
        notes=(
            'Products are divided by `length`, a constant of 1024, to be set to the rows of training '
            '(`--config.model.stack.blocks[0].mixer.length=256`). Positions are rotary. The relative bias is the '
            'product of the offsets of queries and keys, which start with a deviation of 0.02 sqrt(length), such that '
            'it is positive from a token to itself; the paper adds it with two vectors of its own, or below 512 tokens '
            'with a number for every distance. Two units are a layer, as in the paper. The '
            'kernel for GPUs serves values of at most 256 channels, a width of 128.'
        ),
    ),
    'mega': Recipe(
        spec=spec(Mega),
        cite='Ma et al. 2023, https://arxiv.org/abs/2209.10655',
        causal=True,
        streaming=True,
        packed=True,
        implementations=('reference', 'xla', 'mosaic_tpu'),
        small={'key_dim': 8, 'state': 4, 'chunk': 8},
        knobs={'state': 'key_dim'},
        notes=(
            'With chunks of 128 tokens, which do not overlap (`chunk=None`: full attention), and a softmax; positions '
            'are rotary in the place of a learned bias for every distance. The gate mixes with the normalised input '
            'of the layer, where the paper has that of the block. init=paper starts linear maps with a standard '
            'deviation of 0.02, as the released code does.'
        ),
        start=NARROW,
    ),
    'seqboat': Recipe(
        spec=spec(SparseGatedUnit),
        cite='Ren et al. 2023, https://arxiv.org/abs/2306.11197',
        causal=True,
        streaming=True,
        packed=True,
        implementations=('reference', 'xla', 'mosaic_tpu'),
        layer=MixersAlone(),
        small={'key_dim': 8, 'state': 4},
        knobs={'state': 'key_dim'},
        notes=(
            'No channel mixer, as in all released runs; two units are a layer, where the parameters are to be those '
            'of others. Half the tokens or so are active at first. The released code makes room for as many as are '
            'active in a batch; here a row has room for all of its tokens, or for `capacity` of them, after which no '
            'token of the document is active. The choice is that of the released code (a softmax with a learned '
            'temperature, without noise; `temperature=1` in its runs on language, speech and Pathfinder, 0.4 on '
            'CIFAR-10). Causal only. A softmax, without the squared ReLU of some of its tasks; positions are rotary, '
            'as in its runs on language, where others have a learned bias. The last nonlinearity takes the normalised '
            'input of the layer, where the paper has that of the block. init=paper starts linear maps with a standard '
            'deviation of 0.02, as the released code does, which cuts them at two deviations.'
        ),
        start=NARROW,
    ),
}
