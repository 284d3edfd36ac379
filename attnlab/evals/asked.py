"""An evaluation that a user asks for, of a run that has its own."""

import dataclasses

from attnlab.errors import UserError
from attnlab.tasks.task import Task


@dataclasses.dataclass(frozen=True)
class Asked:
    """What to evaluate; `None` is the task's own.

    Attributes:
      split: of the task.
      multiples: lengths, in multiples of the training length.
      tokens: of a text, at each length.
      examples: of each slice of another task.
    """

    split: str | None = None
    multiples: tuple[int, ...] = (1, 2, 4, 8)
    tokens: int | None = None
    examples: int | None = None

    def check(self, task: Task, *, taken: str) -> None:
        """Raises `UserError` where another of `tokens` and `examples` is given than the one that is `taken`."""
        for name in {'tokens', 'examples'} - {taken}:
            if getattr(self, name) is not None:
                raise UserError(f'--{name} is not for {type(task).__name__}, which takes --{taken}')
