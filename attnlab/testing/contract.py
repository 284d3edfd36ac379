"""What every mixer promises, as checks that can be run on a mixer of one's own.

    def make(dim, *, rngs, causal=True):
        return MyMixer(dim, heads=4, causal=causal, rngs=rngs)

    check_mixer(make, causal=True, bidirectional=False, streaming=True, packed=True)

Each property has a function of its own, which takes the same `make`, builds small mixers with it, and raises
AssertionError with the name of the property and what was found. Parameters are moved a little from where they start,
since a map that starts at zero would hide everything behind it.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from attnlab.context import PADDING, Context
from attnlab.nn.parameter import AXES, GROUPS, Buffer
from attnlab.testing.noise import noise, perturbed
from attnlab.testing.tolerances import STEP, assert_close, difference_tolerance
from attnlab.typing import State

Make = Callable[..., Any]
"""Builds a mixer, or what keeps its contract, as `make(dim, rngs=rngs)`; its bidirectional form with `causal=False`."""

Run = Callable[..., tuple[Array, State | None]]
Runs = tuple[tuple[int, int], ...]
"""A row as (segment, length) of its documents in order."""

LENGTH = 24
DRAWS = tuple(range(2, 18))
"""Seeds of the inputs at which dependences are looked for."""

PACKED: tuple[Runs, ...] = (((1, 11), (2, 1), (3, 1), (4, 11)), ((1, 1), (2, 11), (3, 11), (4, 1)))
"""Two rows of documents, of few different lengths."""

PADDED: tuple[Runs, ...] = (((0, 4), (1, 11), (0, 9)), ((1, 11), (2, 11), (0, 2)))
"""Two rows with padding before, after, or both."""

SPLITS = ((16, *(1,) * 8), (3, 1, 16, 3, 1), (1,) * 24)
"""Ways to cut a sequence: a prompt and steps, pieces, steps only. Of few lengths, each of which has to be compiled."""


def check_mixer(make: Make, *, causal: bool, bidirectional: bool, streaming: bool, packed: bool, dim: int = 32) -> None:
    """Runs the checks of every property that is claimed, and of those that no mixer may lack."""
    claims = claimed(causal=causal, bidirectional=bidirectional, streaming=streaming, packed=packed)
    for check in claims.values():
        check(make, dim=dim)


def claimed(*, causal: bool, bidirectional: bool, streaming: bool, packed: bool) -> dict[str, Callable[..., None]]:
    """Returns the checks, by name, that a mixer with these claims must pass; see the attributes of `Recipe`."""
    checks: dict[str, Callable[..., None]] = {
        'parameters': check_parameters,
        'buffers': check_buffers,
        'shape and type': check_shape_and_type,
        'gradients': check_gradients,
        'rows apart': check_rows_apart,
        'bfloat16': check_bfloat16,
        'float64': check_float64,
        'compiles once': check_compiles_once,
    }
    if causal:
        checks['no look-ahead'] = check_no_lookahead
    if streaming:
        checks['streaming'] = check_streaming
        checks['streaming gradients'] = check_streaming_gradients
        checks['streaming compiles once'] = check_streaming_compiles_once
    if packed:
        checks['packing'] = check_packing
        checks['padding'] = check_padding
    if packed and streaming:
        checks['streaming packed'] = check_streaming_packed
    if bidirectional:
        checks['bidirectional'] = functools.partial(check_bidirectional, packed=packed)
    return checks


def check_parameters(make: Make, *, dim: int = 32) -> None:
    """Every parameter starts in float32, and names its logical axes and its optimiser group."""
    mixer = make(dim, rngs=nnx.Rngs(0))
    for path, variable in nnx.to_flat_state(nnx.state(mixer, nnx.Param)):
        name = '.'.join(map(str, path))
        metadata = variable.get_metadata()
        axes = metadata.get('axes')
        _require(variable.dtype == jnp.float32, f'parameters: {name} is {variable.dtype}, not float32')
        _require(
            axes is not None and len(axes) == variable.ndim and set(axes) <= set(AXES),
            f'parameters: the axes of {name} are {axes}; it has {variable.ndim} dimensions, and axes are among {AXES}',
        )
        group = metadata.get('group')
        _require(group in GROUPS, f'parameters: the group of {name} is {group!r}, not one of {GROUPS}')


def check_buffers(make: Make, *, dim: int = 32) -> None:
    """Variables that are no parameters are buffers that name their logical axes, and a call leaves them as they are."""
    mixer = make(dim, rngs=nnx.Rngs(0))
    others = dict(nnx.to_flat_state(nnx.state(mixer, nnx.Not(nnx.Param))))
    for path, variable in others.items():
        name, axes = '.'.join(map(str, path)), variable.get_metadata().get('axes')
        _require(
            isinstance(variable, Buffer), f'buffers: {name} is {type(variable).__name__}; see attnlab.nn.parameter'
        )
        _require(
            axes is not None and len(axes) == variable.ndim and set(axes) <= set(AXES),
            f'buffers: the axes of {name} are {axes}; it has {variable.ndim} dimensions, and axes are among {AXES}',
        )
    if not others:
        return
    before = jax.tree.map(jnp.array, nnx.state(mixer, Buffer))
    mixer(noise(2, LENGTH, dim), Context.full(2, LENGTH))
    unchanged = jax.tree.map(jnp.array_equal, before, nnx.state(mixer, Buffer))
    _require(all(jax.tree.leaves(unchanged)), 'buffers: a call changed one; a mixer is a pure function')


def check_shape_and_type(make: Make, *, dim: int = 32) -> None:
    """`y` has the shape and type of `x`, no state comes out when none went in, and every number is finite."""
    params, run = _opened(_built(make, dim))
    ctx = Context.full(2, LENGTH)
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        x = noise(2, LENGTH, dim, dtype=dtype)
        y, state = jax.eval_shape(run, params, x, ctx)
        _require(
            y.shape == x.shape and y.dtype == x.dtype,
            f'shape and type: {x.dtype}{x.shape} became {y.dtype}{y.shape}',
        )
        _require(state is None, f'shape and type: a state came out, {type(state).__name__}, though none went in')
    y, _ = jax.jit(run)(params, noise(2, LENGTH, dim), ctx)
    _require(bool(jnp.isfinite(y).all()), 'shape and type: the output is not finite')


def check_gradients(make: Make, *, dim: int = 32) -> None:
    """In float64 the derivative along a random direction, of every parameter and of `x`, is that of a difference."""
    with jax.enable_x64(True):
        params, run = _opened(_built(make, dim, jnp.float64))
        x = noise(2, LENGTH, dim, dtype=jnp.float64)
        ctx = Context.full(2, LENGTH)
        weights = noise(*x.shape, seed=1, dtype=x.dtype)

        def loss(inputs: tuple[Any, Array]) -> Array:
            return jnp.vdot(weights, run(*inputs, ctx)[0])

        compare_with_differences('gradients', loss, (params, x))


def compare_with_differences(what: str, loss: Callable[[Any], Array], inputs: Any) -> None:
    """Raises AssertionError unless the gradient of `loss` agrees with differences, for each array of `inputs`."""
    value, gradients = jax.jit(jax.value_and_grad(loss))(inputs)
    loss = jax.jit(loss)
    leaves, tree = jax.tree.flatten(inputs)
    named = jax.tree_util.tree_leaves_with_path(gradients)
    for place, (path, gradient) in enumerate(named):
        name = jax.tree_util.keystr(path)
        _require(bool(jnp.isfinite(gradient).all()), f'{what}: the gradient of {name} is not finite')
        direction = noise(*gradient.shape, seed=place, dtype=gradient.dtype)
        direction /= jnp.linalg.norm(direction)
        up, down = (
            loss(jax.tree.unflatten(tree, [*leaves[:place], leaves[place] + step * direction, *leaves[place + 1 :]]))
            for step in (STEP, -STEP)
        )
        expected, actual = float((up - down) / (2 * STEP)), float(jnp.vdot(gradient, direction))
        rounding = 16 * np.finfo(np.float64).eps / STEP * abs(float(value))
        bound = difference_tolerance() * float(jnp.linalg.norm(gradient)) + rounding
        _require(
            abs(actual - expected) <= bound,
            f'{what}: along {name} the derivative is {actual:.9g}, the central difference {expected:.9g}',
        )


def check_no_lookahead(make: Make, *, dim: int = 32) -> None:
    """No output depends on a later input, to the last bit; and every one depends on the input just before it."""
    reach = influence(_built(make, dim), Context.full(2, LENGTH), dim)
    for t in range(LENGTH):
        later = np.flatnonzero(reach[0, t, 0, t + 1 :])
        _require(not later.size, f'no look-ahead: the output at {t} depends on the input at {t + 1 + later[:1]}')
        _require(t == 0 or reach[0, t, 0, t - 1] > 0, f'no look-ahead: the output at {t} ignores the input at {t - 1}')


def check_rows_apart(make: Make, *, dim: int = 32) -> None:
    """No row of a batch depends on another, to the last bit."""
    params, run = _opened(_built(make, dim))
    run = jax.jit(run)
    x, other = noise(2, LENGTH, dim), noise(1, LENGTH, dim, seed=1)
    y, _ = run(params, x, Context.full(2, LENGTH))
    for row in range(2):
        changed, _ = run(params, jnp.where(jnp.arange(2)[:, None, None] == row, x, other), Context.full(2, LENGTH))
        _require(np.array_equal(y[row], changed[row]), f'rows apart: row {row} of the batch depends on the other')


def influence(mixer: nnx.Module, ctx: Context, dim: int) -> Float[np.ndarray, 'b t b s']:
    """Returns how much each output depends on each input: sums of absolute derivatives, zero where not at all.

    They are sums over several inputs, since a map that has exact zeros may by chance leave out what it can see.
    """
    params, run = _opened(mixer)
    batch, length = ctx.positions.shape
    weights = noise(batch, length, dim, seed=1)

    @jax.jit
    def derivatives(params: Any, x: Array) -> Array:
        outputs, pull = jax.vjp(lambda x: jnp.sum(weights * run(params, x, ctx)[0], axis=-1), x)
        unit = jnp.eye(outputs.size, dtype=outputs.dtype).reshape(-1, *outputs.shape)
        (gradients,) = jax.vmap(pull)(unit)
        return jnp.sum(jnp.abs(gradients), axis=-1)

    drawn = [np.asarray(derivatives(params, noise(batch, length, dim, seed=seed))) for seed in DRAWS]
    reach = np.sum(drawn, axis=0).reshape(batch, length, batch, length)
    _require(bool(np.isfinite(reach).all()), 'the derivative of an output by an input is not finite')
    return reach


def check_streaming(make: Make, *, dim: int = 32) -> None:
    """Any split of a sequence, the state handed on, gives what one pass gives; the state keeps its shapes and types."""
    _check_splits('streaming', make, dim, Context.full(2, LENGTH), SPLITS)


def check_streaming_packed(make: Make, *, dim: int = 32) -> None:
    """The same where documents and padding share the row: the state remembers which document it belongs to."""
    _check_splits('streaming packed', make, dim, context(*PACKED), SPLITS)
    _check_splits('streaming packed', make, dim, context(*PADDED), SPLITS[1:2])


def _check_splits(what: str, make: Make, dim: int, ctx: Context, splits: Sequence[Sequence[int]]) -> None:
    mixer = _built(make, dim)
    params, run = _opened(mixer)
    run = jax.jit(run)
    x = noise(2, LENGTH, dim)
    expected, _ = run(params, x, ctx)
    real = np.asarray(ctx.segments_or_ones()) != PADDING
    for split in splits:
        state, pieces, start = mixer.init_state(2, LENGTH, x.dtype), [], 0
        before = jax.tree.map(_form, state)
        for steps in split:
            stop = start + steps
            y, state = run(params, _cut(x, start, stop), _piece(ctx, start, stop), state)
            after = jax.tree.map(_form, state)
            _require(after == before, f'{what}: after {steps} steps the state is {after}; it was {before}')
            pieces.append(y)
            start = stop
        actual = np.concatenate(pieces, axis=1)
        assert_close(
            actual[real], expected[real], dtype=x.dtype, reduction=LENGTH * dim, what=f'{what}: split as {split}, y'
        )


def check_streaming_gradients(make: Make, *, dim: int = 32) -> None:
    """In float64 the gradients through a state handed on are those of one pass: of the parameters, and of `x`."""
    with jax.enable_x64(True):
        mixer = _built(make, dim, jnp.float64)
        params, run = _opened(mixer)
        x = noise(2, LENGTH, dim, dtype=jnp.float64)
        weights = noise(*x.shape, seed=1, dtype=x.dtype)
        ctx = Context.full(2, LENGTH)
        empty = mixer.init_state(2, LENGTH, x.dtype)
        cut = 10

        def one(params: Any, x: Array) -> Array:
            return jnp.vdot(weights[:, cut:], run(params, x, ctx)[0][:, cut:])

        def two(params: Any, x: Array) -> Array:
            _, state = run(params, x[:, :cut], _piece(ctx, 0, cut), empty)
            return jnp.vdot(weights[:, cut:], run(params, x[:, cut:], _piece(ctx, cut, LENGTH), state)[0])

        expected, actual = (jax.jit(jax.grad(f, argnums=(0, 1)))(params, x) for f in (one, two))
        names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(expected)]
        for name, a, e in zip(names, jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            assert_close(a, e, dtype=x.dtype, reduction=e.size * LENGTH, what=f'streaming gradients: {name}')


def check_packing(make: Make, *, dim: int = 32) -> None:
    """Documents that share a row give what they give apart, and no output depends on another document's input."""
    _check_documents('packing', make, dim, PACKED)


def check_padding(make: Make, *, dim: int = 32) -> None:
    """Documents with padding around them give what they give alone, and do not depend on what stands in the padding."""
    _check_documents('padding', make, dim, PADDED)


def _check_documents(what: str, make: Make, dim: int, rows: tuple[Runs, ...]) -> None:
    mixer = _built(make, dim)
    params, run = _opened(mixer)
    run = jax.jit(run)
    ctx = context(*rows)
    x = noise(len(rows), LENGTH, dim)
    together = np.asarray(run(params, x, ctx)[0])
    for row, runs in enumerate(rows):
        for segment, start, stop in _documents(runs):
            if segment == PADDING:
                continue
            alone, _ = run(params, _cut(x[row : row + 1], start, stop), Context.full(1, stop - start))
            assert_close(
                together[row : row + 1, start:stop],
                alone,
                dtype=x.dtype,
                reduction=LENGTH * dim,
                what=f'{what}: row {row}, tokens {start} to {stop}',
            )
    reach = influence(mixer, ctx, dim)
    segments = np.asarray(ctx.segments)
    apart = (segments[:, :, None, None] != segments[None, None]) & (segments != PADDING)[:, :, None, None]
    leaks = np.argwhere(apart & (reach > 0))
    _require(
        not leaks.size, f'{what}: (row, token, row, token) {leaks[:1].tolist()}: an output depends on another document'
    )


def check_bidirectional(make: Make, *, packed: bool, dim: int = 32) -> None:
    """With `causal=False` outputs depend on inputs to either side; gradients, types and documents are right."""
    both_ways = functools.partial(make, causal=False)
    reach = influence(_built(both_ways, dim), Context.full(2, LENGTH), dim)
    for t in range(LENGTH - 1):
        _require(reach[0, t, 0, t + 1] > 0, f'bidirectional: the output at {t} ignores the input at {t + 1}')
        _require(reach[0, t + 1, 0, t] > 0, f'bidirectional: the output at {t + 1} ignores the input at {t}')
    again = (check_gradients, check_bfloat16, check_float64, *((check_packing, check_padding) if packed else ()))
    for check in again:
        with _noted('bidirectional'):
            check(both_ways, dim=dim)


def check_bfloat16(make: Make, *, dim: int = 32) -> None:
    """In bfloat16 the output is close to that in float32 of the same, rounded, input."""
    params, run = _opened(_built(make, dim))
    x = noise(2, LENGTH, dim, dtype=jnp.bfloat16)
    ctx = Context.full(2, LENGTH)
    run = jax.jit(run)
    narrow, wide = run(params, x, ctx)[0], run(params, x.astype(jnp.float32), ctx)[0]
    assert_close(narrow, wide, dtype=jnp.bfloat16, reduction=LENGTH * dim, what='bfloat16: y')


def check_float64(make: Make, *, dim: int = 32) -> None:
    """With parameters and input in float64 nothing on the way, forward or back, is narrower."""
    narrow = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.complex64)
    with jax.enable_x64(True):
        params, run = _opened(_built(make, dim, jnp.float64))
        x = noise(2, LENGTH, dim, dtype=jnp.float64)
        ctx = Context.full(2, LENGTH)
        gradients = jax.grad(lambda params, x: jnp.sum(run(params, x, ctx)[0]), argnums=(0, 1))
        for equation in _equations(jax.make_jaxpr(gradients)(params, x).jaxpr):
            for variable in equation.outvars:
                dtype = getattr(variable.aval, 'dtype', None)
                _require(dtype not in narrow, f'float64: {equation.primitive} gives {dtype}')


def check_compiles_once(make: Make, *, dim: int = 32) -> None:
    """Mixers built alike share one compilation, and a second call with other numbers does not compile again."""
    call, traces = _counted()
    for seed in (0, 1):
        graphdef, params = nnx.split(make(dim, rngs=nnx.Rngs(seed)))
        with _noted('compiles once: static attributes must hash and compare by value', (TypeError, ValueError)):
            hash(graphdef)
            for _ in range(2):
                call(graphdef, params, noise(2, LENGTH, dim, seed=seed), Context.full(2, LENGTH), None)
    _require(len(traces) == 1, f'compiles once: two mixers built alike were traced {len(traces)} times')


def check_streaming_compiles_once(make: Make, *, dim: int = 32) -> None:
    """A step does not compile again: the state that comes out is of the very kind of the one that went in."""
    call, traces = _counted()
    mixer = make(dim, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(mixer)
    state = mixer.init_state(2, LENGTH, jnp.float32)
    for step in range(4):
        ctx = Context.full(2, 1, start=jnp.int32(step))
        _, state = call(graphdef, params, noise(2, 1, dim, seed=step), ctx, state)
    _require(len(traces) == 1, f'streaming compiles once: 4 steps were traced {len(traces)} times')


def check_implementations(make: Make, *, names: Sequence[str], dim: int = 32) -> None:
    """Built with `implementation=name`, outputs and gradients are those of 'reference', for every name."""
    ctx = context(*PACKED)
    x = noise(2, LENGTH, dim)
    weights = noise(*x.shape, seed=1)
    found = {}
    for name in ('reference', *names):
        params, run = _opened(_built(functools.partial(make, implementation=name), dim))

        def loss(params: Any, x: Array, run: Run = run) -> tuple[Array, Array]:
            y, _ = run(params, x, ctx)
            return jnp.vdot(weights, y), y

        (_, y), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, x)
        found[name] = [('y', y)] + [
            (jax.tree_util.keystr(p), g) for p, g in jax.tree_util.tree_leaves_with_path(gradients)
        ]
    for name in names:
        for (what, actual), (_, expected) in zip(found[name], found['reference'], strict=True):
            assert_close(
                actual, expected, dtype=x.dtype, reduction=LENGTH * x.size, what=f'implementations: {name}, {what}'
            )


def context(*rows: Runs) -> Context:
    """Returns the context of rows of documents, positions counted in each."""
    segments = [[segment for segment, length in runs for _ in range(length)] for runs in rows]
    positions = [[i for _, length in runs for i in range(length)] for runs in rows]
    return Context(positions=jnp.asarray(positions, jnp.int32), segments=jnp.asarray(segments, jnp.int32))


def cast_parameters(mixer: nnx.Module, dtype: DTypeLike) -> nnx.Module:
    """Returns the mixer with every floating-point variable in `dtype`."""
    graphdef, state = nnx.split(mixer)
    return nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf.astype(dtype) if _is_float(leaf) else leaf, state))


def is_mirrored(make: Make, *, dim: int = 32) -> bool:
    """Whether the bidirectional form gives a sequence that is read backwards its outputs backwards."""
    params, run = _opened(_built(functools.partial(make, causal=False), dim))
    x, ctx = noise(2, LENGTH, dim), Context.full(2, LENGTH)
    run = jax.jit(run)
    forwards, backwards = run(params, x, ctx)[0], run(params, x[:, ::-1], ctx)[0][:, ::-1]
    return bool(jnp.max(jnp.abs(forwards - backwards)) < 1e-4 * jnp.max(jnp.abs(forwards)))


def _built(make: Make, dim: int, dtype: DTypeLike = jnp.float32) -> Any:
    """A mixer whose parameters have moved a little."""
    return cast_parameters(perturbed(make(dim, rngs=nnx.Rngs(0)), 0.1), dtype)


def _split(mixer: nnx.Module) -> tuple[Any, Any, Any]:
    """The graph definition, the parameters, and the variables that are none."""
    graphdef, *states = nnx.split(mixer, nnx.Param, ...)
    params, rest = states
    return graphdef, params, rest


def _opened(mixer: nnx.Module) -> tuple[Any, Run]:
    """The parameters of a mixer, and the mixer as a function of them."""
    graphdef, params, rest = _split(mixer)

    def run(params: Any, x: Array, ctx: Context, state: State | None = None) -> tuple[Array, State | None]:
        with jax.default_matmul_precision('highest'):
            return nnx.merge(graphdef, params, rest)(x, ctx, state)

    return params, run


def _counted() -> tuple[Callable[..., Any], list[None]]:
    """The mixer of a graph definition as a jitted function, and a list that grows by one every time that is traced."""
    traces: list[None] = []

    @functools.partial(jax.jit, static_argnums=0)
    def call(graphdef: Any, params: Any, x: Array, ctx: Context, state: State | None) -> tuple[Array, State | None]:
        traces.append(None)
        return nnx.merge(graphdef, params)(x, ctx, state)

    return call, traces


def _documents(runs: Runs) -> Iterator[tuple[int, int, int]]:
    """The segment, first token and end of every document of a row."""
    start = 0
    for segment, length in runs:
        yield segment, start, start + length
        start += length


def _cut(array: Array, start: int, stop: int) -> Array:
    """Tokens `start` to `stop`, cut by numpy: JAX would compile a slice for every place."""
    return jnp.asarray(np.asarray(array)[:, start:stop])


def _piece(ctx: Context, start: int, stop: int) -> Context:
    segments = None if ctx.segments is None else _cut(ctx.segments, start, stop)
    return dataclasses.replace(ctx, positions=_cut(ctx.positions, start, stop), segments=segments)


def _form(leaf: Array) -> str:
    return f'{leaf.dtype}{list(leaf.shape)}'


def _is_float(leaf: Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def _equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr and of every jaxpr inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for leaf in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, 'eqns') or hasattr(x, 'jaxpr')):
            inner = getattr(leaf, 'jaxpr', leaf)
            if hasattr(inner, 'eqns'):
                yield from _equations(inner)


def _require(condition: bool | np.bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


@contextlib.contextmanager
def _noted(note: str, kinds: tuple[type[Exception], ...] = (AssertionError,)) -> Iterator[None]:
    """Makes an AssertionError of errors of these `kinds`, with `note` before the message."""
    try:
        yield
    except kinds as error:
        raise AssertionError(f'{note}: {error}') from error
