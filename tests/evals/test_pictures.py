"""Pictures of segments and of receptive fields, of models whose fields are known."""

import dataclasses
import pathlib

import numpy as np
import pytest
from flax import nnx
from PIL import Image

from attnlab.configuration import config_of
from attnlab.data.long_range.drawn import Drawn
from attnlab.data.vision.shapes import Count, Segments
from attnlab.errors import UserError
from attnlab.evals.cadence import AtEnd
from attnlab.evals.pictures import COLOURS, ReceptiveField, SegmentPictures, side_of
from attnlab.tasks.images import ImageClassification, Segmentation
from attnlab.train.setup import prepare

CONFIG = pathlib.Path(__file__).parents[2] / 'configs' / 'images.py'


def untrained(arguments, task, depth=1, **mixer):
    """A model of 16 x 16 pixels, 4 x 4 patches, as it is made."""
    config = config_of(CONFIG, arguments)
    with config.unlocked():
        config.model.dim, config.model.stack.depth = 16, depth
        config.model.inputs.update(size=(16, 16), patch=4)
        config.length = 256
        for block in config.model.stack.blocks:
            block.mixer.update(mixer)
    setup = dataclasses.replace(prepare(config), task=task)
    return setup, setup.initialize().variables


def test_the_field_of_windows_is_the_window_of_the_token_in_the_middle(tmp_path):
    task = ImageClassification(Drawn(Count(size=16, most=2), held_out=4))
    setup, variables = untrained('zoo=swin,data=count', task, side=2)
    field = ReceptiveField(AtEnd(), count=4).evaluate(setup, variables)
    inside = np.zeros((16, 16), bool)
    # Windows of 2 x 2 patches; the patch at (2, 2) is the first of its window.
    inside[8:, 8:] = True
    assert field.seen.max() == 1 and not field.seen[~inside].any()
    assert (field.seen[8:12, 8:12] > 0).all() and field.seen[12:, 12:].any()
    field.draw(tmp_path)
    sheet = np.asarray(Image.open(tmp_path / 'receptive_field.png'))
    assert sheet.shape == (384, 384, 3) and not sheet[:192].any() and sheet[192:, 192:].max() == 255
    everywhere, _ = untrained('zoo=mha,data=count', task)
    seen = ReceptiveField(AtEnd(), count=4).evaluate(everywhere, everywhere.initialize().variables)
    assert (seen.seen > 0).all() and seen.numbers['side_most'] > field.numbers['side_half']


def test_the_side_is_of_the_least_square_that_holds_the_share():
    seen = np.zeros((9, 9))
    seen[4, 4] = seen[4, 5] = 1
    seen[0, 4] = 2
    assert [side_of(seen, [4, 4], share) for share in (0.25, 0.5, 0.51, 1.0)] == [1, 3, 9, 9]


def test_classes_stand_below_their_images(tmp_path):
    task = Segmentation(Drawn(Segments(size=16, most=2), held_out=4), patch=4)
    setup, variables = untrained('zoo=mha,data=segments', task)
    found = SegmentPictures(AtEnd(), count=3).evaluate(setup, variables)
    assert found.images.shape == (3, 16, 16, 1) and found.true.shape == found.found.shape == (3, 4, 4)
    assert found.numbers['accuracy'] == np.mean(found.true == found.found)
    row = task.source('test', 256)[1]
    np.testing.assert_array_equal(found.true[1].reshape(-1), row['targets'])
    found.draw(tmp_path)
    sheet = np.asarray(Image.open(tmp_path / 'segmented.png'))
    times = sheet.shape[0] // 3 // 16
    high = 16 * times + 2
    assert sheet.shape == (3 * high, 3 * high, 3)
    for place, classes in ((1, found.true), (2, found.found)):
        middles = sheet[place * high + 2 * times : (place + 1) * high - 2 : 4 * times, 2 * times : high - 2 : 4 * times]
        np.testing.assert_array_equal(middles, COLOURS[classes[0]])


def test_mistakes_are_named():
    with pytest.raises(UserError, match='count of ReceptiveField is 0; it must be at least 1'):
        ReceptiveField(AtEnd(), count=0)
    with pytest.raises(UserError, match='count of SegmentPictures is 0'):
        SegmentPictures(AtEnd(), count=0)
    setup = prepare(config_of(CONFIG, 'data=count'))
    with pytest.raises(UserError, match='SegmentPictures shows classes of patches; the task is ImageClassification'):
        SegmentPictures(AtEnd()).load_data(setup)
    clouds = prepare(config_of(CONFIG, 'data=parts'))
    with pytest.raises(UserError, match='ReceptiveField is of models of images; the task is PointSegmentation'):
        ReceptiveField(AtEnd()).load_data(clouds)
    with_token = prepare(config_of(CONFIG, 'data=count,token=first'))
    with pytest.raises(UserError, match='whose tokens lie on a grid of two axes; use token=mean'):
        ReceptiveField(AtEnd(), count=1).evaluate(with_token, nnx.State({}))
    # Before anything is trained.
    with pytest.raises(UserError, match='whose tokens lie on a grid of two axes; use token=mean'):
        ReceptiveField(AtEnd()).load_data(with_token)
    ReceptiveField(AtEnd()).load_data(prepare(config_of(CONFIG, 'data=count,token=mean')))
