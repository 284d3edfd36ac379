"""Going on for longer than a run was meant to go."""

import dataclasses
import errno
import json
import os
import re
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections.config_flags import config_path

from attnlab import config as configs
from attnlab.cli import main
from attnlab.config import spec
from attnlab.data.text.tokenizers import TrainedBytePairs
from attnlab.errors import UserError
from attnlab.tables import standard_output
from attnlab.train import launch, loop
from attnlab.train.fork import Fork, forked_config
from attnlab.train.fork import fork as fork_of
from attnlab.train.optimizer import Override
from attnlab.train.partition import Axes
from attnlab.train.run import forked_at
from attnlab.train.schedule import Constant, Cosine, Schedule, WarmupStableDecay
from configs import language
from tests.train.test_resume import final_state

SMALL = (
    'length=16',
    'batch_size=2',
    'model.dim=16',
    'model.stack.depth=1',
    'checkpoint.every=4',
    'report.every=3',
    'report.tensorboard=False',
    'evals[0].tokens=64',
)


def train(workdir, corpus, *overrides, schedule='wsd'):
    config = f'--config=language:zoo=mingru,data={corpus},schedule={schedule}'
    return main(['train', config, f'--workdir={workdir}', *(f'--config.{item}' for item in (*SMALL, *overrides))])


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob('*') if path.is_file()}


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / 'corpus.txt'
    path.write_text('def function(argument):\n    return argument + 1\n' * 400)
    return path


def test_a_fork_of_a_finished_run_is_what_a_longer_run_would_have_been(corpus, tmp_path, capsys):
    short, longer, fork = (tmp_path / name for name in ('short', 'longer', 'fork'))
    assert train(short, corpus, 'steps=20', 'optimizer.schedule.decay=0.4', 'optimizer.schedule.warmup=0.1') == 0
    assert sorted(int(path.name) for path in (short / 'checkpoints').iterdir()) == [12, 16, 20]
    before = files(short)
    assert train(longer, corpus, 'steps=30', 'optimizer.schedule.decay=0.4', 'optimizer.schedule.warmup=2.0') == 0
    again = ['train', f'--from={short}', f'--workdir={fork}', '--config.steps=30']
    capsys.readouterr()
    assert main(again) == 0
    assert f'from step 12 of {short}' in ' '.join(capsys.readouterr().out.split())
    assert files(short) == before
    (state, carried), (same, also) = final_state(fork), final_state(longer)
    assert carried == also
    for one, other in zip(state, same, strict=True):
        np.testing.assert_array_equal(one, other)
    lines, expected = (
        [line for line in map(json.loads, (run / 'metrics.jsonl').read_text().splitlines()) if 'train/loss' in line]
        for run in (fork, longer)
    )
    assert len(lines) == 10 and lines == expected
    made = json.loads((fork / 'run.json').read_text())['starts'][0]['from']
    assert made == {'run': str(short), 'step': 12, 'same_rates': True, 'other_rows': [], 'other_updates': []}

    assert [forked_at(run) for run in (fork, short, tmp_path)] == [12, 0, 0]

    assert main(again) == 0, 'a fork goes on as any run'
    others = [f'--workdir={tmp_path / "others"}', '--config.steps=22', '--config.report.every=2']
    assert main(['train', f'--from={short}', *others]) == 0
    assert 'were lost' not in ' '.join(capsys.readouterr().out.split())
    assert main(['train', f'--from={short}', f'--workdir={tmp_path / "a"}', '--config.steps=12']) == 2
    assert '; it must be above ' in capsys.readouterr().err
    assert main(['train', f'--from={short}', f'--workdir={tmp_path / "a"}', '--from_step=3']) == 2
    assert 'has no checkpoint of step 3; it has: 12, 16, 20' in capsys.readouterr().err
    (tmp_path / 'bare').mkdir()
    shutil.copy(short / 'config.json', tmp_path / 'bare')
    assert main(['train', f'--from={tmp_path / "bare"}', f'--workdir={tmp_path / "a"}']) == 2
    assert 'bare, which has no checkpoint yet\n' in capsys.readouterr().err
    assert main(['train', f'--from={tmp_path}', f'--workdir={tmp_path / "a"}']) == 2
    assert 'is not a run' in capsys.readouterr().err
    assert not (tmp_path / 'a').exists()

    config = forked_config(short).unlock()
    config.steps = 30
    decayed = fork_of(short, config, 20)
    assert not decayed.same_rates and 'were not those of this run' in str(decayed)


def test_a_fork_that_reads_other_rows_says_which_keys_differ(tmp_path):
    config = language.get_config('zoo=mingru')
    configs.save(config, tmp_path / 'config.json')
    (tmp_path / 'checkpoints' / '4').mkdir(parents=True)
    same = fork_of(tmp_path, config)
    assert same.other_rows == () and str(same) == f'from step 4 of {tmp_path}'
    batch_size, length = config.batch_size, config.length
    with config.unlocked():
        config.update(batch_size=2 * batch_size, length=length // 2, seed=7, steps=config.steps + 1)
        config.task.tokenizer = spec(TrainedBytePairs)
    found = fork_of(tmp_path, config)
    differing = (
        f'batch_size: {batch_size} there, {2 * batch_size} here; length: {length} there, {length // 2} here; '
        'seed: 0 there, 7 here; task.tokenizer'
    )
    assert f'whose position in the data is not that of this run ({differing}' in str(found)
    assert 'steps' not in str(found) and 'differs from training this config from scratch' in str(found)
    assert '; '.join(found.describe()['other_rows']).startswith(differing)


OTHER_UPDATES = {
    'optimizer.weight_decay': (0.5, 'optimizer.weight_decay: 0.1 there, 0.5 here'),
    'optimizer.clip': (None, 'optimizer.clip: 1.0 there, None here'),
    'optimizer.b1': (0.5, 'optimizer.b1: 0.9 there, 0.5 here'),
    'optimizer.groups.matrix.lr': (0.1, 'optimizer.groups.matrix.lr: 1.0 there, 0.1 here'),
    'optimizer.overrides': (
        (spec(Override, pattern='*', lr=0.0),),
        'optimizer.overrides[0].lr: absent there, 0.0 here',
    ),
    'model.stack.blocks[0].dropout': (0.5, 'model.stack.blocks[0].dropout: 0.0 there, 0.5 here'),
    'precision.activations': ('bfloat16', 'precision.activations: float32 there, bfloat16 here'),
}
"""Keys by which steps differ, another value of each, and what is said of it."""


@pytest.mark.parametrize('key', OTHER_UPDATES)
def test_a_fork_whose_steps_were_others_says_by_which_keys(key, tmp_path):
    value, said = OTHER_UPDATES[key]
    config = language.get_config('zoo=mingru')
    configs.save(config, tmp_path / 'config.json')
    (tmp_path / 'checkpoints' / '4').mkdir(parents=True)
    with config.unlocked():
        config.steps, config.accumulate, config.checkpoint.every = 2 * config.steps, 2, 9
        config.optimizer.schedule = spec(Cosine, warmup=4.0)
        config.optimizer.ema = None
        assert fork_of(tmp_path, config).other_updates == ()
        with config.ignore_type():
            config_path.set_value(key, config, value)
    found = fork_of(tmp_path, config)
    assert said in found.other_updates and found.other_rows == ()
    assert re.search(
        r'whose steps up to there were not those of this run \(.*the result differs from training this config',
        str(found),
    )
    assert found.describe()['other_updates'] == list(found.other_updates)


def test_a_fork_clips_and_projects_where_its_source_did_not_and_the_other_way(corpus, tmp_path, capsys):
    """Neither has arrays, and both shift the places of what has."""
    run, without, both, again = (tmp_path / name for name in ('run', 'without', 'both', 'again'))
    projected = '--config.optimizer.perpendicular=attnlab.train.perpendicular.Perpendicular'
    assert train(run, corpus, 'steps=4') == 0
    for source, fork, steps, *others in (
        (run, without, 6, '--config.optimizer.clip=None'),
        (without, both, 8, '--config.optimizer.clip=0.5', projected),
    ):
        command = ['train', f'--from={source}', f'--workdir={fork}', f'--config.steps={steps}', *others]
        capsys.readouterr()
        assert main(command) == 0
        assert 'whose steps up to there were not those of this run (optimizer.clip: ' in ' '.join(
            capsys.readouterr().out.split()
        )
        state, _ = final_state(fork)
        assert sum(np.size(leaf) == 1 and leaf == steps for leaf in state) == 3, 'the step, and counts of the optimiser'
    shutil.copytree(run, again)
    (again / 'checkpoints' / '4').rename(again / 'checkpoints' / str(10**15))
    config = configs.load(again / 'config.json').unlock()
    config.steps = 8
    with pytest.raises(UserError, match='it must be above 1000000000000000'):
        fork_of(again, config)


def test_a_copy_that_fails_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    run, workdir = tmp_path / 'run', tmp_path / 'fork'
    (run / 'checkpoints' / '4' / 'state').mkdir(parents=True)
    (run / 'checkpoints' / '4' / 'state' / 'a').write_text('state/a')
    (run / 'checkpoints' / '4' / 'SHA256SUMS').write_text('0  state/a\n')
    (run / 'metrics.jsonl').write_bytes(b'{"step": 4}\n\xff\n')

    def full(source, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(shutil, 'copyfileobj', full)
        with pytest.raises(UserError) as caught:
            Fork(run, 4, True).copy_into(workdir)
    assert f'checkpoint 4 of {run} cannot be copied to {workdir / "checkpoints" / "4"}: ' in str(caught.value)
    assert 'No space left on device' in str(caught.value) and '[(' not in str(caught.value)
    assert list((workdir / 'checkpoints').iterdir()) == []
    Fork(run, 4, True).copy_into(workdir)
    assert [path.name for path in (workdir / 'checkpoints').iterdir()] == ['4']
    assert (workdir / 'checkpoints' / '4' / 'state' / 'a').read_text() == 'state/a'
    assert (workdir / 'metrics.jsonl').read_bytes() == (run / 'metrics.jsonl').read_bytes()


def test_a_fork_takes_nothing_but_the_files_of_its_checkpoint(corpus, tmp_path):
    short, fork, secret = tmp_path / 'short', tmp_path / 'fork', tmp_path / 'secret'
    assert train(short, corpus, 'steps=4') == 0
    secret.write_text('mine')
    checkpoint = short / 'checkpoints' / '4'
    listed = [line.split('  ')[1] for line in (checkpoint / 'SHA256SUMS').read_text().splitlines()]
    (checkpoint / 'state' / '.x').symlink_to(secret)
    (checkpoint / '.zero').symlink_to('/dev/zero')
    (checkpoint / '_CHECKPOINT_METADATA').unlink()
    (checkpoint / '_CHECKPOINT_METADATA').symlink_to(secret)
    # A file that is listed may be a link: what it holds is that of its sum.
    (checkpoint / listed[0]).symlink_to((checkpoint / listed[0]).rename(tmp_path / 'elsewhere'))
    assert main(['train', f'--from={short}', f'--workdir={fork}', '--config.steps=6']) == 0
    copied = fork / 'checkpoints' / '4'
    there = {str(path.relative_to(copied)) for path in copied.rglob('*') if not path.is_dir()}
    assert there == {*listed, 'SHA256SUMS', 'commit_success.txt'} and not any(
        path.is_symlink() for path in copied.rglob('*')
    )


def test_a_run_that_was_stopped_before_its_first_report_is_forked(corpus, tmp_path):
    short, fork = tmp_path / 'short', tmp_path / 'fork'
    assert train(short, corpus, 'steps=4') == 0
    (short / 'metrics.jsonl').unlink()
    assert main(['train', f'--from={short}', f'--workdir={fork}', '--config.steps=6']) == 0
    steps = [json.loads(line)['step'] for line in (fork / 'metrics.jsonl').read_text().splitlines()]
    assert steps and min(steps) > 4


def test_a_fork_with_another_model_or_optimiser_is_refused_and_nothing_is_left(corpus, tmp_path, capsys):
    short, fork = tmp_path / 'short', tmp_path / 'fork'
    assert train(short, corpus, 'steps=8') == 0
    again = ['train', f'--from={short}', f'--workdir={fork}', '--config.steps=12']
    lion = ('--config.optimizer=attnlab.train.optimizer.Lion', '--config.optimizer.peak_lr=1e-3')
    for other, reason in (
        (('--config.model.stack.depth=2',), r'is float32 \(1, 16\) in .*, but float32 \(2, 16\) here'),
        (('--config.optimizer.ema=0.9',), 'has no array average'),
        (lion, 'has an array opt_state.*nu.*, which this model does not have'),
    ):
        capsys.readouterr()
        assert main([*again, *other]) == 2
        said = capsys.readouterr().err
        assert re.search(f'--from is {short}, whose model or optimiser is another: .*{reason}', said), said
        assert not fork.exists()
    assert main(again) == 0


def test_a_fork_of_a_damaged_checkpoint_is_refused_and_nothing_is_left(corpus, tmp_path, capsys):
    short, fork = tmp_path / 'short', tmp_path / 'fork'
    assert train(short, corpus, 'steps=4') == 0
    (short / 'checkpoints' / '4' / 'SHA256SUMS').unlink()
    assert main(['train', f'--from={short}', f'--workdir={fork}', '--config.steps=8']) == 2
    assert f'checkpoint 4 in {short / "checkpoints"} is damaged: SHA256SUMS is missing' in capsys.readouterr().err
    assert not fork.exists()


def test_a_copy_that_was_not_recorded_is_not_recorded_as_of_another_step(corpus, tmp_path, capsys, monkeypatch):
    run, fork = tmp_path / 'run', tmp_path / 'fork'
    assert train(run, corpus, 'steps=8') == 0
    again = ['train', f'--from={run}', f'--workdir={fork}', '--config.steps=12']
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(launch.run, 'record', lambda *given: sys.exit(9))
        main([*again, '--from_step=4'])
    capsys.readouterr()
    assert main([*again, '--from_step=8']) == 2
    assert f'{fork} has checkpoint 4, and no run.json that says where it is from: go on' in capsys.readouterr().err
    assert main([*again, '--from_step=4']) == 0
    assert starts(fork)[0]['from']['step'] == 4


def test_a_fork_and_a_run_that_go_on_in_other_parts_say_so(corpus, tmp_path, capsys, monkeypatch):
    """Dropout is drawn by part, so that steps in others are not those of one run."""
    run, fork = tmp_path / 'run', tmp_path / 'fork'
    config = language.get_config(f'zoo=mingru,data={corpus}')
    with config.unlocked():
        config.update(length=16, batch_size=2, steps=8, evals=(), rows_at_once=1)
        config.report.tensorboard = False
        config.model.dim, config.model.stack.depth, config.model.stack.blocks[0].dropout = 16, 1, 0.3
    assert jax.device_count() == 2

    def trained():
        status = launch.launch(config, run, console=standard_output())
        return status, ' '.join(capsys.readouterr().out.split())

    with monkeypatch.context() as patch:
        patch.setattr(loop, '_should_stop', lambda stop, number, steps: number == 4)
        status, said = trained()
    assert status == launch.STOPPED and 'parts of a step' not in said
    with monkeypatch.context() as patch:
        make = Axes.make
        patch.setattr(Axes, 'make', lambda axes, devices=None: make(axes, devices or jax.devices()[:1]))
        status, said = trained()
        assert status == 0 and 'parts of a step: 1 before, 2 now: dropout, hidden places, experts' in said
        assert 'parts of a step' not in trained()[1], 'it takes no more'
    assert [start['parts'] for start in starts(run)] == [1, 2, 2]
    assert main(['train', f'--from={run}', f'--workdir={fork}', '--config.steps=10']) == 0
    said = ' '.join(capsys.readouterr().out.split())
    assert 'whose steps up to there were not those of this run (parts of a step: 1, 2 before, 1 now): the' in said
    assert starts(fork)[0]['from']['other_updates'] == ['parts of a step: 1, 2 before, 1 now']


@dataclasses.dataclass(frozen=True)
class Flat(Schedule):
    """A schedule without a warm-up."""

    def __call__(self, steps, peak_lr):
        return lambda count: jnp.full_like(count, peak_lr, jnp.float32)


def test_a_schedule_without_a_warm_up_is_forked_as_it_is(tmp_path):
    config = language.get_config('zoo=mingru')
    config.optimizer.schedule = spec(Flat)
    configs.save(config, tmp_path / 'config.json')
    assert configs.plain(forked_config(tmp_path).optimizer.schedule) == configs.plain(spec(Flat))


def starts(workdir):
    return json.loads((workdir / 'run.json').read_text())['starts']


def test_a_fork_that_has_begun_goes_on_whatever_its_source_is_by_then(corpus, tmp_path):
    short, fork = tmp_path / 'short', tmp_path / 'fork'
    assert train(short, corpus, 'steps=8', 'optimizer.schedule.decay=0.5') == 0
    again = ['train', f'--from={short}', f'--workdir={fork}', '--config.steps=12']
    assert main(again) == 0
    shutil.rmtree(short / 'checkpoints' / '4')
    assert main(again) == 0
    shutil.rmtree(short)
    assert main(again) == 0
    assert [start['from'] for start in starts(fork)] == [
        {'run': str(short), 'step': 4, 'same_rates': True, 'other_rows': [], 'other_updates': []}
    ] * 3


def test_a_run_with_parameters_of_another_goes_on_whatever_that_is_by_then(corpus, tmp_path, monkeypatch):
    source, straight, broken = (tmp_path / name for name in ('source', 'straight', 'broken'))
    assert train(source, corpus, 'steps=8') == 0
    given = ['train', f'--config=language:zoo=mingru,data={corpus},run={source}', '--config.steps=4']
    given += [f'--config.{item}' for item in SMALL]
    assert main([*given, f'--workdir={straight}', '--config.start.step=4']) == 0

    def killed(*_, **__):
        raise UserError('killed before the first save')

    later = (source / 'checkpoints' / '8').rename(tmp_path / 'later')
    with monkeypatch.context() as patch:
        patch.setattr(loop, '_steps', killed)
        assert main([*given, f'--workdir={broken}']) == 2
    later.rename(source / 'checkpoints' / '8')
    assert main([*given, f'--workdir={broken}']) == 0
    shutil.rmtree(source)
    assert main([*given, f'--workdir={broken}']) == 0
    assert [start['start'] for start in starts(broken)] == [{'run': str(source), 'step': 4}] * 3
    for one, other in zip(final_state(broken)[0], final_state(straight)[0], strict=True):
        np.testing.assert_array_equal(one, other)


def test_how_long_a_longer_run_is_the_same():
    assert WarmupStableDecay(decay=0.2).steady(100) == 80
    assert WarmupStableDecay(decay=30.0).steady(100) == 70
    assert Cosine().steady(100) == Constant().steady(100) == 0
