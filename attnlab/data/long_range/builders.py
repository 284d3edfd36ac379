"""TensorFlow Datasets builders of the Long Range Arena and of Speech Commands, without TensorFlow.

ListOps and Pathfinder are drawn; the others are converted from their official archives, which are downloaded and
checked, or put in place by hand. Importing this module needs the extra `tfds`.
"""

import abc
import hashlib
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import tensorflow_datasets as tfds

from attnlab.data.archives import readable
from attnlab.data.download import fetch
from attnlab.data.long_range import images, retrieval, speech, text
from attnlab.data.long_range.blocks import Blocks, Progress, draw_all
from attnlab.data.long_range.dataset import Example
from attnlab.data.long_range.drawn import Distribution
from attnlab.data.long_range.listops import ListOps
from attnlab.data.long_range.pathfinder import PATH_X, Pathfinder
from attnlab.data.long_range.prepared import DATASETS
from attnlab.data.text.builders import STORAGE, Bucket, Examples, OrderedBuilder, Splits
from attnlab.errors import UserError


def sequence(dtype: Any) -> tfds.features.Tensor:
    """A feature that is a sequence of numbers of any length."""
    return tfds.features.Tensor(shape=(None,), dtype=dtype, encoding=tfds.features.Encoding.BYTES)


def silent(stage: str, done: int, total: int) -> None:
    """Ignores the progress."""


class Builder(OrderedBuilder, skip_registration=True):  # type: ignore[call-arg]
    """A builder that records digests of the examples it wrote, to verify those read.

    Attributes:
      workers: processes that draw examples.
      progress: called with the progress.
    """

    VERSION = tfds.core.Version('1.0.0')
    workers: int = 1
    progress: Progress = staticmethod(silent)

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=type(self).__doc__,
            features=tfds.features.FeaturesDict(self.features),
            homepage=self.homepage,
            disable_shuffling=True,
            metadata=tfds.core.MetadataDict({'content': {}}),
        )

    def _generate_examples(self, split: str, examples: Iterator[Example], total: int | None = None) -> Examples:
        digest = hashlib.sha256()
        for index, example in enumerate(examples):
            digest.update(digest_of(example))
            if index % 256 == 0:
                self.progress(f'writing {split}', index, total or 0)
            yield str(index), example
        self.info.metadata['content'][split] = digest.hexdigest()


def digest_of(example: Mapping[str, Any]) -> bytes:
    """SHA-256 over names, types and contents of an example, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(example):
        value = np.asarray(example[name])
        digest.update(f'{name}\0{value.dtype.newbyteorder("<")}\0'.encode())
        digest.update(value.astype(value.dtype.newbyteorder('<'), copy=False).tobytes())
    return digest.digest()


class DrawnBuilder(Builder, skip_registration=True):  # type: ignore[call-arg]
    """A builder of examples that are drawn.

    Attributes:
      of: the distribution they are drawn from.
      seed: of the examples.
      counts: number of examples of each split.
    """

    of: ClassVar[Distribution]
    seed: ClassVar[int] = 0
    counts: ClassVar[Mapping[str, int]]

    def blocks(self, folder: pathlib.Path) -> dict[str, Blocks]:
        """The splits by their names on disk, drawn or yet to be drawn in `folder`."""
        names = {there: here for here, there in DATASETS[self.name].splits.items()}
        return {split: Blocks(self.of, self.seed, names[split], count, folder) for split, count in self.counts.items()}

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> Splits:
        blocks = self.blocks(self._folder(dl_manager))
        draw_all(list(blocks.values()), self.workers, self.progress)
        return {split: self._generate_examples(split, part.read(), part.count) for split, part in blocks.items()}


class ListOpsBuilder(DrawnBuilder, skip_registration=True):  # type: ignore[call-arg]
    """Nested list operations of 501 to 1,999 tokens (Nangia and Bowman 2018; Tay et al. 2021), drawn from seed 0."""

    name = 'listops'
    of = ListOps()
    counts: ClassVar = {'train': 96_000, 'validation': 2_000, 'test': 2_000}
    features: ClassVar = {'x': sequence(np.uint8), 'label': np.int32, 'depth': np.int32}
    homepage = 'https://github.com/google-research/long-range-arena'


class PathfinderBuilder(DrawnBuilder, skip_registration=True):  # type: ignore[call-arg]
    """Paths of 14 dashes on 32 x 32 pixels (Linsley et al. 2018; Tay et al. 2021), drawn from seed 0."""

    VERSION = tfds.core.Version('2.0.0')
    name = 'pathfinder'
    of = Pathfinder()
    counts: ClassVar = {'train': 160_000, 'validation': 20_000, 'test': 20_000}
    features: ClassVar = {'x': sequence(np.uint8), 'label': np.int32}
    homepage = 'https://github.com/drewlinsley/pathfinder'


class Pathfinder128Builder(DrawnBuilder, skip_registration=True):  # type: ignore[call-arg]
    """Path-X: paths of 14 dashes on 128 x 128 pixels (Linsley et al. 2018; Tay et al. 2021), drawn from seed 0."""

    VERSION = tfds.core.Version('2.0.0')
    name = 'pathfinder128'
    of = PATH_X
    counts: ClassVar = {'train': 160_000, 'validation': 20_000, 'test': 20_000}
    features: ClassVar = {'x': sequence(np.uint8), 'label': np.int32}
    homepage = 'https://github.com/drewlinsley/pathfinder'


class ArchiveBuilder(Builder, skip_registration=True):  # type: ignore[call-arg]
    """A builder that converts an official archive.

    Attributes:
      url: of the archive.
      size: its size in bytes.
      sha256: its digest.
    """

    url: ClassVar[str]
    size: ClassVar[int]
    sha256: ClassVar[str]

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> Splits:
        self.progress('downloading', 0, 0)
        try:
            archive = self._archive(self._folder(dl_manager))
        except UserError as error:
            raise UserError(f'{error}; {DATASETS[self.name].substitute}') from error
        splits = dict.fromkeys(DATASETS[self.name].splits.values())
        return {
            split: self._generate_examples(split, readable(archive, self._converted(archive, split)))
            for split in splits
        }

    @abc.abstractmethod
    def _converted(self, archive: pathlib.Path, split: str) -> Iterator[Example]:
        """The examples of a split."""

    def _archive(self, folder: pathlib.Path) -> pathlib.Path:
        return fetch(self.url, folder / self.url.rpartition('/')[-1], size=self.size, digest=self.sha256)


class ImdbBuilder(ArchiveBuilder, skip_registration=True):  # type: ignore[call-arg]
    """50,000 film reviews as bytes (Maas et al. 2011), half of them to train on."""

    name = 'imdb'
    features: ClassVar = {'x': sequence(np.uint8), 'label': np.int32}
    homepage = 'http://ai.stanford.edu/~amaas/data/sentiment/'
    url = 'http://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz'
    size = 84125825
    sha256 = 'c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe'

    def _converted(self, archive: pathlib.Path, split: str) -> Iterator[Example]:
        return text.imdb(archive, split)


class Cifar10Builder(ArchiveBuilder, skip_registration=True):  # type: ignore[call-arg]
    """60,000 images of ten classes as 1,024 grey pixels (Krizhevsky 2009)."""

    name = 'cifar10'
    features: ClassVar = {'x': sequence(np.uint8), 'label': np.int32}
    homepage = 'https://www.cs.toronto.edu/~kriz/cifar.html'
    url = 'https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz'
    size = 170052171
    sha256 = 'c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd'

    def _converted(self, archive: pathlib.Path, split: str) -> Iterator[Example]:
        return images.cifar10(archive, split)


class SpeechCommandsBuilder(ArchiveBuilder, skip_registration=True):  # type: ignore[call-arg]
    """One-second recordings of 35 words at 16 kHz, version 0.02 (Warden 2018)."""

    name = 'speech_commands'
    features: ClassVar = {'x': sequence(np.int16), 'label': np.int32}
    homepage = 'https://arxiv.org/abs/1804.03209'
    url = 'http://download.tensorflow.org/data/speech_commands_v0.02.tar.gz'
    size = 2428923189
    sha256 = 'af14739ee7dc311471de98f5f9d2c9191b18aedfe957f4a6ff791c709868ff58'

    def _converted(self, archive: pathlib.Path, split: str) -> Iterator[Example]:
        return speech.speech_commands(archive, split)


class AanBuilder(ArchiveBuilder, skip_registration=True):  # type: ignore[call-arg]
    """Pairs of papers of the ACL Anthology Network as bytes (Radev et al. 2013; Tay et al. 2021).

    The archive, 7.7 GB, is that of the Long Range Arena, of which no digest was published: a download is checked
    against the size and MD5 in the listing of its bucket; put in place by hand, it is not checked.
    """

    name = 'aan'
    features: ClassVar = {'x': sequence(np.uint8), 'second': sequence(np.uint8), 'label': np.int32}
    homepage = 'https://github.com/google-research/long-range-arena'
    storage = STORAGE

    def _converted(self, archive: pathlib.Path, split: str) -> Iterator[Example]:
        return retrieval.aan(archive, split)

    def _archive(self, folder: pathlib.Path) -> pathlib.Path:
        name = 'lra_release.gz'
        try:
            (archive,) = Bucket('long-range-arena', self.storage).fetch(name, folder)
        except UserError as error:
            raise UserError(f'{error}; without a network, put a copy of {name} at {folder / name}') from error
        return archive


BUILDERS: Mapping[str, type[Builder]] = {
    builder.name: builder
    for builder in (
        ListOpsBuilder,
        PathfinderBuilder,
        Pathfinder128Builder,
        ImdbBuilder,
        Cifar10Builder,
        AanBuilder,
        SpeechCommandsBuilder,
    )
}
