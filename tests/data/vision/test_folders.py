"""Folders of images of one's own, and what is wrong with them."""

import shutil
import struct

import numpy as np
import pytest
from PIL import Image

from attnlab.config import build, spec_of
from attnlab.data.long_range.long_tailed import LongTailed
from attnlab.data.vision.folders import ImageFolder, image_folder, read_image
from attnlab.data.vision.resized import Resized
from attnlab.errors import UserError
from attnlab.tasks.images import ImageClassification


def fill(folder, level, count=10):
    """Images of one grey level each, a little wider than high."""
    folder.mkdir(parents=True)
    for number in range(count):
        Image.new('RGB', (14, 10), (level, level + number, 0)).save(folder / f'{number}.png')


def test_folders_of_classes_are_divided(tmp_path):
    for level, name in enumerate(('cat', 'dog')):
        fill(tmp_path / name, 100 * level)
    (tmp_path / 'empty').mkdir()
    (tmp_path / 'cat' / 'notes.txt').write_text('no image')
    data = image_folder(str(tmp_path), size=8)
    assert data.classes == ('cat', 'dog') and build(spec_of(data)) == data
    rows = {split: data.rows(split) for split in ('train', 'valid', 'test')}
    assert {split: len(of) for split, of in rows.items()} == {'train': 16, 'valid': 2, 'test': 2}
    seen = [tuple(row['x'][0]) for of in rows.values() for row in (of[i] for i in range(len(of)))]
    assert len(set(seen)) == 20
    assert all(row['x'].shape == (64, 3) and row['label'] == (row['x'][0, 0] >= 100) for row in rows['train'])
    row = ImageClassification(data).source('train', 64)[0]
    np.testing.assert_allclose(row['tokens'][0], (rows['train'][0]['x'][0] - 127.5) / 63.75, rtol=1e-6)
    assert data.describe()['counts'] == {'train': 16, 'valid': 2, 'test': 2}


def test_folders_of_splits_are_kept(tmp_path):
    fill(tmp_path / 'train' / 'cat', 0), fill(tmp_path / 'train' / 'dog', 100), fill(tmp_path / 'test' / 'dog', 100, 3)
    data = image_folder(str(tmp_path), size=4, channels=1)
    assert [len(data.rows(split)) for split in ('train', 'valid', 'test')] == [20, 3, 3]
    assert data.rows('test')[0]['label'] == 1 and data.rows('test')[0]['x'].shape == (16,)
    for same in (data, Resized(data, 8), LongTailed(data, ratio=2.0)):
        assert same.same_rows('valid', 'test') and not same.same_rows('train', 'test')


def test_hidden_files_and_folders_are_left_out(tmp_path):
    """Copies of notebooks, thumbnails, and what a Mac leaves beside each file on a foreign disk."""
    for name in ('cat', 'dog', '.ipynb_checkpoints'):
        for part in ('a', 'b/train', 'b/test'):
            fill(tmp_path / part / name, 0)
    fill(tmp_path / 'b' / '.thumbnails' / 'cat', 0)
    (tmp_path / 'a' / 'cat' / '._0.png').write_bytes(b'no image')
    for folder, counts in (('a', [16, 2, 2]), ('b', [20, 20, 20])):
        data = image_folder(str(tmp_path / folder), size=4)
        assert data.classes == ('cat', 'dog') and list(data.describe()['counts'].values()) == counts


@pytest.mark.parametrize('name', ['valid', 'val', 'validation'])
def test_a_folder_for_validation_has_either_name(tmp_path, name):
    for split, count in (('train', 12), (name, 5), ('test', 4)):
        fill(tmp_path / split / 'cat', 0, count), fill(tmp_path / split / 'dog', 100, count)
    data = image_folder(str(tmp_path), size=4)
    assert data.describe()['counts'] == {'train': 24, 'valid': 10, 'test': 8}
    assert {path.parts[-3] for path, _ in data.rows('valid').files} == {name} and not data.same_rows('valid', 'test')
    fill(tmp_path / 'held_out' / 'cat', 0, 2)
    message = r"folders of classes in .* are \['held_out', .*\]; they must be train, test and one of valid, val, valid"
    with pytest.raises(UserError, match=message):
        image_folder(str(tmp_path), size=5).rows('valid')


def test_images_are_cut_around_their_middle(tmp_path):
    picture = np.zeros((4, 12, 3), np.uint8)
    picture[:, 4:8] = 200
    Image.fromarray(picture).save(tmp_path / 'wide.png')
    assert (read_image(tmp_path / 'wide.png', 4, 1) == 200).all()
    Image.fromarray(picture).convert('L').save(tmp_path / 'grey.png')
    assert read_image(tmp_path / 'grey.png', 4, 3).shape == (4, 4, 3)


@pytest.mark.parametrize(
    'orientation, turned',
    [(1, np.array), (2, np.fliplr), (3, lambda x: np.rot90(x, 2)), (6, lambda x: np.rot90(x, -1))],
)
def test_photographs_stand_upright_whatever_else_is_said_of_them(tmp_path, orientation, turned):
    width_as_text = struct.pack('>HHI4s', 0x0100, 2, 3, b'ab')
    entries = [width_as_text, struct.pack('>HHIHH', 0x0112, 3, 1, orientation, 0)]
    exif = b'Exif\0\0MM\0*' + struct.pack('>IH', 8, len(entries)) + b''.join(entries) + bytes(4)
    lying = np.kron(np.array([[0, 80], [160, 240]], np.uint8), np.ones((8, 8), np.uint8))
    Image.fromarray(lying).save(tmp_path / 'photograph.jpg', exif=exif, quality=100)
    found = read_image(tmp_path / 'photograph.jpg', 16, 1).astype(int)
    assert np.max(np.abs(found - turned(lying))) < 10


def test_what_is_wrong_is_named(tmp_path):
    with pytest.raises(UserError, match=r'there is no folder .*nowhere; images of a class are read from a folder of'):
        image_folder(str(tmp_path / 'nowhere'))
    fill(tmp_path / 'one', 0, 1)
    with pytest.raises(UserError, match=r'0\.png is a file; images of a class are read from a folder of'):
        image_folder(str(tmp_path / 'one' / '0.png'))
    shutil.rmtree(tmp_path / 'one')
    with pytest.raises(UserError, match='has images of 0 class'):
        image_folder(str(tmp_path))
    fill(tmp_path / 'cat', 0, 3)
    fill(tmp_path / 'dog', 0, 3)
    with pytest.raises(UserError, match='has no valid images; a class needs at least ten, or a folder valid/CLASS'):
        image_folder(str(tmp_path)).rows('train')
    with pytest.raises(UserError, match='size must be at least 1, and channels 1'):
        image_folder(str(tmp_path), channels=4)
    with pytest.raises(UserError, match="has no split 'tests'; did you mean 'test'"):
        image_folder(str(tmp_path)).rows('tests')
    (tmp_path / 'broken.png').write_bytes(b'\x89PNG\r\n\x1a\nnot really')
    with pytest.raises(UserError, match=r'broken\.png is not an image that can be read'):
        read_image(tmp_path / 'broken.png', 8, 3)
    Image.new('RGB', (4, 4)).save(tmp_path / 'whole.tif')
    # What says which colours its numbers are has another tag, so that there is nothing that says it.
    damaged = (tmp_path / 'whole.tif').read_bytes().replace(b'\x06\x01\x03\x00', b'\x06\x02\x03\x00')
    (tmp_path / 'damaged.tif').write_bytes(damaged)
    with pytest.raises(UserError, match=r'damaged\.tif is not an image that can be read'):
        read_image(tmp_path / 'damaged.tif', 8, 3)
    fill(tmp_path / 'split' / 'train' / 'cat', 0)
    fill(tmp_path / 'split' / 'train' / 'dog', 0)
    fill(tmp_path / 'split' / 'test' / 'cow', 0)
    with pytest.raises(UserError, match=r"(test|valid) images of .* have the class 'cow', which is not among classes"):
        image_folder(str(tmp_path / 'split')).rows('test')
    assert ImageFolder(path='x', classes=('a', 'b')).kind.channels == 3


def test_what_follows_class_by_class_is_asked_all_over(tmp_path):
    for split in ('train', 'test'):
        for level, name in enumerate(('cat', 'dog', 'owl')):
            fill(tmp_path / split / name, 60 * level, 12)
    task = ImageClassification(image_folder(str(tmp_path), size=4))
    part = task.slices('test', 16, (1,), 9)['all']
    assert [int(part.source[i]['label']) for i in range(9)] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert task.trivial(part)['accuracy']['majority'] == pytest.approx(1 / 3)
    shown = task.source('test', 16, tokens=3 * 16)
    assert [int(shown[i]['label']) for i in range(len(shown))] == [0, 1, 2]


def test_other_formats_than_those_of_the_names_are_not_opened(tmp_path):
    (tmp_path / 'x.png').write_bytes(b'%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n')
    with pytest.raises(UserError, match=r'x.png is not an image that can be read: cannot identify'):
        read_image(tmp_path / 'x.png', 4, 3)


@pytest.mark.parametrize(
    ('name', 'dtype', 'mode'),
    [('x.png', np.uint16, 'I;16'), ('x.tif', np.uint16, 'I;16'), ('x.tif', np.int32, 'I'), ('x.tif', np.float32, 'F')],
)
@pytest.mark.parametrize('channels', [1, 3])
def test_images_of_more_levels_than_bytes_have_are_refused(tmp_path, name, dtype, mode, channels):
    """Made bytes of, levels above 255 would all be white, and those of fractions black."""
    Image.fromarray(np.linspace(0, 1000, 64).reshape(8, 8).astype(dtype)).save(tmp_path / name)
    with pytest.raises(UserError, match=rf'{name} has pixels of mode {mode}, .* save it with 8 bits a channel'):
        read_image(tmp_path / name, 4, channels)
