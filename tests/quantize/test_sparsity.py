"""CATS: thresholds are quantiles of sizes of activations, and what lies below them is zero."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.cli import main
from attnlab.errors import UserError
from attnlab.nn.mlps import MLP, GatedMLP
from attnlab.quantize.layers import Quantization
from attnlab.quantize.sparsity import BITS, ThresholdedMLP, _Counts, sparse, threshold_of
from attnlab.runs.loading import load_run
from attnlab.runs.record import read_record
from attnlab.train.rows import rows_of
from tests.bad_inputs.conftest import LANGUAGE, SMALL, originals

__all__ = ['originals']


def test_small_activations_are_zero():
    network, x = GatedMLP(4, hidden=8, rngs=nnx.Rngs(0)), jax.random.normal(jax.random.key(0), (2, 3, 4))
    np.testing.assert_allclose(ThresholdedMLP(network, 0.0)(x), network(x), rtol=1e-5, atol=1e-6)
    found = ThresholdedMLP(network, 0.3)(x)
    gate, up = np.asarray(network.gate(x)), np.asarray(network.up(x))
    a = gate / (1 + np.exp(-gate))
    assert 0 < (np.abs(a) <= 0.3).mean() < 1
    np.testing.assert_allclose(
        found, np.where(np.abs(a) > 0.3, a, 0) * up @ network.down.weight[...], rtol=1e-4, atol=1e-5
    )
    np.testing.assert_array_equal(ThresholdedMLP(network, 100.0)(x), 0)
    assert jnp.isnan(ThresholdedMLP(network, 100.0)(x.at[0, 0].set(jnp.nan))[0, 0]).all()


@pytest.mark.parametrize('scale', [1e-5, 1.0, 10.0, 1e6])
def test_a_threshold_is_a_quantile(scale):
    sizes = scale * np.abs(np.random.default_rng(0).standard_normal(50_000)).astype(np.float32)
    sizes[:10_000] = 0
    counts = np.bincount(sizes.view(np.uint32) >> (31 - BITS), minlength=2**BITS)
    assert 0 < threshold_of(counts, 0.1) < sizes[10_000:].min()
    for share in (0.3, 0.5, 0.9):
        threshold = threshold_of(counts, share)
        assert share <= (sizes <= threshold).mean() < share + 3e-3
        assert threshold == pytest.approx(np.quantile(sizes, share), rel=2**-7)


class Two(nnx.Module):
    def __init__(self):
        self.one, self.other = GatedMLP(2, hidden=2, rngs=nnx.Rngs(0)), MLP(2, rngs=nnx.Rngs(1))


def test_thresholds_are_as_many_as_networks():
    assert isinstance(sparse(Two(), (0.1,)).one, ThresholdedMLP)
    with pytest.raises(UserError, match='2 thresholds are given; this model has 1 gated channel mixers'):
        Quantization(thresholds=(0.1, 0.2))(Two())


def test_a_sparse_run(originals, tmp_path, capsys):
    made, asked = tmp_path / 'made', ['quantize', f'--workdir={originals / "run"}', '--compilation_cache=']
    assert main([*asked, f'--out={made}', '--sparse=0.5', '--rows=4']) == 0
    assert read_record(made).facts['quantized']['sparsity'] == {'share': 0.5, 'rows': 4}
    network = load_run(made).model().stack.blocks[0].mlp
    assert isinstance(network, ThresholdedMLP) and 0 < network.threshold < 2
    assert jnp.issubdtype(network.gate.weight[...].dtype, jnp.floating)
    capsys.readouterr()
    assert main([*asked, f'--out={tmp_path}/no', '--sparse=1.0']) == 2
    assert '--sparse is 1.0; it must be above 0 and below 1' in capsys.readouterr().err


def test_a_sparse_run_whose_hidden_channels_are_convolved(originals, tmp_path, capsys, monkeypatch):
    """Thresholds are of what is thresholded: of the activations behind the convolution, about half on these rows."""
    config = f'--config={LANGUAGE}:zoo=mingru,conv=D,data={originals / "text.txt"}'
    assert main(['train', config, *SMALL, f'--workdir={tmp_path / "run"}']) == 0
    asked = ['quantize', f'--workdir={tmp_path / "run"}', '--compilation_cache=', '--sparse=0.5', '--rows=4']
    assert main([*asked, f'--out={tmp_path / "made"}']) == 0
    made = load_run(tmp_path / 'made')
    model = made.model()
    network = model.stack.blocks[0].mlp.network
    assert isinstance(network, ThresholdedMLP) and network.threshold > 0
    sizes = []

    def read(self, gate, up):
        sizes.append(jnp.abs(jax.nn.silu(gate)))
        return self.down(up)

    monkeypatch.setattr(ThresholdedMLP, 'read', read)
    (batch,) = rows_of(made.setup, 'train', 4, at_once=4)
    made.setup.task.measure(model, jax.tree.map(jnp.asarray, batch), None)
    assert (sizes[0] <= network.threshold).mean() == pytest.approx(0.5, abs=0.02)

    monkeypatch.setattr(_Counts, 'add', lambda self, more: None)
    capsys.readouterr()
    assert main([*asked, f'--out={tmp_path / "no"}']) == 2
    assert 'of 1 gated channel mixers, numbered from 0, 0 computed nothing on 4 rows of' in capsys.readouterr().err
