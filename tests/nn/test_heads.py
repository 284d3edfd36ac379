"""How widths divide into heads, and which mixers say so."""

import pytest
from flax import nnx

from attnlab.errors import UserError
from attnlab.mixers.linear.rwkv6 import RWKV6
from attnlab.mixers.linear.rwkv7 import RWKV7
from attnlab.mixers.recurrent.rat import RAT
from attnlab.mixers.recurrent.slstm import SLSTM
from attnlab.mixers.spatial.planes import PlaneAttention
from attnlab.mixers.spatial.reduced import EmbeddingFreeAttention, ReducedAttention
from attnlab.mixers.spatial.windows import NeighbourhoodAttention, WindowAttention
from attnlab.nn.heads import check_groups, head_channels


def test_channels_of_a_head():
    assert head_channels(12, 4) == 3


@pytest.mark.parametrize('heads', [5, 0, -4])
def test_heads_that_do_not_divide_the_width(heads: int):
    with pytest.raises(UserError, match=f'^heads is {heads}; it must divide dim, which is 12$'):
        head_channels(12, heads)
    with pytest.raises(UserError, match=f'^heads is {heads}; .* which is 12, unless key_dim is given$'):
        head_channels(12, heads, instead='key_dim')


SPATIAL = (PlaneAttention, ReducedAttention, EmbeddingFreeAttention, WindowAttention, NeighbourhoodAttention)


@pytest.mark.parametrize('mixer', [*SPATIAL, RAT, RWKV6, RWKV7, SLSTM])
def test_mixers_whose_channels_nothing_else_sets(mixer):
    with pytest.raises(UserError, match=r'^heads is 5; it must divide dim, which is 12$'):
        mixer(12, heads=5, rngs=nnx.Rngs(0))


@pytest.mark.parametrize('kv_heads', [3, 0, -1, 8])
def test_groups_that_do_not_divide_the_heads(kv_heads: int):
    for right in (1, 2, 4):
        check_groups(4, right)
    with pytest.raises(UserError, match=f'^kv_heads is {kv_heads}; it must divide heads, which is 4$'):
        check_groups(4, kv_heads)
    with pytest.raises(UserError, match=r'^kv_heads is 1; it must divide heads, which is 0$'):
        check_groups(0, 1)
