"""Models whose attention keeps statistics from one call on the same tokens to the next."""

from typing import Any

from attnlab.blocks.block import Block, mixer_of
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.mixers.softmax.attention import Attention
from attnlab.mixers.softmax.reused import Reuse, ReusedAttention
from attnlab.models.predictor import Stacked, one_stack
from attnlab.typing import State


def reusing(model: Any, reuse: Reuse) -> Any:
    """Wraps the attention of every layer (`ReusedAttention`), in place, and returns the model.

    Raises `UserError` for a layer whose mixer is no attention, and for attention that cannot be wrapped.
    """
    for block in one_stack(model).blocks:
        mixer = mixer_of(block)
        if not isinstance(block, Block) or not isinstance(mixer, Attention):
            raise UserError(
                f'reuse between the steps of a sampler is for models of Attention alone; a layer is a '
                f'{type(mixer).__name__}'
            )
        block.mixer = ReusedAttention(mixer, reuse)
    return model


def begun(model: Stacked, ctx: Context) -> State:
    """Returns the state of such a model before its first call, for rows of inputs of this context."""
    rows, length = model.layout(ctx).positions.shape
    return one_stack(model).init_state(rows, length, model.dtype)
