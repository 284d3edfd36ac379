"""Models of few bits: weights of linear maps stored packed, their inputs rounded, states stored between tokens."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int8

from attnlab.blocks.block import Block
from attnlab.errors import UserError
from attnlab.functional.straight_through import straight_through
from attnlab.mixers.mixer import Mixer
from attnlab.models.layers import stacks
from attnlab.models.weight_maps import replaced
from attnlab.module import modules_of, places_of
from attnlab.nn.parameter import Buffer, buffer
from attnlab.nn.projections import Linear, check_plain
from attnlab.quantize.formats import Affine, FixedFloating, Format, Rounding, Stored, Symmetric, rows_apart
from attnlab.quantize.native import check_native, native_product
from attnlab.quantize.softmax import QuantizedSoftmax, check_bits
from attnlab.quantize.sparsity import apart, sparse
from attnlab.quantize.states import KIVI, StoredCache, StoredState, with_stored_state
from attnlab.signature import checked_fields


class ShiftedLinear(Linear):
    """A linear map that reads every channel times a power of two, which its weight makes up for: it computes the same.

        y = sum_j (2^-k_j x_j) (2^k_j W_j) + b,   k_j the whole numbers `shifts`

    The exponents of channels differ by whole numbers, so that their numbers, not rounded in between, are the same to
    the bit. Its weight and bias take the place of those of the map.

    Args:
      linear: the map; stacked over layers or not.
      shifts: of its inputs.
    """

    def __init__(self, linear: Linear, shifts: Int8[Array, '*l d']):
        check_plain(linear)
        self.share(linear)
        self.shifts = _buffer(shifts)
        weight = self.weight[...]
        self.weight[...] = weight * jnp.broadcast_to(_power(shifts)[..., None], weight.shape)

    def inputs(self, x: Float[Array, '*b d']) -> Float[Array, '*b d']:
        """The inputs, shifted."""
        return shifted(x, self.shifts)


def shifted(x: Float[Array, '*b d'], shifts: nnx.Variable | None) -> Float[Array, '*b d']:
    """`2^-k_j x_j`; as it is without shifts."""
    if shifts is None:
        return x
    return x * jnp.broadcast_to(_power(-shifts[...]).astype(x.dtype), x.shape)


def matrix_of_inputs(linear: Linear) -> Float[Array, 'd f']:
    """The matrix that a map multiplies its inputs with as they are given, of one with shifts these undone."""
    shifts: Any = getattr(linear, 'shifts', None)
    return linear.matrix() if shifts is None else linear.matrix() * _power(-shifts[...])[:, None]


def _power(exponents: Int8[Array, '*b']) -> Float[Array, '*b']:
    return jnp.ldexp(jnp.ones(exponents.shape, jnp.float32), exponents.astype(jnp.int32))


class QuantizedLinear(Linear):
    """A linear map whose weight is stored in a format, and whose inputs are rounded to one.

    The weight is decoded where it is used, and the product is taken in the type of the inputs: no arithmetic of few
    bits is done, unless `native`. Ranges of inputs are taken from the call: where tokens share a scale, the rounding of
    one depends on the others of its call. For inputs in `FixedFloating` channels are shifted before
    (`ShiftedLinear`), by whole numbers that are a buffer.

    Args:
      linear: the map, of which the parameters are taken, and shifts where it has some; stacked over layers or not.
      weights: the format of the weight, an output a row; `None`: as it is.
      inputs: the format of the inputs, a token a row; `None`: as they are.
      native: whether products are of the codes, as far as devices have them (`attnlab.quantize.native`).
    """

    def __init__(self, linear: Linear, *, weights: Format | None, inputs: Rounding | None, native: bool = False):
        self.native = native
        self.axes, self.usual, self.bias = linear.axes, linear.usual, linear.bias
        self.format, self.input_format = weights, inputs
        weight = linear.weight[...]
        self.shape = weight.shape[-2:]
        self.shifts: Any = None
        if isinstance(inputs, FixedFloating):
            shifts = linear.shifts[...] if isinstance(linear, ShiftedLinear) else jnp.zeros(weight.shape[:-1], jnp.int8)
            self.shifts = nnx.data(_buffer(shifts))
        if weights is None:
            self.weight = linear.weight
        else:
            stored = over_leading(lambda matrix: weights.encode(matrix.T), weight)
            self.stored = nnx.Dict({name: _buffer(array) for name, array in stored.items()})

    def __call__(self, x: Float[Array, '*b d']) -> Float[Array, '*b f']:
        if not self.native or self.format is None or self.input_format is None:
            return super().__call__(x)
        self.check_width(x, self.shape[0])
        stored = {name: variable[...] for name, variable in self.stored.items()}
        rows = x.reshape(-1, x.shape[-1])
        y = native_product(rows, stored, self.shape[::-1], self.format, self.input_format)
        if self.bias is not None:
            y = y + self.bias[...].astype(y.dtype)[None]
        return y.astype(x.dtype).reshape(*x.shape[:-1], y.shape[-1])

    @property
    def rows_apart(self) -> bool:
        """Whether inputs are rounded row by row."""
        return rows_apart(self.input_format)

    def inputs(self, x: Float[Array, '*b d']) -> Float[Array, '*b d']:
        """The inputs, rounded; their gradients pass, since analyses of what was made ask for some."""
        if self.input_format is None:
            return x
        x = shifted(x, self.shifts)
        return straight_through(self.input_format.rounded(x), x)

    def matrix(self) -> Float[Array, 'd f']:
        """The weight, decoded to float32."""
        if self.format is None:
            return self.weight[...]
        stored = {name: variable[...] for name, variable in self.stored.items()}
        dtype = jnp.result_type(float)
        return self.format.decode(stored, self.shape[::-1], dtype).T

    def numbers(self) -> int:
        """How many numbers of weights are stored in the format, of one layer."""
        return 0 if self.format is None else self.shape[0] * self.shape[1]


@checked_fields
@dataclasses.dataclass(frozen=True)
class Quantization:
    """Which numbers of a model have few bits.

    Attributes:
      weights: the format of the weights of linear maps, an output a row; `None`: as they are. Of several, one
        is of each map of each layer, in the order of `named_maps`, and the layers of a stack are taken apart.
      inputs: the format of their inputs, a token a row; `None`: as they are; of several, one is of each map, likewise.
      state: how the states of mixers are stored between tokens; `None`: as they are.
      softmax: bits that the weights of softmaxes are rounded to (`attnlab.quantize.softmax`); `None`: as they are.
      thresholds: of the activations of gated channel mixers, layers apart (`attnlab.quantize.sparsity`); `None`: none.
      native: whether products are of the codes of weights and inputs, as devices have them.
    """

    weights: Format | tuple[Format, ...] | None = None
    inputs: Rounding | tuple[Rounding, ...] | None = None
    state: Format | KIVI | None = None
    softmax: int | None = None
    thresholds: tuple[float, ...] | None = None
    native: bool = False

    def __post_init__(self) -> None:
        """Raises `UserError` where nothing is quantized, and for native products that no device has."""
        if self.native:
            check_native(self.weights, self.inputs)
        if self.softmax is not None:
            check_bits(self.softmax)
        if all(each is None for each in (self.weights, self.inputs, self.state, self.softmax, self.thresholds)):
            raise UserError('nothing is quantized: give a format of weights, inputs or states, such as int4@32')

    def __call__(self, model: Any) -> Any:
        """Replaces every `Linear` of a model by a `QuantizedLinear`, and mixers by ones that store their states.

        That happens in place, and the model is returned.

        Tables of embeddings and of heads of a vocabulary, norms and everything else that is not a `Linear` are
        unchanged (as in Bondarenko et al. 2023, https://arxiv.org/abs/2306.12929, whose last layer is not rounded
        either); the map of a head of classes is one. Raises `UserError` for a model
        that has none, or is quantized, for formats of weights that layers share, for another number of formats than of
        maps, where no block has a mixer with such a state or a layer that is no block has one, and where none has a
        plain softmax that is to be rounded.
        """
        self.opened(model)
        if self.softmax is not None:
            replaced(model, functools.partial(QuantizedSoftmax, bits=self.softmax))
        if self.state is not None:
            _store_states(model, self.state)
        if self.weights is None and self.inputs is None:
            return model
        if self.weights is not None:
            check_own(model)
        found = check_maps(model)
        count = len({id(value) for _, _, value in found})
        formats = self.weights if isinstance(self.weights, tuple) else (self.weights,) * count
        inputs = self.inputs if isinstance(self.inputs, tuple) else (self.inputs,) * count
        for name, given in (('weights', formats), ('inputs', inputs)):
            if len(given) != count:
                raise UserError(f'{name} of Quantization are {len(given)} formats; this model has {count} linear maps')
        replace_maps(
            model,
            lambda index, map_: QuantizedLinear(map_, weights=formats[index], inputs=inputs[index], native=self.native),
        )
        return model

    def opened(self, model: Any) -> Any:
        """The model, in place, with layers apart where theirs differ, and with its activations sparse if asked for."""
        if any(isinstance(each, tuple) for each in (self.weights, self.inputs, self.thresholds)):
            apart(model)
        if self.thresholds is not None:
            sparse(model, self.thresholds)
        return model


def linear_maps(model: Any) -> list[tuple[Any, str, Linear]]:
    """Where a model has linear maps: the module, its attribute, and the map, one that is shared as often as it is."""
    return places_of(model, Linear)


def has_few_bits(model: Any) -> bool:
    """Whether linear maps of a model are quantized."""
    return any(isinstance(value, QuantizedLinear) for _, _, value in linear_maps(model))


def check_maps(model: Any) -> list[tuple[Any, str, Linear]]:
    """The linear maps of a model. Raises `UserError` where it has none, or some that are quantized."""
    found = linear_maps(model)
    if has_few_bits(model):
        raise UserError('this model is quantized; take the run that it was made from')
    if not found:
        raise UserError('this model has no linear map, so there is nothing to quantize')
    return found


def check_own(model: Any) -> None:
    """Raises `UserError` where layers share parameters: codes are not linear in the place of a layer, as these are."""
    for stack in stacks(model):
        stack.check_own()


def replace_maps[T: Linear](model: Any, make: Callable[[int, Linear], T]) -> list[T]:
    """Puts `make(index, map)` in the place of every linear map, in place; returns these in order of `named_maps`."""
    made: dict[int, T] = {}
    for module, name, value in linear_maps(model):
        # What is shared between modules stays shared.
        if id(value) not in made:
            made[id(value)] = make(len(made), value)
        setattr(module, name, made[id(value)])
    return list(made.values())


def named_maps(model: Any) -> dict[str, Linear]:
    """The linear maps of a model by where they are, such as `stack.blocks.0.mixer.query`, each once."""
    found: dict[int, tuple[str, Linear]] = {}
    for path, module in list(nnx.iter_modules(model)):
        for name, value in list(vars(module).items()):
            if isinstance(value, Linear):
                found.setdefault(id(value), ('.'.join(map(str, (*path, name))), value))
    return dict(found.values())


def _store_states(model: Any, how: Format | KIVI) -> None:
    """Replaces the mixers of blocks, in place."""
    blocks = modules_of(model, Block)
    if any(isinstance(block.mixer, StoredState | StoredCache) for block in blocks):
        raise UserError('this model is quantized; take the run that it was made from')
    changed = [(block, with_stored_state(block.mixer, how)) for block in blocks]
    if not any(mixer for _, mixer in changed):
        raise UserError(f'no block of this model has a state that {type(how).__name__} stores')
    # Whole layers with a state of their own, such as `UnifiedBlocks`, are mixers.
    if others := {type(each).__name__ for stack in stacks(model) for each in stack.blocks if isinstance(each, Mixer)}:
        raise UserError(
            f'layers of this model are {", ".join(sorted(others))}, whose states are not stored in few bits, beside '
            'others whose states would be; leave --state out'
        )
    for block, mixer in changed:
        if mixer is not None:
            block.mixer = mixer


def simulated(bits: int) -> Quantization:
    """Weights and inputs of as many bits, one scale a matrix and one a call, as `attnlab analyse` tries them."""
    return Quantization(Symmetric(bits, scope='tensor'), Affine(bits, scope='tensor'))


def over_leading(function: Callable[..., Stored], weight: Array, *others: Any) -> Stored:
    """The function of every matrix of an array that has them stacked along any leading axes, and of what goes along."""
    for _ in range(weight.ndim - 2):
        function = jax.vmap(function)
    return function(weight, *others)


def _buffer(array: Array) -> Buffer:
    return buffer(array, axes=(None,) * array.ndim)
