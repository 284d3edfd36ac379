"""A quantized run is a run: it loads to the bit, evaluates, generates, and is compared."""

import json
import shutil

import jax
import numpy as np
import pytest
from rich.console import Console

from attnlab.cli import main
from attnlab.config import spec
from attnlab.errors import UserError
from attnlab.quantize.formats import Affine, Crossed, Floating, Symmetric, storage_called
from attnlab.quantize.layers import Quantization, linear_maps
from attnlab.runs.loading import load_run
from attnlab.runs.record import read_record
from attnlab.train.launch import launch
from attnlab.train.report import read_lines
from attnlab.train.run import saved_config
from tests.bad_inputs.conftest import originals

__all__ = ['originals']


def test_a_quantized_run(originals, tmp_path, capsys):
    run, made = tmp_path / 'run', tmp_path / 'made'
    shutil.copytree(originals / 'run', run)
    # Devices need not be those it was trained on.
    config = json.loads((run / 'config.json').read_text())
    config['mesh']['tensor'] = 64
    (run / 'config.json').write_text(json.dumps(config))
    common = ['--compilation_cache=', '--format=json']
    assert main(['quantize', f'--workdir={run}', f'--out={made}', '--weights=int4@8', '--inputs=affine8', *common]) == 0
    first = read_record(made)
    assert first.quantized and first.finished and first.parameters == read_record(run).parameters
    assert first.facts['quantized']['from'] == str(run)
    # It is the run, changed, to the bit; and its codes lie on the disk in their packed form.
    loaded, changed = load_run(made), load_run(run).altered(Quantization(Symmetric(4, scope=8), Affine(8)))
    ours, theirs = (jax.tree.leaves(each.variables) for each in (loaded, changed))
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype
    assert sum(leaf.nbytes for leaf in ours) == first.weight_bytes < read_record(run).weight_bytes
    assert any(leaf.dtype == np.uint8 for leaf in ours)
    # Its evaluation is what training wrote down of the run, made anew.
    names = [line.keys() for line in map(json.loads, (made / 'metrics.jsonl').read_text().splitlines())]
    lines = [json.loads(line) for line in (run / 'metrics.jsonl').read_text().splitlines()]
    evaluated = {name for line in lines for name in line if name.startswith('valid/')}
    assert names == [{'step', *evaluated}]
    capsys.readouterr()
    for arguments, sentence in (
        ([f'--workdir={made}', f'--out={tmp_path}/again'], 'is quantized already'),
        ([f'--workdir={run}', f'--out={made}'], 'holds a run already'),
    ):
        assert main(['quantize', *arguments, '--weights=int4', *common]) == 2
        assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    'name',
    # Bases of all groups are searched operation by operation.
    [
        *('log4', 'logsqrt4', pytest.param('adalog4', marks=pytest.mark.slow), 'e4m3', 'e5m2', 'adae2m1', 'mxe2m1'),
        *('minmax3', 'int8', 'higgs3@8', 'higgs4x2@8', 'higgs2x4@8'),
    ],
)
def test_every_kind_of_format_is_read_from_the_disk_as_it_was_written(originals, tmp_path, monkeypatch, name):
    run, made = originals / 'run', tmp_path / 'made'
    # Numbers of evaluators are those of the test above.
    monkeypatch.setattr('attnlab.runs.made.evaluated', lambda made: {})
    assert main(['quantize', f'--workdir={run}', f'--out={made}', f'--weights={name}', '--compilation_cache=']) == 0
    loaded, changed = load_run(made), load_run(run).altered(Quantization(storage_called(name)))
    ours, theirs = (jax.tree.leaves_with_path(each.variables) for each in (loaded, changed))
    assert [path for path, _ in ours] == [path for path, _ in theirs]
    for (_, one), (_, other) in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype
        # Bytes, since numbers that are alike to a comparison may not be.
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    # What its maps multiply with are the numbers that the format makes of the run's own.
    (layer,), (read,) = (tuple(load_run(each).model().stack.layers()) for each in (run, made))
    for (_, _, one), (_, _, other) in zip(linear_maps(layer), linear_maps(read), strict=True):
        assert other.format == storage_called(name)
        np.testing.assert_array_equal(other.matrix(), storage_called(name).rounded(one.weight[...].T).T)
    # Codes and scales lie on the disk in the bytes that the format says, and those are fewer.
    stored = [linear for _, _, linear in linear_maps(read)]
    held = sum(each[...].size * each[...].dtype.itemsize for linear in stored for each in linear.stored.values())
    assert held == sum(storage_called(name).stored_bits(linear.shape[::-1]) for linear in stored) // 8
    assert read_record(made).weight_bytes < read_record(run).weight_bytes
    facts = read_record(made).facts['quantized']
    assert held == facts['bits'] * facts['quantized'] / 8 < 4 * facts['quantized']


@pytest.mark.parametrize(
    ('flags', 'quantization'),
    [
        (('--weights=int4', '--inputs=cross8'), Quantization(Symmetric(4), Crossed(8))),
        (('--inputs=cross6',), Quantization(inputs=Crossed(6))),
        (('--weights=int8', '--inputs=int8', '--native'), Quantization(Symmetric(8), Symmetric(8), native=True)),
        (
            ('--weights=e4m3', '--inputs=e5m2', '--native'),
            Quantization(Floating('e4m3'), Floating('e5m2'), native=True),
        ),
    ],
    ids=lambda value: '+'.join(value) if isinstance(value, tuple) else '',
)
def test_inputs_of_few_bits_and_native_products_are_the_same_after_the_disk(originals, tmp_path, flags, quantization):
    run, made = originals / 'run', tmp_path / 'made'
    assert main(['quantize', f'--workdir={run}', f'--out={made}', '--compilation_cache=', *flags]) == 0
    loaded, changed = load_run(made), load_run(run).altered(quantization)
    ours, theirs = (jax.tree.leaves_with_path(each.variables) for each in (loaded, changed))
    assert [path for path, _ in ours] == [path for path, _ in theirs]
    for (_, one), (_, other) in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype and np.asarray(one).tobytes() == np.asarray(other).tobytes()
    if quantization.weights is not None:
        assert read_record(made).weight_bytes < read_record(run).weight_bytes
    for (_, _, one), (_, _, other) in zip(linear_maps(loaded.model()), linear_maps(changed.model()), strict=True):
        assert one.input_format == other.input_format == quantization.inputs and one.native == quantization.native
    # And so are losses, to the bit, which are not those of the run.
    batch = {name: array[None] for name, array in loaded.setup.task.source('valid', 16)[0].items()}
    found = [
        float(each.setup.measure(each.variables, batch)['loss'].total) for each in (loaded, changed, load_run(run))
    ]
    assert found[0] == found[1] != found[2]


def test_a_run_of_states_of_few_bits(originals, tmp_path, capsys):
    run, made = originals / 'run', tmp_path / 'made'
    asked = ['quantize', f'--workdir={run}', f'--out={made}', '--compilation_cache=', '--format=json']
    assert main([*asked, '--state=kivi2']) == 2
    assert 'no block of this model has a state that KIVI stores' in capsys.readouterr().err
    assert main([*asked, '--state=int3']) == 0
    few, whole = (read_record(each).facts['state_bytes_per_sequence'] for each in (made, run))
    assert few.keys() == whole.keys() and all(few[length] < whole[length] for length in whole)
    # It is evaluated with the state that it decodes with, and so with another loss.
    last, before = (
        [line['valid/loss'] for line in read_lines(each / 'metrics.jsonl') if 'valid/loss' in line][-1]
        for each in (made, run)
    )
    assert 0 < abs(last - before) < 0.1
    assert load_run(made).model().stack.blocks[0].mixer.format == Symmetric(3)


@pytest.mark.slow
def test_commands_take_it(originals, tmp_path):
    run, made = originals / 'run', tmp_path / 'made'
    assert main(['quantize', f'--workdir={run}', f'--out={made}', '--weights=higgs4', '--compilation_cache=']) == 0
    for command in ('eval --multiples=1 --tokens=64', 'generate --tokens=2', 'analyse --rows=2 --bits=', 'show'):
        name, *flags = command.split()
        place = [str(made)] if name == 'show' else [f'--workdir={made}', '--compilation_cache=']
        assert main([name, *place, *flags]) == 0
    assert main(['compare', str(run), str(made), f'--out={tmp_path}/out']) == 0


def test_it_is_not_trained(originals, tmp_path):
    config = saved_config(originals / 'run')
    with config.unlocked():
        config.quantization = spec(Quantization, weights=spec(Symmetric, bits=4))
    with pytest.raises(UserError, match=r'config\.quantization is of a quantized run, which cannot be trained'):
        launch(config, tmp_path / 'new', console=Console(quiet=True))
