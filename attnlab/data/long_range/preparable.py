"""The data sets that `attnlab data prepare` makes, by name."""

import dataclasses
from collections.abc import Mapping

from attnlab.data.long_range.dataset import Kind
from attnlab.data.long_range.images import CIFAR10
from attnlab.data.long_range.listops import ListOps
from attnlab.data.long_range.pathfinder import PATH_X, Pathfinder
from attnlab.data.long_range.retrieval import AAN
from attnlab.data.long_range.speech import SPEECH_COMMANDS
from attnlab.data.long_range.text import IMDB
from attnlab.data.vision.archives import CIFAR10_COLOURS, CIFAR100, FASHION_MNIST, IMAGENETTE, MNIST
from attnlab.errors import UserError, nearest


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


def preparable(name: str) -> Preparable:
    """The data set of that name. Raises `UserError` naming the nearest."""
    if name not in DATASETS:
        raise UserError(f'there is no data set {name!r}{nearest(name, DATASETS)}')
    return DATASETS[name]
