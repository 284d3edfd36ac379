"""Files of runs and studies that are damaged, or were moved: the line names the file and says what to do."""

import json
import math
import os
import shutil

import pytest

from attnlab.cli import main
from attnlab.sweep.study import open_study
from attnlab.train.metrics_file import keep_until

READERS = ('show {run}', 'compare {run} --out={tmp}/out', 'eval --workdir={run}')
CONTENTS = ('', '{', '[]', 'null', '{"a": 1}', '\udcff\udcfe')
NO_NUMBERS = ('"abc"', '[1]', 'null', 'true', '{}', '1' * 400)
DAMAGED = [
    *((reader, 'run/config.json', text, 'config.json') for reader in READERS for text in CONTENTS),
    *((reader, 'run/run.json', text, 'run.json') for reader in READERS for text in CONTENTS),
    *(
        (reader, 'run/metrics.jsonl', f'{{"step": 1}}\n{text}\n', 'line 2 of')
        for reader in READERS[:2]
        for text in ('{', '[]', '{"a": 1}', 'null', *(f'{{"step": 1, "train/loss": {each}}}' for each in NO_NUMBERS))
    ),
    *(
        ('compare {run} --out={tmp}/out', 'run/speed.jsonl', f'{text}\n', 'line 1 of')
        for text in ('{"step": 1}', '{"step": 1, "tokens_per_second": "fast"}')
    ),
    *(
        (
            'compare {run} --out={tmp}/out',
            'run/speed.jsonl',
            f'{{"step": 1, "tokens_per_second": {speed}}}\n',
            f'speed.jsonl is damaged: a speed is {said} tokens a second',
        )
        for speed, said in (('"nan"', 'nan'), ('"inf"', 'inf'), ('1e308', '1e+308'), ('-3.0', '-3'))
    ),
    *(('sweep status --study={study}', 'study/sweep.json', text, 'sweep') for text in CONTENTS),
    ('sweep status --study={study}', 'study/journal.log', '{"op\n[]\n', 'journal.log is damaged'),
    ('sweep status --study={study}', 'study/journal.log', '[]\n[]\n', 'journal.log is damaged'),
    ('sweep worker --study={study}', 'study/journal.log', '{}\n{}\n', 'journal.log is damaged'),
    ('sweep status --study={study}', 'study/home', '\udcff\n', 'home is damaged'),
    ('eval --workdir={run}', 'run/tokenizer.json', '{', 'tokenizer.json'),
    ('generate --workdir={run} --prompt=a', 'run/tokenizer.json', '[]', 'tokenizer.json'),
]


@pytest.mark.parametrize(('command', 'file', 'text', 'sentence'), DAMAGED)
def test_damaged(place, capsys, command, file, text, sentence):
    name, _, inside = file.partition('/')
    (place[name] / inside).write_bytes(text.encode(errors='surrogateescape'))
    assert main([word.format_map(place) for word in command.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith('attnlab: ') and sentence in error and 'Traceback' not in error, error


@pytest.mark.parametrize(
    ('command', 'file'),
    [
        ('show {run}', 'run/config.json'),
        ('show {run}', 'run/run.json'),
        ('show {run}', 'run/metrics.jsonl'),
        ('compare {run} --out={tmp}/out', 'run/speed.jsonl'),
        ('generate --workdir={run} --prompt=a', 'run/tokenizer.json'),
        ('sweep status --study={study}', 'study/sweep.json'),
        ('sweep status --study={study}', 'study/journal.log'),
        ('sweep status --study={study}', 'study/home'),
    ],
)
@pytest.mark.parametrize('make', [os.mkfifo, lambda path: path.symlink_to('/dev/zero'), os.mkdir])
def test_what_has_no_end_is_not_read(place, capsys, command, file, make):
    name, _, inside = file.partition('/')
    path = place[name] / inside
    path.unlink()
    make(path)
    assert main([word.format_map(place) for word in command.split()]) == 2
    error = capsys.readouterr().err
    said = f'{path} is not a regular file (a pipe, folder or device): replace it with the file'
    assert said in error and 'Traceback' not in error, error


@pytest.mark.parametrize(
    ('name', 'value'),
    [
        *(('parameters', value) for value in ('12', 0, True, 10**400)),
        *(('flops_per_token', value) for value in ('9' * 9, [0], -1.0, float('nan'), float('inf'), 10**400)),
        *(('state_bytes_per_sequence', value) for value in ([1], {'7': '1'}, {'-7': 1}, {'٧': 1}, {'9' * 5000: 1})),
        ('implementations', {}),
        ('device_kind', 5),
        ('device_count', {'a': 1}),
        ('weight_bytes', '4'),
    ],
)
def test_a_start_with_values_of_other_kinds(place, capsys, name, value):
    path = place['run'] / 'run.json'
    found = json.loads(path.read_text())
    found['starts'][-1][name] = value
    path.write_text(json.dumps(found))
    assert main(['compare', str(place['run']), f'--out={place["tmp"]}/out']) == 2
    error = capsys.readouterr().err
    assert f'run.json is damaged: {name} of its last start is' in error and 'Traceback' not in error, error


@pytest.mark.parametrize('name', ['from', 'start'])
@pytest.mark.parametrize('value', [{}, {'step': '4'}, {'step': None}])
def test_a_start_whose_run_has_no_step(place, capsys, name, value):
    path = place['run'] / 'run.json'
    found = json.loads(path.read_text())
    found['starts'][0][name] = value
    path.write_text(json.dumps(found))
    assert main(['show', str(place['run'])]) == 2
    assert 'run.json is damaged: the step that a start is from is no whole number' in capsys.readouterr().err


def test_a_start_that_lacks_its_devices_or_the_state_at_a_length(place, capsys):
    path = place['run'] / 'run.json'
    found = json.loads(path.read_text())
    kept = found['starts'][-1].pop('device_kind')
    path.write_text(json.dumps(found))
    command = ['compare', str(place['run']), f'--out={place["tmp"]}/out']
    assert main(command) == 2
    assert 'run.json is damaged: its last start lacks device_kind' in capsys.readouterr().err
    found['starts'][-1] |= {'device_kind': kept, 'state_bytes_per_sequence': {'7': 1}}
    path.write_text(json.dumps(found))
    assert main(command) == 2
    assert 'run.json has no state_bytes_per_sequence at length' in capsys.readouterr().err


@pytest.mark.parametrize(
    'changes',
    [
        {'valid/bits_per_byte_low': 9.0, 'valid/bits_per_byte_high': 8.0},
        {'valid/bits_per_byte_low': '-inf', 'valid/bits_per_byte_high': 'inf'},
        {'valid/bits_per_byte_low': 'nan', 'valid/bits_per_byte_high': 'nan'},
        {'valid/documents': 'inf'},
    ],
)
def test_an_interval_that_is_none(place, capsys, changes):
    path = place['run'] / 'metrics.jsonl'
    given = {'step': 4, 'valid/bits_per_byte': 2.0, 'valid/bits_per_byte_low': 1.0, 'valid/bits_per_byte_high': 3.0}
    with path.open('a') as file:
        file.write(json.dumps(given | {'valid/documents': 3} | changes) + '\n')
    assert main(['compare', str(place['run']), f'--out={place["tmp"]}/out']) == 2
    error = capsys.readouterr().err
    assert 'metrics.jsonl is damaged: valid/bits_per_byte is 2, with an interval from' in error, error


NOTED = {'op_code': 8, 'worker_id': 'a', 'trial_id': 0}
ENDED = {'op_code': 6, 'worker_id': 'a', 'trial_id': 0, 'state': 1, 'datetime_complete': '2026-01-01T00:00:00'}


@pytest.mark.parametrize(
    ('change', 'said'),
    [
        *(({**NOTED, 'user_attr': {'seconds': x}}, 'seconds of trial 0 is') for x in ('x', 10**400, [1], -1, math.nan)),
        ({**NOTED, 'user_attr': {'starts': 3}}, 'starts of trial 0 is 3'),
        ({**NOTED, 'user_attr': {'pruned_at': 'x'}}, "pruned_at of trial 0 is 'x'"),
        ({**NOTED, 'user_attr': {'point': {'rate': 7}}}, "point of trial 0 is {'rate': 7}"),
        ({**NOTED, 'user_attr': {'point': {'other': 1}}}, "point of trial 0 is {'other': 1}"),
        *(({**ENDED, 'values': x}, f'the value of trial 0 is {x}') for x in (['x'], [math.nan], [], [1.0, 2.0])),
        ({**ENDED, 'op_code': 7, 'step': 'x', 'intermediate_value': 1.0}, 'a report of trial 0 is 1.0'),
        ({**ENDED, 'op_code': 7, 'step': 1, 'intermediate_value': 'x'}, "a report of trial 0 is 'x'"),
        ({**ENDED, 'op_code': 4, 'study_id': 0, 'distributions': 3, 'params': {}}, 'AttributeError'),
        ({'op_code': 0, 'worker_id': 'a', 'study_name': 'b', 'directions': [1]}, "it has studies ['study', 'b']"),
    ],
)
def test_trials_that_no_worker_wrote(place, capsys, change, said):
    study = open_study(place['study'])
    study.claim().release()
    with (place['study'] / 'journal.log').open('a') as file:
        file.write(json.dumps(change) + '\n')
    assert main(['sweep', 'status', f'--study={place["study"]}']) == 2
    error = capsys.readouterr().err
    assert f'journal.log is damaged: {said}' in error and 'Traceback' not in error, error


def test_a_step_of_more_digits_than_python_reads(place, capsys):
    study = open_study(place['study'])
    study.claim().release()
    study.workdir(0).mkdir(parents=True)
    (study.workdir(0) / 'metrics.jsonl').write_text('{"step": ' + '9' * 5000 + ', "valid/loss": 1.0}\n')
    assert main(['sweep', 'status', f'--study={place["study"]}']) == 0


def test_files_behind_links_are_read(place, capsys):
    for name in ('config.json', 'run.json', 'metrics.jsonl', 'speed.jsonl'):
        path = place['run'] / name
        path.symlink_to(path.rename(place['tmp'] / name))
    assert main(['show', str(place['run'])]) == 0


@pytest.mark.parametrize(
    ('file', 'said'),
    [
        ('SHA256SUMS', 'SHA256SUMS is no file'),
        ('_CHECKPOINT_METADATA', '_CHECKPOINT_METADATA is neither a file nor a folder'),
        ('state/_sharding', 'state/_sharding is'),
    ],
)
def test_a_checkpoint_with_what_has_no_end_is_passed_over(place, capsys, file, said):
    path = place['run'] / 'checkpoints' / '4' / file
    path.unlink()
    os.mkfifo(path)
    assert main(['eval', f'--workdir={place["run"]}', '--tokens=32', '--multiples=1']) == 0
    assert f'checkpoint 4 is damaged: {said}' in capsys.readouterr().err


def test_a_study_that_was_moved_is_the_same_study(place, capsys):
    from attnlab.sweep.study import open_study

    study = open_study(place['study'])
    study.claim().release()
    moved = place['study'].rename(place['tmp'] / 'renamed')
    copied = shutil.copytree(moved, place['tmp'] / 'copied')
    for folder in (moved, copied):
        assert [trial.number for trial in open_study(folder).trials()] == [0]
        assert main(['sweep', 'status', f'--study={folder}']) == 0
        assert '1 interrupted' in capsys.readouterr().out
    (copied / 'home').unlink()
    assert main(['sweep', 'status', f'--study={copied}']) == 2
    assert 'it was not copied completely' in capsys.readouterr().err


def test_lines_of_metrics_that_are_lost_are_said(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    lines = [json.dumps({'step': step, 'train/loss': 1.0}) for step in (10, 20, 30, 40)]
    path.write_text('\n'.join([lines[0], lines[1][:9], lines[2], lines[3][:12]]))
    lost = keep_until(path, 40, 10)
    assert (
        '1 damaged line dropped' in lost[0] and 'lacks 2 of the reports' in lost[1] and 'from step 20 to 40' in lost[1]
    )
    assert path.read_text() == f'{lines[0]}\n{lines[2]}\n'
    path.write_text('\n'.join(lines) + '\n')
    assert keep_until(path, 40, 10) == [] and keep_until(path, 30, 10) == []


def test_a_fork_that_reports_at_other_steps_has_lost_nothing(tmp_path):
    """Up to its step the metrics are those of the other run, at that one's steps."""
    path = tmp_path / 'metrics.jsonl'
    lines = [json.dumps({'step': step, 'train/loss': 1.0}) for step in (10, 20, 24, 28)]
    path.write_text('\n'.join(lines) + '\n')
    assert 'lacks 4 of the reports' in keep_until(path, 30, 4)[0]
    assert keep_until(path, 30, 4, begun=20) == [] and keep_until(path, 30, 4, begun=22) == []
    path.write_text('\n'.join(lines[:3]) + '\n')
    assert 'lacks 1 of the reports' in keep_until(path, 30, 4, begun=22)[0]
