"""Activations of gated channel mixers that are small in training, taken as zero (CATS)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from attnlab.errors import UserError
from attnlab.models.layers import stacks
from attnlab.module import places_of
from attnlab.nn.activations import activation as activation_called
from attnlab.nn.mlps import GatedMLP
from attnlab.runs.loading import Loaded
from attnlab.signature import checked_fields
from attnlab.tasks.task import Batch
from attnlab.train.rows import rows_of
from attnlab.typing import Sequence

BITS = 16
"""Of a size in float32 that tell its bin, after the sign: bins are 2^-8 of a size wide or less, whatever sizes are."""


class ThresholdedMLP(GatedMLP):
    """A gated network whose hidden channels are zero where the activation is small.

        a = f(x W_g),  y = (a 1[|a| > threshold] * (x W_u)) W_d

    Where a channel is zero its column of `W_u` and its row of `W_d` need not be read; here all products are taken. Lee
    et al. 2024, https://arxiv.org/abs/2404.08763.
    """

    def __init__(self, network: GatedMLP, threshold: float):
        self.activation, self.learned = network.activation, network.learned
        self.gate, self.up, self.down = network.gate, network.up, network.down
        self.threshold = threshold

    def read(self, gate: Float[Array, 'b t f'], up: Float[Array, 'b t f']) -> Sequence:
        """Returns `(a * up) W_d`, `a` the activations that are not small."""
        a = (self.learned or activation_called(self.activation))(gate)
        return self.down(jnp.where(jnp.abs(a) <= self.threshold, jnp.zeros_like(a), a) * up)


def apart(model: Any) -> Any:
    """The model with the layers of its stacks taken apart, in place."""
    for stack in stacks(model):
        stack.take_apart()
    return model


def gated(model: Any) -> list[tuple[Any, str, GatedMLP]]:
    """Where a model has gated channel mixers: the module, its attribute, and the mixer."""
    return places_of(model, GatedMLP)


def sparse(model: Any, thresholds: tuple[float, ...]) -> Any:
    """Gives every gated channel mixer of a model, layers apart, its threshold, in place.

    Raises `UserError` for another number of thresholds than of mixers.
    """
    found = gated(model)
    if len(found) != len(thresholds):
        raise UserError(f'{len(thresholds)} thresholds are given; this model has {len(found)} gated channel mixers')
    for (module, name, network), threshold in zip(found, thresholds, strict=True):
        setattr(module, name, ThresholdedMLP(network, threshold))
    return model


@checked_fields
@dataclasses.dataclass(frozen=True)
class Sparsity:
    """Thresholds that are yet to be found: below them lies a share of what each layer's activations are in training.

    Those of padding count as others do.

    Attributes:
      share: of activations that are taken as zero.
      rows: of training, that they are measured on.
    """

    share: float
    rows: int = 64

    def __post_init__(self) -> None:
        """Raises `UserError` for a share that is none."""
        if not 0 < self.share < 1:
            raise UserError(f'--sparse is {self.share}; it must be above 0 and below 1')

    def found(self, loaded: Loaded) -> tuple[float, ...]:
        """The thresholds of a run's layers.

        Raises `UserError` for a model without gated channel mixers, or with one that these rows do not come to.
        """
        alone = loaded.altered(apart)
        model = alone.model()
        counts: list[Int[np.ndarray, ' n']] = []
        for module, name, network in gated(model):
            counts.append(np.zeros(2**BITS, np.int64))
            setattr(module, name, _Counted(network, counts[-1]))
        if not counts:
            raise UserError('this model has no gated channel mixer, such as that of mlp=swiglu, to make sparse')
        graphdef, variables = nnx.split(model)

        @alone.setup.jit
        def run(variables: nnx.State, batch: Batch) -> Array:
            return alone.setup.task.measure(nnx.merge(graphdef, variables), batch, None)['loss'].total

        for batch in rows_of(alone.setup, 'train', self.rows, at_once=alone.setup.rows_of_part):
            run(variables, batch).block_until_ready()
        jax.effects_barrier()
        unmet = ', '.join(str(place) for place, each in enumerate(counts) if not each.any())
        if unmet:
            raise UserError(
                f'of {len(counts)} gated channel mixers, numbered from 0, {unmet} computed nothing on {self.rows} rows '
                'of training, so that no threshold can be found; leave --sparse out'
            )
        return tuple(threshold_of(each, self.share) for each in counts)


def threshold_of(counts: Int[np.ndarray, 'n'], share: float) -> float:
    """The least end of a bin up to which a share of all that was counted lies."""
    end = np.searchsorted(np.cumsum(counts), share * counts.sum()) + 1
    return float(np.uint32(end << (31 - BITS)).view(np.float32))


class _Counted(GatedMLP):
    """A gated network whose activations are counted by size."""

    def __init__(self, network: GatedMLP, counts: Any):
        self.activation, self.learned = network.activation, network.learned
        self.gate, self.up, self.down = network.gate, network.up, network.down
        self.counts = nnx.static(_Counts(counts))

    def read(self, gate: Float[Array, 'b t f'], up: Float[Array, 'b t f']) -> Sequence:
        sizes = jnp.abs((self.learned or activation_called(self.activation))(gate).astype(jnp.float32))
        bins = jax.lax.bitcast_convert_type(sizes, jnp.uint32) >> (31 - BITS)
        jax.debug.callback(self.counts.add, jnp.zeros(2**BITS, jnp.int32).at[bins.reshape(-1)].add(1))
        return super().read(gate, up)


@dataclasses.dataclass(frozen=True, eq=False)
class _Counts:
    """What is counted, added to in any order."""

    total: Any

    def add(self, more: Any) -> None:
        """Adds what a call has counted."""
        self.total[...] += np.asarray(more)
