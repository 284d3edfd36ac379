"""Where tokens go in a model with experts: how uneven their loads are, and how many choices find no room."""

import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from attnlab.blocks.block import Block, past_prelude, steps
from attnlab.context import Context
from attnlab.data.pipeline import spread
from attnlab.errors import UserError
from attnlab.models.layers import entered, layers
from attnlab.models.predictor import one_stack
from attnlab.nn.experts import MixtureOfExperts, Routing
from attnlab.tables import Column, Table, digits
from attnlab.tasks.given import given
from attnlab.tasks.task import Batch
from attnlab.train.partition import feed
from attnlab.train.setup import Cadence, Setup
from attnlab.typing import Features, Tokens


@dataclasses.dataclass(frozen=True)
class LayerLoads:
    """Of one layer: its index, its choices by expert, and how many of them found no room."""

    layer: int
    load: np.ndarray
    dropped: int

    @property
    def share(self) -> float:
        """The share of choices without room."""
        return self.dropped / int(self.load.sum())

    def over_mean(self, most: bool) -> float:
        """The greatest, or the least, load over the mean."""
        return float((self.load.max() if most else self.load.min()) / self.load.mean())


@dataclasses.dataclass(frozen=True)
class Loads:
    """The results of `ExpertLoads`."""

    layers: Sequence[LayerLoads]

    @property
    def numbers(self) -> Mapping[str, float]:
        """`dropped`, the share of all choices, and `load`, the worst layer's; then both by layer."""
        every = {
            'dropped': sum(each.dropped for each in self.layers) / int(sum(each.load.sum() for each in self.layers)),
            'load': max(each.over_mean(most=True) for each in self.layers),
        }
        for each in self.layers:
            every |= {f'dropped@{each.layer}': each.share, f'load@{each.layer}': each.over_mean(most=True)}
        return every

    def draw(self, folder: pathlib.Path) -> None:
        """Draws nothing."""
        del folder

    def table(self, title: str) -> Table:
        """One row a layer."""
        columns = (
            Column('layer', right=True),
            Column('dropped', digits('.2%'), True),
            Column('greatest load', digits('.2f'), True),
            Column('least', digits('.2f'), True),
        )
        rows = [(each.layer, each.share, each.over_mean(most=True), each.over_mean(most=False)) for each in self.layers]
        return Table('experts', columns, rows, f'{title}: choices without room, and loads over their mean')


@dataclasses.dataclass(frozen=True)
class ExpertLoads:
    """Counts, layer by layer, where the tokens of batches all over a split are sent.

    Batches are as large as parts of steps in training, since the room of an expert is a share of those tokens.

    Attributes:
      cadence: when to run during training.
      split: which split of the task.
      batches: how many batches.
      name: the prefix of its numbers.
    """

    cadence: Cadence
    split: str = 'valid'
    batches: int = 1
    name: str = 'experts'

    def __post_init__(self) -> None:
        """Raises `UserError` for no batches."""
        if self.batches < 1:
            raise UserError(f'batches of ExpertLoads is {self.batches}; it must be at least 1')

    def load_data(self, setup: Setup) -> None:
        """Loads the split. Raises `UserError` where it is missing or smaller than the batches."""
        source, size = setup.task.source(self.split, setup.length), setup.rows_of_part
        if len(source) < self.batches * size:
            raise UserError(
                f'ExpertLoads asks for {self.batches} batches of {size}; the {self.split} split has {len(source)} rows'
            )

    def evaluate(self, setup: Setup, variables: nnx.State) -> Loads:
        """Returns the counts. Raises `UserError` for a model without experts."""
        source, size = setup.task.source(self.split, setup.length), setup.rows_of_part
        places, program = spread(len(source), self.batches * size), setup.program(_program)
        index, count = feed(setup.mesh)
        found: dict[int, list[tuple[np.ndarray, int]]] = {}
        for first in range(0, self.batches * size, size):
            rows = [source[place] for place in places[first + index : first + size : count]]
            batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
            for layer, routed in jax.device_get(program(variables, setup.place(batch))).items():
                found.setdefault(layer, []).append(routed)
        if not found:
            raise UserError('ExpertLoads is for models with experts, mlp=moe; this one has none')
        return Loads(
            [
                LayerLoads(layer, np.sum([load for load, _ in each], axis=0), int(sum(dropped for _, dropped in each)))
                for layer, each in found.items()
            ]
        )


def routings(model: Any, tokens: Tokens | Features, ctx: Context) -> Iterator[tuple[int, Routing]]:
    """The routing of every layer that has experts, by its index."""
    streams, ctx = entered(model, tokens, ctx)
    for index, block in layers(model):
        own, ctx = one_stack(model).told(index, block, streams, ctx)
        for taken in steps(block, streams, own):
            streams = taken.streams
            if taken.name == 'mlp' and isinstance(block, Block) and isinstance(block.mlp, MixtureOfExperts):
                x = past_prelude(block, 'mlp', taken.normed, own)
                yield index, block.mlp.routing(x.reshape(-1, x.shape[-1]))


def _program(setup: Setup) -> Callable[..., dict[int, tuple[jax.Array, jax.Array]]]:
    """The loads and the drops of every layer of a batch."""

    def loads(variables: nnx.State, batch: Batch) -> dict[int, tuple[jax.Array, jax.Array]]:
        model = nnx.merge(setup.graphdef, variables)
        found = routings(model, *given(setup.task, batch))
        return {index: (each.load, jnp.asarray(each.dropped)) for index, each in found}

    return setup.jit(loads, out_shardings=setup.whole)
