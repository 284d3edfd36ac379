"""Times one training step of a small transformer: attnlab, plain JAX, and PyTorch when --peer_python names one.

    python scripts/bench_step.py --peer_python=/path/to/venv/bin/python --out=step.json

All run at the same time and take turns in short bursts, in alternating order, so that other load on the machine
affects all alike. A ratio is the median, over the rounds, of the ratio within one round; its interval is a bootstrap
over rounds. Processor time is also given: it changes least when other processes use the cores.

PyTorch steps eagerly, with each of two optimisers, and compiled (`torch.compile`, which needs a C++ compiler). Its
products are MKL's, which asks what processor it runs on: the path it takes is said, for a generic one is slow.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence

import attnlab_step
import jax
import mkl_path
import numpy as np
import optax
import plain_jax_step
from absl import app, flags
from rich.console import Console
from rich.table import Table
from step_size import StepSize
from turns import Contender, JaxContender, Turn, machine, summarise, take_turns

from attnlab.files import write_json
from attnlab.train.devices import keep_freed_memory

_PEER = flags.DEFINE_string('peer_python', None, 'Python of an environment with torch; without it only JAX is timed.')
_OUT = flags.DEFINE_string('out', None, 'Also write the figures to this JSON file.')
_KEEP = flags.DEFINE_bool('keep_freed_memory', True, 'Let the C library keep freed memory, as `attnlab train` does.')
_ROUNDS = flags.DEFINE_integer('rounds', 10, 'How often the contenders take turns.', lower_bound=2)
_BURST = flags.DEFINE_integer('burst', 3, 'Timed steps of one turn, after an untimed one.', lower_bound=1)

BASELINE = 'plain JAX'

# Each returns (step, state, batch), where the jitted `step(state, batch)` donates its state and returns (state, loss).
JAX_CONTENDERS: Mapping[str, Callable[[StepSize], tuple]] = {
    BASELINE: plain_jax_step.contender,
    'attnlab': attnlab_step.contender,
}

PEERS = {
    'PyTorch, default AdamW': 'default',
    'PyTorch, fused AdamW': 'fused',
    'PyTorch compiled, fused AdamW': 'compiled',
}
"""What `torch_step.py` runs."""


class TorchContender:
    """A process of its own, asked for one burst at a time."""

    def __init__(self, python: str, size: StepSize, kind: str):
        script = pathlib.Path(__file__).with_name('torch_step.py')
        arguments = [python, str(script), json.dumps(dataclasses.asdict(size)), kind, str(os.cpu_count())]
        self.process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.requests, self.replies = self.process.stdin, self.process.stdout
        self.said = self._read()

    def _read(self) -> dict:
        line = self.replies.readline()
        if not line:
            raise RuntimeError(f'the PyTorch process ended with status {self.process.wait()}')
        return json.loads(line)

    def _ask(self, request: str) -> dict:
        self.requests.write(request + '\n')
        self.requests.flush()
        return self._read()

    def burst(self, steps: int) -> Turn:
        reply = self._ask(f'burst {steps}')
        return reply['seconds'], reply['cpu']

    def facts(self) -> dict[str, object]:
        return self.said

    def save(self, path: str) -> dict:
        return self._ask(f'save {path}')

    def close(self) -> None:
        self.requests.close()
        self.process.wait()


def same_model(peer: TorchContender, size: StepSize) -> dict[str, float]:
    """Returns the relative differences of loss and gradient norm, from the same parameters on the same batch.

    Raises RuntimeError where either exceeds 1e-4: then the two sides do not train the same model.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = str(pathlib.Path(folder) / 'peer.npz')
        theirs = peer.save(path)
        with np.load(path) as arrays:
            params, batch = plain_jax_step.from_torch(arrays, size)
    loss, gradient = jax.value_and_grad(plain_jax_step.loss)(params, batch, size)
    ours = {'loss': float(loss), 'gradient_norm': float(optax.global_norm(gradient))}
    differences = {name: abs(ours[name] / theirs[name] - 1) for name in ours}
    if max(differences.values()) > 1e-4:
        raise RuntimeError(f'the two sides train different models: {ours} here, {theirs} in PyTorch')
    return differences


def show(results: Mapping[str, dict], environment: Mapping[str, object]) -> None:
    kept = 'kept' if environment['keep_freed_memory'] else 'not kept'
    title = f'{environment["cpu"]}, {environment["cores"]} cores, load {environment["load"]:.1f}, freed memory {kept}'
    if 'mkl' in environment:
        title += f', MKL: {environment["mkl"]}'
    table = Table(title=title, caption=f'speed: times as fast as {BASELINE}, median and 95% interval')
    for heading in ('', 'step ms', 'best ms', 'tokens/s', 'speed', '', 'by CPU time'):
        table.add_column(heading, justify='right' if heading else 'left', no_wrap=True)
    for name, r in results.items():
        speed, cpu = r['speed'], r['speed_by_cpu_time']
        interval = f'{speed["low"]:.2f} to {speed["high"]:.2f}'
        cells = (f'{r["step_ms"]:.1f}', f'{r["step_ms_best"]:.1f}', f'{r["tokens_per_second"]:,.0f}')
        table.add_row(name, *cells, f'{speed["median"]:.2f}', interval, f'{cpu["median"]:.2f}')
    Console(width=max(100, Console().width)).print(table)


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f'unexpected arguments: {argv[1:]}')
    if _KEEP.value:
        keep_freed_memory()
    size, environment = StepSize(), machine() | {'keep_freed_memory': _KEEP.value}
    contenders: dict[str, Contender] = {name: JaxContender(*make(size)) for name, make in JAX_CONTENDERS.items()}
    peers = {}
    if _PEER.value:
        environment['mkl'] = mkl_path.ask(_PEER.value) or 'not used'
        peers = {name: TorchContender(_PEER.value, size, kind) for name, kind in PEERS.items()}
        environment['difference_from_peer'] = same_model(next(iter(peers.values())), size)
    contenders |= peers
    turns = take_turns(contenders, _ROUNDS.value, _BURST.value)
    results = {
        name: summarise(turns[name], turns[BASELINE], size.tokens) | contenders[name].facts() for name in contenders
    }
    for peer in peers.values():
        peer.close()
    show(results, environment)
    if _OUT.value:
        record = {'size': dataclasses.asdict(size), 'machine': environment, 'results': results, 'command': sys.argv}
        write_json(pathlib.Path(_OUT.value), record)


if __name__ == '__main__':
    app.run(main)
