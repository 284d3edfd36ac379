"""Data sets converted from small archives of the true format, which the tests make."""

import functools
import gzip
import hashlib
import http.server
import io
import pathlib
import tarfile
import threading
import wave

import numpy as np
import pytest
from PIL import Image

from attnlab.data import download
from attnlab.data.long_range import images
from attnlab.data.long_range.images import grey
from attnlab.data.long_range.prepare import prepare
from attnlab.data.long_range.prepared import Prepared
from attnlab.data.long_range.rows import Padded
from attnlab.data.long_range.speech import WORDS
from attnlab.data.vision import archives
from attnlab.errors import UserError

from ..text.test_tfds import Cloud

tfds = pytest.importorskip('tensorflow_datasets')

from attnlab.data.long_range import builders  # noqa: E402

ARCHIVES = {name: builder for name, builder in builders.BUILDERS.items() if hasattr(builder, 'url')}
IDX = {name: builders.BUILDERS[name].folder for name in ('mnist', 'fashion_mnist')}
ADDRESSES = {name: builder.url for name, builder in ARCHIVES.items()}


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Nothing waits, and nothing is asked of the real servers."""
    monkeypatch.setattr(download, 'WAITS', (0.0,))
    for name, builder in ARCHIVES.items():
        monkeypatch.setattr(builder, 'url', f'http://127.0.0.1:9/{ADDRESSES[name].rpartition("/")[-1]}')
    monkeypatch.setattr(builders.AanBuilder, 'storage', 'http://127.0.0.1:9')
    for name in IDX:
        monkeypatch.setattr(builders.BUILDERS[name], 'folder', 'http://127.0.0.1:9')


def silent(stage, done, total):
    pass


def archive(members):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode='w') as tar:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return gzip.compress(buffer.getvalue(), compresslevel=1)


def put(folder, name, content):
    """Puts a file where a person would, and has it expected there."""
    builder = builders.BUILDERS[name]
    file = builder.url.rpartition('/')[-1] if name in ARCHIVES else 'lra_release.gz'
    path = folder / 'downloads' / name / file
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    return path


def expect(monkeypatch, name, content):
    monkeypatch.setattr(builders.BUILDERS[name], 'size', len(content))
    monkeypatch.setattr(builders.BUILDERS[name], 'sha256', hashlib.sha256(content).hexdigest())


def prepared(folder, monkeypatch, name, members):
    content = archive(members)
    put(folder, name, content)
    if name in ARCHIVES:
        expect(monkeypatch, name, content)
    outcome = prepare(name, folder, 1, silent)
    source = Prepared(name, str(folder))
    assert outcome.fresh and source.describe()['content'] == {part.name: part.content for part in outcome.splits}
    return source


def contents(source, split):
    rows = source.rows(split)
    return [(bytes(row['x']), int(row['label'])) for row in listed(rows)]


def listed(rows):
    return [rows[index] for index in range(len(rows))]


def test_imdb(tmp_path, monkeypatch):
    members = {
        'aclImdb/README': b'no review',
        'aclImdb/train/pos/0_9.txt': 'Très bon<br />'.encode(),
        'aclImdb/train/neg/12_1.txt': b'bad',
        'aclImdb/train/unsup/0_0.txt': b'who knows',
        'aclImdb/train/urls_pos.txt': b'http://',
        'aclImdb/test/neg/3_2.txt': b'x' * 5000,
    }
    source = prepared(tmp_path, monkeypatch, 'imdb', members)
    assert contents(source, 'train') == [('Très bon<br />'.encode(), 1), (b'bad', 0)]
    assert contents(source, 'test') == contents(source, 'valid') == [(b'x' * 5000, 0)]
    row = Padded(source.rows('train'), source.kind, 8)[1]
    assert row['tokens'].tolist() == [ord('b') + 1, ord('a') + 1, ord('d') + 1, 0, 0, 0, 0, 0]
    assert Padded(source.rows('test'), source.kind, 4096)[0]['segments'].all()


def record(label, image):
    return bytes([label]) + image.transpose(2, 0, 1).tobytes()


def test_cifar10(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (7, 32, 32, 3), np.uint8)
    monkeypatch.setattr(images, 'TRAIN', 4)
    members = {
        'cifar-10-batches-bin/data_batch_2.bin': record(2, pictures[2]) + record(3, pictures[3]),
        'cifar-10-batches-bin/batches.meta.txt': b'airplane\n',
        'cifar-10-batches-bin/data_batch_1.bin': record(0, pictures[0]) + record(1, pictures[1]),
        'cifar-10-batches-bin/data_batch_3.bin': record(4, pictures[4]) + record(5, pictures[5]),
        'cifar-10-batches-bin/test_batch.bin': record(9, pictures[6]),
    }
    source = prepared(tmp_path, monkeypatch, 'cifar10', members)
    found = {split: contents(source, split) for split in source.splits}
    assert {split: [label for _, label in part] for split, part in found.items()} == {
        'train': [0, 1, 2, 3],
        'valid': [4, 5],
        'test': [9],
    }
    luma = np.frombuffer(found['test'][0][0], np.uint8).reshape(32, 32)
    exact = pictures[6] @ np.array([0.2989, 0.587, 0.114])
    assert np.abs(luma - exact).max() < 1
    row = Padded(source.rows('test'), source.kind, 1024)[0]
    np.testing.assert_allclose(row['tokens'][:, 0], (luma.reshape(-1) - 122.6) / 61.0, rtol=1e-5)


def test_images_of_cifar_in_colours(tmp_path, monkeypatch):
    """Channels come last; of CIFAR-100 the fine label, which is the second byte."""
    pictures = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), np.uint8)
    monkeypatch.setattr(archives, 'HELD_OUT', 1)
    tenfold = {
        'cifar-10-batches-bin/data_batch_1.bin': record(3, pictures[0]) + record(1, pictures[1]),
        'cifar-10-batches-bin/data_batch_2.bin': record(7, pictures[2]),
        'cifar-10-batches-bin/test_batch.bin': record(9, pictures[3]),
    }
    hundredfold = {
        'cifar-100-binary/train.bin': b''.join(bytes([5]) + record(n + 90, pictures[n]) for n in range(3)),
        'cifar-100-binary/test.bin': bytes([6]) + record(99, pictures[3]),
        'cifar-100-binary/fine_label_names.txt': b'apple\n',
    }
    for name, members, labels in (
        ('cifar10_colours', tenfold, {'train': [3, 1], 'valid': [7], 'test': [9]}),
        ('cifar100', hundredfold, {'train': [90, 91], 'valid': [92], 'test': [99]}),
    ):
        source = prepared(tmp_path, monkeypatch, name, members)
        found = {split: listed(source.rows(split)) for split in source.splits}
        assert {split: [int(row['label']) for row in rows] for split, rows in found.items()} == labels
        np.testing.assert_array_equal(found['test'][0]['x'].reshape(32, 32, 3), pictures[3])
        row = Padded(found['valid'], source.kind, 1024)[0]
        expected = (pictures[2].reshape(-1, 3) - source.kind.mean) / source.kind.deviation
        np.testing.assert_allclose(row['tokens'], expected, rtol=1e-4, atol=1e-6)


def index_file(magic, numbers):
    """A file in the format of MNIST."""
    sizes = np.array([magic, *numbers.shape], '>u4').tobytes()
    return gzip.compress(sizes + numbers.astype(np.uint8).tobytes())


def handwritten(folder, monkeypatch, name, **changed):
    """Four small files where a person would put them, expected there."""
    rng = np.random.default_rng(1)
    parts = {}
    for part, count in (('train', 5), ('t10k', 2)):
        parts[f'{part}-images-idx3-ubyte.gz'] = index_file(2051, rng.integers(0, 256, (count, 28, 28)))
        parts[f'{part}-labels-idx1-ubyte.gz'] = index_file(2049, np.arange(count) + (part == 't10k'))
    parts |= {key.replace('_', '-') + '-ubyte.gz': content for key, content in changed.items()}
    there = folder / 'downloads' / name
    there.mkdir(parents=True, exist_ok=True)
    for part, content in parts.items():
        (there / part).write_bytes(content)
    sizes = {part: (len(content), hashlib.sha256(content).hexdigest()) for part, content in parts.items()}
    monkeypatch.setattr(builders.BUILDERS[name], 'parts', sizes)
    monkeypatch.setattr(archives, 'HELD_OUT', 2)
    return rng


@pytest.mark.parametrize('name', IDX)
def test_images_in_index_files(tmp_path, monkeypatch, name):
    handwritten(tmp_path, monkeypatch, name)
    prepare(name, tmp_path, 1, silent)
    source = Prepared(name, str(tmp_path))
    found = {split: contents(source, split) for split in source.splits}
    assert {split: [label for _, label in part] for split, part in found.items()} == {
        'train': [0, 1, 2],
        'valid': [3, 4],
        'test': [1, 2],
    }
    first = np.random.default_rng(1).integers(0, 256, (5, 28, 28)).astype(np.uint8)
    assert [pixels for pixels, _ in found['train'] + found['valid']] == [each.tobytes() for each in first]


@pytest.mark.parametrize(
    ('changed', 'sentence'),
    [
        ({'train_labels_idx1': index_file(2049, np.arange(4))}, 'has 5 train images and 4 labels of them'),
        ({'train_images_idx3': index_file(2049, np.arange(4))}, 'is no whole IDX file of bytes with 3 axes'),
        ({'t10k_labels_idx1': index_file(2049, np.arange(4))[:20]}, 'cannot be read'),
        ({'t10k_labels_idx1': b'no archive'}, 'cannot be read: Not a gzipped file'),
        ({'t10k_labels_idx1': gzip.compress(b'short')}, 'is no whole IDX file of bytes with 1 axes'),
    ],
)
def test_index_files_that_are_wrong_are_named(tmp_path, monkeypatch, changed, sentence):
    handwritten(tmp_path, monkeypatch, 'mnist', **changed)
    with pytest.raises(UserError, match=sentence):
        prepare('mnist', tmp_path, 1, silent)


def test_index_files_are_checked(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r'put a copy of it at .*/train-images-idx3-ubyte.gz; digits needs no download'):
        prepare('mnist', tmp_path, 1, silent)
    handwritten(tmp_path, monkeypatch, 'mnist')
    path = tmp_path / 'downloads' / 'mnist' / 't10k-labels-idx1-ubyte.gz'
    path.write_bytes(index_file(2049, np.arange(2)))
    with pytest.raises(UserError, match=rf'{path} is not the file at http'):
        prepare('mnist', tmp_path, 1, silent)


def photograph(level, size):
    """An image of one grey as a JPEG file."""
    buffer = io.BytesIO()
    Image.fromarray(np.full((*size, 3), level, np.uint8)).save(buffer, 'JPEG', quality=95)
    return buffer.getvalue()


def test_imagenette(tmp_path, monkeypatch):
    """Classes by the order of their folders' names; every second image of a class is for validation here."""
    monkeypatch.setattr(archives, 'EVERY', 2)
    members = {
        f'imagenette2-160/train/{name}/{name}_{number}.JPEG': photograph(level + number, (160, 200))
        for name, level in (('n03888257', 200), ('n01440764', 10))
        for number in range(3)
    }
    members['imagenette2-160/val/n02102040/x.JPEG'] = photograph(99, (213, 160))
    members['imagenette2-160/noisy_imagenette.csv'] = b'path,noisy\n'
    source = prepared(tmp_path, monkeypatch, 'imagenette', members)
    found = {split: listed(source.rows(split)) for split in source.splits}
    levels = {split: [(int(row['label']), int(row['x'][0, 0])) for row in rows] for split, rows in found.items()}
    assert levels == {'train': [(9, 200), (9, 202), (0, 10), (0, 12)], 'valid': [(9, 201), (0, 11)], 'test': [(1, 99)]}
    assert found['test'][0]['x'].shape == (64 * 64, 3)
    broken = archive({'imagenette2-160/train/n01440764/a.JPEG': b'no image'})
    put(tmp_path / 'broken', 'imagenette', broken)
    expect(monkeypatch, 'imagenette', broken)
    with pytest.raises(UserError, match=r'imagenette2-160/train/n01440764/a.JPEG is not an image that can be read'):
        prepare('imagenette', tmp_path / 'broken', 1, silent)


def test_grey_is_as_tensorflow_has_it():
    # Of tf.image.rgb_to_grayscale, which truncates what it has scaled by 255.5.
    pixels = np.array([[0, 0, 0], [255, 255, 255], [255, 0, 0], [0, 255, 0], [0, 0, 255], [10, 20, 30]], np.uint8)
    assert grey(pixels).tolist() == [0, 255, 76, 149, 29, 18]


def test_aan(tmp_path, monkeypatch):
    lines = {
        'train': b'1.0\tP1\tP2\tfirst paper\tsecond\n0.0\tP3\tP4\t' + b'y' * 12_000 + b'\tz\n',
        'eval': b'0\ta\tb\tc\td\n',
        'test': b'1\ta\tb\te\tf\n',
    }
    folder = 'lra_release/lra_release/'
    members = {f'{folder}tsv_data/new_aan_pairs.{split}.tsv': content for split, content in lines.items()}
    members |= {f'{folder}listops-1000/basic_train.tsv': b'Source\tTarget\n'}
    source = prepared(tmp_path, monkeypatch, 'aan', members)
    assert contents(source, 'train') == [(b'first paper', 1), (b'y' * 10_000, 0)]
    assert contents(source, 'valid') == [(b'c', 0)] and contents(source, 'test') == [(b'e', 1)]
    row = Padded(source.rows('train'), source.kind, 20)[0]
    assert (row['tokens'] - 1).astype(np.uint8)[row['segments'] == 1].tobytes() == b'first pape'
    assert (row['tokens'] - 1).astype(np.uint8)[row['segments'] == 2].tobytes() == b'second'
    assert row['segments'].tolist() == [1] * 10 + [2] * 6 + [0] * 4
    assert row['positions'].tolist() == [*range(10), *range(6), *[0] * 4]


def test_a_line_that_is_no_pair_is_named(tmp_path, monkeypatch):
    put(tmp_path, 'aan', archive({'tsv_data/new_aan_pairs.train.tsv': b'1\ta\tb\tc\td\n2\ta\tb\tc\td\n'}))
    with pytest.raises(UserError, match=r'line 2 of .*new_aan_pairs.train.tsv in .*lra_release.gz is not a label'):
        prepare('aan', tmp_path, 1, silent)
    assert not (tmp_path / 'aan').exists() or not any((tmp_path / 'aan').glob('1.0.0'))


def recording(samples, rate=16_000):
    buffer = io.BytesIO()
    with wave.open(buffer, 'wb') as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.asarray(samples, '<i2').tobytes())
    return buffer.getvalue()


def test_speech_commands(tmp_path, monkeypatch):
    members = {
        './yes/a_nohash_0.wav': recording([1, -2, 16384]),
        './yes/b_nohash_0.wav': recording([7] * 16_000),
        './zero/c_nohash_1.wav': recording([5]),
        './_background_noise_/pink.wav': recording([1] * 9),
        './validation_list.txt': b'yes/b_nohash_0.wav\n',
        './testing_list.txt': b'zero/c_nohash_1.wav\n',
        './bed/d_nohash_0.wav': recording([9, 9]),
    }
    source = prepared(tmp_path, monkeypatch, 'speech_commands', members)
    found = {split: listed(source.rows(split)) for split in source.splits}
    assert {split: [(len(row['x']), int(row['label'])) for row in map(part.__getitem__, range(len(part)))]
            for split, part in found.items()} == {
        'train': [(3, WORDS.index('yes')), (2, WORDS.index('bed'))],
        'valid': [(16_000, WORDS.index('yes'))],
        'test': [(1, WORDS.index('zero'))],
    }  # fmt: skip
    assert len(WORDS) == 35
    row = Padded(found['train'], source.kind, 4)[0]
    np.testing.assert_allclose(row['tokens'][:, 0], [1 / 32768, -2 / 32768, 0.5, 0], rtol=1e-6)
    assert row['segments'].tolist() == [1, 1, 1, 0]


def test_a_recording_of_another_rate_is_named(tmp_path, monkeypatch):
    members = {'testing_list.txt': b'no/x.wav', 'go/x.wav': recording([1], rate=8000)}
    content = archive(members)
    put(tmp_path, 'speech_commands', content)
    expect(monkeypatch, 'speech_commands', content)
    with pytest.raises(UserError, match=r'go/x.wav in .* is not 16 kHz, 16 bits, one channel'):
        prepare('speech_commands', tmp_path, 1, silent)


@pytest.mark.parametrize('name', ARCHIVES)
def test_a_file_that_is_another_is_refused(tmp_path, name):
    path = put(tmp_path, name, archive({'x': b'y'}))
    with pytest.raises(UserError, match=rf'{path} is not the file at http.*: it has \d+ bytes, sha256 .* delete it'):
        prepare(name, tmp_path, 1, silent)


@pytest.mark.parametrize(
    ('name', 'substitute'),
    [('imdb', 'authorship'), ('cifar10', 'digits'), ('aan', 'authorship'), ('speech_commands', 'digits')],
)
def test_without_a_network_it_is_said_where_the_file_goes_and_what_to_do_without(tmp_path, name, substitute):
    builder = builders.BUILDERS[name]
    file = ADDRESSES[name].rpartition('/')[-1] if name in ARCHIVES else 'lra_release.gz'
    with pytest.raises(UserError) as raised:
        prepare(name, tmp_path, 1, silent)
    message = str(raised.value)
    assert f'put a copy of {file} at {tmp_path}/downloads/{name}/{file}' in message or (
        f'put a copy of it at {tmp_path}/downloads/{name}/{file}' in message
    )
    assert f'{substitute} needs no download' in message and '\n' not in message
    assert not builder(data_dir=tmp_path).data_path.exists()
    with pytest.raises(UserError, match=rf'run: attnlab data prepare {name} --data_dir={tmp_path}; {substitute} needs'):
        Prepared(name, str(tmp_path)).rows('train')


def test_an_archive_that_is_cut_off_or_none_is_named(tmp_path, monkeypatch):
    whole = archive({f'aclImdb/train/pos/{index}_9.txt': bytes(range(256)) * 40 for index in range(40)})
    for number, content in enumerate((whole[: len(whole) // 2], b'no archive at all')):
        folder = tmp_path / str(number)
        path = put(folder, 'imdb', content)
        expect(monkeypatch, 'imdb', content)
        with pytest.raises(UserError, match=f'{path} cannot be read as a tar archive'):
            prepare('imdb', folder, 1, silent)


def test_a_conversion_that_is_interrupted_is_made_anew(tmp_path, monkeypatch):
    members = {
        f'aclImdb/{split}/pos/{number}_9.txt': b'%d' % number for split in ('train', 'test') for number in range(3)
    }
    content = archive(members)
    put(tmp_path, 'imdb', content)
    expect(monkeypatch, 'imdb', content)
    whole = builders.ImdbBuilder._converted

    def interrupted(self, archive, split):
        yield next(whole(self, archive, split))
        raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr(builders.ImdbBuilder, '_converted', interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare('imdb', tmp_path, 1, silent)
    with pytest.raises(UserError, match='run: attnlab data prepare imdb'):
        Prepared('imdb', str(tmp_path)).rows('train')
    assert prepare('imdb', tmp_path, 1, silent).fresh
    assert contents(Prepared('imdb', str(tmp_path)), 'train') == [(b'0', 1), (b'1', 1), (b'2', 1)]


def test_the_checksums_are_those_of_the_catalogue():
    root = pathlib.Path(tfds.__file__).parent
    tables = [
        *(f'url_checksums/{n}.txt' for n in ('cifar10', 'cifar100', 'mnist', 'fashion_mnist')),
        *(f'datasets/{n}/checksums.tsv' for n in ('imdb_reviews', 'speech_commands', 'imagenette')),
    ]
    lines = [line.split('\t') for table in tables for line in (root / table).read_text().splitlines()]
    known = {line[0]: (int(line[1]), line[2]) for line in lines}
    for name, builder in ARCHIVES.items():
        assert known[ADDRESSES[name]] == (builder.size, builder.sha256)
    for name in IDX:
        builder = builders.BUILDERS[name]
        assert len(builder.parts) == 4
        assert {f'{IDX[name]}/{part}': number for part, number in builder.parts.items()}.items() <= known.items()


@pytest.fixture
def served(monkeypatch):
    """Serves objects by name over HTTP, in the place of the official servers."""
    objects, log = {}, []
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), functools.partial(Cloud, objects, log))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    address = f'http://127.0.0.1:{server.server_address[1]}'
    monkeypatch.setattr(builders.ImdbBuilder, 'url', f'{address}/any/aclImdb_v1.tar.gz')
    monkeypatch.setattr(builders.AanBuilder, 'storage', address)
    yield objects, log
    server.shutdown()
    server.server_close()
    thread.join()


REVIEWS = {'aclImdb/train/pos/0_9.txt': b'good', 'aclImdb/test/neg/0_1.txt': b'bad'}


def test_a_download_over_http(tmp_path, monkeypatch, served):
    objects, log = served
    objects['aclImdb_v1.tar.gz'] = archive(REVIEWS)
    expect(monkeypatch, 'imdb', objects['aclImdb_v1.tar.gz'])
    prepare('imdb', tmp_path, 1, silent)
    assert contents(Prepared('imdb', str(tmp_path)), 'train') == [(b'good', 1)]
    assert log == ['/any/aclImdb_v1.tar.gz']


def test_a_download_that_is_another_file_is_refused(tmp_path, monkeypatch, served):
    objects, _ = served
    expect(monkeypatch, 'imdb', archive(REVIEWS))
    objects['aclImdb_v1.tar.gz'] = archive(REVIEWS | {'aclImdb/train/neg/1_1.txt': b'slipped in'})
    with pytest.raises(UserError, match=r'aclImdb_v1.tar.gz is not the file at http.*: it has \d+ bytes, sha256'):
        prepare('imdb', tmp_path, 1, silent)
    assert not list((tmp_path / 'imdb').glob('*/dataset_info.json'))


def test_the_archive_of_the_arena_is_checked_against_its_listing(tmp_path, monkeypatch, served):
    objects, _ = served
    lines = b'1\ta\tb\tc\td\n'
    objects['lra_release.gz'] = archive({f'd/new_aan_pairs.{split}.tsv': lines for split in ('train', 'eval', 'test')})
    prepare('aan', tmp_path / 'right', 1, silent)
    assert contents(Prepared('aan', str(tmp_path / 'right')), 'valid') == [(b'c', 1)]
    listing = Cloud.listing
    monkeypatch.setattr(Cloud, 'listing', lambda self, query: listing(self, query).replace(b'"size": "', b'"size": "1'))
    with pytest.raises(UserError, match=r'lra_release.gz is not the file at .*: it has \d+ bytes, md5 '):
        prepare('aan', tmp_path / 'wrong', 1, silent)
