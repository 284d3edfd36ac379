"""Training losses that regularise rows of attention weights."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from attnlab.context import PADDING
from attnlab.errors import UserError
from attnlab.functional.entropy import row_sums_and_entropy
from attnlab.functional.reach import Reach
from attnlab.signature import checked_fields
from attnlab.typing import Keys, Queries, Segments
from pallas_kernels import Relu, WeightMap


@checked_fields
@dataclasses.dataclass(frozen=True)
class RowPenalty:
    """For every query and head `|log S| + max(H - C log n, 0)`, weighted, of the rows `w_j = max(s_j, 0) / n`.

    `S` is the sum of a row over the `n` keys that the query sees, `H` the entropy of `w / S` in nats, and `C` the
    margin: the penalty drives rows to sum to one and not to be too flat. A row of zeros has no penalty.
    Shen et al. 2023, https://arxiv.org/abs/2302.06461. Raises `UserError` for negative weights.
    """

    normalisation: float = 1.0
    flatness: float = 1.0
    margin: float = 0.7
    penalises: ClassVar[WeightMap] = Relu()

    def __post_init__(self) -> None:
        for name, weight in (('normalisation', self.normalisation), ('flatness', self.flatness)):
            if weight < 0:
                raise UserError(f'{name} of RowPenalty is {weight}; it must be at least 0')

    def __call__(
        self, q: Queries, k: Keys, counts: Float[Array, 'b t'], segments: Segments | None, reach: Reach
    ) -> Float[Array, '']:
        """Returns the sum over real queries of the mean over heads; the queries include their temperatures."""
        sums, entropy = row_sums_and_entropy(q, k, jax.nn.relu, reach=reach, segments=segments)
        present = sums > 0
        logarithm = jnp.log(jnp.where(present, sums / counts[..., None], 1))
        flat = jax.nn.relu(entropy - self.margin * jnp.log(counts)[..., None])
        penalty = self.normalisation * jnp.abs(logarithm) + self.flatness * jnp.where(present, flat, 0)
        means = jnp.mean(penalty, axis=-1)
        return jnp.sum(means if segments is None else jnp.where(segments != PADDING, means, 0))
