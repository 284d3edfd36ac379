"""Random inputs and perturbed parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike


def noise(*shape: int, seed: int = 0, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Standard normal numbers; drawn by numpy, since JAX would compile for every shape."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def perturbed(module: Any, by: float = 0.2) -> Any:
    """Perturbs every parameter of a module, since one initialised at zero hides what is behind it."""
    leaves, tree = jax.tree.flatten(nnx.state(module, nnx.Param))
    moved = [leaf + by * noise(*leaf.shape, seed=place, dtype=leaf.dtype) for place, leaf in enumerate(leaves)]
    nnx.update(module, jax.tree.unflatten(tree, moved))
    return module
