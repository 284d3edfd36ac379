"""Gradients agree with finite differences, and float64 stays float64."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from attnlab.testing.contract.subject import Subject, double, full, require
from attnlab.testing.jaxprs import equations
from attnlab.testing.tolerances import STEP, difference_tolerance

NARROW = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.complex64)


def check_gradients(subject: Subject) -> None:
    """In float64 the derivative along a random direction, of every parameter and of `x`, is the finite difference.

    With a surrogate that holds of it; of what rounds, gradients are finite, and none is zero throughout.
    """
    with jax.enable_x64(True):
        x, weights = subject.x(dtype=jnp.float64), subject.x(seed=1, dtype=jnp.float64)
        smooth = subject.smooth
        differentiated = smooth.differentiated
        compare_derivatives('gradients', lambda inputs: differentiated(inputs, weights, full()), (smooth.double, x))
        if smooth is not subject:
            _, gradients = subject.differentiated((subject.double, x), weights, full())
            for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
                name, found = jax.tree_util.keystr(path), np.asarray(gradient)
                require(bool(np.isfinite(found).all()), f'gradients: that of {name} is not finite')
                require(bool(found.any()), f'gradients: that of {name} is zero; nothing comes straight through')


def check_zeros(subject: Subject) -> None:
    """Inputs of zero, as of black patches and of what a gate closes, have finite outputs and gradients at the start.

    As the mixer is made, since what perturbs its parameters would hide zeros behind biases.
    """
    with jax.enable_x64(True):
        x = np.array(subject.x(dtype=jnp.float64))
        x[0], x[1, 3:9] = 0, 0
        inputs = double(nnx.split(subject.fresh(), nnx.Param, ...)[1]), jnp.asarray(x)
        value, gradients = subject.differentiated(inputs, subject.x(seed=1, dtype=jnp.float64), full())
        require(bool(np.isfinite(value)), 'zeros: an output is not finite')
        for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
            name = jax.tree_util.keystr(path)
            require(bool(np.isfinite(np.asarray(gradient)).all()), f'zeros: the gradient of {name} is not finite')


def check_float64(subject: Subject) -> None:
    """With parameters and input in float64 no intermediate value, forward or backward, is narrower."""
    with jax.enable_x64(True):
        x, weights = subject.x(dtype=jnp.float64), subject.x(seed=1, dtype=jnp.float64)
        traced = subject.differentiated.trace((subject.double, x), weights, full())
        for equation in equations(traced.jaxpr.jaxpr):
            for variable in equation.outvars:
                dtype = getattr(variable.aval, 'dtype', None)
                require(dtype not in NARROW, f'float64: {equation.primitive} gives {dtype}')


def compare_with_differences(what: str, loss: Callable[[Any], Array], inputs: Any) -> None:
    """Raises AssertionError unless the gradient of `loss` agrees with finite differences, for all `inputs`."""
    compare_derivatives(what, jax.jit(jax.value_and_grad(loss)), inputs)


def compare_derivatives(what: str, differentiated: Callable[[Any], tuple[Array, Any]], inputs: Any) -> None:
    """Raises AssertionError unless the gradients that `differentiated` gives beside the value are its differences.

    One program computes gradients and differences, on inputs made by numpy: nothing else is compiled.
    """
    value, gradients = differentiated(inputs)
    leaves, tree = jax.tree.flatten(inputs)
    leaves = [np.asarray(leaf) for leaf in leaves]
    for place, (path, found) in enumerate(jax.tree_util.tree_leaves_with_path(gradients)):
        name, gradient = jax.tree_util.keystr(path), np.asarray(found)
        require(bool(np.isfinite(gradient).all()), f'{what}: the gradient of {name} is not finite')
        direction = np.random.default_rng(place).standard_normal(gradient.shape)
        direction = (direction / np.linalg.norm(direction)).astype(gradient.dtype)

        def along(step: float, place: int = place, direction: np.ndarray = direction) -> Array:
            moved = np.asarray(leaves[place] + step * direction)
            arrays = [*leaves[:place], moved, *leaves[place + 1 :]]
            return differentiated(jax.tree.unflatten(tree, [jnp.asarray(array) for array in arrays]))[0]

        expected, actual = float((along(STEP) - along(-STEP)) / (2 * STEP)), float(np.vdot(gradient, direction))
        rounding = 16 * np.finfo(np.float64).eps / STEP * abs(float(value))
        bound = difference_tolerance() * float(np.linalg.norm(gradient)) + rounding
        require(
            abs(actual - expected) <= bound,
            f'{what}: along {name} the derivative is {actual:.9g}, the central difference {expected:.9g}',
        )
