import dataclasses
import json
import pathlib
import sys
import types

import jax
import numpy as np
import pytest

from pallas_kernels.bench import __main__ as bench
from pallas_kernels.bench import ceilings, measure, problems, table, timing
from pallas_kernels.bench.ceilings import Ceilings


@pytest.mark.slow
@pytest.mark.parametrize('core', problems.CORES)
def test_every_contender_of_every_problem_runs(core, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(problems, 'MAPS', problems.MAPS[:2] + problems.MAPS[-1:])
    record = tmp_path / 'record.json'
    assert bench.main(['--small', '--rounds=2', f'--cores={core}', f'--json={record}']) == 0
    lines = [measure.Measurement(**line) for line in json.loads(record.read_text())['lines']]
    for problem in problems.problems(core, problems.SMALL):
        ours = [line for line in lines if line.problem == problem.name]
        assert {(line.contender, line.what) for line in ours} == {
            (name, what) for name in problem.contenders for what in ('forward', 'forward and backward')
        }
    for line in lines:
        assert line.failure is None, line
        assert line.milliseconds > 0 and line.compile_seconds > 0 and 0 < line.low <= line.ratio <= line.high
        if line.contender == problems.OURS:
            # Heads that sample are plain JAX, whose gain is what they leave out.
            served = None if core in ('sampled_softmax', 'augment_and_reduce', 'partial_fc') else 'xla'
            assert (line.implementation, line.ratio, line.low, line.high) == (served, 1, 1, 1)
    assert f'{core}, {lines[0].problem}, forward\n' in capsys.readouterr().out


def test_forms_of_a_head_are_of_the_same_loss():
    (mixture,) = problems.problems('mixture_of_softmaxes', problems.SMALL)
    ours, dense = (mixture.contenders[name](**mixture.arrays) for name in (problems.OURS, 'dense logits'))
    np.testing.assert_allclose(ours, dense, rtol=1e-4)
    (sampled,) = problems.problems('sampled_softmax', problems.SMALL)
    found = {name: np.asarray(contender(**sampled.arrays)) for name, contender in sampled.contenders.items()}
    np.testing.assert_allclose(found['all classes, fused'], found['dense logits'], rtol=1e-4)
    # 64 of 512 classes for every token: the estimate of the mean is within a tenth.
    np.testing.assert_allclose(found[problems.OURS].mean(), found['dense logits'].mean(), rtol=0.1)


def test_forms_that_leave_out_classes_are_of_the_same_loss():
    (bound,) = problems.problems('augment_and_reduce', problems.SMALL)
    found = {name: np.asarray(contender(**bound.arrays)) for name, contender in bound.contenders.items()}
    np.testing.assert_allclose(found['all classes, fused'], found['dense logits'], rtol=1e-4)
    # Above the loss in the mean over draws; by two of 64 of 512 classes, above it by less than a tenth.
    assert 0 < found[problems.OURS].mean() - found['dense logits'].mean() < 0.1 * found['dense logits'].mean()
    (partial,) = problems.problems('partial_fc', problems.SMALL)
    found = {name: np.asarray(contender(**partial.arrays)) for name, contender in partial.contenders.items()}
    # The own class is among those kept, and what is left out is missing from the normaliser alone.
    apart = found['all classes'] - found[problems.OURS]
    assert (apart >= -1e-4).all() and apart.mean() > 0.1
    # With as many tokens as classes all are kept.
    everything = dataclasses.replace(problems.SMALL, tokens=problems.SMALL.vocab)
    (partial,) = problems.problems('partial_fc', everything)
    found = [np.asarray(contender(**partial.arrays)) for contender in partial.contenders.values()]
    np.testing.assert_allclose(*found, rtol=1e-4)


def test_kernels_of_jax_linear_attention_are_named(monkeypatch):
    asked = []

    def kernel(kind, q, k, v, *, impl, **gates):
        asked.append((kind, impl, gates))
        return v, None

    monkeypatch.setattr(problems.importlib.util, 'find_spec', lambda name: name)
    monkeypatch.setitem(sys.modules, 'jla.ops', types.SimpleNamespace(linear_attention=kernel))
    for core in ('linear_attention', 'delta_rule', 'diagonal_low_rank', 'selective_scan'):
        for problem in problems.problems(core, problems.SMALL):
            if 'jax-linear-attention' in problem.contenders:
                problem.contenders['jax-linear-attention'](**problem.arrays)
    kinds = ['simple_gla', 'simple_gla', 'gla', 'deltanet', 'gated_deltanet', 'kda', 'gdn2', 'rwkv7', 'rwkv7', 'mamba1']
    assert [(kind, impl) for kind, impl, _ in asked] == [(kind, 'mosaic_gpu') for kind in kinds]
    # Without decays it is given some that forget nothing.
    assert not asked[0][2]['g'].any() and asked[1][2]['g'].any()
    assert asked[-4][2].keys() == {'g', 'b', 'w', 'scale'} and asked[-3][2].keys() == {'w', 'a', 'b', 'scale'}
    assert asked[-1][2].keys() == {'dt', 'a', 'backward'}


def test_contenders_are_timed_in_turns():
    calls = []
    timing.alternate({name: lambda name=name: calls.append(name) for name in 'ab'}, 'a', timing.Patience(4, 1e-5))
    turns = [name for name, other in zip(calls, ['', *calls], strict=False) if name != other]
    assert turns.count('a') > 2 and turns.count('b') > 2


def test_ratios_are_taken_within_rounds():
    # The machine is slower by the round; b takes twice as long as a throughout.
    seconds = {'a': [1.0, 5.0, 10.0], 'b': [2.0, 10.0, 20.0]}
    found = timing._times(seconds['b'], seconds['a'])
    assert (found.seconds, found.ratio, found.low, found.high, found.most) == (10, 2, 2, 2, 2)
    found = timing._times([1, 2, 9], [1, 1, 1])
    assert (found.ratio, found.low, found.high, found.most) == (2, 1, 9, 9)


@pytest.mark.parametrize(('rounds', 'ends'), [(3, True), (timing.ENOUGH - 1, True), (timing.ENOUGH, False)])
def test_intervals_of_few_rounds_end_at_the_least_and_the_most(rounds, ends):
    turns = [1.0 + place for place in range(rounds)]
    found = timing._times(turns, [1.0] * rounds)
    assert ((found.low, found.high) == (min(turns), max(turns))) == ends


def test_ratios_of_few_rounds_are_not_said_to_have_an_interval():
    def of(*rounds):
        line = measure.Measurement('softmax', '2 x 3', 'forward', 'ours', milliseconds=1.0)
        return table.heading([dataclasses.replace(line, rounds=number) for number in rounds])[2]

    assert of(None) == of(6, 10, None) == 'ratio (95 %)'
    assert of(3, 3) == 'ratio (least and most of 3 rounds)'
    assert of(10, 5, 3) == 'ratio (95 %, least and most of 3 rounds, least and most of 5 rounds)'


@pytest.mark.parametrize(('core', 'forward', 'both'), [('softmax', 2, 5), ('linear_scan', 3, 8), ('attention', 4, 11)])
def test_both_passes_move_arguments_three_times_and_results_twice(core, forward, both, monkeypatch):
    times = timing.Times(1.0, 1.0, 1.0, 1.0, 1.0, (1.0, 1.0, 1.0))
    monkeypatch.setattr(timing, 'alternate', lambda calls, *_: dict.fromkeys(calls, times))
    problem = next(problems.problems(core, problems.SMALL))
    problem = dataclasses.replace(problem, contenders={problems.OURS: problem.contenders[problems.OURS]})
    lines = list(measure.lines(problem, Ceilings(1e9, 1e30, 1e30), timing.Patience(3)))
    array = next(iter(problem.arrays.values())).nbytes / 1e9
    assert [line.gigabytes / array for line in lines] == pytest.approx([forward, both])
    assert [line.ceiling for line in lines] == pytest.approx([forward * array, both * array])
    assert [line.rounds for line in lines] == [3, 3]


def test_the_ceiling_is_the_slowest_of_three_rates():
    top = Ceilings(bytes_per_second=10, flops_per_second=100, exponentials_per_second=5)
    assert top.seconds(flops=100, moved=20) == 2
    assert top.seconds(flops=500, moved=20) == 5
    assert top.seconds(flops=500, moved=20, exponentials=35) == 7


def test_every_rate_is_measured(monkeypatch):
    times = {'copy': 2.0, 'product': 4.0, 'exponentials': 8.0}
    made = {name: timing.Times(*[seconds] * 5, (seconds,) * 3) for name, seconds in times.items()}
    monkeypatch.setattr(timing, 'alternate', lambda *_: made)
    found = ceilings.measure('cpu', np.dtype(np.float32), timing.Patience(1))
    assert found == Ceilings(24 * 2**20, 2 * 2048**3 / 4, ceilings.CHAIN * 2**16 / 8)
    text = jax.jit(ceilings.chained).lower(np.zeros(8, np.float32)).compile().as_text()
    assert text.count(' exponential(') == ceilings.CHAIN


@pytest.mark.parametrize(
    ('core', 'forward', 'both'), [('selective_scan', 128 * 32 * 16, 128 * 32 * 16), ('linear_scan', 0, 0)]
)
def test_exponentials_are_those_of_the_definition(core, forward, both, monkeypatch):
    problem = next(problems.problems(core, problems.SMALL))
    assert problem.exponentials == (forward, both)
    times = timing.Times(1.0, 1.0, 1.0, 1.0, 1.0, (1.0, 1.0, 1.0))
    monkeypatch.setattr(timing, 'alternate', lambda calls, *_: dict.fromkeys(calls, times))
    problem = dataclasses.replace(problem, contenders={problems.OURS: problem.contenders[problems.OURS]})
    lines = list(measure.lines(problem, Ceilings(1e30, 1e30, 1e9), timing.Patience(3)))
    assert [line.ceiling for line in lines] == pytest.approx([forward / 1e9, both / 1e9], abs=1e-12)


def test_maps_without_exponentials_have_none():
    found = {
        problem.name.partition(':')[0]: problem.exponentials
        for problem in problems.problems('attention', problems.SMALL)
    }
    pairs = 2 * 128 * 129 // 2
    assert found['Softmax'] == found['Sigmoid'] == (pairs, pairs)
    assert found['Relu'] == found['Entmax15'] == (0, 0)


def fails_in_tracing(**_):
    raise RuntimeError('no such kernel\nand more')


def fails_without_a_word(**_):
    raise MemoryError


def fails_when_it_runs(x, **_):
    def never(_):
        raise RuntimeError('no such number')

    return jax.pure_callback(never, jax.typeof(x), jax.lax.stop_gradient(x), vmap_method='sequential')


@pytest.mark.parametrize(
    ('broken', 'error', 'reason'),
    [
        (fails_in_tracing, RuntimeError, 'RuntimeError: no such kernel'),
        (fails_without_a_word, MemoryError, 'MemoryError'),
        (fails_when_it_runs, jax.errors.JaxRuntimeError, f'{jax.errors.JaxRuntimeError.__name__}: '),
    ],
    ids=['in tracing', 'without a word', 'when it runs'],
)
def test_a_contender_that_fails_says_why_and_ours_may_not(broken, error, reason):
    problem = next(problems.problems('linear_scan', problems.SMALL))
    problem.contenders['other'] = broken
    lines = list(measure.lines(problem, Ceilings(1, 1, 1), timing.Patience(2, 1e-3)))
    failed = [line for line in lines if line.contender == 'other']
    assert [line.what for line in failed] == list(measure.PASSES)
    assert all(line.failure.startswith(reason) and '\n' not in line.failure for line in failed)
    assert f'failed: {failed[0].failure}' in table.text(failed[:1])
    assert all(line.milliseconds > 0 for line in lines if line not in failed)
    problem.contenders[problems.OURS] = broken
    with pytest.raises(error):
        list(measure.lines(problem, Ceilings(1, 1, 1), timing.Patience(2, 1e-3)))


def test_the_tables_of_a_page_are_rewritten(tmp_path, capsys):
    line = measure.Measurement(
        'softmax', '2 x 3', 'forward', 'pallas_kernels', 'xla', 1.5, 1.0, 1.0, 1.0, 0.25, 10.0, 0.5, 0.125, 0.3
    )
    record, page = tmp_path / 'record.json', tmp_path / 'page.md'
    record.write_text(json.dumps({'facts': {'device': 'a device', 'jax': '1.2'}, 'lines': [vars(line)]}))
    page.write_text(
        '\n'.join(['before', *table.MEASURED, 'between', table.COMPILED[0], 'old', table.COMPILED[1], 'after\n'])
    )
    built = tmp_path / 'built.jsonl'
    sizes = {'seconds': 1.25, 'arguments MiB': 3.0, 'temporary MiB': 0.5}
    names = {'core': 'softmax', 'call': '2 x 3', 'device': 'a TPU', 'what': 'forward', 'implementation': 'mosaic_tpu'}
    built.write_text(json.dumps(names | sizes) + '\n')
    for _ in range(2):
        assert bench.main([f'--page={page}', str(record), str(built)]) == 0
    text = page.read_text()
    assert text.startswith('before\n') and text.endswith('\nafter\n') and 'old' not in text
    assert 'device a device; jax 1.2.' in text
    row = '| 2 x 3 | forward | pallas_kernels (xla) | 1.5 | 1.00 (1.00 to 1.00) | 0.25 | 10 | 50% | 0.1 | 0.3 |'
    assert text.count(row) == 1
    assert text.count('| `softmax` | 2 x 3 | a TPU | forward | mosaic_tpu | 1.2 | 3 | 0.5 |') == 1
    assert text.index(row) < text.index('between') < text.index('a TPU')
    # What has no record stays.
    assert bench.main([f'--page={page}', str(built)]) == 0
    assert page.read_text() == text
    page.write_text('no place')
    assert 'page.md has no lines' in error_of(capsys, f'--page={page}', str(record))


@pytest.mark.parametrize(
    ('name', 'content', 'message'),
    [
        ('missing.json', None, 'No such file or directory: '),
        (
            'lines.jsonl',
            '{"core": "softmax"}',
            "lines.jsonl is not read (KeyError: 'arguments MiB'); expected lines of",
        ),
        ('table.json', '{"facts": {}}', "table.json is not read (KeyError: 'lines'); expected what --json wrote"),
        ('half.json', '{"facts": ', 'half.json is not read (JSONDecodeError: Expecting value'),
        ('record.txt', '{}', 'record.txt is called neither .json nor .jsonl; expected a record that --json wrote'),
    ],
)
def test_a_file_that_is_no_record_leaves_the_page_as_it_was(name, content, message, tmp_path, capsys):
    page, record = tmp_path / 'page.md', tmp_path / name
    page.write_text('\n'.join([*table.MEASURED, *table.COMPILED]))
    before = page.read_text()
    if content is not None:
        record.write_text(content)
    assert message in error_of(capsys, f'--page={page}', str(record))
    assert page.read_text() == before


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--page=page.md'], '--page rewrites the tables of records; expected both, or neither'),
        (['record.json'], '--page rewrites the tables of records; expected both, or neither'),
        (['--rounds=0'], '--rounds is 0; expected at least 1'),
        (['--json=nowhere/record.json'], 'No such file or directory: '),
        (['--json=.'], '. is no file; expected the path of one'),
    ],
)
def test_arguments_are_checked_before_anything_is_timed(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ceilings, 'measure', None)
    assert message in error_of(capsys, *arguments)


def test_a_record_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    record = tmp_path / 'record.json'
    table.replace(record, 'first')

    def write_half(path, text):
        path.write_bytes(text[: len(text) // 2].encode())
        raise OSError('No space left on device')

    monkeypatch.setattr(pathlib.Path, 'write_text', write_half)
    with pytest.raises(OSError, match='No space'):
        table.replace(record, 'second')
    assert record.read_text() == 'first'
    assert list(tmp_path.iterdir()) == [record]


def error_of(capsys, *arguments):
    """The last line of the command's complaint, which ends it with the status of a wrong command line."""
    with pytest.raises(SystemExit) as ended:
        bench.main(arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_a_core_that_is_none(capsys):
    found = error_of(capsys, '--cores=linear_skan')
    assert "no core is called 'linear_skan'; the cores are softmax, softmax_topk" in found
