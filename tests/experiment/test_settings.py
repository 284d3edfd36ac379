"""What experiments on language models set alike."""

import math

import pytest

from attnlab.experiment.settings import for_length, small_text
from configs import language


def small(recipe):
    found = language.get_config(f'zoo={recipe}').unlock()
    small_text(found, steps=7, batch=2, length=32)
    for_length(found, recipe)
    return found


def test_a_model_for_two_cores():
    found = small('mha')
    assert (found.steps, found.batch_size, found.length) == (7, 2, 32)
    assert (found.model.dim, found.model.stack.depth) == (64, 2)


@pytest.mark.parametrize(
    ('recipe', 'key', 'value'),
    [
        ('sigmoid_attention', 'weights.bias', -math.log(32)),
        ('clipped_softmax', 'weights.gamma', -0.375),
        ('ssmax', 'temperature.length', 32),
        ('ssmax_bias', 'temperature.length', 32),
    ],
)
def test_constants_of_the_training_length(recipe, key, value):
    mixer, (part, name) = small(recipe).model.stack.blocks[0].mixer, key.split('.')
    assert mixer[part][name] == value != language.get_config(f'zoo={recipe}').model.stack.blocks[0].mixer[part][name]
