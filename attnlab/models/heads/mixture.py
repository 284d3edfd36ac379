"""A mixture of softmaxes, whose log-probabilities are not bound to the rank of the width."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from attnlab.functional import sampling
from attnlab.losses import check_targets, nan_outside, next_token_loss
from attnlab.models.heads.head import Head, linear_logits, output_weight, wide
from attnlab.nn.projections import Linear


class MixtureOfSoftmaxes(Head):
    """`p = sum_m pi_m softmax(W h_m)`, with `pi = softmax(hidden W_pi)` and `h_m = tanh(hidden W_m + b_m)`.

    Mixed in log space: the released code adds 1e-8 to p, which favours rare tokens. The loss asks the fused
    cross-entropy for each component, so that no logits are stored whole. `W` has no bias.
    Yang et al. 2018, https://arxiv.org/abs/1711.03953.
    """

    def __init__(self, dim: int, vocab: int, *, components: int = 4, rngs: nnx.Rngs):
        self.components = components
        self.prior = Linear(dim, components, axes=('embed', None), rngs=rngs)
        self.latent = Linear(dim, components * dim, bias=True, axes=('embed', 'mlp'), rngs=rngs)
        self.weight = output_weight(dim, vocab, rngs)

    def losses(self, hidden: Float[Array, '*b d'], targets: Int[Array, '*b']) -> Float[Array, '*b']:
        """`-log p(target)` in nats."""
        classes = self.weight.shape[0]
        check_targets(targets, classes)
        repeated = jnp.broadcast_to(targets[..., None], (*targets.shape, self.components))
        each = next_token_loss(self._contexts(hidden), self.weight[...], repeated)
        return nan_outside(-jax.nn.logsumexp(self._log_prior(hidden) - each, axis=-1), targets, classes)

    def logits(self, hidden: Float[Array, '*b d']) -> Float[Array, '*b o']:
        """Log-probabilities, in float32."""
        each = jax.nn.log_softmax(linear_logits(self._contexts(hidden), self.weight[...]))
        return jax.nn.logsumexp(self._log_prior(hidden)[..., None] + each, axis=-2)

    def sample(self, hidden: Float[Array, 'b d'], key: Array, *, temperature: float, top_p: float) -> Int[Array, ' b']:
        """Draws a component, and a token from it; from all log-probabilities where these are sharpened or cut."""
        if temperature != 1.0 or top_p < 1.0:
            return super().sample(hidden, key, temperature=temperature, top_p=top_p)
        first, second = jax.random.split(key)
        component = jax.random.categorical(first, self._log_prior(hidden))
        context = jnp.take_along_axis(self._contexts(hidden), component[:, None, None], axis=1)[:, 0]
        return sampling.sample(linear_logits(context, self.weight[...]), second, temperature=1.0, top_p=1.0)

    def _log_prior(self, hidden: Float[Array, '*b d']) -> Float[Array, '*b m']:
        return jax.nn.log_softmax(self.prior(wide(hidden)))

    def _contexts(self, hidden: Float[Array, '*b d']) -> Float[Array, '*b m d']:
        return jnp.tanh(self.latent(hidden)).reshape(*hidden.shape[:-1], self.components, hidden.shape[-1])
