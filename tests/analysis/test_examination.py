"""`attnlab analyse` of runs of few bits."""

import json

import pytest

from attnlab.analysis.examination import _layers
from attnlab.cli import main
from attnlab.quantize.formats import Symmetric
from attnlab.quantize.layers import Quantization
from attnlab.quantize.states import KIVI
from attnlab.runs.loading import load_run
from attnlab.train.rows import rows_of
from tests.bad_inputs.conftest import LANGUAGE, SMALL, originals

__all__ = ['originals']


def test_maps_of_few_bits_are_rounded_again_only_if_asked(originals, tmp_path, capsys):
    few = tmp_path / 'few'
    common = ('--compilation_cache=', '--format=json')
    assert main(['quantize', f'--workdir={originals / "run"}', f'--out={few}', '--weights=int4', *common]) == 0
    asked = ['analyse', f'--workdir={few}', '--rows=2', '--compilation_cache=']
    capsys.readouterr()
    assert main(asked) == 0
    assert 'linear maps have few bits, and are not rounded again' in capsys.readouterr().out
    (written,) = few.glob('analysis/*.json')
    found = json.loads(written.read_text())
    assert found['bits'] == [] and found['loss_by_bits'].keys() == {'32'} and found['loss_by_bits']['32'] > 0
    assert main([*asked, '--bits=8']) == 2
    assert 'this model is quantized' in capsys.readouterr().err


@pytest.mark.parametrize('how', [Symmetric(8), KIVI(4, group=4, window=4)])
def test_attention_whose_state_is_stored_is_attention(originals, tmp_path, how):
    run = tmp_path / 'run'
    config = f'--config={LANGUAGE}:zoo=nope,data={originals / "text.txt"}'
    assert main(['train', config, *SMALL, f'--workdir={run}']) == 0
    loaded = load_run(run)
    rows = rows_of(loaded.setup, 'valid', 1)
    plain, stored = (list(_layers(each, rows)) for each in (loaded, loaded.altered(Quantization(state=how))))
    assert {'sink_rate', 'entropy', 'sparsity'} < plain[0].keys() == stored[0].keys()
    # What the first layer reads is the same.
    for name in ('sink_rate', 'entropy', 'sparsity'):
        assert stored[0][name] == pytest.approx(plain[0][name], rel=1e-5)
