"""Several formats of one run: a run of each, compared with the run they are made of."""

import csv
import json

import pytest

from attnlab.cli import main
from attnlab.errors import UserError
from attnlab.quantize.each import combinations
from attnlab.quantize.formats import Affine, Symmetric
from attnlab.quantize.layers import Quantization
from attnlab.runs.record import read_record
from tests.bad_inputs.conftest import originals

__all__ = ['originals']


def test_every_combination_but_that_of_nothing():
    found = combinations({'weights': 'none,int4', 'inputs': 'none,affine8'})
    assert found == {
        'inputs=affine8': Quantization(None, Affine(8)),
        'weights=int4': Quantization(Symmetric(4)),
        'weights=int4+inputs=affine8': Quantization(Symmetric(4), Affine(8)),
    }
    for names, message in (
        ({'weights': 'int4,int4'}, r'--weights is int4,int4; every format may be named once'),
        ({'weights': 'none'}, 'nothing is quantized: give several formats'),
        ({}, 'nothing is quantized'),
        ({'weights': 'int4,imt3'}, 'imt3'),
        ({'weights': 'int4,affine8x'}, 'affine8x'),
    ):
        with pytest.raises(UserError, match=message):
            combinations(names)


def test_a_run_of_each_format_and_their_comparison(originals, tmp_path, capsys):
    run, out = originals / 'run', tmp_path / 'each'
    asked = ['quantize', f'--workdir={run}', f'--out={out}', '--each', '--compilation_cache=', '--format=json']
    assert main([*asked, '--weights=int8,int3']) == 0
    names = ['weights=int8', 'weights=int3']
    sizes = [read_record(out / name).weight_bytes for name in names]
    assert read_record(run).weight_bytes > sizes[0] > sizes[1]
    rows = {row['name']: row for row in csv.DictReader((out / 'comparison' / 'runs.csv').read_text().splitlines())}
    assert rows.keys() == {'run', *names}
    assert [int(rows[name]['weight_bytes']) for name in names] == sizes
    # What is there is left, and the command goes on with what is missing.
    before = (out / names[0] / 'metrics.jsonl').stat().st_mtime_ns
    capsys.readouterr()
    assert main([*asked, '--weights=int8,int2']) == 0
    assert (out / names[0] / 'metrics.jsonl').stat().st_mtime_ns == before
    assert read_record(out / 'weights=int2').weight_bytes < sizes[1]
    # Of the same format, made otherwise.
    assert main([*asked, '--weights=int8,int3', '--tuned=2']) == 2
    assert 'weights=int8 holds a run of another format, made otherwise' in json.dumps(capsys.readouterr().err)
    assert main([*asked, '--weights=int8', '--step=2']) == 2
    assert 'made otherwise' in json.dumps(capsys.readouterr().err)
    # Of another run, or another format under that name.
    config = out / names[0] / 'config.json'
    config.write_text(config.read_text().replace('"bits": 8', '"bits": 7'))
    assert main([*asked, '--weights=int8']) == 2
    assert 'weights=int8 holds a run of another format' in json.dumps(capsys.readouterr().err)


@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        (['--budget=4'], '--budget does not go with --each'),
        (['--sparse=0.5'], '--sparse does not go with --each'),
        (['--inputs=fixed8'], 'fixed8'),
        (
            ['--weights=none,int4', '--inputs=affine8', '--feedback=8'],
            '--feedback is for weights of few bits; leave none out',
        ),
        (
            ['--weights=int4,none', '--state=int8', '--tuned=2'],
            '--tuned is for weights of few bits; leave none out of --weights=int4,none',
        ),
        (
            ['--weights=int4,e4m3', '--tuned=2'],
            '--tuned is for weights such as int3, affine3 or minmax3; it does not go with weights=e4m3',
        ),
        (
            ['--weights=int4,higgs4', '--feedback=2'],
            '--feedback is for weights such as int4, affine4, minmax4, e2m1 or mxe2m1; it does not go with '
            'weights=higgs4',
        ),
    ],
)
def test_what_goes_one_at_a_time(flags, message, capsys):
    given = flags if any(each.startswith('--weights') for each in flags) else ['--weights=int8,int4', *flags]
    assert main(['quantize', '--workdir=nowhere', '--out=nowhere', '--each', *given]) == 2
    assert message in capsys.readouterr().err
