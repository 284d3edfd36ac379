"""Data sets that are prepared once, by `attnlab data prepare`, then read by index."""

import contextlib
import dataclasses
import json
import pathlib
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from attnlab.data.long_range.dataset import Dataset, Example, Kind, known_split
from attnlab.data.long_range.preparable import preparable
from attnlab.errors import UserError, optional
from attnlab.files import read_json

FOLDER = '~/tensorflow_datasets'
"""The default folder of data sets."""

FEATURES = 'tensorflow_datasets.core.features.'
"""The package of the classes that a prepared folder may name, which the library imports by their names."""

CLASS_KEYS = ('pythonClassName', 'python_class_name', 'type')
"""The keys of a description of features that name a class; the last was that of older versions."""


@dataclasses.dataclass(frozen=True)
class Prepared(Dataset):
    """A data set that `attnlab data prepare` stored on disk. Needs the extra `tfds`.

    Attributes:
      name: one of `preparable.DATASETS`.
      data_dir: folder of downloads and prepared data sets.
    """

    name: str
    data_dir: str = FOLDER

    def __post_init__(self) -> None:
        preparable(self.name)

    @property
    def kind(self) -> Kind:
        return preparable(self.name).kind

    @property
    def splits(self) -> Mapping[str, int | None]:
        return dict.fromkeys(preparable(self.name).splits)

    def rows(self, split: str) -> 'Records':
        known_split(self, split)
        return Records(self._builder().as_data_source(preparable(self.name).splits[split]))

    def describe(self) -> dict[str, Any]:
        builder = self._builder()
        return {'source': 'prepared', 'name': builder.info.full_name, 'content': hashes(builder)}

    def same_rows(self, split: str, other: str) -> bool:
        known_split(self, split, other)
        on_disk = preparable(self.name).splits
        return on_disk[split] == on_disk[other]

    def _builder(self) -> Any:
        folder = pathlib.Path(self.data_dir).expanduser()
        elsewhere = '' if self.data_dir == FOLDER else f' --data_dir={shlex.quote(self.data_dir)}'
        remedy = f'run: attnlab data prepare {self.name}{elsewhere}'
        if not versions(self.name, folder):
            substitute = preparable(self.name).substitute
            raise UserError(
                f'{self.name} is not prepared in {folder / self.name}; {remedy}'
                + ('' if substitute is None else f'; {substitute}')
            )
        other = of_another(self.name, folder)
        if other is not None:
            raise UserError(f'{folder / self.name} was {other}; {remedy}')
        ready = folder / self.name / version(self.name)
        _check_features(ready)
        with opening(ready):
            return library().builder_from_directory(ready)


@dataclasses.dataclass(frozen=True)
class Records:
    """The examples of one split on disk."""

    records: Any

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Example:
        return {name: np.asarray(value) for name, value in self.records[index].items()}


def _check_features(folder: pathlib.Path) -> None:
    """Raises `UserError` where opening a folder would import other classes than those of the library's features."""
    path = folder / 'features.json'
    try:
        named = _named_classes(json.loads(path.read_text()))
        foreign = next((name for name in named if not name.startswith(FEATURES)), None)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f'{path} cannot be read: {error}') from error
    if foreign is not None:
        raise UserError(f'{path} names the class {foreign}, which would be imported; it must be one of {FEATURES}*')


def _named_classes(value: Any, key: str = '') -> Iterator[str]:
    """The classes that a description of features names, also where JSON stands in a text of it."""
    if isinstance(value, dict):
        for name, held in value.items():
            yield from _named_classes(held, name)
    elif isinstance(value, list):
        for held in value:
            yield from _named_classes(held, key)
    elif isinstance(value, str):
        if key in CLASS_KEYS and '.' in value:
            yield value
        elif value.lstrip().startswith(('{', '[')):
            yield from _named_classes(json.loads(value))


def versions(name: str, data_dir: pathlib.Path) -> list[str]:
    """The versions of a data set that are prepared in a folder."""
    return sorted(path.parent.name for path in (data_dir / name).glob('*/dataset_info.json'))


def version(name: str) -> str:
    """The version of a data set that this attnlab prepares, the only one it reads."""
    library()
    from attnlab.data.long_range.builders import BUILDERS

    return str(BUILDERS[name].VERSION)


def of_another(name: str, data_dir: pathlib.Path) -> str | None:
    """Who prepared a data set of which other versions alone are in the folder; `None` where the right one is."""
    found, right = versions(name, data_dir), version(name)
    if right in found:
        return None
    return f'prepared by another attnlab ({", ".join(found)}; this one has {right})'


def hashes(builder: Any) -> dict[str, str]:
    """The SHA-256 of each split's content, recorded at preparation, by the split's name on disk."""
    path = pathlib.Path(builder.data_dir) / 'metadata.json'
    remedy = 'delete its folder and prepare it again'
    try:
        found = read_json(path, remedy)
    except OSError as error:
        raise UserError(f'{path} cannot be read: {error.strerror}; {remedy}') from error
    content = found.get('content') if isinstance(found, dict) else None
    if not isinstance(content, dict):
        raise UserError(f'{path} does not say what was written; {remedy}')
    return content


@contextlib.contextmanager
def opening(folder: pathlib.Path) -> Iterator[None]:
    """Turns whatever the library raises for a damaged data set into a `UserError`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = ' '.join(str(error).split())
        raise UserError(f'{folder} is damaged ({reason}); delete it and prepare it again') from error


def library() -> Any:
    """The module `tensorflow_datasets`. Raises `UserError` where it is missing."""
    return optional('tensorflow_datasets', 'a prepared data set')
