"""A model without sequence mixing: a perceptron on the concatenated one-hot tokens of a row."""

from collections.abc import Iterator
from itertools import pairwise

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from attnlab.blocks.block import Stage
from attnlab.config import check_choice
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional import sampling
from attnlab.losses import softmax_loss, stablemax_logits
from attnlab.models.whole_rows import WholeRows
from attnlab.nn.projections import Linear
from attnlab.typing import DropoutKey, State, Tokens

small_uniform = nnx.initializers.variance_scaling(1 / 3, 'fan_in', 'uniform')
"""Uniform with a bound of one over the square root of the number of inputs."""

LOSSES = {'softmax': lambda scores: scores, 'stablemax': stablemax_logits}
"""Maps from scores to logits, by the name of the map from scores to probabilities."""


class Perceptron(WholeRows):
    """Maps tokens to classes: concatenated one-hot vectors through layers with ReLU, `W_n relu(... relu(W_1 x))`.

    Without biases; with 2 tokens of 113 and `hidden=(200, 200)` it is the network of Prieto et al. 2025,
    https://arxiv.org/abs/2501.04697, and weights are initialised as there. Implements
    `attnlab.models.predictor.Predictor`: a row is one position.

    Args:
      vocab: number of tokens, and of classes.
      length: tokens a row.
      hidden: widths of the hidden layers.
      loss: 'softmax' or 'stablemax', the map from scores to probabilities in the cross-entropy.
      dtype: type of the activations; parameters are float32.

    Raises `UserError` for another loss, or no hidden layer.
    """

    def __init__(
        self,
        vocab: int,
        *,
        length: int = 2,
        hidden: tuple[int, ...] = (200, 200),
        loss: str = 'softmax',
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        check_choice(LOSSES, 'loss', loss)
        if not hidden:
            raise UserError('model.hidden is (); a perceptron needs at least one hidden layer')
        self.vocab, self.dtype, self.loss = vocab, jnp.dtype(dtype), loss
        widths = (length * vocab, *hidden, vocab)
        self.layers = nnx.List(
            [Linear(*pair, initializer=small_uniform, axes=(None, 'mlp'), rngs=rngs) for pair in pairwise(widths)]
        )

    @property
    def outputs(self) -> int:
        """The number of classes."""
        return self.vocab

    def hidden(
        self, tokens: Tokens, ctx: Context, state: State | None = None
    ) -> tuple[Float[Array, 'b 1 d'], State | None]:
        """The last hidden layer of every row, `b 1 d`, and no state: there is no next token."""
        del ctx, state
        *_, (_, x) = self._layers(tokens)
        return x[:, None], None

    def pooled(self, tokens: Tokens, ctx: Context) -> Float[Array, 'b d']:
        """The last hidden layer of every row."""
        return self.hidden(tokens, ctx)[0][:, 0]

    def losses(
        self, hidden: Float[Array, '*b d'], targets: Int[Array, '*b'], key: DropoutKey | None = None
    ) -> Float[Array, '*b']:
        """Cross-entropy in nats, in training too."""
        del key
        return softmax_loss(self.logits(hidden), targets)

    def logits(self, hidden: Float[Array, '*b d']) -> Float[Array, '*b o']:
        """Log-probabilities of the classes up to a constant, in float32."""
        return LOSSES[self.loss](self.layers[-1](hidden).astype(jnp.float32))

    def sample(self, hidden: Float[Array, 'b d'], key: Array, *, temperature: float, top_p: float) -> Int[Array, ' b']:
        """Sampled classes, see `attnlab.functional.sampling`."""
        return sampling.sample(self.logits(hidden), key, temperature=temperature, top_p=top_p)

    def stages(self, tokens: Tokens, ctx: Context) -> Iterator[Stage]:
        """The hidden layers in order, and the logits."""
        del ctx
        found = [Stage(name, x) for name, x in self._layers(tokens)]
        yield from found
        yield Stage(f'layers[{len(found)}]', self.logits(found[-1].value))

    def _layers(self, tokens: Tokens) -> Iterator[tuple[str, Float[Array, 'b d']]]:
        x = jax.nn.one_hot(tokens, self.vocab, dtype=self.dtype).reshape(tokens.shape[0], -1)
        for index, layer in enumerate(list(self.layers)[:-1]):
            x = jax.nn.relu(layer(x))
            yield f'layers[{index}]', x
