"""Windows of one's own with labels."""

import pathlib
import zipfile

import numpy as np
import pytest

from attnlab.data.long_range.dataset import divided
from attnlab.data.series.labelled import labelled_windows
from attnlab.errors import UserError

RNG = np.random.default_rng(0)
X, LABEL = RNG.normal(3.0, 2.0, (50, 6, 2)), np.arange(50) % 3


def saved(folder, **arrays):
    path = folder / 'windows.npz'
    np.savez(path, **arrays)
    return str(path)


def test_a_file_without_splits_is_divided_and_scaled_by_training(tmp_path):
    data = labelled_windows(saved(tmp_path, x=X, label=LABEL))
    assert (data.kind.classes, data.kind.length, data.kind.channels) == (3, 6, 2)
    found = {split: data.rows(split) for split in data.splits}
    assert {split: len(rows) for split, rows in found.items()} == {'train': 40, 'valid': 5, 'test': 5}
    train = np.stack([row['x'] for row in found['train']])
    np.testing.assert_allclose(train.mean(axis=(0, 1)), 0, atol=1e-5)
    np.testing.assert_allclose(train.std(axis=(0, 1)), 1, rtol=1e-4)
    labels = [int(row['label']) for rows in found.values() for row in rows]
    assert sorted(labels) == sorted(LABEL.tolist())


def test_splits_of_a_file_are_kept_and_test_reaches_no_scale(tmp_path):
    arrays = {'x_train': X[:, :, 0], 'label_train': LABEL, 'label_test': np.array([2, 0])}
    data = labelled_windows(saved(tmp_path, x_test=X[:2, :, 0], **arrays))
    first = [row['x'] for row in data.rows('train')]
    assert first[0].shape == (6,) and [int(row['label']) for row in data.rows('test')] == [2, 0]
    assert len(data.rows('valid')) == 2
    assert data.same_rows('valid', 'test') and data.same_rows('train', 'train') and not data.same_rows('train', 'test')
    with pytest.raises(UserError, match="has no split 'tset'; did you mean 'test'"):
        data.same_rows('tset', 'test')
    (tmp_path / 'poisoned').mkdir()
    poisoned = labelled_windows(saved(tmp_path / 'poisoned', x_test=1e6 * X[:2, :, 0], **arrays))
    np.testing.assert_array_equal(first, [row['x'] for row in poisoned.rows('train')])


def test_a_variate_that_is_constant_in_training_has_unit_one(tmp_path):
    x = np.stack([np.full((50, 6), 21.7), X[:, :, 0]], axis=2)
    test = x[:2] + np.array([1.0, 0.0])
    data = labelled_windows(saved(tmp_path, x_train=x, label_train=LABEL, x_test=test, label_test=LABEL[:2]))
    train, test = (np.stack([row['x'] for row in data.rows(split)]) for split in ('train', 'test'))
    np.testing.assert_array_equal(train[:, :, 0], 0.0)
    np.testing.assert_allclose(test[:, :, 0], 1.0, rtol=1e-6)
    np.testing.assert_allclose(train[:, :, 1].std(), 1.0, rtol=1e-5)


@pytest.mark.parametrize('name', ['valid', 'val', 'validation'])
def test_windows_for_validation_have_either_name(tmp_path, name):
    ends = {'train': 40, name: 7, 'test': 3}
    arrays = {f'{array}_{end}': of[:count] for array, of in (('x', X), ('label', LABEL)) for end, count in ends.items()}
    data = labelled_windows(saved(tmp_path, x_mean=X.mean(0), **arrays))
    assert [len(data.rows(split)) for split in ('train', 'valid', 'test')] == [40, 7, 3]
    assert not data.same_rows('valid', 'test')


@pytest.mark.parametrize(
    ('arrays', 'sentence'),
    [
        ({'x': X}, "has no array 'label'; it needs x and label"),
        ({'x': X, 'label': LABEL[:9]}, 'label as many whole numbers from 0'),
        ({'x': X, 'label': LABEL - 1}, 'label as many whole numbers from 0'),
        ({'x': np.full_like(X, np.nan), 'label': LABEL}, 'x must be finite numbers'),
        ({'x': X[:, :0], 'label': LABEL}, 'x must be finite numbers, n t or n t v'),
        (
            {'x_train': X, 'label_train': LABEL, 'x_test': X[:0], 'label_test': LABEL[:0]},
            'every split needs windows',
        ),
        ({'x': X, 'label': np.zeros(50, int)}, 'has windows of one class'),
        ({'x': X, 'label': np.full(50, 3)}, 'has windows of one class'),
        ({'x': X, 'label': LABEL + 1}, 'has labels up to 3 and no training windows of 0; number the classes that'),
        ({'x': X, 'label': 2 * LABEL}, 'has labels up to 4 and no training windows of 1; number the classes that'),
        ({'x_train': X, 'label_train': LABEL * 2, 'x_test': X, 'label_test': LABEL}, 'no class that training has not'),
        ({'x_train': X, 'label_train': LABEL}, "has no array 'x_test'"),
        (
            {f'{array}_{end}': of for array, of in (('x', X), ('label', LABEL)) for end in ('dev', 'test', 'train')},
            r"splits of .* are \['dev', 'test', 'train'\]; they must be train, test and one of valid, val, validation",
        ),
        (
            {'x_train': X, 'label_train': LABEL, 'x_test': X, 'label_test': LABEL + 1},
            'no class that training has not',
        ),
    ],
)
def test_mistakes_are_named(tmp_path, arrays, sentence):
    with pytest.raises(UserError, match=sentence):
        labelled_windows(saved(tmp_path, **arrays))


def test_members_that_cannot_be_read_are_named(tmp_path):
    objects = saved(tmp_path, x=np.array([[1, None]], dtype=object), label=LABEL)
    with pytest.raises(UserError, match='has an x or label that cannot be read as numbers: Object arrays'):
        labelled_windows(objects)
    path = pathlib.Path(saved(tmp_path, x=X, label=LABEL))
    content = path.read_bytes()
    path.write_bytes(content.replace(b"{'descr'", b"{'de(((", 1))
    with pytest.raises(UserError, match='has an x or label that cannot be read as numbers'):
        labelled_windows(str(path))
    # Compressed in a way that Python does not know, by the number where the member begins and in the directory.
    unknown = bytearray(content)
    for place in (8, content.index(b'PK\1\2') + 10):
        unknown[place] = 97
    path.write_bytes(unknown)
    with pytest.raises(UserError, match='has an x or label that cannot be read as numbers: That compression method'):
        labelled_windows(str(path))
    # A header that claims 10^18 numbers more than there are.
    with zipfile.ZipFile(tmp_path / 'huge.npz', 'w') as archive, archive.open('label.npy', 'w') as label:
        np.lib.format.write_array(label, LABEL)
    with zipfile.ZipFile(tmp_path / 'huge.npz', 'a') as archive, archive.open('x.npy', 'w') as x:
        np.lib.format.write_array_header_1_0(x, {'descr': '<f8', 'fortran_order': False, 'shape': (50, 10**15)})
    with pytest.raises(UserError, match='has an x or label that cannot be read as numbers: Unable to allocate'):
        labelled_windows(str(tmp_path / 'huge.npz'))


def test_another_file_is_named(tmp_path):
    for content in (b'no archive', b''):
        (tmp_path / 'a.npz').write_bytes(content)
        with pytest.raises(UserError, match='cannot be read as a file of numpy'):
            labelled_windows(str(tmp_path / 'a.npz'))


def test_the_order_by_which_data_are_divided_does_not_change():
    """Runs that were made are evaluated on what they were not trained on only as long as it is the same."""
    found = {split: places.tolist() for split, places in divided(12).items()}
    assert found == {'valid': [4], 'test': [1], 'train': [10, 9, 6, 5, 7, 0, 3, 2, 11, 8]}
