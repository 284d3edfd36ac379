"""The output is like the input."""

import jax
import jax.numpy as jnp

from attnlab.testing.contract.subject import Subject, full, require


def check_shape_and_type(subject: Subject) -> None:
    """`y` has the shape and type of `x`, no state comes out when none went in, and every number is finite."""
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        x = subject.x(dtype=dtype)
        y, state = jax.eval_shape(subject.run, subject.params, x, full())
        require(
            y.shape == x.shape and y.dtype == x.dtype,
            f'shape and type: {x.dtype}{x.shape} became {y.dtype}{y.shape}',
        )
        require(state is None, f'shape and type: a state came out, {type(state).__name__}, though none went in')
    y, _ = subject.apply(subject.params, subject.x(), full())
    require(bool(jnp.isfinite(y).all()), 'shape and type: the output is not finite')
