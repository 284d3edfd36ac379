"""Candidates of tiles that spill far more than the rule's are left out of a session, and nothing else is."""

import dataclasses
import json

import jax
import pytest

from attnlab.errors import UserError
from pallas_kernels import target, tuning
from scripts import assembled
from scripts.session import cases, lines, parent, preparation, report, spills
from scripts.session.stages import assemble, tune
from tests.kernels import compile_gpu


def candidates(core, place, k, count):
    """The first candidates of the first tile that a call asks for."""
    asked = tune.asked_by(core, place, k, target.H100)[0]
    tiles = tuning.candidates(asked)[1 : count + 1]
    return [tune.case(core, place, k, asked, number, tile) for number, tile in enumerate(tiles, 1)]


def spilling(*numbers):
    """The line of a program whose kernels spill so many bytes."""
    return {'status': 'ok', 'kernels': [{'kernel': f'kernel_{place}', 'spilled': n} for place, n in enumerate(numbers)]}


def lost(status, reason):
    return {'status': status, 'reason': reason}


@pytest.mark.parametrize(
    ('numbers', 'rule', 'reason'),
    [
        ((0, 0), (0, 0), ''),
        ((64, 0), (0, 64), ''),
        ((8, 0), (16, 0), ''),
        # As many as the fastest tile of attention at 64 channels.
        ((64, 0), (0, 0), ''),
        ((0, 64, 4), (0, 0), 'its kernels spill 68 bytes (kernel_1 64, kernel_2 4), those of the rule 0'),
        ((0, 104), (32, 0), 'its kernels spill 104 bytes (kernel_1 104), those of the rule 32'),
    ],
)
def test_a_candidate_is_dropped_that_spills_far_more_than_the_rule(numbers, rule, reason):
    assert spills.more(spilling(*numbers), spilling(*rule)) == reason


def test_what_is_not_compiled_is_kept_and_said(monkeypatch, tmp_path, capsys):
    found = [*candidates('softmax', 0, 128, 4), *candidates('delta_rule', 1, 64, 2)]
    answers = {
        'softmax_hopper, the rule': spilling(0),
        'softmax_hopper 1': spilling(0),
        'softmax_hopper 2': lost('failed', 'its process died: SIGSEGV'),
        'softmax_hopper 3': spilling(400),
        'softmax_hopper 4': lost('timeout', 'it took longer than 300 s'),
        'delta_rule_hopper, the rule': lost('failed', 'ValueError: odd'),
    }
    # A candidate without a rule to compare with is not asked for.
    monkeypatch.setattr(spills, 'compiled', lambda case, log: answers.pop(case.id.rpartition('/')[2]))
    (dropped,) = spills.dropped(found, tmp_path)
    reason = 'its kernels spill 400 bytes (kernel_0 400), those of the rule 0'
    assert not answers and dropped == dataclasses.replace(found[2], reason=f'{reason}, by JAX {jax.__version__}')
    *each, last = capsys.readouterr().out.splitlines()
    assert [one.partition(': tune/')[0] for one in each] == [f'{number} of 6' for number in range(1, 7)]
    said = [one.partition('_hopper ')[2] for one in each]
    assert said == [
        '1: kept: 0 bytes spilled',
        '2: kept, with it not compiled: its process died: SIGSEGV',
        f'3: dropped: {reason}',
        '4: kept, with it not compiled: it took longer than 300 s',
        '1: kept, with the rule not compiled: ValueError: odd',
        '2: kept, with the rule not compiled: ValueError: odd',
    ]
    assert last.startswith('1 of 6 candidates of tiles are dropped')
    assert '4 were not compiled' in last


def test_without_a_compiler_all_are_kept_and_one_line_says_so(monkeypatch, tmp_path, capsys):
    def absent():
        raise UserError('there is no compiler for an H100: make one')

    monkeypatch.setattr(assembled, 'absent_h100', absent)
    found = candidates('softmax', 0, 128, 2)
    monkeypatch.setattr(spills, 'compiled', lambda case, log: assemble.run(case, tmp_path))
    assert spills.dropped(found, tmp_path) == []
    printed = capsys.readouterr().out
    assert printed == (
        'all 2 candidates of tiles are kept, as none was compiled: there is no compiler for an H100: make one\n'
    )


@pytest.mark.parametrize(
    ('what', 'line'),
    [
        ('right', {'status': 'ok'}),
        ('crash', lost('failed', 'its process died: SIGSEGV')),
        ('hang', lost('timeout', 'it took longer than 0.3 s')),
    ],
)
def test_a_process_that_dies_or_hangs_is_the_only_one_that_does(what, line, tmp_path):
    with (tmp_path / 'log').open('wb') as log:
        worker = parent.Worker(tmp_path, cases.Stage(), log, parent.START)
        seconds = 0.3 if what == 'hang' else 30
        found = parent.answer(worker, cases.Case(f'rehearsal/{what}', 'rehearsal', seconds), 1.0)
    assert line.items() <= found.items() and worker.process.poll() is not None


def test_what_is_dropped_is_no_case_and_a_session_says_why(monkeypatch, tmp_path, capsys):
    asked = []

    def dropped(found, folder):
        asked.append(len(found))
        return [dataclasses.replace(case, reason='it spills') for case in found[:2]]

    monkeypatch.setattr(spills, 'dropped', dropped)
    every = tune.cases(False)
    monkeypatch.setattr(tune, 'cases', lambda small: every)
    preparation.prepare(tmp_path, ['tune'], small=False)
    assert cases.read(tmp_path / cases.FILE) == every[2:]
    assert [case.id for case in cases.read(tmp_path / cases.DROPPED)] == [case.id for case in every[:2]]
    assert f'{len(every) - 2} cases in' in capsys.readouterr().out

    monkeypatch.setattr(parent.Runner, 'check_device', lambda runner: None)
    session = parent.Session(folder=tmp_path, out=tmp_path / 'out', only=[every[1].id])
    assert parent.run(session, ['tune'], ()) == parent.OK
    (line,) = lines.read([tmp_path / 'out' / 'session.jsonl'])
    assert (line['id'], line['status'], line['reason']) == (every[1].id, 'skipped', 'it spills')
    assert f'| {every[1].id} | skipped | it spills |' in report.tables([tmp_path / 'out' / 'session.jsonl'])

    monkeypatch.setattr(spills, 'dropped', lambda found, folder: asked.append(len(found)) or [])
    preparation.prepare(tmp_path, ['tune'], small=False, all_tiles=True)
    preparation.prepare(tmp_path, ['tune'], small=True)
    assert asked == [len(every), 0, 0]
    assert json.loads((tmp_path / cases.DROPPED).read_text()) == []


@pytest.mark.slow
@pytest.mark.skipif(not compile_gpu.APART.exists(), reason='make compile-gpu installs the plugin for CUDA')
def test_the_compiler_of_an_absent_h100_tells_a_tile_that_spills_from_one_that_does_not(tmp_path):
    held, other = candidates('attention', 0, 128, 2)
    (dropped,) = spills.dropped([held, other], tmp_path)
    assert dropped.id == other.id and dropped.tile == other.tile
    assert dropped.reason.startswith('its kernels spill ') and '(attention_key_gradients ' in dropped.reason
    assert dropped.reason.endswith(f', those of the rule 0, by JAX {jax.__version__}')
