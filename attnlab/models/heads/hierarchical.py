"""A head whose probabilities are products along the paths of a binary tree."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from attnlab.errors import UserError
from attnlab.functional.huffman import huffman
from attnlab.functional.lookup import lookup
from attnlab.functional.precision import wide_dtype
from attnlab.losses import check_targets, nan_outside
from attnlab.models.heads.head import Head, linear_logits, output_weight, wide
from attnlab.nn.parameter import buffer, param


class Likeliest(NamedTuple):
    """The likeliest tokens, the best first.

    Attributes:
      tokens: by index.
      log_probabilities: in nats.
      opened: how many inner nodes were asked for, each a product with the hidden state.
    """

    tokens: Int[Array, 'b k']
    log_probabilities: Float[Array, 'b k']
    opened: Int[Array, ' b']


class HierarchicalSoftmax(Head):
    """`log p(w) = sum_n log sigmoid(s_n (u_n hidden + c_n))` over the inner nodes n on the way to w in a Huffman tree.

    `s_n` is 1 or -1 by the side on which w lies, so probabilities sum to one. A loss costs as many products as the path
    is long, about the entropy of the counts in bits; all probabilities cost as many as there are tokens.
    Morin and Bengio 2005, https://proceedings.mlr.press/r5/morin05a.html; the tree of Mikolov et al. 2013,
    https://arxiv.org/abs/1301.3781, of equal nodes those of the lowest index joined first.

    Args:
      dim: model width.
      vocab: number of tokens.
      counts: how often each token occurs; `None`: `1 / (j + 1)` for token j, for tokens numbered by frequency.

    Raises `UserError` for counts of another number of tokens or below 0, and for fewer than two tokens.
    """

    def __init__(self, dim: int, vocab: int, *, counts: tuple[int, ...] | None = None, rngs: nnx.Rngs):
        if vocab < 2:
            raise UserError(f'vocab is {vocab}; a tree needs at least 2 tokens')
        if counts is not None and (len(counts) != vocab or min(counts) < 0):
            raise UserError(
                f'counts has {len(counts)} entries from {min(counts, default=0)} up; it must have {vocab}, the tokens '
                'of the head, from 0 up'
            )
        tree = huffman((1 / np.arange(1, vocab + 1)).tolist() if counts is None else counts)
        self.root = tree.root
        self.nodes = buffer(tree.nodes, axes=(None, None))
        self.signs = buffer(tree.signs, axes=(None, None))
        self.children = buffer(tree.children, axes=(None, None))
        # One row more than there are inner nodes: devices divide what divides the vocabulary.
        self.weight = output_weight(dim, vocab, rngs)
        self.bias = param(nnx.initializers.zeros, (vocab,), axes=('vocab',), group='vector', rngs=rngs)

    def losses(self, hidden: Float[Array, '*b d'], targets: Int[Array, '*b']) -> Float[Array, '*b']:
        """`-log p(target)` in nats."""
        classes = self.nodes.shape[0]
        check_targets(targets, classes)
        path, signs = (each[...][jnp.clip(targets, 0, classes - 1)] for each in (self.nodes, self.signs))
        # Cast after the lookup, so that the gradient of the weight accumulates in its own type.
        vectors = lookup(self.weight[...], path).astype(hidden.dtype)
        biases = lookup(self.bias[...][:, None], path)[..., 0]
        scores = jnp.sum(wide(hidden)[..., None, :] * wide(vectors), axis=-1) + biases
        losses = -jnp.sum(_log_side(scores, signs), axis=-1)
        return nan_outside(losses, targets, classes)

    def logits(self, hidden: Float[Array, '*b d']) -> Float[Array, '*b o']:
        """Log-probabilities of all tokens, in float32."""
        scores = linear_logits(hidden, self.weight[...])
        scores = scores + self.bias[...].astype(scores.dtype).reshape((1,) * (scores.ndim - 1) + (-1,))

        # Both sides of every node are computed once; paths only pick them up, and zeros beyond their ends.
        both = [jax.nn.log_sigmoid(scores), jax.nn.log_sigmoid(-scores), jnp.zeros_like(scores[..., :1])]
        sides = jnp.concatenate(both, axis=-1)
        inner = scores.shape[-1]

        def longer(total: Array, step: tuple[Array, Array]) -> tuple[Array, None]:
            nodes, signs = step
            places = jnp.where(signs == 0, 2 * inner, jnp.where(signs > 0, nodes, inner + nodes))
            return total + sides[..., places], None

        start = jnp.zeros((*hidden.shape[:-1], self.nodes.shape[0]), scores.dtype)
        return jax.lax.scan(longer, start, (self.nodes[...].T, self.signs[...].T))[0]

    def likeliest(self, hidden: Float[Array, 'b d'], count: int = 1) -> Likeliest:
        """The `count` likeliest tokens, exactly, by best-first search.

        Of all nodes that are reached, the likeliest is opened next. What lies below a node is no likelier than it, so
        the first leaves to be met are the likeliest tokens. Raises `UserError` for more tokens than there are.
        """
        classes = self._checked(count)
        inner = classes - 1
        nothing = jnp.full(2 * classes - 1, -jnp.inf, wide_dtype(hidden.dtype))

        def search(x: Float[Array, ' d']) -> Likeliest:
            # Nodes by index: inner ones, then leaves.
            def unfinished(state: tuple[Array, Likeliest, Array]) -> Array:
                return state[2] < count

            def open_next(state: tuple[Array, Likeliest, Array]) -> tuple[Array, Likeliest, Array]:
                reached, found, number = state
                node = jnp.argmax(reached)
                chance, leaf = reached[node], node >= inner
                sides, places = self._opened(x, jnp.minimum(node, inner - 1))
                reached = reached.at[node].set(-jnp.inf)
                places = jnp.where(places < 0, inner - 1 - places, places)
                reached = reached.at[jnp.where(leaf, 2 * classes, places)].set(chance + sides, mode='drop')
                place = jnp.where(leaf, number, count)
                found = Likeliest(
                    found.tokens.at[place].set((node - inner).astype(jnp.int32), mode='drop'),
                    found.log_probabilities.at[place].set(chance, mode='drop'),
                    found.opened + ~leaf,
                )
                return reached, found, number + leaf

            empty = Likeliest(jnp.zeros(count, jnp.int32), nothing[:count], jnp.int32(0))
            start = nothing.at[self.root].set(0), empty, jnp.int32(0)
            return jax.lax.while_loop(unfinished, open_next, start)[1]

        return jax.vmap(search)(hidden)

    def beam(self, hidden: Float[Array, 'b d'], count: int = 1, *, width: int = 8) -> Likeliest:
        """`count` likely tokens by beam search: the `width` likeliest nodes of every level are opened.

        Exact where no more nodes than `width` lie on a level. Raises `UserError` for more tokens than there are, or
        than the beam holds.
        """
        self._checked(count)
        if width < count:
            raise UserError(f'width is {width}; a beam that gives {count} tokens must hold as many')

        def search(x: Float[Array, ' d']) -> Likeliest:
            def down(_: Array, beam: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
                nodes, chances, opened = beam
                leaf = nodes < 0
                sides, places = jax.vmap(lambda node: self._opened(x, node))(jnp.maximum(nodes, 0))
                # A leaf stays what it is, once.
                sides = jnp.where(leaf[:, None], jnp.asarray([[0, -jnp.inf]], sides.dtype), sides)
                places = jnp.where(leaf[:, None], nodes[:, None], places)
                chances, best = jax.lax.top_k((chances[:, None] + sides).reshape(-1), width)
                asked = ~leaf & (beam[1] > -jnp.inf)
                return places.reshape(-1)[best], chances, opened + jnp.sum(asked, dtype=jnp.int32)

            chances = jnp.full(width, -jnp.inf, wide_dtype(hidden.dtype)).at[0].set(0)
            start = jnp.full(width, self.root, jnp.int32), chances, jnp.int32(0)
            nodes, chances, opened = jax.lax.fori_loop(0, self.nodes.shape[1], down, start)
            return Likeliest(-1 - nodes[:count], chances[:count], opened)

        return jax.vmap(search)(hidden)

    def _checked(self, count: int) -> int:
        """The number of tokens, if `count` is not above it."""
        classes = self.nodes.shape[0]
        if not 1 <= count <= classes:
            raise UserError(f'count is {count}; it must be from 1 to {classes}, the tokens of the head')
        return classes

    def _opened(self, x: Float[Array, ' d'], node: Int[Array, '']) -> tuple[Float[Array, ' c'], Int[Array, ' c']]:
        """The logarithms of the chances of both children of an inner node, and these as in `Tree.children`."""
        vector = self.weight[...].astype(x.dtype)[node]
        score = jnp.sum(wide(x) * wide(vector)) + self.bias[...][node].astype(wide_dtype(x.dtype))
        return jnp.stack([jax.nn.log_sigmoid(score), jax.nn.log_sigmoid(-score)]), self.children[...][node]

    def sample(self, hidden: Float[Array, 'b d'], key: Array, *, temperature: float, top_p: float) -> Int[Array, ' b']:
        """Goes down the tree by chance, or by best-first search at temperature 0; otherwise from all probabilities."""
        if temperature == 0.0:
            return self.likeliest(hidden).tokens[:, 0]
        if temperature != 1.0 or top_p < 1.0:
            return super().sample(hidden, key, temperature=temperature, top_p=top_p)

        def down(step: Array, place: Int[Array, ' b']) -> Int[Array, ' b']:
            inner = jnp.maximum(place, 0)
            vectors = self.weight[...].astype(hidden.dtype)[inner]
            scores = jnp.sum(wide(hidden) * wide(vectors), axis=-1) + self.bias[...][inner]
            second = jax.random.bernoulli(jax.random.fold_in(key, step), jax.nn.sigmoid(-scores))
            reached = jnp.take_along_axis(self.children[...][inner], second[:, None].astype(jnp.int32), axis=1)[:, 0]
            return jnp.where(place < 0, place, reached)

        start = jnp.full(hidden.shape[0], self.root, jnp.int32)
        return -1 - jax.lax.fori_loop(0, self.nodes.shape[1], down, start)


def _log_side(scores: Float[Array, '*b'], signs: Int[Array, '*c']) -> Float[Array, '*b']:
    """`log sigmoid(sign score)`, and 0 where the sign is 0."""
    signs = jnp.broadcast_to(signs, scores.shape)
    return jnp.where(signs == 0, 0, jax.nn.log_sigmoid(signs * scores))
