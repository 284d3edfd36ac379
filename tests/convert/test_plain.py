"""What conversions find in attention beside projections, rotations and a softmax."""

import inspect

import pytest
from flax import nnx

from attnlab.config import build, spec
from attnlab.convert.plain import other_parts
from attnlab.mixers.softmax.attention import Attention
from attnlab.nn.decays import ForgetGate
from attnlab.nn.gates import SliceGate
from attnlab.nn.norms import HeadRMSNorm
from attnlab.nn.positions import Alibi, Rope
from attnlab.nn.preludes import ShortConv, TokenShift
from attnlab.nn.sinks import LearnedSink
from attnlab.nn.temperatures import LogLength
from pallas_kernels import Softmax

PARTS = {
    'prelude': spec(ShortConv),
    'shift': spec(TokenShift),
    'qk_norm': spec(HeadRMSNorm),
    'position': Alibi(),
    'weights': Softmax(soft_cap=20.0),
    'temperature': spec(LogLength, length=4),
    'forget': spec(ForgetGate),
    'sink': spec(LearnedSink),
    'window': 4,
    'sinks': 1,
    'norm': spec(HeadRMSNorm),
    'gate': spec(SliceGate),
}
PLAIN = {
    'kv_heads': 1,
    'key_dim': 6,
    'value_dim': 3,
    'position': Rope(),
    'bias': True,
    'causal': False,
    'implementation': 'xla',
}


def attention(**kwargs) -> Attention:
    return build(spec(Attention, heads=2, **kwargs))(8, rngs=nnx.Rngs(0))


@pytest.mark.parametrize('name', PARTS)
def test_every_part_is_named(name: str):
    others = {'window': 4} if name == 'sinks' else {}
    assert other_parts(attention(**{name: PARTS[name]}, **others)) == [*others, name]


def test_projections_and_rotations_are_none():
    assert other_parts(attention()) == other_parts(attention(**PLAIN)) == []
    named = {'self', 'dim', 'heads', 'rngs'} | PARTS.keys() | PLAIN.keys()
    assert inspect.signature(Attention.__init__).parameters.keys() == named
