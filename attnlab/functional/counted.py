"""Linear attention with the sums of the weights of its reads, by which normalised forms divide, as a last column."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from attnlab.functional import cores
from attnlab.typing import Keys, Queries, Values

LANES = 128
"""The channels of a whole tile of the kernels."""


def counts_apart(value_dim: int) -> bool:
    """Whether sums are a call of their own: a column of ones beside whole tiles of values would need another tile."""
    return value_dim % LANES == 0


def summable(*arrays: Array) -> tuple[Array, ...]:
    """Those of float16 in float32: sums over keys are out of range where quotients of them are not."""
    return tuple(array.astype(jnp.float32) if array.dtype == jnp.float16 else array for array in arrays)


def with_sums_apart(
    read: Callable[..., tuple[Array, Array]],
    sums: Callable[..., tuple[Array, Array]],
    state: Float[Array, 'b h m u'] | None,
) -> tuple[Float[Array, 'b t h u'], Float[Array, 'b h m u']]:
    """Returns the reads and the memory, the sums of weights as a column beside each; both are called with `state`."""
    memory, column = (None, None) if state is None else (state[..., :-1], state[..., -1])
    y, memory = read(state=memory)
    total, column = sums(state=column)
    y = jnp.concatenate([y, total.astype(y.dtype)[..., None]], axis=-1)
    return y, jnp.concatenate([memory, column[..., None]], axis=-1)


def counted_linear_attention(
    q: Queries,
    k: Keys,
    v: Values,
    log_decay: Array | None = None,
    *,
    state: Float[Array, 'b h m u'] | None = None,
    **core: Any,
) -> tuple[Float[Array, 'b t h u'], Float[Array, 'b h m u']]:
    """Returns the reads of `linear_attention` and the memory, both with what a value of one gives in a last column.

    `core` are the other arguments that all cores share. Of float16 all is computed and returned in float32.
    Katharopoulos et al. 2020, https://arxiv.org/abs/2006.16236.
    """
    q, k, v = summable(q, k, v)
    if counts_apart(v.shape[-1]):
        return with_sums_apart(
            lambda state: cores.linear_attention(q, k, v, log_decay, state=state, **core),
            lambda state: cores.linear_attention_sums(q, k, log_decay, state=state, **core),
            state,
        )
    ones = jnp.ones_like(v[..., :1])
    return cores.linear_attention(q, k, jnp.concatenate([v, ones], axis=-1), log_decay, state=state, **core)
