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
      tokens: of a text, at each length: a sample of so many.
      stride: tokens from the start of one window over a text to that of the next.
      examples: of each slice of another task.
    """

    split: str | None = None
    multiples: tuple[int, ...] = (1, 2, 4, 8)
    tokens: int | None = None
    examples: int | None = None
    stride: int | None = None

    @property
    def suffix(self) -> str:
        """What the name of the result has besides the step, so that a sample is not taken for the whole."""
        sample = '' if self.tokens is None else f'-{self.tokens}-tokens'
        return sample if self.stride is None else f'{sample}-stride-{self.stride}'

    def check(self, task: Task, *, taken: tuple[str, ...]) -> None:
        """Raises `UserError` where another of `tokens`, `stride` and `examples` is given than those `taken`."""
        for name in ('tokens', 'stride', 'examples'):
            if name not in taken and getattr(self, name) is not None:
                raise UserError(f'--{name} is not for {type(task).__name__}, which takes --{taken[0]}')
