"""Models that keep statistics between the steps of a sampler."""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest
from flax import nnx

from attnlab.configuration import config_of
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.evals.cadence import AtEnd
from attnlab.evals.drawn import Drawings
from attnlab.mixers.softmax.reused import Reuse
from attnlab.models.reusing import begun, reusing
from attnlab.train.setup import prepare

CONFIG = pathlib.Path(__file__).parents[2] / 'configs' / 'images.py'


def untrained(zoo):
    config = config_of(CONFIG, f'predict=v,zoo={zoo}')
    with config.unlocked():
        config.model.dim = 16
    setup = prepare(config)
    return setup, setup.initialize().variables


def test_images_are_drawn_with_few_keys_in_most_steps():
    setup, variables = untrained('axial_rope')
    plain = Drawings(AtEnd(), count=2, steps=6)
    drawn = {
        name: dataclasses.replace(plain, reuse=reuse).drawn(setup, variables)
        for name, reuse in {
            'all': None,
            'refreshed every time': Reuse(share=0.1, first=1, every=1),
            'few': Reuse(share=0.1, first=1, every=3),
        }.items()
    }
    np.testing.assert_allclose(drawn['refreshed every time'], drawn['all'], rtol=1e-4, atol=1e-4)
    assert np.isfinite(drawn['few']).all() and not np.allclose(drawn['few'], drawn['all'], atol=1e-3)


def test_what_is_kept_is_of_patches_and_layers():
    setup, variables = untrained('mha')
    model = reusing(nnx.merge(setup.graphdef, variables), Reuse())
    state = jax.eval_shape(lambda: begun(model, Context.full(3, 64)))
    assert [layer.mass.shape for layer in state] == [(3, 64, 4)] * 2
    assert [layer.residual.shape for layer in state] == [(3, 64, 16)] * 2


def test_models_of_other_mixers_are_refused():
    setup, variables = untrained('gla')
    with pytest.raises(UserError, match='for models of Attention alone; a layer is a LinearAttention'):
        Drawings(AtEnd(), count=1, steps=2, reuse=Reuse()).drawn(setup, variables)
