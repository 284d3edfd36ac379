"""A head that predicts the next segment of a series after every one."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from attnlab.models.heads.head import Head, wide
from attnlab.nn.parameter import param
from attnlab.nn.projections import Linear


class NextSegmentHead(Head):
    """The segment after each of the tokens, `y_i = h_i W + b`, of `vocab` steps; the last one is the forecast.

    A hidden state is the vectors of `n` tokens, `dim` channels each, and behind them the `n vocab` steps that these
    were made of. The loss is the mean squared error over all `n` segments: of all but the last the target is the next
    one of the window. Liu et al. 2024, "AutoTimes", https://arxiv.org/abs/2402.02370.
    """

    degree = 2

    def __init__(self, dim: int, vocab: int, *, rngs: nnx.Rngs):
        self.dim, self.steps = dim, vocab
        self.linear = Linear(dim, vocab, bias=True, axes=('embed', 'vocab'), group='embedding', rngs=rngs)

    def losses(self, hidden: Float[Array, '*b d'], targets: Float[Array, '*b o']) -> Float[Array, '*b']:
        """The mean squared error over segments."""
        tokens, segments = self.divided(wide(hidden))
        wanted = jnp.concatenate([segments[..., 1:, :], targets[..., None, :].astype(segments.dtype)], axis=-2)
        return jnp.mean(jnp.square(self.predicted(tokens) - wanted), axis=(-2, -1))

    def logits(self, hidden: Float[Array, '*b d']) -> Float[Array, '*b o']:
        """The segment after the last, in float32."""
        return self.predicted(self.divided(wide(hidden))[0][..., -1, :])

    def predicted(self, tokens: Float[Array, '*b m']) -> Float[Array, '*b o']:
        """The segment after each of the tokens."""
        return self.linear(tokens)

    def divided(self, hidden: Float[Array, '*b d']) -> tuple[Float[Array, '*b n m'], Float[Array, '*b n o']]:
        """The vectors of the tokens, and the segments."""
        count = hidden.shape[-1] // (self.dim + self.steps)
        tokens, steps = jnp.split(hidden, [count * self.dim], axis=-1)
        return tokens.reshape(*hidden.shape[:-1], count, self.dim), steps.reshape(*hidden.shape[:-1], count, self.steps)


class MixedSegmentHead(NextSegmentHead):
    """`NextSegmentHead` of what experts make of a token: `y = (sum_k p_k h E_k) W + b`, `p = softmax(h G + c)`.

    All experts are read, matrices without a bias; with one, the default of the code, they are one more map. The
    penalty of that code, which is multiplied by zero, is left out. Fan et al. 2025, https://arxiv.org/abs/2503.03594.

    Args:
      dim: channels of a token.
      vocab: steps of a segment.
      experts: how many.
      rngs: draws the parameters.
    """

    def __init__(self, dim: int, vocab: int, *, experts: int = 1, rngs: nnx.Rngs):
        super().__init__(dim, vocab, rngs=rngs)
        self.gate = Linear(dim, experts, bias=True, axes=('embed', None), rngs=rngs)
        start = nnx.initializers.variance_scaling(1.0, 'fan_in', 'normal', batch_axis=(0,))
        self.experts = param(start, (experts, dim, dim), axes=(None, 'embed', None), rngs=rngs)

    def predicted(self, tokens: Float[Array, '*b m']) -> Float[Array, '*b o']:
        """The segment after each of the tokens."""
        shares = jax.nn.softmax(self.gate(tokens), axis=-1)
        mixed = jnp.einsum('...e,...m,emn->...n', shares, tokens, self.experts[...].astype(tokens.dtype))
        return self.linear(mixed)
