"""Times one step of cores against the same step written by hand, in turns in one process.

    python scripts/bench_steps.py --out=steps.json
    python scripts/bench_steps.py --batches=1 delta_rule linear_scan

A step is what decoding takes of a core: one token of every row, with a state (of attention: cached keys and values)
that it gives back in the same memory. By hand it is the definition as one would write it in JAX for one token, with no
checks, documents or choice of a form. Sizes are those of a mixer of width 512.
"""

import dataclasses
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from turns import Turn, machine, ratio, take_turns

import pallas_kernels
from attnlab.files import write_json

_BATCHES = flags.DEFINE_list('batches', ['1', '64'], 'Numbers of sequences.')
_ROUNDS = flags.DEFINE_integer('rounds', 10, 'How often the two take turns.', lower_bound=2)
_BURST = flags.DEFINE_integer('burst', 200, 'Timed steps of one turn.', lower_bound=1)
_OUT = flags.DEFINE_string('out', None, 'The JSON file of the times.')

H, K, D, N, KEYS, TAPS = 8, 64, 512, 16, 1024, 4
"""Heads and their channels, channels of scans and their states, cached keys, and taps."""

Shapes = dict[str, tuple[int, ...]]
Arrays = dict[str, jax.Array]
Step = Callable[..., tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Case:
    """A core's step as called and by hand: functions of arrays and of a state, which give the output and the state."""

    shapes: Shapes
    state: tuple[int, ...]
    ours: Step
    by_hand: Step


def attention(q: jax.Array, v: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The newest token's query reads all cached keys."""
    del v
    return pallas_kernels.attention(q, state[0], state[1]), state


def attention_by_hand(q: jax.Array, v: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    del v
    keys, values = state
    weights = jax.nn.softmax(jnp.einsum('bthk,bshk->bhts', q, keys) * K**-0.5)
    return jnp.einsum('bhts,bshv->bthv', weights, values), state


def linear_scan_by_hand(x: jax.Array, decay: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    state = decay[:, 0] * state + x[:, 0]
    return state[:, None], state


def selective_scan_by_hand(
    x: jax.Array, dt: jax.Array, A: jax.Array, B: jax.Array, C: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, dt, B, C = x[:, 0, :, None], dt[:, 0, :, None], B[:, 0, None], C[:, 0, None]
    state = jnp.exp(dt * A) * state + dt * x * B
    return jnp.sum(C * state, axis=-1)[:, None], state


def linear_attention_by_hand(
    q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    decay = jnp.exp(log_decay[:, 0].reshape(*log_decay.shape[:1], H, -1, 1))
    state = decay * state + k[:, 0, :, :, None] * v[:, 0, :, None, :]
    return K**-0.5 * jnp.einsum('bhk,bhkv->bhv', q[:, 0], state)[:, None], state


def delta_rule_by_hand(
    q: jax.Array, k: jax.Array, v: jax.Array, beta: jax.Array, log_decay: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    state = jnp.exp(log_decay[:, 0].reshape(*log_decay.shape[:1], H, -1, 1)) * state
    k, written = k[:, 0], v[:, 0] - jnp.einsum('bhk,bhkv->bhv', k[:, 0], state)
    state = state + (beta[:, 0, :, None] * k)[..., None] * written[..., None, :]
    return K**-0.5 * jnp.einsum('bhk,bhkv->bhv', q[:, 0], state)[:, None], state


def diagonal_low_rank_by_hand(
    q: jax.Array, k: jax.Array, v: jax.Array, a: jax.Array, b: jax.Array, log_decay: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    read = jnp.einsum('bhk,bhkv->bhv', a[:, 0], state)
    state = jnp.exp(log_decay[:, 0])[..., None] * state
    state = state + b[:, 0, ..., None] * read[..., None, :] + k[:, 0, ..., None] * v[:, 0, :, None, :]
    return K**-0.5 * jnp.einsum('bhk,bhkv->bhv', q[:, 0], state)[:, None], state


def short_conv(x: jax.Array, taps: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The state is of the inputs before, which the token is appended to."""
    window = jnp.concatenate([state, x], axis=1)
    return pallas_kernels.short_conv(window, taps, activation='silu')[:, -1:], window[:, 1:]


def short_conv_by_hand(x: jax.Array, taps: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    window = jnp.concatenate([state, x], axis=1)
    return jax.nn.silu(jnp.sum(window * taps, axis=1, keepdims=True)), window[:, 1:]


def cases(b: int) -> dict[str, Case]:
    """Every core with something to remember, by name."""
    row, matrix = (b, 1, H, K), (b, H, K, K)
    read: Shapes = {'q': row, 'k': row, 'v': row}
    scalar: Shapes = {'log_decay': row[:3]}
    vector: Shapes = {'log_decay': row}
    delta, low_rank = read | {'beta': row[:3]}, read | {'a': row, 'b': row} | vector
    selective: Shapes = {'x': (b, 1, D), 'dt': (b, 1, D), 'A': (D, N), 'B': (b, 1, N), 'C': (b, 1, N)}
    core = pallas_kernels
    return {
        'attention': Case({'q': row, 'v': row}, (2, b, KEYS, H, K), attention, attention_by_hand),
        'linear_scan': Case({'x': (b, 1, D), 'decay': (b, 1, D)}, (b, D), core.linear_scan, linear_scan_by_hand),
        'selective_scan': Case(selective, (b, D, N), core.selective_scan, selective_scan_by_hand),
        'linear_attention': Case(read | scalar, matrix, core.linear_attention, linear_attention_by_hand),
        'linear_attention, vector': Case(read | vector, matrix, core.linear_attention, linear_attention_by_hand),
        'delta_rule': Case(delta | scalar, matrix, core.delta_rule, delta_rule_by_hand),
        'delta_rule, vector': Case(delta | vector, matrix, core.delta_rule, delta_rule_by_hand),
        'diagonal_low_rank': Case(low_rank, matrix, core.diagonal_low_rank, diagonal_low_rank_by_hand),
        'short_conv': Case({'x': (b, 1, D), 'taps': (TAPS, D)}, (b, TAPS - 1, D), short_conv, short_conv_by_hand),
    }


def drawn(shapes: Shapes) -> Arrays:
    """Numbers of moderate size; decays and rates below zero, strengths, steps and factors between zero and one."""
    rng, found = np.random.default_rng(0), {}
    for name, shape in shapes.items():
        numbers = 0.1 * rng.standard_normal(shape, np.float32)
        if name in ('log_decay', 'A'):
            numbers = -np.abs(numbers)
        found[name] = jnp.asarray(np.abs(numbers) if name in ('beta', 'dt', 'decay') else numbers)
    return found


class Stream:
    """A step that is taken again and again, each with the state that the one before left; a contender of `turns`."""

    def __init__(self, step: Step, arrays: Arrays, state: tuple[int, ...]):
        self.arrays, self.state = arrays, jnp.zeros(state)
        run = jax.jit(lambda arrays, state: step(**arrays, state=state), donate_argnums=1)
        self.step: Callable[..., Any] = run.lower(arrays, self.state).compile()

    def burst(self, steps: int) -> Turn:
        """Takes steps one after the other."""
        seconds, cpu = [], time.process_time()
        for _ in range(steps):
            start = time.perf_counter()
            y, self.state = self.step(self.arrays, self.state)
            jax.block_until_ready((y, self.state))
            seconds.append(time.perf_counter() - start)
        return seconds, time.process_time() - cpu

    def facts(self) -> dict[str, object]:
        """Nothing besides the times."""
        return {}


def compare(case: Case) -> dict[str, Any]:
    """Times of both, and how many times as long ours takes; first that they agree. Raises AssertionError if not."""
    arrays, state = drawn(case.shapes), drawn({'state': case.state})['state']
    for one, other in zip(case.ours(**arrays, state=state), case.by_hand(**arrays, state=state), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    streams = {name: Stream(step, arrays, case.state) for name, step in (('ours', case.ours), ('hand', case.by_hand))}
    turns = take_turns(streams, _ROUNDS.value, _BURST.value)
    wall = {name: [float(np.median(seconds)) for seconds, _ in each] for name, each in turns.items()}
    busy = {name: [cpu for _, cpu in each] for name, each in turns.items()}
    return {
        'ms': 1e3 * float(np.median(wall['ours'])),
        'by_hand_ms': 1e3 * float(np.median(wall['hand'])),
        'times_as_long': ratio(wall['hand'], wall['ours']),
        'times_as_long_by_cpu_time': ratio(busy['hand'], busy['ours']),
    }


def main(argv: Sequence[str]) -> None:
    """Times the cores that are named, or all, and prints a line for each."""
    rows = {}
    for batch in map(int, _BATCHES.value):
        every = cases(batch)
        unknown = [name for name in argv[1:] if name not in every]
        if unknown:
            raise app.UsageError(f'no core with a step is called {unknown[0]!r}; they are {"; ".join(every)}')
        for name in argv[1:] or every:
            found = rows[f'{name}: b {batch}'] = compare(every[name])
            times, busy = found['times_as_long'], found['times_as_long_by_cpu_time']
            print(
                f'{name}: b {batch}: {found["ms"]:.4f} ms a step, by hand {found["by_hand_ms"]:.4f}; '
                f'x {times["median"]:.2f} ({times["low"]:.2f} to {times["high"]:.2f}), '
                f'by processor time {busy["median"]:.2f}',
                flush=True,
            )
    if _OUT.value:
        write_json(pathlib.Path(_OUT.value), {'machine': machine(), 'command': sys.argv, 'rows': rows})


if __name__ == '__main__':
    app.run(main)
