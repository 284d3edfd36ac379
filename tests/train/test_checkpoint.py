"""Checkpoints: round trips, damage of every kind, kills, full disks, other devices, other processes."""

import contextlib
import errno
import os
import pathlib
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from attnlab.errors import UserError
from attnlab.nn.parameter import param
from attnlab.train import checkpoint
from attnlab.train.checkpoint import SUMS, UNFINISHED, Checkpoints
from attnlab.train.optimizer import AdamW, Muon
from tests.train.checkpoint_process import abstract, arrays, numbers

ROOT = pathlib.Path(__file__).parents[2]


def saved(directory: pathlib.Path, *steps: int, keep: int = 9) -> pathlib.Path:
    checkpoints = Checkpoints(directory, keep=keep)
    for step in steps:
        checkpoints.save(step, arrays(step), {'step': step, 'sums': {'loss': 0.1 + step}})
    checkpoints.close()
    return directory


def restored_step(directory: pathlib.Path, reports: list[str] | None = None) -> int | None:
    """The step that is restored, its arrays compared. Reports are collected, and none may come where none is asked."""
    lines: list[str] = [] if reports is None else reports
    checkpoints = Checkpoints(directory, notify=lines.append)
    try:
        found = checkpoints.resume_latest(abstract())
    finally:
        checkpoints.close()
    assert reports is not None or not lines, lines
    if found is None:
        return None
    state, metadata = found
    for name, wanted in numbers(metadata['step']).items():
        np.testing.assert_array_equal(state[name], wanted)
        assert state[name].dtype == wanted.dtype
    assert metadata == {'step': metadata['step'], 'sums': {'loss': 0.1 + metadata['step']}}
    return metadata['step']


def folders(directory: pathlib.Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_round_trip_and_how_many_are_kept(tmp_path: pathlib.Path):
    directory = saved(tmp_path / 'checkpoints', 5, 10, 15, 20, keep=2)
    assert folders(directory) == ['15', '20']
    assert Checkpoints(directory).steps() == [15, 20]
    assert restored_step(directory) == 20
    subprocess.run(['sha256sum', '--check', '--strict', '--quiet', SUMS], cwd=directory / '20', check=True)


def test_a_checkpoint_that_somebody_reads_is_removed_later(tmp_path: pathlib.Path, monkeypatch):
    """As over NFS, where its files stay under other names until they are closed."""
    directory = tmp_path / 'checkpoints'
    monkeypatch.setattr(checkpoint, 'REMOVAL_PAUSES', (0.0,))
    removed = shutil.rmtree

    def held(path, **options):
        if pathlib.Path(path).name == 'removing-1':
            raise OSError(errno.ENOTEMPTY, 'Directory not empty')
        removed(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.shutil, 'rmtree', held)
        saved(directory, 1, 2, 3, keep=1)
    assert folders(directory) == ['3', 'removing-1']
    saved(directory, 4, keep=1)
    assert folders(directory) == ['4']


def test_nothing_saved_yet(tmp_path: pathlib.Path):
    assert restored_step(tmp_path / 'none') is None
    assert not (tmp_path / 'none').exists()
    assert Checkpoints(tmp_path / 'none').steps() == []


def test_due(tmp_path: pathlib.Path):
    checkpoints = Checkpoints(tmp_path, every=3)
    assert [step for step in range(1, 10) if checkpoints.due(step)] == [3, 6, 9]
    with pytest.raises(UserError, match='at least 1; got 0 and 2'):
        Checkpoints(tmp_path, every=0)


class Layer(nnx.Module):
    """A matrix and a bias."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.weight = param(nnx.initializers.normal(1.0), (6, 4), axes=('embed', 'mlp'), rngs=rngs)
        self.bias = param(nnx.initializers.normal(1.0), (4,), axes=('mlp',), group='vector', rngs=rngs)


@pytest.mark.parametrize('kind', [AdamW, Muon])
def test_a_train_state_comes_back_to_the_bit_and_whole_or_in_part(tmp_path: pathlib.Path, kind: type):
    params = nnx.state(Layer(rngs=nnx.Rngs(params=jax.random.key(0))))
    transform = kind(peak_lr=0.1).transform(params, 9)
    updates, opt_state = transform.update(jax.tree.map(jnp.cos, params), transform.init(params), params)
    state = {'params': optax.apply_updates(params, updates), 'opt_state': opt_state, 'step': jnp.int32(1)}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state, {'step': 1})
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    back, _ = checkpoints.restore(1, shapes)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(back), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes() and a.dtype == b.dtype
    only, _ = checkpoints.restore(1, {'params': shapes['params']})
    jax.tree.map(np.testing.assert_array_equal, only, {'params': state['params']})
    checkpoints.close()


def test_a_state_may_be_donated_as_soon_as_save_returns(tmp_path: pathlib.Path):
    advance = jax.jit(lambda state: jax.tree.map(lambda x: x * 1.5 + 1, state), donate_argnums=0)
    state = {'a': jnp.arange(2_000_000.0), 'b': jnp.ones((1000, 1000))}
    wanted = jax.tree.map(lambda x: np.array(x, copy=True), state)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state, {})
    for _ in range(5):
        state = advance(state)
    jax.block_until_ready(state)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    back, _ = checkpoints.restore(1, shapes)
    jax.tree.map(np.testing.assert_array_equal, back, wanted)
    checkpoints.close()


def test_restore_by_step_and_what_is_not_there(tmp_path: pathlib.Path):
    checkpoints = Checkpoints(saved(tmp_path, 5, 10))
    state, metadata = checkpoints.restore(5, abstract())
    np.testing.assert_array_equal(state['matrix'], numbers(5)['matrix'])
    assert metadata['step'] == 5
    with pytest.raises(UserError, match='no checkpoint of step 7; it has: 5, 10'):
        checkpoints.restore(7, abstract())
    flip(largest(tmp_path / '5'))
    with pytest.raises(UserError, match=r'checkpoint 5 in .* is damaged: .* has changed since it was written'):
        checkpoints.restore(5, abstract())
    assert folders(tmp_path) == ['10', '5']
    checkpoints.close()


def test_another_structure_is_refused_by_name(tmp_path: pathlib.Path):
    checkpoints = Checkpoints(saved(tmp_path, 5))
    shapes = abstract()
    with pytest.raises(UserError, match=r"has no array matrxi; did you mean 'matrix'\?"):
        checkpoints.restore(5, {'matrxi': shapes['matrix']})
    wider = jax.ShapeDtypeStruct((64, 33), jnp.float32, sharding=shapes['matrix'].sharding)
    with pytest.raises(UserError, match=r'matrix is float32 \(64, 32\) in .*, but float32 \(64, 33\) here'):
        checkpoints.restore(5, {'matrix': wider})
    checkpoints.close()


def flip(path: pathlib.Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: pathlib.Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def largest(folder: pathlib.Path) -> pathlib.Path:
    return max((path for path in folder.rglob('*') if path.is_file()), key=lambda path: path.stat().st_size)


def half_removed(folder: pathlib.Path) -> None:
    shutil.rmtree(folder / 'state' / 'd')


def without_sums(folder: pathlib.Path) -> None:
    (folder / SUMS).unlink()


def cut_sums(folder: pathlib.Path, after: str) -> None:
    text = (folder / SUMS).read_text()
    (folder / SUMS).write_text(text[: text.index('\n', text.index(after)) + 1])


DAMAGE = {
    'a bit of an array': lambda folder: flip(largest(folder)),
    'a bit of the metadata': lambda folder: flip(folder / 'metadata' / 'metadata'),
    'a bit of the manifest': lambda folder: flip(folder / 'state' / 'manifest.ocdbt'),
    'a bit of the sums': lambda folder: flip(folder / SUMS),
    'a truncated array': lambda folder: truncate(largest(folder)),
    'an empty array': lambda folder: largest(folder).write_bytes(b''),
    'a missing array': lambda folder: largest(folder).unlink(),
    'a missing description': lambda folder: (folder / 'state' / '_METADATA').unlink(),
    'no sums': without_sums,
    'empty sums': lambda folder: (folder / SUMS).write_text(''),
    'sums cut after the metadata': lambda folder: cut_sums(folder, 'metadata/metadata'),
    'a folder half removed': half_removed,
    'an empty folder': lambda folder: (shutil.rmtree(folder), folder.mkdir()),
}


@pytest.mark.parametrize('damage', DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_reported_set_aside_and_passed_over(
    tmp_path: pathlib.Path, damage: Callable[[pathlib.Path], None]
):
    directory = saved(tmp_path, 5, 10, 15)
    damage(directory / '15')
    remains = sorted(str(path.relative_to(directory / '15')) for path in (directory / '15').rglob('*'))
    reports: list[str] = []
    assert restored_step(directory, reports) == 10
    (line,) = reports
    assert line.startswith('checkpoint 15 is damaged: ') and line.endswith(
        '; kept as damaged-15, resuming from the one before'
    )
    assert '\n' not in line
    assert folders(directory) == ['10', '5', 'damaged-15']
    aside = directory / 'damaged-15'
    assert sorted(str(path.relative_to(aside)) for path in aside.rglob('*')) == remains
    assert restored_step(directory) == 10


def test_who_only_reads_passes_a_damaged_checkpoint_over_and_changes_nothing(tmp_path: pathlib.Path):
    directory = saved(tmp_path, 5, 10)
    flip(largest(directory / '10'))
    (directory / '2019').mkdir()
    before = sorted(directory.rglob('*'))
    lines: list[str] = []
    with contextlib.closing(Checkpoints(directory, notify=lines.append)) as checkpoints:
        _, metadata = checkpoints.restore_latest(abstract())
    assert metadata['step'] == 5 and sorted(directory.rglob('*')) == before
    assert [line.partition(' is ')[0] for line in lines] == ['checkpoint 2019', 'checkpoint 10']
    assert lines[0].endswith(f'{SUMS} is missing; left as it is, reading the one before')


@pytest.mark.parametrize('code', [errno.EACCES, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize('what', ['sums', 'array', 'folder'])
def test_what_cannot_be_read_is_not_damaged(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, what: str, code: int
):
    directory = saved(tmp_path, 5, 10)
    unreadable = {'sums': directory / '10' / SUMS, 'array': largest(directory / '10'), 'folder': directory}[what]

    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(path: Any = '.', *arguments: Any, **named: Any) -> Any:
            if pathlib.Path(path) == unreadable:
                raise OSError(code, os.strerror(code), str(path))
            return call(path, *arguments, **named)

        return called

    with monkeypatch.context() as patch:
        for where, name in ((pathlib.Path, 'open'), (os, 'open'), (os, 'scandir')):
            patch.setattr(where, name, failing(getattr(where, name)))
        with pytest.raises(
            UserError, match=f'cannot be read: {os.strerror(code)}.*; nothing was changed: give the same'
        ):
            restored_step(directory)
    assert folders(directory) == ['10', '5'] and restored_step(directory) == 10


def test_a_checkpoint_that_its_run_removes_meanwhile_is_not_damaged(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    directory = saved(tmp_path, 5)
    damage = checkpoint._damage

    def removed(folder: pathlib.Path) -> str | None:
        if folder.name == '5':
            saved(directory, 10, keep=1)
        return damage(folder)

    monkeypatch.setattr(checkpoint, '_damage', removed)
    with contextlib.closing(Checkpoints(directory, notify=pytest.fail)) as checkpoints:
        _, metadata = checkpoints.restore_latest(abstract())
        assert metadata['step'] == 10 and folders(directory) == ['10']
        monkeypatch.setattr(checkpoints, '_check_structure', lambda *_: shutil.rmtree(directory / '10'))
        with pytest.raises(UserError, match=r'10 was removed while it was read, .*; give the same command again'):
            checkpoints.restore_latest(abstract())


def test_any_bit_of_any_file_that_is_read_is_noticed(tmp_path: pathlib.Path):
    directory = saved(tmp_path, 5, 10)
    files = sorted(path for path in (directory / '10').rglob('*') if path.is_file())
    for path in files:
        content = path.read_bytes()
        if path.name in ('_CHECKPOINT_METADATA', 'commit_success.txt') and path.parent == directory / '10':
            continue
        flip(path)
        reports: list[str] = []
        assert restored_step(directory, reports) == 5, path
        (directory / 'damaged-10').rename(directory / '10')
        path.write_bytes(content)
    assert restored_step(directory) == 10


def test_training_goes_on_over_a_damaged_checkpoint_and_names_do_not_collide(tmp_path: pathlib.Path):
    directory = saved(tmp_path, 5, 10)
    for aside in (['damaged-10'], ['damaged-10', 'damaged-10.1']):
        flip(largest(directory / '10'))
        assert restored_step(directory, []) == 5
        saved(directory, 10)
        assert folders(directory) == ['10', '5', *aside]
        assert restored_step(directory) == 10


def test_when_all_are_damaged_nothing_is_deleted_and_nothing_begins_anew(tmp_path: pathlib.Path):
    directory = saved(tmp_path, 5, 10)
    flip(largest(directory / '5'))
    truncate(largest(directory / '10'))
    reports: list[str] = []
    for _ in range(2):
        with pytest.raises(UserError, match=r'every checkpoint in .* is damaged \(damaged-10, damaged-5\)'):
            restored_step(directory, reports)
    assert [line.split(' is ')[0] for line in reports] == ['checkpoint 10', 'checkpoint 5']
    assert folders(directory) == ['damaged-10', 'damaged-5']


def test_a_damaged_checkpoint_that_cannot_be_renamed_is_passed_over(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    directory = saved(tmp_path, 5, 10)
    flip(largest(directory / '10'))

    def refuse(self: pathlib.Path, target: pathlib.Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(pathlib.Path, 'rename', refuse)
    reports: list[str] = []
    assert restored_step(directory, reports) == 5
    assert 'left where it is (Read-only file system), resuming' in reports[0]
    flip(largest(directory / '5'))
    with pytest.raises(UserError, match=r'every checkpoint in .* is damaged \(5, 10\)'):
        restored_step(directory, reports)


def test_what_was_interrupted_is_no_checkpoint_and_is_cleared_by_the_next_save(tmp_path: pathlib.Path):
    directory = saved(tmp_path, 5)
    shutil.copytree(directory / '5', directory / '10.orbax-checkpoint-tmp')
    shutil.copytree(directory / '5', directory / 'removing-1')
    shutil.copytree(directory / '5', checkpoint.files.temporary_name(directory / '7'))
    assert restored_step(directory) == 5
    assert folders(directory)[1:] == ['10.orbax-checkpoint-tmp', '5', 'removing-1'] and len(folders(directory)) == 4
    saved(directory, 10)
    assert folders(directory) == ['10', '5']
    assert restored_step(directory) == 10


def test_a_full_disk_is_one_line_and_older_checkpoints_stay(mount: Callable[[str], pathlib.Path]):
    small_disk = mount('160k')
    directory = saved(small_disk / 'checkpoints', 5)
    (small_disk / 'filler').write_bytes(bytes(shutil.disk_usage(small_disk).free - 8192))
    checkpoints = Checkpoints(directory)
    with pytest.raises(UserError, match=r'checkpoint 10 needs .* no space left on device; complete checkpoints: 5$'):
        checkpoints.save(10, arrays(10), {'step': 10})
    checkpoints.close()
    assert folders(directory) == ['5']
    assert restored_step(directory) == 5


# Of several arrays one fails to be written, and Orbax closes its event loop while tensorstore still writes the others,
# which then say, on a thread of their own, that there is nobody to tell.
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
def test_a_write_that_fails_midway_is_one_line_and_older_checkpoints_stay(tmp_path: pathlib.Path):
    directory = saved(tmp_path, 5)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    checkpoints = Checkpoints(directory)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
        with pytest.raises(UserError, match=r'^checkpoint 10 cannot be written to .*: File too large; .*: 5$'):
            checkpoints.save(10, arrays(10), {'step': 10})
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert checkpoints.steps() == [5]
    checkpoints.save(10, arrays(10), {'step': 10, 'sums': {'loss': 10.1}})
    checkpoints.close()
    assert folders(directory) == ['10', '5']
    assert restored_step(directory) == 10


def test_what_a_failed_save_is_still_writing_is_removed_with_it(tmp_path: pathlib.Path, monkeypatch):
    checkpoints = Checkpoints(saved(tmp_path, 5))
    late: list[threading.Thread] = []

    def keep_writing(folder: pathlib.Path) -> None:
        for n in range(1000):
            with contextlib.suppress(FileNotFoundError):  # the folder is gone
                (folder / str(n)).touch()

    def fails(path: pathlib.Path, args: Any) -> None:
        folder = path.with_name(f'{path.name}{UNFINISHED}')
        folder.mkdir()
        late.append(threading.Thread(target=keep_writing, args=(folder,)))
        late[0].start()
        while not (folder / '100').exists():
            time.sleep(0)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoints._orbax, 'save', fails)
    with pytest.raises(UserError, match=r'^checkpoint 10 cannot be written to .*: No space left on device; .*: 5$'):
        checkpoints.save(10, arrays(10), {'step': 10})
    late[0].join()
    monkeypatch.undo()
    checkpoints.save(10, arrays(10), {'step': 10, 'sums': {'loss': 10.1}})
    checkpoints.close()
    assert folders(tmp_path) == ['10', '5']


def test_the_reason_is_told_though_nothing_can_be_removed_either(tmp_path: pathlib.Path, monkeypatch):
    checkpoints = Checkpoints(saved(tmp_path, 5))

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    (tmp_path / f'10{UNFINISHED}').mkdir()
    monkeypatch.setattr(checkpoints, '_swept', True)
    monkeypatch.setattr(checkpoint, 'REMOVAL_PAUSES', ())
    monkeypatch.setattr(shutil, 'rmtree', fails)
    monkeypatch.setattr(checkpoints._orbax, 'save', fails)
    with pytest.raises(UserError, match=r'^checkpoint 10 cannot be written to .*: Read-only file system; .*: 5$'):
        checkpoints.save(10, arrays(10), {'step': 10})


def test_a_file_in_the_place_of_the_folder_is_one_line(tmp_path: pathlib.Path):
    (tmp_path / 'checkpoints').write_text('')
    checkpoints = Checkpoints(tmp_path / 'checkpoints')
    with pytest.raises(UserError, match=r'cannot be written to .*: File exists; complete checkpoints: none'):
        checkpoints.save(10, arrays(10), {'step': 10})
    checkpoints.close()


def python(task: str, directory: pathlib.Path, devices: int, rows: int, *distributed: int) -> subprocess.Popen[str]:
    arguments = [task, directory, devices, rows, *distributed]
    return subprocess.Popen(
        [sys.executable, '-W', 'error', '-m', 'tests.train.checkpoint_process', *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def succeed(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors


def test_a_checkpoint_of_eight_devices_opens_on_two_and_the_other_way(tmp_path: pathlib.Path):
    succeed(python('save', tmp_path / 'eight', 8, 4))
    checkpoints = Checkpoints(tmp_path / 'eight')
    state, _ = checkpoints.restore_latest(abstract(rows=2))
    checkpoints.close()
    assert {shard.data.shape for shard in state['matrix'].addressable_shards} == {(32, 32)}
    for name, wanted in numbers(7).items():
        np.testing.assert_array_equal(state[name], wanted)
    succeed(python('restore', tmp_path / 'eight', 1, 1))
    succeed(python('save', tmp_path / 'one', 1, 1))
    succeed(python('restore', tmp_path / 'one', 8, 2))


def pair(task: str, directory: pathlib.Path) -> list[subprocess.Popen[str]]:
    with socket.socket() as found:
        found.bind(('localhost', 0))
        port = found.getsockname()[1]
    return [python(task, directory, 2, 2, port, index, 2) for index in range(2)]


@pytest.mark.slow
def test_two_processes_save_and_restore_together_and_one_opens_it(tmp_path: pathlib.Path):
    succeed(*pair('save', tmp_path))
    succeed(*pair('restore', tmp_path))
    succeed(python('restore', tmp_path, 1, 1))


def kill_at_random(directory: pathlib.Path, kills: int) -> None:
    """Kills a process that does nothing but save, and starts it again, which checks what it goes on from."""
    rng = random.Random(0)
    reached = 0
    for _ in range(kills):
        process = python('forever', directory, 1, 1)
        line = process.stdout.readline()
        assert line, process.stderr.read()
        started = int(line.split()[1])
        assert started >= reached
        for _ in range(rng.randint(2, 4)):
            # One save is in progress, and the one before it complete.
            saving = int(process.stdout.readline().split()[1])
        time.sleep(rng.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        reached = saving - 1
    assert restored_step(directory) >= reached


def test_a_kill_at_any_moment_leaves_a_folder_that_goes_on(tmp_path: pathlib.Path):
    kill_at_random(tmp_path, kills=4)


@pytest.mark.slow
def test_many_kills_at_any_moment_leave_a_folder_that_goes_on(tmp_path: pathlib.Path):
    kill_at_random(tmp_path, kills=40)


@pytest.mark.parametrize('name', ['/dev/zero', '../5/d/x', 'zero'])
def test_what_a_list_of_sums_names_elsewhere_is_not_read(tmp_path: pathlib.Path, name: str):
    directory = saved(tmp_path, 5, 10)
    (directory / '10' / 'zero').symlink_to('/dev/zero')
    with (directory / '10' / checkpoint.SUMS).open('a') as sums:
        sums.write(f'{"0" * 64}  {name}\n')
    with contextlib.closing(Checkpoints(directory, notify=lambda _: None)) as checkpoints:
        assert checkpoints.newest() == 5


def test_a_list_of_sums_has_every_file_that_is_read(tmp_path: pathlib.Path):
    directory = saved(tmp_path, 5, 10)
    (directory / '10' / 'state' / '.DS_Store').write_text('of a desktop')
    lines: list[str] = []
    with contextlib.closing(Checkpoints(directory, notify=lines.append)) as checkpoints:
        assert checkpoints.newest() == 10 and not lines
        cut_sums(directory / '10', 'metadata/metadata')
        assert checkpoints.newest() == 5
        with pytest.raises(UserError, match=r'checkpoint 10 in .* is damaged: SHA256SUMS has no sum of state/_MET'):
            checkpoints.check_whole(10)
    assert lines == [
        f'checkpoint 10 is damaged: {SUMS} has no sum of state/_METADATA; left as it is, reading the one before'
    ]


def test_a_step_is_a_number_without_zeros_before_it(tmp_path: pathlib.Path):
    directory = saved(tmp_path, 5)
    for name in ('0007', '٧'):
        (directory / name).mkdir()
    with contextlib.closing(Checkpoints(directory)) as checkpoints:
        assert checkpoints.steps() == [5] and checkpoints.newest() == 5
