"""`attnlab train --dry_run`: describes the run of a config without allocating arrays."""

import math
import re
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from attnlab.errors import UserError
from attnlab.functional.sequence import SEQUENCE
from attnlab.runs.collectives import Exchange, exchanges
from attnlab.train import partition
from attnlab.train.cost import executed_flops_per_token, flops_per_token, implementations, state_bytes
from attnlab.train.hardware import hardware
from attnlab.train.setup import Setup
from attnlab.train.topologies import Topology
from pallas_kernels import target


def print_plan(setup: Setup, console: Console) -> None:
    """Prints parameters, state, cost, batch, mesh, memory and implementations of the run."""
    setup.check_batch()
    compiled = setup.trace().lower().compile()
    console.print(parameter_table(setup))
    console.print(state_table(setup))
    console.print(cost_table(setup))
    console.print(memory_table(setup, compiled.memory_analysis()))
    console.print(batch_table(setup))
    console.print(implementation_table(setup))
    _print_division(setup, console)


def print_plan_for(setup: Setup, topology: Topology, console: Console) -> None:
    """Prints the same for devices that are not present, with their collectives and an estimate of the time of a step.

    Raises `UserError` where the run does not fit into their memory, before compiling if the train state alone does not.
    """
    setup.check_batch()
    with target.compiling_for(topology.target):
        check_fits(_state_on_device(setup), topology, 'the train state alone takes')
        console.print(parameter_table(setup))
        console.print(state_table(setup))
        console.print(cost_table(setup))
        console.print(batch_table(setup))
        console.print(implementation_table(setup))
        _print_division(setup, console)
        lowered = setup.trace().lower(lowering_platforms=(topology.platform,))
        executed = executed_flops_per_token(setup) * setup.batch_size * setup.length
    if not topology.compiles:
        console.print(memory_table(setup, None))
        console.print(f'lowered for {topology.name}; not known without its compiler: temporaries, collectives')
        console.print(roofline_table(setup, topology, executed, None, []))
        return
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if 'RESOURCE_EXHAUSTED' not in str(error):
            raise
        raise UserError(f'the run does not fit on {topology.name}: {shortage(str(error))}') from error
    memory = compiled.memory_analysis()
    exchanged = exchanges(compiled.as_text())
    console.print(memory_table(setup, memory))
    console.print(exchange_table(exchanged))
    console.print(roofline_table(setup, topology, executed, memory, exchanged))
    needed = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    check_fits(needed, topology, 'train state, batch and temporaries take')


def check_fits(needed: int, topology: Topology, what: str) -> None:
    """Raises `UserError` where one device of the topology has less memory than `needed`, naming the difference."""
    device = hardware(topology.target.kind)
    if device is not None and needed > device.memory:
        raise UserError(
            f'the run does not fit on {topology.name}: {what} {_bytes(needed)} on one device, {topology.target.kind} '
            f'has {_bytes(device.memory)}, too little by {_bytes(needed - device.memory)}'
        )


def shortage(message: str) -> str:
    """The compiler's message about missing memory, in our words."""
    found = re.search(r'memory required for (.*?) \(([\d.]+)G\) exceeds available HBM \(([\d.]+)G\)', message)
    if found is None:
        return message.partition('\n')[0]
    what, needed, there = found[1], float(found[2]), float(found[3])
    what = 'activations and other temporaries' if what == 'HLO temporaries' else what
    return (
        f'{what} take {needed:.4g} GiB on one device, {there:.4g} GiB are there, too little by {needed - there:.4g} GiB'
    )


def _print_division(setup: Setup, console: Console) -> None:
    for line in setup.time_division():
        console.print(f'time over sequence {setup.mesh.shape[SEQUENCE]}: {line}', highlight=False, soft_wrap=True)
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
    """Bytes of decoding state per sequence; one row saying so for a model that does not stream."""
    table = _table('state of one sequence, from init_state', '>tokens', '>bytes', '>bytes a token')
    if not setup.model.streaming:
        table.add_row('any', 'does not stream', '')
        return table
    for multiple in (1, 2, 4, 8):
        length = setup.length * multiple
        size = state_bytes(setup, length)
        table.add_row(f'{length:,}', f'{size:,}', f'{size / length:,.1f}')
    return table


def cost_table(setup: Setup) -> Table:
    """Operations per token, and the memory of one device."""
    parameters = sum(leaf.size for leaf in jax.tree.leaves(setup.abstract.params))
    flops, executed = flops_per_token(setup), executed_flops_per_token(setup)
    table = _table('cost of training', 'what', '>value')
    table.add_row('model FLOPs a token', f'{flops:.4g}')
    table.add_row('of 6 x parameters', f'{flops / (6 * parameters):.2f}')
    table.add_row('model FLOPs a step', f'{flops * setup.batch_size * setup.length:.4g}')
    table.add_row('executed, with recomputation, over model', f'{executed / flops:.2f}')
    return table


def memory_table(setup: Setup, memory: Any) -> Table:
    """Bytes on one device: of the parts of the train state, and of the compiled step where `memory` is given."""
    table = _table('memory of one device', 'what', '>bytes')
    state = setup.abstract
    parts = {'parameters': state.params, 'optimiser': state.opt_state}
    sizes = {name: _on_device(part) for name, part in parts.items()}
    for name, size in (sizes | {'batch': _on_device(setup.abstract_batch())}).items():
        table.add_row(name, _bytes(size))
    table.add_row('train state', _bytes(_state_on_device(setup)))
    if memory is not None:
        table.add_row('activations and other temporaries (compiled)', _bytes(memory.temp_size_in_bytes))
        table.add_row('in all', _bytes(memory.argument_size_in_bytes + memory.temp_size_in_bytes))
    return table


def exchange_table(exchanged: list[Exchange]) -> Table:
    """The collectives of a step."""
    table = _table('collectives of a step, on one device', 'kind', '>calls', '>bytes sent')
    for entry in exchanged:
        table.add_row(entry.kind, f'{entry.calls:,}', _bytes(entry.bytes))
    if not exchanged:
        table.add_row('none', '0', '0 B')
    return table


def roofline_table(setup: Setup, topology: Topology, executed: float, memory: Any, exchanged: list[Exchange]) -> Table:
    """A lower bound on the time of a step from peak rates of a device: operations, memory, links.

    Memory: train state and temporaries are read and written once, the minimum.
    """
    device = hardware(topology.target.kind)
    table = _table('roofline estimate of a step (not measured)', 'what', '>milliseconds', 'assumes')
    if device is None:
        table.add_row(f'no figures for {topology.target.kind}', '', '')
        return table
    moved = 2 * (_state_on_device(setup) + (memory.temp_size_in_bytes if memory is not None else 0))
    times = {
        'operations': (executed / setup.mesh.size / device.flops, f'{device.flops / 1e12:.4g} TFLOP/s, bfloat16'),
        'memory': (moved / device.bandwidth, f'{device.bandwidth / 1e9:.4g} GB/s'),
        'links': (sum(entry.bytes for entry in exchanged) / device.links, f'{device.links / 1e9:.4g} GB/s'),
    }
    for name, (seconds, assumed) in times.items():
        table.add_row(name, f'{1e3 * seconds:.3g}', assumed)
    least = max(seconds for seconds, _ in times.values())
    table.add_section()
    table.add_row('all three at once', f'{1e3 * least:.3g}', device.source)
    table.add_row('one after the other', f'{1e3 * sum(seconds for seconds, _ in times.values()):.3g}', '')
    tokens = setup.batch_size * setup.length
    table.add_row('tokens a second, at most', f'{tokens / least:,.0f}', 'all three at once')
    return table


def batch_table(setup: Setup) -> Table:
    """Shapes of a batch, and its sharding."""
    parts = f', computed in {setup.parts} parts' if setup.parts > 1 else ''
    table = _table(f'batch{parts}', 'array', 'shape', 'type', 'sharding')
    for name, array in setup.abstract_batch().items():
        table.add_row(name, _shape(array.shape), str(array.dtype), str(array.sharding.spec))
    return table


def implementation_table(setup: Setup) -> Table:
    """The implementation of each layer's core, and why faster ones were rejected."""
    table = _table('kernels', 'layers', 'mixer', 'core', 'implementation', 'refused, and why')
    for entry in implementations(setup):
        reasons = '\n'.join(f'{name}: {reason}' for name, reason in entry.refused)
        table.add_row(_ranges(entry.layers), entry.mixer, entry.core, entry.implementation, reasons)
    return table


def _state_on_device(setup: Setup) -> int:
    return _on_device(setup.abstract)


def _on_device(tree: Any) -> int:
    leaves = jax.tree.leaves(tree)
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
