"""Sharding: a mesh of named axes, and rules that map the logical axes of a parameter to axes of the mesh.

Whatever has the structure of the parameters is sharded like them, such as the optimiser's moments; a batch is divided
by rows over `data`, `fsdp` and `expert`, and by tokens over `sequence`.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from attnlab.blocks.block import mixer_of
from attnlab.errors import UserError
from attnlab.functional.cores import ROWS
from attnlab.functional.sequence import SEQUENCE
from attnlab.mixers.mixer import Mixer
from attnlab.models.predictor import Predictor, Stacked
from attnlab.models.stack import Stack

RULES = {
    'embed': 'fsdp',
    'heads': 'tensor',
    'mlp': 'tensor',
    'vocab': 'tensor',
    'experts': 'expert',
    'state': None,
    None: None,
}
"""Mesh axis of each logical axis in `attnlab.nn.parameter.AXES`."""


@dataclasses.dataclass(frozen=True)
class Axes:
    """The size of each axis of the mesh; the product is the number of devices.

    Attributes:
      data: replicas of the model, each with its own rows; -1 uses all devices left by the other axes.
      fsdp: devices that share the model width of every parameter, each with its own rows.
      expert: devices that share the experts of a mixture, each with its own rows.
      tensor: devices that share heads, hidden width and vocabulary.
      sequence: devices that share the tokens of a row.
    """

    data: int = -1
    fsdp: int = 1
    expert: int = 1
    tensor: int = 1
    sequence: int = 1

    def make(self, devices: Sequence[jax.Device] | None = None) -> Mesh:
        """Returns the mesh of `devices`; `None`: all devices.

        Raises `UserError` when the product of the sizes is not their number.
        """
        sizes = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        count = jax.device_count() if devices is None else len(devices)
        open_axes = [name for name, size in sizes.items() if size == -1]
        given = math.prod(size for size in sizes.values() if size != -1)
        if len(open_axes) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
            raise UserError(f'the sizes of a mesh must be at least 1, except one that may be -1; got {_named(sizes)}')
        if count % given or (not open_axes and count != given):
            wanted = f'a multiple of {given}' if open_axes else f'{given}'
            raise UserError(f'the mesh {_named(sizes)} needs {wanted} devices; there are {count}')
        sizes |= dict.fromkeys(open_axes, count // given)
        types = (AxisType.Auto,) * len(sizes)
        return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=devices)


@dataclasses.dataclass(frozen=True)
class Placement:
    """The sharding of one parameter over the mesh.

    Attributes:
      path: such as `stack/blocks/0/mixer/query/weight`.
      shape: of the full parameter.
      group: of the optimiser.
      spec: the mesh axis of each dimension.
      whole: why a dimension that the rules would divide is replicated, such as `mlp 10 over tensor 4`.
    """

    path: str
    shape: tuple[int, ...]
    group: str
    spec: PartitionSpec
    whole: tuple[str, ...]

    @property
    def sharding(self) -> str:
        """The sharding in words, such as `- fsdp tensor`."""
        divided = ' '.join(axis or '-' for axis in self.spec) if any(self.spec) else 'whole'
        return divided + ''.join(f' (does not divide: {reason})' for reason in self.whole)


def describe(params: nnx.State, mesh: Mesh) -> Iterator[Placement]:
    """Yields the placement of each parameter, in the order of the tree's leaves."""
    for path, variable in jax.tree.leaves_with_path(params, is_leaf=_is_variable):
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        metadata = variable.get_metadata()
        spec, whole = _place(metadata['axes'], variable.shape, mesh)
        yield Placement(name, tuple(variable.shape), metadata['group'], spec, whole)


def undivided(params: nnx.State, mesh: Mesh) -> list[str]:
    """Returns one line for each parameter that the rules would divide but whose size the mesh does not divide."""
    return [f'{row.path}: {", ".join(row.whole)}' for row in describe(params, mesh) if row.whole]


def state_shardings(state: Any, mesh: Mesh) -> Any:
    """Returns the tree `state` with every array replaced by its sharding.

    Parameters, and optimiser state of the same structure, are divided by the rules; everything else is replicated on
    every device. `state` may be abstract.
    """

    def place(node: Any) -> Any:
        if not _is_variable(node):
            return NamedSharding(mesh, PartitionSpec())
        # The variables of an optimiser that updates only some parameters may be empty.
        axes = node.get_metadata()['axes']
        return jax.tree.map(lambda leaf: NamedSharding(mesh, _place(axes, leaf.shape, mesh)[0]), node)

    return jax.tree.map(place, state, is_leaf=_is_variable)


def batch_sharding(mesh: Mesh, shape: tuple[int, ...]) -> NamedSharding:
    """The sharding of an array of a batch: rows over `ROWS`; tokens, if they divide, over `sequence`."""
    devices = mesh.shape[SEQUENCE]
    divided = devices > 1 and len(shape) > 1 and shape[1] % devices == 0
    return NamedSharding(mesh, PartitionSpec(ROWS, *((SEQUENCE,) if divided else ())))


def check_time(mesh: Mesh, length: int, model: Predictor) -> None:
    """Raises `UserError` where the tokens of a row do not divide over `sequence`, or a mixer does not support it."""
    devices = mesh.shape[SEQUENCE]
    if devices == 1:
        return
    if length % devices:
        raise UserError(f'config.length is {length}; with config.mesh.sequence it must be a multiple of {devices}')
    stack = model.stack if isinstance(model, Stacked) else None
    mixers = [mixer_of(block) for block in stack.blocks] if isinstance(stack, Stack) else [stack or model]
    for mixer in mixers:
        if not (isinstance(mixer, Mixer) and mixer.divides_time):
            raise UserError(
                f'config.mesh.sequence is {devices}, and this {type(mixer).__name__} has no form that divides time; '
                'attnlab zoo lists the recipes that have one: sequence'
            )


def batch_shards(mesh: Mesh) -> int:
    """The number of parts into which the rows of a batch are divided."""
    return math.prod(mesh.shape[axis] for axis in ROWS)


def parts(batch_size: int, accumulate: int, rows_at_once: int | None, shards: int) -> int:
    """In how many parts, one after the other, a step takes its rows.

    Args:
      batch_size: rows of a step.
      accumulate: the number of parts; with `rows_at_once` the least number.
      rows_at_once: the most rows of a part on one device; `None`: any.
      shards: devices that have rows of their own.

    Raises `UserError` where no such number divides a batch.
    """
    count = _dividing(batch_size, accumulate, rows_at_once, shards)
    if count is not None:
        return count
    more, limit = ('', '')
    if rows_at_once is not None:
        more, limit = ' or more', f', at most {rows_at_once} a device (config.rows_at_once)'
    raise UserError(
        f'config.batch_size, {batch_size}, does not divide into config.accumulate={accumulate}{more} parts '
        f'of a multiple of {shards} rows (the devices of the mesh axes data, fsdp and expert){limit}'
    )


def rows_of_part(batch_size: int, accumulate: int, rows_at_once: int | None, shards: int) -> int:
    """The rows of one of `parts`, on all devices together; the arguments are the same.

    Where the devices at hand do not divide a batch, the most of no more than a part, and at least one a device: only
    training needs equal parts.
    """
    count = _dividing(batch_size, accumulate, rows_at_once, shards)
    if count is not None:
        return batch_size // count
    rows = batch_size // (accumulate * shards)
    return shards * max(1, min(rows, rows_at_once or rows))


def _dividing(batch_size: int, accumulate: int, rows_at_once: int | None, shards: int) -> int | None:
    """The number of `parts`; `None` where there is none."""
    most = accumulate if rows_at_once is None else batch_size // shards
    for count in range(accumulate, most + 1):
        rows, rest = divmod(batch_size, count * shards)
        if rest == 0 and rows > 0 and (rows_at_once is None or rows <= rows_at_once):
            return count
    return None


def feed(mesh: Mesh) -> tuple[int, int]:
    """The part of every batch that this process supplies, as `(index, count)`.

    Processes whose devices share rows, because `tensor` or `sequence` spans them, supply the same part.
    Raises `UserError` when the rows of two processes overlap without being equal.
    """
    rows = mesh.devices.reshape(batch_shards(mesh), -1)
    owned: dict[int, set[int]] = {}
    for shard, devices in enumerate(rows):
        for device in devices:
            owned.setdefault(device.process_index, set()).add(shard)
    parts = sorted({tuple(sorted(shards)) for shards in owned.values()})
    if sum(map(len, parts)) != len(rows) or len({len(part) for part in parts}) != 1:
        raise UserError(f'the mesh {dict(mesh.shape)} does not divide the rows among the processes: {parts}')
    return parts.index(tuple(sorted(owned[jax.process_index()]))), len(parts)


def _place(axes: tuple[str | None, ...], shape: tuple[int, ...], mesh: Mesh) -> tuple[PartitionSpec, tuple[str, ...]]:
    """The mesh axis of each dimension, and why one is replicated; the dimension of stacked layers always is."""
    logical = (None,) * (len(shape) - len(axes)) + axes
    spec: list[str | None] = []
    whole = []
    for name, size in zip(logical, shape, strict=True):
        axis = RULES[name]
        if axis is None or mesh.shape[axis] == 1 or axis in spec:
            spec.append(None)
        elif size % mesh.shape[axis]:
            spec.append(None)
            whole.append(f'{name} {size} over {axis} {mesh.shape[axis]}')
        else:
            spec.append(axis)
    return PartitionSpec(*spec), tuple(whole)


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _named(sizes: dict[str, int]) -> str:
    return ' '.join(f'{name}={size}' for name, size in sizes.items())
