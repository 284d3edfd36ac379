"""Gradients without their part along the weights."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

GUARD = 1e-30
"""Added to squared norms and norms, so that weights or gradients of zero divide by no zero."""


@dataclasses.dataclass(frozen=True)
class Perpendicular:
    """Takes from the gradient of every tensor its part along the tensor itself, before the optimiser sees it.

    `g' = g - (w . g) / (w . w) w`. Along the weights a network with scale to spare lowers its loss by growing alone,
    without getting more examples right. Prieto et al. 2025, https://arxiv.org/abs/2501.04697.

    Attributes:
      rescale: give `g'` the norm of `g`, as the released code does; the paper's update is the bare projection.
    """

    rescale: bool = False

    def transform(self, stacked: Any) -> optax.GradientTransformation:
        """Returns the projection; `stacked` has for every parameter how many leading dimensions stack tensors."""
        return perpendicular_gradient(self.rescale, stacked)


def perpendicular_gradient(rescale: bool = False, stacked: Any = None) -> optax.GradientTransformation:
    """Returns the transformation `g -> g - (w . g) / (w . w) w`, tensor by tensor, for use before any optimiser.

    Tensors of one element are left alone: nothing of their gradient is perpendicular to them. Dot products are taken
    in float32 at least. With `rescale` the result has the norm of the gradient again. `stacked` is a tree like the
    parameters: how many of the leading dimensions of each are a stack of tensors; `None`: none of any. Its `update`
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
    wide = jnp.promote_types(gradient.dtype, jnp.float32)
    g, w = gradient.astype(wide), weights.astype(wide)
    rest = g - jnp.vdot(w, g) / (jnp.vdot(w, w) + GUARD) * w
    if rescale:
        rest *= jnp.linalg.norm(g.ravel()) / (jnp.linalg.norm(rest.ravel()) + GUARD)
    return rest.astype(gradient.dtype)
