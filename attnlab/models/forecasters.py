"""Models of series: the look-back, normalised, is mapped to one vector a variate, and a head forecasts from it."""

import abc
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Shaped

from attnlab.blocks.block import Stage
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional.written import BYTES, written_statistics
from attnlab.models.heads.affine import AffineHead
from attnlab.models.heads.head import Head, losses_of, with_penalty
from attnlab.models.heads.quantile import Quantiles
from attnlab.models.heads.segments import MixedSegmentHead
from attnlab.models.inputs.embedding import Embedding
from attnlab.models.inputs.series import Rows, SeriesInputs, VariatesApart
from attnlab.models.stack import Stack
from attnlab.models.two_rates import TwoRates
from attnlab.models.whole_rows import WholeRows
from attnlab.nn.norms import RMSNorm
from attnlab.nn.parameter import param
from attnlab.nn.series_windows import NO_COVARIATES, Covariates, Trend, WindowGain, WindowNorm, level_and_scale
from attnlab.typing import DropoutKey, Embedded, Features, State

Vectors = Float[Array, 'b v d']
Wider = Float[Array, 'b v n']
Lookback = Float[Array, 'b s n']
Level = Float[Array, 'b 1 v']


class WindowModel(WholeRows):
    """Base class of models that forecast `vocab` steps of every variate of a window, `b t v`.

    Behind the variates are covariates, and where some of them are known ahead, the rows of the horizon follow those
    of the look-back (`attnlab.data.series.windows.Windows`). What is known over the horizon is read by the head, beside
    the vector of every variate. The hidden state of a variate ends with its level and its scale, by which the head's
    forecasts are multiplied and shifted: `y = scale * head(h) + level`. The loss is in the units of the window too
    where the head says by which power of a unit it grows. Implements `attnlab.models.predictor.Distributional`.
    """

    head: Any

    def __init__(
        self,
        vocab: int,
        lookback: int,
        variates: int,
        covariates: Covariates,
        norm: WindowNorm | None,
        gain: Callable[..., WindowGain] | None,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.vocab, self.lookback, self.variates = vocab, lookback, variates
        self.covariates, self.window_norm = covariates, norm
        self.window_gain: Any = None if gain is None else gain(variates, rngs=rngs)
        self.dtype = jnp.dtype(dtype)

    def check_gain(self) -> None:
        """Raises `UserError` for a gain where the loss does not grow with the unit, which it would then shrink."""
        if self.window_gain is not None and not self.head.degree:
            raise UserError(f'a gain of windows does not go with {type(self.head).__name__}; leave it out (gain=0)')

    @property
    def outputs(self) -> int:
        """Steps that are forecast."""
        return self.vocab

    @property
    def distributions(self) -> bool:
        """Whether the head predicts distributions."""
        return isinstance(self.head, Quantiles)

    @abc.abstractmethod
    def vectors(self, window: Features, ctx: Context) -> Vectors:
        """One vector a variate of a normalised look-back."""

    def hidden(self, tokens: Features, ctx: Context, state: State | None = None) -> tuple[Embedded, State | None]:
        """One vector a variate, `b v d`, in float32, and no state."""
        del state
        window, level, scale = self.normalised(tokens)
        found = self.with_horizon(self.vectors(window, ctx).astype(jnp.float32), tokens)
        return jnp.concatenate([found, *(jnp.swapaxes(one, 1, 2) for one in (level, scale))], axis=-1), None

    def normalised(self, tokens: Features) -> tuple[Lookback, Level, Level]:
        """The look-back in its own units, the level and the scale of the variates.

        What is known ahead stays as it is. Raises `UserError` for windows of other sizes.
        """
        rows, columns = self.covariates.rows(self.vocab), self.variates + self.covariates.count
        lookback = tokens.shape[1] - rows
        if not self.reads(lookback) or tokens.shape[2] != columns:
            ahead = f' and {rows} of the horizon' if rows else ''
            raise UserError(
                f'config.model is for a look-back of {self.lookback} rows{ahead} of {columns} variates; windows of the '
                f'task have {tokens.shape[1]} rows (config.length{" and task.horizon" if rows else ""}) of '
                f'{tokens.shape[2]} variates'
            )
        past = tokens[:, :lookback]
        own, known = jnp.split(past, [self.variates + self.covariates.observed], axis=2)
        level, scale = level_and_scale(self.window_norm, own)
        window, observed = jnp.split((own - level) / scale, [self.variates], axis=2)
        # Statistics are constants; a gain of them is not.
        level, scale = (jax.lax.stop_gradient(one[..., : self.variates]) for one in (level, scale))
        if self.window_gain is not None:
            window, level, scale = self.window_gain(window, level, scale)
        return jnp.concatenate([window, observed, known], axis=2), level, scale

    def reads(self, rows: int) -> bool:
        """Whether a look-back may have `rows` rows."""
        return rows == self.lookback

    def with_horizon(self, vectors: Vectors, tokens: Features) -> Wider:
        """The vectors of the variates, with what is known over the horizon beside each."""
        if not self.covariates.read_ahead(self.vocab):
            return vectors
        ahead = tokens[:, self.lookback :, self.variates + self.covariates.observed :].astype(vectors.dtype)
        flat = ahead.reshape(len(ahead), 1, self.vocab * self.covariates.known)
        beside = jnp.broadcast_to(flat, (*vectors.shape[:2], flat.shape[2]))
        return jnp.concatenate([vectors, beside], axis=-1)

    def pooled(self, tokens: Features, ctx: Context) -> Float[Array, 'b d']:
        """The mean over variates."""
        return jnp.mean(self.hidden(tokens, ctx)[0], axis=1)

    def losses(
        self, hidden: Float[Array, '*b d'], targets: Shaped[Array, '...'], key: DropoutKey | None = None
    ) -> Float[Array, '*b']:
        """The loss of the head, one number a variate, in the units of its window.

        With a key what the head minimises in training, whose penalty of weights has no unit. Raises `UserError` for a
        head that gives another number of them.
        """
        features, level, scale = _apart(hidden)
        targets = (targets - level) / scale
        head = self.head
        if key is not None and not head.degree:
            return losses_of(head, features, targets, key)
        # A learned gain may have become negative.
        losses = losses_of(head, features, targets, None) * jnp.abs(scale[..., 0]) ** head.degree
        return losses if key is None else with_penalty(losses, head.penalty())

    def logits(self, hidden: Float[Array, '*b d']) -> Float[Array, '*b o']:
        """The forecasts, in float32."""
        features, level, scale = _apart(hidden)
        return self.head.logits(features) * scale + level

    def quantiles(self, hidden: Float[Array, '*b d'], levels: Float[Array, ' n']) -> Float[Array, '*b n o']:
        """The quantiles of these levels, in float32. Raises `UserError` for a head without any."""
        if not self.distributions:
            raise UserError(f'{type(self.head).__name__} forecasts numbers, not distributions')
        features, level, scale = _apart(hidden)
        every = jnp.broadcast_to(levels.reshape((1,) * (hidden.ndim - 1) + (-1,)), (*hidden.shape[:-1], len(levels)))
        # A negative gain turns the distribution over.
        every = jnp.where(scale < 0, 1 - every, every)
        return self.head.quantiles(features, every) * scale[..., None] + level[..., None]


class LinearForecaster(WindowModel):
    """The head reads the window itself, so that forecasts are linear in it.

        y_v = W [x_v ; every covariate] + b

    Zeng et al. 2023, https://arxiv.org/abs/2205.13504, who have no covariates.

    Args:
      vocab: steps forecast.
      lookback: steps read.
      variates: columns that are forecast.
      covariates: columns behind these.
      window_norm: normalises a window; `None`: it stays as it is.
      window_gain: its learned gain, made as `window_gain(variates, rngs=rngs)`; `None`: without.
      decomposition: the head reads the rest beside the trend; `None`: the window.
      head: makes the head, as `head(dim, vocab, rngs=rngs)`.
      dtype: ignored but for its name; the map is in float32.
      rngs: draws the parameters.
    """

    def __init__(
        self,
        vocab: int,
        *,
        lookback: int,
        variates: int,
        covariates: Covariates = NO_COVARIATES,
        window_norm: WindowNorm | None = None,
        window_gain: Callable[..., WindowGain] | None = None,
        decomposition: Trend | None = None,
        head: Callable[..., Head] = AffineHead,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        super().__init__(vocab, lookback, variates, covariates, window_norm, window_gain, dtype, rngs)
        self.decomposition = decomposition
        own = lookback * (1 if decomposition is None else 2)
        self.head = head(own + lookback * covariates.count + covariates.read_ahead(vocab), vocab, rngs=rngs)
        self.check_gain()

    def vectors(self, window: Features, ctx: Context) -> Vectors:
        """The steps of every variate, or the rest and the trend, and beside them those of the covariates."""
        del ctx
        own, beside = jnp.split(window, [self.variates], axis=2)
        parts = [own] if self.decomposition is None else list(self.decomposition.divide(own))
        flat = jnp.swapaxes(beside, 1, 2).reshape(len(window), 1, -1)
        every = jnp.broadcast_to(flat, (len(window), self.variates, flat.shape[2]))
        return jnp.concatenate([*(jnp.swapaxes(part, 1, 2) for part in parts), every], axis=-1)

    def stages(self, tokens: Features, ctx: Context) -> Iterator[Stage]:
        """The hidden states and the forecasts."""
        hidden, _ = self.hidden(tokens, ctx)
        yield Stage('window', hidden)
        yield Stage('head', self.logits(hidden))


class StackForecaster(WindowModel):
    """Tokens of a window through a stack of blocks; implements `attnlab.models.predictor.Stacked` too.

    Args:
      vocab: steps forecast.
      dim: model width.
      stack: makes the stack, as `stack(dim, rngs=rngs)`; `TwoRates` goes with inputs that read the last token.
      lookback: steps read.
      variates: columns that are forecast.
      covariates: columns behind these.
      window_norm: normalises a window; `None`: it stays as it is.
      window_gain: its learned gain, made as `window_gain(variates, rngs=rngs)`; `None`: without.
      inputs: makes tokens of windows, as `inputs(vocab, dim, lookback=, variates=, covariates=, rngs=rngs)`.
      norm: makes the final norm.
      head: makes the head, as `head(dim, vocab, rngs=rngs)`.
      dtype: type of the activations of the stack.
      rngs: draws the parameters.
    """

    predicts_next: ClassVar[bool] = False

    def __init__(
        self,
        vocab: int,
        *,
        dim: int,
        stack: Callable[..., Stack | TwoRates],
        lookback: int,
        variates: int,
        covariates: Covariates = NO_COVARIATES,
        window_norm: WindowNorm | None = None,
        window_gain: Callable[..., WindowGain] | None = None,
        inputs: Callable[..., SeriesInputs] = VariatesApart,
        norm: Callable[..., nnx.Module] = RMSNorm,
        head: Callable[..., Head] = AffineHead,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        super().__init__(vocab, lookback, variates, covariates, window_norm, window_gain, dtype, rngs)
        self.dim = dim
        self.embedding: Any = inputs(
            vocab, dim, lookback=lookback, variates=variates, covariates=covariates.count, rngs=rngs
        )
        self.stack = stack(dim, rngs=rngs)
        self.norm: Any = norm(dim, rngs=rngs)
        self.head = head(self.width + covariates.read_ahead(vocab), vocab, rngs=rngs)
        self.check_gain()
        if self.predicts_next:
            self.check_looks_back()

    @property
    def width(self) -> int:
        """What the head is made for, what is known ahead not counted."""
        return self.embedding.width

    def tokens(self, window: Features) -> Rows:
        """The input of the first block, of a normalised window."""
        return self.embedding(window, self.dtype)

    def vectors(self, window: Features, ctx: Context) -> Vectors:
        """The vectors of the stack's output."""
        x, _ = self.stack(self.tokens(window), self.layout(ctx), None)
        return self.read(self.norm(x), window)

    def read(self, hidden: Rows, window: Features) -> Wider:
        """One vector a variate, of the normalised output and the window."""
        del window
        return self.embedding.read(hidden)

    def embed(self, tokens: Features, ctx: Context) -> Rows:
        """The input of the first block."""
        del ctx
        return self.tokens(self.normalised(tokens)[0])

    def layout(self, ctx: Context) -> Context:
        """The context of the blocks."""
        return self.embedding.context(ctx)

    def context(self, ctx: Context, tokens: Features) -> Context:
        """The layout: blocks are told nothing besides."""
        del tokens
        return self.layout(ctx)

    def stages(self, tokens: Features, ctx: Context) -> Iterator[Stage]:
        """Every named intermediate value in order, lazily, layer by layer."""
        x = self.embed(tokens, ctx)
        yield Stage('embedding', x)
        for stage in self.stack.stages(x, self.layout(ctx)):
            yield Stage(f'stack.{stage.name}', stage.value)
            x = stage.value
        x = self.norm(x)
        yield Stage('norm', x)
        read = self.with_horizon(self.read(x, self.normalised(tokens)[0]).astype(jnp.float32), tokens)
        yield Stage('head', self.head.logits(read))


class SegmentForecaster(StackForecaster):
    """A token is a segment of a variate, and after every one the next is predicted, of as many steps.

    All segments are in the loss, by the head, `attnlab.models.heads.segments.NextSegmentHead`; the one after the last
    is the forecast. With causal mixers a prediction depends on no later segment but by the normalisation of the window.
    A look-back may be of more or fewer segments than those of training: what is put before it is read as a context (in-
    context forecasting). Liu et al. 2024, "AutoTimes", https://arxiv.org/abs/2402.02370.

    Arguments are those of `StackForecaster`. Raises `UserError` for covariates, for a look-back that is not made of
    segments, and for a part that looks ahead.
    """

    predicts_next = True

    @property
    def width(self) -> int:
        """The width of a token."""
        return self.dim

    @property
    def reader(self) -> Any:
        """What makes tokens of segments."""
        return self.embedding

    def reads(self, rows: int) -> bool:
        """Any number of segments."""
        return rows > 0 and rows % self.vocab == 0

    def layout(self, ctx: Context) -> Context:
        """The context of the segments of every variate."""
        rows, steps = ctx.positions.shape
        positions = Context.full(rows * self.variates, self.reader.count(steps)).positions
        return dataclasses.replace(ctx, positions=positions, segments=None, grid=None)

    def read(self, hidden: Rows, window: Features) -> Wider:
        """The vectors of all tokens of a variate, and behind them its steps."""
        steps = window.shape[1]
        if self.covariates.count or hidden.shape[1] * self.vocab != steps:
            raise UserError(
                f'a SegmentForecaster of {self.vocab} steps at a time has a look-back of {steps} rows and '
                f'{self.covariates.count} covariates; the look-back must be whole segments, a token each, and no '
                'column may be read besides'
            )
        found = hidden.reshape(-1, self.variates, hidden.shape[1] * self.dim)
        return jnp.concatenate([found.astype(window.dtype), jnp.swapaxes(window, 1, 2)], axis=2)


class PromptedForecaster(SegmentForecaster):
    """Segments beside what the same layers make of a text about each: its mean, deviation and change.

        e_i = s W x_i + (1 - s) t_i,   s = sigmoid(g), g starting at zero
        t_i = the vector of the last character of "mean +0.12 deviation +0.98 change -0.31"

    Layers, norm and the table of characters (`embedding`, of bytes) are those of a language model, under the names that
    they have there; gradients do not go through texts. Statistics are of the normalised window, variate by variate, so
    that a text knows nothing that is not read, and texts of forecasts that are appended are those of the forecasts. Fan
    et al. 2025, "SMETimes", https://arxiv.org/abs/2503.03594, whose code has statistics of the last variate in raw
    units, those of what is yet to come when it rolls, and the time of a segment in the text.

    Arguments are those of `StackForecaster`.
    """

    def __init__(
        self,
        vocab: int,
        *,
        dim: int,
        stack: Callable[..., Stack],
        lookback: int,
        variates: int,
        covariates: Covariates = NO_COVARIATES,
        window_norm: WindowNorm | None = None,
        window_gain: Callable[..., WindowGain] | None = None,
        inputs: Callable[..., SeriesInputs] = VariatesApart,
        norm: Callable[..., nnx.Module] = RMSNorm,
        head: Callable[..., Head] = MixedSegmentHead,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        super().__init__(
            vocab,
            dim=dim,
            stack=stack,
            lookback=lookback,
            variates=variates,
            covariates=covariates,
            window_norm=window_norm,
            window_gain=window_gain,
            inputs=inputs,
            norm=norm,
            head=head,
            dtype=dtype,
            rngs=rngs,
        )
        self.patches: Any = self.embedding
        self.embedding = Embedding(BYTES, dim, rngs=rngs)
        self.gate = param(nnx.initializers.zeros, (1,), axes=(None,), group='vector', rngs=rngs)

    @property
    def reader(self) -> Any:
        """What makes tokens of segments; `embedding` is of characters."""
        return self.patches

    def tokens(self, window: Features) -> Rows:
        """Segments and texts, mixed."""
        segments = self.patches(window, self.dtype)
        share = jax.nn.sigmoid(self.gate[0]).astype(segments.dtype)
        return share * segments + (1 - share) * self.texts(window).astype(segments.dtype)

    def texts(self, window: Features) -> Rows:
        """The vectors of the texts about the segments of every variate."""
        steps = jnp.swapaxes(window, 1, 2).reshape(len(window) * self.variates, -1, self.vocab)
        written = written_statistics(steps).reshape(steps.shape[0] * steps.shape[1], -1)
        x, _ = self.stack(self.embedding(written, self.dtype), Context.full(*written.shape), None)
        return jax.lax.stop_gradient(self.norm(x)[:, -1]).reshape(*steps.shape[:2], self.dim)


def _apart(hidden: Float[Array, '*b d']) -> tuple[Array, Array, Array]:
    """The channels that the head reads, the level and the scale."""
    return hidden[..., :-2], hidden[..., -2:-1], hidden[..., -1:]
