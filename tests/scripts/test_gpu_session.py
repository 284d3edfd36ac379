"""A session on a GPU, rehearsed on a CPU: whatever becomes of a case, no other is lost."""

import fcntl
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import types
import urllib.parse

import jax
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import dispatch, target, tiling, tuning
from pallas_kernels.bench import table
from scripts import gpu_session
from scripts.session import cases, expected, lines, parent, preparation, report, turn, worker
from scripts.session.stages import bench, correct, limits, profile, rehearsal, sanitize, tune

ROOT = pathlib.Path(__file__).parent.parent.parent
SCRIPT = ROOT / 'scripts' / 'gpu_session.py'

TUNED = 'tune/softmax/0, k 16/softmax_hopper 1'
EXPECTED = {
    'check/smoke': 'ok',
    'check/tools': 'ok',
    'correct/softmax/one/float32/mosaic_gpu': 'ok',
    'correct/softmax/one/float32/xla': 'ok',
    'correct/linear_scan/one/float32/xla': 'ok',
    'limits/offsets/4096 x 256': 'ok',
    'limits/length/linear_scan/64': 'ok',
    'limits/sequences/linear_scan/128': 'ok',
    'limits/softmax/one/bfloat16/mosaic_gpu': 'ok',
    'sanitize/softmax': 'skipped',
    TUNED: 'ok',
    'rehearsal/right': 'ok',
    'rehearsal/hang': 'timeout',
    'rehearsal/crash': 'failed',
    'rehearsal/raise': 'failed',
    'rehearsal/refuse': 'skipped',
    'rehearsal/wrong': 'wrong',
    'rehearsal/right again': 'ok',
}


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, SCRIPT, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.fixture(scope='module')
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp('session')
    assert preparation.prepare(folder, ['check', 'correct', 'limits', 'sanitize', 'tune', 'rehearsal'], small=True) == 0
    return folder


@pytest.fixture(scope='module')
def ran(prepared, tmp_path_factory):
    out = tmp_path_factory.mktemp('out')
    process = start('run', f'--from={prepared}', f'--out={out}', '--workers=2', '--minutes=8')
    printed = process.communicate(timeout=500)[0]
    assert process.returncode == 1, printed
    return out


def alive(command):
    """The processes that run a piece of Python, given by its text."""
    found = []
    for path in pathlib.Path('/proc').glob('[0-9]*/cmdline'):
        try:
            text = path.read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if command.encode() in text:
            found.append(path)
    return found


@pytest.mark.slow
@pytest.mark.xdist_group('gpu_session')
def test_a_case_that_hangs_crashes_or_is_wrong_takes_none_with_it(ran):
    found = [json.loads(line) for line in (ran / 'session.jsonl').read_text().splitlines()]
    assert {line['id']: line['status'] for line in found} == EXPECTED
    assert len(found) == len(EXPECTED)
    by_id = {line['id']: line for line in found}
    assert by_id['rehearsal/crash']['reason'] == 'its process died: SIGSEGV'
    assert by_id['rehearsal/hang']['reason'] == 'it took longer than 3 s'
    assert by_id['rehearsal/raise']['reason'] == 'ValueError: on purpose'
    kernel = by_id['correct/softmax/one/float32/mosaic_gpu']
    assert kernel['served'] == 'mosaic_gpu' and kernel['worst']['of_bound'] <= 1 and kernel['pass']
    assert all(line['commit'] and line['versions']['jax'] and line['device'] for line in found)


@pytest.mark.slow
@pytest.mark.xdist_group('gpu_session')
def test_a_resumed_session_leaves_out_what_is_ok_and_ends_cleanly_when_told_to(prepared, ran, tmp_path):
    arguments = [f'--from={prepared}', f'--out={tmp_path}', '--resume', ran / 'session.jsonl', '--patience=100']
    process = start('run', *arguments)
    log, deadline = tmp_path / 'session.log', time.monotonic() + 200
    while '--- rehearsal/hang' not in (log.read_text() if log.exists() else '') and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    printed = process.communicate(timeout=60)[0]
    found = lines.read([tmp_path / 'session.jsonl'])
    assert {line['id'] for line in found} <= {name for name, status in EXPECTED.items() if status != 'ok'}
    assert {line['id']: line['status'] for line in found}['rehearsal/hang'] == 'skipped', printed
    assert '12 were ok before; the session was stopped' in printed
    assert not alive(f'--from={prepared}')
    merged = lines.newest([ran / 'session.jsonl', tmp_path / 'session.jsonl'])
    assert merged.keys() == EXPECTED.keys()
    # What was skipped now does not hide what was found before.
    assert merged['rehearsal/hang']['status'] == 'timeout'


@pytest.mark.slow
@pytest.mark.xdist_group('gpu_session')
def test_times_of_interpreted_kernels_make_no_table(ran, tmp_path):
    line = lines.newest([ran / 'session.jsonl'])[TUNED]
    assert [one['contender'] for one in line['measured']] == ['heuristic', 'candidate'] and line['interpreted']
    assert tuning.entry('the line', line['tile'])[1] != tiling.softmax_hopper(64, 128, 4)
    with pytest.raises(ValueError, match='kernels were interpreted in these records'):
        list(tune.tables([ran / 'session.jsonl'], tmp_path))
    assert not list(tmp_path.iterdir())


def tuned(folder, *candidates, kind='NVIDIA H100 80GB HBM3', sizes=(16384, 8192, 2)):
    """A record of tiles of softmax as if measured: the number of the candidate, its ratio, the end of the interval, and
    the greatest of a round where it is another."""
    asked = tuning.Asked('softmax_hopper', tuple(sorted(zip(('n', 'o', 'itemsize'), sizes, strict=True))))
    tiles = tuning.candidates(asked)
    record = lines.Record(folder / 'session.jsonl')
    for number, ratio, high, *most in candidates:
        case = tune.case('softmax', 0, 128, asked, number, tiles[number])
        measured = [
            {'contender': 'heuristic', 'milliseconds': [1.0, 1.0, 1.0], 'ratio': 1.0, 'low': 1.0, 'high': 1.0},
            {'contender': 'candidate', 'milliseconds': [ratio] * 3, 'ratio': ratio, 'low': 0.5, 'high': high}
            | ({'most': most[0]} if most else {}),
        ]
        line = {'status': 'ok', 'kind': kind, 'interpreted': False, 'measured': measured}
        record.add({**cases.fields(case), **line, 'commit': 'abc'})
    record.close()
    return folder / 'session.jsonl', asked, tiles


def test_the_fastest_tile_that_is_surely_faster_is_in_the_table_until_measured_anew(tmp_path):
    record, asked, tiles = tuned(tmp_path, (1, 0.9, 0.95), (2, 0.7, 1.1), (3, 0.8, 0.9), (4, 0.6, 0.9, 1.01))
    kind, folder = 'NVIDIA H100 80GB HBM3', tmp_path / 'tuned'
    said = list(tune.tables([record], folder))
    path = folder / 'nvidia_h100_80gb_hbm3.json'
    assert said == [f'{path}: 1 of 1 calls have a faster tile, 0 others are as before']
    assert tuning.read(path, kind) == {asked: tiles[3]}
    found = json.loads(path.read_text())['tiles'][0]
    assert found['milliseconds'] == 0.8 and found['heuristic_milliseconds'] == 1.0 and found['commit'] == 'abc'

    (tmp_path / 'other').mkdir()
    record, other, tiles = tuned(tmp_path / 'other', (1, 0.5, 0.6), sizes=(4096, 1024, 2))
    list(tune.tables([record], folder))
    assert set(tuning.read(path, kind)) == {asked, other}
    (tmp_path / 'slower').mkdir()
    record, *_ = tuned(tmp_path / 'slower', (1, 1.2, 1.3))
    list(tune.tables([record], folder))
    assert set(tuning.read(path, kind)) == {other}


def test_a_table_of_nothing_is_not_written(tmp_path):
    record, *_ = tuned(tmp_path, (1, 1.2, 1.3))
    assert list(tune.tables([record], tmp_path / 'tuned')) == [
        'NVIDIA H100 80GB HBM3: no candidate was faster than the rules; it has no table'
    ]
    assert not (tmp_path / 'tuned').exists()
    record.write_text('{"id": "check/smoke", "stage": "check", "status": "ok"}\n')
    with pytest.raises(ValueError, match='no case of the stage tune was ok'):
        list(tune.tables([record], tmp_path / 'tuned'))


def test_results_that_differ_are_found():
    one = [np.ones(3, np.float32), np.full(2, 4, np.float32)]
    assert tune.difference([jax.numpy.asarray(x) for x in one], [jax.numpy.asarray(x) for x in one]) is None
    in_another_order = [jax.numpy.asarray(one[0]), jax.numpy.asarray([4, 4 * (1 + 2**-18)], 'float32')]
    assert tune.difference(in_another_order, [jax.numpy.asarray(x) for x in one]) is None
    for wrong in (1.001, np.nan):
        other = [jax.numpy.asarray(one[0]), jax.numpy.asarray([4, 4 * wrong], 'float32')]
        assert tune.difference(other, [jax.numpy.asarray(x) for x in one]).startswith('result 1 is ')


@pytest.mark.parametrize('change', [1e-3, np.nan])
def test_a_number_that_is_off_is_found_with_its_place(change, prepared, monkeypatch):
    call, numbers = expected.read(prepared, correct.case('linear_scan', 'one', 'float32', 'xla'))
    numbers['gradient of x'][1, 0, 2] += change
    monkeypatch.setattr(expected, 'read', lambda folder, case: (call, numbers))
    monkeypatch.setattr(jax, 'clear_caches', lambda: None)
    line = correct.run(correct.case('linear_scan', 'one', 'float32', 'xla'), prepared)
    assert line['status'] == 'wrong' and line['worst']['where'] == 'gradient of x [1, 0, 2]'
    assert json.loads(json.dumps(line, allow_nan=False)) == line


@pytest.mark.parametrize(
    ('tool', 'status', 'reason'),
    [
        ('shift 2; exec "$@"', 'ok', None),
        (
            'echo "========= COMPUTE-SANITIZER"; echo "========= Invalid __global__ write of size 4 bytes"; '
            'echo "=========     at softmax_forward+0x40"; exit 9',
            'wrong',
            'Invalid __global__ write of size 4 bytes at softmax_forward+0x40',
        ),
        ('exit 3', 'failed', 'under compute-sanitizer the case ended with status 3'),
    ],
    ids=['clean', 'found', 'broken'],
)
def test_what_the_sanitizer_says_is_the_result(tool, status, reason, prepared, tmp_path, monkeypatch):
    (tmp_path / sanitize.TOOL).write_text(f'#!/bin/sh\n{tool}\n')
    (tmp_path / sanitize.TOOL).chmod(0o755)
    monkeypatch.setenv('PATH', f'{tmp_path}{os.pathsep}{os.environ["PATH"]}')
    (case,) = sanitize.cases(small=True)
    line = sanitize.run(case, prepared)
    assert (line['status'], line.get('reason')) == (status, reason)
    assert (line.get('served') == 'mosaic_gpu') == (status == 'ok')


def test_last_rows_that_are_those_of_others_are_found(monkeypatch):
    case, *_ = limits.cases(small=True)
    form = limits.pallas_kernels.softmax
    of_others = lambda x, implementation: form(jax.numpy.roll(x, 1, 0), implementation='xla')  # noqa: E731
    monkeypatch.setattr(limits.pallas_kernels, 'softmax', of_others)
    monkeypatch.setattr(jax, 'clear_caches', lambda: None)
    line = limits.run(case, pathlib.Path())
    assert line['status'] == 'wrong' and line['reason'].startswith('last rows [')


def test_a_long_row_and_many_sequences_are_compared_with_the_portable_form(monkeypatch):
    _, length, sequences, *_ = limits.cases(small=True)
    monkeypatch.setattr(jax, 'clear_caches', lambda: None)
    assert [limits.run(case, pathlib.Path())['served'] for case in (length, sequences)] == ['mosaic_gpu', 'xla']
    form = limits.pallas_kernels.linear_scan

    def of_others(x, *arguments, implementation, **others):
        x = jax.numpy.roll(x, 1, 0) if implementation is None else x
        return form(x, *arguments, implementation='xla', **others)

    monkeypatch.setattr(limits.pallas_kernels, 'linear_scan', of_others)
    line = limits.run(sequences, pathlib.Path())
    assert line['status'] == 'wrong' and line['reason'].startswith('output 0 [')


@pytest.mark.parametrize('core', ['linear_attention', 'linear_scan'])
def test_more_sequences_than_a_grid_has_blocks_are_served_by_the_portable_form(core):
    case = next(case for case in limits.cases(small=False) if case.id.startswith(f'limits/sequences/{core}/'))
    for size, form in ((int(case.call), limits.PORTABLE), (8, 'mosaic_gpu')):
        call = jax.eval_shape(lambda size=size: limits._drawn(case, b=size).arrays)
        with target.compiling_for(target.H100), dispatch.ledger() as entries:
            jax.eval_shape(lambda arrays: getattr(pallas_kernels, core)(**arrays), call)
        assert entries[0].implementation == form


def test_two_runs_that_differ_in_a_bit_are_told_apart():
    one = np.ones((2, 3), np.float32)
    other = one.copy()
    assert limits.difference('output', one, other) is None
    other[1, 2] = np.nextafter(np.float32(1), 2)
    assert limits.difference('output', one, other)['reason'] == 'two runs differ in 1 of 6 numbers of output'
    # A zero of another sign is another result, though equal.
    assert limits.difference('output', np.zeros(1), -np.zeros(1))['status'] == 'wrong'


def test_when_the_minutes_are_over_nothing_is_begun(prepared, tmp_path, capsys):
    session = parent.Session(folder=prepared, out=tmp_path, minutes=0)
    assert parent.run(session, None, ()) == parent.OK
    assert (tmp_path / 'session.jsonl').read_text() == ''
    assert 'the minutes were over' in capsys.readouterr().out


def test_stages_run_in_the_order_in_which_they_are_asked_for(prepared, tmp_path, monkeypatch):
    begun = []
    monkeypatch.setattr(parent.Runner, 'check_device', lambda runner: None)
    monkeypatch.setattr(parent.Runner, 'stage', lambda runner, name, cases: begun.append(name))
    parent.run(parent.Session(folder=prepared, out=tmp_path), ['tune', 'correct'], ())
    parent.run(parent.Session(folder=prepared, out=tmp_path), None, ())
    assert begun == ['tune', 'correct', 'check', 'correct', 'limits', 'sanitize', 'tune', 'rehearsal']


def test_a_device_that_does_not_answer_ends_the_session(prepared, tmp_path, monkeypatch):
    monkeypatch.setattr(parent, 'SMOKE', cases.Case('rehearsal/crash', 'rehearsal', 30))
    assert parent.run(parent.Session(folder=prepared, out=tmp_path), None, ()) == parent.DEAD
    assert (tmp_path / 'session.jsonl').read_text() == ''


def test_a_killed_process_that_does_not_go_is_waited_for_no_longer_than_said(monkeypatch):
    """One that hangs inside of the driver, where no signal reaches it, would take the session with it."""
    monkeypatch.setattr(parent, 'DYING', 0.1)
    hung = parent.Worker(ROOT, cases.STAGES['rehearsal'], subprocess.DEVNULL, 30)
    end = hung.process.wait

    def stuck(timeout=None):
        assert timeout == 0.1
        raise subprocess.TimeoutExpired('worker', timeout)

    monkeypatch.setattr(hung.process, 'wait', stuck)
    assert parent._died(hung.kill())['reason'] == 'its process died: SIGKILL'
    assert end(30) == -signal.SIGKILL


def test_only_a_core_without_a_form_skips_a_case(monkeypatch, tmp_path):
    """What a compiler does not implement is a kernel that fails."""
    case = cases.Case('rehearsal/refuse', 'rehearsal', 30)
    assert worker.answer(case, tmp_path)['status'] == 'skipped'

    def lacks():
        raise NotImplementedError('only 2D tiling is supported')

    monkeypatch.setitem(rehearsal.CASES, 'refuse', lacks)
    reason = 'NotImplementedError: only 2D tiling is supported'
    assert worker.answer(case, tmp_path) == {'status': 'failed', 'reason': reason}


def test_half_a_line_costs_no_other(tmp_path):
    path = tmp_path / 'session.jsonl'
    path.write_text('{"id": "a", "status": "ok"}\n{"id": "b", "sta')
    record = lines.Record(path)
    record.add({'id': 'c', 'status': 'ok'})
    record.close()
    assert list(lines.newest([path])) == ['a', 'c']


def test_a_report_counts_names_and_compares(tmp_path):
    def write(name, status, milliseconds):
        case = cases.Case('bench/softmax/0/forward', 'bench', 90, 'softmax', what='forward')
        measured = [{'contender': 'ours', 'milliseconds': [0.9, milliseconds, 1.1], 'ratio': 1.0, 'tflops': 2.0}]
        record = lines.Record(tmp_path / name)
        record.add({**cases.fields(case), 'status': 'ok', 'measured': measured, 'time': '2026-11-22T00:00:00'})
        record.add({'id': 'correct/x', 'stage': 'correct', 'core': 'x', 'status': status, 'reason': 'off'})
        record.close()
        return tmp_path / name

    text = report.tables([write('new', 'wrong', 1.0)], write('old', 'ok', 2.0))
    assert '| correct | x |  | 1 |  |  |  |' in text
    assert '| correct/x | wrong | off |' in text
    assert '| bench/softmax/0/forward | ours | 1 (0.9 to 1.1) | 1 | 2 |  |' in text
    assert '| correct/x | ok -> wrong |' in text and 'ours: 0.50 of the time' in text


def test_times_of_a_session_make_a_record_of_the_bench(tmp_path):
    def write(device):
        case = cases.Case('bench/softmax/0 softmax/forward', 'bench', 90, 'softmax', '0', what='forward')
        figures = dict.fromkeys(('ratio', 'low', 'high', 'compile_seconds'), 1.0) | {'tflops': 2.0, 'gigabytes': 3.0}
        one = {'contender': 'ours', 'implementation': 'mosaic_gpu', 'milliseconds': [0.9, 1.0, 1.1], **figures}
        one |= {'ceiling': 0.5, 'temporary_mib': 0.0}
        about = {
            'device': device,
            'platform': 'gpu',
            'commit': 'abc',
            'versions': {'jax': '1'},
            'time': '2026-11-26T04',
        }
        record = lines.Record(tmp_path / 'session.jsonl')
        record.add(
            {
                **cases.fields(case),
                'id': f'bench/{device}',
                'status': 'ok',
                'problem': '4 x 8',
                'measured': [one],
                **about,
            }
        )
        record.close()
        return [tmp_path / 'session.jsonl']

    found = report.record(write('A GPU'))
    assert found['facts'] == {'device': 'A GPU', 'platform': 'gpu', 'date': '2026-11-26', 'commit': 'abc', 'jax': '1'}
    assert 'ratio (least and most of 3 rounds)' in table.markdown(found)
    assert '| 4 x 8 | forward | ours (mosaic_gpu) | 1 | 1.00 (1.00 to 1.00) | 2 | 3 | 50% |' in table.markdown(found)
    with pytest.raises(ValueError, match='0 devices were timed'):
        report.record(write('A GPU'), ['bench/*'])
    with pytest.raises(ValueError, match='2 devices were timed in these records \\(A GPU, B\\)'):
        report.record(write('B'))


def test_a_profile_has_the_kernels_of_gpus_alone():
    def named(what, pid, tid, name):
        return {'ph': 'M', 'name': what, 'pid': pid, 'tid': tid, 'args': {'name': name}}

    def ran(pid, tid, name, microseconds):
        return {'ph': 'X', 'pid': pid, 'tid': tid, 'name': name, 'dur': microseconds}

    events = [
        named('process_name', 1, 0, '/device:GPU:0'),
        named('thread_name', 1, 7, 'Stream #7(Compute)'),
        named('thread_name', 1, 8, 'XLA Ops'),
        named('process_name', 2, 0, '/host:CPU'),
        named('thread_name', 2, 7, 'Stream of another kind'),
        *[ran(1, 7, 'sweep', 300), ran(1, 7, 'sweep', 100), ran(1, 7, 'read', 1600), ran(1, 7, 'small', 1)],
        *[ran(1, 8, 'the same again', 2001), ran(2, 7, 'on the host', 5000)],
    ]
    assert profile.kernels(events, calls=2) == [
        {'kernel': 'read', 'microseconds': 800.0, 'times': 0.5},
        {'kernel': 'sweep', 'microseconds': 200.0, 'times': 1.0},
        {'kernel': 'others', 'microseconds': 0.5, 'times': 0.5},
    ]
    assert profile.kernels([], calls=2) == []


def test_cases_are_chosen_by_name_and_in_order():
    every = [cases.Case(name, 'bench', 1) for name in ('bench/a', 'bench/b', 'bench/c')]
    assert cases.chosen(every, ()) == every
    assert [case.id for case in cases.chosen(every, ('*/c', '*/[ab]'))] == ['bench/c', 'bench/a', 'bench/b']


def test_expectations_are_prepared_of_the_cases_that_are_asked_for_alone(tmp_path):
    only = ('correct/softmax/*/mosaic_gpu', 'check/smoke')
    preparation.prepare(tmp_path, ['check', 'correct'], small=True, only=only)
    assert [case.id for case in cases.read(tmp_path / cases.FILE)] == [
        'correct/softmax/one/float32/mosaic_gpu',
        'check/smoke',
    ]
    files = sorted((tmp_path / expected.FOLDER).iterdir())
    assert [urllib.parse.unquote(file.stem) for file in files] == ['softmax/one/float32']


def test_what_was_written_before_an_interruption_stays(tmp_path, monkeypatch):
    one, two = (correct.case('linear_scan', name, 'float32', 'xla') for name in ('one', 'two'))
    expected.write(tmp_path, [one])
    before = expected.path_of(tmp_path, one).read_bytes()
    whole = expected._arrays

    def interrupted(case):
        yield next(iter(whole(case)))
        raise KeyboardInterrupt

    monkeypatch.setattr(expected, '_arrays', interrupted)
    with pytest.raises(KeyboardInterrupt):
        expected.write(tmp_path, [one, two])
    with pytest.raises(KeyError, match='linear_scan/two/float32 was not prepared'):
        expected.read(tmp_path, two)
    monkeypatch.undo()
    expected.write(tmp_path, [one, two])
    assert expected.path_of(tmp_path, one).read_bytes() == before and expected.read(tmp_path, two)[1]


def test_arrays_are_drawn_while_nothing_is_timed(tmp_path, monkeypatch):
    """Else a process that takes its next case would compute beside another's clock."""
    timed, drawn = threading.Event(), []

    def problems(core, sizes):
        drawn.append(timed.is_set())
        yield types.SimpleNamespace(arrays={})

    def ask():
        with turn.Turn(tmp_path) as other:
            bench.problem_of(cases.Case('bench/softmax/0', 'bench', 1, 'softmax', '0'), other)

    monkeypatch.setattr(bench.problems, 'problems', problems)
    # What is slow the first time.
    bench._sizes()
    thread = threading.Thread(target=ask, daemon=True)
    with turn.Turn(tmp_path) as mine, mine.alone():
        timed.set()
        thread.start()
        time.sleep(0.2)
        timed.clear()
    thread.join(10)
    assert drawn == [False]


def test_what_is_asked_once_is_measured_once(tmp_path):
    def ask(number):
        with turn.Turn(tmp_path) as one:
            return one.once(lambda: {'number': number})

    assert [ask(1), ask(2)] == [{'number': 1}] * 2
    turn.forget(tmp_path)
    assert ask(3) == {'number': 3}


def test_one_that_times_is_alone(tmp_path):
    with turn.Turn(tmp_path) as one, turn.Turn(tmp_path) as other:
        with one.compiling(), other.compiling():
            assert not _free(tmp_path)
        with one.compiling(), one.alone():
            assert not _free(tmp_path)
        assert _free(tmp_path)


def _free(folder):
    """Whether nobody holds a turn."""
    with (folder / turn.FILE).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_the_wheels_are_what_the_package_needs_and_no_more(prepared):
    listed = (prepared / 'wheels.txt').read_text()
    assert 'jax==0.11.2' in listed and 'jax-cuda13-plugin==0.11.2' in listed and 'flax==' in listed
    assert 'tensorstore==' in listed and 'pytest' not in listed and '# tokamax' in listed


def test_every_case_has_a_name_of_its_own_and_those_of_rehearsals_are_not_among_them():
    names = [case.id for stage in cases.STAGES for case in preparation.cases_of(stage, small=False)]
    assert len(names) == len(set(names)) > 300
    assert not [name for name in names if name.startswith('rehearsal')]
    assert not [name for name in names if name.startswith('peers/flash-linear-attention') and 'erase' in name]
    # Every core that has a kernel for Hopper is in it.
    forms = (ROOT / 'pallas_kernels').glob('*/mosaic_gpu*')
    assert set(cases.CORES) == {form.parent.name for form in forms} - {'matrix_state'}
    # Every core's kernel, every contender and a recipe of every class.
    for wanted in (
        *(f'check/{core}/' for core in cases.CORES),
        *(f'sanitize/{core}' for core in cases.CORES),
        *(f'limits/{core}/' for core in cases.CORES),
        'limits/offsets/2147483648 x 50304',
        *(f'limits/length/{core}/65536' for core in ('linear_attention', 'linear_scan')),
        *(f'limits/sequences/{core}/70000' for core in ('linear_attention', 'linear_scan')),
        'correct/attention/masked, softpick/bfloat16/mosaic_gpu',
        'correct/diagonal_low_rank/packed tied/bfloat16/mosaic_gpu',
        'bench/diagonal_low_rank/1 vector, b is k/forward and backward',
        'peers/cuDNN/attention/Softmax/forward and backward',
        'peers/flash-linear-attention/delta_rule/vector/',
        'peers/jax-linear-attention/linear_attention/no decay/forward',
        'peers/jax-linear-attention/selective_scan/selective_scan/forward',
        'train/griffin',
        'tokens/350m/gated_delta_net/4x8192',
        'tune/attention/0, k 64/attention_hopper 1',
        'tune/delta_rule/1, k 64/delta_rule_hopper 1',
        'tune/selective_scan/0, k 128/selective_scan_gpu 1',
        'tune/linear_scan/0, k 128/linear_scan_gpu 1',
        'tune/softmax/0, k 128/softmax_hopper 1',
    ):
        assert any(name.startswith(wanted) for name in names), wanted


@pytest.mark.slow
def test_stages_that_time_and_train_are_rehearsed(tmp_path):
    stages = ['bench', 'profile', 'peers', 'train', 'tokens']
    assert preparation.prepare(tmp_path, stages, small=True) == 0
    session = parent.Session(folder=tmp_path, out=tmp_path / 'out', minutes=20, patience=4)
    assert parent.run(session, stages, ()) == parent.OK
    found = lines.newest([tmp_path / 'out' / 'session.jsonl'])
    assert {line['status'] for name, line in found.items() if not name.startswith(('peers', 'profile'))} == {'ok'}
    assert 'the trace has no kernels of a GPU' in {line.get('reason') for line in found.values()}
    assert {name.partition('/')[0] for name in found} == set(stages)
    skipped = next(line for name, line in found.items() if name.startswith('peers'))
    assert skipped['status'] == 'skipped' and 'jax-linear-attention' in skipped['reason']
    assert found['train/mingru']['losses'][1] < found['train/mingru']['losses'][0]
    text = report.tables([tmp_path / 'out' / 'session.jsonl'])
    assert '| bench/softmax/0 softmax/forward | pallas_kernels |' in text and '| tokens/tiny/mingru/2x64 |' in text


@pytest.mark.parametrize('stages', ['corect', 'check,'])
def test_an_unknown_stage_is_named(stages):
    process = start('run', '--from=.', '--out=.', f'--stages={stages}')
    printed = process.communicate(timeout=60)[0]
    assert process.returncode == 2 and 'no stage is called' in printed


def written(folder, *prepared):
    """A folder that was prepared with these cases."""
    cases.write(folder / cases.FILE, list(prepared))
    (folder / 'commit').write_text('abc\n')
    return folder


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (
            ['run', '--from={0}/none', '--out={0}/out'],
            'none/cases.json is not read (No such file or directory); expected',
        ),
        (
            ['run', '--from={0}', '--out={0}/out', '--resume', '{0}/none'],
            'none is not read (No such file or directory)',
        ),
        (['run', '--from={0}', '--out={0}/out', '--resume', '{0}/odd'], 'odd is no record of a session'),
        (['run', '--from={0}', '--out={0}/out', '--only=bench/*;smoke'], "no case is called like 'smoke'"),
        (['run', '--from={0}', '--out={0}/out', '--stages=tune'], 'of the stage tune no case was prepared'),
        (['run', '--from={0}', '--out={0}/out', '--minutes=nan'], '--minutes: nan; expected a number above 0'),
        (['run', '--from={0}', '--out={0}/out', '--patience=0'], '--patience: 0; expected a number above 0'),
        (['run', '--from={0}', '--out={0}/out', '--workers=-1'], '--workers: -1; expected a whole number from 1'),
        (['report', '{0}/none'], 'none is not read (No such file or directory)'),
        (['report', '{0}/odd'], 'odd is no record of a session'),
    ],
)
def test_what_cannot_be_used_is_one_line_before_a_device_is_touched(arguments, message, tmp_path, monkeypatch, capsys):
    written(tmp_path, cases.Case('bench/softmax/0', 'bench', 1))
    (tmp_path / 'odd').write_text('{"facts": {}, "lines": []}\n')
    monkeypatch.setattr(parent.Runner, 'check_device', lambda runner: pytest.fail('a device was asked'))
    with pytest.raises(SystemExit) as ended:
        gpu_session.main([argument.format(tmp_path) for argument in arguments])
    assert ended.value.code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / 'out').exists()


def test_a_table_is_there_whole_or_as_it_was(tmp_path, monkeypatch):
    record, asked, tiles = tuned(tmp_path, (1, 0.9, 0.95))
    list(tune.tables([record], tmp_path / 'tuned'))
    (tmp_path / 'later').mkdir()
    later, *_ = tuned(tmp_path / 'later', (2, 0.5, 0.6))
    write = pathlib.Path.write_text

    def full(path, text):
        write(path, text[: len(text) // 2])
        raise OSError('no space left')

    monkeypatch.setattr(pathlib.Path, 'write_text', full)
    with pytest.raises(OSError, match='no space left'):
        list(tune.tables([later], tmp_path / 'tuned'))
    (path,) = (tmp_path / 'tuned').iterdir()
    assert tuning.read(path, 'NVIDIA H100 80GB HBM3') == {asked: tiles[1]}
