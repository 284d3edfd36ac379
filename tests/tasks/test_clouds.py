"""Points labelled by the voxels that they lie in."""

import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.configuration import config_of
from attnlab.data.long_range.drawn import Drawn
from attnlab.data.vision.clouds import Parts
from attnlab.data.vision.shapes import Count
from attnlab.errors import UserError
from attnlab.tasks.clouds import FEATURES, OccupiedSegmentation, PointSegmentation, SparseSegmentation, voxels_of
from attnlab.tasks.task import Guessable, Sliced, Task, context
from attnlab.train.setup import prepare
from tests.tasks.test_images import Oracle

CONFIG = pathlib.Path(__file__).parents[2] / 'configs' / 'images.py'
SMALL = Drawn(Parts(points=64), train=40, held_out=20)
TASK = PointSegmentation(SMALL, side=4)


def batch_of(count, task=TASK):
    rows = [task.source('test', 64)[index] for index in range(count)]
    return {name: jnp.asarray(np.stack([row[name] for row in rows])) for name in rows[0]}


def test_voxels_are_counted_and_described_by_their_points():
    assert isinstance(TASK, Task) and isinstance(TASK, Sliced) and isinstance(TASK, Guessable)
    row, cloud = TASK.source('test', 64)[3], SMALL.rows('test')[3]
    assert row['tokens'].shape == (64, FEATURES)
    for place in range(64):
        corner = np.array(np.unravel_index(place, (4, 4, 4)))
        inside = np.all(np.floor(cloud['x'] * 4) == corner, axis=1)
        np.testing.assert_array_equal(row['voxels'] == place, inside)
        count = inside.sum()
        mean = (2 * (cloud['x'][inside].astype(float) * 4 - corner) - 1).mean(axis=0) if count else np.zeros(3)
        np.testing.assert_allclose(row['tokens'][place], [count > 0, np.log1p(count), *mean], atol=1e-5)
    np.testing.assert_array_equal(row['targets'], cloud['targets'])
    example = TASK.example(64)
    assert {name: (value.shape, value.dtype) for name, value in row.items()} == {
        name: (value.shape, value.dtype) for name, value in example.items()
    }
    assert not any(value.any() for value in example.values())
    edge = np.array([[1.0, 0.0, 0.5]], np.float32)
    assert voxels_of(edge, 4).tolist() == [3 * 16 + 2]


def test_a_point_has_the_prediction_of_its_voxel():
    batch = batch_of(3)
    voxels, targets = (np.asarray(batch[name]) for name in ('voxels', 'targets'))
    by_voxel = np.random.default_rng(0).integers(0, 7, (3, 64))
    found = np.take_along_axis(by_voxel, voxels, axis=1)
    measured = TASK.measure(Oracle(20 * jnp.eye(7)[by_voxel]), batch, None)
    assert float(measured['accuracy'].mean()) == pytest.approx(np.mean(found == targets))
    union, both = ((found == 1) | (targets == 1)).sum(), ((found == 1) & (targets == 1)).sum()
    assert float(measured['iou_1'].mean()) == pytest.approx(both / union)
    with pytest.raises(UserError, match='side of PointSegmentation is 4, 64 voxels; the model has 16 hidden states'):
        TASK.measure(Oracle(jnp.zeros((3, 16, 7))), batch, None)


def test_occupied_voxels_are_those_with_points_and_the_rest_is_padding():
    sparse = OccupiedSegmentation(SMALL, side=4)
    for index in range(5):
        row, dense = (task.source('test', 64)[index] for task in (sparse, TASK))
        count = int(row['segments'].sum())
        assert count == len(set(dense['voxels'])) < 64
        assert (row['segments'][:count] == 1).all() and not row['tokens'][count:].any()
        places = row['tokens'][:count, FEATURES:].astype(int)
        numbers = np.ravel_multi_index(tuple(places.T), (4, 4, 4))
        assert (np.diff(numbers) > 0).all() and (row['tokens'][:count, 0] == 1).all()
        np.testing.assert_array_equal(row['tokens'][:count, :FEATURES], dense['tokens'][numbers])
        np.testing.assert_array_equal(numbers[row['voxels']], dense['voxels'])
        np.testing.assert_array_equal(sparse.places(row), dense['voxels'])
        np.testing.assert_array_equal(row['targets'], dense['targets'])
        assert {name: value.shape for name, value in row.items()} == {
            name: value.shape for name, value in sparse.example(64).items()
        }
    part = sparse.slices('test', 64, (1,), 20)['all']
    assert sparse.trivial(part) == TASK.trivial(TASK.slices('test', 64, (1,), 20)['all'])


def test_padding_of_a_cloud_is_not_read():
    """Points are told alike whatever stands in the tokens that are over."""
    setup = prepare(config_of(CONFIG, 'zoo=mha,data=parts,voxels=occupied,side=4'))
    batch = batch_of(2, OccupiedSegmentation(Drawn(Parts(points=64), held_out=2), side=4))
    model = nnx.merge(setup.graphdef, setup.initialize().variables)
    padding = np.asarray(batch['segments'])[:, :, None] == 0
    other = batch | {'tokens': jnp.where(padding, 3.0, batch['tokens'])}
    (one, _), (same, _) = (model.hidden(each['tokens'], context(each)) for each in (batch, other))
    read = ~padding[:, :, 0]
    assert padding.any() and not np.allclose(one[~read], same[~read])
    np.testing.assert_allclose(one[read], same[read], rtol=1e-5, atol=1e-5)


def test_trivial_guesses():
    clouds = Drawn(Parts(points=64), train=300, held_out=20)
    task = PointSegmentation(clouds)
    found = task.trivial(task.slices('test', 64, (1,), 20)['all'])['accuracy']
    assert set(found) == {'chance', 'majority', 'class of the place'}
    shown = np.concatenate([clouds.rows('train')[index]['targets'] for index in range(300)])
    asked = np.concatenate([clouds.rows('test')[index]['targets'] for index in range(20)])
    assert found['majority'] == pytest.approx(np.mean(asked == np.bincount(shown).argmax()))
    # The height of a point says much of what it is a part of.
    assert found['chance'] == pytest.approx(1 / 7) and found['class of the place'] > found['majority'] + 0.05


def test_mistakes_are_named():
    with pytest.raises(UserError, match=r'config.length is 256; clouds of 64 points need 64'):
        TASK.source('train', 256)
    with pytest.raises(UserError, match='holds no clouds of points'):
        PointSegmentation(Drawn(Count()))
    with pytest.raises(UserError, match='side of PointSegmentation is 0'):
        PointSegmentation(SMALL, side=0)


def test_voxels_without_points_are_empty_places():
    task = SparseSegmentation(side=4)
    row, whole = (kind.source('train', kind.data.kind.length)[2] for kind in (task, PointSegmentation(side=4)))
    assert row['segments'].shape == (64,) and 0 < row['segments'].sum() < 64
    assert set(np.flatnonzero(row['segments'])) == set(row['voxels'])
    np.testing.assert_array_equal(row['tokens'], whole['tokens'])
    assert task.packs and not task.example(task.data.kind.length)['segments'].any()
