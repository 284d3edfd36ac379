"""Times one decoding step of mixers, in turns in one process.

    python scripts/bench_decode.py hyena mha
    python scripts/bench_decode.py --before=5b60f95 hyena

A step reads one token with a state of `--length` tokens, which it gives back in the same memory, as decoding does. With
`--before` every mixer is timed as it was at that commit as well: the file of its class is taken from there, all else
is as it is now. Means are over all steps, so that work done once in a while counts; medians say what most steps take.
"""

import dataclasses
import importlib
import inspect
import pathlib
import subprocess
import sys
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from flax import nnx
from turns import Turn, machine, take_turns

from attnlab.config import TARGET, Factory, build
from attnlab.context import Context
from attnlab.files import write_json
from attnlab.zoo import ZOO

_LENGTH = flags.DEFINE_integer('length', 16_384, 'Tokens that the state is made for.', lower_bound=1)
_DIM = flags.DEFINE_integer('dim', 512, 'Model width.', lower_bound=1)
_BATCH = flags.DEFINE_integer('batch', 1, 'Sequences of a step.', lower_bound=1)
_ROUNDS = flags.DEFINE_integer('rounds', 3, 'How often the mixers take turns.', lower_bound=2)
_BURST = flags.DEFINE_integer('burst', 512, 'Timed steps of one turn.', lower_bound=1)
_BEFORE = flags.DEFINE_string('before', None, 'A commit whose classes are timed as well.')
_OUT = flags.DEFINE_string('out', None, 'The JSON file of the times.')

HEADS = 8
ROOT = pathlib.Path(__file__).parents[1]


@dataclasses.dataclass
class Stream:
    """A mixer that reads token after token; a contender of `turns`."""

    step: Callable[..., Any]
    begun: Callable[[], Any]

    def burst(self, steps: int) -> Turn:
        """Reads as many tokens of a stream of their own, after an untimed one."""
        x = jnp.ones((_BATCH.value, 1, _DIM.value))
        state = jax.block_until_ready(self.step(x, self.begun())[1])
        seconds, cpu = [], time.process_time()
        for _ in range(steps):
            start = time.perf_counter()
            y, state = self.step(x, state)
            jax.block_until_ready((y, state))
            seconds.append(time.perf_counter() - start)
        return seconds, time.process_time() - cpu

    def facts(self) -> dict[str, object]:
        """Nothing besides the times."""
        return {}


def stream(mixer: Any) -> Stream:
    """The stream of a mixer, whose parameters are arguments: of constants XLA would compute what follows from them."""
    ctx, (graph, params) = Context.full(_BATCH.value, 1), nnx.split(mixer)
    step = jax.jit(lambda params, x, state: nnx.merge(graph, params)(x, ctx, state), donate_argnums=2)
    return Stream(
        lambda x, state: step(params, x, state),
        lambda: mixer.init_state(_BATCH.value, _LENGTH.value, jnp.float32),
    )


def made(recipe: str) -> Factory:
    """What makes the mixer of a recipe of one mixer."""
    if recipe not in ZOO or len(ZOO[recipe].pattern) > 1:
        raise app.UsageError(f'no recipe of one mixer is called {recipe!r}; attnlab zoo lists them')
    return build(ZOO[recipe].sized(heads=HEADS, length=_LENGTH.value)[0])


def as_before(recipe: str, commit: str) -> Callable[..., Any]:
    """The same, with the class as it was at a commit."""
    module, _, name = ZOO[recipe].pattern[0][TARGET].rpartition('.')
    path = pathlib.Path(inspect.getfile(importlib.import_module(module))).resolve().relative_to(ROOT)
    text = subprocess.run(['git', '-C', str(ROOT), 'show', f'{commit}:{path}'], capture_output=True, text=True)
    if text.returncode:
        raise app.UsageError(f'--before is {commit!r}, where {path} is not to be had: {text.stderr.strip()}')
    old = types.ModuleType(f'{module}_before')
    sys.modules[old.__name__] = old  # dataclasses look their module up
    exec(compile(text.stdout, f'{commit}:{path}', 'exec'), vars(old))
    now = made(recipe)
    return lambda dim, *, rngs: getattr(old, name)(dim, **now.kwargs, rngs=rngs)


def main(argv: Sequence[str]) -> None:
    """Times the recipes that are named, and prints a line for each and the ratio to the first."""
    makers: dict[str, Callable[..., Any]] = {recipe: made(recipe) for recipe in argv[1:]}
    if _BEFORE.value:
        makers |= {f'{recipe} at {_BEFORE.value}': as_before(recipe, _BEFORE.value) for recipe in argv[1:]}
    if not makers:
        raise app.UsageError('no recipe is named')
    streams = {name: stream(make(_DIM.value, rngs=nnx.Rngs(0))) for name, make in makers.items()}
    turns = take_turns(streams, _ROUNDS.value, _BURST.value)
    means = {name: np.asarray([np.mean(seconds) for seconds, _ in each]) for name, each in turns.items()}
    baseline = next(iter(means.values()))
    rows: dict[str, dict[str, Any]] = {
        name: {
            'mean_ms': 1e3 * float(np.median(means[name])),
            'median_ms': 1e3 * float(np.median([seconds for seconds, _ in each])),
            'cpu_ms': 1e3 * float(np.median([cpu for _, cpu in each])) / _BURST.value,
            'ratio': float(np.median(means[name] / baseline)),
            'ratio_range': [float(f(means[name] / baseline)) for f in (np.min, np.max)],
        }
        for name, each in turns.items()
    }
    first = next(iter(rows.values()))
    for name, row in rows.items():
        print(
            f'{name}: {row["mean_ms"]:.3f} ms a step, median {row["median_ms"]:.3f}, processor {row["cpu_ms"]:.3f}; '
            f'x {row["ratio"]:.2f} ({row["ratio_range"][0]:.2f} to {row["ratio_range"][1]:.2f}), '
            f'by processor time {row["cpu_ms"] / first["cpu_ms"]:.2f}'
        )
    if _OUT.value:
        write_json(pathlib.Path(_OUT.value), {'machine': machine(), 'command': sys.argv, 'rows': rows})


if __name__ == '__main__':
    app.run(main)
