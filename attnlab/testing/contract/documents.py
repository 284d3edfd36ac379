"""Documents that share a row are independent."""

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.context import PADDING, Context
from attnlab.testing.contract.gradients import compare_derivatives
from attnlab.testing.contract.subject import (
    LONG_PACKED,
    PACKED,
    PADDED,
    Runs,
    Subject,
    context,
    documents,
    full,
    require,
)
from attnlab.testing.tolerances import assert_close


def check_packing(subject: Subject, *, causal: bool) -> None:
    """Documents that share a row give the same outputs as alone, and no output depends on another document's input.

    Their gradients are finite differences in float64, as those of rows of one document are by `check_gradients`.
    """
    _check_documents('packing', subject, PACKED, causal)
    _check_gradients('packing', subject, context(*PACKED))


def check_padding(subject: Subject, *, causal: bool) -> None:
    """Documents surrounded by padding give the same outputs as alone, whatever the padding contains.

    What comes out at padding is finite, since layers above read it, and gradients are finite differences there too.
    """
    _check_documents('padding', subject, PADDED, causal)
    _check_gradients('padding', subject, context(*PADDED))


def check_long_packed(subject: Subject, *, causal: bool) -> None:
    """The same of rows of several chunks, whose documents end at and amid them, and of gradients there."""
    ctx = context(*LONG_PACKED)
    x = subject.x(length=ctx.positions.shape[1])
    _check_alone('long packed', subject, LONG_PACKED, causal, np.asarray(subject.apply(subject.params, x, ctx)[0]))
    _check_gradients('long packed', subject, ctx)


def _check_gradients(what: str, subject: Subject, ctx: Context) -> None:
    smooth, length = subject.smooth, ctx.positions.shape[1]
    with jax.enable_x64(True):
        x, weights = (subject.x(length=length, seed=seed, dtype=jnp.float64) for seed in (0, 1))
        differentiated = smooth.differentiated
        compare_derivatives(what, lambda inputs: differentiated(inputs, weights, ctx), (smooth.double, x))


def _check_documents(what: str, subject: Subject, rows: tuple[Runs, ...], causal: bool) -> None:
    ctx = context(*rows)
    _check_alone(what, subject, rows, causal, subject.output(ctx))
    reach = subject.influence(ctx)
    segments = np.asarray(ctx.segments)
    apart = (segments[:, :, None, None] != segments[None, None]) & (segments != PADDING)[:, :, None, None]
    leaks = np.argwhere(apart & (reach > 0))
    require(
        not leaks.size, f'{what}: (row, token, row, token) {leaks[:1].tolist()}: an output depends on another document'
    )


def _check_alone(what: str, subject: Subject, rows: tuple[Runs, ...], causal: bool, together: np.ndarray) -> None:
    """The outputs of rows are finite, and those of their documents what these have alone."""
    require(bool(np.isfinite(together).all()), f'{what}: outputs are not finite everywhere, padding included')
    length = together.shape[1]
    x = np.asarray(subject.x(length=length))
    for row, runs in enumerate(rows):
        for start, stop in documents(runs):
            assert_close(
                together[row, start:stop],
                _alone(subject, x[row, start:stop], causal, length),
                dtype=x.dtype,
                reduction=length * subject.dim,
                what=f'{what}: row {row}, tokens {start} to {stop}',
            )


def _alone(subject: Subject, document: np.ndarray, causal: bool, whole: int) -> np.ndarray:
    """The output of a document by itself.

    A causal mixer reads it at the start of a row of `whole` tokens, so that all lengths share one program.
    """
    length = len(document)
    if not causal:
        return np.asarray(subject.apply(subject.params, jnp.asarray(document[None]), full(length, rows=1))[0][0])
    row = np.array(subject.x(length=whole, seed=1))
    row[:, :length] = document
    return np.asarray(subject.apply(subject.params, jnp.asarray(row), full(whole))[0])[0, :length]
