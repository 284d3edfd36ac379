"""Ranges of inputs fixed by rows of training, channels behind norms made equally wide before (RepQ-ViT)."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float

from attnlab.blocks.block import Block
from attnlab.errors import UserError
from attnlab.nn.projections import Linear
from attnlab.quantize.formats import Fixed, Format
from attnlab.quantize.layers import Quantization, linear_maps, named_maps
from attnlab.quantize.sparsity import apart
from attnlab.quantize.states import StateFormat
from attnlab.runs.loading import Loaded
from attnlab.signature import checked_fields
from attnlab.tasks.task import Batch
from attnlab.train.rows import rows_of
from attnlab.train.state import joined, split

SAME = 1e-4
"""How much of itself a loss may change by a change that is none, but for orders of sums."""


@checked_fields
@dataclasses.dataclass(frozen=True)
class Calibration:
    """A `Quantization` that is yet to be found: input ranges are measured on training rows, one for each linear map.

    What a norm gives is read by maps alone in most blocks. Then each of its channels is given the width of their mean,
    by factors and, where the norm and the maps have biases, shifts that move into the norm and the maps behind it,

        x' = x / r - b,  g' = g / r,  beta' = beta / r - b,  W' = diag(r) W,  c' = c + b W',

    so that the model computes what it did and one scale and zero point serve as one of each channel would have. With
    scales s and zero points z of channels and S, Z for all, `r = s / S` and `b = S (Z - z)`; without biases s is by the
    largest size of a channel, and b is zero. Li et al. 2023, https://arxiv.org/abs/2212.08254. They do not round `Z`,
    and they add biases where a layer has none.

    Attributes:
      bits: of inputs.
      rows: of training, that ranges are taken from, of padding too.
      weights: as of `Quantization`.
      state: as of `Quantization`.
    """

    bits: int
    rows: int = 64
    weights: Format | None = None
    state: StateFormat | None = None

    def __post_init__(self) -> None:
        """Raises `UserError` for bits that there are not, and without rows."""
        Fixed(self.bits, 1.0, 0)
        check_rows(self)

    def found(self, loaded: Loaded) -> tuple[Quantization, Loaded]:
        """The ranges, and the run whose channels are equally wide behind norms, which computes what it did."""
        alone = loaded.altered(apart)
        batches = rows_of(alone.setup, 'train', self.rows, at_once=alone.setup.rows_of_part)
        model = alone.model()
        ranges, behind = listened(alone, model, batches)
        for norm, names in behind:
            maps = [named_maps(model)[name] for name in names]
            change = equal_widths(norm, maps, *ranges[names[0]], self.bits)
            if _unchanged(alone, model, norm, maps, batches[0]):
                move(norm, maps, *change)
        ranges, _ = listened(alone, model, batches)
        _, params, buffers = split(model)
        fixed = tuple(Fixed.of(self.bits, float(low.min()), float(high.max())) for low, high in ranges.values())
        moved = dataclasses.replace(alone, variables=joined(params, buffers))
        return Quantization(self.weights, fixed, self.state), moved


def check_rows(how: Any) -> None:
    """Raises `UserError` for a calibration without rows."""
    if how.rows < 1:
        raise UserError(f'rows of {type(how).__name__} is {how.rows}; ranges are taken from 1 or more')


def move(norm: Any, maps: list[Linear], factor: Float[Array, 'd'], shift: Float[Array, 'd']) -> None:
    """Divides what a norm gives by factors and takes shifts off it, and makes up for that in the maps that read it.

    In place, over any leading axes of the parameters. Raises ValueError for shifts where a map has no bias.
    """
    norm.scale[...] = norm.scale[...] / _like(factor, norm.scale)
    if _biased(norm):
        norm.bias[...] = norm.bias[...] / _like(factor, norm.bias) - _like(shift, norm.bias)
    for linear in maps:
        weight = linear.weight[...]
        linear.weight[...] = weight * jnp.broadcast_to(factor[:, None], weight.shape)
        if linear.bias is not None:
            added = jnp.einsum('d,...df->...f', shift, linear.weight[...], precision=jax.lax.Precision.HIGHEST)
            linear.bias[...] = linear.bias[...] + added
        elif jnp.any(shift != 0):
            raise ValueError('a shift moves into biases, and a map has none')


def _biased(module: Any) -> bool:
    """Whether a norm or a map has a bias."""
    return getattr(module, 'bias', None) is not None


def _like(x: Float[Array, 'd'], variable: nnx.Variable) -> Array:
    return jnp.broadcast_to(x, variable[...].shape)


def equal_widths(
    norm: Any, maps: list[Linear], low: Float[np.ndarray, 'd'], high: Float[np.ndarray, 'd'], bits: int
) -> tuple[Float[Array, 'd'], Float[Array, 'd']]:
    """The factors and shifts that give channels of these ranges one scale and zero point."""
    top = 2**bits - 1
    if not all(map(_biased, (norm, *maps))):
        scales = _positive(np.maximum(np.abs(low), np.abs(high)))
        return jnp.asarray(scales / scales.mean()), jnp.zeros(len(low))
    low, high = np.minimum(low, 0), np.maximum(high, 0)
    scales = _positive((high - low) / top)
    zeros = np.round(-low / scales)
    shift = scales.mean() * (np.round(zeros.mean()) - zeros)
    return jnp.asarray(scales / scales.mean()), jnp.asarray(shift.astype(np.float32))


def _positive(x: Float[np.ndarray, 'd']) -> Float[np.ndarray, 'd']:
    """Channels that are always zero have the mean of the others, or one."""
    there = x > 0
    return np.where(there, x, x[there].mean() if there.any() else 1.0).astype(np.float32)


class _Tape:
    """What is heard of a model: the ranges of channels that maps read, and which read what a norm gives."""

    def __init__(self) -> None:
        self.ranges: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self.given: list[tuple[str, Any]] = []
        self.readers: dict[str, list[str | None]] = {}

    def note(self, name: str, low: Any, high: Any) -> None:
        """Takes the least and the greatest of a call, in any order."""
        before = self.ranges.get(name, (np.inf, -np.inf))
        self.ranges[name] = np.minimum(before[0], np.asarray(low)), np.maximum(before[1], np.asarray(high))


class _Heard(nnx.Module):
    """A norm that says what it gives."""

    def __init__(self, norm: Any, name: str, tape: _Tape):
        self.norm, self.name, self.tape = norm, name, tape

    def __call__(self, x: Array) -> Array:
        y = self.norm(x)
        self.tape.given.append((self.name, y))
        return y


class _Reader(Linear):
    """A linear map that says what it reads."""

    def __init__(self, linear: Linear, name: str, tape: _Tape):
        self.share(linear)
        self.name, self.tape = name, tape

    def inputs(self, x: Float[Array, '*b d']) -> Float[Array, '*b d']:
        """The inputs, as they are."""
        # While it is traced, what a norm gives is the very object that maps behind it are called with.
        norm = next((norm for norm, given in self.tape.given if given is x), None)
        self.tape.readers.setdefault(self.name, []).append(norm)
        rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
        note = functools.partial(self.tape.note, self.name)
        jax.debug.callback(note, jnp.min(rows, axis=0), jnp.max(rows, axis=0))
        return x


def listened(
    loaded: Loaded, model: Any, batches: list[Batch]
) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], list[tuple[Any, list[str]]]]:
    """The ranges of the channels that every map reads, in order of the maps; and norms with the maps that read them.

    What is read of padding is in the ranges, as of all other tokens.

    Raises `UserError` for a map that reads nothing.
    """
    tape, heard = _Tape(), nnx.clone(model)
    norms: dict[str, Any] = {}
    for path, block in list(nnx.iter_modules(model)):
        for name in ('mixer_norm', 'mlp_norm') if isinstance(block, Block) else ():
            if hasattr(getattr(block, name), 'scale'):
                norms['.'.join(map(str, (*path, name)))] = getattr(block, name)
    for path, block in list(nnx.iter_modules(heard)):
        for name in ('mixer_norm', 'mlp_norm') if isinstance(block, Block) else ():
            if (place := '.'.join(map(str, (*path, name)))) in norms:
                setattr(block, name, _Heard(getattr(block, name), place, tape))
    names = {id(linear): name for name, linear in named_maps(heard).items()}
    made: dict[int, _Reader] = {}
    for module, name, value in linear_maps(heard):
        if id(value) in names:
            made.setdefault(id(value), _Reader(value, names[id(value)], tape))
            setattr(module, name, made[id(value)])
    graphdef, variables = nnx.split(heard)
    task = loaded.setup.task

    @loaded.setup.jit
    def run(variables: nnx.State, batch: Batch) -> Array:
        tape.given.clear()
        return task.measure(nnx.merge(graphdef, variables), batch, None)['loss'].total

    for batch in batches:
        run(variables, batch).block_until_ready()
    jax.effects_barrier()
    tape.given.clear()
    maps = list(named_maps(model))
    if missing := [name for name in maps if name not in tape.ranges]:
        raise UserError(f'{missing[0]} reads nothing in {len(batches)} batches of training, so it has no range')
    behind = []
    for place, norm in norms.items():
        readers = [name for name in maps if place in tape.readers[name]]
        # A map that reads other things too stays as it is, and so does the norm.
        if readers and all(set(tape.readers[name]) == {place} for name in readers):
            behind.append((norm, readers))
    return {name: tape.ranges[name] for name in maps}, behind


def _unchanged(loaded: Loaded, model: Any, norm: Any, maps: list[Linear], batch: Batch) -> bool:
    """Whether factors that are drawn leave the loss as it is; they do not where others than maps read the norm."""
    variables = [norm.scale, *([norm.bias] if _biased(norm) else []), *(linear.weight for linear in maps)]
    before = [variable[...] for variable in variables]

    def loss() -> float:
        _, params, buffers = split(model)
        found = loaded.setup.measure(joined(params, buffers), batch)['loss']
        return float(found.total) / float(found.count)

    whole = loss()
    # Powers of two, so that no product of the norm and the maps is rounded otherwise, in any type.
    drawn = np.exp2(np.random.default_rng(0).integers(-2, 3, norm.scale.shape[-1:])).astype(np.float32)
    move(norm, maps, jnp.asarray(drawn), jnp.zeros(drawn.shape))
    same = abs(loss() - whole) <= SAME * abs(whole)
    for variable, value in zip(variables, before, strict=True):
        variable[...] = value
    return same
