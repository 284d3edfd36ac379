"""Models of dynamical systems: maps that go on by themselves, trained beside the trajectory that they are to follow."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from attnlab.blocks.block import Stage
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional.recurrences import almost_linear
from attnlab.mixers.recurrent.almost_linear import stable_diagonal
from attnlab.models.heads.head import wide
from attnlab.models.whole_rows import WholeRows
from attnlab.nn.parameter import param
from attnlab.nn.projections import Linear
from attnlab.typing import DropoutKey, Embedded, Features, State

Latent = Float[Array, 'b n']


WORD = 16
"""Signs of rectified units in one of the numbers that name a region."""


class AlmostLinearDynamics(WholeRows):
    """AL-RNN as an autonomous model of a trajectory, by sparse teacher forcing.

        z_t = a * z_{t-1} + W f(z_{t-1}) + h        x_t = (z_t)_{1..v}

    The first units are what is observed, and `f` rectifies the last `rectified` units of `state`: linear in each of at
    most `2^rectified` regions. A trajectory is entered at `z_1 = [x_1; L x_1]`. Reading one, the prediction of the next
    row is that of the state as it runs; then, before every `forcing`-th row, its observed units are overwritten by the
    row, through which no gradient flows back. Starts are those of `attnlab.mixers.recurrent.almost_linear`, `L` as
    linear maps start here. All is in float32. Implements `attnlab.models.predictor.Predictor` and `Dynamical`.
    Brenner et al. 2024, https://arxiv.org/abs/2410.14240.

    Raises `UserError` for fewer units than are observed and for more rectified ones than there are.

    Args:
      vocab: numbers of a row.
      state: units.
      rectified: how many of them are rectified.
      forcing: rows from one that overwrites units to the next; 1: every row does.
      noise: standard deviation of what is added, in training alone, to the rows that overwrite units.
      dtype: not used: all is in float32.
      rngs: draws the parameters.
    """

    def __init__(
        self,
        vocab: int,
        *,
        state: int = 20,
        rectified: int = 2,
        forcing: int = 16,
        noise: float = 0.0,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        if not vocab <= state or not 0 <= rectified <= state:
            raise UserError(
                f'state is {state} with {rectified} rectified units; it must be at least the {vocab} numbers of a row, '
                'and at least as many as are rectified'
            )
        if forcing < 1 or noise < 0:
            raise UserError(f'forcing is {forcing} and noise {noise}; they must be at least 1 and 0')
        self.vocab, self.linear, self.forcing, self.noise = vocab, state - rectified, forcing, noise
        self.dtype = jnp.dtype(dtype)
        self.unobserved = Linear(vocab, state - vocab, axes=(None, None), rngs=rngs) if state > vocab else None
        self.diagonal = param(stable_diagonal, (state,), axes=(None,), group='dynamics', rngs=rngs)
        small = nnx.initializers.normal(0.01)
        self.recurrent = param(small, (state, state), axes=(None, None), group='dynamics', rngs=rngs)
        self.offset = param(nnx.initializers.zeros, (state,), axes=(None,), group='dynamics', rngs=rngs)

    @property
    def outputs(self) -> int:
        """Numbers of a row."""
        return self.vocab

    def enter(self, row: Float[Array, 'b v']) -> Latent:
        """The state in which a trajectory is entered at a row."""
        row = wide(row)
        return row if self.unobserved is None else jnp.concatenate([row, self.unobserved(row)], axis=1)

    def step(self, state: Latent) -> Latent:
        """The state one row later."""
        diagonal, recurrent, offset = (each[...] for each in (self.diagonal, self.recurrent, self.offset))
        return almost_linear(state, diagonal, recurrent, self.linear) + offset[None]

    def observed(self, state: Latent) -> Float[Array, 'b v']:
        """The row that a state stands for."""
        return state[:, : self.vocab]

    def region(self, state: Latent) -> Int[Array, 'b w']:
        """The region that the state is in, by the signs of rectified units: bits, in words of `WORD`."""
        bits = (state[:, self.linear :] > 0).astype(jnp.int32)
        words = max(1, -(-bits.shape[1] // WORD))
        bits = jnp.pad(bits, ((0, 0), (0, words * WORD - bits.shape[1]))).reshape(-1, words, WORD)
        return jnp.sum(bits << jnp.arange(WORD, dtype=jnp.int32)[None, None], axis=-1, dtype=jnp.int32)

    def hidden(self, tokens: Features, ctx: Context, state: State | None = None) -> tuple[Embedded, State | None]:
        """The prediction of the row after every row, `b t v`, in float32, and no state."""
        del state
        rows = wide(tokens)
        if rows.shape[2] != self.vocab:
            raise UserError(f'rows of the task have {rows.shape[2]} numbers; config.model is for {self.vocab}')
        if self.noise and ctx.dropout_key is not None:
            rows = rows + self.noise * jax.random.normal(ctx.dropout_key, rows.shape, rows.dtype)
        forced = jnp.arange(rows.shape[1]) % self.forcing == 0

        def follow(state: Latent, inputs: tuple[Array, Array]) -> tuple[Latent, Array]:
            row, overwrites = inputs
            state = jnp.where(overwrites, jnp.concatenate([row, state[:, self.vocab :]], axis=1), state)
            state = self.step(state)
            return state, self.observed(state)

        _, predicted = jax.lax.scan(follow, self.enter(rows[:, 0]), (jnp.moveaxis(rows, 1, 0), forced))
        return jnp.moveaxis(predicted, 0, 1), None

    def pooled(self, tokens: Features, ctx: Context) -> Float[Array, 'b d']:
        """The mean of the predictions."""
        return jnp.mean(self.hidden(tokens, ctx)[0], axis=1)

    def losses(
        self, hidden: Float[Array, '*b v'], targets: Float[Array, '*b v'], key: DropoutKey | None = None
    ) -> Float[Array, '*b']:
        """The mean squared error of every row."""
        del key
        return jnp.mean(jnp.square(hidden - wide(targets)), axis=-1)

    def logits(self, hidden: Float[Array, '*b v']) -> Float[Array, '*b v']:
        """The predictions as they are."""
        return hidden

    def stages(self, tokens: Features, ctx: Context) -> Iterator[Stage]:
        """The state in which rows are entered, and the predictions."""
        yield Stage('enter', self.enter(tokens[:, 0]))
        yield Stage('predictions', self.hidden(tokens, ctx)[0])
