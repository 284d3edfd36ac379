"""What interpreting a kernel cannot show, read off the programs that are handed to the compiler."""

import importlib
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import dispatch, target, tiling
from pallas_kernels.cases.drawing import Call
from pallas_kernels.mosaic_gpu import launch, stream
from pallas_kernels.mosaic_tpu import launch as launch_tpu

CORES = (
    'attention',
    'cross_entropy',
    'delta_rule',
    'diagonal_low_rank',
    'linear_attention',
    'linear_scan',
    'long_conv',
    'selective_scan',
    'short_conv',
    'softmax',
    'softmax_topk',
)


ON = {
    'gpu': CORES,
    'tpu': tuple(core for core in CORES if core != 'short_conv'),
}
"""Those that have a kernel for a platform."""

MATRIX_STATE = ('linear_attention', 'delta_rule', 'diagonal_low_rank')
"""Those whose state is a matrix, which share kernels."""


def inner(equation: Any) -> list[Any]:
    """The programs inside an operation."""
    leaves = jax.tree.leaves(list(equation.params.values()), is_leaf=lambda value: hasattr(value, 'eqns'))
    return [getattr(leaf, 'jaxpr', leaf) for leaf in leaves if hasattr(leaf, 'eqns')]


def programs(jaxpr: Any) -> Iterator[Any]:
    """A program and all those inside it."""
    yield jaxpr
    for equation in jaxpr.eqns:
        for program in inner(equation):
            yield from programs(program)


def operations(jaxpr: Any) -> Iterator[Any]:
    """The operations of a program and of all those inside it, in order."""
    for program in programs(jaxpr):
        yield from program.eqns


def kernels(core: str, here: target.Target, call: Call) -> list[Any]:
    """The kernels that a call and its gradients start."""
    options = {name: value for name, value in call.options.items() if not hasattr(value, 'shape')}
    constant = {name: value for name, value in call.options.items() if hasattr(value, 'shape')}
    floating = {name: x for name, x in call.arrays.items() if jnp.issubdtype(x.dtype, jnp.inexact)}
    constant |= {name: x for name, x in call.arrays.items() if name not in floating}

    def loss(floating, constant):
        outputs = jax.tree.leaves(getattr(pallas_kernels, core)(**floating, **constant, **options))
        return sum(jnp.sum(jnp.abs(x).astype(jnp.float32)) for x in outputs if jnp.issubdtype(x.dtype, jnp.inexact))

    implementation = 'mosaic_gpu' if here.platform == 'gpu' else 'mosaic_tpu'
    with target.compiling_for(here), dispatch.ledger() as entries:
        traced = jax.make_jaxpr(jax.grad(loss))(floating, constant)
    assert {entry.implementation for entry in entries} == {implementation}
    found = [equation for equation in operations(traced.jaxpr) if 'compiler_params' in equation.params]
    assert found
    return found


def real(core: str) -> dict[str, Call]:
    return importlib.import_module(f'pallas_kernels.cases.{core}').real()


def first(core: str) -> Call:
    return next(iter(real(core).values()))


@pytest.fixture(scope='module')
def on_hopper() -> dict[str, list[Any]]:
    """The kernels of a call of every core, and of one with decays of key channels where there are such."""
    found = {core: kernels(core, target.H100, first(core)) for core in ON['gpu']}
    for core in ('linear_attention', 'delta_rule'):
        found[core] += kernels(core, target.H100, real(core)['k=64, vector'])
    return found


@pytest.mark.parametrize('core', CORES)
def test_a_kernel_says_what_it_is(core, on_hopper):
    subjects = (core, 'matrix_state') if core in MATRIX_STATE else (core,)
    on_tpu = kernels(core, target.TPU_V5E, first(core)) if core in ON['tpu'] else []
    for equation in (*on_hopper.get(core, ()), *on_tpu):
        assert str(equation.params.get('name')).startswith(subjects)


@pytest.mark.parametrize('core', ON['tpu'])
def test_no_kernel_for_a_tpu_is_given_float16(core):
    """There are no vectors of it, which only the compiler says."""
    call = first(core)
    halves = {
        name: jax.ShapeDtypeStruct(x.shape, jnp.float16) if jnp.issubdtype(x.dtype, jnp.floating) else x
        for name, x in call.arrays.items()
    }
    for equation in kernels(core, target.TPU_V5E, Call(halves, call.options)):
        assert not [x for x in (*equation.invars, *equation.outvars) if x.aval.dtype == jnp.float16]


@pytest.mark.parametrize('core', ON['tpu'])
def test_no_kernel_serves_a_tpu_before_v5e(core):
    call = first(core)
    constant = {name: value for name, value in call.options.items() if hasattr(value, 'shape')}
    options = {name: value for name, value in call.options.items() if name not in constant}
    with target.compiling_for(target.Target('tpu', 'TPU v4')), dispatch.ledger() as entries:
        jax.eval_shape(lambda arrays: getattr(pallas_kernels, core)(**arrays, **options), {**call.arrays, **constant})
    assert {entry.implementation for entry in entries} == {'xla'}
    for entry in entries:
        assert dict(entry.refused)['mosaic_tpu'] == 'the device is a TPU v4; expected TPU v5e or later'


def test_kinds_of_tpus_are_told_apart():
    """By the names that JAX has for them (`jax/_src/mesh_utils.py`)."""
    kinds = {
        True: ('TPU v2', 'TPU v3', 'TPU v4', 'TPU v4 lite'),
        False: ('TPU v5 lite', 'TPU v5e', 'TPU v5', 'TPU v5p', 'TPU v6 lite', 'TPU7x', 'TPU8i'),
    }
    for refused, names in kinds.items():
        for kind in names:
            assert (launch_tpu.generation_refusal(target.Target('tpu', kind)) is not None) == refused, kind


@pytest.mark.parametrize(
    ('here', 'core', 'name'),
    [
        pytest.param(here, core, None, id=f'{here.platform}-{core}')
        for here in (target.H100, target.TPU_V5E)
        for core in ON[here.platform]
        if core != 'softmax_topk'
    ]
    + [
        pytest.param(target.H100, core, 'k=128, vector', id=f'gpu-{core}-vector')
        for core in ('linear_attention', 'delta_rule')
    ],
)
def test_the_compiler_is_told_what_kernels_cost(core, here, name):
    """In all what the form executes, but for what it leaves to XLA on a GPU: a loop's other turns, and much algebra."""
    if here.platform == 'gpu' and not launch.TAKES_ESTIMATES:
        pytest.skip('this version of JAX takes no estimates')
    with dispatch.ledger() as entries:
        call = first(core) if name is None else real(core)[name]
        found = [kernel.params['cost_estimate'] for kernel in kernels(core, here, call)]
    assert min(min(estimate.flops, estimate.bytes_accessed) for estimate in found) > 0
    executed, known = entries[0].cost.executed, sum(estimate.flops for estimate in found)
    leaves = {'cross_entropy': 0.25, 'delta_rule': 0.4}.get(core, 0.7) if here.platform == 'gpu' and not name else 0.7
    assert leaves < known / (executed.forward.flops + executed.backward.flops) < 1.2
    if name is not None:
        # XLA takes those of one decay over each chunk.
        exponentials = executed.forward.exponentials + executed.backward.exponentials
        assert exponentials == sum(estimate.transcendentals for estimate in found)


@pytest.mark.parametrize('core', MATRIX_STATE)
def test_kernels_for_tpus_with_decays_of_key_channels_cost_what_is_in_their_programs(core):
    call = next(call for call in real(core).values() if getattr(call.arrays.get('log_decay'), 'ndim', 0) == 4)
    for kernel in kernels(core, target.TPU_V5E, call):
        known, grid = kernel.params['cost_estimate'], math.prod(kernel.params['grid_mapping'].grid)
        done, exponentials = counted(kernel.params['jaxpr'])
        assert 0.8 < grid * done / known.flops < 1.1
        # Besides, a few a chunk.
        assert 1 <= grid * exponentials / known.transcendentals < 1.01


@pytest.mark.parametrize('name', ['k=64, scalar', 'k=128, constant, grouped'])
def test_kernels_of_linear_attention_for_tpus_cost_the_products_in_their_programs(name):
    for kernel in kernels('linear_attention', target.TPU_V5E, real('linear_attention')[name]):
        known, grid = kernel.params['cost_estimate'], math.prod(kernel.params['grid_mapping'].grid)
        assert grid * counted(kernel.params['jaxpr'])[0] == known.flops


def test_the_softmax_takes_an_exponential_in_either_sweep():
    call = first('softmax')
    forward, _ = kernels('softmax', target.TPU_V5E, call)
    assert forward.params['cost_estimate'].transcendentals == 2 * call.arrays['x'].size


@pytest.mark.parametrize('channels', [1, 8])
def test_blocks_of_long_rows_with_documents_take_what_their_tile_says(channels):
    """Two of each, three quarters of VMEM at most."""

    def tile(blocks: int) -> tiling.LongConvTile | None:
        return tiling.long_conv_tpu(blocks * tiling.LANES, blocks * tiling.LANES, 8, packed=True)

    found = {blocks: tile(blocks) for blocks in range(16, 1024, 16)}
    t = tiling.LANES * max(blocks for blocks, one in found.items() if one is not None and one.channels == channels)
    arrays = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in (('x', (8, t, 8)), ('kernel', (t, 8)))}
    call = Call(arrays, {'segments': jax.ShapeDtypeStruct((8, t), jnp.int32)})
    for kernel in kernels('long_conv', target.TPU_V5E, call):
        scratch = kernel.params['grid_mapping'].num_scratch_operands
        blocks = [ref.aval for ref in kernel.params['jaxpr'].invars[:-scratch]]
        assert 2 * sum(math.prod(block.shape) * block.dtype.itemsize for block in blocks) <= tiling.VMEM * 3 // 4


def counted(jaxpr: Any) -> tuple[int, int]:
    """The operations of the products of a program, and its exponentials.

    Of a condition those of what is done if it holds, else those of the one branch that does something.
    """
    found = np.zeros(2, int)
    for equation in jaxpr.eqns:
        parts = [np.array(counted(program)) for program in inner(equation)]
        match equation.primitive.name:
            case 'dot_general':
                summed = equation.params['dimension_numbers'][0][0]
                terms = math.prod(equation.invars[0].aval.shape[axis] for axis in summed)
                found[0] += 2 * terms * equation.outvars[0].aval.size
            case 'exp':
                found[1] += equation.outvars[0].aval.size
            case 'cond':
                found += parts[1] if parts[1].any() else np.max(parts, axis=0)
            case name:
                found += (equation.params['length'] if name == 'scan' else 1) * sum(parts, start=np.zeros(2, int))
    return tuple(found.tolist())


def test_products_are_used_after_their_wait_alone(on_hopper):
    """What an accumulator held goes through a barrier first, for the wait itself names no registers."""
    products = 0
    for name, program in bodies(on_hopper):
        for equation in program.eqns:
            own = [one.primitive.name for body in inner(equation) for one in body.eqns]
            read = equation.primitive.name == 'wgmma_accumulator_deref'
            if not read and not ('wgmma_ref' in own and equation.primitive.name in ('run_scoped', 'run_state')):
                continue
            found = set(equation.outvars)
            users = {one.primitive.name for one in program.eqns if found & variables(one.invars)}
            assert users <= {'optimization_barrier'}, name
            # Or the program returns it, to such a barrier.
            assert users or found & variables(program.outvars), name
            products += 1
    assert products > 50


def test_results_of_kernels_stand_behind_a_barrier():
    """Without it XLA of JAX 0.11.2 runs a kernel twice, in a loop that keeps its result and uses it."""
    with target.compiling_for(target.H100):
        traced = jax.jit(pallas_kernels.softmax).trace(jax.ShapeDtypeStruct((256, 512), jnp.float32))
        text = traced.lower(lowering_platforms=('cuda',)).as_text()
    assert text.count('mosaic_gpu_v2') == text.count('optimization_barrier') == 1


def test_warpgroups_end_together(on_hopper):
    """One that is gone while another still multiplies can make that one fail."""
    several = [kernel for core in ('attention', 'cross_entropy') for kernel in on_hopper[core]]
    for equation in several:
        bodies = [program for body in inner(equation) for program in programs(body)]
        endings = [[one.primitive.name for one in program.eqns][-2:] for program in bodies]
        assert ['barrier_arrive', 'barrier_wait'] in endings, equation.params.get('name')
    assert len(several) >= 5


@pytest.mark.parametrize('core', MATRIX_STATE)
def test_a_sweep_reads_its_tiles_before_copies_may_refill_them(core, on_hopper):
    """A commit stands between ordinary reads of a slot and the copy that writes over it."""
    swept = 0
    for name, program in bodies({core: on_hopper[core]}):
        operations = [one.primitive.name for one in program.eqns]
        if name.endswith('_sweep') and 'commit_smem' in operations and 'run_state' in operations:
            reads = [place for place, operation in enumerate(operations) if operation == 'load']
            assert max(reads) < operations.index('commit_smem')
            swept += 1
    # Forward, and again and back for the gradients; of one call, or of two.
    assert swept >= (3 if core == 'diagonal_low_rank' else 4)


def bodies(found: dict[str, list[Any]]) -> Iterator[tuple[str, Any]]:
    """The names of kernels, and each of the programs they are made of."""
    for equation in [kernel for kernels in found.values() for kernel in kernels]:
        for body in inner(equation):
            for program in programs(body):
                yield str(equation.params.get('name')), program


def variables(atoms: Any) -> set[Any]:
    return {atom for atom in atoms if not hasattr(atom, 'val')}


def shapes(dtype=jnp.bfloat16, **arrays):
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in arrays.items()}


MANY = 70_000
"""More sequences than CUDA has blocks along the second and third axis of a grid."""


@pytest.mark.parametrize(
    ('core', 'arrays', 'grid'),
    [
        ('attention', shapes(q=(MANY, 8, 1, 8), k=(MANY, 8, 1, 8), v=(MANY, 8, 1, 8)), 'b=70000, h=1, rows=1'),
        ('linear_attention', shapes(q=(8750, 8, 8, 8), k=(8750, 8, 8, 8), v=(8750, 8, 8, 8)), 'b=8750, h=8, chunks=1'),
        (
            'delta_rule',
            shapes(q=(MANY, 8, 1, 8), k=(MANY, 8, 1, 8), v=(MANY, 8, 1, 8), beta=(MANY, 8, 1)),
            'b=70000, h=1',
        ),
        ('linear_scan', shapes(x=(MANY, 8, 8), decay=(MANY, 8, 8)), 'b=70000, channels=1'),
        ('short_conv', shapes(x=(MANY, 8, 8), taps=(4, 8)), 'b=70000, tile=1, d=1'),
        (
            'selective_scan',
            shapes(x=(MANY, 8, 8), dt=(MANY, 8, 8), A=(8, 4), B=(MANY, 8, 4), C=(MANY, 8, 4)),
            'b=70000, channels=1',
        ),
    ],
)
def test_grids_that_cannot_be_launched_are_refused(core, arrays, grid):
    call = getattr(pallas_kernels, core)
    with target.compiling_for(target.H100):
        with pytest.raises(NotImplementedError, match=f'the grid is {grid}.*; expected at most 65535 for b'):
            jax.eval_shape(lambda arrays: call(**arrays, implementation='mosaic_gpu'), arrays)
        with dispatch.ledger() as entries:
            jax.eval_shape(lambda arrays: call(**arrays), arrays)
    assert entries[0].implementation == 'xla' and 'the grid is' in dict(entries[0].refused)['mosaic_gpu']


def test_many_rows_of_many_columns_are_served():
    call = Call(shapes(x=(300_000, 2048)), {'k': 8})
    for equation in kernels('softmax_topk', target.H100, call):
        (mesh,) = equation.params['meshes']
        assert math.prod(mesh.grid[:-1]) <= tiling.GRID
        assert math.prod(mesh.grid) == 2 * 75_000


def test_the_axes_of_a_grid_are_those_of_cuda():
    assert launch.grid_refusal(rows=10**9) is None
    assert launch.grid_refusal(tiles=tiling.GRID, rows=10**9) is None
    assert launch.grid_refusal(rows=tiling.GRID + 1, tiles=1) is not None
    assert launch.grid_refusal(b=2, h=tiling.GRID, chunk=1) is None
    assert launch.grid_refusal(b=2, h=tiling.GRID, chunk=1, column=1) is not None


SOURCES = ('iota', 'broadcasted_iota', 'axis_index', 'program_id')
"""What a compiler knows the bounds of, from which masks are made."""


def known_factors(program: Any, known: dict[Any, bool], found: list[str]) -> list[bool]:
    """Which results of a program its compiler may know in part, and, in `found`, products whose left factor is such."""

    def is_known(atom: Any) -> bool:
        return hasattr(atom, 'val') or known.get(atom, False)

    for equation in program.eqns:
        name, given = equation.primitive.name, [is_known(atom) for atom in equation.invars]
        if name == 'wgmma_ref' and given[1]:
            found.append(str(equation.invars[1].aval))
        bodies = inner(equation)
        # Refs and what loops carry count as unknown.
        results = [False] * len(equation.outvars)
        for body in bodies:
            loops = name in ('scan', 'while', 'cond')
            # A scan has constants before what it carries; where there are others, the rest is scratch memory.
            count = len(body.invars) - (len(body.outvars) if name == 'scan' else 0)
            passed = (
                {}
                if body.constvars or name in ('while', 'cond')
                else dict(zip(body.invars[:count], given, strict=False))
            )
            answers = known_factors(body, dict(zip(body.constvars, given, strict=False)) | passed, found)
            if not loops and len(answers) == len(results):
                results = answers
        if not bodies:
            # `and` with what is false somewhere is false there, and a choice is what its condition says.
            part = {'and': any(given), 'or': any(given), 'select_n': given[:1] == [True]}.get(name, all(given))
            results = [name in SOURCES or (part and not equation.effects)] * len(results)
        known |= dict(zip(equation.outvars, results, strict=True))
    return [is_known(atom) for atom in program.outvars]


def test_no_factor_in_registers_is_known_in_part(on_hopper):
    """The assembler was seen to leave registers unset that it knows to hold constants; see `tiles.hidden_zero`."""
    for core in on_hopper:
        for equation in on_hopper[core]:
            found: list[str] = []
            for body in inner(equation):
                known_factors(body, {}, found)
            assert not found, equation.params.get('name')


def test_tiles_that_do_not_begin_where_copies_may_are_found_on_any_machine():
    tiles = stream.Tiles(jax.ShapeDtypeStruct((2, 64), jnp.float32), (1, 32), lambda k: (0, k))
    assert tiles.shape == (1, 32)
    with pytest.raises(AssertionError, match=r'a tile \(1, 24\) of float32 takes 96 bytes, no multiple of 128'):
        stream.Tiles(jax.ShapeDtypeStruct((2, 72), jnp.float32), (1, 24), lambda k: (0, k))
