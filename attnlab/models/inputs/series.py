"""Windows of a series as tokens: variates apart, steps with all variates, or whole variates."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.models.inputs.inputs import Inputs
from attnlab.nn.parameter import buffer, param, uniform_within
from attnlab.nn.projections import Linear
from attnlab.nn.series_windows import Basis

Window = Float[Array, 'b steps v']
Rows = Float[Array, 'rows places d']
"""Tokens: a row a window, or a row a variate of one."""


class SeriesInputs(Inputs):
    """Maps windows to tokens, and the hidden states of these to one vector a variate.

    Made as `inputs(vocab, dim, lookback=, variates=, covariates=, rngs=)`; the columns of a window are the variates,
    then the covariates, which are read and have no vector.

    Attributes:
      places: how many tokens a row of the blocks has.
      width: channels of the vector of a variate.
    """

    places: int
    width: int

    @abc.abstractmethod
    def read(self, hidden: Rows) -> Float[Array, 'b v m']:
        """One vector a variate."""

    def context(self, ctx: Context) -> Context:
        """The context of the tokens of windows whose context is `ctx`."""
        positions = Context.full(self.rows(ctx.positions.shape[0]), self.places).positions
        return dataclasses.replace(ctx, positions=positions, segments=None, grid=None)

    def rows(self, windows: int) -> int:
        """How many rows of tokens there are for `windows` windows."""
        return windows


class Patching(SeriesInputs):
    """Base class of tokens that are patches of `patch` steps, `stride` apart, one after the other in time.

    Raises `UserError` where the patches leave a step of the look-back out.

    Args:
      vocab: ignored; inputs share one signature.
      dim: model width.
      lookback: steps of a window.
      variates: of a window.
      covariates: columns of a window behind these, which are read beside every one of them.
      patch: steps of a token.
      stride: from one token to the next; `None`: `patch`.
      repeat_last: how often the last step is repeated before patches are cut.
      positions: added to the tokens, made as `positions(dim, grid=, rngs=)`; `None`: none are.
      read_from: the 'last' token, which has seen all others, or 'all' of them, one after the other in one vector.
      rngs: draws the parameters.
    """

    def __init__(
        self,
        vocab: int,
        dim: int,
        *,
        lookback: int,
        variates: int,
        covariates: int,
        patch: int = 1,
        stride: int | None = None,
        repeat_last: int = 0,
        positions: Callable[..., nnx.Module] | None = None,
        read_from: Literal['last', 'all'] = 'last',
        rngs: nnx.Rngs,
    ):
        del vocab
        self.variates, self.covariates = variates, covariates
        self.patch, self.repeat_last, self.read_from = patch, repeat_last, read_from
        self.stride = patch if stride is None else stride
        self.places = self.count(lookback)
        self.width = dim * (self.places if read_from == 'all' else 1)
        self.linear = Linear(self.channels(), dim, bias=True, axes=(None, 'embed'), rngs=rngs)
        self.positions: Any = None if positions is None else positions(dim, grid=(1, self.places), rngs=rngs)
        self.apart: Any = self.reader(dim, rngs)

    def count(self, steps: int) -> int:
        """How many patches `steps` steps are. Raises `UserError` where they leave one out."""
        covered = steps + self.repeat_last - self.patch
        if covered < 0 or covered % self.stride:
            raise UserError(
                f'patches of {self.patch} steps, {self.stride} apart, leave steps of {steps + self.repeat_last} out; '
                'choose patch, stride or repeat_last so that the last patch ends with them'
            )
        return covered // self.stride + 1

    @abc.abstractmethod
    def channels(self) -> int:
        """Numbers of a patch."""

    def reader(self, dim: int, rngs: nnx.Rngs) -> nnx.Module | None:
        """What maps the vector of a row besides; nothing by default."""
        del dim, rngs
        return None

    def tokens_of(self, x: Float[Array, 'rows steps m'], dtype: DTypeLike | None) -> Rows:
        """Patches of rows, mapped, with positions; of shorter rows the first ones."""
        places = self.count(x.shape[1])
        if self.repeat_last:
            x = jnp.concatenate([x, jnp.repeat(x[:, -1:], self.repeat_last, axis=1)], axis=1)
        at = jnp.arange(places)[:, None] * self.stride + jnp.arange(self.patch)[None]
        patches = x[:, at].reshape(x.shape[0], places, self.patch * x.shape[2])
        y = self.linear(patches if dtype is None else patches.astype(dtype))
        if self.positions is None:
            return y
        return y + jnp.broadcast_to(self.positions().astype(y.dtype)[:places], y.shape)

    def whole(self, hidden: Rows) -> Float[Array, 'rows m']:
        """The vector of a row."""
        return hidden[:, -1] if self.read_from == 'last' else hidden.reshape(hidden.shape[0], -1)


class VariatesApart(Patching):
    """Every variate is a row of its own, of patches: one model for all, none of which sees another.

    Nie et al. 2023, https://arxiv.org/abs/2211.14730.
    """

    def __call__(self, tokens: Window, dtype: DTypeLike | None = None) -> Rows:
        """The tokens, the variates of a window as rows one after the other."""
        windows, steps = tokens.shape[:2]
        own = jnp.swapaxes(tokens[:, :, : self.variates], 1, 2)[..., None]
        beside = tokens[:, None, :, self.variates :]
        every = jnp.concatenate([own, jnp.broadcast_to(beside, (*own.shape[:3], self.covariates))], axis=-1)
        return self.tokens_of(every.reshape(windows * self.variates, steps, 1 + self.covariates), dtype)

    def channels(self) -> int:
        """The steps of a patch, of a variate and of every covariate."""
        return self.patch * (1 + self.covariates)

    def rows(self, windows: int) -> int:
        """One a variate."""
        return windows * self.variates

    def read(self, hidden: Rows) -> Float[Array, 'b v m']:
        """The vector of every row."""
        return self.whole(hidden).reshape(-1, self.variates, self.width)


class VariatesOnGrid(VariatesApart):
    """Patches of all variates in one row, on a grid of variates by times.

    Behrouz, Santacatterina and Zabih 2024, https://arxiv.org/abs/2406.04320.
    """

    def __call__(self, tokens: Window, dtype: DTypeLike | None = None) -> Rows:
        """The tokens, those of the first variate first."""
        apart = super().__call__(tokens, dtype)
        return apart.reshape(tokens.shape[0], self.variates * apart.shape[1], -1)

    def context(self, ctx: Context) -> Context:
        """The context of the tokens, with their grid."""
        grid = (self.variates, self.places)
        positions = Context.full(ctx.positions.shape[0], self.variates * self.places).positions
        return dataclasses.replace(ctx, positions=positions, segments=None, grid=grid)

    def rows(self, windows: int) -> int:
        """One a window."""
        return windows

    def read(self, hidden: Rows) -> Float[Array, 'b v m']:
        """The vector of every variate's tokens."""
        return super().read(hidden.reshape(hidden.shape[0] * self.variates, -1, hidden.shape[-1]))


class VariatesTogether(Patching):
    """A token is a patch of all variates; a linear map makes a vector of each variate from that of the window."""

    def __call__(self, tokens: Window, dtype: DTypeLike | None = None) -> Rows:
        """The tokens."""
        return self.tokens_of(tokens, dtype)

    def channels(self) -> int:
        """The steps of a patch, times the columns."""
        return self.patch * (self.variates + self.covariates)

    def reader(self, dim: int, rngs: nnx.Rngs) -> Linear:
        """From the vector of the window to those of the variates."""
        read, self.width = self.width, dim
        return Linear(read, self.variates * dim, bias=True, axes=('embed', None), rngs=rngs)

    def read(self, hidden: Rows) -> Float[Array, 'b v m']:
        """The mapped vector of the window, cut into those of the variates."""
        return self.apart(self.whole(hidden)).reshape(-1, self.variates, self.width)


class VariatesAsTokens(SeriesInputs):
    """A token is the whole look-back of a variate or covariate. Liu et al. 2024, https://arxiv.org/abs/2310.06625.

    Covariates come first, so that mixers that look back alone have seen them.
    """

    def __init__(self, vocab: int, dim: int, *, lookback: int, variates: int, covariates: int, rngs: nnx.Rngs):
        del vocab
        self.places, self.covariates, self.width = variates + covariates, covariates, dim
        # Not zero: a variate that is constant over the look-back is zeros once it is normalised.
        self.linear = Linear(
            lookback, dim, bias=True, axes=(None, 'embed'), bias_initializer=uniform_within(lookback**-0.5), rngs=rngs
        )

    def __call__(self, tokens: Window, dtype: DTypeLike | None = None) -> Rows:
        """The tokens, one a column."""
        steps = self.steps(tokens)
        return self.linear(steps if dtype is None else steps.astype(dtype))

    def steps(self, tokens: Window) -> Rows:
        """What is read of every column."""
        return jnp.roll(jnp.swapaxes(tokens, 1, 2), self.covariates, axis=1)

    def read(self, hidden: Rows) -> Float[Array, 'b v m']:
        """The hidden states of the variates."""
        return hidden[:, self.covariates :]


class OrthogonalVariates(VariatesAsTokens):
    """Variates as tokens, each the coordinates of its look-back in a basis, in `channels` copies.

        X = e x^T Q^T + D_v                  channels t; e drawn standard normal, D of variate v starting at zero
        token = W vec(X) + b

    Yue et al. 2025, https://arxiv.org/abs/2505.08550.

    Args:
      vocab: ignored; inputs share one signature.
      dim: model width.
      lookback: steps of a window.
      variates: of a window.
      covariates: columns behind these, tokens too.
      basis: gives `Q`, as `basis.rows(lookback)`.
      channels: copies.
      rngs: draws the parameters.
    """

    def __init__(
        self,
        vocab: int,
        dim: int,
        *,
        lookback: int,
        variates: int,
        covariates: int,
        basis: Basis,
        channels: int = 16,
        rngs: nnx.Rngs,
    ):
        super().__init__(vocab, dim, lookback=channels * lookback, variates=variates, covariates=covariates, rngs=rngs)
        self.basis = buffer(basis.rows(lookback), axes=(None, None))
        self.embedding = param(nnx.initializers.normal(1.0), (channels,), axes=(None,), group='vector', rngs=rngs)
        sizes = (self.places, lookback)
        self.shift = param(nnx.initializers.zeros, sizes, axes=(None, None), group='vector', rngs=rngs)

    def steps(self, tokens: Window) -> Rows:
        """The coordinates of every column, in copies."""
        basis, copies, shift = (one[...].astype(tokens.dtype) for one in (self.basis, self.embedding, self.shift))
        turned = super().steps(tokens) @ basis.T
        every = turned[:, :, None] * copies.reshape(1, 1, -1, 1)
        every = every + jnp.broadcast_to(shift[:, None], every.shape)
        return every.reshape(*turned.shape[:2], -1)
