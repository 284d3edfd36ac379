"""A run of each class of mixers through the command line: trained, killed, resumed, evaluated, sampled."""

import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np

from attnlab import config as configs
from attnlab.train.checkpoint import Checkpoints
from attnlab.train.setup import prepare
from attnlab.zoo import ZOO
from scripts.session.cases import Case

SECONDS = 300.0
STEPS, SAVED, KILLED, ATTEMPTS = 20, 4, 10, 3
GO_ON = 'going on from step'
FIRST = ('mha', 'gla', 'gated_delta_net', 'mamba2', 'mamba', 'rg_lru')
"""A recipe of every core that has kernels; then the first of every other class."""


def cases(small: bool) -> list[Case]:
    if small:
        return [_case('mingru')]
    classes = {_classes(name): name for name in reversed(ZOO) if ZOO[name].causal}
    served = {_classes(name) for name in FIRST}
    return [_case(name) for name in (*FIRST, *(name for kind, name in reversed(classes.items()) if kind not in served))]


def run(case: Case, folder: pathlib.Path) -> dict[str, Any]:
    """The result, or the step that failed."""
    # This process only reads checkpoints: the device is for those that it starts.
    jax.config.update('jax_platforms', 'cpu')
    with tempfile.TemporaryDirectory() as place:
        return _results(_Runs(pathlib.Path(place), case.core))


class _Runs:
    """The runs of one recipe, in a folder, with a shared compilation cache.

    A recompiled program may use other algorithms for its products, which change bits.
    """

    def __init__(self, place: pathlib.Path, recipe: str):
        self.place = place
        self.recipe = recipe
        self.environment = {
            **os.environ,
            'JAX_COMPILATION_CACHE_DIR': str(place / 'compiled'),
            'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
            'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
        }

    def start(self, *arguments: str) -> subprocess.Popen:
        """Starts a command of attnlab; its output is read at its end."""
        command = [sys.executable, '-m', 'attnlab', *arguments]
        return subprocess.Popen(
            command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def train(self, name: str) -> subprocess.Popen:
        """A run that keeps every checkpoint and reports every step."""
        return self.start(
            'train',
            f'--config=configs/language.py:zoo={self.recipe},size=tiny',
            f'--workdir={self.place / name}',
            f'--config.steps={STEPS}',
            '--config.batch_size=8',
            '--config.model.stack.depth=2',
            '--config.precision.activations=bfloat16',
            f'--config.checkpoint.every={SAVED}',
            '--config.report.every=1',
            '--config.evals[0].tokens=2048',
        )

    def killed(self) -> str | None:
        """The name of a run that was killed midway with a checkpoint; `None`: all attempts were too late."""
        for attempt in range(ATTEMPTS):
            name = f'killed {attempt}'
            process = self.train(name)
            while process.poll() is None and _reached(self.place / name) < KILLED:
                time.sleep(0.002)
            process.send_signal(signal.SIGKILL)
            _finish(process)
            if process.returncode == -signal.SIGKILL and _saved(self.place / name):
                return name
        return None


def _results(runs: _Runs) -> dict[str, Any]:
    if (reason := _finish(runs.train('whole'))) is not None:
        return _failed('training', reason)
    name = runs.killed()
    if name is None:
        return _failed('killing', f'it ended before step {KILLED} was seen, {ATTEMPTS} times')
    process = runs.train(name)
    printed = process.communicate()[0]
    print(printed, flush=True)
    if process.returncode != 0 or GO_ON not in printed:
        return _failed('going on', _last(printed))
    apart = difference(runs.place / 'whole', runs.place / name)
    if apart is not None:
        return {'status': 'wrong', 'reason': f'a run that was killed and resumed differs: {apart}'}
    workdir = f'--workdir={runs.place / name}'
    for command in (['eval', workdir, '--multiples=1,2'], ['generate', workdir, '--prompt=def ', '--tokens=16']):
        if (reason := _finish(runs.start(*command))) is not None:
            return _failed(command[0], reason)
    return _learned(runs.place / 'whole')


def difference(one: pathlib.Path, other: pathlib.Path) -> str | None:
    """A difference between two finished runs, in their records or last states, to the bit; `None` without one."""
    if (one / 'metrics.jsonl').read_bytes() != (other / 'metrics.jsonl').read_bytes():
        pairs = zip(_metrics(one), _metrics(other), strict=False)
        apart = (f'{name} of step {a["step"]}, {a[name]} and {b.get(name)}' for a, b in pairs for name in a
                 if a[name] != b.get(name))  # fmt: skip
        return f'metrics.jsonl: {next(apart, "one has more lines")}'
    for place, (a, b) in enumerate(zip(_final_state(one), _final_state(other), strict=True)):
        if a.dtype != b.dtype or a.tobytes() != b.tobytes():
            return f'array {place} of the last state'
    return None


def _final_state(workdir: pathlib.Path) -> list[np.ndarray]:
    setup = prepare(configs.load(workdir / 'config.json'))
    checkpoints = Checkpoints(workdir / 'checkpoints')
    state, _ = checkpoints.restore(setup.steps, setup.abstract)
    checkpoints.close()
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


def _learned(workdir: pathlib.Path) -> dict[str, Any]:
    losses = [line['train/loss'] for line in _metrics(workdir) if 'train/loss' in line]
    cores = json.loads((workdir / 'run.json').read_text())['starts'][0]['implementations']
    line = {
        'losses': [losses[0], losses[-1]],
        'served': sorted({f'{one["core"]}: {one["implementation"]}' for one in cores}),
    }
    if not (math.isfinite(losses[-1]) and losses[-1] < losses[0]):
        return {'status': 'wrong', 'reason': f'the loss went from {losses[0]:.4g} to {losses[-1]:.4g}', **line}
    return {'status': 'ok', **line}


def _metrics(workdir: pathlib.Path) -> list[dict[str, Any]]:
    path = workdir / 'metrics.jsonl'
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith('\n')]


def _reached(workdir: pathlib.Path) -> int:
    return max((line['step'] for line in _metrics(workdir)), default=0)


def _saved(workdir: pathlib.Path) -> bool:
    return any(path.name.isdecimal() for path in (workdir / 'checkpoints').glob('*'))


def _finish(process: subprocess.Popen) -> str | None:
    """The last line of a process that failed."""
    printed = process.communicate()[0]
    print(printed, flush=True)
    return None if process.returncode == 0 else _last(printed)


def _last(printed: str) -> str:
    return (printed.strip().splitlines() or ['it said nothing'])[-1][:300]


def _failed(what: str, reason: str) -> dict[str, Any]:
    return {'status': 'failed', 'reason': f'{what}: {reason}'}


def _classes(name: str) -> tuple[str, ...]:
    return tuple(mixer.target for mixer in ZOO[name].pattern)


def _case(recipe: str) -> Case:
    return Case(f'train/{recipe}', 'train', SECONDS, recipe)
