"""From a config to everything that training, evaluating and planning share; nothing is allocated here."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from attnlab.config import build
from attnlab.errors import UserError
from attnlab.functional import cores
from attnlab.metrics import Average
from attnlab.tasks.task import Batch, Task
from attnlab.train import partition
from attnlab.train.optimizer import Rates
from attnlab.train.report import Reporting
from attnlab.train.start import FromRun
from attnlab.train.state import TrainState, abstract_model, initialize, split
from attnlab.train.step import Metrics, Precision, make_step


@dataclasses.dataclass(frozen=True)
class Saving:
    """When checkpoints are made, and how many of them stay.

    Attributes:
      every: steps between two checkpoints; the last step is always saved.
      keep: how many of the newest to keep.
    """

    every: int = 500
    keep: int = 2


class Scalars(NamedTuple):
    """The numbers of a run that its compiled programs take as arguments: runs that differ in them alone share those."""

    seed: Any
    rates: Rates


SCALARS = ('seed', 'optimizer.peak_lr', 'optimizer.weight_decay')
"""Where a config holds them."""

COMPILED = ('model', 'graphdef', 'transform', 'abstract', 'program', 'initialization', 'measure')
"""What of a setup does not depend on them."""


@dataclasses.dataclass(frozen=True, eq=False)
class Setup:
    """A run's config, built: what to train, on what, how. Holds shapes, not arrays."""

    seed: int
    steps: int
    batch_size: int
    length: int
    accumulate: int
    task: Task
    precision: Precision
    optimizer: Any
    evals: tuple[Any, ...]
    saving: Saving
    reporting: Reporting
    mesh: Mesh
    make_model: Callable[[nnx.Rngs], nnx.Module]
    start: FromRun | None = None

    @functools.cached_property
    def model(self) -> Any:
        """The model, with shapes in place of arrays."""
        return abstract_model(self.make_model)

    @functools.cached_property
    def graphdef(self) -> nnx.GraphDef:
        """The structure of the model."""
        return split(self.model)[0]

    @functools.cached_property
    def transform(self) -> optax.GradientTransformation:
        """The optimiser's transformation of this model's gradients."""
        return self.optimizer.transform(split(self.model)[1], self.steps)

    @functools.cached_property
    def abstract(self) -> TrainState:
        """Shapes, types and shardings of the train state."""
        shapes = jax.eval_shape(self._initialize, self.scalars.seed)
        shardings = partition.state_shardings(shapes, self.mesh)
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings
        )

    @functools.cached_property
    def program(self) -> Any:
        """The compiled training step, `program(state, batch, number, scalars)`; it consumes the state it is given."""
        params = split(self.model)[1]

        def step(state: TrainState, batch: Batch, number: jax.Array, scalars: Scalars) -> tuple[TrainState, Metrics]:
            transform = self.optimizer.transform(params, self.steps, scalars.rates)
            made = make_step(self.graphdef, self.task, transform, seed=scalars.seed, accumulate=self.accumulate)
            return made(state, batch, number)

        return jax.jit(cores.on(self.mesh, step), donate_argnums=0, out_shardings=(self._shardings(), None))

    @property
    def scalars(self) -> Scalars:
        """This run's own; the seed as `jax.random.key` reads it."""
        seed = np.int64(self.seed).astype(jax.dtypes.canonicalize_dtype(np.int64))
        return Scalars(seed, Rates(*map(np.float32, self.optimizer.rates)))

    def step(self, state: TrainState, batch: Batch, number: np.int32) -> tuple[TrainState, Metrics]:
        """Takes one training step; consumes the state it is given."""
        return self.program(state, batch, number, self.scalars)

    @functools.cached_property
    def measure(self) -> Callable[[nnx.State, Batch], dict[str, Average]]:
        """The compiled metrics of a batch, without dropout."""
        return jax.jit(self._measure)

    @property
    def _measure(self) -> Callable[[nnx.State, Batch], dict[str, Average]]:
        """The metrics of a batch, without dropout, to be compiled."""
        return cores.on(
            self.mesh, lambda variables, batch: self.task.measure(nnx.merge(self.graphdef, variables), batch, None)
        )

    @functools.cached_property
    def initialization(self) -> Any:
        """The compiled state before the first step, by seed."""
        # Random numbers take XLA for CPUs longer to optimise than anything else of a cold start, and run once.
        on_cpu = self.mesh.devices.flat[0].platform == 'cpu'
        options = {'xla_backend_optimization_level': 1} if on_cpu else None
        return jax.jit(self._initialize, out_shardings=self._shardings(), compiler_options=options)

    def initialize(self) -> TrainState:
        """The state before the first step, each device making only its own shard."""
        state = self.initialization(self.scalars.seed)
        return state if self.start is None else self.start.into(state, self.abstract)

    def sharing(self, other: 'Setup') -> 'Setup':
        """This setup with the compiled programs of another, whose config differs in `SCALARS` alone."""
        shared = dataclasses.replace(self)
        shared.__dict__.update({name: getattr(other, name) for name in COMPILED})
        return shared

    def place(self, batch: Mapping[str, np.ndarray]) -> Batch:
        """Puts this process's rows of a batch onto its devices; the result is the global batch."""
        sharding = partition.batch_sharding(self.mesh)
        return {name: jax.make_array_from_process_local_data(sharding, rows) for name, rows in batch.items()}

    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes, types and sharding of a batch."""
        sharding = partition.batch_sharding(self.mesh)
        example = self.task.example(self.length)
        return {
            name: jax.ShapeDtypeStruct((self.batch_size, *row.shape), row.dtype, sharding=sharding)
            for name, row in example.items()
        }

    def trace(self) -> jax.stages.Traced:
        """The training step, traced for the shapes of this run."""
        replicated = NamedSharding(self.mesh, PartitionSpec())
        number = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
        scalars = jax.tree.map(lambda x: jax.ShapeDtypeStruct((), x.dtype, sharding=replicated), self.scalars)
        return self.program.trace(self.abstract, self.abstract_batch(), number, scalars)

    def undivided(self) -> list[str]:
        """What the mesh would divide and cannot, a line each: parameters, and dimensions of cores."""
        with cores.undivided() as found:
            jax.eval_shape(self._measure, self.abstract.variables, self.abstract_batch())
        return [*partition.undivided(self.abstract.params, self.mesh), *dict.fromkeys(map(str, found))]

    def load_data(self) -> None:
        """Loads what training and evaluating will read: what is wrong with it is said before anything is written."""
        if self.start is not None:
            self.start.check()
        self.task.source('train', self.length)
        for evaluator in self.evals:
            evaluator.load_data(self)

    def check_batch(self) -> None:
        """Raises `UserError` where a batch does not divide into its parts, or those over the mesh."""
        part, rest = divmod(self.batch_size, self.accumulate)
        shards = partition.batch_shards(self.mesh)
        if rest or part % shards:
            raise UserError(
                f'config.batch_size, {self.batch_size}, does not divide into config.accumulate={self.accumulate} parts '
                f'of a multiple of {shards} rows (the devices of the mesh axes data and fsdp)'
            )

    def _initialize(self, seed: jax.Array) -> TrainState:
        return initialize(self.make_model, self.transform, seed)

    def _shardings(self) -> TrainState:
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract)


KEYS = frozenset(
    {'seed', 'steps', 'batch_size', 'accumulate', 'length', 'task', 'model'}
    | {'optimizer', 'precision', 'mesh', 'evals', 'checkpoint', 'report'}
)
"""The top level of every run config."""

OPTIONAL = frozenset({'start'})
"""What it may have besides: where the parameters come from, if not from the seed."""


def prepare(config: ConfigDict) -> Setup:
    """Builds a run config. Raises `UserError` naming the key that is missing, unknown or wrong."""
    if set(config) - OPTIONAL != KEYS:
        unknown = sorted(set(config) - KEYS - OPTIONAL)
        raise UserError(f'a run config lacks {sorted(KEYS - set(config))} and has the unknown {unknown}')
    built = {name: build(value, f'config.{name}') for name, value in config.items()}
    for name in ('steps', 'batch_size', 'accumulate', 'length'):
        if type(built[name]) is not int or built[name] < 1:
            raise UserError(f'config.{name} is {built[name]!r}; it wants a whole number from 1')
    task, precision = built['task'], built['precision']
    jax.config.update('jax_default_matmul_precision', precision.matmul)
    return Setup(
        **{name: built[name] for name in ('seed', 'steps', 'batch_size', 'accumulate', 'length', 'optimizer', 'evals')},
        task=task,
        precision=precision,
        saving=built['checkpoint'],
        reporting=built['report'],
        mesh=built['mesh'].make(),
        make_model=lambda rngs: built['model'](task.vocab, dtype=precision.activations, rngs=rngs),
        start=built.get('start'),
    )
