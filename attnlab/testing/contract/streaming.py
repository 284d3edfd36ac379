"""A sequence in pieces gives the same as the whole sequence."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from attnlab.context import PADDING, Context
from attnlab.testing.contract.subject import LENGTH, PACKED, PADDED, Subject, context, cut, full, noted, piece, require
from attnlab.testing.tolerances import assert_close

STEPS = ((1,) * LENGTH,)
"""A sequence a token at a time."""

SPLITS = ((7, 7, 7, 1, 1, 1), (1, 7, 1, 1, 7, 7))
"""Ways to split a sequence: pieces, then steps; both mixed. Only two lengths, since each is compiled."""

LONG = ((16, *(1,) * 8),)
"""A prompt longer than most windows, then steps."""

CHUNKED = ((100, 60),)
"""A row longer than chunks of up to 128 tokens are; the second piece starts amid one of the first pass."""


def check_state(subject: Subject) -> None:
    """`init_state` gives arrays, and a call gives them back with new values: same structure, shapes and types.

    In float32 and in bfloat16. What has no axis is the same after any tokens.
    """
    for dtype in (jnp.float32, jnp.bfloat16):
        _check_state(subject, dtype)


def _check_state(subject: Subject, dtype: DTypeLike) -> None:
    with noted('state: init_state(batch, length, dtype) fails', (Exception,)):
        state = subject.mixer.init_state(2, LENGTH, dtype)
    leaves = jax.tree.leaves(state)
    require(
        bool(leaves),
        f'state: init_state returned {state!r}, which holds no array; it must return what a call remembers of '
        'earlier tokens, such as a NamedTuple of arrays, or streaming must not be claimed',
    )
    for leaf in leaves:
        require(
            isinstance(leaf, jax.Array),
            f'state: init_state returned a state with {leaf!r}, of type {type(leaf).__name__}; every part of it must '
            'be a JAX array, in a NamedTuple, a tuple or another pytree',
        )
    for length, called in ((1, 'a call'), (0, 'a call of no tokens')):
        with noted(f'state: {called} with the state of init_state fails', (Exception,)):
            x = subject.x(length=length, dtype=dtype)
            _, after = jax.eval_shape(subject.run, subject.params, x, full(length), state)
        _check_kept(state, after)
    with noted('state: a call of one row, with a state of one, fails', (Exception,)):
        x, alone = subject.x(length=1, rows=1, dtype=dtype), subject.mixer.init_state(1, LENGTH, dtype)
        _, after = jax.eval_shape(subject.run, subject.params, x, full(1, rows=1), alone)
    _check_kept(alone, after)
    x = subject.x(length=1, dtype=dtype)
    axes = jax.tree.map(lambda leaf: 0 if leaf.ndim else None, state)
    streams = jax.tree.map(lambda leaf: leaf[None] if leaf.ndim else leaf, state)

    def read(x: Array, state: Any) -> Any:
        return subject.run(subject.params, x, full(1), state)[1]

    note = 'state: an array without axes depends on x or on other arrays; it may depend on the number of tokens alone'
    with noted(note, (ValueError,)):
        jax.eval_shape(jax.vmap(read, in_axes=(0, axes), out_axes=axes), x[None], streams)


def _check_kept(state: Any, after: Any) -> None:
    """The state that a call returns has the types of the one that it was given; mixers ask for the rest themselves."""
    for (path, old), new in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(after), strict=True):
        require(
            _form(old) == _form(new),
            f'state: a call turned the array {jax.tree_util.keystr(path) or "of the state"} of {_form(old)} into '
            f'{_form(new)}; its type must stay',
        )


def check_decoding(subject: Subject) -> None:
    """A sequence read a token at a time equals one pass; the state keeps its shapes and types."""
    _check_splits('decoding', subject, full(), STEPS, _whole(subject))


def check_streaming(subject: Subject) -> None:
    """The same in longer pieces, and in these and single tokens mixed."""
    _check_splits('streaming', subject, full(), SPLITS, _whole(subject))


def check_streaming_bfloat16(subject: Subject) -> None:
    """In bfloat16, the state too, pieces and steps are close to one pass in float32 of the same, rounded, input."""
    wide = subject.x(dtype=jnp.bfloat16).astype(jnp.float32)
    expected = np.asarray(subject.apply(subject.params, wide, full())[0])
    _check_splits('streaming bfloat16', subject, full(), SPLITS[:1], expected, jnp.bfloat16)


def check_long_prompt(subject: Subject) -> None:
    """The same for a long prompt, then steps."""
    _check_splits('long prompt', subject, full(), LONG, _whole(subject))


def check_long_pieces(subject: Subject) -> None:
    """The same for a row of several chunks, in two pieces."""
    length = sum(CHUNKED[0])
    x, ctx = subject.x(length=length), full(length)
    _check_splits('long pieces', subject, ctx, CHUNKED, np.asarray(subject.apply(subject.params, x, ctx)[0]))


def check_streaming_packed(subject: Subject) -> None:
    """The same where documents and padding share the row: the state remembers which document it belongs to."""
    for rows, splits in ((PACKED, SPLITS + STEPS), (PADDED, SPLITS[1:2])):
        ctx = context(*rows)
        _check_splits('streaming packed', subject, ctx, splits, subject.output(ctx))


def _whole(subject: Subject) -> np.ndarray:
    """The output of one pass, by the program that runs the pieces too."""
    return np.asarray(subject.apply(subject.params, subject.x(), full())[0])


def _check_splits(
    what: str,
    subject: Subject,
    ctx: Context,
    splits: Sequence[Sequence[int]],
    expected: np.ndarray,
    dtype: DTypeLike = jnp.float32,
) -> None:
    length = ctx.positions.shape[1]
    x = subject.x(length=length, dtype=dtype)
    real = np.asarray(ctx.segments_or_ones()) != PADDING
    for split in splits:
        state, pieces, start = subject.mixer.init_state(2, length, x.dtype), [], 0
        before = jax.tree.map(_form, state)
        for steps in split:
            stop = start + steps
            y, state = subject.apply(subject.params, cut(x, start, stop), piece(ctx, start, stop), state)
            after = jax.tree.map(_form, state)
            require(after == before, f'{what}: after {steps} steps the state is {after}; it was {before}')
            pieces.append(y)
            start = stop
        actual = np.concatenate(pieces, axis=1).astype(expected.dtype)
        require(bool(np.isfinite(actual).all()), f'{what}: split as {split}, outputs are not finite everywhere')
        assert_close(
            actual[real],
            expected[real],
            dtype=x.dtype,
            reduction=length * subject.dim,
            what=f'{what}: split as {split}, y',
        )


def check_streaming_gradients(subject: Subject) -> None:
    """In float64 gradients through the passed-on state equal those of one pass: of the parameters, and of `x`."""
    with jax.enable_x64(True):
        x, params, ctx, middle = subject.x(dtype=jnp.float64), subject.double, full(), 10
        weights = np.array(subject.x(seed=1, dtype=jnp.float64))
        weights[:, :middle] = 0
        empty = subject.mixer.init_state(2, LENGTH, x.dtype)
        first, second = piece(ctx, 0, middle), piece(ctx, middle, LENGTH)

        def loss(inputs: tuple[object, Array], weights: Array) -> Array:
            params, x = inputs
            _, state = subject.run(params, x[:, :middle], first, empty)
            return jnp.vdot(weights, subject.run(params, x[:, middle:], second, state)[0])

        expected = subject.differentiated((params, x), jnp.asarray(weights), ctx)[1]
        actual = jax.jit(jax.grad(loss))((params, x), jnp.asarray(weights[:, middle:]))
        names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(expected)]
        for name, a, e in zip(names, jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            assert_close(a, e, dtype=x.dtype, reduction=e.size * LENGTH, what=f'streaming gradients: {name}')


def _form(leaf: Any) -> str:
    return f'{leaf.dtype}{list(leaf.shape)}'
