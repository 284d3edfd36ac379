"""A model without sequence mixing: what it reads, it sees all at once."""

from itertools import pairwise

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from attnlab.nn.projections import Linear
from attnlab.typing import State, Tokens

small_uniform = nnx.initializers.variance_scaling(1 / 3, 'fan_in', 'uniform')
"""Uniform up to one over the root of the number of inputs."""


class Perceptron(nnx.Module):
    """Tokens to classes: one-hot vectors, joined, through layers with ReLU: `W_n relu(... relu(W_1 x))`.

    Without biases; with 2 tokens of 113 and `hidden=(200, 200)` it is the network of Prieto et al. 2025,
    https://arxiv.org/abs/2501.04697, and weights are drawn as theirs.

    Args:
      vocab: number of tokens, and of classes.
      length: tokens a row.
      hidden: widths of the hidden layers.
      dtype: type of the activations; parameters are float32.
    """

    def __init__(
        self, vocab: int, *, length: int = 2, hidden: tuple[int, ...] = (200, 200), dtype: DTypeLike, rngs: nnx.Rngs
    ):
        self.vocab, self.dtype = vocab, jnp.dtype(dtype)
        widths = (length * vocab, *hidden, vocab)
        self.layers = nnx.List(
            [Linear(*pair, initializer=small_uniform, axes=(None, 'mlp'), rngs=rngs) for pair in pairwise(widths)]
        )

    def __call__(self, tokens: Tokens) -> Float[Array, 'b o']:
        """Scores of the classes, in float32."""
        x = jax.nn.one_hot(tokens, self.vocab, dtype=self.dtype).reshape(tokens.shape[0], -1)
        *hidden, last = self.layers
        for layer in hidden:
            x = jax.nn.relu(layer(x))
        return last(x).astype(jnp.float32)

    def init_state(self, batch: int, length: int) -> State:
        """Nothing: there is no next token."""
        del batch, length
        return ()
