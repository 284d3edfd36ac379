"""Differential attention: two softmax maps, one subtracted from the other, so that what they have in common cancels."""

from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional.attend import attend, look
from attnlab.functional.cache import Entries, KeyValueCache, empty_cache
from attnlab.functional.needed import of_pairs
from attnlab.functional.precision import wide_dtype
from attnlab.functional.reach import Reach
from attnlab.functional.recomputed import recomputed_method
from attnlab.mixers.mixer import Mixer, require_causal
from attnlab.nn.heads import by_head, check_groups, head_channels
from attnlab.nn.parameter import param
from attnlab.nn.positions import Rope
from attnlab.nn.projections import Linear
from attnlab.typing import Heads, Sequence


class DifferentialAttention(Mixer):
    """Differential attention: every pair of heads reads one value by the difference of its two softmax maps.

        o_i = sum_j (p_ij - l p'_ij) v_j    y_i = W_o (1 - lambda_init) norm(o_i)
        l = exp(a . b) - exp(a' . b') + lambda_init

    `p` and `p'` are softmax weights of the two heads of a pair, heads `2 i` and `2 i + 1`, whose value has twice their
    channels; `norm` is applied to each pair; the vectors `a`, `b`, `a'`, `b'` are learned, and `l` is the same for
    all pairs. So with as many heads as softmax attention it has as many parameters, and four vectors more.
    Ye et al. 2025, https://arxiv.org/abs/2410.05258.

    The state is a cache of keys and values, those of a pair together. It holds the `length` tokens it was made for, and
    a call that goes beyond gives NaN.

    Raises `UserError` for an odd number of heads, or sizes that do not divide.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        kv_heads: int | None = None,
        key_dim: int | None = None,
        position: Rope | None = None,
        lambda_init: float = 0.8,
        norm: Callable[..., nnx.Module] | None = None,
        causal: bool = True,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        """Makes the projections, the norm and the four vectors.

        Args:
          dim: model width.
          heads: query heads, two for every softmax map that is left.
          kv_heads: key heads, two for every value head; query pair `i` reads key pair `i // (heads / kv_heads)`.
            `None`: as many as `heads`.
          key_dim: channels of a query or key per head, half those of a value; `None`: `dim / heads`.
          position: rotates queries and keys; `None`: no positions.
          lambda_init: where `l` starts, give or take what the vectors, normal of standard deviation 0.1, add to it.
          norm: made as `norm(2 * key_dim, rngs=)`, one for all pairs; `None`: neither norm nor factor.
          causal: whether a query sees no later key.
          implementation: of the core; `None`: the default of the platform.
          rngs: draws the parameters.
        """
        kv_heads = heads if kv_heads is None else kv_heads
        for name, count in (('heads', heads), ('kv_heads', kv_heads)):
            if count < 2 or count % 2:
                raise UserError(f'{name} is {count}; they come in pairs, so it must be even')
        check_groups(heads, kv_heads)
        self.pairs, self.kv_pairs = heads // 2, kv_heads // 2
        self.key_dim = head_channels(dim, heads, instead='key_dim') if key_dim is None else key_dim
        self.position, self.lambda_init, self.causal, self.implementation = (
            position,
            lambda_init,
            causal,
            implementation,
        )
        self.query = Linear(dim, heads * self.key_dim, rngs=rngs)
        self.key = Linear(dim, kv_heads * self.key_dim, rngs=rngs)
        self.value = Linear(dim, kv_heads * self.key_dim, rngs=rngs)
        self.lambdas = param(
            nnx.initializers.normal(0.1), (4, self.key_dim), axes=(None, None), group='vector', rngs=rngs
        )
        self.norm = None if norm is None else norm(2 * self.key_dim, rngs=rngs)
        self.output = Linear(heads * self.key_dim, dim, axes=('heads', 'embed'), rngs=rngs)

    def __call__(
        self, x: Sequence, ctx: Context, state: KeyValueCache | None = None
    ) -> tuple[Sequence, KeyValueCache | None]:
        q, k = self._rotated(self.query(x), ctx), self._rotated(self.key(x), ctx)
        v = by_head(self.value(x), self.kv_pairs)
        view = look(Entries(k, v, ctx.segments_or_ones()), ctx, Reach(self.causal), state)
        # Values are multiplied by the difference of the weights, once, by the definition.
        scored = of_pairs(attend, pairs=view.pairs(self.pairs), channels=self.key_dim)
        y = self._difference(
            *(
                read(one, other, view.entries.values, view, implementation=self.implementation)
                for read, one, other in zip((attend, scored), _halves(q), _halves(view.entries.keys), strict=True)
            )
        )
        if self.norm is not None:
            y = (1 - self.lambda_init) * self.norm(y)
        return self.output(y.reshape(*x.shape[:2], -1).astype(x.dtype)), view.cache

    def mix(self) -> Float[Array, '']:
        """Returns `l`, how much of the second map is subtracted, in float32 or better."""
        a, b, c, d = self.lambdas[...].astype(wide_dtype(self.lambdas.dtype))
        return jnp.exp(jnp.sum(a * b)) - jnp.exp(jnp.sum(c * d)) + self.lambda_init

    @property
    def divides_time(self) -> bool:
        return self.causal

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> KeyValueCache:
        """Returns an empty cache of `length` slots."""
        require_causal(self, self.causal)
        return empty_cache(
            batch,
            length,
            kv_heads=self.kv_pairs,
            key_dim=2 * self.key_dim,
            value_dim=2 * self.key_dim,
            dtype=dtype,
        )

    def _rotated(self, heads: Sequence, ctx: Context) -> Float[Array, 'b t h k']:
        """Queries or keys rotated by position, the two of a pair side by side."""
        x = heads.reshape(*heads.shape[:2], -1, self.key_dim)
        x = x if self.position is None else self.position.rotate(x, ctx.positions)
        return x.reshape(*heads.shape[:2], -1, 2 * self.key_dim)

    @recomputed_method
    def _difference(self, first: Heads, second: Heads) -> Heads:
        """The reads of the two maps, subtracted in float32 or better."""
        mix = self.mix()
        return first.astype(mix.dtype) - mix * second.astype(mix.dtype)


def _halves(pairs: Float[Array, 'b t h _']) -> list[Float[Array, 'b t h k']]:
    """The first heads of all pairs, and the second."""
    return jnp.split(pairs, 2, axis=-1)
