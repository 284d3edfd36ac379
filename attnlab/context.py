"""What a mixer is told about a batch besides its activations."""

import dataclasses
import numbers

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from attnlab.errors import UserError
from attnlab.typing import DropoutKey, Positions, Segments

PADDING = 0
"""The segment of padding; documents are numbered from 1."""

MIXER_DROPOUT, MLP_DROPOUT, IN_MIXER, IN_EXPERTS, BACKWARDS = range(5)
"""Arguments of `Context.fold_in` for the parts of a layer, so that no two of them draw the same numbers: the dropout of
either branch of a block, draws within a mixer, the gate of experts, and a mixer that reads rows backwards."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FirstValues:
    """The values of the first layer that mixes values.

    Attributes:
      values: those of all heads, side by side.
      own: whether the layer that receives them is that first layer, which need not compute them again.
    """

    values: Float[Array, 'b t v']
    own: bool = dataclasses.field(metadata={'static': True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """Positions, documents and randomness of one batch; a frozen pytree.

    Attributes:
      positions: the position of every token in its document, int32, `b t`, from 0.
      segments: the document of every token, int32, `b t`, numbered from 1; 0 is padding. The tokens of a document are
        contiguous, and its number does not recur in the row. `None`: one document per row.
      grid: the static shape, `(height, width)` or `(depth, height, width)`, if the `t` tokens are a flattened image or
        volume, with the last axis fastest; otherwise `None`. Set by inputs.
      deterministic: `False` in training, where dropout applies.
      dropout_key: the key that dropout draws from; `None` when deterministic.
      condition: one vector per row that layers are conditioned on, `b m`, such as the time of a diffusion. Set by
        inputs.
      cut: the tokens (last axis) that each query must not see: wherever attention goes through
        `attnlab.functional.attend`, their scores are minus infinity. `None` except in analyses.
      labels: the number of labels that the loss of the batch is summed over, and by which the trainer divides it;
        `None`: as many as tokens. Set by tasks, read by penalties of layers (`attnlab.functional.penalty`).
      first_values: the values of the first layer of a stack that mixes values (`Mixer.mixes_values`), for that layer
        and those above it. Set by the stack; `None` below the first such layer.
    """

    positions: Positions
    segments: Segments | None = None
    grid: tuple[int, int] | tuple[int, int, int] | None = dataclasses.field(default=None, metadata={'static': True})
    deterministic: bool = dataclasses.field(default=True, metadata={'static': True})
    dropout_key: DropoutKey | None = None
    condition: Float[Array, 'b m'] | None = None
    cut: Bool[Array, '#b t t'] | None = None
    labels: Float[Array, ''] | None = None
    first_values: FirstValues | None = None

    @classmethod
    def full(cls, batch: int, length: int, *, start: int | jax.Array = 0) -> 'Context':
        """One document per row, without padding, whose first token has position `start`.

        Raises `UserError` for a size that is negative or not a whole number.
        """
        for name, size in (('batch', batch), ('length', length)):
            if not isinstance(size, numbers.Integral) or isinstance(size, bool) or size < 0:
                raise UserError(f'{name} of Context.full is {size!r}; it must be a whole number of at least 0')
        row = jnp.arange(length, dtype=jnp.int32) + start
        return cls(positions=jnp.broadcast_to(row, (batch, length)))

    def segments_or_ones(self) -> Segments:
        """The segments; ones where there is one document per row."""
        return jnp.ones_like(self.positions) if self.segments is None else self.segments

    def token(self, index: int | jax.Array) -> 'Context':
        """The context of one token of every row: its position, document and first values."""
        known = Context(self.positions, self.segments, first_values=self.first_values)
        return jax.tree.map(lambda array: jax.lax.dynamic_slice_in_dim(array, index, 1, axis=1), known)

    def unaided(self) -> 'Context':
        """The same context, for a layer that must compute its values itself even though it was given its own."""
        told = self.first_values is not None and self.first_values.own
        return dataclasses.replace(self, first_values=None) if told else self

    def fold_in(self, index: int | jax.Array) -> 'Context':
        """The same context with an independent dropout key, for layer `index`."""
        if self.dropout_key is None:
            return self
        return dataclasses.replace(self, dropout_key=jax.random.fold_in(self.dropout_key, index))
