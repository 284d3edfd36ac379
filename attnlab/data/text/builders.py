"""TensorFlow Datasets builders of four text corpora that prepare and read them without TensorFlow.

The catalogue's own builders of these names need TensorFlow, or Apache Beam, to prepare. These fetch the same files,
make the same examples under the same names, versions and splits, and store them as ArrayRecord. Importing this module
needs the extra `tfds`.
"""

import base64
import concurrent.futures
import csv
import dataclasses
import json
import pathlib
import re
import struct
import urllib.parse
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import tensorflow_datasets as tfds
from tensorflow_datasets.proto import tf_example_generated_pb2

from attnlab.data.archives import tar_members
from attnlab.data.cache import write_file
from attnlab.data.download import fetch, read
from attnlab.errors import UserError

Examples = Iterator[tuple[str, dict[str, Any]]]
Splits = dict[str, Examples]

STORAGE = 'https://storage.googleapis.com'

CONNECTIONS = 16
"""Files of a bucket that are downloaded concurrently."""

LANGUAGES = (
    'en ar zh-cn zh-tw nl fr de it ja ko pl pt ru es th tr bg ca cs da el et fa fi he hi hr hu id lt lv ms no ro sk sl '
    'sr sv tl uk vi'
)
"""The languages of Wiki-40B."""


class OrderedBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
    """A builder whose examples keep the order in which they are generated."""

    features: ClassVar[dict[str, Any]]
    homepage: ClassVar[str]

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=type(self).__doc__,
            features=tfds.features.FeaturesDict(self.features),
            homepage=self.homepage,
            disable_shuffling=True,
        )

    def _folder(self, dl_manager: tfds.download.DownloadManager) -> pathlib.Path:
        """The folder of the corpus's files, whether downloaded or placed by hand."""
        return pathlib.Path(dl_manager.download_dir) / self.name


class TinyShakespeare(OrderedBuilder, skip_registration=True):  # type: ignore[call-arg]
    """Forty thousand lines of Shakespeare (Karpathy 2015), one example a split: the first 90 %, then 5 % and 5 %."""

    VERSION = tfds.core.Version('1.0.0')
    features: ClassVar = {'text': tfds.features.Text()}
    homepage = 'https://github.com/karpathy/char-rnn/blob/master/data/tinyshakespeare/input.txt'
    url = 'https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt'
    size = 1115394
    sha256 = '86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed'

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> Splits:
        path = fetch(self.url, self._folder(dl_manager) / 'input.txt', size=self.size, digest=self.sha256)
        text = path.read_text(encoding='utf-8')
        valid = int(len(text) * 0.9)
        test = valid + int((len(text) - valid) * 0.5)
        parts = {'train': text[:valid], 'validation': text[valid:test], 'test': text[test:]}
        return {split: self._generate_examples(split, part) for split, part in parts.items()}

    def _generate_examples(self, split: str, text: str) -> Examples:
        yield split, {'text': text}


class Lm1b(OrderedBuilder, skip_registration=True):  # type: ignore[call-arg]
    """The One Billion Word benchmark (Chelba et al. 2013): shuffled sentences of news, an example a sentence."""

    VERSION = tfds.core.Version('1.1.0')
    features: ClassVar = {'text': tfds.features.Text()}
    homepage = 'http://www.statmt.org/lm-benchmark/'
    url = 'http://www.statmt.org/lm-benchmark/1-billion-word-language-modeling-benchmark-r13output.tar.gz'
    size = 1792209805
    sha256 = '01ba60381110baf7f189dfd2b8374de371e8c9a340835793f190bdae9e90a34e'
    members: ClassVar = {
        'train': re.compile(r'[^/]*/training-monolingual\.tokenized\.shuffled/news\.en-[^/]*'),
        'test': re.compile(r'[^/]*/heldout-monolingual\.tokenized\.shuffled/news\.en\.heldout-[^/]*'),
    }

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> Splits:
        path = self._folder(dl_manager) / self.url.rpartition('/')[-1]
        archive = fetch(self.url, path, size=self.size, digest=self.sha256)
        return {split: self._generate_examples(archive, wanted) for split, wanted in self.members.items()}

    def _generate_examples(self, archive: pathlib.Path, wanted: re.Pattern[str]) -> Examples:
        for path, lines in tar_members(archive, wanted):
            for index, line in enumerate(lines):
                yield f'{path.name}_{index}', {'text': line.decode('utf-8').strip()}


class Pg19(OrderedBuilder, skip_registration=True):  # type: ignore[call-arg]
    """Books of Project Gutenberg from before 1919 (Rae et al. 2020), an example a book."""

    VERSION = tfds.core.Version('0.1.1')
    features: ClassVar = {
        'book_text': tfds.features.Text(),
        'book_id': np.int32,
        'book_title': tfds.features.Text(),
        'publication_date': tfds.features.Text(),
        'book_link': tfds.features.Text(),
    }
    homepage = 'https://github.com/google-deepmind/pg19'
    storage = STORAGE

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> Splits:
        folder = self._folder(dl_manager)
        bucket = Bucket('deepmind-gutenberg', self.storage)
        (table,) = bucket.fetch('metadata.csv', folder)
        with table.open(encoding='utf-8', newline='') as lines:
            metadata = {int(book): fields for book, *fields in csv.reader(lines)}
        books = {split: bucket.fetch(f'{split}/', folder / split) for split in ('train', 'validation', 'test')}
        return {split: self._generate_examples(paths, metadata) for split, paths in books.items()}

    def _generate_examples(self, books: list[pathlib.Path], metadata: dict[int, list[str]]) -> Examples:
        for path in books:
            book = int(path.stem)
            title, date, link = metadata[book]
            text = path.read_text(encoding='utf-8').strip()
            about = {'book_id': book, 'book_title': title, 'publication_date': date, 'book_link': link}
            yield path.name, {'book_text': text, **about}


class Wiki40b(OrderedBuilder, skip_registration=True):  # type: ignore[call-arg]
    """Cleaned Wikipedia articles of one language (Guo et al. 2020), an example an article, its section markers kept."""

    VERSION = tfds.core.Version('1.3.0')
    BUILDER_CONFIGS: ClassVar = [tfds.core.BuilderConfig(name=language) for language in LANGUAGES.split()]
    features: ClassVar = {name: tfds.features.Text() for name in ('wikidata_id', 'text', 'version_id')}
    homepage = 'https://research.google/pubs/pub49029/'
    storage = STORAGE

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> Splits:
        folder = self._folder(dl_manager)
        bucket = Bucket('tfds-data', self.storage)
        files = {}
        for split, name in (('train', 'train'), ('validation', 'dev'), ('test', 'test')):
            prefix = f'downloads/wiki40b/tfrecord_prod/{name}/{self.builder_config.name}_examples-'
            files[split] = bucket.fetch(prefix, folder / name)
        return {split: self._generate_examples(paths) for split, paths in files.items()}

    def _generate_examples(self, files: list[pathlib.Path]) -> Examples:
        for path in files:
            for index, record in enumerate(_tf_records(path)):
                example = tf_example_generated_pb2.Example.FromString(record).features.feature
                yield f'{path.name}_{index}', {name: example[name].bytes_list.value[0] for name in self.features}


@dataclasses.dataclass(frozen=True)
class Bucket:
    """A public bucket of Google Cloud Storage.

    Attributes:
      name: of the bucket.
      storage: address of the service.
    """

    name: str
    storage: str = STORAGE

    def fetch(self, prefix: str, folder: pathlib.Path) -> list[pathlib.Path]:
        """The files whose names start with `prefix`, kept in `folder` under the last part of their names, in order.

        Missing files are downloaded, and all are checked against the sizes and MD5 digests in the bucket's listing.
        Files in `folder` without a listing were placed by hand: they are used unchecked, as the complete set.
        Raises `UserError` when there are none, or one cannot be downloaded or differs from the listing.
        """
        beginning = prefix.rpartition('/')[-1]
        listing = folder / f'.{beginning or folder.name}.listing.json'
        if not listing.is_file():
            present = sorted(p for p in folder.glob(f'{beginning}*') if p.is_file() and not p.name.startswith('.'))
            if present:
                return present
            write_file(listing, json.dumps(list(self._listing(prefix)), indent=2) + '\n')
        items = sorted(json.loads(listing.read_text()), key=lambda item: item['name'])
        if not items:
            raise UserError(f'there are no files {prefix}* in gs://{self.name}, or in {folder}')
        with concurrent.futures.ThreadPoolExecutor(CONNECTIONS) as pool:
            return list(pool.map(lambda item: self._fetch(item, folder), items))

    def _listing(self, prefix: str) -> Iterator[dict[str, str]]:
        query = {'prefix': prefix, 'fields': 'items(name,size,md5Hash),nextPageToken'}
        while True:
            page = json.loads(read(f'{self.storage}/storage/v1/b/{self.name}/o?{urllib.parse.urlencode(query)}'))
            yield from (item for item in page.get('items', ()) if not item['name'].endswith('/'))
            if 'nextPageToken' not in page:
                return
            query['pageToken'] = page['nextPageToken']

    def _fetch(self, item: dict[str, str], folder: pathlib.Path) -> pathlib.Path:
        url = f'{self.storage}/{self.name}/{urllib.parse.quote(item["name"])}'
        path = folder / pathlib.PurePosixPath(item['name']).name
        # An object composed from parts in the bucket has no MD5.
        digest = base64.b64decode(item['md5Hash']).hex() if 'md5Hash' in item else None
        return fetch(url, path, size=int(item['size']), digest=digest, algorithm='md5')


def _tf_records(path: pathlib.Path) -> Iterator[bytes]:
    """The records of a TFRecord file: length (8 bytes), its checksum (4), content, its checksum (4), little-endian."""
    with path.open('rb') as file:
        while header := file.read(12):
            length = struct.unpack('<Q', header[:8])[0] if len(header) == 12 else 0
            if len(header) < 12 or struct.unpack('<I', header[8:])[0] != _masked_crc32c(header[:8]):
                raise UserError(f'{path} is damaged at byte {file.tell() - len(header)}; delete it and start again')
            record = file.read(length + 4)
            if len(record) < length + 4:
                raise UserError(f'{path} ends in the middle of a record; delete it and start again')
            yield record[:length]


def _masked_crc32c(content: bytes) -> int:
    """The checksum of TFRecord, CRC-32C rotated and offset; slow, and only used on the eight bytes of a length."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
