"""TensorFlow Datasets builders of the Long Range Arena, of Speech Commands and of images, without TensorFlow.

ListOps and Pathfinder are drawn; the others are converted from their official archives, which are downloaded and
checked, or put in place by hand. Importing this module needs the extra `tfds`.
"""

import abc
import hashlib
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import tensorflow_datasets as tfds

from attnlab.data.archives import readable
from attnlab.data.download import fetch
from attnlab.data.long_range import images, retrieval, speech, text
from attnlab.data.long_range.blocks import Blocks, Progress, draw_all
from attnlab.data.long_range.dataset import Example, Kind, digest_of
from attnlab.data.long_range.drawn import Distribution
from attnlab.data.long_range.listops import ListOps
from attnlab.data.long_range.pathfinder import PATH_X, Pathfinder
from attnlab.data.long_range.preparable import DATASETS
from attnlab.data.text.builders import STORAGE, Bucket, Examples, OrderedBuilder, Splits
from attnlab.data.vision import archives
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

    VERSION = tfds.core.Version('3.0.0')
    name = 'pathfinder'
    of = Pathfinder()
    counts: ClassVar = {'train': 160_000, 'validation': 20_000, 'test': 20_000}
    features: ClassVar = {'x': sequence(np.uint8), 'label': np.int32}
    homepage = 'https://github.com/drewlinsley/pathfinder'


class Pathfinder128Builder(DrawnBuilder, skip_registration=True):  # type: ignore[call-arg]
    """Path-X: paths of 14 dashes on 128 x 128 pixels (Linsley et al. 2018; Tay et al. 2021), drawn from seed 0."""

    VERSION = tfds.core.Version('3.0.0')
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


def colours(kind: Kind) -> dict[str, Any]:
    """Features of images of three colours."""
    shape, encoding = (kind.length, kind.channels), tfds.features.Encoding.BYTES
    return {'x': tfds.features.Tensor(shape=shape, dtype=np.uint8, encoding=encoding), 'label': np.int32}


class Cifar10ColoursBuilder(Cifar10Builder, skip_registration=True):  # type: ignore[call-arg]
    """60,000 images of ten classes as 32 x 32 pixels of three colours (Krizhevsky 2009)."""

    name = 'cifar10_colours'
    features: ClassVar = colours(archives.CIFAR10_COLOURS)

    def _converted(self, archive: pathlib.Path, split: str) -> Iterator[Example]:
        return archives.cifar(archive, split, members=images.MEMBERS, labels=1)


class Cifar100Builder(ArchiveBuilder, skip_registration=True):  # type: ignore[call-arg]
    """60,000 images of a hundred classes as 32 x 32 pixels of three colours (Krizhevsky 2009)."""

    name = 'cifar100'
    features: ClassVar = colours(archives.CIFAR100)
    homepage = 'https://www.cs.toronto.edu/~kriz/cifar.html'
    url = 'https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz'
    size = 168513733
    sha256 = '58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec'

    def _converted(self, archive: pathlib.Path, split: str) -> Iterator[Example]:
        return archives.cifar(archive, split, members=re.compile(r'[^/]*/(train|test)\.bin'), labels=2)


class ImagenetteBuilder(ArchiveBuilder, skip_registration=True):  # type: ignore[call-arg]
    """13,394 photographs of ten classes as squares of 64 x 64 pixels of three colours (Howard 2019)."""

    name = 'imagenette'
    features: ClassVar = colours(archives.IMAGENETTE)
    homepage = 'https://github.com/fastai/imagenette'
    url = 'https://s3.amazonaws.com/fast-ai-imageclas/imagenette2-160.tgz'
    size = 99003388
    sha256 = '64d0c4859f35a461889e0147755a999a48b49bf38a7e0f9bd27003f10db02fe5'

    def _converted(self, archive: pathlib.Path, split: str) -> Iterator[Example]:
        return archives.imagenette(archive, split)


class IdxBuilder(Builder, skip_registration=True):  # type: ignore[call-arg]
    """A builder that converts the four files of MNIST, or of a set in their format.

    Attributes:
      folder: the address that they lie under.
      parts: size in bytes and SHA-256 of each.
    """

    folder: ClassVar[str]
    parts: ClassVar[Mapping[str, tuple[int, str]]]
    features: ClassVar = {'x': sequence(np.uint8), 'label': np.int32}

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> Splits:
        self.progress('downloading', 0, 0)
        here = self._folder(dl_manager)
        try:
            for name, (size, digest) in self.parts.items():
                fetch(f'{self.folder}/{name}', here / name, size=size, digest=digest)
        except UserError as error:
            raise UserError(f'{error}; {DATASETS[self.name].substitute}') from error
        splits = dict.fromkeys(DATASETS[self.name].splits.values())
        return {split: self._generate_examples(split, archives.idx(here, split)) for split in splits}


class MnistBuilder(IdxBuilder, skip_registration=True):  # type: ignore[call-arg]
    """70,000 handwritten digits as 28 x 28 grey pixels (LeCun et al. 1998)."""

    name = 'mnist'
    homepage = 'http://yann.lecun.com/exdb/mnist/'
    folder = 'https://storage.googleapis.com/cvdf-datasets/mnist'
    parts: ClassVar = {
        'train-images-idx3-ubyte.gz': (9912422, '440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609'),
        'train-labels-idx1-ubyte.gz': (28881, '3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c'),
        't10k-images-idx3-ubyte.gz': (1648877, '8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6'),
        't10k-labels-idx1-ubyte.gz': (4542, 'f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6'),
    }


class FashionMnistBuilder(IdxBuilder, skip_registration=True):  # type: ignore[call-arg]
    """70,000 pieces of clothing as 28 x 28 grey pixels (Xiao et al. 2017)."""

    name = 'fashion_mnist'
    homepage = 'https://github.com/zalandoresearch/fashion-mnist'
    folder = 'http://fashion-mnist.s3-website.eu-central-1.amazonaws.com'
    parts: ClassVar = {
        'train-images-idx3-ubyte.gz': (26421880, '3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84'),
        'train-labels-idx1-ubyte.gz': (29515, 'a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845'),
        't10k-images-idx3-ubyte.gz': (4422102, '346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073'),
        't10k-labels-idx1-ubyte.gz': (5148, '67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5'),
    }


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
        MnistBuilder,
        FashionMnistBuilder,
        Cifar10ColoursBuilder,
        Cifar100Builder,
        ImagenetteBuilder,
    )
}
