"""A trace of some training steps, in the format that XProf and TensorBoard open."""

import contextlib
import dataclasses
import pathlib
import re
from collections.abc import Iterator

import jax

from attnlab.errors import UserError


@dataclasses.dataclass(frozen=True)
class Profile:
    """The steps that are traced, the first and the last of them, counted from 1."""

    first: int
    last: int

    def __str__(self) -> str:
        return f'step {self.first}' if self.first == self.last else f'steps {self.first} to {self.last}'

    def check(self, taken: int, steps: int) -> None:
        """Raises `UserError` where a run of `steps` that has taken some of them will not take these."""
        if self.last > steps:
            raise UserError(f'--profile asks for {self}; the run has {steps} steps')
        if self.first <= taken:
            raise UserError(f'--profile asks for {self}; the run goes on from step {taken}, after them')


def profile_of(text: str) -> Profile:
    """The steps that a flag names: `10`, or `10:15`, both ends among them. Raises `UserError` for anything else."""
    found = re.fullmatch(r'([1-9]\d*)(?::([1-9]\d*))?', text, flags=re.ASCII)
    if found is None:
        raise UserError(
            f'--profile is {text!r}; it must be a step, such as 10, or the first and the last, such as 10:15'
        )
    first, last = int(found[1]), int(found[2] or found[1])
    if last < first:
        raise UserError(f'--profile is {text!r}, which ends before it begins')
    return Profile(first, last)


class Tracer:
    """Traces the steps of a profile into a work directory, those of the first process; without a profile, none."""

    def __init__(self, profile: Profile | None, workdir: pathlib.Path):
        self._profile = profile if jax.process_index() == 0 else None
        self._workdir = workdir
        self._tracing = False

    def begins(self, number: int) -> bool:
        """Whether the trace begins with this step."""
        return self._profile is not None and number == self._profile.first

    def ends(self, number: int) -> bool:
        """Whether the trace ends with this step."""
        return self._profile is not None and number == self._profile.last

    def start(self) -> None:
        """Begins the trace."""
        jax.profiler.start_trace(str(self._workdir))
        self._tracing = True

    def stop(self) -> str:
        """Writes the trace; returns a line that says how to look at it."""
        jax.profiler.stop_trace()
        self._tracing = False
        return f'profile of {self._profile}: xprof --logdir={self._workdir}, or TensorBoard with its profile plugin'

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """Writes what has been traced where the block ends in the middle of it."""
        try:
            yield
        finally:
            if self._tracing:
                self.stop()
