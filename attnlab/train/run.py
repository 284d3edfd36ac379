"""A run's work directory: the config it belongs to, its lock, and the record of its starts."""

import contextlib
import importlib.metadata
import pathlib
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from ml_collections import ConfigDict

from attnlab import config as configs
from attnlab.config import flatten
from attnlab.data.edition import content_of
from attnlab.errors import UserError
from attnlab.files import check_own, is_temporary, read_json, write_json
from attnlab.locks import Lock
from attnlab.train.saved import steps_in
from attnlab.trust import allowed

LOCK = 'lock'
FOLDERS = ('checkpoints', 'figures', 'figures/ema', 'evals', 'analysis', 'plugins', 'plugins/profile', 'wandb')
"""The folders of a work directory that are written to."""
PACKAGES = ('attnlab', 'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'grain', 'ml_collections', 'numpy')


CODE = ('--', ':/', ':(top,exclude)*.md')
"""All of a checkout but its Markdown pages, as arguments of git."""

LARGEST = 2**63
"""Counts of bytes and numbers are below it; the texts of longer ones could be of any length."""


def _counted(found: Any, least: int = 1) -> bool:
    return type(found) is int and least <= found < LARGEST


def _by_length(found: Any) -> bool:
    return isinstance(found, dict) and all(
        re.fullmatch('[0-9]{1,18}', length) and _counted(size, 0) for length, size in found.items()
    )


FACTS: dict[str, Callable[[Any], bool]] = {
    'data': lambda found: isinstance(found, dict),
    'implementations': lambda found: isinstance(found, list),
    'parameters': _counted,
    'flops_per_token': lambda found: type(found) in (int, float) and 0 <= found <= sys.float_info.max,
    'state_bytes_per_sequence': _by_length,
}
"""Keys that every start records besides its environment, and what their values are."""

DEVICES: dict[str, Callable[[Any], bool]] = {
    'device_kind': lambda found: isinstance(found, str),
    'device_count': _counted,
}
"""Those of its environment that runs are compared by."""

LATER: dict[str, Callable[[Any], bool]] = {'weight_bytes': _counted}
"""Those that only some starts record."""

MADE = ('edited', 'merged', 'quantized')
"""Keys of a start whose run was made from other runs; a start has one of them, or none."""


def saved_config(workdir: pathlib.Path) -> ConfigDict:
    """The config of the run in a directory. Raises `UserError` where there is none, or it is damaged."""
    path = workdir / 'config.json'
    if not path.exists():
        study = '; it is a study, whose runs are in its folder trials' if (workdir / 'sweep.json').exists() else ''
        lacks = 'it is a file; give the work directory' if workdir.is_file() else f'it holds no config.json{study}'
        raise UserError(f'{workdir} is not a run: {lacks}')
    config = configs.load(path)
    lacking = sorted(name for name in ('batch_size', 'length', 'model', 'steps', 'task') if name not in config)
    if lacking:
        raise UserError(f'{path} is damaged: it lacks {", ".join(lacking)}; put back a copy of it')
    return config


QUANTIZATION = 'quantization'
"""The key of what changes the model of a run that `attnlab quantize` made."""

KINDS: dict[str, type] = {'data': dict, 'from': dict, 'start': dict, 'made_before': list}
"""What the record of a start holds under some names, where it has them."""


def starts(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """The record of each start of a run, oldest first; empty where it was never started.

    Raises `UserError` where the record is damaged.
    """
    path = workdir / 'run.json'
    if not path.exists():
        return []
    remedy = 'put back a copy of it, or move it away, and train: the next start writes another'
    found = read_json(path, remedy)
    records = found.get('starts') if isinstance(found, dict) else None
    if not isinstance(records, list) or not records or not all(isinstance(item, dict) for item in records):
        raise UserError(f'{path} is damaged: it has no list of starts; {remedy}')
    for name, kind in KINDS.items():
        if wrong := [record[name] for record in records if not isinstance(record.get(name, kind()), kind)]:
            raise UserError(f'{path} is damaged: {name} of a start is {wrong[0]!r:.40}; {remedy}')
    begun = [record[name] for record in records for name in ('from', 'start') if name in record]
    if any(type(one.get('step')) is not int for one in begun):
        raise UserError(f'{path} is damaged: the step that a start is from is no whole number; {remedy}')
    asked = FACTS | DEVICES
    if lacking := sorted(asked.keys() - records[-1].keys()):
        raise UserError(f'{path} is damaged: its last start lacks {", ".join(lacking)}; {remedy}')
    for name, right in (asked | LATER).items():
        if name in records[-1] and not right(records[-1][name]):
            raise UserError(f'{path} is damaged: {name} of its last start is {records[-1][name]!r:.40}; {remedy}')
    return records


def forked_at(workdir: pathlib.Path) -> int:
    """The step at which a run went on from another, whose metrics it has up to there; 0 of one that did not."""
    return next(iter(starts(workdir)), {}).get('from', {}).get('step', 0)


def other_parts(workdir: pathlib.Path, parts: int) -> str | None:
    """Where starts of a run took steps in other numbers of parts than `parts`, which numbers; `None` where none did.

    Starts that recorded none, which a later attnlab would, are not known to have.
    """
    before = {start['parts'] for start in starts(workdir) if type(start.get('parts')) is int}
    if before <= {parts}:
        return None
    return f'parts of a step: {", ".join(map(str, sorted(before)))} before, {parts} now'


def makings(start: Mapping[str, Any]) -> list[list[Any]]:
    """How the run of a start was made from others: names of `MADE` with their records, newest last; empty if trained.

    `made_before` has those of the run that it was made of.
    """
    before = start.get('made_before', [])
    return [*before, *([name, start[name]] for name in MADE if name in start)]


def claim(workdir: pathlib.Path, config: ConfigDict) -> None:
    """Claims the work directory for this config, or checks that it is already claimed for it.

    Raises `UserError` when it belongs to another config, naming the keys that differ, cannot be written, or has a link
    where it is written to.
    """
    check_claim(workdir, config)
    path = workdir / 'config.json'
    if jax.process_index() == 0 and not path.exists():
        configs.save(config, path)


def check_claim(workdir: pathlib.Path, config: ConfigDict) -> None:
    """Writes nothing; raises `UserError` where `claim` would not succeed: the folder holds something else."""
    check_own(workdir, FOLDERS)
    path = workdir / 'config.json'
    if path.exists():
        differing = differences(configs.load(path), config)
        if differing:
            steps_alone = len(differing) == 1 and differing[0].startswith('steps: ')
            longer = f'; to train it for longer: --from={workdir}' if steps_alone else ''
            raise UserError(
                f'{workdir} holds a run with another config ({listed(differing)}): choose another --workdir{longer}'
            )
        return
    # Another process of this run may be writing it at this moment, or may have died while writing.
    if workdir.exists() and any(
        child.name not in (path.name, LOCK) and not is_temporary(child) for child in workdir.iterdir()
    ):
        raise UserError(
            f'{workdir} is not empty and holds no config.json, so it is not a run: choose another --workdir'
        )


@contextlib.contextmanager
def held(workdir: pathlib.Path) -> Iterator[None]:
    """Holds the lock of the work directory, which keeps other runs out; of several processes the first one holds it.

    Raises `UserError`, naming the process, where another holds it.
    """
    lock = Lock(workdir / LOCK)
    if jax.process_index() == 0 and not lock.acquire(wait=False):
        raise UserError(f'{workdir} is being trained in by {lock.holder()}; wait for it, or choose another --workdir')
    try:
        yield
    finally:
        lock.release()


def newest_checkpoint(workdir: pathlib.Path) -> int:
    """The step of the newest checkpoint; 0 where there is none."""
    return max(steps_in(workdir / 'checkpoints'), default=0)


def has_begun(workdir: pathlib.Path) -> bool:
    """Whether the run has a checkpoint of its own, so that what it began with is not read again."""
    return newest_checkpoint(workdir) > 0 and bool(starts(workdir))


def check_data(workdir: pathlib.Path, data: dict[str, Any], *, other: bool = False) -> None:
    """Checks by their recorded hashes that a run's data are unchanged; `other` allows any.

    Of a run that recorded none, which a later attnlab would, what stood for them is compared. Raises `UserError` naming
    what differs, and how.
    """
    recorded = starts(workdir)
    if other or not recorded:
        return
    known, hashed = data_hashes(recorded[-1]['data']), data_hashes(data)
    before, now = flatten(recorded[-1]['data']) | known, flatten(data)
    names = hashed.keys() & known.keys()
    if hashed and not names:
        names = {name for name in before.keys() & now.keys() if name.partition('.')[0] in BEFORE_HASHES}
    for name in sorted(names):
        if before[name] != now[name]:
            raise UserError(
                f'the data of {workdir} have changed since it was trained: {name} was {before[name]} and is '
                f'{now[name]}; put back what was there, or go on with --other_data, which is recorded'
            )


BEFORE_HASHES = ('of', 'python', 'counts')
"""What runs recorded of drawn examples, passages of Python and folders of images before these had hashes."""

NAMED_ALONE = (('problem', 'problem'), ('data', 'data'), ('table', 'table'), ('of', 'rows'), ('of', 'sources'))
"""Where problems, prototypes, tables, series and mixtures were recorded by name before they had hashes of the edition:
the key of the name, and a key by which such a record is known."""


def data_hashes(data: Mapping[str, Any]) -> dict[str, str]:
    """The content hashes in a description of data, by dotted path; of an older record by the names in it."""
    leaves = flatten(data)
    found = {name: str(value) for name, value in leaves.items() if any(word in name for word in ('hash', 'content'))}
    if found:
        return found
    name = next((data[key] for key, mark in NAMED_ALONE if {key, mark} <= data.keys()), None)
    content = content_of(name) if isinstance(name, str) else None
    return {} if content is None else {'content': content}


def differences(old: ConfigDict, new: ConfigDict) -> list[str]:
    """Each key that differs, as `steps: 100 there, 200 here`."""
    before, after = (flatten(configs.from_plain(configs.plain(c))) for c in (old, new))
    absent = object()
    return [
        f'{key}: {before.get(key, "absent")} there, {after.get(key, "absent")} here'
        for key in sorted(before.keys() | after.keys())
        if before.get(key, absent) != after.get(key, absent)
    ]


def listed(differing: list[str]) -> str:
    """The first eight of what differs, for a message."""
    return '; '.join(differing[:8]) + ('; ...' if len(differing) > 8 else '')


def record(workdir: pathlib.Path, facts: dict[str, Any]) -> None:
    """Adds this start to run.json: command, versions, devices, allowed code, `facts`; earlier starts stay."""
    made = environment() | {'allowed': allowed()} | facts
    write_json(workdir / 'run.json', {'starts': [*starts(workdir), made]})


def environment() -> dict[str, Any]:
    """The command, git state, versions and devices of this process."""
    devices = jax.devices()
    return {
        'command': [pathlib.Path(sys.argv[0]).name, *sys.argv[1:]],
        'git': git_state(),
        'python': platform.python_version(),
        'packages': {name: _version(name) for name in PACKAGES},
        'device_kind': devices[0].device_kind,
        'device_count': len(devices),
        'process_count': jax.process_count(),
    }


def git_state() -> dict[str, Any]:
    """The commit of the running code, and whether the checkout is modified; `None` outside a checkout or if unknown.

    Pages do not count, which experiments write results into while others run.
    """
    here = pathlib.Path(__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ['git', '-C', here, *arguments], capture_output=True, text=True, check=False, timeout=10
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git('rev-parse', 'HEAD')
    changes = None if commit is None else git('status', '--porcelain', '--untracked-files=no', *CODE)
    return {'commit': commit, 'changed': None if changes is None else bool(changes)}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
