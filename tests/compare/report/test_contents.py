"""What a report gathers from the folders of studies: costs, lengths, kernels, links, and what was measured where."""

import json
import os
import pathlib
import urllib.parse
from unittest import mock

import jax
import pytest
from flax import nnx
from optuna.trial import FrozenTrial

from attnlab import config as configs
from attnlab.cli import main
from attnlab.compare.equality import differing
from attnlab.compare.report import contents, measured, tables
from attnlab.compare.report.contents import costs_of, gather, lengths
from attnlab.compare.report.figures import cost_plots
from attnlab.compare.report.measured import DeviceCost, read_measured, shared_device
from attnlab.compare.report.page import opening_of
from attnlab.config import spec_of
from attnlab.errors import UserError
from attnlab.quantize.formats import Symmetric
from attnlab.quantize.layers import Quantization
from attnlab.quantize.training import rounding_called
from attnlab.runs.record import Record, read_record
from attnlab.sweep.study import Study, TrialState, create_study
from attnlab.sweep.trial import Programs, run_trial
from attnlab.train.cost import weight_bytes
from attnlab.train.setup import prepare
from tests.sweep import tiny

HERE = 'cpu'
CORE = {
    'layers': [0],
    'mixer': 'DiagonalRecurrence',
    'core': 'linear_scan',
    'implementation': 'xla',
    'refused': {'mosaic_gpu': 'the platform is cpu'},
}


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Stands in for the clock and the compiler; counts how often something is measured."""
    times = []

    def decode_ms(setup):
        times.append(setup)
        return 1.5 + len(times)

    monkeypatch.setattr(measured, 'decode_ms', decode_ms)
    monkeypatch.setattr(measured, 'peak_bytes', lambda setup: 4096)
    return times


def write_run(workdir, config, value, device, digest='a' * 64):
    """A run directory as training leaves it, without the training."""
    workdir.mkdir(parents=True)
    configs.save(config, workdir / 'config.json')
    facts = {
        'device_kind': device,
        'device_count': 1,
        'parameters': 1000,
        'state_bytes_per_sequence': {'16': 64, '128': 512},
        'flops_per_token': 6000.0,
        'implementations': [CORE],
        'data': {'source': 'none'} | ({} if digest is None else {'content_hash': digest}),
    }
    (workdir / 'run.json').write_text(json.dumps({'starts': [facts]}))
    numbers = {'step': 24, 'valid/loss': value, 'valid/loss@2x': value + 0.5, 'valid/accuracy': 1 - value}
    (workdir / 'metrics.jsonl').write_text(json.dumps(numbers) + '\n')
    speeds = [{'step': step, 'tokens_per_second': 100.0 * step} for step in (1, 2, 3)]
    (workdir / 'speed.jsonl').write_text(''.join(json.dumps(speed) + '\n' for speed in speeds))


@pytest.fixture
def study(tmp_path):
    """Makes a study of four trials, the second failed; each has its learning rate as its value."""

    def made(name, device=HERE, digest='a' * 64, **changes):
        config = tiny.get_config('trials=4')
        with config.unlocked():
            for key, value in changes.items():
                config[key] = value
        opened = create_study(tmp_path / 'studies' / name, config)
        while (claim := opened.claim()) is not None:
            value = claim.drawn['rate']
            config = opened.sweep.config(claim.number, claim.drawn)
            write_run(opened.workdir(claim.number), config, value, device, digest)
            claim.trial.report(value + 1, 6)
            if claim.number == 1:
                opened.tell(claim, TrialState.FAIL, reason='step 3: loss nan')
            else:
                opened.tell(claim, TrialState.COMPLETE, value)
            claim.release()
        return opened.folder

    return made


def gathered(folders, out, **changes):
    return gather(folders, out, **({'by': 'params', 'tolerance': 0.01} | changes))


def test_studies_of_other_data_under_one_name_are_not_matched(study, tmp_path):
    folders = [study('one'), study('two'), study('other', digest='b' * 64), study('before', digest=None)]
    assert gathered(folders, tmp_path / 'report').comparison.reasons == (
        f'other has other data than one: content_hash is {"b" * 12}, not {"a" * 12}',
        f'before has other data than one: content_hash is none, not {"a" * 12}',
    )


def test_what_runs_recorded_is_what_is_shown(study, tmp_path):
    contents = gathered([study('one'), study('two')], tmp_path / 'report')
    assert not contents.comparison.reasons and not contents.notices
    for shown in contents.studies:
        assert (shown.costs.parameters, shown.costs.state_bytes, shown.costs.state_bytes_8x) == (1000, 64, 512)
        assert shown.costs.flops == 6000.0 * 24 * 4 * 16
        assert (shown.costs.tokens_per_second, shown.costs.peak_bytes) == (200.0, 4096)
        assert [trial.state for trial in shown.trials] == ['done', 'failed', 'done', 'done']
        assert shown.trials[1].reason == 'step 3: loss nan' and shown.trials[1].value is None
        ((kernel, count),) = shown.kernels
        assert (kernel.ran.core, kernel.ran.implementation, count) == ('linear_scan', 'xla', 4)
        assert kernel.ran.refused == (('mosaic_gpu', 'the platform is cpu'),)
        (best,) = (trial for trial in shown.trials if trial.best)
        assert best.value == min(trial.value for trial in shown.trials if trial.value is not None)
        assert best.lengths == {1: best.value, 2: best.value + 0.5}
        assert shown.companion.statistics['best'].mean == 1 - best.value
        assert shown.row.points[0].even is not None and all(one.even is None for one in shown.companion.points)
    assert contents.companion == 'valid/accuracy' and contents.length == 16
    assert all(one.equal for one in contents.equalities if one.required)
    assert not differing([study.settings for study in contents.studies])
    assert [one.name for one in contents.equalities if not one.equal] == ['decode_ms'], 'what the clock said twice'
    assert contents.within == '..'
    for shown in contents.studies:
        for trial in shown.trials:
            assert (tmp_path / 'report' / trial.link).resolve().is_dir()


def test_what_differs_is_said(study, tmp_path):
    wider = tiny.base(48)
    with wider.unlocked():
        wider.model.dim = 16
    contents = gathered([study('one'), study('other', base=wider)], tmp_path / 'report')
    assert differing([study.settings for study in contents.studies])['base.model.dim'] == ['8', '16']
    assert differing([study.settings for study in contents.studies])['base.steps'] == ['24', '48']
    found = {one.name: one for one in contents.equalities}
    assert not found['tokens of training'].equal and 'base.steps' in found['tokens of training'].different
    assert (
        not found['flops'].equal and found['flops'].spread == pytest.approx(1 / 3) and found['flops'].most[1] == 'other'
    )
    assert found['params'].equal and found['params'].required and found['search space'].equal


def test_studies_trained_with_few_bits_have_weights_as_they_are_packed(study, tmp_path):
    few = tiny.base()
    with few.unlocked():
        few.rounding = spec_of(rounding_called('int4'))
    contents = gathered([study('whole'), study('few', base=few)], tmp_path / 'report', measure=False)
    # What has few bits is a variant, as the model is.
    assert not contents.comparison.reasons
    whole, packed = (shown.costs for shown in contents.studies)
    setups = [prepare(config) for config in (tiny.base(), few)]
    assert whole.weight_bytes == weight_bytes(setups[0]) == weight_bytes(setups[1])
    quantized = Quantization(Symmetric(4))(setups[0].make_model(nnx.Rngs(0)))
    held = jax.tree.leaves(nnx.state(quantized))
    assert packed.weight_bytes == sum(leaf.size * leaf.dtype.itemsize for leaf in held) < whole.weight_bytes
    assert (whole.bits, packed.bits) == (8 * whole.weight_bytes / 1000, 8 * packed.weight_bytes / 1000)
    assert {'weight_bytes', 'bits'} <= set(costs_of(contents))
    assert {'cost_weight_bytes', 'cost_bits'} <= {plot.name for plot in cost_plots(contents)}
    header, *lines = tables.studies_csv(contents).splitlines()
    place = header.split(',').index('bits')
    assert [float(line.split(',')[place]) for line in lines] == [whole.bits, packed.bits]
    assert 'Bits a parameter' in tables.cost_table(contents)
    opening = opening_of(contents)
    assert opening.cost == 'bits' and f'{packed.bits:.2f} bits a parameter' in opening.sentence
    # Without any of few bits they follow from the parameters.
    plain = gathered([study('one'), study('two')], tmp_path / 'report', measure=False)
    assert not {'weight_bytes', 'bits'} & set(costs_of(plain)) and 'Bits' not in tables.cost_table(plain)
    assert plain.studies[0].costs.bits is None and 'bits' not in tables.studies_csv(plain)


def test_a_study_is_measured_once_and_again_when_asked(study, tmp_path, clock):
    one = study('one')
    for times, measure in ((0, False), (1, None), (1, None), (1, False), (2, True)):
        contents = gathered([one], tmp_path / 'report', measure=measure)
        assert len(clock) == times
        assert contents.studies[0].costs.decode_ms == (1.5 + times if times else None)
    assert read_measured(one)[HERE].packages['jax']


def kept_of(folder, **changes):
    """What a cluster measured of the config that represents a study."""
    config = measured.costing(contents.shown_config(contents.open_studies([folder])[0]))
    numbers = {'decode_ms': 0.25, 'peak_bytes': 2**30, 'python': '3.13.0', 'packages': {'jax': '0.12'}}
    return {'NVIDIA H200': numbers | {'config': config} | changes}


def test_what_was_measured_of_another_config_is_measured_again_where_it_can_be(study, tmp_path, clock):
    folder = study('one')
    gathered([folder], tmp_path / 'report')
    (folder / 'measured.json').write_text(
        json.dumps(kept_of(folder) | json.loads((folder / 'measured.json').read_text()))
    )
    assert set(gathered([folder], tmp_path / 'report').studies[0].measured) == {'NVIDIA H200', HERE} and len(clock) == 1
    # Another trial is best, of a wider model.
    for device, one in (found := json.loads((folder / 'measured.json').read_text())).items():
        found[device] = one | {'config': 'another'}
    (folder / 'measured.json').write_text(json.dumps(found))
    kept = gathered([folder], tmp_path / 'report', measure=False)
    assert not kept.studies[0].measured and kept.studies[0].costs.decode_ms is None and len(clock) == 1
    assert any('What was measured of one on NVIDIA H200, cpu is left out' in notice for notice in kept.notices)
    again = gathered([folder], tmp_path / 'report')
    assert set(again.studies[0].measured) == {HERE} and len(clock) == 2
    assert any('What was measured of one on NVIDIA H200 is left out' in notice for notice in again.notices)


@pytest.mark.parametrize('change', [{'config': 'another'}, {'config': None}])
def test_what_only_a_cluster_measured_of_another_config_is_a_dash(study, tmp_path, clock, change):
    """Nor are files known that do not say of which config they are."""
    folder = study('one', device='NVIDIA H200')
    (numbers,) = kept_of(folder, **change).values()
    known = {name: value for name, value in numbers.items() if value is not None}
    (folder / 'measured.json').write_text(json.dumps({'NVIDIA H200': known}))
    found = gathered([folder], tmp_path / 'report')
    assert not clock and found.device is None and found.studies[0].costs.decode_ms is None
    assert any('What was measured of one on NVIDIA H200 is left out' in notice for notice in found.notices)


def test_what_decoding_and_memory_cost_is_not_told_by_rates():
    config, others = tiny.base(), {}
    for key, value in (('optimizer.peak_lr', 0.5), ('seed', 9), ('steps', 7), ('batch_size', 3), ('length', 5)):
        changed = tiny.base()
        configs.set_value(changed, key, value)
        others[key] = measured.costing(changed) != measured.costing(config)
    assert [key for key, differs in others.items() if differs] == ['batch_size', 'length']


WHOLE = {'decode_ms': 1.5, 'peak_bytes': 3, 'python': '3.13.0', 'packages': {'jax': '0.12'}}


@pytest.mark.parametrize(
    'text',
    [
        '{',
        '[1]',
        '{"cpu": 3}',
        '{"cpu": {"decode": 1}}',
        *(json.dumps({'cpu': WHOLE | {name: 'fast' if name != 'python' else 3}}) for name in WHOLE),
    ],
)
def test_costs_that_are_damaged_are_named(tmp_path, text):
    (tmp_path / 'measured.json').write_text(text)
    with pytest.raises(
        UserError, match=r'measured\.json is damaged: .*; delete it: what was measured is measured again'
    ):
        read_measured(tmp_path)


def test_what_another_device_measured_stays(study, tmp_path, clock):
    """A study of a cluster, reported on a laptop: its numbers are shown, and not lost when the laptop measures too."""
    cluster = study('cluster', device='NVIDIA H200')
    before = kept_of(cluster)
    (cluster / 'measured.json').write_text(json.dumps(before))
    contents = gathered([cluster], tmp_path / 'report')
    assert contents.device == 'NVIDIA H200' and contents.studies[0].costs.decode_ms == 0.25 and not clock
    contents = gathered([cluster], tmp_path / 'report', measure=True)
    assert json.loads((cluster / 'measured.json').read_text())['NVIDIA H200'] == before['NVIDIA H200']
    assert contents.device == 'NVIDIA H200' and set(contents.studies[0].measured) == {'NVIDIA H200', HERE}
    laptop = study('laptop')
    contents = gathered([cluster, laptop], tmp_path / 'report')
    assert contents.device == HERE, 'the one device that both were measured on'
    assert any('several kinds of device' in notice for notice in contents.notices)
    assert any('of cluster were measured on cpu, while its trials ran on NVIDIA H200' in n for n in contents.notices)


def test_what_was_not_measured_on_the_shared_device_is_left_out_and_said(study, tmp_path):
    first, second = study('first', device='NVIDIA H200'), study('second', device='NVIDIA H200')
    kept = kept_of(first, peak_bytes=None)
    (second / 'measured.json').write_text(json.dumps({HERE: kept_of(second)['NVIDIA H200']}))
    (first / 'measured.json').write_text(json.dumps(kept))
    contents = gathered([first, second], tmp_path / 'report')
    assert contents.device == 'NVIDIA H200'
    assert [shown.costs.decode_ms for shown in contents.studies] == [0.25, None]
    assert any(
        'second has no decoding time and memory on NVIDIA H200: it was measured on cpu' in n for n in contents.notices
    )


def test_the_device_to_compare_on():
    number = DeviceCost(1.0, None, '3.13', {})
    assert shared_device([], {}) is None and shared_device([{}], {'cpu': 3}) is None
    assert shared_device([{'a': number, 'b': number}, {'b': number}], {'a': 9}) == 'b'
    assert shared_device([{'a': number, 'b': number}], {'b': 2}) == 'b'
    assert shared_device([{'b': number, 'a': number}], {}) == 'a'


def test_a_study_that_cannot_be_built_here_is_reported_all_the_same(study, tmp_path):
    """Its runs said what they cost; only what is measured is lacking."""
    base = tiny.base()
    with base.unlocked():
        base.mesh.data = 64
    contents = gathered([study('wide', base=base)], tmp_path / 'report')
    assert contents.studies[0].costs.parameters == 1000 and contents.studies[0].costs.decode_ms is None
    assert 'wide could not be measured here: ' in contents.notices[0] and '64' in contents.notices[0]


def test_runs_that_are_gone_have_no_link(study, tmp_path):
    folder = study('one')
    (folder / 'trials' / '0002').rename(tmp_path / 'elsewhere')
    contents = gathered([folder], tmp_path / 'report')
    assert [trial.link is None for trial in contents.studies[0].trials] == [False, False, True, False]
    assert contents.notices == ('1 of the run directories of one are not there, and have no link.',)


def test_strict_refuses_before_anything_is_measured(study, tmp_path, clock):
    with pytest.raises(UserError, match='the studies are not matched'):
        gathered([study('one'), study('two', seeds=(5,))], tmp_path / 'report', strict=True)
    assert not clock


def test_lengths_are_read_from_the_names_of_metrics(tmp_path):
    def record(last, multiples=(1,)):
        config = tiny.base()
        with config.unlocked():
            config.evals[0].multiples = multiples
        return Record(tmp_path, config, 24, last, {}, None)

    held_out = {'valid/loss': 2.0, 'valid/loss@4x': 3.0, 'valid/perplexity@4x': 9.0, 'test/loss@8x': 1.0}
    assert lengths(record(held_out), 'valid/loss') == {1: 2.0, 4: 3.0}
    assert lengths(record(held_out, multiples=(2, 4)), 'valid/loss') == {2: 2.0, 4: 3.0}
    averaged = {'valid_ema/loss': 2.0, 'valid_ema/loss@4x': 3.0}
    assert lengths(record(averaged, multiples=(2, 4)), 'valid_ema/loss') == {2: 2.0, 4: 3.0}
    slices = {'test/1x/accuracy': 0.9, 'test/2x/accuracy': 0.5, 'test/2x/loss': 1.0, 'test/hard/accuracy': 0.1}
    assert lengths(record(slices), 'test/1x/accuracy') == {1: 0.9, 2: 0.5}
    assert lengths(record(slices), 'test/hard/accuracy') == {}
    assert lengths(record({'valid/loss': 2.0}), 'valid/loss') == {}
    assert lengths(record({'valid/loss': 2.0, 'valid/loss@2x': float('nan')}), 'valid/loss') == {}


@pytest.mark.slow
def test_a_real_study_is_reported_twice_with_the_same_bytes(tmp_path, monkeypatch):
    """Trained, measured and compiled for real: pages side by side agree, and every link leads to a run."""
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    study = create_study(pathlib.Path('studies/mingru'), tiny.get_config('trials=2,confirm=0'))
    programs = Programs()
    while (claim := study.claim()) is not None:
        run_trial(study, claim, programs)
        claim.release()
    for name in ('one', 'two'):
        assert main(['report', 'studies/mingru', f'--out={name}', '--compilation_cache=']) == 0
    names = sorted(os.listdir('one'))
    assert names == sorted(os.listdir('two')) and 'index.html' in names
    for name in names:
        assert pathlib.Path('one', name).read_bytes() == pathlib.Path('two', name).read_bytes(), name
    (numbers,) = read_measured(study.folder).values()
    assert numbers.decode_ms > 0
    parameters = read_record(study.workdir(0)).parameters
    assert numbers.peak_bytes > 3 * 4 * parameters, 'parameters and both moments of Adam, in float32'
    page = pathlib.Path('one/index.html').read_text()
    assert f'{numbers.decode_ms:.3g}'[:4] in page
    links = [urllib.parse.unquote(link) for link in page.split('href="')[1:] for link in [link.partition('"')[0]]]
    runs = [link for link in links if '/trials/' in link]
    assert len(runs) == 2 and all((pathlib.Path('one') / link / 'config.json').exists() for link in runs)


def test_lengths_of_every_run_are_of_the_metric_that_is_reported(monkeypatch, tmp_path):
    last = {'valid/1x/accuracy': 0.9, 'valid/2x/accuracy': 0.8, 'test/1x/accuracy': 0.7, 'test/2x/accuracy': 0.6}
    record = mock.Mock(spec=Record, last=last, tokens_per_second=1.0, facts={'device_kind': 'cpu'})
    monkeypatch.setattr(contents, 'recorded', lambda folder: record)
    found = mock.Mock(spec=FrozenTrial, number=0, state=TrialState.COMPLETE, user_attrs={}, value=0.9)
    study = mock.Mock(
        spec=Study,
        workdir=lambda number: tmp_path,
        best=lambda: found,
        settings=lambda trial: {},
        sweep=mock.Mock(seed=lambda number: 0, metric='valid/1x/accuracy', score='test/1x/accuracy'),
    )
    assert contents._trial(study, found, tmp_path, confirms=False).lengths == {1: 0.7, 2: 0.6}
