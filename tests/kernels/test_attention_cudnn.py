"""What is handed to cuDNN, by what XLA computes in its place, and by what is lowered for it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import attention, dispatch, target
from pallas_kernels.attention import maps
from pallas_kernels.cases import attention as cases

A100 = target.Target('gpu', 'NVIDIA A100-SXM4-80GB', '8.0')
V100 = target.Target('gpu', 'Tesla V100-SXM2-16GB', '7.0')


def shapes(t=128, s=128, h=4, g=2, k=64, v=64, dtype=jnp.bfloat16):
    q, keys, values = ((2, t, h, k), (2, s, g, k), (2, s, g, v))
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in (q, keys, values)]


@pytest.mark.parametrize(
    ('name', 'weights'),
    [(name, None) for name in ('prime', 'wide', 'window', 'temperature')] + [('prime', maps.ScalableSoftmax(0.43))],
)
def test_it_is_the_reference(name, weights, comparison):
    # In float16 XLA has no such products on a CPU.
    call = cases.call(name, jnp.bfloat16, weights)
    comparison.check(attention, f'{name} {weights}', call, cases.CASES[name].t, implementation='cudnn')


@pytest.mark.parametrize(
    ('dtype', 'options', 'mask', 'window'),
    [
        (jnp.bfloat16, {}, 'CAUSAL', 0),
        (jnp.bfloat16, {'window': 5}, 'CAUSAL', 5),
        (jnp.float16, {'window': 128}, 'CAUSAL', 0),
        (jnp.float16, {'causal': False}, 'NO_MASK', 0),
    ],
)
def test_both_passes_are_lowered_for_a_gpu(dtype, options, mask, window, monkeypatch):
    # There is none here whose version JAX could ask for.
    monkeypatch.setattr('jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version', lambda: 91300)

    def both(*arrays):
        output, pull = jax.vjp(lambda *arrays: attention(*arrays, **options, implementation='cudnn'), *arrays)
        return pull(output)

    with target.compiling_for(A100):
        module = jax.jit(both).trace(*shapes(v=40, dtype=dtype)).lower(lowering_platforms=('cuda',)).as_text()
    module = module.replace('\\22', '"')
    assert re.findall(r'@__cudnn\$(\w+)', module) == ['fmhaSoftmax', 'fmhaSoftmaxBackward']
    assert re.findall(r'"mask_type": "(\w+)"', module) == [mask] * 2
    assert re.findall(r'"sliding_window_length": (\d+)', module) == [str(window)] * 2


def test_it_is_never_chosen_and_the_ledger_says_why():
    for here, chosen in ((A100, 'xla'), (target.H100, 'mosaic_gpu')):
        with target.compiling_for(here), dispatch.ledger() as entries:
            jax.eval_shape(lambda *arrays: attention(*arrays), *shapes())
        assert entries[0].implementation == chosen
        assert ('cudnn', dispatch.UNCHOSEN) in entries[0].refused
    with target.compiling_for(V100), dispatch.ledger() as entries:
        jax.eval_shape(lambda *arrays: attention(*arrays), *shapes())
    assert 'cudnn' not in dict(entries[0].refused)


@pytest.mark.parametrize(
    ('here', 'sizes', 'options', 'message'),
    [
        (A100, {'dtype': jnp.float32}, {}, 'have type float32; expected bfloat16 or float16 alike'),
        (A100, {'s': 130}, {}, 't=128 and s=130; expected as many queries as keys, or a call that is not causal'),
        (A100, {}, {'causal': False, 'window': 3}, 'window is 3 and causal is False; expected a causal call'),
        (A100, {}, {'window': 3, 'sinks': 1}, 'sinks were given; expected none of bias, '),
        (A100, {}, {'slopes': np.ones(4, np.float32), 'sink_scores': np.ones(4, np.float32)}, 'slopes, sink_scores we'),
        (
            A100,
            {},
            {'chosen': np.ones((2, 128, 2, 2), bool), 'block': 64},
            'chosen were given; expected none of bias, ',
        ),
        (A100, {}, {'weights': maps.Sigmoid()}, 'the weights are Sigmoid.*; expected a softmax without a soft cap'),
        (A100, {}, {'weights': maps.Softmax(soft_cap=2.0)}, r'Softmax\(soft_cap=2.0\); expected a softmax without'),
        (A100, {'k': 256}, {}, 'heads have 256 channels; expected at most 128 on NVIDIA A100'),
        (A100, {'t': 0, 's': 0}, {}, 'q has shape .* and s=0; expected arrays with entries'),
        (V100, {}, {}, r'Tesla V100-SXM2-16GB has compute capability 7.0; expected 8.0 \(Ampere\) or later'),
        (target.Target('gpu', 'AMD Instinct MI300X', 'gfx942'), {}, {}, 'has compute capability gfx942; expected 8.0'),
        (target.Target('cpu', 'cpu'), {}, {}, 'the platform is cpu'),
    ],
)
def test_what_it_does_not_serve_is_refused(here, sizes, options, message):
    def call(*arrays):
        return attention(*arrays, **options, implementation='cudnn')

    with target.compiling_for(here), pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(call, *shapes(**sizes))


def test_no_other_core_has_it():
    with pytest.raises(NotImplementedError, match="'cudnn' cannot serve: this version has no cudnn form of core"):
        dispatch.select('core', 'cudnn', {'xla': dispatch.Candidate(lambda: None)}, lambda: None)
