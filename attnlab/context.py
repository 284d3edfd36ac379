"""What a mixer may know about a batch besides its activations."""

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
"""What parts of a layer give to `Context.fold_in`, so that no two of them draw the same numbers: the dropout of either
branch of a block, what draws within a mixer, the gate of experts, and a mixer that reads rows backwards."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FirstValues:
    """The values of the first layer that mixes values.

    Attributes:
      values: of all heads.
      own: whether the layer that is told them is that one, which need not compute them again.
    """

    values: Float[Array, 'b t v']
    own: bool = dataclasses.field(metadata={'static': True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """Positions, documents and randomness of one batch; a frozen pytree.

    Attributes:
      positions: position of every token inside its document, int32, `b t`, from 0.
      segments: document of every token, int32, `b t`, numbered from 1; 0 is padding. The tokens of a document stand
        next to each other, and its number does not come again in the row. `None`: one document a row.
      grid: the static shape, `(height, width)` or `(depth, height, width)`, when the `t` tokens are a flattened image
        or volume, the last axis fastest; else `None`. Inputs declare it.
      deterministic: `False` in training, where dropout applies.
      dropout_key: the key dropout draws from; `None` when deterministic.
      condition: a vector a row that layers are told, `b m`, such as what time of a diffusion it is; inputs make it.
      cut: the tokens (last axis) that queries are kept from: their scores are minus infinity in whatever reads by
        `attnlab.functional.attend`; `None` but in analyses.
      labels: the number of labels that the loss of the batch is a sum over, by which the trainer divides it; `None`: as
        many as tokens. Tasks say it; penalties of layers read it (`attnlab.functional.penalty`).
      first_values: the values of the first layer of a stack that mixes them (`Mixer.mixes_values`), for it and those
        above; the stack says it. `None`: there is no such layer below.
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
        """One unbroken document a row, whose first token stands at position `start`.

        Raises `UserError` for sizes that are no whole numbers, or negative.
        """
        for name, size in (('batch', batch), ('length', length)):
            if not isinstance(size, numbers.Integral) or isinstance(size, bool) or size < 0:
                raise UserError(f'{name} of Context.full is {size!r}; it must be a whole number of at least 0')
        row = jnp.arange(length, dtype=jnp.int32) + start
        return cls(positions=jnp.broadcast_to(row, (batch, length)))

    def segments_or_ones(self) -> Segments:
        """The segments, spelled out when there is one document a row."""
        return jnp.ones_like(self.positions) if self.segments is None else self.segments

    def token(self, index: int | jax.Array) -> 'Context':
        """The context of one token of every row: its position, document and first values."""
        known = Context(self.positions, self.segments, first_values=self.first_values)
        return jax.tree.map(lambda array: jax.lax.dynamic_slice_in_dim(array, index, 1, axis=1), known)

    def unaided(self) -> 'Context':
        """The same for a layer that is to compute its values itself, though it is told its own."""
        told = self.first_values is not None and self.first_values.own
        return dataclasses.replace(self, first_values=None) if told else self

    def fold_in(self, index: int | jax.Array) -> 'Context':
        """The same context with an independent dropout key, for layer `index`."""
        if self.dropout_key is None:
            return self
        return dataclasses.replace(self, dropout_key=jax.random.fold_in(self.dropout_key, index))
