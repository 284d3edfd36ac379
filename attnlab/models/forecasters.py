"""Models of series: the look-back, normalised, is mapped to one vector a variate, and a head forecasts from it."""

import abc
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int, Shaped

from attnlab.blocks.block import Stage
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.models.heads.affine import AffineHead
from attnlab.models.heads.head import Head
from attnlab.models.heads.quantile import Quantiles
from attnlab.models.inputs.series import Rows, SeriesInputs, VariatesApart
from attnlab.models.stack import Stack
from attnlab.module import Module
from attnlab.nn.norms import RMSNorm
from attnlab.nn.windows import MovingAverage, WindowNorm, level_and_scale
from attnlab.typing import DropoutKey, Embedded, Features, State

Vectors = Float[Array, 'b v d']
Level = Float[Array, 'b 1 m']


class WindowModel(Module):
    """Base class of models that forecast `vocab` steps of every variate of a window, `b t v`.

    The hidden state of a variate ends with its level and its scale, by which the head's forecasts are multiplied and
    shifted: `y = scale * head(h) + level`. The loss is in the units of the window too where the head says by which
    power of a unit it grows. Implements `attnlab.models.predictor.Distributional`.
    """

    streaming = False
    decodes = False
    documents = 1

    head: Any

    def __init__(self, vocab: int, lookback: int, variates: int, norm: WindowNorm | None, dtype: DTypeLike):
        self.vocab, self.lookback, self.variates, self.window_norm = vocab, lookback, variates, norm
        self.dtype = jnp.dtype(dtype)

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
        """One vector a variate of a normalised window."""

    def hidden(self, tokens: Features, ctx: Context, state: State | None = None) -> tuple[Embedded, State | None]:
        """One vector a variate, `b v d`, in float32, and no state."""
        del state
        window, level, scale = self.normalised(tokens)
        found = self.vectors(window, ctx).astype(jnp.float32)
        return jnp.concatenate([found, *(jnp.swapaxes(one, 1, 2) for one in (level, scale))], axis=-1), None

    def normalised(self, tokens: Features) -> tuple[Features, Level, Level]:
        """The window in its own units, its level and its scale. Raises `UserError` for windows of other sizes."""
        if tokens.shape[1:] != (self.lookback, self.variates):
            raise UserError(
                f'config.model is for a look-back of {self.lookback} rows of {self.variates} variates; windows of the '
                f'task have {tokens.shape[1]} rows (config.length) of {tokens.shape[2]} variates'
            )
        level, scale = level_and_scale(self.window_norm, tokens)
        return (tokens - level) / scale, level, scale

    def pooled(self, tokens: Features, ctx: Context) -> Float[Array, 'b d']:
        """The mean over variates."""
        return jnp.mean(self.hidden(tokens, ctx)[0], axis=1)

    def losses(
        self, hidden: Float[Array, '*b d'], targets: Shaped[Array, '...'], key: DropoutKey | None = None
    ) -> Float[Array, '*b']:
        """The loss of the head, one number a variate, in the units of its window."""
        features, level, scale = _apart(hidden)
        targets = (targets - level) / scale
        head = self.head
        found = head.losses(features, targets) if key is None else head.objective(features, targets, key)
        return found * scale[..., 0] ** head.degree

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
        return self.head.quantiles(features, every) * scale[..., None] + level[..., None]

    def sample(self, hidden: Float[Array, 'b d'], key: Array, *, temperature: float, top_p: float) -> Int[Array, ' b']:
        """Raises `UserError`: forecasts are numbers, not tokens."""
        raise UserError('a forecaster predicts numbers, not tokens')

    def init_state(self, batch: int, length: int) -> State:
        """Empty: windows are read whole."""
        del batch, length
        return ()


class LinearForecaster(WindowModel):
    """The head reads the window itself, so that forecasts are linear in it.

    Zeng et al. 2023, https://arxiv.org/abs/2205.13504.

    Args:
      vocab: steps forecast.
      lookback: steps read.
      variates: columns.
      window_norm: normalises a window; `None`: it stays as it is.
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
        window_norm: WindowNorm | None = None,
        decomposition: MovingAverage | None = None,
        head: Callable[..., Head] = AffineHead,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        super().__init__(vocab, lookback, variates, window_norm, dtype)
        self.decomposition = decomposition
        self.head = head(lookback * (1 if decomposition is None else 2), vocab, rngs=rngs)

    def vectors(self, window: Features, ctx: Context) -> Vectors:
        """The steps of every variate, or the rest and the trend."""
        del ctx
        parts = [window] if self.decomposition is None else list(self.decomposition.divide(window))
        return jnp.concatenate([jnp.swapaxes(part, 1, 2) for part in parts], axis=-1)

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
      stack: makes the stack, as `stack(dim, rngs=rngs)`.
      lookback: steps read.
      variates: columns.
      window_norm: normalises a window; `None`: it stays as it is.
      inputs: makes tokens of windows, as `inputs(vocab, dim, lookback=, variates=, rngs=rngs)`.
      norm: makes the final norm.
      head: makes the head, as `head(dim, vocab, rngs=rngs)`.
      dtype: type of the activations of the stack.
      rngs: draws the parameters.
    """

    def __init__(
        self,
        vocab: int,
        *,
        dim: int,
        stack: Callable[..., Stack],
        lookback: int,
        variates: int,
        window_norm: WindowNorm | None = None,
        inputs: Callable[..., SeriesInputs] = VariatesApart,
        norm: Callable[..., nnx.Module] = RMSNorm,
        head: Callable[..., Head] = AffineHead,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        super().__init__(vocab, lookback, variates, window_norm, dtype)
        self.dim = dim
        self.embedding: Any = inputs(vocab, dim, lookback=lookback, variates=variates, rngs=rngs)
        self.stack = stack(dim, rngs=rngs)
        self.norm: Any = norm(dim, rngs=rngs)
        self.head = head(self.embedding.width, vocab, rngs=rngs)

    def vectors(self, window: Features, ctx: Context) -> Vectors:
        """Those of the stack's output."""
        x, _ = self.stack(self.embedding(window, self.dtype), self.context(ctx), None)
        return self.embedding.read(self.norm(x))

    def embed(self, tokens: Features, ctx: Context) -> Rows:
        """The input of the first block."""
        del ctx
        return self.embedding(self.normalised(tokens)[0], self.dtype)

    def context(self, ctx: Context) -> Context:
        """The context of the blocks."""
        return self.embedding.context(ctx)

    def stages(self, tokens: Features, ctx: Context) -> Iterator[Stage]:
        """Every named intermediate value in order, lazily, layer by layer."""
        x = self.embed(tokens, ctx)
        yield Stage('embedding', x)
        for stage in self.stack.stages(x, self.context(ctx)):
            yield Stage(f'stack.{stage.name}', stage.value)
            x = stage.value
        x = self.norm(x)
        yield Stage('norm', x)
        yield Stage('head', self.head.logits(self.embedding.read(x).astype(jnp.float32)))


def _apart(hidden: Float[Array, '*b d']) -> tuple[Array, Array, Array]:
    """The channels that the head reads, the level and the scale; the last two are constants."""
    level, scale = (jax.lax.stop_gradient(one) for one in (hidden[..., -2:-1], hidden[..., -1:]))
    return hidden[..., :-2], level, scale
