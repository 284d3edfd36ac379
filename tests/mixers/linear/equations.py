"""Parts of the equations of linear attention in numpy, one document at a time."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from attnlab.config import build
from attnlab.context import Context
from attnlab.mixers.linear.attention import LinearAttention
from attnlab.mixers.mixer import Mixer
from attnlab.nn.norms import LayerNorm
from attnlab.testing.noise import noise, perturbed
from attnlab.zoo.linear import LINEAR

DIM, HEADS, LENGTH = 8, 2, 9
SEGMENTS = np.asarray([[1] * 9, [1, 1, 1, 2, 2, 3, 3, 0, 0]])


def numbers(linear) -> tuple[np.ndarray, np.ndarray | float]:
    bias = 0.0 if linear.bias is None else np.asarray(linear.bias[...], np.float64)
    return np.asarray(linear.weight[...], np.float64), bias


def apply(linear, x: np.ndarray) -> np.ndarray:
    weight, bias = numbers(linear)
    return x @ weight + bias


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def recipe(name: str, **overrides) -> LinearAttention:
    factory = build(LINEAR[name].spec)
    return perturbed(factory.module(DIM, **{'heads': HEADS, **factory.kwargs, **overrides}, rngs=nnx.Rngs(0)))


def batch(segments: np.ndarray = SEGMENTS) -> tuple[jax.Array, Context]:
    x = noise(*segments.shape, DIM, dtype=jnp.float64)
    positions = np.zeros_like(segments)
    for row, place in zip(segments, positions, strict=True):
        for t in range(1, len(row)):
            place[t] = place[t - 1] + 1 if row[t] == row[t - 1] else 0
    return x, Context(jnp.asarray(positions, jnp.int32), jnp.asarray(segments, jnp.int32))


def heads(x: np.ndarray, count: int = HEADS) -> np.ndarray:
    return x.reshape(len(x), count, -1)


def documents(layer: Callable[[np.ndarray], np.ndarray], x: jax.Array, ctx: Context) -> np.ndarray:
    """The layer run on every document by itself."""
    out = np.empty(x.shape)
    for i, row in enumerate(np.asarray(ctx.segments)):
        for document in np.unique(row):
            where = row == document
            out[i, where] = layer(np.asarray(x[i])[where])
    return out


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def softplus(x: np.ndarray) -> np.ndarray:
    return np.log1p(np.exp(x))


def convolved(mixer: Mixer, x: np.ndarray, steps: int = 1) -> list[np.ndarray]:
    """Queries, keys and values after short convolutions and SiLU, `t h k`; of `n` writes a token `t (n h) k`."""
    results = []
    for linear, conv in zip((mixer.query, mixer.key, mixer.value), mixer.preludes, strict=True):
        projected, taps = apply(linear, x), np.asarray(conv.taps[...], np.float64)
        y = np.zeros_like(projected)
        for t in range(len(x)):
            for i, tap in enumerate(reversed(taps)):
                if t >= i:
                    y[t] += tap * projected[t - i]
        results.append(heads(silu(y), HEADS if linear is mixer.query else steps * HEADS))
    return results


def layer_normed(norm: LayerNorm, out: np.ndarray) -> np.ndarray:
    scale, bias = (np.asarray(a[...], np.float64) for a in (norm.scale, norm.bias))
    return (out - out.mean(-1, keepdims=True)) / np.sqrt(out.var(-1, keepdims=True) + norm.eps) * scale + bias


def normed(mixer: Mixer, out: np.ndarray) -> np.ndarray:
    if isinstance(mixer.norm, LayerNorm):
        return layer_normed(mixer.norm, out).reshape(len(out), -1)
    scale = np.asarray(mixer.norm.scale[...], np.float64)
    out = out / np.sqrt((out**2).mean(-1, keepdims=True) + mixer.norm.eps) * scale
    return out.reshape(len(out), -1)


def gated_output(mixer: Mixer, out: np.ndarray, x: np.ndarray) -> np.ndarray:
    return apply(mixer.output, normed(mixer, out) * silu(apply(mixer.gate.linear, x)))


class Ones(nnx.Module):
    """Weights of levels that are all one."""

    def __init__(self, dim: int, *, heads: int, rngs: nnx.Rngs):
        self.heads, self.count = heads, 5

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.ones((*x.shape[:2], self.heads, self.count), x.dtype)


def level_weights(levels: nnx.Module, x: np.ndarray) -> np.ndarray:
    """What a token reads of every token by level, `t s h`."""
    scale = np.asarray(levels.scale[...], np.float64)
    by_level = softplus(scale * apply(levels.linear, x).reshape(len(x), *scale.shape))
    level = np.array([[(t ^ s).bit_length() for s in range(len(x))] for t in range(len(x))])
    return np.moveaxis(np.take_along_axis(by_level, level[:, None], axis=2), 1, 2)


def check_layer(
    name: str,
    equations: Callable[[LinearAttention, np.ndarray], np.ndarray],
    segments: np.ndarray = SEGMENTS,
    **overrides,
) -> None:
    """The recipe's layer gives what the equations give of every document by itself."""
    mixer = recipe(name, **overrides)
    x, ctx = batch(segments)
    y, state = jax.jit(mixer)(x, ctx)
    assert state is None
    np.testing.assert_allclose(y, documents(lambda row: equations(mixer, row), x, ctx), rtol=1e-9, atol=1e-9)
