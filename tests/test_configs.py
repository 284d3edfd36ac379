"""Every config builds, and its training step and evaluation are traced with shapes in place of arrays."""

import jax
import jax.numpy as jnp
import pytest

from attnlab.errors import UserError
from attnlab.train.setup import prepare
from attnlab.zoo import ZOO
from configs import language, recall

QUICK = ('mha', 'gla', 'mamba')
"""Recipes that are traced in every run of the tests; the others are, too, but only in the slow ones."""

zoo = pytest.mark.parametrize(
    'name', [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in ZOO]
)


def prepared(config):
    """The setup of a config of which a layer a place and two rows are left: shapes are all there is to check."""
    with config.unlocked():
        config.model.stack.depth = len(config.model.stack.blocks)
        config.batch_size = 2
    return prepare(config)


@zoo
def test_language(name):
    config = language.get_config(f'zoo={name}')
    with config.unlocked():
        config.length = 32
    prepared(config).trace()


@zoo
def test_recall_by_any_recipe(name):
    prepared(recall.get_config(f'zoo={name}')).trace()


@pytest.mark.parametrize('name', recall.TINY)
def test_recall_on_every_task(name):
    setup = prepared(recall.get_config(f'task={name}'))
    setup.trace()
    for part in setup.task.slices('test', setup.length, (1,), 2).values():
        batch = {name: jax.ShapeDtypeStruct((2, *value.shape), value.dtype) for name, value in part.source[0].items()}
        measured = jax.eval_shape(setup.measure, setup.abstract.params, batch)
        assert all(average.total.dtype == jnp.float32 for average in measured.values())


@pytest.mark.parametrize('argument', [f'task={name},size={size}' for size in recall.SIZES for name in recall.TINY])
def test_recall_draws_what_it_says(argument):
    setup = prepared(recall.get_config(argument))
    setup.load_data()
    row = setup.task.source('train', setup.length)[0]
    example = setup.task.example(setup.length)
    assert {name: (value.shape, value.dtype) for name, value in row.items()} == {
        name: (value.shape, value.dtype) for name, value in example.items()
    }
    assert not any(value.any() for value in example.values())


@pytest.mark.parametrize(
    ('argument', 'message'),
    [
        ('task=mqra', "there is no task=mqra; did you mean 'mqar'"),
        ('zoo=glaa', "there is no zoo=glaa; did you mean 'gla'"),
        ('size=large', 'there is no size=large; valid names: paper, tiny'),
        ('tsk=mqar', "did you mean 'task'"),
    ],
)
def test_mistakes_name_the_nearest(argument, message):
    with pytest.raises(UserError, match=message):
        recall.get_config(argument)


def test_every_task_has_every_size():
    assert recall.TINY.keys() == recall.PAPER.keys()
