"""`attnlab analyse`: statistics of a trained model's attention and activations, and its loss when quantized."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.analysis import statistics
from attnlab.analysis.question import Question
from attnlab.blocks.block import mixer_of, past_prelude, steps
from attnlab.figures import layer_curves
from attnlab.mixers.mixer import ReadsWeights
from attnlab.models.layers import entered, layers
from attnlab.models.predictor import one_stack
from attnlab.quantize.layers import has_few_bits, simulated
from attnlab.quantize.states import without_storage
from attnlab.runs.loading import Loaded
from attnlab.tables import Column, Printer, Table, digits
from attnlab.tasks.given import given
from attnlab.tasks.task import Batch, Task

ATTENTION = ('sink_rate', 'entropy', 'sparsity')
ACTIVATIONS = ('kurtosis', 'max_abs')


@dataclasses.dataclass(frozen=True)
class Examination:
    """The results of `analyse_run`.

    Attributes:
      layers: the statistics of every layer by name; those of `ATTENTION` only where the mixer is attention, and where
        its state is stored, as they are before it is.
      losses: the task's loss by the number of bits of weights and activations; 32 is the model as it is.
    """

    layers: tuple[Mapping[str, float], ...]
    losses: Mapping[int, float]

    def numbers(self) -> dict[str, Any]:
        """The results as plain data: means over layers, then everything."""
        means = {name: float(np.mean([layer[name] for layer in self.layers_with(name)])) for name in self.names()}
        return {**means, 'max_abs': max(layer['max_abs'] for layer in self.layers)} | {
            'layers': [dict(layer) for layer in self.layers],
            'loss_by_bits': {str(bits): loss for bits, loss in self.losses.items()},
        }

    def names(self) -> list[str]:
        """The names of the statistics that some layer has."""
        return [name for name in (*ATTENTION, *ACTIVATIONS) if self.layers_with(name)]

    def layers_with(self, name: str) -> list[Mapping[str, float]]:
        """The layers that have the statistic `name`."""
        return [layer for layer in self.layers if name in layer]


def analyse_run(question: Question, printer: Printer, bits: tuple[int, ...], *, asked: bool = True) -> Examination:
    """Analyses a checkpoint on rows of a split, and writes `analysis/<step>.json` and a figure.

    Where the bits are not what was asked for but a default, a run whose maps are quantized is not rounded again. Raises
    `UserError` for rows that do not exist, a model without layers to analyse, bits below 2, and bits that are asked
    of such a run.
    """
    loaded = question.loaded
    question.check_layers('which has no layers to analyse')
    one_stack(loaded.setup.model)
    examples = question.batches()
    few = has_few_bits(loaded.model())
    bits = bits if asked or not few else ()
    found = Examination(tuple(_layers(loaded, examples)), _losses(loaded, examples, bits))
    curves = {name: [layer.get(name, np.nan) for layer in found.layers] for name in found.names()}
    tables = (_layer_table(found, question.title), _bits_table(found.losses, few))
    record = question.record() | {'bits': list(bits)}
    question.report(printer, '', record, found.numbers(), tables, functools.partial(layer_curves, curves))
    return found


def _layers(loaded: Loaded, rows: list[Batch]) -> Iterator[dict[str, float]]:
    """The statistics of every layer, averaged over the rows."""
    examine = loaded.setup.jit(functools.partial(_examine, loaded.setup.task))
    model = loaded.model()
    found = [examine(model, row) for row in rows]
    for layer in zip(*jax.device_get(found), strict=True):
        means = {name: float(np.mean([row[name] for row in layer])) for name in layer[0]}
        if 'sink_mass' in means:
            means['sink_rate'] = float(statistics.sink_rate(jnp.stack([row['sink_mass'] for row in layer])))
            del means['sink_mass']
        yield {**means, 'max_abs': float(max(row['max_abs'] for row in layer))}


def _examine(task: Task, model: Any, batch: Mapping[str, jax.Array]) -> list[dict[str, jax.Array]]:
    streams, ctx = entered(model, *given(task, batch))
    segments = ctx.segments_or_ones()
    real = segments > 0
    found = []
    for index, block in layers(model):
        numbers = {}
        own, ctx = model.stack.told(index, block, streams, ctx)
        taken = list(steps(block, streams, own))
        mixer = without_storage(mixer_of(block))
        if isinstance(mixer, ReadsWeights):
            weights, visible = mixer.read_weights(past_prelude(block, 'mixer', taken[0].normed, own), own)
            seen = jnp.broadcast_to(visible[:, None], weights.shape)
            numbers = {
                'sink_mass': statistics.sink_mass(weights, visible, segments),
                'entropy': jnp.mean(statistics.entropy(weights), where=real[:, None]),
                'sparsity': statistics.sparsity(weights, seen & real[:, None, :, None]),
            }
        streams = taken[-1].streams
        wide = model.stack.residual.close(streams).astype(jnp.float32)
        sizes = jnp.abs(wide) * real[..., None]
        found.append(
            {**numbers, 'kurtosis': jnp.mean(statistics.kurtosis(wide), where=real), 'max_abs': jnp.max(sizes)}
        )
    return found


def _losses(loaded: Loaded, rows: list[Batch], bits: tuple[int, ...]) -> dict[int, float]:
    """The loss on the rows, as the run is and for each number of bits."""
    losses = {32: _loss(loaded, rows)}
    for count in bits:
        losses[count] = _loss(loaded.altered(simulated(count)), rows)
    return losses


def _loss(loaded: Loaded, rows: list[Batch]) -> float:
    found = [jax.device_get(loaded.setup.measure(loaded.variables, row)['loss']) for row in rows]
    return float(sum(average.total for average in found) / sum(average.count for average in found))


def _layer_table(found: Examination, title: str) -> Table:
    columns = [Column(name, digits('.4g'), right=True, rank=rank) for rank, name in enumerate(found.names())]
    rows = [(index, *(layer.get(name) for name in found.names())) for index, layer in enumerate(found.layers)]
    return Table('layers', [Column('layer', right=True), *columns], rows, title)


def _bits_table(losses: Mapping[int, float], few: bool) -> Table:
    if few:
        column = Column('loss', digits('.4f'), True)
        return Table('bits', (column,), [(losses[32],)], 'linear maps have few bits, and are not rounded again')
    columns = (
        Column('bits', right=True),
        Column('loss', digits('.4f'), True),
        Column('more than before', digits('+.4f'), True),
    )
    rows = [(bits, loss, None if bits == 32 else loss - losses[32]) for bits, loss in losses.items()]
    return Table('bits', columns, rows, 'weights and activations rounded')
