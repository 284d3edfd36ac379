"""Buffers that are drawn anew while a model is trained."""

import jax
from flax import nnx
from jaxtyping import Array, Int

from attnlab.nn.parameter import Drawn


def redrawn(buffers: nnx.State, key: jax.Array, count: Int[Array, '']) -> nnx.State:
    """The buffers after step `count`: those that are `Drawn` (`attnlab.nn.parameter`) are new where they are due.

    A function of the key and the count alone, so that a run that was stopped goes on with the same ones; layers of a
    stack have draws of their own. Without any that is drawn, the buffers as they are.
    """
    leaves, tree = jax.tree.flatten(buffers, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    found = [_next(leaf, jax.random.fold_in(key, place), count) for place, leaf in enumerate(leaves)]
    return jax.tree.unflatten(tree, found)


def _next(leaf: nnx.Variable, key: jax.Array, count: Int[Array, '']) -> nnx.Variable:
    metadata = leaf.get_metadata()
    drawn: Drawn | None = metadata.get('drawn')
    if drawn is None:
        return leaf
    layers = leaf.ndim - len(metadata['axes'])

    def value(old: Array) -> Array:
        def draw(key: Array) -> Array:
            return drawn.draw(key, old.shape[layers:]).astype(old.dtype)

        for _ in range(layers):
            draw = jax.vmap(draw)
        keys = jax.random.split(key, old.shape[:layers]) if layers else key
        return jax.lax.cond(count % drawn.every == 0, draw, lambda _: old, keys)

    return jax.tree.map(value, leaf)
