"""Contenders of a benchmark that take turns, what their times say, and the machine they ran on."""

import datetime
import os
import pathlib
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jaxlib
import numpy as np

from pallas_kernels.bench import timing

Turn = tuple[list[float], float]  # seconds of each step, total processor seconds


class Contender(Protocol):
    def burst(self, steps: int) -> Turn:
        """Returns the seconds of each step, and their total processor seconds."""

    def facts(self) -> dict[str, object]:
        """Returns facts to record besides the times."""


class JaxContender:
    """A jitted `step(state, batch) -> (state, loss)` that donates its state, compiled beforehand."""

    def __init__(self, step: Any, state: Any, batch: Any):
        self.state, self.batch = state, batch
        start = time.perf_counter()
        self.step = step.lower(state, batch).compile()
        self.compile_seconds = time.perf_counter() - start

    def burst(self, steps: int) -> Turn:
        """Takes steps one after the other."""
        seconds, cpu = [], time.process_time()
        for _ in range(steps):
            start = time.perf_counter()
            self.state, loss = self.step(self.state, self.batch)
            jax.block_until_ready((self.state, loss))
            seconds.append(time.perf_counter() - start)
        return seconds, time.process_time() - cpu

    def facts(self) -> dict[str, object]:
        """Seconds to compile, which are short where the program was kept, and bytes of temporaries."""
        temporaries = self.step.memory_analysis().temp_size_in_bytes
        return {'compile_seconds': self.compile_seconds, 'temporary_bytes': temporaries}


def take_turns(contenders: Mapping[str, Contender], rounds: int, burst: int) -> dict[str, list[Turn]]:
    """Bursts of all contenders in turns, in alternating order, each after an untimed step."""
    turns: dict[str, list[Turn]] = {name: [] for name in contenders}
    for i in range(rounds):
        for name in list(contenders)[:: -1 if i % 2 else 1]:
            contenders[name].burst(1)  # caches and threads of the previous one
            turns[name].append(contenders[name].burst(burst))
    return turns


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Returns the median of theirs / ours over the rounds, and its interval: see `timing.median`."""
    middle, low, high = timing.median([other / mine for mine, other in zip(ours, theirs, strict=True)])
    return {'median': middle, 'low': low, 'high': high}


def summarise(turns: Sequence[Turn], baseline: Sequence[Turn], tokens: int) -> dict:
    """Times of a step, and how many times as fast as the baseline it is."""
    seconds = np.asarray([seconds for seconds, _ in turns])
    median = float(np.median(seconds))
    wall = [float(np.median(s)) for s, _ in turns]
    wall_baseline = [float(np.median(s)) for s, _ in baseline]
    return {
        'step_ms': 1e3 * median,
        'step_ms_best': 1e3 * float(seconds.min()),
        'cpu_ms': 1e3 * float(np.median([cpu for _, cpu in turns])) / seconds.shape[1],
        'tokens_per_second': tokens / median,
        'speed': ratio(wall, wall_baseline),
        'speed_by_cpu_time': ratio([cpu for _, cpu in turns], [cpu for _, cpu in baseline]),
    }


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    here = pathlib.Path(__file__).parent
    git = ['git', '-C', str(here), 'describe', '--always', '--dirty', '--abbrev=12']
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    models = [line for line in pathlib.Path('/proc/cpuinfo').read_text().splitlines() if line.startswith('model name')]
    return {
        'date': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
        'commit': commit or None,
        'device': jax.devices()[0].device_kind,
        'cpu': models[0].split(': ')[1] if models else platform.processor(),
        'cores': os.cpu_count(),
        'versions': {'python': platform.python_version(), 'jax': jax.__version__, 'jaxlib': jaxlib.__version__},
        'load': os.getloadavg()[0],
    }
