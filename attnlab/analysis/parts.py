"""Parts of mixers taken away: heads, and of selective state-space models what is written, read, and convolved."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float

from attnlab.analysis.interventions import Change, hidden_with, last_map
from attnlab.blocks.block import Block
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.mixers.state_space.selective import SelectiveSSM
from attnlab.models.predictor import Stacked, one_stack
from attnlab.nn.preludes import Prelude
from attnlab.nn.projections import Linear
from attnlab.typing import Embedded, Features, Segments, Sequence, Tokens

PARTS = ('B', 'C', 'conv', 'state')
"""Of a selective state-space model: what tokens write, what they read with, its convolution, and its state."""


def without_head(heads: int, head: int) -> Change:
    """A change of `layers[i].mixer.hidden` by which one of so many heads gives nothing.

    Raises `UserError` for a head that there is not, and where heads do not share the channels evenly.
    """
    if not 0 <= head < heads:
        raise UserError(f'head is {head}; the mixer has heads 0 to {heads - 1}')

    def change(x: Float[Array, 'b t f']) -> Float[Array, 'b t f']:
        if x.shape[-1] % heads:
            raise UserError(f'{x.shape[-1]} channels are not shared evenly by {heads} heads')
        kept = jnp.repeat(jnp.arange(heads) != head, x.shape[-1] // heads)
        return jnp.where(kept[None, None], x, 0)

    return change


def heads_of(model: Stacked) -> dict[int, int]:
    """How many heads the mixer of a layer has, by layer, of those that have heads and one last map."""
    found = {}
    for index, layer in enumerate(one_stack(model).layers()):
        heads = getattr(layer.mixer, 'heads', None) if isinstance(layer, Block) else None
        if isinstance(heads, int) and isinstance(layer, Block) and last_map(layer.mixer) is not None:
            found[index] = heads
    return found


def ablated(
    model: Stacked, inputs: Tokens | Features, ctx: Context, score: Callable[[Embedded], Float[Array, '']]
) -> dict[tuple[int, int], Float[Array, '']]:
    """The score of hidden states by layer and head, where that head gives nothing.

    Michel, Levy and Neubig 2019, https://arxiv.org/abs/1905.10650.
    """
    return {
        (layer, head): score(
            hidden_with(model, inputs, ctx, {f'layers[{layer}].mixer.hidden': without_head(heads, head)})
        )
        for layer, heads in heads_of(model).items()
        for head in range(heads)
    }


def part_knocked_out(
    model: Stacked,
    inputs: Tokens | Features,
    ctx: Context,
    part: str,
    layers: tuple[int, ...],
    *,
    sources: Bool[Array, 't'],
    targets: Bool[Array, 't'],
) -> Embedded:
    """The hidden states where a part of the Mamba mixers of some layers carries nothing from sources to targets.

    `B`: sources write nothing into the state (their own outputs keep `D x`). `C`: targets read nothing from it. `conv`:
    the convolution gives targets nothing of sources. `state`: targets read the state as it would be had sources written
    nothing; what they have from the convolution stays, and so does how far sources let fade what came before. Masks
    that are empty change no bit. Sharma et al. 2024, https://arxiv.org/abs/2404.03646, who knock out whole paths; parts
    are taken apart here.

    Raises `UserError` for another part, and for layers whose mixer is no `SelectiveSSM`.
    """
    if part not in PARTS:
        raise UserError(f'there is no part {part!r}; choose from {", ".join(PARTS)}')
    ctx = model.context(ctx, inputs)
    streams = model.stack.residual.open(model.embed(inputs, ctx))
    found = list(one_stack(model).layers())
    for index in layers:
        mixer = getattr(found[index], 'mixer', None) if 0 <= index < len(found) else None
        if not isinstance(mixer, SelectiveSSM):
            raise UserError(f'layer {index} has no selective state-space model; parts {", ".join(PARTS)} are of one')
        take(mixer, part, sources, targets)
    for index, layer in enumerate(found):
        streams, _ = layer(streams, ctx.fold_in(index))
    return model.norm(model.stack.residual.close(streams))  # type: ignore[attr-defined]


def take(mixer: SelectiveSSM, part: str, sources: Bool[Array, 't'], targets: Bool[Array, 't']) -> None:
    """Takes a part away from a mixer, in place."""
    rank, both = mixer.splits
    spans: Mapping[str, tuple[int, int, Array]] = {
        'B': (rank, both, sources),
        'C': (both, 2 * both - rank, targets),
    }
    if part in spans:
        mixer.select = _Silent(mixer.select, *spans[part])
    elif part == 'conv':
        mixer.prelude = _CutPrelude(mixer.prelude, sources, targets)
    else:
        silent = nnx.clone(mixer)
        silent.select = _Silent(silent.select, *spans['B'])
        mixer.scan = _CutScan(mixer.scan, silent.scan, targets)  # type: ignore[method-assign]


class _Silent(Linear):
    """A linear map some of whose outputs are zero at some tokens."""

    def __init__(self, linear: Linear, first: int, last: int, where: Bool[Array, 't']):
        self.axes, self.usual, self.linear, self.span = linear.axes, linear.usual, linear, (first, last)
        self.where = nnx.data(where)

    def __call__(self, x: Float[Array, 'b t d']) -> Float[Array, 'b t f']:
        y = self.linear(x)
        channels = jnp.arange(y.shape[-1])
        inside = (channels >= self.span[0]) & (channels < self.span[1])
        return jnp.where(self.where[None, :, None] & inside[None, None], 0, y)


class _CutPrelude(Prelude):
    """A prelude that gives targets nothing of sources."""

    def __init__(self, prelude: Prelude, sources: Bool[Array, 't'], targets: Bool[Array, 't']):
        self.prelude = prelude
        self.sources, self.targets = nnx.data(sources), nnx.data(targets)

    def __call__(self, x: Sequence, segments: Segments | None, state: Any = None) -> tuple[Sequence, Any]:
        whole, state = self.prelude(x, segments, state)
        without, _ = self.prelude(_silenced(x, self.sources), segments, None)
        return jnp.where(self.targets[None, :, None], without, whole), state

    def init_state(self, batch: int, dtype: Any) -> Any:
        return self.prelude.init_state(batch, dtype)


class _CutScan(nnx.Module):
    """A scan whose outputs at targets are those of another."""

    def __init__(self, scan: Callable[..., Any], other: Callable[..., Any], targets: Bool[Array, 't']):
        self.scan, self.other = nnx.static(scan), nnx.static(other)
        self.targets = nnx.data(targets)

    def __call__(self, x: Sequence, segments: Segments | None, memory: Any = None) -> tuple[Sequence, Any]:
        whole, after = self.scan(x, segments, memory)
        without, _ = self.other(x, segments, memory)
        return jnp.where(self.targets[None, :, None], without, whole), after


def _silenced(x: Sequence, where: Bool[Array, 't']) -> Sequence:
    return jnp.where(where[None, :, None], jnp.zeros_like(x), x)


def propagated(
    model: Stacked, inputs: Tokens | Features, ctx: Context, observable: Float[Array, 'o'], token: int
) -> tuple[dict[str, Float[Array, 'b']], dict[str, Float[Array, 'b t d']]]:
    """Of an observable of the logits at a token, what every branch adds to it, and its direction at every place.

        o^T logits = sum_places  o^T W (g * v_place) / rms,    direction_place = d(o^T logits) / d v_place

    Contributions are of the embedding and of the output of every branch, the last norm's scale `rms` held as it is, and
    of the `head`, what it gives to zeros, such as its bias; their sum is the observable, to rounding. Directions are
    derivatives at the point, through everything behind. Dunefsky and Cohan 2023, https://arxiv.org/abs/2312.16291, who
    propagate by the weights of single heads.

    Raises `UserError` for a final norm or a head by which they do not add up, for which they are NaN in a compiled
    function, where nothing can be raised; and for residuals with several streams.
    """
    layers = one_stack(model).layers()
    names = ['embedding']
    for index, layer in enumerate(layers):
        if not isinstance(layer, Block):
            raise UserError(f'layer {index} is a {type(layer).__name__}, whose branches are not told apart')
        branches = ('mixer', 'mlp')[: len(layer.connections)]
        names += [f'layers[{index}].{branch}.output' for branch in branches]
    last = f'layers[{one_stack(model).depth - 1}].residual'

    def value(added: Mapping[str, Array]) -> tuple[Array, tuple[dict[str, Array], Array, Array]]:
        seen: dict[str, Array] = {}

        def at(name: str) -> Change:
            def change(x: Array) -> Array:
                seen[name] = x
                return x + added[name] if name in added else x

            return change

        hidden = hidden_with(model, inputs, ctx, {name: at(name) for name in (*names, last)})
        logits = model.logits(hidden[:, token])
        return jnp.sum(logits @ observable), (seen, hidden, logits @ observable)

    start = model.embed(inputs, ctx)
    zeros = {name: jnp.zeros_like(start) for name in names}
    directions, (seen, hidden, whole) = jax.grad(value, has_aux=True)(zeros)
    stream = seen[last]
    if stream.ndim != 3:
        raise UserError('the residual has several streams, to which branches do not simply add')
    ratio = hidden[:, token] / jnp.where(stream[:, token] == 0, 1, stream[:, token])
    pull = jax.vjp(model.logits, hidden[:, token])[1](jnp.broadcast_to(observable, (len(hidden), len(observable))))[0]
    found = {name: jnp.sum(seen[name][:, token] * ratio * pull, axis=-1) for name in names}
    found['head'] = model.logits(jnp.zeros_like(hidden[:, token])) @ observable
    total, size = sum(found.values()), sum(map(jnp.abs, found.values()))
    off = jnp.any(jnp.abs(total - whole) > float(jnp.finfo(hidden.dtype).eps) ** 0.5 * size)
    if not isinstance(off, jax.core.Tracer) and bool(off):
        raise UserError('the last norm or the head does more than scale channels, so what branches add does not add up')
    return {name: jnp.where(off, jnp.nan, each) for name, each in found.items()}, directions
