"""Checkpoints that are written atomically and verified before use; a damaged one never replaces a good one.

A folder of checkpoints holds one folder per step, written by Orbax under another name and renamed when complete.
Its `SHA256SUMS`, in the format of `sha256sum -c`, is written before the renaming: Orbax itself does not detect a
flipped bit in the data of an array. Training renames a checkpoint that fails the check to `damaged-<step>`; whoever
only reads passes it over. One that cannot be read, as when a disk or a network fails, is not damaged: that is an error.
"""

import contextlib
import hashlib
import logging
import os
import pathlib
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from attnlab import files
from attnlab.errors import UserError, nearest
from attnlab.train.saved import steps_in, unreadable

SUMS = 'SHA256SUMS'
UNCHECKED = (SUMS, '_CHECKPOINT_METADATA')
"""Files without a checksum: Orbax writes the time to `_CHECKPOINT_METADATA` after the sums are computed."""

LATER = (*UNCHECKED, 'commit_success.txt')
"""Files of a checkpoint that are written after the sums."""

UNFINISHED = '.orbax-checkpoint-tmp'
"""The suffix of a folder that Orbax is still writing."""

ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Errors of files that are not there; any other may pass."""

REMOVAL_PAUSES = tuple(0.01 * 2**n for n in range(8))
"""Seconds between attempts at removing a folder, 2.5 in total."""

CHAINED = re.compile(r'opt_state\.(\d{1,9})\.(.+)')
"""The name of an array of the optimiser: its place in a chain, and the rest."""

NONE = -1
ALL_DAMAGED = -2

State = Any
Metadata = dict[str, Any]


class Checkpoints:
    """The checkpoints of a run, in one folder.

    Every process of a run calls every method; files written once are written by the first. The state is a pytree of jax
    arrays, each process writing the shards it holds; it can be restored onto other devices and other shardings.

    Args:
      directory: the folder; created by the first save.
      every: steps between two checkpoints, for `due`.
      keep: how many of the newest are kept when a new one is complete.
      steady: the newest one up to this step is also kept, as a start for longer runs.
      notify: called with one line for the user.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        *,
        every: int = 500,
        keep: int = 2,
        steady: int = 0,
        notify: Callable[[str], None] = print,
    ):
        if every < 1 or keep < 1:
            raise UserError(f'every and keep of checkpoints must be at least 1; got {every} and {keep}')
        self._directory = pathlib.Path(directory).absolute()
        self._every = every
        self._keep = keep
        self._steady = steady
        self._notify = notify if jax.process_index() == 0 else lambda line: None
        self._saving: int | None = None
        self._swept = False
        for logger in ('absl', 'asyncio'):
            logging.getLogger(logger).addFilter(_not_from_orbax)
        self._orbax = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(state=ocp.PyTreeCheckpointHandler(), metadata=ocp.JsonCheckpointHandler()),
            async_options=ocp.AsyncOptions(post_finalization_callback=self._seal),
        )

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after `step`."""
        return step % self._every == 0

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, damaged or not, in order. Raises `UserError` where they cannot be read."""
        return steps_in(self._directory)

    def save(self, step: int, state: State, metadata: Metadata) -> None:
        """Saves in the background, after the previous save; `state` may be donated as soon as this returns.

        Raises `UserError` when this save or the previous one cannot be written. Older checkpoints stay.
        """
        self.wait()
        with self._reported(step):
            self._sweep()
            self._check_space(step, sum(leaf.nbytes for leaf in jax.tree.leaves(state)))
            self._saving = step
            self._orbax.save(
                self._directory / str(step),
                args=ocp.args.Composite(state=ocp.args.PyTreeSave(_named(state)), metadata=ocp.args.JsonSave(metadata)),
            )

    def wait(self) -> None:
        """Waits for the save in progress. Raises `UserError` when it could not be written."""
        if self._saving is None:
            return
        with self._reported(self._saving):
            self._orbax.wait_until_finished()
            self._saving = None
            self._prune()

    def close(self) -> None:
        """Waits for the save in progress and ends the threads."""
        try:
            self.wait()
        finally:
            self._orbax.close()

    def restore_latest(self, abstract: State) -> tuple[State, Metadata] | None:
        """Returns the newest undamaged checkpoint, or `None` when there are no checkpoints.

        `abstract` has the structure of the state, or of a part of it, with shapes, types and shardings for arrays.
        A damaged checkpoint is reported, and the one before it is tried; nothing is changed.

        Raises `UserError` when all are damaged, and for one that cannot be read.
        """
        step = self.newest()
        return None if step is None else self._read(step, abstract)

    def newest(self) -> int | None:
        """The step that `restore_latest` reads, or `None` when there are no checkpoints; raises what that does."""
        return self._newest(lambda step: 'left as it is, reading the one before')

    def resume_latest(self, abstract: State) -> tuple[State, Metadata] | None:
        """`restore_latest` for the run itself, to go on from: a damaged checkpoint is renamed to `damaged-<step>`.

        Raises `UserError` when all are damaged: whether to train from scratch is for the user to decide.
        """
        step = self._newest(lambda step: f'{self._set_aside(step)}, resuming from the one before')
        return None if step is None else self._read(step, abstract)

    def _newest(self, pass_over: Callable[[int], str]) -> int | None:
        """The step of the newest undamaged checkpoint; `pass_over` gets the step of a damaged one, says what it did."""
        self.wait()
        step = self._agree(lambda: self._newest_whole(pass_over))
        if step == ALL_DAMAGED:
            aside = ', '.join(sorted(path.name for path in self._directory.glob('damaged-*')))
            raise UserError(
                f'every checkpoint in {self._directory} is damaged ({aside or self._complete()}); '
                f'to train anew, choose another --workdir'
            )
        return None if step == NONE else step

    def restore(self, step: int, abstract: State) -> tuple[State, Metadata]:
        """Returns the checkpoint of `step`. Raises `UserError` when there is none, or it is damaged."""
        self.wait()
        self.check_whole(step)
        return self._read(step, abstract)

    def check_whole(self, step: int) -> None:
        """Raises `UserError` when there is no checkpoint of `step`, or it is damaged."""
        if step not in self.steps():
            raise UserError(f'{self._directory} has no checkpoint of step {step}; it has: {self._complete()}')
        if self._agree(lambda: NONE if _damage(self._directory / str(step)) else step) == NONE:
            raise UserError(
                f'checkpoint {step} in {self._directory} is damaged: {_damage(self._directory / str(step))}'
            )

    def check_structure(self, step: int, abstract: State, whole: tuple[str, ...] = ()) -> None:
        """Raises `UserError` for an array that is missing or has another shape or type; reads no array.

        Of the parts of the state in `whole` there must be no other arrays either.
        """
        path, wanted = self._directory / str(step), _named(abstract)
        known = self._check_structure(path, wanted).values()
        for name in self._saved(path):
            if name.partition('.')[0] in whole and name not in known:
                raise UserError(f'{path} has an array {name}, which this model does not have')

    def _read(self, step: int, abstract: State) -> tuple[State, Metadata]:
        path = self._directory / str(step)
        wanted = _named(abstract)
        try:
            places = self._check_structure(path, wanted)
            item = {places[name]: leaf for name, leaf in wanted.items()}
            restored = self._orbax.restore(
                path,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeRestore(
                        item=item,
                        restore_args=ocp.checkpoint_utils.construct_restore_args(item),
                        partial_restore=True,
                    ),
                    metadata=ocp.args.JsonRestore(),
                ),
            )
        except Exception as error:
            if path.exists():
                raise
            raise UserError(
                f'{path} was removed while it was read, as by the run itself; give the same command again'
            ) from error
        leaves = [restored.state[places[name]] for name in wanted]
        return jax.tree.unflatten(jax.tree.structure(abstract), leaves), restored.metadata

    def _check_structure(self, path: pathlib.Path, wanted: dict[str, Any]) -> dict[str, str]:
        """The names that wanted arrays have in a checkpoint.

        Raises `UserError` where shapes or types differ: Orbax would crop or pad silently.
        """
        saved = self._saved(path)
        places = _places(wanted, saved)
        for name, leaf in wanted.items():
            if places[name] not in saved:
                raise UserError(f'{path} has no array {name}{nearest(name, saved)}')
            there = saved[places[name]]
            if (there.shape, there.dtype) != (leaf.shape, leaf.dtype):
                raise UserError(f'{name} is {there.dtype} {there.shape} in {path}, but {leaf.dtype} {leaf.shape} here')
        return places

    def _saved(self, path: pathlib.Path) -> dict[str, Any]:
        """Shapes and types of the arrays of a checkpoint, by name."""
        return dict(self._orbax.metadata(path).item_metadata['state'].tree)

    def _newest_whole(self, pass_over: Callable[[int], str]) -> int:
        steps = self.steps()
        for step in reversed(steps):
            path = self._directory / str(step)
            damage = _damage(path)
            if damage is None:
                return step
            if not path.exists():
                # The run that is read has removed it meanwhile, for there is a newer one.
                return self._newest_whole(pass_over)
            self._notify(f'checkpoint {step} is damaged: {damage}; {pass_over(step)}')
        # A run that died right after renaming its last, damaged checkpoint must not restart from scratch.
        return ALL_DAMAGED if steps or any(self._directory.glob('damaged-*')) else NONE

    def _set_aside(self, step: int) -> str:
        names = (f'damaged-{step}{suffix}' for suffix in ('', *(f'.{n}' for n in range(1, 1000))))
        name = next(name for name in names if not (self._directory / name).exists())
        try:
            (self._directory / str(step)).rename(self._directory / name)
        except OSError as error:
            return f'left where it is ({error.strerror})'
        return f'kept as {name}'

    def _agree(self, choose: Callable[[], int]) -> int:
        """The choice of the first process, in every process."""
        if jax.process_count() == 1:
            return choose()
        return int(multihost_utils.broadcast_one_to_all(np.int32(choose() if jax.process_index() == 0 else 0)))

    def _seal(self) -> None:
        """Writes the checksums; called by Orbax in the first process, between the last write and the renaming."""
        (unfinished,) = self._directory.glob(f'{self._saving}{UNFINISHED}*')
        paths = sorted(path for path in unfinished.rglob('*') if path.is_file() and path.name not in UNCHECKED)
        names = [str(path.relative_to(unfinished)) for path in paths]
        lines = [f'{digest}  {name}\n' for name, digest in _digests(unfinished, names).items()]
        files.write(unfinished / SUMS, ''.join(lines))

    def _prune(self) -> None:
        """Removes all but the newest and the last steady one.

        A folder is renamed first, so that an interrupted removal does not look like damage.
        """
        if jax.process_index() == 0:
            steps = self.steps()
            steady = max((step for step in steps if step <= self._steady), default=None)
            for step in (step for step in steps[: -self._keep] if step != steady):
                doomed = self._directory / f'removing-{step}'
                (self._directory / str(step)).rename(doomed)
                try:
                    _remove(doomed)
                except OSError:
                    # Somebody reads it still, over a network; the next save sweeps it away.
                    self._swept = False

    def _sweep(self) -> None:
        """Removes remains of interrupted saves and removals, once, and again after a failed save."""
        if not self._swept:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._clear(f'*{UNFINISHED}*')
            with contextlib.suppress(OSError):
                self._clear('removing-*')
            self._clear('.*.*.tmp')  # copies of forks that were killed
        self._swept = True

    def _check_space(self, step: int, needed: int) -> None:
        """Raises `UserError`, before anything is written, where space is short; compression is ignored."""
        free = shutil.disk_usage(self._directory).free
        if self._agree(lambda: int(free < needed)):
            raise UserError(
                f'checkpoint {step} needs {needed / 1e6:,.1f} MB and {self._directory} has {free / 1e6:,.1f} MB left: '
                f'no space left on device; complete checkpoints: {self._complete()}'
            )

    def _complete(self) -> str:
        return ', '.join(map(str, self.steps())) or 'none'

    def _clear(self, pattern: str) -> None:
        if jax.process_index() == 0:
            for path in self._directory.glob(pattern):
                _remove(path)

    @contextlib.contextmanager
    def _reported(self, step: int) -> Iterator[None]:
        """Raises `UserError` with one line for an error while writing."""
        try:
            yield
        except Exception as error:
            self._saving = None
            reason = _reason(error)
            if reason is None:
                raise
            # Files that cannot be removed, or are written again by writes still in progress, are removed by the next
            # save.
            with contextlib.suppress(OSError):
                self._clear(f'{step}{UNFINISHED}*')
            self._swept = False
            raise UserError(
                f'checkpoint {step} cannot be written to {self._directory}: {reason}; '
                f'complete checkpoints: {self._complete()}'
            ) from error


def _remove(folder: pathlib.Path) -> None:
    """Removes a folder; writes may be in progress, for Orbax reports the first that fails and lets others run."""
    for pause in REMOVAL_PAUSES:
        with contextlib.suppress(OSError):  # a file came or went meanwhile
            shutil.rmtree(folder)
        if not folder.exists():
            return
        time.sleep(pause)
    shutil.rmtree(folder)


def _named(state: State) -> dict[str, Any]:
    """Leaves by path, so that the files do not depend on the classes of the tree."""
    leaves = jax.tree.leaves_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator='.'): leaf for path, leaf in leaves}


def _places(wanted: Iterable[str], saved: Iterable[str]) -> dict[str, str]:
    """The names that arrays have in a checkpoint: their own, or for all of the optimiser those at other places.

    `opt_state.1.mu` has a place in a chain. What stands before it and has no arrays, such as clipping, may be in one
    run and not in another that goes on from it; so parts of the chain are counted by those that have arrays.
    """
    wanted, saved = list(wanted), list(saved)
    if set(wanted) <= set(saved):
        return dict(zip(wanted, wanted, strict=True))
    there = dict(zip(_counted(saved), saved, strict=True))
    return {name: there.get(counted, name) for name, counted in zip(wanted, _counted(wanted), strict=True)}


def _counted(names: Iterable[str]) -> list[str]:
    """The names, parts of the optimiser's chain numbered from 0 among those that have arrays."""
    found = [(name, CHAINED.fullmatch(name)) for name in names]
    places = sorted({int(part[1]) for _, part in found if part})
    return [f'opt_state.{places.index(int(part[1]))}.{part[2]}' if part else name for name, part in found]


def _digests(folder: pathlib.Path, names: Iterable[str]) -> dict[str, str | None]:
    """The digest of each of the files; `None` for one that is not there."""
    names = list(names)
    with futures.ThreadPoolExecutor(2) as pool:
        return dict(zip(names, pool.map(_digest, [folder / name for name in names]), strict=True))


def _digest(path: pathlib.Path) -> str | None:
    try:
        # A device or a pipe, which a link or a list of sums that is not ours may name, is read without end.
        if not stat.S_ISREG(path.stat().st_mode):
            return None
        with path.open('rb') as file:
            return hashlib.file_digest(file, 'sha256').hexdigest()
    except (*ABSENT, ValueError):  # the latter for a name that no file can have
        return None


def _damage(folder: pathlib.Path) -> str | None:
    """The damage of a checkpoint in words, or `None`. Raises `UserError` for one that cannot be read."""
    try:
        recorded = _recorded(folder)
        for name in recorded:
            if not _inside(name):
                return f'{SUMS} names {name!r}, which is outside of it'
        found = _digests(folder, recorded)
    except ABSENT:
        return f'{SUMS} is missing'
    except UserError:
        return f'{SUMS} is no file'
    except ValueError:
        return f'{SUMS} is not a list of sums'
    except OSError as error:
        raise unreadable(folder, error) from error
    for name, digest in recorded.items():
        if found[name] is None:
            return f'{name} is missing'
        if found[name] != digest:
            return f'{name} has changed since it was written'
    if not recorded:
        return f'{SUMS} is empty'
    if (endless := _endless(folder)) is not None:
        return f'{endless} is neither a file nor a folder'
    unlisted = sorted(_written(folder) - {*recorded})
    return f'{SUMS} has no sum of {unlisted[0]}' if unlisted else None


def _recorded(folder: pathlib.Path) -> dict[str, str]:
    """The digests that a checkpoint lists, by name of the file."""
    lines = files.read_text(folder / SUMS).splitlines()
    return {name: digest for digest, name in (line.split('  ', 1) for line in lines)}


def copy(folder: pathlib.Path, place: pathlib.Path) -> None:
    """Copies a checkpoint that is whole: the files that it lists, and those written after the list, unless by a link.

    Whatever else lies in the folder, such as links to files of the user's, is left. Raises `OSError` and `UserError`
    for what cannot be read or written.
    """
    later = [name for name in LATER if (folder / name).exists() and not (folder / name).is_symlink()]
    for name in (*_recorded(folder), *later):
        target = place / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with files.reading(folder / name) as source, target.open('xb') as file:
            shutil.copyfileobj(source, file)


def _written(folder: pathlib.Path) -> set[str]:
    """The files of state and metadata, without those that a file system or a desktop adds, which begin with a dot."""
    paths = [path for part in ('state', 'metadata') for path in (folder / part).rglob('*')]
    return {str(path.relative_to(folder)) for path in paths if path.is_file() and not path.name.startswith('.')}


def _endless(folder: pathlib.Path) -> str | None:
    """What may have no end in a checkpoint, such as a pipe: Orbax would read some of the names, without a sum too."""
    paths = (path for path in sorted(folder.rglob('*')) if not path.name.startswith('.'))
    return next((str(path.relative_to(folder)) for path in paths if not path.is_file() and not path.is_dir()), None)


def _inside(name: str) -> bool:
    """Whether a relative name stays in the folder that it is relative to."""
    path = pathlib.PurePath(name)
    return not path.is_absolute() and '..' not in path.parts


def _reason(error: BaseException | None) -> str | None:
    """The system's message for a failed write, such as `No space left on device`; `None` for any other error."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return os.strerror(error.errno)
        if code := re.search(r"os_error_code='(\d+)'", str(error)):
            return os.strerror(int(code[1]))
        error = error.__cause__
    return None


def _not_from_orbax(record: logging.LogRecord) -> bool:
    """Filters Orbax's tracebacks of a failed write from the log: the error is raised, and reported in one line."""
    return 'orbax' not in record.pathname and 'orbax' not in record.getMessage()
