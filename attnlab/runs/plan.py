"""`attnlab train --dry_run`: describes the run of a config without allocating arrays."""

import math
import re
from typing import Any

import jax
from flax import nnx

from attnlab.blocks.block import Block
from attnlab.errors import UserError
from attnlab.functional.sequence import SEQUENCE
from attnlab.nn.mlps import ConvolvedMLP
from attnlab.nn.preludes import Canon
from attnlab.runs.collectives import Exchange, exchanges
from attnlab.runs.traffic import traffic
from attnlab.tables import Column, Printer, Table, digits, in_bytes
from attnlab.train import partition
from attnlab.train.cost import executed_flops_per_token, flops_per_token, implementations, parameters, state_bytes
from attnlab.train.hardware import hardware
from attnlab.train.setup import Setup
from attnlab.train.topologies import Topology
from pallas_kernels import target, tuning


def print_plan(setup: Setup, printer: Printer) -> None:
    """Prints parameters, state, cost, batch, mesh, memory and implementations of the run."""
    setup.check()
    compiled = setup.trace().lower().compile()
    printer.table(parameter_table(setup))
    printer.table(state_table(setup))
    printer.table(cost_table(setup))
    printer.table(memory_table(setup, compiled.memory_analysis()))
    printer.table(batch_table(setup))
    printer.table(implementation_table(setup))
    _print_notices(setup, printer)


def print_plan_for(setup: Setup, topology: Topology, printer: Printer) -> None:
    """Prints the same for devices that are not present, with their collectives and an estimate of the time of a step.

    Raises `UserError` where the run does not fit into their memory, before compiling if the train state alone does not.
    """
    setup.check()
    with target.compiling_for(topology.target):
        check_fits(_state_on_device(setup), topology, 'the train state alone takes')
        printer.table(parameter_table(setup))
        printer.table(state_table(setup))
        printer.table(cost_table(setup))
        printer.table(batch_table(setup))
        printer.table(implementation_table(setup))
        _print_notices(setup, printer)
        lowered = setup.trace().lower(lowering_platforms=(topology.platform,))
        executed = executed_flops_per_token(setup) * setup.batch_size * setup.length
    if not topology.compiles:
        printer.table(memory_table(setup, None))
        printer.line(f'lowered for {topology.name}; not known without its compiler: temporaries, collectives')
        printer.line(f'its compiler: {topology.lacks}')
        printer.table(roofline_table(setup, topology, executed, None, None if setup.mesh.size > 1 else []))
        return
    try:
        compiled: Any = topology.compile(lowered)
    except jax.errors.JaxRuntimeError as error:
        if 'RESOURCE_EXHAUSTED' not in str(error):
            raise
        raise UserError(f'the run does not fit on {topology.name}: {shortage(str(error))}') from error
    memory = compiled.memory_analysis()
    text = compiled.as_text()
    exchanged = exchanges(text)
    printer.table(memory_table(setup, memory))
    if topology.measures:
        printer.line(
            'algorithms of products are those without a device: a run measures which are fastest, and its temporaries '
            'may be others'
        )
    printer.table(exchange_table(exchanged))
    printer.table(roofline_table(setup, topology, executed, traffic(text), exchanged))
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


def _print_notices(setup: Setup, printer: Printer) -> None:
    for line in setup.missing_layers:
        printer.line(line)
    points = _points(setup.model)
    if points:
        printer.line(f'residual convolutions stand at {points} of layers')
    for line in setup.time_division():
        printer.line(f'time over sequence {setup.mesh.shape[SEQUENCE]}: {line}')
    for line in setup.undivided():
        printer.line(f'whole on every device: {line}')


def _points(model: nnx.Module) -> str:
    """The points at which blocks of the model have residual convolutions (`conv=` of configs)."""
    found = set()
    for _, block in nnx.iter_modules(model):
        if isinstance(block, Block):
            within = any(isinstance(part, Canon) for _, part in nnx.iter_modules(block.mixer))
            at = {
                'A': isinstance(block.mixer_prelude, Canon),
                'B': within,
                'C': isinstance(block.mlp_prelude, Canon),
                'D': isinstance(block.mlp, ConvolvedMLP),
            }
            found |= {point for point, there in at.items() if there}
    return ''.join(sorted(found))


def parameter_table(setup: Setup) -> Table:
    """One row a parameter: shape, size, optimiser group, sharding; then all of them."""
    columns = (
        Column('parameter'),
        Column('shape', rank=2),
        Column('number', right=True),
        Column('group', rank=3),
        Column('sharding', rank=1),
    )
    found = list(partition.describe(setup.abstract.params, setup.mesh))
    rows = [(row.path, _shape(row.shape), math.prod(row.shape), row.group, row.sharding) for row in found]
    total = 'all', '', sum(math.prod(row.shape) for row in found), '', f'mesh {dict(setup.mesh.shape)}'
    return Table('parameters', columns, [*rows, total], 'parameters', marked=frozenset({len(rows)}))


def state_table(setup: Setup) -> Table:
    """Bytes of decoding state per sequence; one row saying so for a model that does not stream."""
    columns = Column('tokens', right=True), Column('bytes', right=True), Column('bytes a token', digits(',.1f'), True)
    title = 'state of one sequence, from init_state'
    if not setup.model.streaming:
        return Table('state', columns, [('any', 'does not stream', None)], title)
    lengths = [setup.length * multiple for multiple in (1, 2, 4, 8)]
    sizes = [state_bytes(setup, length) for length in lengths]
    rows = [(length, size, size / length) for length, size in zip(lengths, sizes, strict=True)]
    return Table('state', columns, rows, title)


def cost_table(setup: Setup) -> Table:
    """Operations per token, and the memory of one device."""
    flops, executed = flops_per_token(setup), executed_flops_per_token(setup)
    rows = [
        ('model FLOPs a token', flops),
        ('of 6 x parameters', flops / (6 * parameters(setup))),
        ('model FLOPs a step', flops * setup.batch_size * setup.length),
        ('executed, with recomputation, over model', executed / flops),
    ]
    return Table('cost', (Column('what'), Column('value', digits('.4g'), right=True)), rows, 'cost of training')


def memory_table(setup: Setup, memory: Any) -> Table:
    """Bytes on one device: of the parts of the train state, and of the compiled step where `memory` is given."""
    state = setup.abstract
    average = {'average of parameters': state.average} if jax.tree.leaves(state.average) else {}
    parts = {'parameters': state.params, **average, 'optimiser': state.opt_state, 'batch': setup.abstract_batch()}
    rows = [(name, _on_device(part)) for name, part in parts.items()]
    rows.append(('train state', _state_on_device(setup)))
    if memory is not None:
        rows.append(('activations and other temporaries (compiled)', memory.temp_size_in_bytes))
        rows.append(('in all', memory.argument_size_in_bytes + memory.temp_size_in_bytes))
    return Table('memory', (Column('what'), Column('bytes', _bytes, right=True)), rows, 'memory of one device')


def exchange_table(exchanged: list[Exchange]) -> Table:
    """The collectives of a step."""
    columns = Column('kind'), Column('calls', right=True), Column('bytes sent', _bytes, right=True)
    rows = [(entry.kind, entry.calls, entry.bytes) for entry in exchanged] or [('none', 0, 0)]
    return Table('collectives', columns, rows, 'collectives of a step, on one device')


def roofline_table(
    setup: Setup, topology: Topology, executed: float, moved: int | None, exchanged: list[Exchange] | None
) -> Table:
    """The least time of a step at the peak rates of a device: operations, memory, links.

    `moved` are the bytes that the compiled step reads from memory and writes there; `None`, where it is not compiled:
    the train state is read and written once, which is less than any step does. `exchanged` are its collectives; `None`,
    where they are not known: the links are left out of the bounds, and the rows say so.
    """
    device = hardware(topology.target.kind)
    columns = Column('what'), Column('value', _rate, right=True), Column('unit'), Column('assumes', prose=True)
    title = 'roofline estimate of a step (not measured)'
    if device is None:
        return Table('roofline', columns, [(f'no figures for {topology.target.kind}', None, None, None)], title)
    of = 'of the compiled step' if moved is not None else 'of the train state alone'
    moved = 2 * _state_on_device(setup) if moved is None else moved
    times = {
        'operations': (executed / setup.mesh.size / device.flops, f'{device.flops / 1e12:.4g} TFLOP/s, bfloat16'),
        'memory': (moved / device.bandwidth, f'{_bytes(moved)} {of}, {device.bandwidth / 1e9:.4g} GB/s'),
    }
    if exchanged is not None:
        sent = sum(entry.bytes for entry in exchanged)
        times['links'] = (sent / device.links, f'{device.links / 1e9:.4g} GB/s')
    without = '' if exchanged is not None else ', without the links'
    least = max(seconds for seconds, _ in times.values())
    tokens = setup.batch_size * setup.length
    rows = [
        *((name, 1e3 * seconds, 'ms', assumed) for name, (seconds, assumed) in times.items()),
        *([('links', None, None, 'not known without its compiler')] if exchanged is None else []),
        ('all at once', 1e3 * least, 'ms', f'{device.source}{without}'),
        ('one after the other', 1e3 * sum(seconds for seconds, _ in times.values()), 'ms', without[2:] or None),
        ('at most', tokens / least, 'tokens/s', f'all at once{without}'),
    ]
    return Table('roofline', columns, rows, title)


def _rate(value: float | None) -> str:
    return '' if value is None else f'{value:,.0f}' if value >= 1000 else f'{value:.3g}'


def batch_table(setup: Setup) -> Table:
    """Shapes of a batch, and its sharding."""
    columns = Column('array'), Column('shape'), Column('type', rank=2), Column('sharding', rank=1)
    rows = [
        (name, _shape(array.shape), str(array.dtype), str(array.sharding.spec))
        for name, array in setup.abstract_batch().items()
    ]
    parts = f', computed in {setup.parts} parts' if setup.parts > 1 else ''
    return Table('batch', columns, rows, f'batch{parts}')


def implementation_table(setup: Setup) -> Table:
    """The implementation of each layer's core, and why faster ones were rejected."""
    columns = (
        Column('layers', rank=2, prose=True),
        Column('mixer', rank=1),
        Column('core'),
        Column('implementation'),
        Column('refused, and why', prose=True),
    )
    rows = [
        (
            _ranges(entry.layers),
            entry.mixer,
            entry.core,
            entry.implementation
            if entry.tiles == tuning.HEURISTIC
            else f'{entry.implementation}, tiles by {entry.tiles}',
            '\n'.join(f'{name}: {reason}' for name, reason in entry.refused),
        )
        for entry in implementations(setup)
    ]
    return Table('kernels', columns, rows, 'kernels')


def _state_on_device(setup: Setup) -> int:
    return _on_device(setup.abstract)


def _on_device(tree: Any) -> int:
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def _shape(shape: tuple[int, ...]) -> str:
    return ' '.join(map(str, shape)) or '()'


def _bytes(size: int | float) -> str:
    return in_bytes(size, '.4g')


def _ranges(numbers: tuple[int, ...]) -> str:
    return ', '.join(map(str, numbers)) if len(numbers) < 9 else f'{numbers[0]}, {numbers[1]}, ..., {numbers[-1]}'
