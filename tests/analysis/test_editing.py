"""Rank-one edits: the key has the value, other keys change least, and a model answers as it is told."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.analysis.editing import Edit, Editor, rank_one
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.quantize.formats import Symmetric
from attnlab.quantize.layers import Quantization
from attnlab.quantize.training import Rounded
from tests.analysis.test_parts import made


def test_the_change_is_the_least_that_does_it():
    rng = np.random.default_rng(0)
    weight, key, value = rng.standard_normal((5, 3)), rng.standard_normal(5), rng.standard_normal(3)
    keys = rng.standard_normal((40, 5)) * [1, 2, 3, 4, 5]
    moments = keys.T @ keys / 40
    changed = rank_one(weight, key, value, moments)
    np.testing.assert_allclose(key @ changed, value)
    assert np.linalg.matrix_rank(changed - weight) == 1
    # Of all weights that do it, another way that leads away from it changes other keys by more.
    aside = rng.standard_normal((5, 3))
    aside -= np.outer(key, key @ aside) / (key @ key)

    def change(amount):
        return np.sum((keys @ (changed + amount * aside - weight)) ** 2)

    assert change(0) < min(change(1e-3), change(-1e-3))
    assert change(1e-3) - change(0) == pytest.approx(change(-1e-3) - change(0), rel=1e-3)


@pytest.mark.parametrize('name', ['nope', 'mamba'])
@pytest.mark.parametrize('branch', ['mixer', 'mlp'])
def test_a_model_answers_as_it_is_told(name, branch):
    model = made(name, **({'heads': 2} if name == 'nope' else {}))
    prompts = jnp.asarray([[1, 2, 3, 0], [4, 5, 6, 0], [2, 6, 1, 0], [5, 1, 4, 0]])
    how = Edit(layer=1, branch=branch, steps=120)
    editor = Editor(model, how, at=3, asked=3)
    before = model.logits(model.hidden(prompts, Context.full(4, 4))[0][:, 3])
    target = int(jnp.argmin(before[0]))
    changed = editor(prompts[:1], target, editor.moments(prompts))
    after = changed.logits(changed.hidden(prompts, Context.full(4, 4))[0][:, 3])
    assert int(jnp.argmax(after[0])) == target
    old, new = (
        getattr(each.stack.blocks[0], branch).__dict__['output' if branch == 'mixer' else 'down'].weight[...]
        for each in (model, changed)
    )
    np.testing.assert_array_equal(old[0], new[0])
    assert np.linalg.matrix_rank(np.asarray(new[1] - old[1]), tol=1e-4) == 1


def test_keys_of_padding_do_not_count():
    editor = Editor(made('nope', heads=2), Edit(layer=1), at=1, asked=1)
    rows = jnp.asarray([[1, 2, 3, 0], [4, 5, 6, 0]])
    padded = dataclasses.replace(Context.full(2, 4), segments=jnp.asarray([[1, 1, 1, 0]] * 2))
    other = rows.at[:, 3].set(6)
    found, changed, whole = (editor.moments(each, ctx) for each, ctx in ((rows, padded), (other, padded), (rows, None)))
    np.testing.assert_allclose(found, changed, rtol=1e-6)
    np.testing.assert_allclose(found, editor.moments(rows[:, :3]), rtol=1e-4, atol=1e-6)
    assert np.abs(found - whole).max() > 1e-3 * np.abs(whole).max()


def test_what_cannot_be_edited_is_said():
    with pytest.raises(UserError, match="branch of Edit is 'head'"):
        Edit(layer=0, branch='head')
    model = made('nope', heads=2)
    with pytest.raises(UserError, match='--layer is 2; the model has layers 0 to 1'):
        Editor(model, Edit(layer=2), at=0, asked=3)
    with pytest.raises(UserError, match='at is 3 and asked 1'):
        Editor(model, Edit(layer=0), at=3, asked=1)
    for few in (Quantization(Symmetric(4)), Rounded(Symmetric(4))):
        with pytest.raises(UserError, match='Linear, not a Linear that computes with its weights as they are'):
            Editor(few(made('nope', heads=2)), Edit(layer=0), at=0, asked=3)
