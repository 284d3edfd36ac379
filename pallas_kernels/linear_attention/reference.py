"""The definition of `linear_attention`, step by step."""

import jax
import jax.numpy as jnp


def linear_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array | None, state: jax.Array, starts: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Returns `o_t = S_t^T q_t`, `b t h v`, and the last S, `b h k v`, of
    `S_t = diag(exp(log_decay_t)) S_{t-1} + k_t v_t^T`.

    `q` is `b t h k` and scaled; `k`, `v` are `b t g k` and `b t g v`, heads any divisor of `h`; `log_decay` is
    `b t h k`, of size 1 where it is constant, or `None`; `state` is `b h k v`; `starts`, bool `b t`, marks the tokens
    that forget the past.
    """
    return _by_steps('bhkv,bhk->bhv', q, k, v, log_decay, state, starts)


def linear_attention_rows(
    q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array | None, state: jax.Array, starts: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """The same with `q`, `b t h v`, and `o_t = S_t q_t`, `b t h k`."""
    return _by_steps('bhkv,bhv->bhk', q, k, v, log_decay, state, starts)


def _by_steps(
    read: str,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array | None,
    state: jax.Array,
    starts: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    heads = state.shape[1]
    q, k, v = (jnp.repeat(array, heads // array.shape[2], axis=2) for array in (q, k, v))
    decay = jnp.ones_like(k) if log_decay is None else jnp.broadcast_to(jnp.exp(log_decay), k.shape)
    if starts is not None:
        decay = jnp.where(starts[:, :, None, None], 0, decay)

    def step(S: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q_t, k_t, v_t, decay_t = inputs
        S = decay_t[..., None] * S + k_t[..., None] * v_t[..., None, :]
        return S, jnp.einsum(read, S, q_t)

    final, o = jax.lax.scan(step, state, tuple(jnp.moveaxis(array, 1, 0) for array in (q, k, v, decay)))
    return jnp.moveaxis(o, 0, 1), final
