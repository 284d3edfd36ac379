"""Text corpora of the TensorFlow Datasets catalogue, without TensorFlow."""

import dataclasses
import hashlib
import pathlib
from collections.abc import Iterator
from typing import Any

from attnlab.data import cache
from attnlab.data.text.corpus import Corpus, Document
from attnlab.errors import UserError, nearest, optional

TOGETHER = 256
"""Examples read at a time, ten times faster than reading them one by one."""


@dataclasses.dataclass(frozen=True)
class Listed:
    """How a corpus of the catalogue is read.

    Attributes:
      builder: the class in `attnlab.data.text.builders`.
      feature: which feature of an example is the text of a document.
      splits: the name of every split here, and its name in the catalogue.
    """

    builder: str
    feature: str
    splits: dict[str, str]


_STANDARD = {'train': 'train', 'valid': 'validation', 'test': 'test'}

DATASETS = {
    'tiny_shakespeare': Listed('TinyShakespeare', 'text', _STANDARD),
    'lm1b': Listed('Lm1b', 'text', {'train': 'train', 'valid': 'test[:50%]', 'test': 'test[50%:]'}),
    'pg19': Listed('Pg19', 'book_text', _STANDARD),
    'wiki40b': Listed('Wiki40b', 'text', _STANDARD),
}


@dataclasses.dataclass(frozen=True)
class TfdsText(Corpus):
    """A text corpus of the TensorFlow Datasets catalogue, downloaded and prepared at its first use without TensorFlow.

    `tiny_shakespeare` (Karpathy 2015; 1 MB), `lm1b` (Chelba et al. 2013; 1.8 GB to download), `pg19` (Rae et al. 2020;
    11 GB) and `wiki40b/<language>` (Guo et al. 2020; several GB for `en`). The catalogue's held-out sentences of lm1b
    are one split; their first half is `valid` here and the second `test`. Needs the extra `tfds`.

    Downloads are checked against their known digests. On a machine without a network, put the files where they would
    have gone: `input.txt` or the `.tar.gz` of lm1b into `<data_dir>/downloads/<name>`; of the buckets of the other two,
    `metadata.csv` and the folders `train`, `validation` and `test` into `<data_dir>/downloads/pg19`, and the folders
    `train`, `dev` and `test` into `<data_dir>/downloads/wiki40b`. A corpus that was already prepared, in the
    ArrayRecord format, is read as it is.

    Attributes:
      name: which corpus.
      data_dir: folder of downloads and prepared corpora.
      cache: folder for trained tokenizers and token ids; `None`: no caching, tokens are held in memory.
    """

    name: str
    data_dir: str = '~/tensorflow_datasets'
    cache: str | None = cache.FOLDER

    def __post_init__(self) -> None:
        if self.name.split('/')[0] not in DATASETS:
            raise UserError(f'there is no builder for the corpus {self.name!r}{nearest(self.name, DATASETS)}')

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self._listed.splits)

    def documents(self, split: str) -> Iterator[Document]:
        examples = self._prepared().as_data_source(split=self._listed.splits[split])
        for start in range(0, len(examples), TOGETHER):
            indices = range(start, min(start + TOGETHER, len(examples)))
            for index, example in zip(indices, examples.__getitems__(indices), strict=True):
                yield Document(f'{self.name}/{split}/{index}', example[self._listed.feature])

    def describe(self) -> dict[str, Any]:
        return {'source': 'tensorflow_datasets', 'name': self._prepared().info.full_name}

    def fingerprint(self, split: str) -> str:
        # By size and time of the prepared files: reading all of them would take minutes.
        folder = pathlib.Path(self._prepared().data_dir)
        digest = hashlib.sha256(f'{folder}\0{split}'.encode())
        for file in sorted(folder.iterdir()):
            status = file.stat()
            digest.update(f'\0{file.name}\0{status.st_size}\0{status.st_mtime_ns}'.encode())
        return digest.hexdigest()

    @property
    def _listed(self) -> Listed:
        return DATASETS[self.name.split('/')[0]]

    def _prepared(self) -> Any:
        """The builder, after its corpus is on disk."""
        tfds = optional('tensorflow_datasets', 'TfdsText')
        from attnlab.data.text import builders

        folder = pathlib.Path(self.data_dir).expanduser()
        kind = getattr(builders, self._listed.builder)
        _, _, config = self.name.partition('/')
        if config and config not in kind.builder_configs:
            raise UserError(f'{kind.name} has no variant {config!r}{nearest(config, kind.builder_configs)}')
        builder = kind(data_dir=folder, config=config or None)
        settings = tfds.download.DownloadConfig(try_download_gcs=False)
        builder.download_and_prepare(
            download_dir=folder / 'downloads', download_config=settings, file_format='array_record'
        )
        if builder.info.file_format != tfds.core.FileFormat.ARRAY_RECORD:
            form = builder.info.file_format.value
            raise UserError(
                f'{builder.data_dir} holds {form} files, which only TensorFlow reads; name another data_dir'
            )
        return builder
