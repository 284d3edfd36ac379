"""The definition of `long_conv`, lag by lag."""

import jax
import jax.numpy as jnp

from pallas_kernels import precision


def long_conv(x: jax.Array, kernel: jax.Array, runs: jax.Array | None) -> jax.Array:
    """Returns `y_t = sum_j kernel_j x_{t-j}`, over tokens of the same run, `b t d`; `kernel` is `w d`, `runs` `b t`."""
    t, lags = x.shape[1], min(x.shape[1], kernel.shape[0])
    x, kernel = (array.astype(precision.accumulator(x, kernel)) for array in (x, kernel))
    past = jnp.pad(x, ((0, 0), (t, 0), (0, 0)))
    past_runs = None if runs is None else jnp.pad(runs, ((0, 0), (t, 0)), constant_values=-1)

    def lag(y: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        j, tap = inputs
        then = jax.lax.dynamic_slice_in_dim(past, t - j, t, axis=1)
        if runs is not None and past_runs is not None:
            run = jax.lax.dynamic_slice_in_dim(past_runs, t - j, t, axis=1)
            then = jnp.where((run == runs)[..., None], then, 0)
        return y + tap[None, None] * then, None

    y, _ = jax.lax.scan(lag, jnp.zeros_like(x), (jnp.arange(lags), kernel[:lags]))
    return y
