"""Drawn clouds against what their labels say, found again from the places of the points."""

import dataclasses

import numpy as np
import pytest

from attnlab.data.long_range.drawn import Drawn
from attnlab.data.vision.clouds import Ball, Box, Parts, Surfaces, Tapered
from attnlab.errors import UserError

EXAMPLES = 60


def examples(of, count=EXAMPLES):
    rows = Drawn(of).rows('train')
    return [rows[index] for index in range(count)]


def of_label(row, of, name):
    return row['x'][row['targets'] == of.labels.index(name)].astype(float)


def flatness(points):
    """The least of the standard deviations along any direction."""
    return np.linalg.svd(points - points.mean(axis=0), compute_uv=False)[-1] / np.sqrt(len(points))


@pytest.mark.parametrize('of', [Surfaces(), Parts()], ids=lambda of: type(of).__name__)
def test_a_cloud_follows_from_its_index(of):
    first, again, other = Drawn(of).rows('train')[5], Drawn(of).rows('train')[5], Drawn(of).rows('test')[5]
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first['x'], other['x'])
    rows = examples(of)
    found = np.stack([row['x'] for row in rows])
    assert found.shape == (EXAMPLES, of.kind.length, 3) and found.min() >= 0 and found.max() < 1
    counts = np.bincount(np.concatenate([row['targets'] for row in rows]), minlength=of.kind.classes)
    assert len(counts) == of.kind.classes and counts.min() > 0.02 * counts.sum()


def test_points_lie_on_their_surfaces_each_place_as_likely():
    rng, count = np.random.default_rng(0), 20_000
    ball = Ball((0.4, 0.5, 0.6), 0.2)
    ways = (ball.points(rng, count) - np.array(ball.centre)) / 0.2
    np.testing.assert_allclose(np.linalg.norm(ways, axis=1), 1)
    # The height of a place on a sphere is uniform: variance a third.
    np.testing.assert_allclose((ways**2).mean(axis=0), 1 / 3, atol=0.01)
    box = Box((0.5, 0.5, 0.5), (0.2, 0.4, 0.8))
    places = np.abs(box.points(rng, count) - 0.5) / np.array(box.size)
    assert places.max() == pytest.approx(0.5) and np.all(np.isclose(places, 0.5).any(axis=1))
    assert np.isclose(places[:, 0], 0.5).mean() == pytest.approx(2 * 0.4 * 0.8 / box.area, abs=0.02)
    cone = Tapered((0.1, 0.5, 0.5), 0.4, 0.3, 0.1)
    z, y, x = (cone.points(rng, count) - np.array(cone.foot)).T
    radius, foot, top = np.hypot(y, x), np.isclose(z, 0), np.isclose(z, 0.4)
    side = ~foot & ~top
    np.testing.assert_allclose(radius[side], 0.3 - 0.5 * z[side], atol=1e-12)
    assert foot.mean() == pytest.approx(np.pi * 0.3**2 / cone.area, abs=0.02)
    # Of a side that narrows from r to s, the mean height is h (r + 2 s) / (3 (r + s)).
    assert z[side].mean() == pytest.approx(0.4 * (0.3 + 0.2) / (3 * 0.4), abs=0.005)
    assert np.hypot(*(Tapered((0.0, 0.0, 0.0), 1.0, 0.1, 0.1).points(rng, 100).T[1:])).max() == pytest.approx(0.1)


def test_the_ground_is_flat_and_bodies_hover_over_it():
    of = Surfaces(noise=0.0)
    for row in examples(of):
        ground = of_label(row, of, 'ground')
        assert np.ptp(ground[:, 0]) < 1e-6
        bodies = row['x'][row['targets'] != 0]
        assert len(bodies) and bodies[:, 0].min() > ground[:, 0].max() + 0.1


def test_parts_are_where_they_belong():
    of = Parts(noise=0.0)
    seen = set()
    for row in examples(of):
        names = {of.labels[target] for target in np.unique(row['targets'])}
        seen.add(frozenset(names))
        height = {name: of_label(row, of, name)[:, 0] for name in names}
        plates = names & {'top', 'seat'}
        if plates:
            (plate,) = plates
            assert height['leg'].max() < height[plate].max() and height['leg'].min() < 0.1
            assert (plate == 'seat') == ('back' in names)
        if 'back' in names:
            assert height['back'].min() >= np.median(height['seat']) - 0.03
            assert flatness(of_label(row, of, 'back')) < 0.03
        if 'shade' in names:
            assert height['base'].max() <= height['pole'].min() + 1e-6
            assert height['pole'].max() <= height['shade'].min() + 1e-6
    assert seen == {frozenset(names) for names in (('leg', 'top'), ('leg', 'seat', 'back'), ('base', 'pole', 'shade'))}


def test_clouds_are_turned_and_moved():
    of = Parts(noise=0.0)
    middles = np.array([row['x'][:, 1:].mean(axis=0) for row in examples(of)])
    assert middles.std(axis=0).min() > 0.03
    still = dataclasses.replace(of, noise=0.05)
    assert not np.array_equal(examples(still, 1)[0]['x'], examples(of, 1)[0]['x'])


@pytest.mark.parametrize(
    ('make', 'message'),
    [
        (lambda: Parts(points=4), 'Parts has points 4 and noise 0.004; it needs at least 16 points'),
        (lambda: Surfaces(noise=-1.0), 'and noise of at least 0'),
        (lambda: Surfaces(most=9), 'most of Surfaces is 9; the ground has room for 1 to 5 bodies'),
    ],
)
def test_wrong_sizes_are_named(make, message):
    with pytest.raises(UserError, match=message):
        make()
