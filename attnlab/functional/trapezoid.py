"""A linear system whose input enters by the trapezoidal rule, as linear attention."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float

from attnlab.functional import cores
from attnlab.functional.precision import wide_dtype
from attnlab.functional.recomputed import recomputed
from attnlab.typing import Segments

Ranked = Float[Array, 'b t r h k']


def accumulated_angles(
    steps: Float[Array, 'b t h n'], starts: Bool[Array, 'b t'] | None, before: Float[Array, 'b h n']
) -> Float[Array, 'b t h n']:
    """Returns `phi_t = phi_{t-1} + steps_t`, modulo a full turn, from `before` on, and from 0 at every start.

    Wrapped after every sum, so that it keeps its precision over any length.
    """
    starts = jnp.zeros(steps.shape[:2], bool) if starts is None else starts
    first = steps[:, 0] + jnp.where(starts[:, 0, None, None], 0, before)
    steps = wrapped(jnp.concatenate([first[:, None], steps[:, 1:]], axis=1))

    def join(early: tuple[Array, Array], late: tuple[Array, Array]) -> tuple[Array, Array]:
        angle = jnp.where(late[1], late[0], wrapped(early[0] + late[0]))
        return angle, early[1] | late[1]

    return jax.lax.associative_scan(join, (steps, starts[:, :, None, None]), axis=1)[0]


def wrapped(angle: Float[Array, '...']) -> Float[Array, '...']:
    """The angle in radians, less the whole turns in it."""
    return angle - 2 * np.pi * jnp.floor(angle / (2 * np.pi))


def trapezoidal_attention(
    q: Ranked,
    k: Ranked,
    v: Float[Array, 'b t r h v'],
    log_decay: Float[Array, 'b t h'],
    now: Float[Array, 'b t h'],
    past: Float[Array, 'b t h'],
    before: tuple[Ranked, Float[Array, 'b t r h v'], Float[Array, 'b t h']],
    *,
    state: Float[Array, 'b h k v'] | None = None,
    segments: Segments | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, 'b t r h v'], Float[Array, 'b h k v']]:
    """Returns `y_tr = S_t^T q_tr`, and a memory, of the `r` writes a token

        S_t = a_t (S_{t-1} + past_t sum_r k_{t-1,r} v_{t-1,r}^T) + now_t sum_r k_tr v_tr^T

    `before` is what `k`, `v` and `now` were one token earlier, zero where a document starts. The memory is `S_t`
    without what token `t` has written itself: `M_t = a_t (M_{t-1} + (past_t + now_{t-1}) sum_r k_{t-1,r} v_{t-1,r}^T)`.
    So no weight of a later token is needed, and `M` is linear attention over the tokens' writes, one after the other.
    `state` is the memory before the first token.
    Lahoti et al. 2026, https://arxiv.org/abs/2603.15569.
    """
    b, t, r, h, _ = q.shape
    wide = wide_dtype(q.dtype)
    k_before, v_before, now_before = before
    weight = jnp.exp(log_decay) * (past + now_before)
    written = _weighted(v_before, weight).astype(v.dtype)
    # A token decays the memory once, before the first of its writes.
    decay = jnp.pad(log_decay[:, :, None], ((0, 0), (0, 0), (0, r - 1), (0, 0)))
    y, memory = cores.linear_attention(
        *(each.reshape(b, t * r, h, -1) for each in (q, k_before, written)),
        decay.reshape(b, t * r, h),
        scale=1.0,
        state=state,
        segments=None if segments is None else jnp.repeat(segments, r, axis=1),
        implementation=implementation,
    )
    y = y.reshape(v.shape).astype(wide)
    scores = jnp.einsum('btrhk,btshk->bthrs', q, k, preferred_element_type=wide) * now[..., None, None]
    y = y + jnp.einsum('bthrs,btshv->btrhv', scores, v.astype(wide))
    if r > 1:  # Of the earlier token's writes, a query has read those up to its own place in the row.
        missed = jnp.einsum('btrhk,btshk->bthrs', q, k_before, preferred_element_type=wide)
        y = y + jnp.einsum('bthrs,btshv->btrhv', jnp.triu(missed, 1), written.astype(wide))
    return y, memory


@recomputed
def _weighted(v: Float[Array, 'b t r h v'], weight: Float[Array, 'b t h']) -> Float[Array, 'b t r h v']:
    return weight[:, :, None, :, None] * v
