"""Compiled programs in XLA's text form: their computations, what calls what and how often, sizes of arrays."""

import collections
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable

_COMPUTATION = re.compile(r'^(ENTRY )?%?([\w.\-]+) .*\{$')
_INSTRUCTION = re.compile(r'^\s*(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z\-]*)\((.*)$')
_CALLED = re.compile(r'(?:body|condition|to_apply|calls|branch_computations|called_computations)=(\{[^}]*}|%?[\w.\-]+)')
_LIMIT = re.compile(r'^s32\[]')
_ARRAY = re.compile(r'(pred|[a-z]+(\d+)\w*)\[([\d,]*)](\{[^}]*\})?')
_OTHER_MEMORY = re.compile(r'S\([1-9]\d*\)')


@dataclasses.dataclass(frozen=True)
class Array:
    """The type of an array: its bytes, padding left out, and whether it lies in the device's main memory."""

    bytes: int
    main: bool


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
      name: of its result.
      root: whether this is the result of its computation.
      type: of its result, an array or a tuple, as written.
      operation: such as `fusion`.
      rest: of the line: operands and attributes.
    """

    name: str
    root: bool
    type: str
    operation: str
    rest: str

    @functools.cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of its result, in order."""
        return arrays(self.type)

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """The names of its operands."""
        depths = itertools.accumulate(({'(': 1, ')': -1}.get(letter, 0) for letter in self.rest), initial=1)
        end = next((place for place, depth in enumerate(depths) if depth == 0), None)
        return tuple(re.findall(r'%([\w.\-]+)', self.rest[:end]))

    @functools.cached_property
    def called(self) -> tuple[str, ...]:
        """The names of the computations that it calls."""
        return tuple(name for group in _CALLED.findall(self.rest) for name in re.findall(r'[\w.\-]+', group))

    def attribute(self, name: str) -> str | None:
        """The word after `name=`."""
        found = re.search(rf'\b{name}=%?([\w.\-]+)', self.rest)
        return found[1] if found else None


Computation = dict[str, Instruction]
"""Instructions by name, in order."""


def arrays(type_: str) -> tuple[Array, ...]:
    """The arrays of a type, in order."""
    return tuple(
        Array(_size(name, bits, shape), not _OTHER_MEMORY.search(layout))
        for name, bits, shape, layout in _ARRAY.findall(type_)
    )


def _size(name: str, bits: str, shape: str) -> int:
    size = math.prod(int(side) for side in shape.split(',') if side)
    return size * (1 if name == 'pred' else -(-int(bits) // 8))


def computations(text: str) -> dict[str, Computation]:
    """The computations of a program by name; the entry's name is empty."""
    found: dict[str, Computation] = {'': {}}
    current = ''
    for line in text.splitlines():
        if not line.startswith((' ', '}')) and (start := _COMPUTATION.match(line)) is not None:
            current = '' if start[1] else start[2]
            found[current] = {}
        elif line.startswith(' ') and (parts := _INSTRUCTION.match(line)) is not None:
            instruction = Instruction(parts[2], parts[1] is not None, *parts.groups()[2:])
            found[current][instruction.name] = instruction
    return found


def times(
    program: dict[str, Computation], follow: Callable[[Instruction], bool] = lambda instruction: True
) -> dict[str, int]:
    """How often every computation runs; a loop without a constant limit counts once.

    Only instructions that one is to `follow` count as calls.
    """
    found = collections.Counter({'': 1})
    waiting = ['']
    while waiting:
        name = waiting.pop()
        for instruction in program[name].values():
            if instruction.called and follow(instruction):
                runs = found[name] * _iterations(instruction, program)
                for inner in instruction.called:
                    if inner in program and found[inner] < runs:
                        found[inner] = runs
                        waiting.append(inner)
    return dict(found)


def _iterations(instruction: Instruction, program: dict[str, Computation]) -> int:
    """How often one execution of an instruction runs what it calls."""
    condition = instruction.attribute('condition') if instruction.operation == 'while' else None
    if condition is None:
        return 1
    limits = [
        int(inner.rest.partition(')')[0])
        for inner in program[condition].values()
        if inner.operation == 'constant' and _LIMIT.match(inner.type)
    ]
    return limits[0] if len(limits) == 1 else 1
