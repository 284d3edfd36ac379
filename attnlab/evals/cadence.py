"""When an evaluator runs."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class EveryNSteps:
    """After every `n`th step, and after the last."""

    n: int

    def due(self, step: int, steps: int) -> bool:
        """Whether to run after `step` of `steps`."""
        return step % self.n == 0 or step == steps


@dataclasses.dataclass(frozen=True)
class AtEnd:
    """After the last step only."""

    def due(self, step: int, steps: int) -> bool:
        """Whether to run after `step` of `steps`."""
        return step == steps
