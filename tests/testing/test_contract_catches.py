"""Every check of the contract fails for a mixer that breaks just the promise it is about."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import Array

from attnlab.config import spec
from attnlab.context import PADDING, Context
from attnlab.errors import UserError
from attnlab.functional.grids import Grid, flatten, required_grid, unflatten
from attnlab.mixers.mixer import Mixer, TwoSided
from attnlab.nn.hashing import Clipped, Codes, Signs
from attnlab.nn.parameter import buffer, param
from attnlab.nn.projections import Linear
from attnlab.testing.contract import Subject, check_implementations, check_mixer, claimed, on_grid
from attnlab.testing.contract.grids import nearly_square
from attnlab.zoo import Recipe


class Last(NamedTuple):
    """The last input and the segment it belongs to."""

    x: Array
    segment: Array


class Lag(Mixer):
    """An honest mixer: every token meets the one before it, and the one after it too when not causal."""

    def __init__(self, dim: int, *, causal: bool = True, implementation: str | None = None, rngs: nnx.Rngs):
        self.causal = causal
        self.implementation = implementation
        self.output = Linear(dim, dim, rngs=rngs)

    def __call__(self, x: Array, ctx: Context, state: Last | None = None) -> tuple[Array, Last | None]:
        last = self.init_state(x.shape[0], x.shape[1], x.dtype) if state is None else state
        segments = ctx.segments_or_ones()
        y = x + self.before(x, segments, last)
        if not self.causal:
            y += jnp.flip(self.before(jnp.flip(x, 1), jnp.flip(segments, 1), last), 1)
        return self.output(jnp.tanh(y)), None if state is None else Last(x[:, -1], segments[:, -1])

    def before(self, x: Array, segments: Array, last: Last) -> Array:
        known = jnp.concatenate([last.segment[:, None], segments[:, :-1]], axis=1)
        before = jnp.concatenate([last.x[:, None], x[:, :-1]], axis=1)
        return jnp.where((known == segments)[..., None], before, 0)

    def init_state(self, batch: int, length: int, dtype: Any) -> Last:
        return Last(jnp.zeros((batch, self.output.weight.shape[0]), dtype), jnp.full(batch, -1, jnp.int32))


class LooksAhead(Lag):
    def before(self, x: Array, segments: Array, last: Last) -> Array:
        return super().before(x, segments, last) + jnp.roll(x, -1, axis=1)


class Chooses(Lag):
    """Doubles what meets the half of the tokens of a row that have the largest first number."""

    def before(self, x: Array, segments: Array, last: Last) -> Array:
        first = x[..., 0]
        median = jnp.sort(first, axis=1)[:, first.shape[1] // 2]
        return jnp.where((first >= median[:, None])[..., None], 2, 1) * super().before(x, segments, last)


class LooksNowhere(Lag):
    def before(self, x: Array, segments: Array, last: Last) -> Array:
        return jnp.zeros_like(x)


class ForgetsTheConvolution(Lag):
    def __call__(self, x: Array, ctx: Context, state: Last | None = None) -> tuple[Array, Last | None]:
        return super().__call__(x, ctx, None if state is None else Last(jnp.zeros_like(state.x), state.segment))


class ForgetsTheSegment(Lag):
    def __call__(self, x: Array, ctx: Context, state: Last | None = None) -> tuple[Array, Last | None]:
        same = None if state is None else Last(state.x, jnp.where(state.segment < 0, -1, ctx.segments_or_ones()[:, 0]))
        return super().__call__(x, ctx, same)


class LeaksAcrossDocuments(Lag):
    def before(self, x: Array, segments: Array, last: Last) -> Array:
        return super().before(x, jnp.ones_like(segments), last)


class LeaksAcrossRows(Lag):
    def before(self, x: Array, segments: Array, last: Last) -> Array:
        return super().before(x, segments, last) + jnp.mean(x, axis=0, keepdims=True)


class LeaksAcrossRowsBothWays(LeaksAcrossRows):
    def before(self, x: Array, segments: Array, last: Last) -> Array:
        return (Lag if self.causal else LeaksAcrossRows).before(self, x, segments, last)


class HasNoSlopeAtZero(Lag):
    def before(self, x: Array, segments: Array, last: Last) -> Array:
        return super().before(x, segments, last) + jnp.linalg.norm(x, axis=-1, keepdims=True)


class IsNotFiniteAtPadding(Lag):
    def before(self, x: Array, segments: Array, last: Last) -> Array:
        return jnp.where((segments == 0)[..., None], jnp.nan, super().before(x, segments, last))


class HasNoSlopeAtPadding(Lag):
    """Its outputs are right: the gradient of what is not is zero times infinity."""

    def __init__(self, dim: int, **options: Any):
        super().__init__(dim, **options)
        self.scale = param(nnx.initializers.ones, (dim,), axes=('embed',), group='vector', rngs=options['rngs'])

    def before(self, x: Array, segments: Array, last: Last) -> Array:
        scale = jnp.sqrt(self.scale[...][None, None] ** 2 * (segments != 0)[..., None]).astype(x.dtype)
        return scale * super().before(x, segments, last)


class ForgetsInBfloat16(Lag):
    def __call__(self, x: Array, ctx: Context, state: Last | None = None) -> tuple[Array, Last | None]:
        narrow = state is not None and x.dtype == jnp.bfloat16
        return super().__call__(x, ctx, Last(jnp.zeros_like(state.x), state.segment) if narrow else state)


class LeaksAtChunks(Lag):
    """Where a chunk begins, the token before is met whatever its document is."""

    def before(self, x: Array, segments: Array, last: Last) -> Array:
        begins = (jnp.arange(x.shape[1]) % 32 == 0) & (jnp.arange(x.shape[1]) > 0)
        return jnp.where(begins[None, :, None], jnp.roll(x, 1, axis=1), super().before(x, segments, last))


class DropsGradientsAtChunks(Lag):
    def before(self, x: Array, segments: Array, last: Last) -> Array:
        begins = (jnp.arange(x.shape[1]) % 48 == 0) & (jnp.arange(x.shape[1]) > 0)
        before = super().before(x, segments, last)
        return jnp.where(begins[None, :, None], jax.lax.stop_gradient(before), before)


class NeedsTwoRows(Lag):
    def init_state(self, batch: int, length: int, dtype: Any) -> Last:
        return jax.tree.map(jnp.squeeze, super().init_state(batch, length, dtype))


class WorksInSinglePrecision(Lag):
    def before(self, x: Array, segments: Array, last: Last) -> Array:
        return super().before(x.astype(jnp.float32), segments, last).astype(x.dtype)


class LosesBits(Lag):
    def before(self, x: Array, segments: Array, last: Last) -> Array:
        coarse = jnp.round(2 * x) / 2 if x.dtype == jnp.bfloat16 else x
        return super().before(coarse, segments, last)


class ReturnsFloat32(Lag):
    def __call__(self, x: Array, ctx: Context, state: Last | None = None) -> tuple[Array, Last | None]:
        y, state = super().__call__(x, ctx, state)
        return y.astype(jnp.promote_types(y.dtype, jnp.float32)), state


class ReturnsAState(Lag):
    def __call__(self, x: Array, ctx: Context, state: Last | None = None) -> tuple[Array, Last | None]:
        return super().__call__(x, ctx, self.init_state(x.shape[0], x.shape[1], x.dtype) if state is None else state)


class ReturnsNaN(Lag):
    def before(self, x: Array, segments: Array, last: Last) -> Array:
        return jnp.log(super().before(x, segments, last))


@jax.custom_vjp
def half_differentiated(x: Array) -> Array:
    return x


half_differentiated.defvjp(lambda x: (x, None), lambda _, g: (0.5 * g,))


class DifferentiatesWrongly(Lag):
    def before(self, x: Array, segments: Array, last: Last) -> Array:
        return half_differentiated(super().before(x, segments, last))


@jax.custom_vjp
def lagged(x: Array, last: Array, known: Array, segments: Array) -> Array:
    before = jnp.concatenate([last[:, None], x[:, :-1]], axis=1)
    return jnp.where((known == segments)[..., None], before, 0)


def _unended(residuals: tuple[Array, Array], g: Array) -> tuple[Array, Array, None, None]:
    known, segments = residuals
    ends = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (0, 1)))
    g = jnp.where(((known == segments) & ~ends)[..., None], g, 0)
    return jnp.pad(g[:, 1:], ((0, 0), (0, 1), (0, 0))), g[:, 0], None, None


lagged.defvjp(lambda x, last, known, segments: (lagged(x, last, known, segments), (known, segments)), _unended)


class DropsGradientsAtEnds(Lag):
    """Nothing comes back from the last token of a document that another follows."""

    def before(self, x: Array, segments: Array, last: Last) -> Array:
        known = jnp.concatenate([last.segment[:, None], segments[:, :-1]], axis=1)
        return lagged(x, last.x, known, segments)


class DetachesTheState(Lag):
    def before(self, x: Array, segments: Array, last: Last) -> Array:
        return super().before(x, segments, jax.lax.stop_gradient(last))


class ForgetsBeforeAPiece(Lag):
    """Goes on from its state by single tokens alone."""

    def __call__(self, x: Array, ctx: Context, state: Last | None = None) -> tuple[Array, Last | None]:
        given = state if state is None or x.shape[1] == 1 else Last(0 * state.x, state.segment)
        return super().__call__(x, ctx, given)


class ForgetsALongPrompt(Lag):
    """A piece of more than seven tokens leaves no state behind."""

    def __call__(self, x: Array, ctx: Context, state: Last | None = None) -> tuple[Array, Last | None]:
        y, after = super().__call__(x, ctx, state)
        return y, after if after is None or x.shape[1] <= 7 else Last(0 * after.x, after.segment)


class ForgetsAtChunks(Lag):
    """Reads its past in chunks of 32 tokens, and carries nothing from one to the next."""

    def before(self, x: Array, segments: Array, last: Last) -> Array:
        place = jnp.arange(x.shape[1])[None, :, None]
        return jnp.where((place % 32 == 0) & (place > 0), 0, super().before(x, segments, last))


@jax.custom_vjp
def scaled(x: Array, scale: Array) -> Array:
    return x * scale


def _summed(residuals: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, scale = residuals
    terms = (x * g).reshape(-1, x.shape[-1])
    total, _ = jax.lax.scan(lambda total, term: (total + term, None), jnp.zeros_like(terms[0]), terms)
    return g * scale, total[None, None]


scaled.defvjp(lambda x, scale: (scaled(x, scale), (x, scale)), _summed)


class SumsGradientsNarrowly(Lag):
    """A weight's gradient is added up, token by token, in the type of the activations."""

    def __init__(self, dim: int, **kwargs: Any):
        super().__init__(dim, **kwargs)
        self.scale = nnx.Param(jnp.ones((1, 1, dim)), axes=(None, None, 'embed'), group='default')

    def before(self, x: Array, segments: Array, last: Last) -> Array:
        return scaled(super().before(x, segments, last), self.scale[...].astype(x.dtype))


class AddsANarrowBias(Lag):
    """A bias has the type of the activations before it is added to all tokens."""

    def __init__(self, dim: int, **kwargs: Any):
        super().__init__(dim, **kwargs)
        self.bias = nnx.Param(jnp.zeros((1, 1, dim)), axes=(None, None, 'embed'), group='vector')

    def before(self, x: Array, segments: Array, last: Last) -> Array:
        return super().before(x, segments, last) + self.bias[...].astype(x.dtype)


class HoldsALambda(Lag):
    def __init__(self, dim: int, **kwargs: Any):
        super().__init__(dim, **kwargs)
        self.activation = lambda x: x


class HoldsADictionary(Lag):
    def __init__(self, dim: int, **kwargs: Any):
        super().__init__(dim, **kwargs)
        self.settings = nnx.static({'width': 2})


class HandsOutOneArrayTwice(Lag):
    """A state of two arrays, which are one before the first token."""

    def __call__(self, x: Array, ctx: Context, state: Any = None) -> tuple[Array, Any]:
        y, after = super().__call__(x, ctx, state and state[0])
        return y, state and (after, state[1] + 1)

    def init_state(self, batch: int, length: int, dtype: Any) -> Any:
        last = super().init_state(batch, length, dtype)
        return last, last.segment


class HandsOutItsParameter(Lag):
    """The first token meets a learned one, without a copy."""

    def __init__(self, dim: int, **kwargs: Any):
        super().__init__(dim, **kwargs)
        self.start = nnx.Param(jnp.ones((2, dim)), axes=(None, 'embed'), group='default')

    def init_state(self, batch: int, length: int, dtype: Any) -> Last:
        return Last(self.start[...], super().init_state(batch, length, dtype).segment)


class ChangesTheStateType(Lag):
    def __call__(self, x: Array, ctx: Context, state: Last | None = None) -> tuple[Array, Last | None]:
        y, state = super().__call__(x, ctx, state)
        return y, state and Last(state.x.astype(jnp.bfloat16), state.segment)


class PromotesTheState(Lag):
    """Gives back what it was given in float32, in bfloat16 too."""

    def __call__(self, x: Array, ctx: Context, state: Last | None = None) -> tuple[Array, Last | None]:
        y, state = super().__call__(x, ctx, state)
        return y, state and Last(state.x.astype(jnp.promote_types(state.x.dtype, jnp.float32)), state.segment)


class MakesAWeakState(Lag):
    def init_state(self, batch: int, length: int, dtype: Any) -> Last:
        return Last(super().init_state(batch, length, dtype).x, jnp.broadcast_to(jnp.asarray(-1), batch))


class HasNoState(Lag):
    def init_state(self, batch: int, length: int, dtype: Any) -> Any:
        return None


class HasAWordAsState(Lag):
    def init_state(self, batch: int, length: int, dtype: Any) -> Any:
        return Last('start', super().init_state(batch, length, dtype).segment)


class DropsTheState(Lag):
    def __call__(self, x: Array, ctx: Context, state: Last | None = None) -> tuple[Array, Last | None]:
        return super().__call__(x, ctx, state)[0], None


class WidensTheState(Lag):
    def __call__(self, x: Array, ctx: Context, state: Last | None = None) -> tuple[Array, Any]:
        y, state = super().__call__(x, ctx, state)
        return y, state and Last(state.x[:, None], state.segment)


class CountsWhatItLikes(Lag):
    def __call__(self, x: Array, ctx: Context, state: Any = None) -> tuple[Array, Any]:
        y, last = super().__call__(x, ctx, state and state[0])
        return y, state and (last, state[1] + jnp.sum(x > 0, dtype=jnp.int32))

    def init_state(self, batch: int, length: int, dtype: Any) -> Any:
        return super().init_state(batch, length, dtype), jnp.int32(0)


class ReturnsAnotherState(Lag):
    def __call__(self, x: Array, ctx: Context, state: Last | None = None) -> tuple[Array, Any]:
        y, state = super().__call__(x, ctx, state)
        return y, state and (state.x, state.segment)


class CannotMakeAState(Lag):
    def init_state(self, batch: int, length: int, dtype: Any) -> Any:
        raise NotImplementedError('later')


class TakesNoCausal(Lag):
    def __init__(self, dim: int, *, rngs: nnx.Rngs):
        super().__init__(dim, rngs=rngs)


class IgnoresCausalFalse(Lag):
    def __init__(self, dim: int, *, causal: bool = True, rngs: nnx.Rngs):
        super().__init__(dim, rngs=rngs)


class HasABareParameter(Lag):
    def __init__(self, dim: int, **kwargs: Any):
        super().__init__(dim, **kwargs)
        self.output.weight = nnx.Param(self.output.weight[...])


class HasANarrowParameter(Lag):
    def __init__(self, dim: int, **kwargs: Any):
        super().__init__(dim, **kwargs)
        weight = self.output.weight
        self.output.weight = nnx.Param(weight[...].astype(jnp.bfloat16), **weight.get_metadata())


class HasABuffer(Lag):
    """An honest mixer with a variable that is not trained."""

    def __init__(self, dim: int, **kwargs: Any):
        super().__init__(dim, **kwargs)
        self.seen = buffer(jax.random.normal(kwargs['rngs'].params(), (dim,)), axes=('embed',))

    def before(self, x: Array, segments: Array, last: Last) -> Array:
        return super().before(x, segments, last) * self.seen[...].astype(x.dtype)[None, None]


class ChangesABuffer(HasABuffer):
    def before(self, x: Array, segments: Array, last: Last) -> Array:
        y = super().before(x, segments, last)
        self.seen[...] = 0.9 * self.seen[...] + 0.1 * jnp.mean(x, axis=(0, 1))
        return y


class HoldsABareVariable(Lag):
    def __init__(self, dim: int, **kwargs: Any):
        super().__init__(dim, **kwargs)
        self.seen = nnx.BatchStat(jnp.zeros(dim))


class DependsOnTheImplementation(Lag):
    def before(self, x: Array, segments: Array, last: Last) -> Array:
        return super().before(x, segments, last) * (1.001 if self.implementation == 'xla' else 1.0)


class Crosses(TwoSided):
    """An honest mixer on grids: every token meets the means of the lines it lies on, empty places left out."""

    def __init__(self, dim: int, *, rngs: nnx.Rngs):
        self.output = Linear(dim, dim, rngs=rngs)

    def __call__(self, x: Array, ctx: Context, state: None = None) -> tuple[Array, None]:
        grid = self.grid(ctx)
        there = unflatten(self.there(ctx)[..., None].astype(x.dtype), grid)
        image, y = unflatten(x, grid) * there, x
        for axis in range(1, 1 + len(grid)):
            count = jnp.maximum(there.sum(axis, keepdims=True), 1)
            y += flatten(jnp.broadcast_to(image.sum(axis, keepdims=True) / count, image.shape), grid)
        return self.output(jnp.tanh(y)), None

    def grid(self, ctx: Context) -> Grid:
        return required_grid(ctx, type(self).__name__)

    def there(self, ctx: Context) -> Array:
        return ctx.segments_or_ones() != PADDING


class OneWay(Crosses):
    """Every token meets what lies before it on its lines, and nothing behind it."""

    def __call__(self, x: Array, ctx: Context, state: None = None) -> tuple[Array, None]:
        grid = self.grid(ctx)
        there = unflatten(self.there(ctx)[..., None].astype(x.dtype), grid)
        image, y = unflatten(x, grid) * there, x
        for axis in range(1, 1 + len(grid)):
            y += flatten(jnp.cumsum(image, axis), grid)
        return self.output(jnp.tanh(y)), None


class IgnoresTheGrid(Crosses):
    def grid(self, ctx: Context) -> Grid:
        return nearly_square(math.prod(super().grid(ctx)))


class TakesTheShorterAxisForHeight(Crosses):
    def grid(self, ctx: Context) -> Grid:
        return tuple(sorted(super().grid(ctx)))  # type: ignore[return-value]


class NeedsNoGrid(Crosses):
    def grid(self, ctx: Context) -> Grid:
        return nearly_square(ctx.positions.shape[1]) if ctx.grid is None else ctx.grid


class SaysLittleWithoutAGrid(Crosses):
    def grid(self, ctx: Context) -> Grid:
        if ctx.grid is None:
            raise UserError('no grid')
        return ctx.grid


class RefusesASide(Crosses):
    """Refuses 5 x 7, in words that have one of its digits."""

    def grid(self, ctx: Context) -> Grid:
        if 7 in super().grid(ctx):
            raise UserError('side 7 does not fit')
        return super().grid(ctx)


class RefusesWhatIsHigh(Crosses):
    """Cannot be seen to ignore which axis is which, as it refuses the other way round."""

    def grid(self, ctx: Context) -> Grid:
        grid = super().grid(ctx)
        if grid[0] > grid[1]:
            raise UserError(f'a grid of {grid} is higher than wide')
        return grid


class IsNotFiniteOnVolumes(Crosses):
    def __call__(self, x: Array, ctx: Context, state: None = None) -> tuple[Array, None]:
        y, _ = super().__call__(x, ctx)
        return y / (3 - len(self.grid(ctx))), None


class ReadsEmptyPlaces(Crosses):
    def __call__(self, x: Array, ctx: Context, state: None = None) -> tuple[Array, None]:
        y, _ = super().__call__(x, ctx)
        return y + 1e-3 * jnp.mean(x, axis=1, keepdims=True), None


class SeesNoEmptyPlaces(Crosses):
    """Mixes nothing, whatever is there."""

    def there(self, ctx: Context) -> Array:
        return jnp.zeros_like(ctx.segments_or_ones())


class DividesByNoTokens(Crosses):
    def __call__(self, x: Array, ctx: Context, state: None = None) -> tuple[Array, None]:
        y, _ = super().__call__(x, ctx)
        there = self.there(ctx)
        return jnp.where(there[..., None], y, y / there[..., None]), None


class MindsThatThereAreSegments(Crosses):
    def __call__(self, x: Array, ctx: Context, state: None = None) -> tuple[Array, None]:
        y, _ = super().__call__(x, ctx)
        return y if ctx.segments is None else 1.001 * y, None


CHECKS = claimed(causal=True, bidirectional=True, streaming=True, packed=True)
GRID_CHECKS = claimed(causal=False, bidirectional=True, streaming=False, packed=False, grid=True, sparse=True)
CAUGHT_ON_GRIDS = [
    (OneWay, 'two-sided', 'the outputs before token 12 are the same whatever that token is'),
    (IgnoresTheGrid, 'grids', r'24 tokens give the same on \(4, 6\) as on \(6, 4\)'),
    (TakesTheShorterAxisForHeight, 'grids', '24 tokens give the same'),
    (NeedsNoGrid, 'grids', 'without ctx.grid it gives an output'),
    (SaysLittleWithoutAGrid, 'grids', 'without a grid it says no grid'),
    (RefusesASide, 'grids', r'\(5, 7\) is refused by a sentence that does not name it: side 7'),
    (RefusesWhatIsHigh, 'grids', r'\(6, 4\) is refused; choose sizes'),
    (IsNotFiniteOnVolumes, 'grids', r'outputs on \(3, 4, 5\) are wrong'),
    (ReadsEmptyPlaces, 'sparse', 'what lies at empty places moves others'),
    (SeesNoEmptyPlaces, 'sparse', 'empty places make no difference'),
    (DividesByNoTokens, 'sparse', 'outputs are not finite'),
    (MindsThatThereAreSegments, 'sparse', 'segments without empty places move outputs'),
]
CAUGHT = [
    (LooksAhead, 'no look-ahead'),
    (Chooses, 'no look-ahead'),
    (LooksNowhere, 'no look-ahead'),
    (HandsOutOneArrayTwice, 'donation'),
    (HandsOutItsParameter, 'donation'),
    (ForgetsTheConvolution, 'decoding'),
    (ForgetsBeforeAPiece, 'streaming'),
    (ForgetsInBfloat16, 'streaming bfloat16'),
    (ForgetsTheSegment, 'streaming packed'),
    (LeaksAcrossDocuments, 'packing'),
    (DropsGradientsAtEnds, 'packing'),
    (LeaksAcrossDocuments, 'padding'),
    (IsNotFiniteAtPadding, 'padding'),
    (HasNoSlopeAtPadding, 'padding'),
    (LeaksAtChunks, 'long packed'),
    (DropsGradientsAtChunks, 'long packed'),
    (LeaksAcrossRows, 'rows apart'),
    (HasNoSlopeAtZero, 'zeros'),
    (WorksInSinglePrecision, 'float64'),
    (LosesBits, 'bfloat16'),
    (ReturnsFloat32, 'shape and type'),
    (ReturnsAState, 'shape and type'),
    (ReturnsNaN, 'shape and type'),
    (DifferentiatesWrongly, 'gradients'),
    (DetachesTheState, 'streaming gradients'),
    (ForgetsALongPrompt, 'long prompt'),
    (ForgetsAtChunks, 'long pieces'),
    (SumsGradientsNarrowly, 'bfloat16 gradients'),
    (AddsANarrowBias, 'bfloat16 sums'),
    (HoldsALambda, 'compiles once'),
    (HoldsADictionary, 'compiles once'),
    (ChangesTheStateType, 'state'),
    (PromotesTheState, 'state'),
    (HasNoState, 'state'),
    (HasAWordAsState, 'state'),
    (DropsTheState, 'state'),
    (WidensTheState, 'state'),
    (CountsWhatItLikes, 'state'),
    (ReturnsAnotherState, 'state'),
    (CannotMakeAState, 'state'),
    (MakesAWeakState, 'streaming compiles once'),
    (NeedsTwoRows, 'state'),
    (IgnoresCausalFalse, 'bidirectional'),
    (LeaksAcrossRowsBothWays, 'bidirectional'),
    (HasABareParameter, 'parameters'),
    (HasANarrowParameter, 'parameters'),
    (ChangesABuffer, 'buffers'),
    (HoldsABareVariable, 'buffers'),
]


def test_an_honest_mixer_passes():
    check_mixer(Lag, causal=True, bidirectional=True, streaming=True, packed=True)
    check_implementations(Subject(Lag), names=('xla',))


@pytest.mark.parametrize('name', ['buffers', 'parameters', 'bfloat16', 'compiles once', 'gradients', 'decoding'])
def test_an_honest_mixer_may_have_a_buffer(name: str):
    CHECKS[name](Subject(HasABuffer))


@pytest.mark.parametrize(('mixer', 'name'), [pytest.param(m, n, id=f'{m.__name__}-{n}') for m, n in CAUGHT])
def test_a_broken_promise_is_caught_by_its_check(mixer: type[Mixer], name: str):
    with pytest.raises(AssertionError, match=f'^{name}: '):
        CHECKS[name](Subject(mixer))


def test_every_check_has_a_mixer_that_breaks_it():
    assert {name for _, name in CAUGHT} == set(CHECKS)


def test_an_honest_mixer_on_grids_passes():
    check_mixer(Crosses, causal=False, bidirectional=True, streaming=False, packed=False, grid=True, sparse=True)


@pytest.mark.parametrize(
    ('mixer', 'name', 'sentence'), [pytest.param(m, n, s, id=m.__name__) for m, n, s in CAUGHT_ON_GRIDS]
)
def test_a_broken_promise_about_grids_is_caught(mixer: type[TwoSided], name: str, sentence: str):
    with pytest.raises(AssertionError, match=f'^(bidirectional|{name}): .*{sentence}'):
        GRID_CHECKS[name](Subject(on_grid(mixer), causal=False))
    assert {name for _, name, _ in CAUGHT_ON_GRIDS} == set(GRID_CHECKS) - set(CHECKS)


def test_an_implementation_that_differs_is_caught():
    with pytest.raises(AssertionError, match=r'^implementations: xla'):
        check_implementations(Subject(DependsOnTheImplementation), names=('xla',))


def test_check_mixer_runs_what_is_claimed_and_nothing_else():
    check = functools.partial(check_mixer, LooksAhead, bidirectional=False, streaming=False, packed=False)
    check(causal=False)
    with pytest.raises(AssertionError, match=r'^no look-ahead'):
        check(causal=True)


EXPLAINED = [
    (HasNoState, 'init_state returned None, which holds no array; it must return what a call remembers'),
    (HasAWordAsState, "returned a state with 'start', of type str; every part of it must be a JAX array"),
    (DropsTheState, r'was given a state and returned None; it must return the advanced state, Last with shapes \('),
    (WidensTheState, r'returned Last with shapes \(2, 1, 32\), \(2,\); it must return the advanced state'),
    (ChangesTheStateType, 'bfloat16.*; its type must stay'),
    (CountsWhatItLikes, 'an array without axes depends on x .*; it may depend on the number of tokens alone'),
    (ReturnsAnotherState, 'returned tuple of array, array with .*; it must return the advanced state, Last'),
    (CannotMakeAState, r'init_state\(batch, length, dtype\) fails: later'),
]


@pytest.mark.parametrize(('mixer', 'sentence'), [pytest.param(m, s, id=m.__name__) for m, s in EXPLAINED])
def test_a_wrong_state_is_explained(mixer: type[Mixer], sentence: str):
    with pytest.raises(AssertionError, match=f'^state: .*{sentence}'):
        CHECKS['state'](Subject(mixer))


@pytest.mark.parametrize(
    ('mixer', 'sentence'),
    [
        (HandsOutOneArrayTwice, r'the array \[1\] is the array \[0\].segment itself'),
        (HandsOutItsParameter, r"the array .x is the variable \['start'\]\S* itself"),
    ],
)
def test_a_state_that_cannot_be_donated_is_explained(mixer: type[Mixer], sentence: str):
    with pytest.raises(AssertionError, match=f'^donation: .*{sentence}'):
        CHECKS['donation'](Subject(mixer))


@pytest.mark.parametrize(
    ('mixer', 'sentence'),
    [
        (TakesNoCausal, r'make\(dim, rngs=rngs, causal=False\) fails .*claim bidirectional=False'),
        (IgnoresCausalFalse, 'does not look ahead .*claim bidirectional=False'),
    ],
)
def test_a_claim_of_bidirectional_is_refused_before_anything_else(mixer: type[Mixer], sentence: str):
    said: list[str] = []
    with pytest.raises(AssertionError, match=f'^bidirectional: .*{sentence}'):
        check_mixer(mixer, causal=True, bidirectional=True, streaming=True, packed=True, say=said.append)
    assert said == ['two-sided: does not hold']


def test_check_mixer_says_what_it_checked(monkeypatch: pytest.MonkeyPatch):
    passes = dict.fromkeys(('parameters', 'state', 'packing'), lambda subject: None)
    monkeypatch.setattr('attnlab.testing.contract.claimed', lambda **claims: passes)
    said: list[str] = []
    check_mixer(Lag, causal=True, bidirectional=False, streaming=True, packed=False, say=said.append)
    assert said == [
        *(f'{name}: holds' for name in passes),
        '3 properties hold; not claimed, so not checked: bidirectional, packed, grid',
    ]


class Rounds(Lag):
    """Gives signs, whose gradient is that of another function."""

    def __init__(self, dim: int, *, codes: Codes, causal: bool = True, rngs: nnx.Rngs):
        super().__init__(dim, causal=causal, rngs=rngs)
        self.codes = codes

    def __call__(self, x: Array, ctx: Context, state: Last | None = None) -> tuple[Array, Last | None]:
        y, state = super().__call__(x, ctx, state)
        return self.codes(y), state


class Stuck(Signs):
    """Signs through which no gradient comes."""

    def __call__(self, z: Array) -> Array:
        return jnp.sign(z)


def test_what_rounds_is_compared_with_its_surrogate():
    smooth = functools.partial(Rounds, codes=Clipped())
    check = claimed(causal=True, bidirectional=False, streaming=False, packed=False)['gradients']
    check(Subject(functools.partial(Rounds, codes=Signs()), surrogate=smooth))
    with pytest.raises(AssertionError, match='the central difference'):
        check(Subject(functools.partial(Rounds, codes=Signs())))
    with pytest.raises(AssertionError, match='nothing comes straight through'):
        check(Subject(functools.partial(Rounds, codes=Stuck()), surrogate=smooth))


def test_a_claim_about_empty_places_needs_a_grid():
    for made in (
        lambda: check_mixer(Lag, causal=True, bidirectional=False, streaming=True, packed=True, sparse=True),
        lambda: Recipe(spec=spec(Lag), cite='', sparse=True),
    ):
        with pytest.raises(UserError, match='sparse is a claim about grids; give grid=True'):
            made()
