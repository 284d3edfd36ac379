"""Converts a trained model to UniAttn: layers reuse the attention weights of the first of their group.

    unified(model, tokens, layers=4, begin=16)

Xiong et al. 2025, https://arxiv.org/abs/2502.00439. The paper then trains the compensations alone, and
then all parameters, for one epoch each at a small learning rate.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float

from attnlab.blocks.block import Block
from attnlab.blocks.residual import Plain
from attnlab.blocks.unified import UnifiedBlocks
from attnlab.context import Context
from attnlab.convert.plain import other_parts
from attnlab.errors import UserError
from attnlab.mixers.softmax.attention import Attention
from attnlab.models.model import Model
from attnlab.models.predictor import one_stack
from attnlab.typing import Sequence, Tokens

CUT = 1e-10
"""Singular values below this count as zero, as in the released code."""


def unified(model: Model, tokens: Tokens, *, layers: int = 4, begin: int = 0) -> Model:
    """Returns a copy of the model whose layers from `begin` on share attention weights in groups of `layers`.

    Parameters are the model's; dropout is removed. The compensations of the other layers of a group are fitted in
    order, each after those before it: `W_c = pinv(X) (R - R')`, `X` its normed input, `R` and `R'` the residual
    streams after attention in the original and the converted model, each averaged over the rows of `tokens` for
    every position. With more channels than positions the averaged streams agree exactly; otherwise in the sense of
    least squares.

    Raises `UserError` for layers whose attention `UnifiedBlocks` cannot represent.
    """
    stack = one_stack(model)
    blocks = list(stack.layers())
    if layers < 1 or not 0 <= begin <= len(blocks):
        raise UserError(f'layers is {layers} and begin {begin}; the model has {len(blocks)} layers')
    if not isinstance(stack.residual, Plain):
        raise UserError(f'the stack has {type(stack.residual).__name__}; only a plain one can share weights')
    ctx = model.context(Context.full(*tokens.shape), tokens)
    x = base = model.embed(tokens, ctx)
    made: list[Any] = []
    for block in blocks[:begin]:
        x, _ = block(x, ctx)
        base = x
        made.append(block)
    for start in range(begin, len(blocks), layers):
        group = [_attention_block(block, index) for index, block in enumerate(blocks[start : start + layers], start)]
        if len({(block.mixer.heads, block.mixer.kv_heads, block.mixer.key_dim) for block in group}) > 1:
            raise UserError(
                f'layers {start} to {start + len(group) - 1} have other heads; those of a group share their weights'
            )
        targets = []
        for index, block in enumerate(group, start):
            _check(block, base, ctx, index)
            taken = list(block.steps(base, ctx))
            targets.append(taken[0].streams)
            base = taken[-1].streams
        joined = _joined(group)
        for place, layer in enumerate(joined.layers):
            if layer.compensation is not None:
                mixed = [taken for taken in joined.steps(x, ctx) if taken.name.endswith('mixer')][place]
                rest = _mean(targets[place]) - _mean(mixed.streams)
                layer.compensation.weight[...] = _fitted(_mean(mixed.normed), rest)
        x, _ = joined(x, ctx)
        made.append(joined)
    result = nnx.clone(model)
    changed = one_stack(result)
    changed.depth = len(made)
    changed.blocks = nnx.List([_stacked(block) for block in made])
    return result


def _attention_block(block: nnx.Module, index: int) -> Any:
    if not isinstance(block, Block) or not isinstance(block.mixer, Attention) or not block.mixer.reach.causal:
        raise UserError(f'layer {index} is {type(block).__name__}; only causal attention blocks can share weights')
    others = other_parts(block.mixer)
    if others:
        raise UserError(f'layer {index} is attention with {", ".join(others)}; only plain attention can share weights')
    if block.mixer_prelude is not None or block.mlp_prelude is not None or getattr(block.mlp, 'remembers', False):
        raise UserError(f'layer {index} has residual convolutions, which groups of layers that share weights lack')
    return block


def _joined(blocks: list[Any]) -> UnifiedBlocks:
    """The blocks as one group, with their parameters and zero compensations."""
    blocks = [nnx.clone(block) for block in blocks]
    leader, mlps = blocks[0].mixer, iter([block.mlp for block in blocks])
    made = UnifiedBlocks(
        leader.query.matrix().shape[0],
        heads=leader.heads,
        kv_heads=leader.kv_heads,
        key_dim=leader.key_dim,
        layers=len(blocks),
        mlp=None if blocks[0].mlp is None else lambda dim, *, rngs: next(mlps),
        position=leader.position,
        bias=leader.query.bias is not None,
        implementation=leader.implementation,
        rngs=nnx.Rngs(0),
    )
    made.query, made.key = leader.query, leader.key
    for layer, block in zip(made.layers, blocks, strict=True):
        layer.mixer_norm, layer.value, layer.output = block.mixer_norm, block.mixer.value, block.mixer.output
        layer.mlp_norm = block.mlp_norm
    return made


def _check(block: Any, x: Sequence, ctx: Context, index: int) -> None:
    """Raises `UserError` for attention with more than four projections and a softmax, which conversion would change."""
    expected, _ = block(x, ctx)
    actual, _ = _joined([block])(x, ctx) if block.mixer.value_dim == block.mixer.key_dim else (x, None)
    if not np.allclose(actual, expected, rtol=1e-2, atol=1e-2 * float(jnp.std(expected))):
        raise UserError(
            f'layer {index} is not plain softmax attention with equal key and value widths; only that can share weights'
        )


def _mean(x: Sequence) -> Float[np.ndarray, 't d']:
    return np.asarray(x, np.float64).mean(axis=0)


def _fitted(inputs: Float[np.ndarray, 't d'], targets: Float[np.ndarray, 't d']) -> Float[Array, 'd d']:
    """The least-squares map of minimum norm."""
    greatest = max(float(np.linalg.norm(inputs, 2)), CUT)
    return jnp.asarray(np.linalg.pinv(inputs, rcond=CUT / greatest) @ targets, jnp.float32)


def _stacked(block: Any) -> Any:
    """The block with a leading dimension of one, as in a stack."""
    graphdef, state = nnx.split(block)

    def first(leaf: Array) -> Array:
        return leaf[None]

    return nnx.merge(graphdef, jax.tree.map(first, state))
