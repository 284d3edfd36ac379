"""The bytes that a compiled program reads from the memory of its device and writes there."""

from attnlab.runs import hlo
from attnlab.runs.collectives import KINDS
from attnlab.runs.hlo import Computation, Instruction

_NOTHING = frozenset(
    {'parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'after-all', 'partition-id', 'replica-id'}
    | {'opt-barrier', *hlo.CALLS}
)
"""Operations that move no bytes."""

_BOOKKEEPING = ('ConcatBitcast', 'AllocateBuffer', 'AssumeGatherIndicesInBound', 'Sharding')
"""Custom calls that move no bytes."""

_LIBRARIES = ('custom_call_target="__cublas', 'custom_call_target="__cudnn')
"""Calls of libraries on GPUs: the last of several results is memory that they work in."""

_PARTS = ('dynamic-slice', 'slice', 'gather')
"""Operations that read of their first operand as much as they return."""


def traffic(text: str) -> int:
    """Bytes read and written by all instructions of a compiled program in XLA's text form, loops by their iterations.

    A fusion reads its operands once, of those that it takes slices of only the slices, and of an array that it updates
    in place it writes the update. So does a kernel, whatever it reads twice. Padding and what lies in memory on the
    chip do not count. Of branches all count.
    """
    program = hlo.computations(text)
    runs = hlo.times(program, lambda instruction: instruction.operation in hlo.CALLS)
    return sum(
        count * _moved(instruction, program[name], program)
        for name, count in runs.items()
        for instruction in program[name].values()
    )


def _moved(instruction: Instruction, within: Computation, program: dict[str, Computation]) -> int:
    operation = instruction.operation
    if operation in _NOTHING or operation.endswith('-done') or _books(instruction):
        return 0
    results, operands = instruction.arrays, [within[name].arrays for name in instruction.operands if name in within]
    given = [array for arrays in operands for array in arrays]
    if operation in ('fusion', 'fusion-start') and instruction.called and instruction.called[0] in program:
        # The type of an asynchronous one has its operands before its results, and a counter after them.
        results = results[len(given) : -1] if operation == 'fusion-start' else results
        return _fused(instruction, results, operands, program)
    if operation == 'slice-start':
        part = results[1].bytes
        return part * (results[0].main + results[1].main)
    if operation.endswith('-start'):
        return sum(array.bytes for array in results if array.main)
    if operation in _PARTS:
        return sum(array.bytes * (array.main + given[0].main) for array in results)
    if operation == 'dynamic-update-slice':
        return given[1].bytes * (given[1].main + results[0].main)
    results = tuple(array for place, array in enumerate(results) if not _worked_in(instruction, place))
    return sum(array.bytes for array in (*given, *results) if array.main)


def _worked_in(instruction: Instruction, place: int) -> bool:
    """Whether an element of a result is memory for a library to work in."""
    library = instruction.operation == 'custom-call' and any(name in instruction.rest for name in _LIBRARIES)
    return library and 0 < place == len(instruction.arrays) - 1


def _books(instruction: Instruction) -> bool:
    return any(_calls(instruction, name) for name in _BOOKKEEPING)


def _calls(instruction: Instruction, target: str) -> bool:
    return instruction.operation == 'custom-call' and f'custom_call_target="{target}"' in instruction.rest


def _fused(
    instruction: Instruction,
    results: tuple[hlo.Array, ...],
    operands: list[tuple[hlo.Array, ...]],
    program: dict[str, Computation],
) -> int:
    """The bytes that a fusion moves; what it hands on where it lay, as a gather that goes on meanwhile, moves none."""
    fused = program[instruction.called[0]]
    root = _root(fused)
    if _calls(root, 'AsyncCollectiveDone'):
        return 0
    moved = 0
    for place, arrays in enumerate(operands):
        if all(array.main for array in arrays):
            moved += min(_read(place, fused, program), sum(array.bytes for array in arrays))
    given = [fused[name] for name in root.operands] if root.operation == 'tuple' else [root] * len(results)
    for place, (array, inner) in enumerate(zip(results, given, strict=False)):
        handed_on = place in instruction.aliased and _handed_on(inner)
        if array.main and not handed_on and not _works(inner, place, fused):
            moved += min(_written(inner, fused, program), array.bytes)
    return moved


def _works(inner: Instruction, place: int, fused: Computation) -> bool:
    """Whether what a fused computation gives back in a place is memory for a library to work in."""
    if inner.operation == 'get-tuple-element':
        return _worked_in(fused[inner.operands[0]], int(inner.attribute('index') or 0))
    return _worked_in(inner, place)


def _root(fused: Computation) -> Instruction:
    return next(inner for inner in fused.values() if inner.root)


def _handed_on(inner: Instruction) -> bool:
    """Whether what a fused computation gives back in the place of an operand is that operand, or still being sent."""
    return inner.operation in ('parameter', *KINDS) or _calls(inner, 'AsyncCollectiveStart')


def _read(place: int, fused: Computation, program: dict[str, Computation]) -> int:
    """The bytes that a fused computation reads of its parameter."""
    parameter = next(
        inner for inner in fused.values() if inner.operation == 'parameter' and inner.rest.startswith(f'{place})')
    )
    return _used(parameter, fused, program)


def _used(value: Instruction, fused: Computation, program: dict[str, Computation]) -> int:
    """The bytes that are read of a value, by its users in a fused computation."""
    found, whole, root = 0, sum(array.bytes for array in value.arrays), _root(fused)
    # Operands of a collective that another fusion has begun are handed on, and were read there.
    begun = root.operation == 'tuple' and value.name in root.operands
    for user in fused.values():
        places = [place for place, name in enumerate(user.operands) if name == value.name]
        for place in places:
            if user.operation == 'bitcast':
                found += _used(user, fused, program)
            elif user.operation in _PARTS and place == 0:
                found += sum(array.bytes for array in user.arrays)
            elif user.operation == 'fusion' and user.called[0] in program:
                inner = program[user.called[0]]
                found += _used(user, fused, program) if _renames(place, inner) else _read(place, inner, program)
            elif (user.operation == 'dynamic-update-slice' and place == 0) or (
                begun and (user.root or user.operation in KINDS)
            ):
                continue
            else:
                found += whole
    return min(found, whole)


def _renames(place: int, fused: Computation) -> bool:
    """Whether a fused computation gives back its parameter in another shape."""
    root = _root(fused)
    while root.operation == 'bitcast' and root.operands[0] in fused:
        root = fused[root.operands[0]]
    return root.operation == 'parameter' and root.rest.startswith(f'{place})')


def _written(value: Instruction, fused: Computation, program: dict[str, Computation]) -> int:
    """The bytes that are written of a fused computation's result: of an array updated in place, the update."""
    if value.operation == 'bitcast' and value.operands[0] in fused:
        return _written(fused[value.operands[0]], fused, program)
    if value.operation == 'dynamic-update-slice':
        return sum(array.bytes for array in fused[value.operands[1]].arrays)
    if value.operation == 'fusion' and value.called[0] in program and len(value.arrays) == 1:
        inner = program[value.called[0]]
        return _written(_root(inner), inner, program)
    return sum(array.bytes for array in value.arrays)
