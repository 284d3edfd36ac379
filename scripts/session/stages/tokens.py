"""Tokens per second of training steps at common sizes, and the fraction of the device's measured product rate."""

import pathlib
import statistics
import time
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
from scripts.session.turn import ALONE, Turn

SECONDS = 400.0
VOCAB = 50_304
BATCHES = ((16, 2048), (4, 8192))
"""Rows and tokens of a step; those of the configs are for many devices."""

RECIPES = ('mha', 'gla', 'gated_delta_net', 'mamba2')
SETTLING, TURNS, STEPS = 5, 4, 5


def cases(small: bool) -> list[Case]:
    if small:
        return [_case('mingru', 'tiny', 2, 64)]
    return [_case(recipe, size, *batch) for size in ('125m', '350m') for batch in BATCHES for recipe in RECIPES]


def run(case: Case, folder: pathlib.Path) -> dict[str, Any]:
    """Times steps on random tokens of a large vocabulary: with bytes the head would be small."""
    recipe, size, rows, length = case.call.split(', ')
    with Turn(folder) as turn:
        with turn.compiling():
            setup = prepare(_config(recipe, size, int(rows), int(length)))
            step = setup.trace().lower().compile()
        with turn.alone(2 * ALONE):
            product = _product()
            seconds = _timed(setup, step)
    tokens = int(rows) * int(length)
    rate = tokens / seconds[1]
    return {
        'status': 'ok',
        'milliseconds': [1e3 * one for one in seconds],
        'tokens_per_second': rate,
        'mfu': rate * flops_per_token(setup) / product,
    }


def _case(recipe: str, size: str, rows: int, length: int) -> Case:
    call = f'{recipe}, {size}, {rows}, {length}'
    return Case(f'tokens/{size}/{recipe}/{rows}x{length}', 'tokens', SECONDS, recipe, call, 'bfloat16')


def _config(recipe: str, size: str, rows: int, length: int) -> Any:
    config = language.get_config(f'zoo={recipe},size={size},tokens=bpe').unlock()
    config.task.tokenizer.vocab = VOCAB
    config.batch_size, config.length, config.precision.activations = rows, length, 'bfloat16'
    return config.lock()


def _timed(setup: Setup, step: jax.stages.Compiled) -> tuple[float, float, float]:
    """Quartiles of the seconds of a step, over bursts of several."""
    batch = setup.place(_batch(setup))
    state, number, turns = setup.initialize(), 0, []
    for turn in range(TURNS + 1):
        start, steps = time.perf_counter(), STEPS if turn else SETTLING
        for _ in range(steps):
            number += 1
            state, metrics = step(state, batch, np.int32(number), setup.scalars)
        jax.block_until_ready((state, metrics))
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
