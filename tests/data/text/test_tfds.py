import base64
import functools
import gzip
import hashlib
import http.server
import io
import json
import pathlib
import sys
import tarfile
import threading
import urllib.parse

import numpy as np
import pytest

from attnlab.config import build, spec
from attnlab.data import download
from attnlab.data.text.tfds import TfdsText
from attnlab.data.text.tokenizers import BytePairs, Bytes
from attnlab.errors import UserError

tfds = pytest.importorskip('tensorflow_datasets')

from attnlab.data.text import builders  # noqa: E402

ADDRESSES = {builder: builder.url for builder in (builders.TinyShakespeare, builders.Lm1b)}
PLAY = ''.join(f'Citizen {i}: speak, speak — naïve!\n' for i in range(200))
BOOKS = {'train/10.txt': '  Call me Ishmael.\n', 'train/2.txt': 'It was the best\nof times.', 'test/7.txt': 'Emma.'}
BOOKS |= {
    'validation/5.txt': 'A «tale».',
    'metadata.csv': '10,Moby,1851,l/10\n2,"Two, Cities",1859,l/2\n7,E,1815,l/7\n5,T,1,l\n',
}


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Nothing waits, and nothing is asked of the real servers."""
    monkeypatch.setattr(download, 'WAITS', (0.0, 0.0))
    for builder, address in ADDRESSES.items():
        monkeypatch.setattr(builder, 'url', f'http://127.0.0.1:9/{address.rpartition("/")[-1]}')
    for builder in (builders.Pg19, builders.Wiki40b):
        monkeypatch.setattr(builder, 'storage', 'http://127.0.0.1:9')


def put(folder, name, content):
    path = folder / 'downloads' / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def expect(monkeypatch, builder, content):
    monkeypatch.setattr(builder, 'size', len(content))
    monkeypatch.setattr(builder, 'sha256', hashlib.sha256(content).hexdigest())


def contents(source, split):
    return [document.content.decode() for document in source.documents(split)]


def test_tiny_shakespeare(tmp_path, monkeypatch):
    put(tmp_path, 'tiny_shakespeare/input.txt', PLAY.encode())
    expect(monkeypatch, builders.TinyShakespeare, PLAY.encode())
    source = TfdsText('tiny_shakespeare', data_dir=str(tmp_path), cache=str(tmp_path / 'cache'))
    parts = {split: contents(source, split) for split in source.splits}
    assert [len(part) for part in parts.values()] == [1, 1, 1]
    assert ''.join(part for (part,) in parts.values()) == PLAY
    assert len(parts['train'][0]) == int(len(PLAY) * 0.9)
    text = source.load('valid', BytePairs(280))
    assert text.tokenizer.decode(text.tokens).decode() == parts['valid'][0]
    assert text.provenance['name'] == 'tiny_shakespeare/1.0.0'
    assert text.provenance['content_hash'] == source.load('valid', Bytes()).content_hash


def test_a_prepared_corpus_needs_neither_download_nor_network(tmp_path, monkeypatch):
    path = put(tmp_path, 'tiny_shakespeare/input.txt', PLAY.encode())
    expect(monkeypatch, builders.TinyShakespeare, PLAY.encode())
    source = TfdsText('tiny_shakespeare', data_dir=str(tmp_path), cache=None)
    first = source.load('train', Bytes())
    path.unlink()
    assert source.load('train', Bytes()).content_hash == first.content_hash
    # Its record files are of the random-access format, and nothing has imported TensorFlow.
    assert list((tmp_path / 'tiny_shakespeare' / '1.0.0').glob('*train.array_record*'))
    assert 'tensorflow' not in sys.modules


def archive(members):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode='w') as tar:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            if content is None:
                entry.type, entry.linkname = tarfile.SYMTYPE, '/etc/passwd'
            else:
                entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content or b''))
    return gzip.compress(buffer.getvalue())


TOP = '1-billion-word-language-modeling-benchmark-r13output'
LM1B = {
    f'{TOP}/README': b'not a sentence\n',
    f'{TOP}/training-monolingual.tokenized.shuffled/news.en-00001-of-00100': b'A b c .\n D \xc3\xa9 f . \n',
    f'{TOP}/training-monolingual.tokenized.shuffled/news.en-00002-of-00100': b'G h .\n',
    f'{TOP}/training-monolingual.tokenized.shuffled/news.en-00003-of-00100': None,
    f'{TOP}/heldout-monolingual.tokenized.shuffled/news.en.heldout-00000-of-00050': b'1\n2\n3\n4\n',
    f'{TOP}/heldout-monolingual.tokenized.shuffled/news.en.heldout-00001-of-00050': b'5\n6\n',
}


def test_lm1b(tmp_path, monkeypatch):
    content = archive(LM1B)
    put(tmp_path, f'lm1b/{TOP}.tar.gz', content)
    expect(monkeypatch, builders.Lm1b, content)
    source = TfdsText('lm1b', data_dir=str(tmp_path), cache=None)
    monkeypatch.setattr('attnlab.data.text.tfds.TOGETHER', 2)
    assert contents(source, 'train') == ['A b c .', 'D é f .', 'G h .']
    assert contents(source, 'valid') == ['1', '2', '3']
    assert contents(source, 'test') == ['4', '5', '6']
    text = source.load('train', Bytes())
    assert text.ends.tolist() == [7, 15, 20]


@pytest.mark.parametrize('name', ['../outside', '/etc/outside', f'{TOP}/../../outside'])
def test_an_archive_that_reaches_outside_its_folder_is_refused(tmp_path, monkeypatch, name):
    content = archive({name: b'x', **LM1B})
    put(tmp_path, f'lm1b/{TOP}.tar.gz', content)
    expect(monkeypatch, builders.Lm1b, content)
    with pytest.raises(UserError, match='has a member outside its own folder'):
        contents(TfdsText('lm1b', data_dir=str(tmp_path)), 'train')
    assert not (tmp_path / 'lm1b' / '1.1.0').exists()


def test_a_file_that_is_not_the_expected_one_is_refused(tmp_path, monkeypatch):
    path = put(tmp_path, 'tiny_shakespeare/input.txt', PLAY.encode()[:-1])
    expect(monkeypatch, builders.TinyShakespeare, PLAY.encode())
    with pytest.raises(UserError, match=rf'{path} is not the file at http.*: it has \d+ bytes, sha256 .* delete it'):
        contents(TfdsText('tiny_shakespeare', data_dir=str(tmp_path)), 'train')


@pytest.mark.parametrize(
    ('name', 'expected'),
    [
        ('tiny_shakespeare', 'put a copy of it at {}/downloads/tiny_shakespeare/input.txt'),
        ('lm1b', 'put a copy of it at {}/downloads/lm1b/1-billion'),
        ('pg19', 'cannot read http://127.0.0.1:9/storage/v1/b/deepmind-gutenberg/o'),
        ('wiki40b/de', 'cannot read http://127.0.0.1:9/storage/v1/b/tfds-data/o'),
    ],
)
def test_without_a_network_the_message_says_where_files_would_go(tmp_path, name, expected):
    with pytest.raises(UserError) as raised:
        contents(TfdsText(name, data_dir=str(tmp_path)), 'train')
    assert expected.format(tmp_path) in str(raised.value)
    assert 'Connection refused' in str(raised.value)
    assert not [path for path in (tmp_path / 'downloads').rglob('*') if path.is_file()]


def test_pg19_from_a_copy_of_its_bucket(tmp_path):
    for name, content in BOOKS.items():
        put(tmp_path, f'pg19/{name}', content.encode())
    source = TfdsText('pg19', data_dir=str(tmp_path), cache=None)
    assert contents(source, 'train') == ['Call me Ishmael.', 'It was the best\nof times.']
    assert contents(source, 'valid') == ['A «tale».']
    assert contents(source, 'test') == ['Emma.']
    builder = tfds.builder_from_directory(tmp_path / 'pg19' / '0.1.1')
    (example,) = builder.as_data_source('test')
    assert {name: str(value) for name, value in example.items()} == {
        'book_text': "b'Emma.'",
        'book_id': '7',
        'book_title': "b'E'",
        'publication_date': "b'1815'",
        'book_link': "b'l/7'",
    }
    assert builder.as_data_source('train')[1]['book_title'] == b'Two, Cities'


def records(*articles):
    """A TFRecord file as TensorFlow would write it, by another implementation."""
    from tensorboardX.record_writer import RecordWriter
    from tensorflow_datasets.proto import tf_example_generated_pb2

    class Kept(io.BytesIO):
        def close(self):
            pass

    kept = Kept()
    writer = RecordWriter.__new__(RecordWriter)
    writer._writer = kept
    for number, text in enumerate(articles):
        example = tf_example_generated_pb2.Example()
        for name, value in (('wikidata_id', f'Q{number}'), ('text', text), ('version_id', '1')):
            example.features.feature[name].bytes_list.value.append(value.encode())
        writer.write(example.SerializeToString())
    return kept.getvalue()


WIKI = {
    'train/de_examples-00001-of-00002': records('_START_ARTICLE_\nÄpfel'),
    'train/de_examples-00000-of-00002': records('_START_ARTICLE_\nAal', 'x' * 300),
    'dev/de_examples-00000-of-00001': records('dev'),
    'test/de_examples-00000-of-00001': records('test'),
    'train/en_examples-00000-of-00001': records('an apple'),
}


def test_wiki40b_from_a_copy_of_its_bucket(tmp_path):
    for name, content in WIKI.items():
        put(tmp_path, f'wiki40b/{name}', content)
    source = TfdsText('wiki40b/de', data_dir=str(tmp_path), cache=None)
    assert contents(source, 'train') == ['_START_ARTICLE_\nAal', 'x' * 300, '_START_ARTICLE_\nÄpfel']
    assert contents(source, 'valid') == ['dev']
    assert contents(source, 'test') == ['test']
    assert source.describe()['name'] == 'wiki40b/de/1.3.0'


@pytest.mark.parametrize(('cut', 'message'), [(-1, 'ends in the middle'), (-20, 'ends in the middle'), (5, 'byte 0')])
def test_a_truncated_record_file_is_named(tmp_path, cut, message):
    path = put(tmp_path, 'records', records('one', 'two')[:cut])
    with pytest.raises(UserError, match=f'{path} .*{message}'):
        list(builders._tf_records(path))


def test_a_damaged_record_file_is_named(tmp_path):
    content = bytearray(records('one', 'two'))
    second = 12 + int.from_bytes(content[:8], 'little') + 4
    content[second] ^= 1
    path = put(tmp_path, 'records', bytes(content))
    with pytest.raises(UserError, match=f'{path} is damaged at byte {second};'):
        list(builders._tf_records(path))


class Cloud(http.server.BaseHTTPRequestHandler):
    """Just enough of Google Cloud Storage: listings of two objects a page, and objects."""

    unavailable = ()

    def __init__(self, objects, log, *arguments):
        self.objects, self.log = objects, log
        super().__init__(*arguments)

    def do_GET(self):
        url = urllib.parse.urlparse(self.path)
        self.log.append(url.path)
        if url.path.startswith('/storage/v1/b/'):
            answer = self.listing(dict(urllib.parse.parse_qsl(url.query)))
        else:
            name = urllib.parse.unquote(url.path).split('/', 2)[2]
            answer = None if name in self.unavailable else self.objects.get(name)
        self.send_response(200 if answer is not None else 404)
        self.send_header('Content-Length', str(len(answer or b'')))
        self.end_headers()
        self.wfile.write(answer or b'')

    def listing(self, query):
        names = sorted(name for name in self.objects if name.startswith(query['prefix']))
        start = int(query.get('pageToken', 0))
        items = [
            {
                'name': name,
                'size': str(len(self.objects[name])),
                'md5Hash': base64.b64encode(hashlib.md5(self.objects[name]).digest()).decode(),
            }
            for name in names[start : start + 2]
        ]
        more = {'nextPageToken': str(start + 2)} if len(names) > start + 2 else {}
        return json.dumps({'items': items} | more).encode()

    def log_message(self, *arguments):
        pass


@pytest.fixture
def cloud(monkeypatch):
    """Serves objects, by name; the log of what was asked for is with them."""
    objects, log = {}, []
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), functools.partial(Cloud, objects, log))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    address = f'http://127.0.0.1:{server.server_address[1]}'
    for builder in (builders.Pg19, builders.Wiki40b):
        monkeypatch.setattr(builder, 'storage', address)
    monkeypatch.setattr(builders.TinyShakespeare, 'url', f'{address}/bucket/input.txt')
    yield objects, log
    server.shutdown()
    server.server_close()
    thread.join()


def test_downloads_from_a_bucket_are_listed_page_by_page_and_kept(tmp_path, cloud):
    objects, log = cloud
    prefix = 'downloads/wiki40b/tfrecord_prod'
    objects |= {f'{prefix}/{name}': content for name, content in WIKI.items()}
    objects[f'{prefix}/train/de_examples-00002-of-00002'] = records('third page, second file')
    objects[f'{prefix}/train/'] = b''
    source = TfdsText('wiki40b/de', data_dir=str(tmp_path), cache=None)
    assert len(contents(source, 'train')) == 4
    fetched = [path for path in log if 'tfrecord_prod' in path]
    assert len(fetched) == len(set(fetched)) == 5
    assert sum('/storage/v1/' in path for path in log) == 4
    kept = tmp_path / 'downloads' / 'wiki40b' / 'train'
    assert (kept / 'de_examples-00001-of-00002').read_bytes() == WIKI['train/de_examples-00001-of-00002']


def test_an_interrupted_download_goes_on_with_what_is_missing(tmp_path, cloud, monkeypatch):
    objects, log = cloud
    objects |= {name: content.encode() for name, content in BOOKS.items()}
    source = TfdsText('pg19', data_dir=str(tmp_path), cache=None)
    with monkeypatch.context() as patch:
        patch.setattr(Cloud, 'unavailable', ('train/2.txt',))
        with pytest.raises(
            UserError, match=r'cannot download .*/train/2\.txt: Not Found; without a network, put a copy'
        ):
            contents(source, 'train')
    log.clear()
    assert len(contents(source, 'train')) == 2
    assert '/deepmind-gutenberg/train/2.txt' in log
    assert '/deepmind-gutenberg/train/10.txt' not in log


def test_a_download_that_does_not_match_its_listing_is_refused(tmp_path, cloud, monkeypatch):
    objects, _ = cloud
    objects |= {name: content.encode() for name, content in BOOKS.items()}
    listing = Cloud.listing
    monkeypatch.setattr(Cloud, 'listing', lambda self, query: listing(self, query).replace(b'"size": "', b'"size": "1'))
    with pytest.raises(UserError, match=r'metadata.csv is not the file at .*: it has \d+ bytes, md5 '):
        contents(TfdsText('pg19', data_dir=str(tmp_path)), 'train')


def test_a_download_over_http(tmp_path, cloud, monkeypatch):
    objects, log = cloud
    objects['input.txt'] = PLAY.encode()
    expect(monkeypatch, builders.TinyShakespeare, PLAY.encode())
    source = TfdsText('tiny_shakespeare', data_dir=str(tmp_path), cache=None)
    assert len(source.load('train', Bytes())) > 1000
    assert log == ['/bucket/input.txt']
    assert [p.name for p in (tmp_path / 'downloads' / 'tiny_shakespeare').iterdir()] == ['input.txt']


def test_the_checksums_are_those_of_the_catalogue():
    root = pathlib.Path(tfds.__file__).parent / 'datasets'
    for builder, address in ADDRESSES.items():
        url, size, sha256, file = (root / builder.name / 'checksums.tsv').read_text().split()
        assert (url, int(size), sha256) == (address, builder.size, builder.sha256)
        assert address.endswith(f'/{file}')


@pytest.mark.parametrize(
    ('name', 'builder'),
    [('tiny_shakespeare', builders.TinyShakespeare), ('lm1b', builders.Lm1b), ('pg19', builders.Pg19)],
)
def test_names_versions_and_features_are_those_of_the_catalogue(name, builder, tmp_path):
    theirs, ours = (kind(data_dir=tmp_path) for kind in (tfds.builder_cls(name), builder))
    assert ours.info.full_name == theirs.info.full_name
    assert ours.data_dir == theirs.data_dir
    assert set(ours.info.features) == set(theirs.info.features)
    for feature, kind in theirs.info.features.items():
        assert ours.info.features[feature].np_dtype == kind.np_dtype


def test_a_corpus_prepared_in_another_format_is_named(tmp_path, monkeypatch):
    put(tmp_path, 'tiny_shakespeare/input.txt', PLAY.encode())
    expect(monkeypatch, builders.TinyShakespeare, PLAY.encode())
    source = TfdsText('tiny_shakespeare', data_dir=str(tmp_path), cache=None)
    source.load('train', Bytes())
    record = tmp_path / 'tiny_shakespeare' / '1.0.0' / 'dataset_info.json'
    record.write_text(record.read_text().replace('"array_record"', '"tfrecord"'))
    with pytest.raises(UserError, match='holds tfrecord files, which only TensorFlow reads; name another data_dir'):
        source.load('train', Bytes())


def test_names_that_cannot_be(tmp_path):
    with pytest.raises(UserError, match="no builder for the corpus 'tiny_shakspeare'; did you mean 'tiny_shakespeare'"):
        TfdsText('tiny_shakspeare')
    with pytest.raises(UserError, match="wiki40b has no variant 'eng'; did you mean 'en'"):
        TfdsText('wiki40b/eng', data_dir=str(tmp_path)).load('train', Bytes())
    with pytest.raises(UserError, match="lm1b has no variant 'x'"):
        TfdsText('lm1b/x', data_dir=str(tmp_path)).load('train', Bytes())
    with pytest.raises(UserError, match="no split 'dev'"):
        TfdsText('lm1b', data_dir=str(tmp_path)).load('dev', Bytes())


def test_without_the_library_the_extra_is_named(monkeypatch, tmp_path):
    source = build(spec(TfdsText, name='lm1b', data_dir=str(tmp_path)))
    monkeypatch.setitem(sys.modules, 'tensorflow_datasets', None)
    monkeypatch.delitem(sys.modules, 'attnlab.data.text.builders')
    with pytest.raises(UserError, match=r'pip install "attnlab\[tfds\]"'):
        source.load('train', Bytes())


def test_windows_of_bytes_are_exact(tmp_path, monkeypatch):
    put(tmp_path, 'tiny_shakespeare/input.txt', PLAY.encode())
    expect(monkeypatch, builders.TinyShakespeare, PLAY.encode())
    source = TfdsText('tiny_shakespeare', data_dir=str(tmp_path), cache=str(tmp_path / 'cache'))
    text = source.load('train', Bytes())
    assert isinstance(text.tokens, np.memmap)
    assert text.tokens.tobytes().decode() == contents(source, 'train')[0]
