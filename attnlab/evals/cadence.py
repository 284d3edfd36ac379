"""When an evaluator runs."""

import dataclasses

from attnlab.train.setup import Cadence


@dataclasses.dataclass(frozen=True)
class EveryNSteps(Cadence):
    """After every `n`th step, and after the last."""

    n: int

    def due(self, step: int, steps: int) -> bool:
        """Whether to run after `step` of `steps`."""
        return step % self.n == 0 or step == steps


@dataclasses.dataclass(frozen=True)
class AtEnd(Cadence):
    """After the last step only."""

    def due(self, step: int, steps: int) -> bool:
        """Whether to run after `step` of `steps`."""
        return step == steps
