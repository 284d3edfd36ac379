"""The definition of `delta_rule`, step by step."""

import jax
import jax.numpy as jnp


def delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    beta: jax.Array,
    log_decay: jax.Array | None,
    state: jax.Array,
    starts: jax.Array | None,
    scale: float,
    erase: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns `o_t = scale S_t^T q_t`, `b t h v`, and the last S, `b h k v`, of
    `S_t = (I - beta_t k_t k_t^T) diag(exp(log_decay_t)) S_{t-1} + beta_t k_t v_t^T`.

    `q`, `k` and `v` are `b t g k` and `b t g v`, heads any divisor of `h`; `beta` is `b t h`; `log_decay` is `b t h k`,
    of size 1 where it is constant, or `None`; `state` is `b h k v`; `starts`, bool `b t`, marks the tokens that forget
    the past. With `erase`, `b t g k`, it is `S_t = (I - beta_t k_t erase_t^T) diag(..) S_{t-1} + beta_t k_t v_t^T`.
    """
    heads = state.shape[1]
    q, k, v, erase = (
        jnp.repeat(array.astype(state.dtype), heads // array.shape[2], axis=2)
        for array in (q, k, v, k if erase is None else erase)
    )
    decay = jnp.ones_like(k) if log_decay is None else jnp.broadcast_to(jnp.exp(log_decay), k.shape)
    if starts is not None:
        decay = jnp.where(starts[:, :, None, None], 0, decay)

    def step(S: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q_t, k_t, v_t, erase_t, beta_t, decay_t = inputs
        missing = v_t - jnp.einsum('bhkv,bhk->bhv', S, decay_t * erase_t)
        S = decay_t[..., None] * S + k_t[..., None] * (beta_t[..., None] * missing)[..., None, :]
        return S, jnp.einsum('bhkv,bhk->bhv', S, q_t)

    inputs = (q * scale, k, v, erase, beta, decay)
    final, o = jax.lax.scan(step, state, tuple(jnp.moveaxis(array, 1, 0) for array in inputs))
    return jnp.moveaxis(o, 0, 1), final
