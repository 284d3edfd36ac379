"""Ways between tokens cut: what some read of others is taken away, of a whole mixer or of a part of it.

hidden_with(model, tokens, ctx, {'layers[1].mixer': Cut('scores', sources, targets)})
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float

from attnlab.analysis.interventions import Change, hidden_with, mixers_of, windows
from attnlab.context import Context
from attnlab.errors import UserError, nearest
from attnlab.mixers.combine import Backwards, SideBySide
from attnlab.mixers.softmax.attention import Attention
from attnlab.mixers.softmax.differential import DifferentialAttention
from attnlab.mixers.softmax.gated_unit import GatedAttentionUnit
from attnlab.mixers.softmax.latent import LatentAttention
from attnlab.mixers.softmax.shaped import ShapedAttention
from attnlab.mixers.state_space.selective import SelectiveSSM, StateSpaceDual
from attnlab.mixers.state_space.trapezoidal import TrapezoidalSSM
from attnlab.mixers.state_space.two_sided import TwoWaySSM
from attnlab.models.predictor import Stacked, one_stack
from attnlab.nn.norms import RMSNorm
from attnlab.nn.preludes import Prelude
from attnlab.nn.projections import Linear
from attnlab.typing import Embedded, Features, Segments, Sequence, Tokens

Mask = Bool[Array, '*b t']
"""Some tokens: of every row the same, `t`, or of each its own, `b t`."""

PARTS = ('inputs', 'scores', 'B', 'C', 'conv', 'state')
"""What can be cut; see `Cut`."""

SCORED = (
    Attention,
    ShapedAttention,
    LatentAttention,
    DifferentialAttention,
    GatedAttentionUnit,
)
"""Mixers all of whose reads are of scores that `Context.cut` takes away, and no more, as in selective attention."""

SELECTIVE = (SelectiveSSM, StateSpaceDual, TwoWaySSM, TrapezoidalSSM)
"""Mixers that write with `B` into a state and read it with `C`, both of the input; all but the last have a `conv`."""


def parts_of(mixer: Any) -> tuple[str, ...]:
    """The parts of a mixer that can be cut; of mixers side by side those of any."""
    if isinstance(mixer, SideBySide | Backwards):
        found = {part for each in mixer.mixers for part in parts_of(each)}
        return tuple(part for part in PARTS if part in found)
    if isinstance(mixer, SCORED):
        return ('inputs', 'scores')
    if isinstance(mixer, TrapezoidalSSM):
        return ('inputs', 'B', 'C', 'state')
    return ('inputs', 'B', 'C', 'conv', 'state') if isinstance(mixer, SELECTIVE) else ('inputs',)


@dataclasses.dataclass(frozen=True)
class Cut:
    """A change of a mixer by which a part of it carries nothing from sources to targets.

    - `inputs`, of any mixer: a target's output is that of the mixer with the inputs of all sources zero. Of attention
      a key of zeros still has a weight.
    - `scores`, of attention: `s_ij` is minus infinity for a target `i` and a source `j`, so that a softmax shares the
      weight among the keys that are left; a target that is left without any reads zeros. Forget gates of sources
      still let fade what came before, and what keys and values have of tokens before them, by convolutions or shifts,
      stays. Geva et al. 2023, https://arxiv.org/abs/2304.14767.
    - `B`, of selective state-space models: sources write nothing into the state; what they have of their own input
      beside it (`D x`) stays.
    - `C`: targets read nothing from the state.
    - `conv`: the convolution gives targets nothing of sources.
    - `state`: targets read the state as it would be had sources written nothing; what they have from the convolution
      stays, and so does how far sources let fade what came before.

    Sharma et al. 2024, https://arxiv.org/abs/2404.03646, knock out whole paths of Mamba; its parts are told apart here.
    Of mixers side by side those that have the part lose it. Empty masks change no bit.

    Attributes:
      part: one of `PARTS`; a mixer that lacks it is refused with a `UserError`, as is another part.
      sources: of which nothing is read.
      targets: which read nothing of them; of no account for `B`. Sources are of none for `C`.
    """

    part: str
    sources: Mask
    targets: Mask

    def __post_init__(self) -> None:
        if self.part not in PARTS:
            raise UserError(f'there is no part {self.part!r} of a mixer{nearest(self.part, PARTS)}')

    def __call__(self, mixer: Any) -> Any:
        """What takes the mixer's place; its modules may be changed."""
        if self.part not in parts_of(mixer):
            raise UserError(
                f'{type(mixer).__name__} has no part {self.part} to cut; of it there is {", ".join(parts_of(mixer))}'
            )
        if isinstance(mixer, SideBySide | Backwards):
            here = self.flipped() if isinstance(mixer, Backwards) else self
            mixer.mixers = nnx.List([here(each) if self.part in parts_of(each) else each for each in mixer.mixers])
            return mixer
        sources, targets = jnp.atleast_2d(self.sources), jnp.atleast_2d(self.targets)
        if self.part in ('B', 'C'):
            return _silenced(mixer, self.part, sources if self.part == 'B' else targets)
        if self.part == 'conv':
            return _convolving_apart(mixer, sources, targets)
        return _AtTargets(mixer, self._without(mixer), targets & jnp.any(sources, axis=1, keepdims=True))

    def flipped(self) -> 'Cut':
        """The same of a row that is read from its end."""
        return Cut(self.part, jnp.flip(self.sources, -1), jnp.flip(self.targets, -1))

    def _without(self, mixer: Any) -> Callable[[Sequence, Context], Sequence]:
        """The outputs of a mixer, of which those at targets count, by a call of it without the sources."""
        sources, targets = jnp.atleast_2d(self.sources), jnp.atleast_2d(self.targets)
        if self.part == 'inputs':
            return lambda x, ctx: mixer(_zeroed(x, sources), _without_values(ctx, sources))[0]
        if self.part == 'scores':
            cut = targets[:, :, None] & sources[:, None, :]
            return lambda x, ctx: mixer(x, dataclasses.replace(ctx, cut=cut))[0]
        silent = _silenced(nnx.clone(mixer), 'B', sources)
        return lambda x, ctx: silent(x, ctx)[0]


def cuts(model: Stacked, part: str, layers: Iterable[int], sources: Mask, targets: Mask) -> dict[str, Change]:
    """The same cut of the mixers of some layers, by place. Raises `UserError` for a layer that lacks the part."""
    cut, mixers = Cut(part, sources, targets), mixers_of(model)
    for layer in layers:
        if layer not in mixers:
            raise UserError(
                f'layer {layer} is no block with a mixer; the model has layers 0 to {one_stack(model).depth - 1}'
            )
        if part not in (known := parts_of(mixers[layer])):
            raise UserError(
                f'layer {layer} is of {type(mixers[layer]).__name__}, which has no part {part} to cut; of it there is '
                f'{", ".join(known)}'
            )
    return {f'layers[{layer}].mixer': cut for layer in layers}


def layers_with(model: Stacked, part: str) -> tuple[int, ...]:
    """The layers whose mixers have a part. Raises `UserError` for a part that no layer has, or an unknown one."""
    if part not in PARTS:
        raise UserError(f'there is no part {part!r} of a mixer{nearest(part, PARTS)}')
    mixers = mixers_of(model)
    found = tuple(layer for layer, mixer in mixers.items() if part in parts_of(mixer))
    if not found:
        kinds = ', '.join(sorted({type(mixer).__name__ for mixer in mixers.values()})) or 'no mixers of blocks'
        known = [name for name in PARTS if any(name in parts_of(mixer) for mixer in mixers.values())]
        raise UserError(
            f'no layer has a part {part} to cut: the mixers are {kinds}; of them there is '
            f'{", ".join(known) or "nothing to cut"}'
        )
    return found


def knockouts(
    model: Stacked,
    inputs: Tokens | Features,
    ctx: Context,
    part: str,
    layers: tuple[int, ...],
    score: Callable[[Embedded], Float[Array, '']],
    *,
    groups: Bool[Array, 'g b t'],
    targets: Bool[Array, 'b t'],
    window: int = 1,
) -> tuple[Float[Array, 'n g'], Float[Array, 'g'], Float[Array, '']]:
    """The score without what targets read of each group of sources, by layer; in all layers at once; and as it is.

    An entry is of a window of `window` layers about one of `layers`, of which those among `layers` are cut.
    """
    depth = one_stack(model).depth

    def without(asked: tuple[Bool[Array, 'l'], Bool[Array, 'b t']]) -> Float[Array, '']:
        where, sources = asked
        changes = {
            place: change
            for layer in layers
            for place, change in cuts(model, part, (layer,), sources & where[layer], targets & where[layer]).items()
        }
        return score(hidden_with(model, inputs, ctx, changes))

    near = jnp.concatenate([windows(depth, window)[jnp.asarray(layers)], jnp.ones((1, depth), bool)])
    count = len(near)
    found = jax.lax.map(without, (jnp.repeat(near, len(groups), axis=0), jnp.tile(groups, (count, 1, 1))))
    found = found.reshape(count, len(groups))
    return found[:-1], found[-1], score(hidden_with(model, inputs, ctx, {}))


class _AtTargets(nnx.Module):
    """A mixer whose outputs at some tokens are those of another."""

    def __init__(self, mixer: Any, other: Callable[[Sequence, Context], Sequence], targets: Bool[Array, '#b t']):
        self.mixer, self.other, self.targets = mixer, nnx.static(other), nnx.data(targets)

    def __call__(self, x: Sequence, ctx: Context, state: Any = None) -> tuple[Sequence, Any]:
        whole, state = self.mixer(x, ctx, state)
        return jnp.where(self.targets[..., None], self.other(x, ctx.unaided()), whole), state

    def values(self, x: Sequence, ctx: Context, state: Any = None) -> Array:
        """Those that the mixer tells, which layers above read wherever it was cut itself."""
        return self.mixer.values(x, ctx, state)


def _zeroed(x: Sequence, where: Bool[Array, '#b t']) -> Sequence:
    return jnp.where(where[..., None], jnp.zeros_like(x), x)


def _without_values(ctx: Context, where: Bool[Array, '#b t']) -> Context:
    """A context that does not tell the first values of some tokens."""
    if ctx.first_values is None:
        return ctx
    first = dataclasses.replace(ctx.first_values, values=_zeroed(ctx.first_values.values, where))
    return dataclasses.replace(ctx, first_values=first)


def _both_ways(mask: Bool[Array, '#b t']) -> tuple[Bool[Array, '#b t'], Bool[Array, '#b t']]:
    """A mask of tokens as either scan of a `TwoWaySSM` reads them: forward, then backward."""
    return mask, jnp.flip(mask, -1)


def _silenced(mixer: Any, part: str, where: Bool[Array, '#b t']) -> Any:
    """A selective state-space model whose `B` or `C` is zero at some tokens; changed in place."""
    if isinstance(mixer, TwoWaySSM):
        for scan, tokens in zip(mixer.scans, _both_ways(where), strict=True):
            _silence_maps(scan, part, tokens)
    elif isinstance(mixer, StateSpaceDual):
        first = mixer.inner + (0 if part == 'B' else mixer.state)
        mixer.prelude = _SilentPrelude(mixer.prelude, range(first, first + mixer.state), where)
    elif isinstance(mixer, TrapezoidalSSM):
        name, bias = ('key_norm', mixer.key_bias) if part == 'B' else ('query_norm', mixer.query_bias)
        setattr(mixer, name, _Cancelling(getattr(mixer, name), bias, where))
    else:
        _silence_maps(mixer, part, where)
    return mixer


def _silence_maps(maps: Any, part: str, where: Bool[Array, '#b t']) -> None:
    rank, both = maps.splits
    span = range(rank, both) if part == 'B' else range(both, 2 * both - rank)
    maps.select = _Silent(maps.select, span, where)


def _convolving_apart(mixer: Any, sources: Bool[Array, '#b t'], targets: Bool[Array, '#b t']) -> Any:
    """A mixer whose convolution gives targets nothing of sources; changed in place."""
    if isinstance(mixer, TwoWaySSM):
        for index, (read, asked) in enumerate(zip(_both_ways(sources), _both_ways(targets), strict=True)):
            mixer.convs[index] = _CutPrelude(mixer.convs[index], read, asked)
    else:
        mixer.prelude = _CutPrelude(mixer.prelude, sources, targets)
    return mixer


def _silent_channels(y: Sequence, span: range, where: Bool[Array, '#b t']) -> Sequence:
    channels = jnp.arange(y.shape[-1])
    inside = (channels >= span.start) & (channels < span.stop)
    return jnp.where(where[..., None] & inside[None, None], jnp.zeros_like(y), y)


class _Silent(Linear):
    """A linear map some of whose outputs are zero at some tokens."""

    def __init__(self, linear: Linear, span: range, where: Bool[Array, '#b t']):
        self.axes, self.usual, self.linear, self.span = linear.axes, linear.usual, linear, span
        self.where = nnx.data(where)

    def __call__(self, x: Float[Array, 'b t d']) -> Float[Array, 'b t f']:
        return _silent_channels(self.linear(x), self.span, self.where)


class _SilentPrelude(Prelude):
    """A prelude some of whose outputs are zero at some tokens."""

    def __init__(self, prelude: Prelude, span: range, where: Bool[Array, '#b t']):
        self.prelude, self.span, self.where = prelude, span, nnx.data(where)

    def __call__(self, x: Sequence, segments: Segments | None, state: Any = None) -> tuple[Sequence, Any]:
        y, state = self.prelude(x, segments, state)
        return _silent_channels(y, self.span, self.where), state

    def init_state(self, batch: int, dtype: Any) -> Any:
        return self.prelude.init_state(batch, dtype)


class _Cancelling(RMSNorm):
    """A norm that gives minus the bias that is added to it at some tokens."""

    def __init__(self, norm: Any, bias: Any, where: Bool[Array, '#b t']):
        self.norm, self.bias, self.where = norm, bias, nnx.data(where)

    def __call__(self, x: Float[Array, 'b t r 1 n']) -> Float[Array, 'b t r h n']:
        minus = -self.bias[...][None, None].astype(x.dtype)
        return jnp.where(self.where[..., None, None, None], minus, self.norm(x))


class _CutPrelude(Prelude):
    """A prelude that gives targets nothing of sources."""

    def __init__(self, prelude: Prelude, sources: Bool[Array, '#b t'], targets: Bool[Array, '#b t']):
        self.prelude = prelude
        self.sources, self.targets = nnx.data(sources), nnx.data(targets)

    def __call__(self, x: Sequence, segments: Segments | None, state: Any = None) -> tuple[Sequence, Any]:
        whole, state = self.prelude(x, segments, state)
        without, _ = self.prelude(_zeroed(x, self.sources), segments, None)
        return jnp.where(self.targets[..., None], without, whole), state

    def init_state(self, batch: int, dtype: Any) -> Any:
        return self.prelude.init_state(batch, dtype)
