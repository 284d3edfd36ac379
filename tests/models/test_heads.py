"""What heads promise: losses of their logits, and a tied one of one parameter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.errors import UserError
from attnlab.losses import absolute_error, softmax_loss, squared_error
from attnlab.models.heads.classification import ClassificationHead
from attnlab.models.heads.language import LanguageHead, TiedHead
from attnlab.models.heads.pairs import PairHead
from attnlab.models.heads.regression import RegressionHead
from attnlab.models.inputs.embedding import Embedding

DIM, OUTPUTS = 4, 6
RNG = np.random.default_rng(0)
CLASSES = jnp.asarray(RNG.integers(OUTPUTS, size=5), jnp.int32)
NUMBERS = jnp.asarray(RNG.standard_normal((5, OUTPUTS)), jnp.float32)
HEADS = {
    'language': (lambda rngs: LanguageHead(DIM, OUTPUTS, rngs=rngs), softmax_loss, CLASSES),
    'tied': (lambda rngs: TiedHead(Embedding(OUTPUTS, DIM, scale=1.0, rngs=rngs).table), softmax_loss, CLASSES),
    'classes': (lambda rngs: ClassificationHead(DIM, 1, classes=OUTPUTS, rngs=rngs), softmax_loss, CLASSES),
    'pairs': (lambda rngs: PairHead(DIM, 1, classes=OUTPUTS, rngs=rngs), softmax_loss, CLASSES),
    'squares': (lambda rngs: RegressionHead(DIM, OUTPUTS, rngs=rngs), squared_error, NUMBERS),
    'absolutes': (lambda rngs: RegressionHead(DIM, OUTPUTS, error='absolute', rngs=rngs), absolute_error, NUMBERS),
}


@pytest.mark.parametrize('name', HEADS)
def test_losses_are_those_of_the_logits(name):
    make, loss, targets = HEADS[name]
    head = make(nnx.Rngs(0))
    hidden = jnp.asarray(RNG.standard_normal((5, DIM * head.documents)), jnp.bfloat16)
    logits = head.logits(hidden)
    assert logits.shape == (5, OUTPUTS) and logits.dtype == jnp.float32
    np.testing.assert_allclose(head.losses(hidden, targets), loss(logits, targets), rtol=2e-2)
    drawn = head.sample(hidden, jax.random.key(0), temperature=0.0, top_p=1.0)
    np.testing.assert_array_equal(drawn, jnp.argmax(logits, axis=1))


def test_errors_by_hand():
    predictions, targets = jnp.array([[1.0, 4.0]]), jnp.array([[2.0, 1.0]])
    assert squared_error(predictions, targets).tolist() == [5.0]
    assert absolute_error(predictions, targets).tolist() == [2.0]
    with pytest.raises(UserError, match="there is no error=square; did you mean 'squared'"):
        RegressionHead(DIM, OUTPUTS, error='square', rngs=nnx.Rngs(0))
