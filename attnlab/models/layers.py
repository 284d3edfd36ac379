"""The layers of a model, for what takes them one by one or looks for some among them."""

from collections.abc import Iterator
from typing import Any

from attnlab.blocks.block import PreNorm
from attnlab.blocks.residual import Streams
from attnlab.context import Context
from attnlab.mixers.mixer import Mixer
from attnlab.models.predictor import Stacked, one_stack
from attnlab.models.stack import Stack
from attnlab.module import modules_of
from attnlab.typing import Features, Tokens


def layers(model: Any) -> Iterator[tuple[int, PreNorm | Mixer]]:
    """The layers of a model in order, by number, each a copy. Raises `UserError` where it is not of one stack."""
    yield from enumerate(one_stack(model).layers())


def stacks(model: Any) -> list[Stack]:
    """Every stack that a model has anywhere: one, several as in a `Pyramid`, or none."""
    return modules_of(model, Stack)


def entered(model: Stacked, inputs: Tokens | Features, ctx: Context) -> tuple[Streams, Context]:
    """What the first layer is called with: the streams, opened on the embedding, and the context of layers.

    `own, ctx = Stack.told(i, layer, streams, ctx)` then is the context of layer `i`, which is called with
    `own.fold_in(i)`, and that of those after it. Raises `UserError` for a model that is not of one stack.
    """
    return one_stack(model).residual.open(model.embed(inputs, ctx)), model.context(ctx, inputs)
