"""What runs share in one process, and what they do not."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from attnlab.models.sampling import generate
from attnlab.testing.jaxprs import equations
from attnlab.train.setup import Setup, prepare
from configs import language

MATMULS = ('default', 'highest')


@pytest.fixture(scope='module')
def setups() -> dict[str, Setup]:
    """Runs that differ in the precision of matrix products; all are prepared before any is traced."""
    return {matmul: prepare(config(matmul)) for matmul in MATMULS}


def config(matmul: str) -> Any:
    made = language.get_config('zoo=mingru')
    with made.unlocked():
        made.update(length=16, batch_size=2)
        made.model.dim, made.model.stack.depth = 8, 1
        made.precision.matmul = matmul
    return made


def precisions(jaxpr: Any) -> Iterator[str]:
    """The precision of every matrix product."""
    for equation in equations(jaxpr):
        if equation.primitive.name == 'dot_general':
            asked = equation.params['precision']
            yield 'default' if asked is None else {str(one).lower() for one in asked}.pop()


@pytest.mark.parametrize('matmul', MATMULS)
def test_two_runs_keep_their_own_precision(setups: dict[str, Setup], matmul: str):
    setup = setups[matmul]
    programs = {
        'step': setup.trace().jaxpr,
        'measure': setup.measure.trace(setup.abstract.variables, setup.abstract_batch()).jaxpr,
    }
    for name, jaxpr in programs.items():
        assert set(precisions(jaxpr.jaxpr)) == {matmul}, name
    assert jax.config.jax_default_matmul_precision is None


def test_decoding_has_the_precision_of_its_run(setups: dict[str, Setup]):
    found = {}
    for matmul, setup in setups.items():
        traced = []

        def jit(function: Any, setup: Setup = setup, traced: list[Any] = traced, **options: Any) -> Any:
            compiled = setup.precision.jit(function, **options)
            return lambda *args: (traced.append(compiled.trace(*args).jaxpr.jaxpr), compiled(*args))[1]

        model = nnx.merge(setup.graphdef, setup.initialize().variables)
        list(generate(model, np.ones(4, np.int32), 2, jit=jit))
        found[matmul] = {precision for jaxpr in traced for precision in precisions(jaxpr)}
    assert found == {matmul: {matmul} for matmul in MATMULS}


def test_runs_that_share_programs_compile_them_once(setups: dict[str, Setup]):
    first, second = (prepare(config('default')) for _ in range(2))
    shared = second.sharing(first)
    assert shared.compiled is first.compiled is not second.compiled
    assert shared.seed == second.seed and shared.sharing(second).compiled is second.compiled
