"""Counts calls of cores without computing them: the cost of a program is read from its trace."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend as jex
import jax.numpy as jnp
from jax.interpreters import batching

from pallas_kernels.cost import CallCost, Cost, Passes

# Functions that were traced before are traced again where the value differs.
_COUNTING = jax.make_user_context(False)
_NEEDED = jax.make_user_context(None)

call = jex.core.Primitive('core_call')
"""A pass of a core, with its costs as parameters `model` and `executed`, in a program traced only for counting."""

call.multiple_results = True


@contextlib.contextmanager
def counting() -> Iterator[None]:
    """Makes calls of cores traced inside the `with` block, in this thread, represent their costs: `core_call`.

    Such traces can be differentiated and mapped, but not compiled; they do not depend on the form that would serve.
    """
    with _COUNTING(True):
        yield


def is_counting() -> bool:
    """Whether calls are being counted."""
    return bool(_COUNTING.value)


@contextlib.contextmanager
def needing(model: Passes) -> Iterator[None]:
    """Makes every call traced inside the `with` block, in this thread, count as one whose definition needs that much.

    For calls of which their caller's definition needs less than a core computes; what is executed stays that of the
    form.
    """
    with _NEEDED(model):
        yield


@call.def_abstract_eval
def _shapes(*_: Any, results: tuple[jax.core.ShapedArray, ...], core: str, model: Cost, executed: Cost) -> Sequence:
    return list(results)


def _batched(arrays: Sequence[Any], axes: Sequence[Any], **params: Any) -> tuple[list[Any], list[int]]:
    size = next(array.shape[axis] for array, axis in zip(arrays, axes, strict=True) if axis is not None)
    results = tuple(jax.core.ShapedArray((size, *result.shape), result.dtype) for result in params['results'])
    costs = {name: params[name] * size for name in ('model', 'executed')}
    found = call.bind(*arrays, **(params | costs | {'results': results}))
    return found, [0] * len(found)


batching.primitive_batchers[call] = _batched


def stand_in(core: str, cost: CallCost, definition: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that has the arguments, results and gradients of `definition`, and represents its cost."""
    if _NEEDED.value is not None:
        cost = dataclasses.replace(cost, model=_NEEDED.value)

    def run(*args: Any, **options: Any) -> Any:
        leaves, structure = jax.tree.flatten((args, options))
        places = [place for place, leaf in enumerate(leaves) if hasattr(leaf, 'dtype')]

        def of_arrays(*arrays: Any) -> Any:
            filled = list(leaves)
            for place, array in zip(places, arrays, strict=True):
                filled[place] = array
            args, options = jax.tree.unflatten(structure, filled)
            return definition(*args, **options)

        given = [jnp.asarray(leaves[place]) for place in places]
        shapes = jax.eval_shape(of_arrays, *given)

        def bind(cost_of: str, arrays: Sequence[Any], results: Sequence[Any]) -> list[Any]:
            return call.bind(
                *arrays,
                results=tuple(jax.core.ShapedArray(result.shape, result.dtype) for result in results),
                core=core,
                model=getattr(cost.model, cost_of),
                executed=getattr(cost.executed, cost_of),
            )

        @jax.custom_vjp
        def counted(*arrays: Any) -> Any:
            return jax.tree.unflatten(jax.tree.structure(shapes), bind('forward', arrays, jax.tree.leaves(shapes)))

        def save(*arrays: Any) -> Any:
            # Forms keep residuals, so that rematerialisation runs them forward again.
            found = counted(*arrays)
            return found, (arrays, jax.tree.leaves(found))

        def pull(saved: Any, gradients: Any) -> Any:
            arrays, kept = saved
            floating = [place for place, array in enumerate(arrays) if jnp.issubdtype(array.dtype, jnp.inexact)]
            upstream = [x for x in jax.tree.leaves(gradients) if x.dtype != jax.dtypes.float0]
            found = bind('backward', (*arrays, *kept, *upstream), [arrays[place] for place in floating])
            pulled: list[Any] = [None] * len(arrays)
            for place, gradient in zip(floating, found, strict=True):
                pulled[place] = gradient
            return tuple(pulled)

        counted.defvjp(save, pull)
        return counted(*given)

    return run
