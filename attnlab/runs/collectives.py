"""The communication between devices in a compiled program."""

import collections
import dataclasses
import math
import re

from attnlab.runs import hlo
from attnlab.runs.hlo import Instruction

KINDS = ('all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all', 'collective-permute')

_GROUPS = re.compile(r'replica_groups=(?:\[\d+,(\d+)]|\{\{([\d,]+)})')
_MESH_GROUPS = re.compile(r'replica_groups=mesh\[([^]]*)] \{([^}]*)}')
_LAYOUT = re.compile(r'\{[^{}]*}')
SUMMED_PARTS = 'all-reduce-scatter'
"""The prefix of computations on TPUs that sum over devices and keep one part of the sum."""


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The collectives of one kind in a program.

    Attributes:
      kind: one of `KINDS`.
      calls: how often they run.
      bytes: sent by each device in total: with `n` devices, `(n - 1) / n` of a gathered array, twice that of a summed
        one.
    """

    kind: str
    calls: int
    bytes: int


def exchanges(text: str) -> list[Exchange]:
    """The collectives of a compiled program in XLA's text form; those in a loop count once per iteration.

    Compilers split an asynchronous one into several fusions. Its parts have one channel and one shape, in
    layouts that may differ, and count once. Sums of which a part is kept are not split, and several have one channel.
    """
    program = hlo.computations(text)
    whole = hlo.times(program, lambda instruction: instruction.operation in hlo.CALLS)
    found: dict[tuple[str, ...], tuple[str, int, int]] = {}
    for name, times in hlo.times(program).items():
        for instruction in program[name].values():
            kind = instruction.operation.removesuffix('-start')
            if kind in KINDS:
                channel = instruction.attribute('channel_id')
                alone = name in whole or channel is None or name.startswith(SUMMED_PARTS)
                identity = (name, instruction.name) if alone else (channel or '', _LAYOUT.sub('', instruction.type))
                known = found[identity][1] if identity in found else 0
                size = _sent(kind, instruction)
                if name.startswith(SUMMED_PARTS):
                    kind, size = 'reduce-scatter', size // 2
                found[identity] = kind, max(times, known), size
    calls, sizes = collections.Counter[str](), collections.Counter[str]()
    for kind, times, size in found.values():
        calls[kind] += times
        sizes[kind] += times * size
    return [Exchange(kind, calls[kind], sizes[kind]) for kind in KINDS if calls[kind]]


def _devices(rest: str) -> int:
    """The number of devices that take part in a collective."""
    if (mesh := _MESH_GROUPS.search(rest)) is not None:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", mesh[2]))
    groups = _GROUPS.search(rest)
    if groups is None:
        return 1
    return int(groups[1]) if groups[1] else len(groups[2].split(','))


def _sent(kind: str, instruction: Instruction) -> int:
    """The bytes that one device sends."""
    # Compilers combine several of a kind; the type of an asynchronous one has its operands before its results.
    count, arrays = len(instruction.operands), instruction.arrays
    array = sum(each.bytes for each in (arrays if len(arrays) <= count else arrays[count : 2 * count]))
    devices = _devices(instruction.rest)
    match kind:
        case 'all-reduce':
            return 2 * array * (devices - 1) // devices
        case 'reduce-scatter':
            return array * (devices - 1)
        case 'collective-permute':
            return array
    return array * (devices - 1) // devices
