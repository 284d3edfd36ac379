"""Removal of the component of gradients along the weights."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from attnlab.functional.precision import wide_dtype

GUARD = 1e-30
"""Added to norms and squared norms to avoid division by zero."""


@dataclasses.dataclass(frozen=True)
class Perpendicular:
    """Removes from the gradient of every tensor the component along the tensor itself, before the optimiser.

    `g' = g - (w . g) / (w . w) w`. A scale-invariant network can lower its loss along the weights by growing alone,
    without classifying more examples correctly. Prieto et al. 2025, https://arxiv.org/abs/2501.04697.

    Attributes:
      rescale: rescale `g'` to the norm of `g`, as the released code does; the paper's update is the projection alone.
    """

    rescale: bool = False

    def transform(self, stacked: Any) -> optax.GradientTransformation:
        """Returns the projection; `stacked` has, by parameter, the number of leading dimensions that stack tensors."""
        return perpendicular_gradient(self.rescale, stacked)


def perpendicular_gradient(rescale: bool = False, stacked: Any = None) -> optax.GradientTransformation:
    """Returns the transformation `g -> g - (w . g) / (w . w) w`, tensor by tensor, for use before any optimiser.

    Tensors of one element are unchanged, as their gradient has no perpendicular component. Dot products are computed
    in at least float32. With `rescale` the result has the norm of the gradient. `stacked` is a tree like the
    parameters: the number of leading dimensions of each that stack tensors; `None`: zero for all. Its `update`
    raises ValueError without parameters. Prieto et al. 2025, https://arxiv.org/abs/2501.04697.
    """

    def project(gradient: jax.Array, weights: jax.Array, dims: int = 0) -> jax.Array:
        one = functools.partial(_project, rescale=rescale)
        for _ in range(dims):
            one = jax.vmap(one)
        return one(gradient, weights)

    def update(updates: Any, params: Any) -> Any:
        if params is None:
            raise ValueError('the perpendicular gradient needs the parameters: call update(updates, state, params)')
        return jax.tree.map(project, updates, params, *(() if stacked is None else (stacked,)))

    return optax.stateless(update)


def _project(gradient: jax.Array, weights: jax.Array, *, rescale: bool) -> jax.Array:
    if gradient.size < 2:
        return gradient
    wide = wide_dtype(gradient.dtype)
    g, w = gradient.astype(wide), weights.astype(wide)
    rest = g - jnp.vdot(w, g) / (jnp.vdot(w, w) + GUARD) * w
    if rescale:
        rest *= jnp.linalg.norm(g.ravel()) / (jnp.linalg.norm(rest.ravel()) + GUARD)
    return rest.astype(gradient.dtype)
