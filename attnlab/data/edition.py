"""Data that are drawn from seeds, and what tells apart what one seed drew before and draws now."""

from typing import ClassVar


class Editioned:
    """A distribution of examples: a frozen dataclass whose fields set the difficulty.

    Attributes:
      edition: raised where examples drawn from the same seed become others.
    """

    edition: ClassVar[int] = 1

    @property
    def name(self) -> str:
        """All fields and the edition, if not the first: what identifies the examples of a seed."""
        return repr(self) if self.edition == 1 else f'{self!r}, edition {self.edition}'
