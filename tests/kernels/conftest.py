"""How a core is compared with its reference: the same numbers, and every gradient, in float64."""

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import DTypeLike

from attnlab.testing.contract import compare_with_differences
from attnlab.testing.cores import Core, Numbers, cotangent, double, evaluate, parts
from attnlab.testing.tolerances import assert_close
from pallas_kernels import dispatch, target
from pallas_kernels.cases.drawing import Call
from pallas_kernels.mosaic_gpu import products_sm90

NAMED = {'test_xla_is_the_reference': 5, 'test_reference_is_the_definition': 2}
"""Of the cases these tests go through, so many of `KERNEL` are run every time, the others nightly.

Every test compares with a reference, and references change seldom.
"""


IN_TURN = ('test_forms_are_the_reference', 'test_forms_that_hold_parts_are_the_reference')
"""Of these tests every case is run every time, by one of the forms that serve it, in turn; by the others nightly."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the cases that are run nightly."""
    in_turn = collections.defaultdict(lambda: collections.defaultdict(list))
    for item in items:
        if isinstance(item, pytest.Function) and item.originalname in NAMED:
            every_time = tuple(item.module.cases.KERNEL)[: NAMED[item.originalname]]
            if item.callspec.params['name'] not in every_time:
                item.add_marker(pytest.mark.slow)
        if isinstance(item, pytest.Function) and item.originalname in IN_TURN:
            case = item.callspec.params['name'], item.callspec.params['dtype']
            in_turn[item.module, item.originalname][case].append(item)
    for cases in in_turn.values():
        for turn, forms in enumerate(cases.values()):
            for place, item in enumerate(forms):
                if place != turn % len(forms):
                    item.add_marker(pytest.mark.slow)


@dataclasses.dataclass
class Comparison:
    """Runs cores and compares what comes out; references are computed once for each call."""

    references: dict[tuple[Core, str, str], Numbers]

    def evaluate(self, core: Core, call: Call, implementation: str) -> Numbers:
        """The outputs of a core, and the gradients along cotangents that are always the same ones."""
        return evaluate(core, call, implementation)

    def check(
        self,
        core: Core,
        name: str,
        call: Call,
        reduction: int,
        *,
        implementation: str,
        dtype: DTypeLike | None = None,
        **sums: int,
    ) -> None:
        """Compares an implementation with the reference in float64.

        `reduction` is how many numbers are added up into one; `sums` says it for the gradients where it differs.

        A result is judged by its own type, or by `dtype`. The former is too strict where a kernel rounds weights or
        states to the type of 16-bit operands, to multiply them, and keeps the sums in float32: these are off by up to
        2e-2 of their size in bfloat16, where the portable forms are by 1e-6. Tests of such kernels judge them by the
        type of the operands.
        """
        actual = self.evaluate(core, call, implementation)
        expected = self.reference(core, name, call)
        assert actual.keys() == expected.keys()
        for what, array in actual.items():
            argument = what.removeprefix('gradient of ')
            if argument in call.arrays:
                assert array.dtype == call.arrays[argument].dtype
            assert_close(
                parts(array),
                parts(expected[what]),
                dtype=array.dtype if dtype is None else dtype,
                reduction=sums.get(argument, reduction),
                what=f'{name}: {what}',
            )

    def check_same_bits(self, core: Core, call: Call, implementation: str) -> None:
        """Two runs of an implementation give the same bits."""
        first, second = (self.evaluate(core, call, implementation) for _ in range(2))
        assert first.keys() == second.keys()
        for name, array in first.items():
            np.testing.assert_array_equal(array, second[name], err_msg=name)

    def reference(self, core: Core, name: str, call: Call) -> Numbers:
        """The outputs and gradients of the reference in float64."""
        key = (core, name, '/'.join(str(array.dtype) for array in call.arrays.values()))
        if key not in self.references:
            with jax.enable_x64(True):
                self.references[key] = self.evaluate(core, double(call), 'reference')
        return self.references[key]


class Lowered(NamedTuple):
    """A call of a core and its gradients, lowered for a GPU: the module, and the ledger of what was chosen."""

    module: str
    entries: list[dispatch.Entry]

    def kernels(self) -> int:
        """How many kernels of ours the module calls."""
        return self.module.count('custom_call @mosaic_gpu')


def lower_for_gpu(core: Core, call: Call, **fixed: Any) -> Lowered:
    """Lowers a call, shapes or arrays, and its gradients along the result itself, for a GPU that is not there.

    Options that have a shape are arguments, too; the others, and those of `fixed`, are constants.
    """
    constant = {name: option for name, option in call.options.items() if hasattr(option, 'shape')}
    fixed = {name: option for name, option in call.options.items() if name not in constant} | fixed

    def run(arrays: dict[str, Any], constant: dict[str, Any]) -> Any:
        found, pull = jax.vjp(lambda arrays: core(**arrays, **constant, **fixed), arrays)
        return found, pull(jax.tree.map(_itself, found))

    with target.compiling_for(target.H100), dispatch.ledger() as entries:
        lowered = jax.jit(run).trace(call.arrays, constant).lower(lowering_platforms=('cuda',))
    return Lowered(lowered.as_text(), entries)


def _itself(result: jax.Array) -> Any:
    """A cotangent of a result; whole numbers have none."""
    return result if jnp.issubdtype(result.dtype, jnp.inexact) else np.zeros(result.shape, jax.dtypes.float0)


def check_differences(core: Core, call: Call) -> None:
    """Compares the gradients of the reference, in float64, with differences."""
    with jax.enable_x64(True):
        call = double(call)
        # What is minus infinity stays so, and complex numbers are moved by their real and imaginary parts.
        moved = {name: jnp.where(jnp.isfinite(array), array, 0) for name, array in call.arrays.items()}
        parts = {name: _parts(array) for name, array in moved.items()}

        def loss(parts: dict[str, tuple[jax.Array, ...]]) -> jax.Array:
            arrays = {
                name: jnp.where(jnp.isfinite(array), _whole(parts[name]), array) for name, array in call.arrays.items()
            }
            outputs = jax.tree.leaves(core(**arrays, **call.options, implementation='reference'))
            real = [part for output in outputs for part in _parts(output)]
            return sum(jnp.vdot(cotangent(place, part), part) for place, part in enumerate(real))

        compare_with_differences(core.__name__, loss, parts)


def _parts(array: jax.Array) -> tuple[jax.Array, ...]:
    return (array.real, array.imag) if jnp.iscomplexobj(array) else (array,)


def _whole(parts: tuple[jax.Array, ...]) -> jax.Array:
    return parts[0] if len(parts) == 1 else jax.lax.complex(*parts)


@pytest.fixture
def watched_for_races(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted GPU kernels fail where copies and products race.

    A product with a factor in registers, which the interpreter lacks, is done by ordinary loads: a commit after it
    stands in for what orders it, and hides one that is missing before. Products of two tiles order no loads.
    """
    multiply = products_sm90._multiply_interpreted

    def committed(left: Any, right: Any, onto: jax.Array | None) -> jax.Array:
        product = multiply(left, right, onto)
        if isinstance(left, jax.Array):
            plgpu.commit_smem()
        return product

    watched = functools.partial(plgpu.InterpretGPUParams, detect_races=True)
    monkeypatch.setattr(products_sm90, '_multiply_interpreted', committed)
    monkeypatch.setattr(plgpu, 'InterpretGPUParams', watched)


@pytest.fixture(scope='session')
def comparison() -> Comparison:
    return Comparison({})


@pytest.fixture(scope='session')
def lowered_for_gpu() -> Callable[..., Lowered]:
    return lower_for_gpu


@pytest.fixture(scope='session')
def differences() -> Callable[[Core, Call], None]:
    return check_differences


@pytest.fixture(scope='session')
def in_double() -> Callable[[Call], Call]:
    return double


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision('highest'):
        yield
