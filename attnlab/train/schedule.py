"""Learning-rate schedules: a schedule is a value; `schedule(steps, peak_lr)` returns a function of the update count.

Steps count from 1: the first step of a warm-up over `W` steps has rate `peak_lr / W`, step `W` has `peak_lr`, and
the last step of a decay has `final * peak_lr`. Optax counts updates from 0, so update `c` is step `c + 1`.

A duration below 1 is a fraction of the run, and from 1 on a number of steps: `0.02` is 2% of the steps, `100.0`
is a hundred steps, `1` is one step.
"""

import abc
import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from attnlab.errors import UserError


class Schedule(abc.ABC):
    """Base class of schedules.

    Attributes:
      warmup: duration of the warm-up.
    """

    warmup: float

    @abc.abstractmethod
    def __call__(self, steps: int, peak_lr: ArrayLike) -> optax.Schedule:
        """Returns the learning rate of a run of `steps` steps, as a function of the number of updates made.

        Raises `UserError` for an invalid duration or final value, or for phases longer than the run.
        """

    def steady(self, steps: int) -> int:
        """Returns the last step up to which a longer run has the same learning rates; 0 where all differ."""
        return 0


@dataclasses.dataclass(frozen=True)
class Cosine(Schedule):
    """Linear warm-up, then half a cosine down: `peak_lr (final + (1 - final) (1 + cos(pi u)) / 2)`, u from 0 to 1.

    Loshchilov and Hutter 2017, https://arxiv.org/abs/1608.03983.

    Attributes:
      warmup: duration of the warm-up.
      final: learning rate of the last step, as a fraction of `peak_lr`.
    """

    warmup: float = 0.02
    final: float = 0.1

    def __call__(self, steps: int, peak_lr: ArrayLike) -> optax.Schedule:
        warm = in_steps('warmup', self.warmup, steps)
        _check_final(self.final)
        _check_fits(steps, warmup=warm)

        def shape(step: jax.Array) -> jax.Array:
            done = _progress(step, warm, steps)
            return self.final + (1 - self.final) * (1 + jnp.cos(jnp.pi * done)) / 2

        return _warmed(shape, warm, peak_lr)


@dataclasses.dataclass(frozen=True)
class WarmupStableDecay(Schedule):
    """Linear warm-up, a plateau at `peak_lr`, then a decay to `final * peak_lr` over the last steps.

    The decay is `1 - u` when 'linear' and `1 - sqrt(u)` when 'sqrt', with u from 0 to 1.
    Hu et al. 2024, https://arxiv.org/abs/2404.06395; Hägele et al. 2024, https://arxiv.org/abs/2405.18392.

    Attributes:
      warmup: duration of the warm-up.
      decay: duration of the decay.
      final: learning rate of the last step, as a fraction of `peak_lr`.
      shape: 'linear' or 'sqrt'.
    """

    warmup: float = 0.02
    decay: float = 0.2
    final: float = 0.0
    shape: str = 'sqrt'

    def __call__(self, steps: int, peak_lr: ArrayLike) -> optax.Schedule:
        warm, decay = self._phases(steps)
        _check_final(self.final)
        _check_fits(steps, warmup=warm, decay=decay)
        if self.shape not in ('linear', 'sqrt'):
            raise UserError(f"the shape of the decay is {self.shape!r}; it must be 'linear' or 'sqrt'")

        def shape(step: jax.Array) -> jax.Array:
            done = _progress(step, steps - decay, steps)
            return 1 - (1 - self.final) * (done if self.shape == 'linear' else jnp.sqrt(done))

        return _warmed(shape, warm, peak_lr)

    def steady(self, steps: int) -> int:
        return steps - self._phases(steps)[1]

    def _phases(self, steps: int) -> tuple[int, int]:
        """Steps of the warm-up and of the decay."""
        warm, decay = in_steps('warmup', self.warmup, steps), in_steps('decay', self.decay, steps)
        if max(self.warmup, self.decay) < 1 and self.warmup + self.decay <= 1:
            # Fractions of a run fit in it, however both are rounded.
            decay = min(decay, steps - warm)
        return warm, decay


@dataclasses.dataclass(frozen=True)
class LinearDecay(Schedule):
    """Linear warm-up, then a straight line to the last step: `peak_lr (final + (1 - final) (1 - u))`, u from 0 to 1.

    Bergsma et al. 2025, https://arxiv.org/abs/2502.15938, for the choice of a final rate of 0.

    Attributes:
      warmup: duration of the warm-up.
      final: learning rate of the last step, as a fraction of `peak_lr`.
    """

    warmup: float = 0.02
    final: float = 0.0

    def __call__(self, steps: int, peak_lr: ArrayLike) -> optax.Schedule:
        warm = in_steps('warmup', self.warmup, steps)
        _check_final(self.final)
        _check_fits(steps, warmup=warm)

        def shape(step: jax.Array) -> jax.Array:
            return self.final + (1 - self.final) * (1 - _progress(step, warm, steps))

        return _warmed(shape, warm, peak_lr)


@dataclasses.dataclass(frozen=True)
class Constant(Schedule):
    """Linear warm-up, then `peak_lr` to the end.

    Attributes:
      warmup: duration of the warm-up.
    """

    warmup: float = 0.02

    def __call__(self, steps: int, peak_lr: ArrayLike) -> optax.Schedule:
        warm = in_steps('warmup', self.warmup, steps)
        _check_fits(steps, warmup=warm)
        return _warmed(jnp.ones_like, warm, peak_lr)


@dataclasses.dataclass(frozen=True)
class Staircase(Schedule):
    """Linear warm-up, then `peak_lr factor^k` on stair k, from 0, whose first step is the last of the warm-up.

    Every stair is as long.

    Attributes:
      warmup: duration of the warm-up.
      hold: by how much the first stair is longer.
      every: duration of a stair.
      factor: by which a stair is lower than the one before.
    """

    warmup: float = 0.02
    hold: float = 0.0
    every: float = 0.1
    factor: float = 0.5

    def __call__(self, steps: int, peak_lr: ArrayLike) -> optax.Schedule:
        warm, hold, every = (in_steps(name, getattr(self, name), steps) for name in ('warmup', 'hold', 'every'))
        _check_fits(steps, warmup=warm)
        if not 0 < self.factor <= 1:
            raise UserError(f'factor is {self.factor}; it must be a fraction above 0, at most 1')

        def shape(step: jax.Array) -> jax.Array:
            return self.factor ** (jnp.maximum(step - max(warm, 1) - hold, 0) // max(every, 1))

        return _warmed(shape, warm, peak_lr)


def _warmed(shape: Callable[[jax.Array], jax.Array], warm: int, peak_lr: ArrayLike) -> optax.Schedule:
    def learning_rate(count: ArrayLike) -> jax.Array:
        step = jnp.asarray(count, jnp.float32) + 1
        return jnp.multiply(peak_lr, jnp.where(step < warm, step / max(warm, 1), shape(step)))

    return learning_rate


def _progress(step: jax.Array, start: int, end: int) -> jax.Array:
    """0 up to step `start`, linear to 1 at step `end`, then constant."""
    return jnp.clip((step - start) / max(end - start, 1), 0, 1)


def in_steps(name: str, duration: float, steps: int) -> int:
    """A duration in steps. Raises `UserError` for one that is neither a fraction nor a whole number of steps."""
    if not 0 <= duration < math.inf or (duration >= 1 and duration != int(duration)):
        raise UserError(
            f'{name} is {duration}; it must be a fraction of the run from 0 to below 1, or a whole number of steps'
        )
    return round(duration * steps) if duration < 1 else int(duration)


def _check_final(final: float) -> None:
    if not 0 <= final <= 1:
        raise UserError(f'final is {final}; it must be a fraction of peak_lr from 0 to 1')


def _check_fits(steps: int, **parts: int) -> None:
    if sum(parts.values()) > steps:
        named = ' and '.join(f'a {name} of {part} steps' for name, part in parts.items())
        raise UserError(f'the run has {steps} steps, which are too few for {named}')
