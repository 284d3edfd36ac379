"""What turns hidden states into predictions."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from attnlab.nn.parameter import param
from attnlab.nn.projections import Linear


class LanguageHead(nnx.Module):
    """A linear map onto the vocabulary, or other outputs: `logits = hidden W^T`.

    `W` is of shape `o d`, normal with variance 1 / d.
    """

    def __init__(self, dim: int, vocab: int, *, rngs: nnx.Rngs):
        self.weight = param(
            jax.nn.initializers.normal(dim**-0.5), (vocab, dim), axes=('vocab', 'embed'), group='embedding', rngs=rngs
        )


class ClassificationHead(nnx.Module):
    """A linear map of one vector a document onto classes: `logits = x W + b`.

    `vocab` is not used: it is what every head is handed.
    """

    documents = 1

    def __init__(self, dim: int, vocab: int, *, classes: int, rngs: nnx.Rngs):
        del vocab
        self.linear = Linear(dim, classes, bias=True, axes=('embed', None), group='embedding', rngs=rngs)

    def __call__(self, x: Float[Array, '*b d']) -> Float[Array, '*b o']:
        return self.linear(x)


class PairHead(nnx.Module):
    """Two documents' vectors onto classes: `logits = relu([x, y, x y, x - y] W_1 + b_1) W_2 + b_2`, `dim` hidden units.

    The features are those of the retrieval task of the Long Range Arena: Tay et al. 2021,
    https://arxiv.org/abs/2011.04006. `vocab` is not used: it is what every head is handed.
    """

    documents = 2

    def __init__(self, dim: int, vocab: int, *, classes: int, rngs: nnx.Rngs):
        del vocab
        self.into = Linear(4 * dim, dim, bias=True, axes=('embed', 'mlp'), rngs=rngs)
        self.out = Linear(dim, classes, bias=True, axes=('mlp', None), group='embedding', rngs=rngs)

    def __call__(self, x: Float[Array, '*b d'], y: Float[Array, '*b d']) -> Float[Array, '*b o']:
        features = jnp.concatenate([x, y, x * y, x - y], axis=-1)
        return self.out(jax.nn.relu(self.into(features)))
