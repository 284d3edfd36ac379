"""Data sets that are prepared once, by `attnlab data prepare`, then read by index."""

import dataclasses
import json
import pathlib
import shlex
from collections.abc import Mapping
from typing import Any

import numpy as np

from attnlab.data.long_range.dataset import Dataset, Example, Kind, known_split
from attnlab.data.long_range.images import CIFAR10
from attnlab.data.long_range.listops import ListOps
from attnlab.data.long_range.pathfinder import PATH_X, Pathfinder
from attnlab.data.long_range.retrieval import AAN
from attnlab.data.long_range.speech import SPEECH_COMMANDS
from attnlab.data.long_range.text import IMDB
from attnlab.data.vision.archives import CIFAR10_COLOURS, CIFAR100, FASHION_MNIST, IMAGENETTE, MNIST
from attnlab.errors import UserError, nearest

FOLDER = '~/tensorflow_datasets'
"""The default folder of data sets."""


@dataclasses.dataclass(frozen=True)
class Preparable:
    """The description of a data set that can be prepared.

    Attributes:
      builder: its class in `attnlab.data.long_range.builders`.
      kind: the properties of its examples.
      splits: the name of every split here, and its name on disk.
      substitute: an alternative that needs neither a network nor files.
    """

    builder: str
    kind: Kind
    splits: Mapping[str, str]
    substitute: str | None = None


_STANDARD = {'train': 'train', 'valid': 'validation', 'test': 'test'}
_PIXELS = 'digits needs no download: pixels as well (extra `offline`)'
_BYTES = 'authorship needs no download: bytes as well'

DATASETS = {
    'listops': Preparable('ListOpsBuilder', ListOps().kind, _STANDARD),
    'pathfinder': Preparable('PathfinderBuilder', Pathfinder().kind, _STANDARD),
    'pathfinder128': Preparable('Pathfinder128Builder', PATH_X.kind, _STANDARD),
    # The published figures are those of validating on the test split.
    'imdb': Preparable('ImdbBuilder', IMDB, {'train': 'train', 'valid': 'test', 'test': 'test'}, _BYTES),
    'cifar10': Preparable('Cifar10Builder', CIFAR10, _STANDARD, _PIXELS),
    'aan': Preparable('AanBuilder', AAN, _STANDARD, _BYTES),
    'speech_commands': Preparable('SpeechCommandsBuilder', SPEECH_COMMANDS, _STANDARD, _PIXELS),
    'mnist': Preparable('MnistBuilder', MNIST, _STANDARD, _PIXELS),
    'fashion_mnist': Preparable('FashionMnistBuilder', FASHION_MNIST, _STANDARD, _PIXELS),
    'cifar10_colours': Preparable('Cifar10ColoursBuilder', CIFAR10_COLOURS, _STANDARD, _PIXELS),
    'cifar100': Preparable('Cifar100Builder', CIFAR100, _STANDARD, _PIXELS),
    'imagenette': Preparable('ImagenetteBuilder', IMAGENETTE, _STANDARD, _PIXELS),
}
"""The data sets by name."""


@dataclasses.dataclass(frozen=True)
class Prepared(Dataset):
    """A data set that `attnlab data prepare` stored on disk. Needs the extra `tfds`.

    Attributes:
      name: one of `DATASETS`.
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
        return library().builder_from_directory(folder / self.name / version(self.name))


@dataclasses.dataclass(frozen=True)
class Records:
    """The examples of one split on disk."""

    records: Any

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Example:
        return {name: np.asarray(value) for name, value in self.records[index].items()}


def preparable(name: str) -> Preparable:
    """The data set of that name. Raises `UserError` naming the nearest."""
    if name not in DATASETS:
        raise UserError(f'there is no data set {name!r}{nearest(name, DATASETS)}')
    return DATASETS[name]


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
    return json.loads((pathlib.Path(builder.data_dir) / 'metadata.json').read_text())['content']


def library() -> Any:
    """The module `tensorflow_datasets`. Raises `UserError` where it is missing."""
    try:
        import tensorflow_datasets
    except ImportError as error:
        raise UserError("prepared data sets need tensorflow_datasets: pip install 'attnlab[tfds]'") from error
    return tensorflow_datasets
