"""Results in bfloat16 are close to those in float32."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from attnlab.testing.contract.subject import Subject, full, require
from attnlab.testing.jaxprs import equations
from attnlab.testing.noise import noise
from attnlab.testing.tolerances import assert_close

TOKENS = 8192
"""Number of tokens that gradients are summed over: a sum in bfloat16 stops growing long before."""

LONGEST = 2048
"""The length of the rows that hold them, for a mixer whose state does not grow; for others it is `SHORT`."""

SHORT = 128

BOUND = 8 * float(jnp.finfo(jnp.bfloat16).eps)
"""Allowed relative error of a gradient: sums in float32 are off by 1 %, or some 5 % where terms cancel."""


def check_bfloat16(subject: Subject) -> None:
    """In bfloat16 the output is close to that in float32 of the same, rounded, input."""
    x = subject.x(dtype=jnp.bfloat16)
    narrow = subject.apply(subject.params, x, full())[0]
    wide = subject.apply(subject.params, x.astype(jnp.float32), full())[0]
    assert_close(narrow, wide, dtype=jnp.bfloat16, reduction=x.shape[1] * subject.dim, what='bfloat16: y')


def check_bfloat16_gradients(subject: Subject) -> None:
    """In bfloat16 the gradient of every parameter, summed over thousands of tokens, is close to that in float32."""
    length = LONGEST if is_constant(subject) else SHORT
    rows = TOKENS // length
    # Numbers that are mostly of one sign, so that sums grow large beside their terms.
    x, weights = (1 + noise(rows, length, subject.dim, seed=seed) for seed in (0, 1))
    x, weights = x.astype(jnp.bfloat16), weights.astype(jnp.bfloat16)
    ctx = full(length, rows=rows)
    (narrow, _), (wide, _) = (
        subject.differentiated((subject.params, x.astype(dtype)), weights.astype(dtype), ctx)[1]
        for dtype in (jnp.bfloat16, jnp.float32)
    )
    named = jax.tree_util.tree_leaves_with_path(wide)
    for (path, expected), actual in zip(named, jax.tree.leaves(narrow), strict=True):
        size = float(np.linalg.norm(expected))
        error = float(np.linalg.norm(np.asarray(actual) - np.asarray(expected))) / max(size, 1e-30)
        name = jax.tree_util.keystr(path)
        require(error <= BOUND, f'bfloat16 gradients: that of {name} is off by {error:.1%}')


def check_bfloat16_sums(subject: Subject) -> None:
    """No gradient is summed over all tokens in bfloat16 where it is written: how that is rounded is up to a compiler.

    So it is where a vector is cast to the type of the activations before it is spread over tokens.
    """
    x = subject.x(dtype=jnp.bfloat16)

    def loss(params: Any, x: Array) -> Array:
        return jnp.sum(subject.run(params, x, full())[0].astype(jnp.float32))

    for equation in equations(jax.make_jaxpr(jax.grad(loss))(subject.params, x).jaxpr):
        if equation.primitive.name == 'reduce_sum' and equation.invars[0].aval.dtype == jnp.bfloat16:
            terms = equation.invars[0].aval.size // equation.outvars[0].aval.size
            shape = equation.invars[0].aval.shape
            require(terms < x.shape[0] * x.shape[1], f'bfloat16 sums: {terms} terms of an array of shape {shape}')


def is_constant(subject: Subject) -> bool:
    """Whether there is a state, and it does not grow with the sequence."""
    if not subject.causal or not hasattr(subject.mixer, 'init_state'):
        return False
    sizes = [
        sum(
            leaf.size
            for leaf in jax.tree.leaves(jax.eval_shape(lambda n=n: subject.mixer.init_state(1, n, jnp.float32)))
        )
        for n in (SHORT, LONGEST)
    ]
    return sizes[0] == sizes[1]
