import errno
import io
import json
import math
import re
import struct
import sys
import types

import jax
import pytest
from rich.console import Console
from tensorboardX.proto.event_pb2 import Event, SessionLog

from attnlab.errors import UserError
from attnlab.tables import plain_console
from attnlab.train import report as train_report
from attnlab.train.hardware import Hardware
from attnlab.train.metrics_file import read_lines
from attnlab.train.report import Report, Reporting, means


def report(folder, start=0, sums=None, every=2, out=None):
    return Report(
        folder,
        Reporting(every=every, tensorboard=False),
        start=start,
        steps=10,
        tokens_per_step=8,
        flops_per_token=None,
        sums=sums,
        console=Console(file=out or io.StringIO(), width=1000),
    )


def metrics(loss):
    return {
        'loss.total': loss * 4.0,
        'loss.count': 4.0,
        'byte_loss.total': loss * 4.0,
        'byte_loss.count': 8.0,
        'grad_norm': loss,
    }


def test_a_line_is_the_mean_since_the_last_line(tmp_path):
    writer = report(tmp_path)
    for number, loss in enumerate((1.0, 3.0, 5.0), start=1):
        writer.step(number, metrics(loss), 0.5)
    writer.close()
    (line,) = read_lines(tmp_path / 'metrics.jsonl')
    assert line == {
        'step': 2,
        'train/loss': 2.0,
        'train/grad_norm': 2.0,
        'train/bits_per_byte': 1.0 / math.log(2),
        'train/learning_rate': 0.5,
    }
    assert means(writer.sums)['train/loss'] == 5.0


def test_steps_after_the_last_whole_interval_have_a_line_too(tmp_path):
    writer = report(tmp_path, every=4)
    for number in range(1, 11):
        writer.step(number, metrics(float(number)), 0.5)
    writer.close()
    lines = read_lines(tmp_path / 'metrics.jsonl')
    assert [(line['step'], line['train/loss']) for line in lines] == [(4, 2.5), (8, 6.5), (10, 9.5)]
    assert not writer.sums


@pytest.mark.parametrize('seconds', [0.1, 20, 40, 4000])
def test_the_time_left_is_known_however_long_a_step_takes(seconds, tmp_path, monkeypatch):
    writer, now = report(tmp_path, every=100), [0.0]
    monkeypatch.setattr(writer._bar, 'get_time', lambda: now[0])
    for number in range(1, 5):
        now[0] += seconds
        writer.step(number, metrics(1.0), 0.5)
    assert writer._bar.tasks[0].time_remaining == math.ceil(6 * seconds)
    writer.close()


def test_a_sample_is_described_once_and_what_is_whole_is_not(tmp_path):
    out = io.StringIO()
    writer = report(tmp_path, out=out)
    for number in (2, 4):
        writer.evaluation(number, 'valid', {'loss': 2.0, 'sampled_tokens': 65_024.0, 'sampled_documents': 1037.0})
        writer.evaluation(number, 'test', {'loss': 2.0, 'tokens': 65_024.0})
    writer.close()
    said = out.getvalue()
    assert said.count('valid: a sample of 65,024 tokens from 1,037 documents') == said.count('a sample') == 1
    assert said.index('a sample') < said.index('step 2')


def test_of_several_processes_the_first_prints_what_is_evaluated(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, 'process_index', lambda: 1)
    out = io.StringIO()
    writer = report(tmp_path, out=out)
    writer.evaluation(2, 'valid', {'loss': 2.0, 'sampled_tokens': 64.0, 'sampled_documents': 3.0})
    writer.close()
    assert not out.getvalue().strip() and not list(tmp_path.iterdir())


def test_a_resumed_report_writes_the_same_bytes(tmp_path):
    whole, parts = tmp_path / 'whole', tmp_path / 'parts'
    for folder in (whole, parts):
        folder.mkdir()
    losses = [1.0, 0.3, 0.2, 0.7, 0.1, 0.9]
    writer = report(whole, every=4)
    for number, loss in enumerate(losses[:4], start=1):
        writer.step(number, metrics(loss), 0.5)
    writer.close()
    first = report(parts, every=4)
    for number, loss in enumerate(losses[:3], start=1):
        first.step(number, metrics(loss), 0.5)
    carried = json.loads(json.dumps(dict(first.sums)))
    first.step(4, metrics(99.0), 0.5)
    first.close()
    second = report(parts, start=3, sums=carried, every=4)
    second.step(4, metrics(losses[3]), 0.5)
    second.close()
    assert (parts / 'metrics.jsonl').read_bytes() == (whole / 'metrics.jsonl').read_bytes()


def test_half_a_line_of_speeds_is_dropped_before_another_is_written(tmp_path):
    path, out = tmp_path / 'speed.jsonl', io.StringIO()
    whole = '{"step": 6, "tokens_per_second": 1.0}\n'
    path.write_text(f'{whole}{{"step": 8, "tok{whole}{{"step": 10, "tokens_per')
    (tmp_path / 'metrics.jsonl').write_text('{"step": 2, "train/loss": 1.0}\n')
    report(tmp_path, start=2, out=out).close()
    assert path.read_text() == whole
    assert 'speed.jsonl: 1 damaged line dropped' in out.getvalue()


def test_metrics_without_a_checkpoint_are_kept_under_another_name_and_it_is_said(tmp_path):
    path, seen = tmp_path / 'metrics.jsonl', list[str]()
    for number in (1, 2):
        out = io.StringIO()
        writer = report(tmp_path, out=out)
        writer.step(2, metrics(float(number)), 0.5)
        writer.step(4, metrics(float(number)), 0.5)
        writer.close()
        seen.append(out.getvalue())
    assert 'no checkpoint' not in seen[0]
    assert 'has steps up to 4, of which no checkpoint is left: the run begins again at step 0' in seen[1]
    assert 'kept in metrics-before-1.jsonl' in seen[1]
    assert [line['train/loss'] for line in read_lines(tmp_path / 'metrics-before-1.jsonl')] == [1.0, 1.0]
    assert [(line['step'], line['train/loss']) for line in read_lines(path)] == [(2, 2.0), (4, 2.0)]
    report(tmp_path).close()
    assert [line['train/loss'] for line in read_lines(tmp_path / 'metrics-before-2.jsonl')] == [2.0, 2.0]
    out = io.StringIO()
    report(tmp_path, out=out).close()
    assert 'checkpoint' not in out.getvalue() and not (tmp_path / 'metrics-before-3.jsonl').exists()


@pytest.mark.parametrize(('before', 'start', 'purged'), [(False, 0, None), (True, 0, 1), (True, 2, 3)])
def test_events_of_steps_that_are_taken_again_are_hidden(tmp_path, monkeypatch, before, start, purged):
    if before:
        (tmp_path / 'metrics.jsonl').write_text('{"step": 2, "train/loss": 1.0}\n')
    opened = []

    class Recorded(train_report.Events):
        def __init__(self, folder, *, purge):
            opened.append(purge)
            super().__init__(folder, purge=purge)

    monkeypatch.setattr(train_report, 'Events', Recorded)
    settings = {'start': start, 'steps': 10, 'tokens_per_step': 8, 'flops_per_token': None}
    Report(tmp_path, Reporting(every=2), **settings, console=Console(file=io.StringIO())).close()
    assert opened == [purged]


def test_wandb_that_is_not_installed_is_said_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__('sys').modules, 'wandb', None)
    with pytest.raises(UserError, match=r'pip install "attnlab\[wandb\]"'):
        Report(
            tmp_path,
            Reporting(tensorboard=False, wandb='project'),
            start=0,
            steps=1,
            tokens_per_step=1,
            flops_per_token=None,
            console=Console(file=io.StringIO()),
        )


def test_runs_on_wandb_are_told_apart_by_more_than_the_names_of_their_folders(tmp_path, monkeypatch):
    begun = []

    class Online:
        def finish(self):
            pass

    def init(**named):
        begun.append(named)
        return Online()

    monkeypatch.setitem(sys.modules, 'wandb', types.SimpleNamespace(init=init))
    folders = [tmp_path / study / 'trials' / '0000' for study in ('one', 'other')]
    for folder in (*folders, folders[0]):
        folder.mkdir(parents=True, exist_ok=True)
        settings = {'start': 0, 'steps': 1, 'tokens_per_step': 1, 'flops_per_token': None}
        reporting = Reporting(tensorboard=False, wandb='project')
        Report(folder, reporting, **settings, console=Console(file=io.StringIO())).close()
    assert [each['name'] for each in begun] == ['0000'] * 3 and all(each['resume'] == 'allow' for each in begun)
    first, other, again = (each['id'] for each in begun)
    assert first == again != other
    (folders[0] / 'wandb_id').write_bytes(b'\xff')
    with pytest.raises(UserError, match=r'wandb_id is damaged: .*; remove it, and a new run is begun'):
        Report(folders[0], reporting, **settings, console=Console(file=io.StringIO()))


def test_brackets_of_names_are_printed_as_they_are(tmp_path):
    shown = io.StringIO()
    console = plain_console(file=shown, width=120)
    settings = {'start': 0, 'steps': 1, 'tokens_per_step': 8, 'flops_per_token': None}
    writer = Report(tmp_path, Reporting(tensorboard=False), **settings, console=console)
    writer.evaluation(1, 'test[v2]', {'loss': 1.0})
    writer.say('writing runs/gla[v2] f32[b,t] [/a/b]')
    writer.close()
    console.print('failed: [/a/b] is no path')
    for line in ('step 1  test[v2]: loss 1', 'writing runs/gla[v2] f32[b,t] [/a/b]', 'failed: [/a/b] is no path'):
        assert f'{line}\n' in shown.getvalue()


def test_the_first_step_of_a_start_has_no_part_in_its_speed(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(train_report.time, 'perf_counter', lambda: now[0])
    monkeypatch.setattr(train_report, 'hardware', lambda kind: None)

    def speeds(start, every, steps):
        folder = tmp_path / f'{start}-{every}-{steps}'
        folder.mkdir()
        settings = {'start': start, 'steps': 20, 'tokens_per_step': 8, 'flops_per_token': None}
        reporting = Reporting(every=every, tensorboard=False)
        writer = Report(folder, reporting, **settings, console=Console(file=io.StringIO()))
        # Before the first step is done it is compiled.
        now[0] += 60
        for number in range(start + 1, start + 1 + steps):
            now[0] += 2
            writer.step(number, metrics(1.0), 0.5)
            with writer.paused():
                now[0] += 30
        writer.close()
        lines = read_lines(folder / 'speed.jsonl') if (folder / 'speed.jsonl').exists() else []
        return [(line['step'], line['tokens_per_second']) for line in lines]

    assert speeds(0, 4, 8) == [(4, 4.0), (8, 4.0)]
    assert speeds(0, 1, 3) == [(2, 4.0), (3, 4.0)]
    # Of a start whose first step is the last before a line, nothing is said yet.
    assert speeds(7, 4, 5) == [(12, 4.0)] and speeds(7, 4, 1) == []


def test_the_share_of_the_peak_that_is_used_is_shown_where_the_peak_is_known(tmp_path, monkeypatch):
    monkeypatch.setattr(train_report, 'hardware', lambda kind: Hardware(1000.0, 1, 1.0, 1.0, 'made up'))
    monkeypatch.setattr(train_report.Clock, 'lap', lambda self, number: (2, 4.0))
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=120)
    settings = Reporting(every=2, tensorboard=False)
    writer = Report(tmp_path, settings, start=0, steps=2, tokens_per_step=8, flops_per_token=100.0, console=console)
    for number in (1, 2):
        writer.step(number, metrics(1.0), 0.5)
    writer.close()
    # 2 steps of 8 tokens of 100 operations in 4 seconds, on devices of 1000 a second.
    used = 0.4 / jax.device_count()
    assert read_lines(tmp_path / 'speed.jsonl') == [{'step': 2, 'tokens_per_second': 4.0, 'mfu': used}]
    assert f'4 tok/s {used:.1%} MFU' in re.sub(r'\x1b\[[\d;?]*\w', '', shown.getvalue())


def test_a_line_whose_steps_had_no_labels_has_no_loss(tmp_path):
    writer = report(tmp_path, every=1)
    writer.step(1, metrics(1.0) | {'loss.total': 0.0, 'loss.count': 0.0}, 0.5)
    writer.step(2, metrics(3.0), 0.5)
    writer.close()
    first, second = read_lines(tmp_path / 'metrics.jsonl')
    assert math.isnan(float(first['train/loss'])) and second['train/loss'] == 3.0


def test_a_full_disk_is_an_error_of_the_step_that_meets_it(tmp_path):
    """Events are written where they are made: a thread that died of it was waited for."""
    events = train_report.Events(tmp_path)

    def full(event):
        raise OSError(errno.ENOSPC, 'No space left on device')

    events._writer.write_event = full
    with pytest.raises(OSError, match='No space left'):
        events.write(1, {'loss': 1.0})
    events.close()


def test_events_are_those_that_tensorboard_reads(tmp_path):
    events = train_report.Events(tmp_path, purge=3)
    events.write(4, {'train/loss': 0.5, 'train/grad_norm': 2.0})
    events.close()
    (path,) = tmp_path.glob('events.out.tfevents.*')
    content, found = path.read_bytes(), []
    while content:
        (length,) = struct.unpack('<Q', content[:8])
        found.append(Event.FromString(content[12 : 12 + length]))
        content = content[16 + length :]
    assert [each.step for each in found] == [0, 3, 4, 4] and found[1].session_log.status == SessionLog.START
    assert [(value.tag, value.simple_value) for each in found[2:] for value in each.summary.value] == [
        ('train/loss', 0.5),
        ('train/grad_norm', 2.0),
    ]
