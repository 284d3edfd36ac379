"""The contract every sequence mixer obeys."""

import abc
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.module import Module
from attnlab.signature import check_type
from attnlab.typing import Sequence, State


class Mixer(Module):
    """Mixes a sequence along time: `y_t = f(x_1 .. x_t)`, or `f(x_1 .. x_n)` of the whole row when bidirectional.

    A mixer is built as `Mixer(dim, *, ..., rngs)` and is final: it is varied through its parts, not by subclassing.

    Attributes:
      convolves: of the class, whether it contains a convolution that is not its method and that no argument removes.
      mixes_values: whether it mixes `ctx.first_values` into its values. It is then a `HasValues`, and must be the mixer
        of a block itself: the stack sets `first_values`, from the first such layer on, and does not reach mixers that
        lie within others.
    """

    convolves: ClassVar[bool] = False
    mixes_values: bool = False

    def __init_subclass__(cls, **options: Any) -> None:
        """Makes every call of a subclass check its arguments, by `check_input` and `check_state`."""
        super().__init_subclass__(**options)
        if '__call__' in vars(cls):
            cls.__call__ = _checked(cls.__call__)  # type: ignore[method-assign]
        if 'init_state' in vars(cls):
            cls.init_state = _checked_sizes(cls.init_state)  # type: ignore[method-assign]

    @abc.abstractmethod
    def __call__(self, x: Sequence, ctx: Context, state: State | None = None) -> tuple[Sequence, State | None]:
        """Returns `(y, state)`, `y` like `x`.

        With `state=None` the sequence starts afresh, and the returned state is `None`. Given a state, the call
        continues where that state stopped, by any number of steps, and returns the advanced state, of the same
        structure and shapes. A call without tokens returns its arguments unchanged: a piece of a text may be empty.
        """

    @property
    def divides_time(self) -> bool:
        """Whether the tokens of a row may be divided over devices, with at most keys and values gathered on one."""
        return False

    @abc.abstractmethod
    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> State:
        """Returns the state before the first token, with room for `length` tokens; activations are of type `dtype`.

        Scalars in it depend on nothing but the number of tokens read.
        """


@runtime_checkable
class ReadsWeights(Protocol):
    """A mixer that can return its attention weights."""

    def read_weights(self, x: Sequence, ctx: Context) -> tuple[Float[Array, 'b h t s'], Bool[Array, 'b t s']]:
        """Returns every weight `p_ij` of a call without a state, and which keys each query may see; for analysis."""


@runtime_checkable
class HasValues(Protocol):
    """A mixer that can return its values."""

    def values(self, x: Sequence, ctx: Context, state: State | None = None) -> Float[Array, 'b t v']:
        """Returns the values of a call, before values of another layer are mixed in."""


NO_STREAM = 'a bidirectional mixer cannot be streamed: the first token sees the last'


def require_causal(mixer: Module, causal: bool) -> None:
    """Raises `UserError` for a mixer, asked for a state, that is not causal as it was made."""
    if not causal:
        raise UserError(f'{type(mixer).__name__} was made with causal=False; {NO_STREAM}')


def check_input(name: str, x: Any, ctx: Any) -> None:
    """Raises `UserError` unless `x` is an array `b t d` and `ctx` is a context for `b` rows of `t` tokens."""
    if not hasattr(x, 'shape') or len(x.shape) != 3:
        found = f'of shape {x.shape}' if hasattr(x, 'shape') else f'of type {type(x).__name__}'
        raise UserError(f'x of {name} is {found}; it must be an array b t d: rows, tokens, channels')
    if not isinstance(ctx, Context):
        raise UserError(f'ctx of {name} is of type {type(ctx).__name__}; it must be a Context, such as full(b, t)')
    for field, array in (('positions', ctx.positions), ('segments', ctx.segments)):
        if array is not None and array.shape != x.shape[:2]:
            raise UserError(
                f'ctx.{field} has shape {array.shape}; it must be {x.shape[:2]}, as x of {name} '
                f'has {x.shape[0]} rows of {x.shape[1]} tokens'
            )


def check_state(mixer: Mixer, x: jax.Array, state: Any) -> None:
    """Raises `UserError` unless `state` has the structure of `mixer.init_state` for the rows of `x` and some length."""
    name = type(mixer).__name__
    shortest, longest = (
        jax.eval_shape(lambda length=length: mixer.init_state(x.shape[0], length, x.dtype)) for length in (1, 2**16)
    )
    wanted, tree = jax.tree.flatten(shortest)
    if jax.tree.structure(state) != tree:  # type: ignore[operator]
        raise UserError(
            f'the state given to {name} is of type {_kind(state)}; it must be what its init_state returns, of type '
            f'{_kind(shortest)}'
        )
    for array, short, long in zip(jax.tree.leaves(state), wanted, jax.tree.leaves(longest), strict=True):
        shape = jax.numpy.shape(array)
        sizes = zip(shape, short.shape, long.shape, strict=True) if len(shape) == short.ndim else [(0, 1, 1)]
        if any(least == most != size for size, least, most in sizes):
            raise UserError(
                f'the state given to {name} holds an array of shape {shape} where its own has {short.shape}: '
                f'it is of another mixer, or of other rows than the {x.shape[0]} of x'
            )


def _kind(state: Any) -> str:
    name = 'None' if state is None else 'array' if isinstance(state, jax.Array) else type(state).__name__
    return f'{name} of {", ".join(map(_kind, state))}' if type(state) in (tuple, list) and state else name


def _described(state: Any) -> str:
    shapes = ', '.join(str(jax.numpy.shape(array)) for array in jax.tree.leaves(state))
    return f'{_kind(state)} with shapes {shapes}' if shapes else _kind(state)


def _checked_sizes(init_state: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an `init_state` that first checks its sizes, which may be 0."""

    @functools.wraps(init_state)
    def checked(self: Any, batch: int, length: int, dtype: DTypeLike) -> Any:
        for size, value in (('batch', batch), ('length', length)):
            path = f'{size} of {type(self).__name__}.init_state'
            check_type(path, value, int)
            if value < 0:
                raise UserError(f'{path} is {value}; it must be a whole number of at least 0')
        return init_state(self, batch, length, dtype)

    return checked


def _checked(call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a `__call__` that first checks its arguments, and calls the mixer only if there are tokens."""

    @functools.wraps(call)
    def checked_call(self: Any, x: Any, ctx: Any, state: Any = None) -> Any:
        check_input(type(self).__name__, x, ctx)
        if not x.shape[1]:
            if state is not None:
                check_state(self, x, state)
            return x, state
        if state is None:
            return call(self, x, ctx, None)
        try:
            y, advanced = call(self, x, ctx, state)
        except Exception:
            check_state(self, x, state)
            raise
        # Compared with the state that came in: asking `init_state` every time would cost milliseconds.
        if _shapes(advanced) != _shapes(state):
            check_state(self, x, state)
            raise UserError(
                f'{type(self).__name__} was given a state and returned {_described(advanced)}; it must return the '
                f'advanced state, {_described(state)}'
            )
        return y, advanced

    return checked_call


def _shapes(state: Any) -> tuple[Any, list[tuple[int, ...]]]:
    return jax.tree.structure(state), [jax.numpy.shape(array) for array in jax.tree.leaves(state)]


class TwoSided(Mixer):
    """A mixer that is always bidirectional: every token sees its whole document, so there is no state to keep."""

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> State:
        """Raises `UserError`: it cannot be streamed."""
        raise UserError(f'{type(self).__name__} has no causal form; {NO_STREAM}')
