"""Times the contenders of a problem, for the forward pass and for forward plus backward."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.bench import timing
from pallas_kernels.bench.ceilings import Ceilings
from pallas_kernels.bench.problems import OURS, Contender, Problem

BACKWARD = {'attention': 3.5, 'cross_entropy': 4.0, 'mixture_of_softmaxes': 4.0}
"""Operations forward and backward over those forward, where scores are computed again; elsewhere 3."""

PASSES = ('forward', 'forward and backward')


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One line of the table.

    Attributes:
      implementation: the implementation that ran, if it was one of this package.
      quartiles: those of the milliseconds over turns, the middle one `milliseconds`.
      ratio: the contender's time over ours, with its 95 % interval (see `timing.Times`).
      ceiling: the least time that the device's measured rates allow, divided by the time.
      temporary_mib: MiB that the program takes besides its arguments and its results.
      failure: the reason why there are no measurements, or `None`.
      rounds: over how many the ratio is taken; `None` where it was not recorded.
    """

    core: str
    problem: str
    what: str
    contender: str
    implementation: str | None = None
    milliseconds: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    tflops: float | None = None
    gigabytes: float | None = None
    ceiling: float | None = None
    temporary_mib: float | None = None
    compile_seconds: float | None = None
    failure: str | None = None
    quartiles: tuple[float, float, float] | None = None
    rounds: int | None = None


def lines(
    problem: Problem,
    ceilings: Ceilings,
    patience: timing.Patience,
    passes: Sequence[str] = PASSES,
    alone: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> Iterator[Measurement]:
    """Times every contender of a problem; one that fails gets the reason instead of measurements.

    What is timed runs within `alone`, which may wait until others on the device pause.
    """
    for what in passes:
        gradients = what != PASSES[0]
        programs: dict[str, timing.Program] = {}
        served: dict[str, str | None] = {}
        for name, contender in problem.contenders.items():
            try:
                with dispatch.ledger() as entries:
                    programs[name] = (
                        timing.compiled(graded(contender), problem.arrays, cotangents(contender, problem.arrays))
                        if gradients
                        else timing.compiled(_applied(contender), problem.arrays)
                    )
                served[name] = entries[0].implementation if entries else None
            except Exception as error:
                if name == OURS:
                    raise
                yield Measurement(problem.core, problem.name, what, name, failure=_reason(error))
        factor = BACKWARD.get(problem.core, 3.0) if gradients else 1.0
        # The backward pass reads the arguments again, with the gradient of the result, and writes their gradients: the
        # arguments move three times, the result twice.
        moved = 3.0 * problem.bytes - problem.result_bytes if gradients else problem.bytes
        exponentials = problem.exponentials[gradients]
        failures: dict[str, str] = {}
        with alone():
            # Some fail when they run only, as for want of memory.
            for name, program in programs.items():
                try:
                    jax.block_until_ready(program.call())
                except Exception as error:
                    if name == OURS:
                        raise
                    failures[name] = _reason(error)
            programs = {name: program for name, program in programs.items() if name not in failures}
            times = timing.alternate({name: program.call for name, program in programs.items()}, OURS, patience)
        for name, failure in failures.items():
            yield Measurement(problem.core, problem.name, what, name, failure=failure)
        for name, program in programs.items():
            yield Measurement(
                core=problem.core,
                problem=problem.name,
                what=what,
                contender=name,
                implementation=served[name],
                milliseconds=1e3 * times[name].seconds,
                ratio=times[name].ratio,
                low=times[name].low,
                high=times[name].high,
                tflops=factor * problem.flops / times[name].seconds / 1e12,
                gigabytes=moved / times[name].seconds / 1e9,
                ceiling=ceilings.seconds(factor * problem.flops, moved, exponentials) / times[name].seconds,
                temporary_mib=program.temporary_bytes / 2**20,
                compile_seconds=program.compile_seconds,
                quartiles=times[name].quartiles_in_milliseconds,
                rounds=patience.rounds,
            )


def _reason(error: Exception) -> str:
    """The kind of an error and the first line of what it says, if it says anything."""
    return ': '.join([type(error).__name__, *(line[:200] for line in str(error).strip().splitlines()[:1])])


def _applied(contender: Contender) -> Any:
    """A contender as a function of one argument."""
    return lambda arrays: contender(**arrays)


def graded(contender: Contender) -> Any:
    """A contender's result, and its gradients for given `cotangents`: no part of the backward pass is removed."""

    def gradients(arrays: dict[str, jax.Array], given: list[jax.Array]) -> Any:
        result, pull = jax.vjp(_applied(contender), arrays)
        left = iter(given)
        cotangent = jax.tree.map(
            lambda leaf: next(left) if _has_gradient(leaf) else jnp.zeros(leaf.shape, jax.dtypes.float0), result
        )
        return jax.tree.leaves(result)[0], pull(cotangent)

    return gradients


def cotangents(contender: Contender, arrays: dict[str, jax.Array]) -> list[jax.Array]:
    """Random cotangents of a contender's results that have gradients, arrays of their own as they are in a model."""
    shapes = [leaf for leaf in jax.tree.leaves(jax.eval_shape(_applied(contender), arrays)) if _has_gradient(leaf)]
    return [
        jax.random.normal(jax.random.key(place), shape.shape, jnp.float32).astype(shape.dtype)
        for place, shape in enumerate(shapes)
    ]


def _has_gradient(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)
