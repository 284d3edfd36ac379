"""The context that a task gives its model for rows as they are, for what looks into models."""

from attnlab.context import Context
from attnlab.tasks.language import LanguageModelling
from attnlab.tasks.task import Batch, Task, context


def context_of(task: Task, batch: Batch) -> Context:
    """That of a batch; of texts what the task makes of it, as mixers that cannot keep documents apart are told none."""
    return task.context(batch, None) if isinstance(task, LanguageModelling) else context(batch)
