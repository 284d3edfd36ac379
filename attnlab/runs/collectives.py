"""The communication between devices in a compiled program."""

import collections
import dataclasses
import math
import re

KINDS = ('all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all', 'collective-permute')

_COMPUTATION = re.compile(r'^(ENTRY )?%?([\w.\-]+) .*\{$')
_CALLED = re.compile(r'(?:body|condition|to_apply|calls|branch_computations|called_computations)=(\{[^}]*}|%?[\w.\-]+)')
_COLLECTIVE = re.compile(rf'^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ({"|".join(KINDS)})(-start)?\(')
_CONDITION = re.compile(r' while\(.*condition=%?([\w.\-]+)')
_LIMIT = re.compile(r'= s32\[]\S* constant\((\d+)\)')
_ARRAY = re.compile(r'(pred|[a-z]+(\d+)\w*)\[([\d,]*)]')
_GROUPS = re.compile(r'replica_groups=(?:\[\d+,(\d+)]|\{\{([\d,]+)})')
_MESH_GROUPS = re.compile(r'replica_groups=mesh\[([^]]*)] \{([^}]*)}')
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

    Compilers split an asynchronous one into several instructions of one channel, which count once.
    """
    lines = _computations(text)
    found: dict[str, tuple[str, int, int]] = {}
    for name, times in _times(lines).items():
        for line in lines[name]:
            if (match := _COLLECTIVE.match(line)) is not None:
                channel = re.search(r'channel_id=(\d+)', line)
                identity = channel[1] if channel else match[1]
                known = found[identity][1] if identity in found else 0
                kind, size = match[3], _sent(match[3], match[2], line)
                if name.startswith(SUMMED_PARTS):
                    kind, size = 'reduce-scatter', size // 2
                found[identity] = kind, max(times, known), size
    calls, sizes = collections.Counter[str](), collections.Counter[str]()
    for kind, times, size in found.values():
        calls[kind] += times
        sizes[kind] += times * size
    return [Exchange(kind, calls[kind], sizes[kind]) for kind in KINDS if calls[kind]]


def _computations(text: str) -> dict[str, list[str]]:
    """The instructions of every computation by its name; the entry's name is empty."""
    found: dict[str, list[str]] = {'': []}
    current = ''
    for line in text.splitlines():
        if not line.startswith((' ', '}')) and (start := _COMPUTATION.match(line)) is not None:
            current = '' if start[1] else start[2]
            found[current] = []
        elif line.startswith(' '):
            found[current].append(line)
    return found


def _times(lines: dict[str, list[str]]) -> dict[str, int]:
    """How often every computation runs; a loop without a constant limit counts once."""
    times = collections.Counter({'': 1})
    waiting = ['']
    while waiting:
        name = waiting.pop()
        for line in lines[name]:
            runs = times[name] * _iterations(line, lines)
            for called in _CALLED.findall(line):
                for inner in re.findall(r'[\w.\-]+', called):
                    if inner in lines and times[inner] < runs:
                        times[inner] = runs
                        waiting.append(inner)
    return dict(times)


def _iterations(line: str, lines: dict[str, list[str]]) -> int:
    """How often one execution of an instruction runs what it calls."""
    condition = _CONDITION.search(line)
    if condition is None:
        return 1
    limits = [limit[1] for line in lines[condition[1]] if (limit := _LIMIT.search(line)) is not None]
    return int(limits[0]) if len(limits) == 1 else 1


def _devices(line: str) -> int:
    """The number of devices that take part in a collective."""
    if (mesh := _MESH_GROUPS.search(line)) is not None:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", mesh[2]))
    groups = _GROUPS.search(line)
    if groups is None:
        return 1
    return int(groups[1]) if groups[1] else len(groups[2].split(','))


def _sent(kind: str, shape: str, line: str) -> int:
    """The bytes that one device sends."""
    # An asynchronous one has the shapes of operand and result: the larger is the whole array.
    array = max((_bytes(*match) for match in _ARRAY.findall(shape)), default=0)
    if shape.startswith('(') and kind in ('all-reduce', 'all-to-all'):
        array = sum(_bytes(*match) for match in _ARRAY.findall(shape))
    devices = _devices(line)
    match kind:
        case 'all-reduce':
            return 2 * array * (devices - 1) // devices
        case 'reduce-scatter':
            return array * (devices - 1)
        case 'collective-permute':
            return array
    return array * (devices - 1) // devices


def _bytes(name: str, bits: str, shape: str) -> int:
    size = math.prod(int(side) for side in shape.split(',') if side)
    return size * (1 if name == 'pred' else -(-int(bits) // 8))
