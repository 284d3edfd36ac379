"""Outputs and gradients of a core as numbers, to compare its implementations."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch, target
from pallas_kernels.cases.drawing import Call

Core = Callable[..., Any]
Numbers = dict[str, np.ndarray]


def evaluate(core: Core, call: Call, implementation: str | None) -> Numbers:
    """The outputs of a core, and the gradients for fixed cotangents.

    A kernel for another device than this one is interpreted.
    """

    def outputs(arrays: dict[str, jax.Array]) -> list[jax.Array]:
        return jax.tree.leaves(core(**arrays, **call.options, implementation=implementation))

    def run(arrays: dict[str, jax.Array]) -> tuple[list[jax.Array], dict[str, jax.Array]]:
        found, pull = jax.vjp(outputs, arrays)
        return found, pull([cotangent(place, output) for place, output in enumerate(found)])[0]

    with target_of(implementation):
        found, gradients = jax.jit(run, compiler_options=_compiler_options(implementation))(call.arrays)
    named = {f'output {place}': output for place, output in enumerate(found)}
    named.update({f'gradient of {name}': gradient for name, gradient in gradients.items()})
    return {name: np.asarray(array) for name, array in named.items()}


def double(call: Call) -> Call:
    """The same call in float64, or complex128; inside `jax.enable_x64(True)`."""
    return Call(
        {name: jnp.asarray(np.asarray(array), _double(array.dtype)) for name, array in call.arrays.items()},
        call.options,
    )


def cotangent(place: int, like: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    """Numbers that every type represents exactly, so that all implementations get the same ones."""
    noise = np.random.default_rng(place).standard_normal((2, *like.shape))
    noise = noise[0] + 1j * noise[1] if jnp.issubdtype(like.dtype, jnp.complexfloating) else noise[0]
    return jnp.asarray(np.round(8 * noise) / 8, like.dtype)


def parts(array: np.ndarray) -> np.ndarray:
    """Complex numbers as their real and imaginary parts; others as they are."""
    return np.stack([array.real, array.imag]) if np.iscomplexobj(array) else array


def _compiler_options(implementation: str | None) -> dict[str, int | bool]:
    """Compiler options on CPUs: the default for what runs there, little optimisation for interpreted kernels."""
    if implementation is None or jax.default_backend() != 'cpu':
        return {}
    as_released = implementation == 'xla'
    return {'xla_backend_optimization_level': 3 * as_released, 'xla_llvm_disable_expensive_passes': not as_released}


def target_of(implementation: str | None) -> contextlib.AbstractContextManager[None]:
    """The context in which a kernel for another device than this one is interpreted."""
    platforms = {**dispatch.PLATFORM, **dispatch.LIBRARIES}
    if implementation in platforms and target.current().platform != platforms[implementation]:
        return target.compiling_for(target.interpreted(implementation))
    return contextlib.nullcontext()


def _double(dtype: Any) -> Any:
    return jnp.complex128 if jnp.issubdtype(dtype, jnp.complexfloating) else jnp.float64
