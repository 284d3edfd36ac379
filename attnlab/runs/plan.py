"""`attnlab train --dry_run`: what a config would do, with nothing allocated."""

import math

import jax
from rich.console import Console
from rich.table import Table

from attnlab.train import partition
from attnlab.train.cost import executed_flops_per_token, flops_per_token, implementations, state_bytes
from attnlab.train.setup import Setup


def print_plan(setup: Setup, console: Console) -> None:
    """Prints parameters, state, cost, batch, mesh, memory and implementations of the run."""
    setup.check_batch()
    console.print(parameter_table(setup))
    console.print(state_table(setup))
    console.print(cost_table(setup))
    console.print(batch_table(setup))
    console.print(implementation_table(setup))
    for line in setup.undivided():
        console.print(f'whole on every device: {line}', highlight=False, soft_wrap=True)


def parameter_table(setup: Setup) -> Table:
    """One row a parameter: shape, size, optimiser group, sharding."""
    table = _table('parameters', 'parameter', 'shape', '>number', 'group', 'sharding')
    rows = list(partition.describe(setup.abstract.params, setup.mesh))
    for row in rows:
        table.add_row(row.path, _shape(row.shape), f'{math.prod(row.shape):,}', row.group, row.sharding)
    table.add_section()
    table.add_row('all', '', f'{sum(math.prod(row.shape) for row in rows):,}', '', f'mesh {dict(setup.mesh.shape)}')
    return table


def state_table(setup: Setup) -> Table:
    """Bytes that decoding keeps, per sequence."""
    table = _table('state of one sequence, from init_state', '>tokens', '>bytes', '>bytes a token')
    for multiple in (1, 2, 4, 8):
        length = setup.length * multiple
        size = state_bytes(setup, length)
        table.add_row(f'{length:,}', f'{size:,}', f'{size / length:,.1f}')
    return table


def cost_table(setup: Setup) -> Table:
    """Operations per token, and the memory of one device."""
    parameters = sum(leaf.size for leaf in jax.tree.leaves(setup.abstract.params))
    flops, executed = flops_per_token(setup), executed_flops_per_token(setup)
    memory = setup.trace().lower().compile().memory_analysis()
    table = _table('cost of training', 'what', '>value')
    table.add_row('model FLOPs a token', f'{flops:.4g}')
    table.add_row('of 6 x parameters', f'{flops / (6 * parameters):.2f}')
    table.add_row('model FLOPs a step', f'{flops * setup.batch_size * setup.length:.4g}')
    table.add_row('executed, with recomputation, over model', f'{executed / flops:.2f}')
    table.add_row('train state on one device', _bytes(_state_on_device(setup)))
    if memory is not None:
        table.add_row('temporaries on one device (compiled)', _bytes(memory.temp_size_in_bytes))
        table.add_row('in all on one device', _bytes(memory.argument_size_in_bytes + memory.temp_size_in_bytes))
    return table


def batch_table(setup: Setup) -> Table:
    """Shapes of a batch, and how it lies on the mesh."""
    table = _table('batch', 'array', 'shape', 'type', 'sharding')
    for name, array in setup.abstract_batch().items():
        table.add_row(name, _shape(array.shape), str(array.dtype), str(array.sharding.spec))
    return table


def implementation_table(setup: Setup) -> Table:
    """The implementation of each layer's core, and why faster ones were refused."""
    table = _table('kernels', 'layers', 'mixer', 'core', 'implementation', 'refused, and why')
    for entry in implementations(setup):
        reasons = '\n'.join(f'{name}: {reason}' for name, reason in entry.refused)
        table.add_row(_ranges(entry.layers), entry.mixer, entry.core, entry.implementation, reasons)
    return table


def _state_on_device(setup: Setup) -> int:
    leaves = jax.tree.leaves(setup.abstract)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify='left', title_style='bold')
    for column in columns:
        table.add_column(
            column.removeprefix('>'), justify='right' if column.startswith('>') else 'left', overflow='fold'
        )
    return table


def _shape(shape: tuple[int, ...]) -> str:
    return ' '.join(map(str, shape)) or '()'


def _bytes(size: int | float) -> str:
    for unit in ('B', 'KiB', 'MiB'):
        if size < 1024:
            return f'{size:.4g} {unit}'
        size /= 1024
    return f'{size:.4g} GiB'


def _ranges(numbers: tuple[int, ...]) -> str:
    return ', '.join(map(str, numbers)) if len(numbers) < 9 else f'{numbers[0]}, {numbers[1]}, ..., {numbers[-1]}'
