"""Builds a run config into the objects that training, evaluation and planning share; allocates no arrays."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from attnlab.config import build, check_keys
from attnlab.data.text.tokenizers import Untrained
from attnlab.errors import UserError
from attnlab.functional import cores, sequence
from attnlab.functional.indices import check_indices
from attnlab.metrics import Average
from attnlab.models.heads.head import heads
from attnlab.models.stack import missing_layers
from attnlab.random import SEEDS
from attnlab.signature import check_type
from attnlab.tasks.task import Batch, Choosy, Task, Textual
from attnlab.train import partition
from attnlab.train.average import SUFFIX
from attnlab.train.moving import check_followed
from attnlab.train.optimizer import Optimizer, Rates, trained
from attnlab.train.report import Reporting
from attnlab.train.run import QUANTIZATION, newest_checkpoint
from attnlab.train.start import FromRun
from attnlab.train.state import TrainState, abstract_model, initialize, split
from attnlab.train.step import Metrics, Precision, make_step

SAME_BITS = {'xla_gpu_exclude_nondeterministic_ops': True}
"""What XLA is told for GPUs: scattered sums, such as gradients of embeddings, sort their indices first."""


@dataclasses.dataclass(frozen=True)
class Saving:
    """When checkpoints are saved, and how many are kept.

    Attributes:
      every: steps between two checkpoints; the last step is always saved.
      keep: how many of the newest to keep.
    """

    every: int = 500
    keep: int = 2

    def __post_init__(self) -> None:
        """Raises `UserError` for a number below 1."""
        for name in ('every', 'keep'):
            if getattr(self, name) < 1:
                raise UserError(
                    f'config.checkpoint.{name} is {getattr(self, name)}; it must be a whole number of at least 1'
                )


class Scalars(NamedTuple):
    """The numbers of a run that its compiled programs take as arguments: runs that differ only in these share them."""

    seed: Any
    rates: Rates


SCALARS = ('seed', 'optimizer.peak_lr', 'optimizer.weight_decay')
"""The config paths of `Scalars`."""


class Compiled:
    """The model of a run, the shapes of its state, and its compiled programs: everything independent of `Scalars`.

    Programs are compiled on first use, with the run's own precision of matrix products.
    """

    def __init__(self, setup: 'Setup'):
        self._setup = setup
        self._others: dict[tuple[Any, ...], Any] = {}

    @functools.cached_property
    def model(self) -> Any:
        """The model, with shapes in place of arrays."""
        return abstract_model(self._setup.make_model)

    @functools.cached_property
    def graphdef(self) -> nnx.GraphDef:
        """The structure of the model."""
        return split(self.model)[0]

    @functools.cached_property
    def transform(self) -> optax.GradientTransformation:
        """The optimiser's transformation of this model's gradients."""
        return self._setup.optimizer.transform(split(self.model)[1], self._setup.steps)

    @functools.cached_property
    def outputs(self) -> int:
        """The number of classes, or of numbers, that a prediction is about."""
        return self.model.outputs

    @functools.cached_property
    def missing(self) -> bool:
        """Whether a head takes several labels of which some are missing, which are -1."""
        return any(head.missing for head in heads(self.model))

    @functools.cached_property
    def abstract(self) -> TrainState:
        """Shapes, types and shardings of the train state."""
        shapes = jax.eval_shape(self._initialize, self._setup.scalars.seed)
        shardings = partition.state_shardings(shapes, self._setup.mesh)
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings
        )

    @functools.cached_property
    def program(self) -> Any:
        """The training step, `program(state, batch, number, scalars)`; the state is donated."""
        setup, params = self._setup, split(self.model)[1]

        def step(state: TrainState, batch: Batch, number: jax.Array, scalars: Scalars) -> tuple[TrainState, Metrics]:
            transform = setup.optimizer.transform(params, setup.steps, scalars.rates)
            of_trained = functools.partial(trained, multipliers=setup.optimizer.multipliers(params))
            made = make_step(
                self.graphdef,
                setup.task,
                transform,
                seed=scalars.seed,
                accumulate=setup.parts,
                ema=setup.optimizer.ema,
                trained=of_trained,
            )
            return made(state, batch, number)

        return setup.jit(step, donate_argnums=0, out_shardings=(self._shardings(), None))

    @functools.cached_property
    def measure(self) -> Callable[[nnx.State, Batch], dict[str, Average]]:
        """The metrics of a batch, without dropout."""
        return self._setup.jit(self.averages, out_shardings=self._setup.whole)

    def averages(self, variables: nnx.State, batch: Batch) -> dict[str, Average]:
        """The function that `measure` compiles."""
        return self._setup.task.measure(nnx.merge(self.graphdef, variables), batch, None)

    def other(self, make: Callable[..., Any], *options: Hashable) -> Any:
        """The program that `make(setup, *options)` compiles, made on first use: those of evaluators."""
        key = make, *options
        if key not in self._others:
            self._others[key] = make(self._setup, *options)
        return self._others[key]

    @functools.cached_property
    def initialization(self) -> Any:
        """The compiled function from a seed to the state before the first step."""
        # Optimising random numbers is the longest part of a cold start of XLA on CPU, and they run once.
        on_cpu = self._setup.mesh.devices.flat[0].platform == 'cpu'
        options = {'xla_backend_optimization_level': 1} if on_cpu else None
        return self._setup.precision.jit(self._initialize, out_shardings=self._shardings(), compiler_options=options)

    def _initialize(self, seed: jax.Array) -> TrainState:
        average = self._setup.optimizer.ema is not None
        return initialize(self._setup.make_model, self.transform, seed, average=average)

    def _shardings(self) -> TrainState:
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract)


@runtime_checkable
class Evaluation(Protocol):
    """The result of an evaluator."""

    @property
    def numbers(self) -> Mapping[str, float]:
        """The numbers to record, by name."""

    def draw(self, folder: pathlib.Path) -> None:
        """Writes figures, if there are any."""


@runtime_checkable
class Cadence(Protocol):
    """When an evaluator runs."""

    def due(self, step: int, steps: int) -> bool:
        """Whether to run after `step` of `steps`."""


@runtime_checkable
class Evaluator(Protocol):
    """An evaluator as the trainer uses it."""

    @property
    def name(self) -> str:
        """The prefix of its numbers' names."""

    @property
    def cadence(self) -> Cadence:
        """When to run during training."""

    def load_data(self, setup: 'Setup') -> None:
        """Loads its data. Raises `UserError` where they are missing or wrong."""

    def evaluate(self, setup: 'Setup', variables: nnx.State) -> Evaluation:
        """Evaluates a model, from its parameters and buffers."""


@runtime_checkable
class OfSplit(Protocol):
    """An evaluator of one split of the data."""

    @property
    def split(self) -> str:
        """The split that its numbers are of."""


@dataclasses.dataclass(frozen=True, eq=False)
class Setup:
    """A run, built from its config. Holds shapes, not arrays.

    `sharing` returns one that uses the compiled programs of another.
    """

    seed: int
    steps: int
    batch_size: int
    length: int
    accumulate: int
    task: Task
    precision: Precision
    optimizer: Optimizer
    evals: tuple[Evaluator, ...]
    saving: Saving
    reporting: Reporting
    mesh: Mesh
    make_model: Callable[[nnx.Rngs], nnx.Module]
    rows_at_once: int | None = None
    start: FromRun | None = None
    missing_layers: tuple[str, ...] = ()
    shared_with: dataclasses.InitVar['Setup | None'] = None
    compiled: Compiled = dataclasses.field(init=False, repr=False)

    def __post_init__(self, shared_with: 'Setup | None') -> None:
        object.__setattr__(self, 'compiled', Compiled(self) if shared_with is None else shared_with.compiled)

    def sharing(self, other: 'Setup') -> 'Setup':
        """This setup with the compiled programs of another whose config differs only in `SCALARS`."""
        return dataclasses.replace(self, shared_with=other)

    @property
    def model(self) -> Any:
        """The model, with shapes in place of arrays."""
        return self.compiled.model

    @property
    def graphdef(self) -> nnx.GraphDef:
        """The structure of the model."""
        return self.compiled.graphdef

    @property
    def transform(self) -> optax.GradientTransformation:
        """The optimiser's transformation of this model's gradients."""
        return self.compiled.transform

    @property
    def abstract(self) -> TrainState:
        """Shapes, types and shardings of the train state."""
        return self.compiled.abstract

    @property
    def measure(self) -> Callable[[nnx.State, Batch], dict[str, Average]]:
        """The compiled metrics of a batch, without dropout."""
        return self.compiled.measure

    def program(self, make: Callable[..., Any], *options: Hashable) -> Any:
        """What `make(setup, *options)` compiles, for which nothing of `SCALARS` may be read, made on first use."""
        return self.compiled.other(make, *options)

    @property
    def parts(self) -> int:
        """In how many parts, one after the other, a step takes its rows; see `partition.parts`."""
        return partition.parts(*self._division)

    @property
    def rows_of_part(self) -> int:
        """The rows of a part, on all devices together: as many as are known to fit at a time; of any batch."""
        return partition.rows_of_part(*self._division)

    @property
    def _division(self) -> tuple[int, int, int | None, int]:
        return self.batch_size, self.accumulate, self.rows_at_once, partition.batch_shards(self.mesh)

    @property
    def scalars(self) -> Scalars:
        """This run's scalars; the seed in the form that `jax.random.key` takes."""
        seed = np.int64(self.seed).astype(jax.dtypes.canonicalize_dtype(np.int64))
        return Scalars(seed, jax.tree.map(np.float32, self.optimizer.rates))

    @property
    def whole(self) -> NamedSharding:
        """The sharding of what every one of several processes reads: whole on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    def jit(self, function: Callable[..., Any], **options: Any) -> Any:
        """`jax.jit(function, **options)` with this run's precision of matrix products, over its mesh.

        On GPUs, without operations whose results depend on the order in which threads happen to add.
        """
        if self.mesh.devices.flat[0].platform in ('gpu', 'cuda'):
            options['compiler_options'] = SAME_BITS
        return self.precision.jit(cores.on(self.mesh, function), **options)

    def step(self, state: TrainState, batch: Batch, number: np.int32) -> tuple[TrainState, Metrics]:
        """Takes one training step; the state is donated."""
        return self.compiled.program(state, batch, number, self.scalars)

    def initialize(self) -> TrainState:
        """The state before the first step; each device computes only its own shard."""
        state = self.compiled.initialization(self.scalars.seed)
        return state if self.start is None else self.start.restore_into(state, self.abstract)

    @functools.cached_property
    def _feed(self) -> tuple[int, int]:
        """`partition.feed`, found once: of thousands of devices it takes milliseconds."""
        return partition.feed(self.mesh)

    def place(self, batch: Mapping[str, np.ndarray]) -> Batch:
        """Transfers this process's rows of a batch to its devices; the result is the global batch.

        Raises `UserError` for tokens outside the vocabulary and labels beyond the classes, which on the devices would
        be a loss that is NaN.
        """
        task, labels = type(self.task).__name__, batch[self.task.labels]
        if np.issubdtype(batch['tokens'].dtype, np.integer):
            check_indices(f'tokens of {task}', batch['tokens'], self.task.vocab, 'in the vocabulary')
        if np.issubdtype(labels.dtype, np.integer):
            lowest = -1 if self.compiled.missing and labels.ndim > 1 else 0
            check_indices(f'labels ({self.task.labels}) of {task}', labels, self.compiled.outputs, 'classes', lowest)
        _, parts = self._feed
        placed = {}
        for name, rows in batch.items():
            # Processes that share rows all have them whole, though each is to hold some of their tokens.
            shape = (len(rows) * parts, *rows.shape[1:])
            sharding = partition.batch_sharding(self.mesh, shape)
            placed[name] = jax.make_array_from_process_local_data(sharding, rows, shape)
        return placed

    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes, types and sharding of a batch."""
        shapes = {
            name: ((self.batch_size, *row.shape), row.dtype) for name, row in self.task.example(self.length).items()
        }
        return {
            name: jax.ShapeDtypeStruct(shape, dtype, sharding=partition.batch_sharding(self.mesh, shape))
            for name, (shape, dtype) in shapes.items()
        }

    def trace(self) -> jax.stages.Traced:
        """The training step, traced for the shapes of this run."""
        number = jax.ShapeDtypeStruct((), jnp.int32, sharding=self.whole)
        scalars = jax.tree.map(lambda x: jax.ShapeDtypeStruct((), x.dtype, sharding=self.whole), self.scalars)
        return self.compiled.program.trace(self.abstract, self.abstract_batch(), number, scalars)

    def undivided(self) -> list[str]:
        """One line for each parameter and each dimension of a core whose size the mesh does not divide."""
        if self.mesh.size == 1:
            return []
        with cores.undivided() as found:
            jax.eval_shape(cores.on(self.mesh, self.compiled.averages), self.abstract.variables, self.abstract_batch())
        return [*partition.undivided(self.abstract.params, self.mesh), *dict.fromkeys(map(str, found))]

    def time_division(self) -> list[str]:
        """How every kind of call of attention has the tokens of its rows divided; empty where they are not."""
        if self.mesh.shape[sequence.SEQUENCE] == 1:
            return []
        with sequence.choices() as found:
            jax.eval_shape(cores.on(self.mesh, self.compiled.averages), self.abstract.variables, self.abstract_batch())
        return list(dict.fromkeys(map(str, found)))

    def restored(self, workdir: pathlib.Path) -> 'Setup':
        """This setup with the saved parts of the task from a work directory, such as its tokenizer.

        Raises `UserError` where there are parameters of tokens, and not the tokenizer that was trained for them.
        """
        task = self.task.restored(workdir)
        if _untrained(task) and newest_checkpoint(workdir):
            raise UserError(
                f'{workdir} has a checkpoint and no tokenizer.json, so that its tokens are unknown: put back a copy of '
                'it; a fork has that of the run it is from'
            )
        return dataclasses.replace(self, task=task)

    def begun(self) -> 'Setup':
        """This setup with the tokenizer of the run that it begins with, if that one's tokens are taken from there.

        Raises `UserError` where its own is trained, and another.
        """
        if self.start is None or not isinstance(self.task, Textual):
            return self
        theirs = self.restored(self.start.workdir)
        before, after = self.task.tokenizer, cast(Textual, theirs.task).tokenizer
        # Of another size the start is refused by the shapes of what it takes.
        if before == after or before.vocab != after.vocab or not self.start.takes_tokens(self.abstract):
            return self
        if not _untrained(self.task) and before.hash != after.hash:
            raise UserError(
                f'config.start.run is {self.start.run}, whose tokenizer has hash {after.hash}, and that of this run '
                f'{before.hash}: what is taken belongs to other tokens; use the tokenizer of that run, or leave '
                "embedding and head, --config.start.leave=\"('embedding/*', 'head/*')\""
            )
        return theirs

    def load_data(self) -> None:
        """Loads all data, so that errors are raised before anything is written."""
        self.task.source('train', self.length)
        for evaluator in self.evals:
            evaluator.load_data(self)

    def check(self) -> None:
        """Raises `UserError` for a config that cannot be trained as it is given.

        A batch that does not divide into its accumulation parts or over the mesh, or that is divided into parts before
        a head that looks at all of it; a part that follows the batches of training, where nothing tells it of them;
        a model that the task refuses; evaluators whose numbers have one name.
        """
        _check_names(self.evals)
        check_followed(self.model)
        if isinstance(self.task, Choosy):
            self.task.check(self.model)
        partition.check_time(self.mesh, self.length, self.model)
        for head in heads(self.model) if self.parts > 1 else ():
            if head.of_batch:
                raise UserError(
                    f'{type(head).__name__} trains on what occurs in a whole batch, which is taken in {self.parts} '
                    f'parts: config.accumulate is {self.accumulate} and config.rows_at_once is {self.rows_at_once}; '
                    'give accumulate=1 and no rows_at_once, and a smaller batch_size if memory is short'
                )


def _check_names(evals: Sequence[Evaluator]) -> None:
    """Raises `UserError` where an evaluator, or the average evaluated by it, has the name of other numbers.

    Not asked of a run that has been trained, whose parameters can be evaluated all the same.
    """
    taken = {TRAIN: 'training itself'}
    for index, evaluator in enumerate(evals):
        for name in (evaluator.name, f'{evaluator.name}{SUFFIX}'):
            if name in taken:
                raise UserError(
                    f'config.evals[{index}].name is {evaluator.name!r}: its numbers, or those of an average, would be '
                    f'called {name}/... as those of {taken[name]}; give it a name of its own'
                )
            taken[name] = f'config.evals[{index}]'
        if isinstance(evaluator, OfSplit):
            _check_split(index, evaluator.name, evaluator.split)


def _check_split(index: int, name: str, split: str) -> None:
    """Raises `UserError` where an evaluator of one split has the name of another."""
    if name in HELD_OUT and split in (TRAIN, *HELD_OUT) and name != split:
        right = 'on_train' if split == TRAIN else split
        raise UserError(
            f'config.evals[{index}].name is {name!r} and its split is {split!r}: its numbers would be called those of '
            f'another split; --config.evals[{index}].name={right} names them'
        )


TRAIN = 'train'
"""What the numbers of training are called by, as those of an evaluator by its name."""

HELD_OUT = ('valid', 'test')
"""Splits that models are not trained on."""

ROUNDING = 'rounding'
"""The key of what changes the model of a run that is trained with few bits (`attnlab.quantize.training`)."""

KEYS = frozenset(
    {'seed', 'steps', 'batch_size', 'accumulate', 'length', 'task', 'model'}
    | {'optimizer', 'precision', 'mesh', 'evals', 'checkpoint', 'report'}
)
"""The top-level keys of every run config."""

OPTIONAL = frozenset({'start', 'rows_at_once', ROUNDING, QUANTIZATION})
"""Optional top-level keys: the source of the initial parameters, if not the seed; the most rows a device computes; what
has few bits in training; what was made of the model after training."""

TRACELESS = ('report', 'checkpoint', 'mesh')
"""The keys that leave no trace in the numbers of a run but for last bits.

With `rows_at_once` the parts of a step follow from the mesh too, which every start records (`run.other_parts`): what a
part draws or measures for itself, such as dropout and the room of experts, depends on them."""

PARTS = {
    'task': Task,
    'model': Callable,
    'optimizer': Optimizer,
    'precision': Precision,
    'mesh': partition.Axes,
    'evals': tuple,
    'checkpoint': Saving,
    'report': Reporting,
    'start': FromRun | None,
    ROUNDING: Callable | None,
    QUANTIZATION: Callable | None,
}
"""What the parts of a run config build."""


def prepare(config: ConfigDict, devices: Sequence[jax.Device] | None = None) -> Setup:
    """Builds a run config for `devices`; `None`: for all there are.

    Raises `UserError` naming the key that is missing, unknown or wrong.
    """
    check_keys(config, KEYS, OPTIONAL, 'a run config')
    built = {name: build(value, f'config.{name}') for name, value in config.items()}
    for name in ('steps', 'batch_size', 'accumulate', 'length'):
        if type(built[name]) is not int or not 1 <= built[name] < 2**31:
            raise UserError(f'config.{name} is {built[name]!r}; it must be a whole number of at least 1, below 2^31')
    rows = built.get('rows_at_once')
    if rows is not None and (type(rows) is not int or rows < 1):
        raise UserError(f'config.rows_at_once is {rows!r}; it must be a whole number of at least 1, or None')
    if type(built['seed']) is not int or not 0 <= built['seed'] < SEEDS:
        raise UserError(f'config.seed is {built["seed"]!r}; it must be a whole number from 0 to 2^32 - 1')
    for name, kind in PARTS.items():
        check_type(f'config.{name}', built.get(name), kind)
    for index, evaluator in enumerate(built['evals']):
        check_type(f'config.evals[{index}]', evaluator, Evaluator)
    task, precision = built['task'], built['precision']
    changes = [built[name] for name in (ROUNDING, QUANTIZATION) if built.get(name) is not None]

    def make_model(rngs: nnx.Rngs) -> nnx.Module:
        model = built['model'](task.vocab, dtype=precision.activations, rngs=rngs)
        return functools.reduce(lambda model, change: change(model), changes, model)

    return Setup(
        **{name: built[name] for name in ('seed', 'steps', 'batch_size', 'accumulate', 'length', 'optimizer', 'evals')},
        task=task,
        precision=precision,
        saving=built['checkpoint'],
        reporting=built['report'],
        mesh=built['mesh'].make(devices),
        make_model=make_model,
        rows_at_once=rows,
        start=built.get('start'),
        missing_layers=_missing_layers(config.model),
    )


def _untrained(task: Task) -> bool:
    """Whether a task is on text whose tokenizer is still to be trained."""
    return isinstance(task, Textual) and isinstance(task.tokenizer, Untrained)


def _missing_layers(model: ConfigDict) -> tuple[str, ...]:
    """One line for each kind of layer of the model's pattern that the model is too shallow to have."""
    if 'stack' not in model:
        return ()
    stacks = {'stack': model.stack}
    if 'resolutions' in model.stack:
        stacks = {f'stack.resolutions[{i}].stack': each.stack for i, each in enumerate(model.stack.resolutions)}
    if 'fast' in model.stack:
        stacks = {f'stack.{name}': model.stack[name] for name in ('fast', 'slow')}
    return tuple(
        f'no layer is {kind}: config.model.{path}.depth is {stack.depth}, the pattern has {len(stack.blocks)} layers'
        for path, stack in stacks.items()
        for kind in missing_layers(stack)
    )
