"""Parts of a model apart: what is left without a head, and what every branch adds to an observable."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from attnlab.analysis.interventions import Change, hidden_with, last_map, mixers_of
from attnlab.blocks.block import Block
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional.precision import wide_dtype
from attnlab.models.layers import layers
from attnlab.models.predictor import Stacked, one_stack
from attnlab.nn.norms import LayerNorm, NoNorm, OffsetRMSNorm, RMSNorm, SimpleRMSNorm
from attnlab.typing import Embedded, Features, Tokens

NOT_A_SUM = 'what branches add does not add up'
"""Said of a model of which `propagated` cannot be."""

NOT_LINEAR = f'the head does more than a linear map does, so {NOT_A_SUM}'
"""Said where it is the head."""

SCALING = (RMSNorm, OffsetRMSNorm, SimpleRMSNorm, NoNorm)
"""Norms that only scale channels, their statistics held."""


def without_head(heads: int, head: int) -> Change:
    """A change of `layers[i].mixer.hidden` by which one of `heads` heads gives nothing.

    Raises `UserError` for an unknown head, and where heads do not share the channels evenly.
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
    found = {layer: mixer for layer, mixer in mixers_of(model).items() if last_map(mixer) is not None}
    heads = {layer: getattr(mixer, 'heads', None) for layer, mixer in found.items()}
    return {layer: count for layer, count in heads.items() if isinstance(count, int)}


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


def propagated(
    model: Stacked, inputs: Tokens | Features, ctx: Context, observable: Float[Array, 'o'], token: int | Int[Array, '']
) -> tuple[dict[str, Float[Array, 'b']], dict[str, Float[Array, 'b t d']]]:
    """Of an observable of the logits at a token, what every branch adds to it, and its direction at every place.

        o^T logits = sum_places  o^T W (g * v_place) / rms,    direction_place = d(o^T logits) / d v_place

    Contributions are of the embedding and of the output of every branch, the last norm's scale `rms` held as it is
    (of a `LayerNorm` its standard deviation, with `v - mean(v)` for v), and of the `head`, what it gives where all of
    these are zero, such as its bias and that of the norm; their sum is the observable, to rounding. Directions are
    derivatives at the point, through everything behind. Dunefsky and Cohan 2023, https://arxiv.org/abs/2312.16291, who
    propagate by the weights of single heads.

    Raises `UserError` for a final norm or a head by which they do not add up, for residuals with several streams, and
    not for a head in a compiled function, where nothing can be raised: contributions are NaN there.
    """
    norm: Any = getattr(model, 'norm', None)
    if type(norm) not in (*SCALING, LayerNorm):
        raise UserError(
            f'the last norm is {type(norm).__name__}, which is no linear map with its statistics held, so '
            f'{NOT_A_SUM}; they do with {LayerNorm.__name__}, {", ".join(each.__name__ for each in SCALING)}'
        )
    names = ['embedding']
    for index, layer in layers(model):
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
    pull = jax.vjp(model.logits, hidden[:, token])[1](jnp.broadcast_to(observable, (len(hidden), len(observable))))[0]
    through, given = _through(norm, stream[:, token], hidden[:, token], pull)
    found = {name: jnp.sum(seen[name][:, token] * through, axis=-1) for name in names}
    found['head'] = model.logits(jnp.zeros_like(hidden[:, token])) @ observable + given
    total, size = sum(found.values()), sum(map(jnp.abs, found.values()))
    off = jnp.any(jnp.abs(total - whole) > float(jnp.finfo(hidden.dtype).eps) ** 0.5 * size)
    if not isinstance(off, jax.core.Tracer) and bool(off):
        raise UserError(NOT_LINEAR)
    return {name: jnp.where(off, jnp.nan, each) for name, each in found.items()}, directions


def _through(
    norm: Any, x: Float[Array, 'b d'], y: Float[Array, 'b d'], pull: Float[Array, 'b d']
) -> tuple[Float[Array, 'b d'], Float[Array, 'b'] | float]:
    """What a norm of `x`, its statistics held, makes of a derivative by its output `y`, and what its bias gives."""
    if not isinstance(norm, LayerNorm):
        return y / jnp.where(x == 0, 1, x) * pull, 0.0
    wide = x.astype(wide_dtype(x.dtype))
    to = norm.scale[...][None] * jax.lax.rsqrt(jnp.var(wide, axis=-1, keepdims=True) + norm.eps) * pull
    # The mean is taken off what is added, or as well off what it is multiplied with.
    return to - jnp.mean(to, axis=-1, keepdims=True), jnp.sum(norm.bias[...][None] * pull, axis=-1)
