"""A head that gives rare tokens fewer channels."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from attnlab.errors import UserError
from attnlab.losses import check_targets, nan_outside, next_token_loss
from attnlab.models.heads.head import Head, linear_logits, output_weight
from attnlab.module import Module
from attnlab.nn.projections import Linear


class AdaptiveSoftmax(Head):
    """Frequent tokens in a softmax of their own, which also says in which cluster of rarer ones the token is.

    `log p(w) = log softmax(W hidden)[w]` for a frequent token, and for token w of cluster i
    `log softmax(W hidden)[cluster i] + log softmax(V_i (hidden U_i))[w]`, `U_i` to `dim / divisor^i` channels. Tokens
    are numbered by frequency, the most frequent first. Every cluster is computed for every token: shapes are fixed, so
    what is saved are parameters and the narrow products, not those of clusters that are not asked for.
    Grave et al. 2017, https://arxiv.org/abs/1609.04309.

    Args:
      dim: model width.
      vocab: number of tokens.
      cutoffs: the first token of every cluster; `None`: an eighth and a half of the vocabulary.
      divisor: how much narrower each cluster is than the one before.

    Raises `UserError` for cutoffs that leave the head or a cluster empty, and for a divisor below 1.
    """

    def __init__(
        self, dim: int, vocab: int, *, cutoffs: tuple[int, ...] | None = None, divisor: float = 4.0, rngs: nnx.Rngs
    ):
        cutoffs = tuple(sorted({max(1, vocab // 8), max(1, vocab // 2)})) if cutoffs is None else cutoffs
        ends = (*cutoffs, vocab)
        if not cutoffs or cutoffs[0] < 1 or any(left >= right for left, right in itertools.pairwise(ends)):
            raise UserError(
                f'cutoffs is {cutoffs}, which leaves the head or a cluster empty; it must rise from at least 1 to '
                f'less than vocab, which is {vocab}'
            )
        if divisor < 1:
            raise UserError(f'divisor is {divisor}; it must be at least 1')
        self.vocab, self.cutoffs = vocab, cutoffs
        self.weight = output_weight(dim, cutoffs[0] + len(cutoffs), rngs)
        sizes = [right - left for left, right in itertools.pairwise(ends)]
        self.clusters = nnx.List(
            [
                Cluster(dim, size, width=max(1, int(dim / divisor**place)), rngs=rngs)
                for place, size in enumerate(sizes, start=1)
            ]
        )

    def losses(self, hidden: Float[Array, '*b d'], targets: Int[Array, '*b']) -> Float[Array, '*b']:
        """`-log p(target)` in nats."""
        check_targets(targets, self.vocab)
        starts = jnp.asarray(np.asarray(self.cutoffs, np.int32))
        # The frequent tokens are those below all cutoffs.
        above = jnp.sum((targets[..., None] >= starts.reshape((1,) * targets.ndim + (-1,))).astype(jnp.int32), axis=-1)
        first = jnp.where(above == 0, jnp.clip(targets, 0, self.cutoffs[0] - 1), self.cutoffs[0] + above - 1)
        losses = next_token_loss(hidden, self.weight[...], first)
        for place, (start, cluster) in enumerate(zip(self.cutoffs, self.clusters, strict=True), start=1):
            own = jnp.clip(targets - start, 0, cluster.weight.shape[0] - 1)
            losses = losses + jnp.where(above == place, cluster.losses(hidden, own), 0)
        return nan_outside(losses, targets, self.vocab)

    def logits(self, hidden: Float[Array, '*b d']) -> Float[Array, '*b o']:
        """Log-probabilities of all tokens, in float32."""
        first = jax.nn.log_softmax(linear_logits(hidden, self.weight[...]))
        frequent = self.cutoffs[0]
        rare = [
            first[..., frequent + place, None] + cluster.log_probabilities(hidden)
            for place, cluster in enumerate(self.clusters)
        ]
        return jnp.concatenate([first[..., :frequent], *rare], axis=-1)


class Cluster(Module):
    """The softmax of a cluster: `softmax(V (hidden U))`, `U` to `width` channels."""

    def __init__(self, dim: int, size: int, *, width: int, rngs: nnx.Rngs):
        self.down = Linear(dim, width, axes=('embed', None), rngs=rngs)
        self.weight = output_weight(width, size, rngs)

    def losses(self, hidden: Float[Array, '*b d'], targets: Int[Array, '*b']) -> Float[Array, '*b']:
        """`-log p` of a token in the cluster, numbered from 0."""
        return next_token_loss(self.down(hidden), self.weight[...], targets)

    def log_probabilities(self, hidden: Float[Array, '*b d']) -> Float[Array, '*b o']:
        """`log p` of all tokens in the cluster."""
        return jax.nn.log_softmax(linear_logits(self.down(hidden), self.weight[...]))
