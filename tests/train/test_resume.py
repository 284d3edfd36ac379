"""A run that was interrupted ends as one that was not, to the bit."""

import json
import random
import signal

import jax
import numpy as np
import pytest

from attnlab import config as configs
from attnlab.train.checkpoint import Checkpoints
from attnlab.train.setup import prepare


def final_state(workdir):
    setup = prepare(configs.load(workdir / 'config.json'))
    checkpoints = Checkpoints(workdir / 'checkpoints')
    state, carried = checkpoints.restore(setup.steps, setup.abstract)
    checkpoints.close()
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)], carried


def assert_same(one, other):
    assert (one / 'metrics.jsonl').read_bytes() == (other / 'metrics.jsonl').read_bytes()
    (state, carried), (same, also) = final_state(one), final_state(other)
    assert len(state) > 20 and carried == also
    for a, b in zip(state, same, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_a_run_learns_and_leaves_what_a_run_leaves(unbroken):
    lines = [json.loads(line) for line in (unbroken / 'metrics.jsonl').read_text().splitlines()]
    train = [line for line in lines if 'train/loss' in line]
    assert [line['step'] for line in train] == [*range(7, 121, 7), 120]
    assert [line['step'] for line in lines if 'valid/bits_per_byte' in line] == [50, 100, 120]
    assert train[-1]['train/loss'] < 0.8 * train[0]['train/loss']
    made = json.loads((unbroken / 'run.json').read_text())['starts'][0]
    assert (
        made['parameters'] > 0
        and made['data']['content_hash']
        and made['implementations'][0]['implementation'] == 'xla'
    )
    for name in ('config.json', 'speed.jsonl', 'tokenizer.json', 'figures/loss.png', 'figures/position_loss.png'):
        assert (unbroken / name).stat().st_size > 0, name
    assert list(unbroken.glob('events.out.tfevents*'))
    assert {path.name for path in (unbroken / 'checkpoints').iterdir() if path.name.isdecimal()} == {'60', '90', '120'}


@pytest.mark.parametrize(
    'moments',
    [[(40, 80)], pytest.param([(1, 40), (40, 80), (80, 118)], marks=pytest.mark.slow)],
    ids=['once', 'thrice'],
)
def test_sigkill_at_any_moment_changes_nothing(train, unbroken, tmp_path, moments):
    workdir = tmp_path / 'killed'
    drawn = random.Random(0)
    for reached in (drawn.randint(*steps) for steps in moments):
        command = train(workdir)
        command.send(signal.SIGKILL, workdir, reached)
        assert command.finish()[0] == -signal.SIGKILL
    status, output = train(workdir).finish()
    assert status == 0 and 'going on from step' in output, output
    assert_same(workdir, unbroken)


@pytest.mark.slow
@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_it_saves_says_how_to_go_on_and_changes_nothing(train, unbroken, tmp_path, number):
    workdir = tmp_path / 'stopped'
    command = train(workdir)
    command.send(number, workdir, 33)
    status, output = command.finish()
    assert status == 75 and 'the same command goes on from there' in output, output
    status, output = train(workdir, '--data_workers=1').finish()
    assert status == 0 and 'going on from step' in output, output
    assert_same(workdir, unbroken)


@pytest.mark.slow
def test_a_full_disk_loses_nothing(train, unbroken, mount):
    workdir = mount('700k') / 'run'
    status, output = train(workdir).finish()
    last = output.strip().splitlines()[-1]
    assert status == 2 and last.startswith('attnlab: ') and 'no space left' in last.lower(), output
    mount('50m')
    status, output = train(workdir).finish()
    assert status == 0, output
    assert_same(workdir, unbroken)


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_used(train, unbroken, tmp_path, copy_run):
    workdir = copy_run(unbroken, tmp_path / 'damaged')
    largest = max(
        (workdir / 'checkpoints' / '120').rglob('*'), key=lambda path: path.stat().st_size if path.is_file() else 0
    )
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 0xFF
    largest.write_bytes(bytes(content))
    status, output = train(workdir).finish()
    assert status == 0 and 'damaged' in output and 'going on from step 90' in output, output
    assert_same(workdir, unbroken)


@pytest.fixture
def copy_run():
    import shutil

    def copy(source, target):
        shutil.copytree(source, target)
        return target

    return copy
