"""A request of a user to evaluate a run in another way than its config says."""

import dataclasses

from attnlab.errors import UserError
from attnlab.tasks.task import Task


@dataclasses.dataclass(frozen=True)
class Request:
    """What to evaluate; `None` stands for the default of the task.

    Attributes:
      split: a split of the task.
      multiples: lengths, in multiples of the training length.
      tokens: for a text, the size of the sample evaluated at each length.
      stride: tokens from the start of one window over a text to that of the next.
      examples: for other tasks, the number of examples of each slice.
    """

    split: str | None = None
    multiples: tuple[int, ...] = (1, 2, 4, 8)
    tokens: int | None = None
    examples: int | None = None
    stride: int | None = None

    @property
    def suffix(self) -> str:
        """Appended to the step in the name of the result, so that a sample is not mistaken for the whole split."""
        sample = '' if self.tokens is None else f'-{self.tokens}-tokens'
        return sample if self.stride is None else f'{sample}-stride-{self.stride}'

    def check(self, task: Task, *, allowed: tuple[str, ...]) -> None:
        """Raises `UserError` where `tokens`, `stride` or `examples` is given and not `allowed`."""
        for name in ('tokens', 'stride', 'examples'):
            if name not in allowed and getattr(self, name) is not None:
                raise UserError(f'--{name} does not apply to {type(task).__name__}, which takes --{allowed[0]}')
