"""The definition of `diagonal_low_rank`: one step after the other."""

import jax
import jax.numpy as jnp


def diagonal_low_rank(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    a: jax.Array,
    b: jax.Array | None,
    log_decay: jax.Array | None,
    state: jax.Array,
    starts: jax.Array | None,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """Returns `o_t = scale S_t^T q_t`, `b t h v`, and the last S, `b h k v`, of
    `S_t = (diag(exp(log_decay_t)) + b_t a_t^T) S_{t-1} + k_t v_t^T`.

    `q`, `k`, `a` and `b` are `b t g k` and `v` is `b t g v`, heads any divisor of `h`; `b` is `k` where it is `None`;
    `log_decay` is `b t h k`, of size 1 where it is constant, or `None`; `state` is `b h k v`; `starts`, bool `b t`,
    marks the tokens that forget the past.
    """
    heads = state.shape[1]
    q, k, v, a, b = (
        jnp.repeat(array.astype(state.dtype), heads // array.shape[2], axis=2)
        for array in (q, k, v, a, k if b is None else b)
    )
    decay = jnp.ones_like(k) if log_decay is None else jnp.broadcast_to(jnp.exp(log_decay), k.shape)
    kept = jnp.ones(q.shape[:2], state.dtype) if starts is None else 1 - starts.astype(state.dtype)

    def step(S: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q_t, k_t, v_t, a_t, b_t, decay_t, kept_t = inputs
        S = kept_t[:, None, None, None] * S
        read = jnp.einsum('bhkv,bhk->bhv', S, a_t)
        S = decay_t[..., None] * S + b_t[..., None] * read[..., None, :] + k_t[..., None] * v_t[..., None, :]
        return S, jnp.einsum('bhkv,bhk->bhv', S, q_t)

    inputs = (q * scale, k, v, a, b, decay, kept)
    final, o = jax.lax.scan(step, state, tuple(jnp.moveaxis(array, 1, 0) for array in inputs))
    return jnp.moveaxis(o, 0, 1), final
