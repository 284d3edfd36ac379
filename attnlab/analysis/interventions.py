"""Changes of named places in a trained model, without changing any mixer.

A place is `embedding`; of layer 2 the normalised input of a branch, `layers[2].mixer.input`, and what the branch adds
to the stream, `layers[2].mixer.output`, likewise of `mlp`; or the stream after it, `layers[2].residual`. What the last
linear map of a branch reads, `layers[2].mixer.hidden`, has the channels of its heads side by side; of an MLP it is the
keys of facts (Geva et al. 2021, https://arxiv.org/abs/2012.14913). What is done there is a function of the value. One
that returns what it is given changes no bit of the result. The mixer itself is a place too, `layers[2].mixer`, whose
value is a function of tokens; what is done there gives another (`attnlab.analysis.cuts`).

    hidden_with(model, tokens, ctx, {'layers[1].mixer.output': jnp.zeros_like})
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float

from attnlab.blocks.block import Block
from attnlab.blocks.residual import Connection, Streams
from attnlab.context import Context
from attnlab.errors import UserError, nearest
from attnlab.models.layers import layers
from attnlab.models.predictor import Stacked, one_stack
from attnlab.nn.projections import Linear
from attnlab.typing import Embedded, Features, Sequence, Tokens

Change = Callable[[Any], Any]
"""What is done to a value, an array; of a mixer, what takes its place."""

BRANCHES = ('mixer', 'mlp')


def places(model: Stacked) -> list[str]:
    """The places of a model, in the order in which it computes them."""
    found = ['embedding']
    for index, layer in layers(model):
        if isinstance(layer, Block):
            branches = BRANCHES[: len(layer.connections)]
            for branch in branches:
                sides = (
                    ('input', 'output') if last_map(getattr(layer, branch)) is None else ('input', 'hidden', 'output')
                )
                found += [f'layers[{index}].{branch}.{side}' for side in sides]
        found.append(f'layers[{index}].residual')
    return found


def mixers_of(model: Stacked) -> dict[int, Any]:
    """The mixers that can be changed, `layers[i].mixer`, by layer: those of blocks."""
    return {index: layer.mixer for index, layer in layers(model) if isinstance(layer, Block)}


def hidden_with(model: Stacked, inputs: Tokens | Features, ctx: Context, changes: Mapping[str, Change]) -> Embedded:
    """The hidden state of every position, the values at some places being changed.

    Raises `UserError` for a place that the model does not have.
    """
    check_places(changes, [*places(model), *(f'layers[{index}].mixer' for index in mixers_of(model))])

    def at(place: str, value: Any) -> Any:
        return changes[place](value) if place in changes else value

    x, ctx = at('embedding', model.embed(inputs, ctx)), model.context(ctx, inputs)
    streams = model.stack.residual.open(x)
    for index, layer in layers(model):
        _change(layer, f'layers[{index}]', changes)
        own, ctx = model.stack.told(index, layer, streams, ctx)
        streams, _ = layer(streams, own.fold_in(index))
        streams = at(f'layers[{index}].residual', streams)
    return model.norm(model.stack.residual.close(streams))  # type: ignore[attr-defined]


def with_methods(model: Any, **methods: Callable[..., Any]) -> Any:
    """A copy of a model some of whose methods are others, which are given what is in the place of theirs, `own`, first.

    with_methods(model, hidden=lambda own, inputs, ctx, state=None: own(inputs, change(ctx), state))
    """
    copy = nnx.clone(model)
    for name, method in methods.items():
        setattr(copy, name, functools.partial(method, getattr(copy, name)))
    return copy


def check_places(wanted: Iterable[str], known: Collection[str]) -> None:
    """Raises `UserError` for an unknown place."""
    for place in wanted:
        if place not in known:
            raise UserError(f'this model has no place {place!r}{nearest(place, known)}')


def values_at(model: Stacked, inputs: Tokens | Features, ctx: Context, wanted: list[str]) -> dict[str, Array]:
    """The values at some places of a pass. Raises `UserError` for a place that the model does not have."""
    check_places(wanted, places(model))
    found: dict[str, Array] = {}
    hidden_with(model, inputs, ctx, {place: _Note(place, found) for place in wanted})
    return found


@dataclasses.dataclass(frozen=True)
class _Note:
    """A change that changes nothing and keeps the value."""

    place: str
    found: dict[str, Array]

    def __call__(self, value: Array) -> Array:
        self.found[self.place] = value
        return value


def _change(layer: Any, name: str, changes: Mapping[str, Change]) -> None:
    """Puts changes into a layer, which is a copy of the stack's: in the place of its mixer, around norms and so on."""
    for number, branch in enumerate(BRANCHES):
        if (before := changes.get(f'{name}.{branch}.input')) is not None:
            setattr(layer, f'{branch}_norm', _After(getattr(layer, f'{branch}_norm'), before))
        if (between := changes.get(f'{name}.{branch}.hidden')) is not None:
            if isinstance(between, _Note):
                setattr(layer, branch, _Telling(getattr(layer, branch), between))
            elif (read := last_map(getattr(layer, branch))) is not None:
                setattr(read.module, read.name, Reading(read.map, between))
        if (after := changes.get(f'{name}.{branch}.output')) is not None:
            layer.connections[number] = _Adding(layer.connections[number], after)
    if (put := changes.get(f'{name}.mixer')) is not None:
        layer.mixer = put(layer.mixer)


class LastMap(NamedTuple):
    """The linear map from which a branch's output comes: the module that has it, its attribute, and the map."""

    module: Any
    name: str
    map: Linear


def last_map(branch: Any) -> LastMap | None:
    """The one linear map of a branch to the width of the model; `None` where there is none, or several.

    Nor is there one where the branch goes on after it (`Module.goes_on`), and of channel mixers that keep a state or
    choose among experts, which blocks call in other ways (`Module.remembers`, `Module.routes`).
    """
    if branch is None or getattr(branch, 'remembers', False) or getattr(branch, 'routes', False):
        return None
    modules = [module for _, module in list(nnx.iter_modules(branch))]
    if any(getattr(module, 'goes_on', False) for module in modules):
        return None
    found = [
        LastMap(module, name, value)
        for module in modules
        for name, value in list(vars(module).items())
        if isinstance(value, Linear) and value.axes[1] == 'embed'
    ]
    return found[0] if len(found) == 1 else None


class Reading(Linear):
    """A linear map whose input is changed."""

    def __init__(self, linear: Linear, change: Change):
        self.axes, self.usual, self.linear, self.change = linear.axes, linear.usual, linear, change

    def __call__(self, x: Array) -> Array:
        return self.linear(self.change(x))


class _Telling(nnx.Module):
    """A branch that notes what its last map reads.

    Some maps are called where values are computed anew in a backward pass, so that what is noted there would be lost.
    The branch is therefore called again, its last map giving some of the channels that it reads in place of its own.
    """

    def __init__(self, branch: Any, note: _Note):
        self.branch, self.note = branch, note

    def __call__(self, x: Sequence, *rest: Any) -> Any:
        read = last_map(self.branch)
        assert read is not None
        wide, width = read.map.matrix().shape
        parts = []
        for first in range(0, wide, width):
            setattr(read.module, read.name, _Showing(read.map, range(first, first + width)))
            y = self.branch(x, *rest)
            parts.append(y[0] if isinstance(y, tuple) else y)
        setattr(read.module, read.name, read.map)
        self.note(jnp.concatenate(parts, axis=-1)[..., :wide])
        return self.branch(x, *rest)

    def values(self, x: Sequence, ctx: Context, state: Any = None) -> Array:
        """Those of a mixer that tells them."""
        return self.branch.values(x, ctx, state)


class _Showing(Linear):
    """In the place of a linear map, some channels of what it reads, as many as it gives."""

    def __init__(self, linear: Linear, channels: range):
        self.axes, self.usual, self.channels = linear.axes, linear.usual, channels

    def __call__(self, x: Array) -> Array:
        part = x[..., self.channels.start : self.channels.stop]
        return jnp.pad(part, [(0, 0)] * (x.ndim - 1) + [(0, len(self.channels) - part.shape[-1])])


class _After(nnx.Module):
    """A module whose output is changed."""

    def __init__(self, module: Any, change: Change):
        self.module, self.change = module, change

    def __call__(self, x: Array) -> Array:
        return self.change(self.module(x))


class _Adding(Connection):
    """A connection that adds a changed output to the stream."""

    def __init__(self, connection: Any, change: Change):
        self.connection, self.change = connection, change

    def read(self, streams: Streams) -> tuple[Sequence, Any]:
        """What the branch reads of the streams, and what it is added to."""
        return self.connection.read(streams)

    def add(self, kept: Any, y: Sequence) -> Streams:
        """The streams after the branch."""
        return self.connection.add(kept, self.change(y))


def causal_trace(
    model: Stacked,
    inputs: Tokens | Features,
    ctx: Context,
    corrupted: Embedded,
    score: Callable[[Embedded], Float[Array, '']],
    *,
    place: str = 'residual',
    window: int = 1,
) -> tuple[Float[Array, 'l t'], Float[Array, ''], Float[Array, '']]:
    """How much of a score comes back when clean values are put into a corrupted pass, by layer and token.

    Every entry is the score of a pass from the `corrupted` embedding in which the values of one token at
    `layers[i].PLACE`, `i` in a window of `window` layers about one, are those of the clean pass. Also returned are the
    scores of the clean and of the corrupted pass. With the embedding of another prompt for `corrupted` this is
    activation patching between two prompts; with noise on a subject, that of Meng et al. 2022,
    https://arxiv.org/abs/2202.05262.
    Raises `UserError` for a place that the model does not have.
    """
    depth, length = one_stack(model).depth, corrupted.shape[1]
    names = [f'layers[{index}].{place}' for index in range(depth)]
    clean = values_at(model, inputs, ctx, names)

    def patched(mask: Bool[Array, 'l t']) -> Float[Array, '']:
        def put(index: int) -> Change:
            def change(value: Array) -> Array:
                where = mask[index].reshape(1, length, *(1,) * (value.ndim - 2))
                return jnp.where(where, clean[names[index]], value)

            return change

        changes = {'embedding': lambda x: corrupted.astype(x.dtype)}
        changes |= {name: put(index) for index, name in enumerate(names)}
        return score(hidden_with(model, inputs, ctx, changes))

    near = windows(depth, window)
    tokens = jnp.eye(length, dtype=bool)
    masks = near[:, None, :, None] & tokens[None, :, None, :]
    effects = jax.lax.map(patched, masks.reshape(-1, depth, length)).reshape(depth, length)
    return effects, score(hidden_with(model, inputs, ctx, {})), patched(jnp.zeros((depth, length), bool))


def windows(depth: int, width: int) -> Bool[Array, 'l l']:
    """Row `i` marks the layers in a window of `width` layers centred on layer `i`.

    An even window has one more layer before the centre than after it; windows are cut off at the ends of the stack.
    """
    layers = jnp.arange(depth)
    after = layers[None] - layers[:, None]
    return (after >= -(width // 2)) & (after < width - width // 2)
