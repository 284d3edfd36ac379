"""The config of separation: every form builds, and mistakes in its arguments are named."""

import jax
import pytest

from attnlab.errors import UserError
from attnlab.nn.norms import CumulativeLayerNorm, GlobalLayerNorm
from attnlab.train.cost import parameters
from attnlab.train.setup import prepare
from configs import separation


@pytest.mark.parametrize('argument', ['', 'form=causal', 'zoo=mamba', 'zoo=mha,form=causal', 'size=full'])
def test_separation_of_every_form(argument):
    setup = prepare(separation.get_config(argument))
    measured = jax.eval_shape(setup.measure, setup.abstract.variables, setup.abstract_batch())
    assert set(measured) == {'loss', 'si_snr', 'si_snr_improvement'}
    assert setup.optimizer.clip == 5.0


def test_forms_reach_the_layers():
    assert isinstance(prepare(separation.get_config('')).model.encoded_norm, GlobalLayerNorm)
    causal = prepare(separation.get_config('system=conv_tasnet,form=causal')).model
    assert isinstance(causal.encoded_norm, CumulativeLayerNorm) and causal.blocks[0].conv.before == 2
    for argument, expected in (('zoo=mha', False), ('zoo=mha,form=causal', True)):
        model = separation.get_config(argument).model
        assert model.stack.blocks[0].mixer.causal is model.causal is expected
    assert separation.get_config('zoo=mamba').model.causal
    for argument, told in (('zoo=linear_transformer', True), ('zoo=linear_transformer,form=causal', False)):
        setup = prepare(separation.get_config(argument))
        assert (setup.model.positions is not None) is told
        setup.trace()
    assert parameters(prepare(separation.get_config('size=full'))) == 5_050_545 - 128 * 512 - 128


@pytest.mark.parametrize(
    ('argument', 'sentence'),
    [
        ('system=conv_tasnt', "there is no system=conv_tasnt; did you mean 'conv_tasnet'"),
        ('system=conv_tasnet,zoo=mha', 'zoo=mha takes the place of system=conv_tasnet'),
        ('zoo=swin', 'zoo=swin mixes tokens on a grid'),
        ('zoo=mamba,form=bidirectional', 'form=bidirectional is not one of zoo=mamba'),
        ('form=both', 'there is no form=both'),
        ('conv=0', 'conv=0 is of the layers of a recipe; give zoo=NAME too'),
        ('size=tny', "there is no size=tny; did you mean 'tiny'"),
    ],
)
def test_separation_names_mistakes(argument, sentence):
    with pytest.raises(UserError, match=sentence):
        separation.get_config(argument)
