"""What the tests of checkpoints do in processes of their own: `python -m tests.train.checkpoint_process TASK ...`."""

import itertools
import pathlib
import sys

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attnlab.train.checkpoint import Checkpoints

SPECS = {'count': P(), 'matrix': P('a', 'b'), 'moment': P('b'), 'vector': P('a')}


def numbers(step: int) -> dict[str, np.ndarray]:
    """A state that depends on the step, in numpy."""
    rng = np.random.default_rng(step)
    return {
        'count': np.int32(step),
        'matrix': rng.normal(size=(64, 32)).astype(np.float32),
        'moment': rng.normal(size=(8, 128)).astype(np.float32),
        'vector': rng.normal(size=16).astype(np.float32),
    }


def shardings(rows: int) -> dict[str, NamedSharding]:
    """All devices in a mesh of `rows` by what is left."""
    mesh = jax.make_mesh((rows, jax.device_count() // rows), ('a', 'b'), axis_types=(AxisType.Auto,) * 2)
    return {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}


def arrays(step: int, rows: int = 1) -> dict[str, jax.Array]:
    """The state of a step, divided over all devices."""
    values = numbers(step)
    return {
        name: jax.make_array_from_callback(np.shape(values[name]), sharding, values[name].__getitem__)
        for name, sharding in shardings(rows).items()
    }


def abstract(rows: int = 1) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, types and shardings of the state."""
    values = numbers(0)
    return {
        name: jax.ShapeDtypeStruct(np.shape(values[name]), values[name].dtype, sharding=sharding)
        for name, sharding in shardings(rows).items()
    }


def save(directory: pathlib.Path, rows: int) -> None:
    """Saves step 7."""
    checkpoints = Checkpoints(directory)
    checkpoints.save(7, arrays(7, rows), {'step': 7})
    checkpoints.close()


def restore(directory: pathlib.Path, rows: int) -> None:
    """Restores step 7 and compares every shard with what it must be."""
    checkpoints = Checkpoints(directory, notify=fail)
    state, metadata = checkpoints.restore_latest(abstract(rows))
    assert metadata == {'step': 7}
    for name, wanted in numbers(7).items():
        assert state[name].sharding == shardings(rows)[name], name
        for shard in state[name].addressable_shards:
            np.testing.assert_array_equal(shard.data, wanted[shard.index])
    checkpoints.close()


def forever(directory: pathlib.Path, rows: int) -> None:
    """Goes on from the newest checkpoint, checking it, and saves every step until killed."""
    checkpoints = Checkpoints(directory, every=1, keep=2, notify=fail)
    restored = checkpoints.resume_latest(abstract(rows))
    start = 0
    if restored is not None:
        state, metadata = restored
        start = metadata['step']
        for name, wanted in numbers(start).items():
            np.testing.assert_array_equal(state[name], wanted)
    print('going', start, flush=True)
    for step in itertools.count(start + 1):
        checkpoints.save(step, arrays(step, rows), {'step': step, 'sums': {'loss': 0.1 + step}})
        print('saving', step, flush=True)


def fail(line: str) -> None:
    """Nothing may be reported."""
    raise AssertionError(line)


if __name__ == '__main__':
    task, directory, devices, rows, *distributed = sys.argv[1:]
    jax.config.update('jax_num_cpu_devices', int(devices))
    if distributed:
        jax.config.update('jax_cpu_collectives_implementation', 'gloo')
        port, index, count = distributed
        jax.distributed.initialize(f'localhost:{port}', num_processes=int(count), process_id=int(index))
    {'save': save, 'restore': restore, 'forever': forever}[task](pathlib.Path(directory), int(rows))
