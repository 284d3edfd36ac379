"""Tokens per second of training steps at common sizes, the fraction of the device's measured product rate, and the
kernels of a step by their time."""

import itertools
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.train.cost import flops_per_token
from attnlab.train.setup import Setup, prepare
from configs import language
from pallas_kernels import target
from pallas_kernels.bench import ceilings, timing
from scripts.session.cases import Case
from scripts.session.stages.profile import kernels_of
from scripts.session.turn import ALONE, Turn

SECONDS = 400.0
VOCAB = 50_304
BATCHES = ((16, 2048), (4, 8192))
"""Rows and tokens of a step; those of the configs are for many devices."""

RECIPES = ('mha', 'gla', 'gated_delta_net', 'mamba2')
SETTLING, TURNS, STEPS = 5, 4, 5
LOOPS = {'': 'auto', 'unrolled': 'unroll'}
"""How layers are compiled, by the word behind the name of a recipe: as a loop on GPUs, or one after the other."""


def cases(small: bool) -> list[Case]:
    if small:
        return [_case('mingru', 'tiny', 2, 64)]
    found = [_case(recipe, size, *batch) for size in ('125m', '350m') for batch in BATCHES for recipe in RECIPES]
    return [*found, *(_case(f'{recipe} unrolled', '125m', *BATCHES[0]) for recipe in RECIPES)]


def run(case: Case, folder: pathlib.Path) -> dict[str, Any]:
    """Times steps on random tokens of a large vocabulary: with bytes the head would be small."""
    recipe, size, rows, length = case.call.split(', ')
    with Turn(folder) as turn:
        with turn.compiling():
            start = time.perf_counter()
            setup = prepare(_config(recipe, size, int(rows), int(length)))
            step = setup.trace().lower().compile()
            compiled = time.perf_counter() - start
        with turn.alone(2 * ALONE):
            product = _product()
            run = _running(setup, step)
            seconds, kernels = _timed(run), kernels_of(run, STEPS)
    tokens = int(rows) * int(length)
    rate = tokens / seconds[1]
    return {
        'status': 'ok',
        'milliseconds': [1e3 * one for one in seconds],
        'tokens_per_second': rate,
        'mfu': rate * flops_per_token(setup) / product,
        'compile_seconds': compiled,
        'temporary_mib': step.memory_analysis().temp_size_in_bytes / 2**20,
        'kernels': kernels,
    }


def _case(recipe: str, size: str, rows: int, length: int) -> Case:
    call = f'{recipe}, {size}, {rows}, {length}'
    return Case(f'tokens/{size}/{recipe}/{rows}x{length}', 'tokens', SECONDS, recipe, call, 'bfloat16')


def _config(recipe: str, size: str, rows: int, length: int) -> Any:
    name, _, loop = recipe.partition(' ')
    config = language.get_config(f'zoo={name},size={size},tokens=bpe').unlock()
    config.model.stack.loop = LOOPS[loop]
    config.task.tokenizer.vocab = VOCAB
    config.batch_size, config.length, config.precision.activations = rows, length, 'bfloat16'
    return config.lock()


def _running(setup: Setup, step: jax.stages.Compiled) -> Callable[[], Any]:
    """Takes one step more on each call, on one batch; returns what is there when it is done."""
    batch, numbers = setup.place(_batch(setup)), itertools.count(1)
    state = setup.initialize()

    def run() -> Any:
        nonlocal state
        state, metrics = step(state, batch, np.int32(next(numbers)), setup.scalars)
        return metrics

    return run


def _timed(run: Callable[[], Any]) -> tuple[float, float, float]:
    """Quartiles of the seconds of a step, over bursts of several."""
    turns = []
    for turn in range(TURNS + 1):
        start, steps = time.perf_counter(), STEPS if turn else SETTLING
        jax.block_until_ready([run() for _ in range(steps)])
        turns.append((time.perf_counter() - start) / steps)
    low, middle, high = statistics.quantiles(turns[1:], method='inclusive')
    return low, middle, high


def _batch(setup: Setup) -> dict[str, np.ndarray]:
    shape = (setup.batch_size, setup.length)
    tokens = np.random.default_rng(0).integers(0, setup.task.vocab, (shape[0], shape[1] + 1), np.int32)
    ones = np.ones(shape, np.int32)
    return {
        'tokens': tokens[:, :-1],
        'targets': tokens[:, 1:],
        'segments': ones,
        'positions': np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
        'weights': ones.astype(np.float32),
        'bytes': ones,
    }


def _product() -> float:
    """Measured operations per second of a large product in bfloat16."""
    return ceilings.measure(target.current().platform, jnp.dtype(jnp.bfloat16), timing.Patience(2)).flops_per_second
