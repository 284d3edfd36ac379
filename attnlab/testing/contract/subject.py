"""A small mixer, and the programs that the checks of its properties share."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from attnlab.context import PADDING, Context
from attnlab.testing.noise import noise, perturbed
from attnlab.typing import State

Make = Callable[..., Any]
"""Builds a mixer, or anything with its contract, as `make(dim, rngs=rngs)`; bidirectional with `causal=False`."""

Runs = tuple[tuple[int, int], ...]
"""A row as (segment, length) of its documents in order."""

LENGTH = 24

PACKED: tuple[Runs, ...] = (((1, 11), (2, 1), (3, 1), (4, 11)), ((1, 1), (2, 11), (3, 11), (4, 1)))
"""Two rows of documents, of few different lengths."""

PADDED: tuple[Runs, ...] = (((0, 4), (1, 11), (0, 9)), ((1, 11), (2, 11), (0, 2)))
"""Two rows with padding before, after, or both."""

LONG_PACKED: tuple[Runs, ...] = (((1, 32), (2, 64), (3, 64)), ((1, 64), (2, 32), (3, 64)))
"""Two rows longer than chunks of up to 128 tokens are, whose documents end where some chunks do and amid others."""

FEWEST, MOST = 4, 16
"""The fewest and the most inputs drawn to find dependences: more than the fewest while an expected one is missing."""


class Subject:
    """A small mixer made by `make`, with its compiled programs: contexts, states and lengths are arguments.

    Its parameters are perturbed, since a map initialised at zero hides everything behind it. Float64 properties must be
    used inside `jax.enable_x64`. With `causal=False` the mixer is bidirectional as `make(dim, rngs=rngs)` makes it.
    `surrogate` makes, likewise, what its gradients are those of, where these are not those of its values.
    """

    def __init__(self, make: Make, dim: int = 32, *, causal: bool = True, surrogate: Make | None = None):
        self.make, self.dim, self.causal, self.surrogate = make, dim, causal, surrogate

    @functools.cached_property
    def mixer(self) -> Any:
        """The mixer with perturbed parameters, whoever asks for it first: what is made in a trace would stay there."""
        with jax.enable_x64(False), jax.ensure_compile_time_eval():
            return perturbed(self.fresh(), 0.1)

    @functools.cached_property
    def bidirectional(self) -> 'Subject':
        """The subject made with `causal=False`, or itself where it is bidirectional as it is."""
        if not self.causal:
            return self
        surrogate = None if self.surrogate is None else functools.partial(self.surrogate, causal=False)
        return Subject(functools.partial(self.make, causal=False), self.dim, causal=False, surrogate=surrogate)

    @functools.cached_property
    def smooth(self) -> 'Subject':
        """The subject whose gradients are those of its values: the surrogate, or itself where there is none."""
        return self if self.surrogate is None else Subject(self.surrogate, self.dim, causal=self.causal)

    def fresh(self, seed: int = 0) -> Any:
        """A mixer as it is made."""
        return self.make(self.dim, rngs=nnx.Rngs(seed))

    def x(self, *, rows: int = 2, length: int = LENGTH, seed: int = 0, dtype: DTypeLike = jnp.float32) -> Array:
        """An input."""
        return noise(rows, length, self.dim, seed=seed, dtype=dtype)

    @functools.cached_property
    def params(self) -> Any:
        """The parameters."""
        return self._split[1]

    @functools.cached_property
    def double(self) -> Any:
        """The parameters in float64."""
        return double(self.params)

    def run(self, params: Any, x: Array, ctx: Context, state: State | None = None) -> tuple[Array, State | None]:
        """The mixer as a function of its parameters, with buffers in float64 where `x` is."""
        graphdef, _, rest = self._split
        with jax.default_matmul_precision('highest'):
            rest = _cast(rest, x.dtype) if x.dtype == jnp.float64 else rest
            return nnx.merge(graphdef, params, rest)(x, ctx, state)

    @functools.cached_property
    def apply(self) -> Callable[..., tuple[Array, State | None]]:
        """`run`, compiled; the state is donated."""
        return jax.jit(self.run, donate_argnums=3)

    @functools.cached_property
    def differentiated(self) -> Any:
        """Value and gradients of the sum of `weights * y`, compiled: `differentiated((params, x), weights, ctx)`."""

        def loss(inputs: tuple[Any, Array], weights: Array, ctx: Context) -> Array:
            return jnp.vdot(weights, self.run(*inputs, ctx)[0])

        return jax.jit(jax.value_and_grad(loss))

    @functools.cached_property
    def derivatives(self) -> Callable[[Any, Array, Context, Array], tuple[Array, Array]]:
        """The compiled function of the output and of the dependence of every output on every input."""

        def derivatives(params: Any, x: Array, ctx: Context, weights: Array) -> tuple[Array, Array]:
            def weighted(x: Array) -> tuple[Array, Array]:
                y = self.run(params, x, ctx)[0]
                return jnp.sum(weights * y, axis=-1), y

            outputs, pull, y = jax.vjp(weighted, x, has_aux=True)
            unit = jnp.eye(outputs.size, dtype=outputs.dtype).reshape(-1, *outputs.shape)
            (gradients,) = jax.vmap(pull)(unit)
            return y, jnp.sum(jnp.abs(gradients), axis=-1)

        return jax.jit(derivatives)

    def output(self, ctx: Context) -> np.ndarray:
        """The output, computed by the program of `derivatives`."""
        return np.asarray(self.derivatives(self.params, self.x(), ctx, self.x(seed=1))[0])

    def influence(self, ctx: Context, wanted: np.ndarray | None = None) -> Float[np.ndarray, 'b t b s']:
        """Returns how much each output depends on each input: sums of absolute derivatives, zero for no dependence.

        The sums are over several draws of `x`, since a map with exact zeros may by chance ignore visible inputs; more
        are drawn while any sum in `wanted`, a mask of the shape of the result, is zero.
        """
        shape = (2, LENGTH, 2, LENGTH)
        weights, reach = self.x(seed=1), np.zeros(shape)
        for drawn in range(MOST):
            if drawn >= FEWEST and (wanted is None or (reach[wanted] > 0).all()):
                break
            reach += np.asarray(self.derivatives(self.params, self.x(seed=2 + drawn), ctx, weights)[1]).reshape(shape)
        require(bool(np.isfinite(reach).all()), 'the derivative of an output by an input is not finite')
        return reach

    @functools.cached_property
    def _split(self) -> tuple[Any, Any, Any]:
        """The graph definition, the parameters, and the other variables."""
        graphdef, *states = nnx.split(self.mixer, nnx.Param, ...)
        params, rest = states
        return graphdef, params, rest


def double(params: Any) -> Any:
    """The parameters in float64, cast by numpy."""
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf).astype(np.float64)), params)


def full(length: int = LENGTH, *, rows: int = 2) -> Context:
    """The context of rows that are one document each."""
    return Context.full(rows, length)


def context(*rows: Runs) -> Context:
    """Returns the context of rows of documents, positions counted in each."""
    segments = [[segment for segment, length in runs for _ in range(length)] for runs in rows]
    positions = [[i for _, length in runs for i in range(length)] for runs in rows]
    return Context(positions=jnp.asarray(positions, jnp.int32), segments=jnp.asarray(segments, jnp.int32))


def documents(runs: Runs) -> Iterator[tuple[int, int]]:
    """First token and end of every document of a row, padding left out."""
    start = 0
    for segment, length in runs:
        if segment != PADDING:
            yield start, start + length
        start += length


def cut(array: Any, start: int, stop: int) -> Array:
    """Tokens `start` to `stop`, sliced by numpy: JAX would compile every slice."""
    return jnp.asarray(np.asarray(array)[:, start:stop])


def piece(ctx: Context, start: int, stop: int) -> Context:
    """Tokens `start` to `stop` of a context."""
    segments = None if ctx.segments is None else cut(ctx.segments, start, stop)
    return dataclasses.replace(ctx, positions=cut(ctx.positions, start, stop), segments=segments)


def cast_parameters(mixer: nnx.Module, dtype: DTypeLike) -> nnx.Module:
    """Returns the mixer with every floating-point variable in `dtype`."""
    graphdef, state = nnx.split(mixer)
    return nnx.merge(graphdef, _cast(state, dtype))


def _cast(tree: Any, dtype: DTypeLike) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree)


def check_each(subject: Any, checks: Mapping[str, Callable[[Any], None]], say: Callable[[str], None]) -> None:
    """Runs the checks, and says of each whether it holds; the first that does not ends it, with its error."""
    for name, check in checks.items():
        try:
            check(subject)
        except Exception:
            say(f'{name}: does not hold')
            raise
        say(f'{name}: holds')


def require(condition: bool | np.bool, message: str) -> None:
    """Raises AssertionError with `message` unless `condition` holds."""
    if not condition:
        raise AssertionError(message)


@contextlib.contextmanager
def noted(note: str, kinds: tuple[type[Exception], ...] = (AssertionError,)) -> Iterator[None]:
    """Turns errors of these `kinds` into an AssertionError with `note` before the message."""
    try:
        yield
    except kinds as error:
        raise AssertionError(f'{note}: {error}') from error
