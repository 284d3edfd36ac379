"""What a task gives its model for rows as they are, for what looks into models."""

from attnlab.context import Context
from attnlab.tasks.language import LanguageModelling
from attnlab.tasks.long_range import LongRange
from attnlab.tasks.task import Batch, Task, context
from attnlab.typing import Features, Tokens


def given(task: Task, batch: Batch) -> tuple[Tokens | Features, Context]:
    """The inputs of a batch and their context: of pairs of documents a row for each, as the task reads them."""
    if documents_of(task) > 1:
        assert isinstance(task, LongRange)
        batch = {**batch, **task.apart(batch)}
    return batch['tokens'], context_of(task, batch)


def documents_of(task: Task) -> int:
    """How many documents of a row the task reads as rows of their own."""
    return task.data.kind.documents if isinstance(task, LongRange) else 1


def context_of(task: Task, batch: Batch) -> Context:
    """That of a batch; of texts what the task makes of it, as mixers that cannot keep documents apart are told none."""
    return task.context(batch, None) if isinstance(task, LanguageModelling) else context(batch)
