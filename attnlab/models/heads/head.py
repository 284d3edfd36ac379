"""The protocol of heads: the loss of their predictions, logits, and samples."""

import abc

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int, Shaped

from attnlab.functional import sampling
from attnlab.module import Module
from attnlab.nn.parameter import param


class Head(Module):
    """Maps hidden states to predictions, and gives their loss; made as `head(dim, vocab, rngs=rngs)`.

    Attributes:
      documents: the number of documents that a prediction is about; a hidden state concatenates their vectors.
    """

    documents = 1

    @abc.abstractmethod
    def losses(self, hidden: Float[Array, '*b d'], targets: Shaped[Array, '...']) -> Float[Array, '*b']:
        """One number per hidden state: `-log p(target)` in nats, or an error where predictions are real numbers."""

    @abc.abstractmethod
    def logits(self, hidden: Float[Array, '*b d']) -> Float[Array, '*b o']:
        """Log-probabilities up to a constant, or the predicted numbers, in float32."""

    def sample(self, hidden: Float[Array, 'b d'], key: Array, *, temperature: float, top_p: float) -> Int[Array, ' b']:
        """Samples a prediction for every hidden state, see `attnlab.functional.sampling`.

        A head that can sample without computing all logits overrides this method.
        """
        return sampling.sample(self.logits(hidden), key, temperature=temperature, top_p=top_p)


def linear_logits(hidden: Float[Array, '*b d'], weight: Float[Array, 'o d']) -> Float[Array, '*b o']:
    """`hidden W^T`, multiplied in the type of `hidden`, accumulated and returned in float32."""
    weight = weight.astype(hidden.dtype)
    return jnp.einsum('... d, o d -> ... o', hidden, weight, preferred_element_type=jnp.float32)


def output_weight(dim: int, outputs: int, rngs: nnx.Rngs) -> nnx.Param:
    """A weight matrix `o d`, initialised normal with variance 1 / d."""
    return param(
        jax.nn.initializers.normal(dim**-0.5), (outputs, dim), axes=('vocab', 'embed'), group='embedding', rngs=rngs
    )
