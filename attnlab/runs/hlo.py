"""Compiled programs in XLA's text form: their computations, what calls what and how often, sizes of arrays."""

import collections
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable

CALLS = ('while', 'conditional', 'call')
"""Operations that run computations whose instructions have arrays of their own, other than fusions."""

_COMPUTATION = re.compile(r'^(ENTRY )?%?([\w.\-]+) .*\{$')
_INSTRUCTION = re.compile(r'^\s*(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z\-]*)\((.*)$')
_CALLED = re.compile(
    r'(?:body|condition|to_apply|calls|(?:true|false)_computation|(?:branch|called)_computations)=(\{[^}]*}|%?[\w.\-]+)'
)
_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"}')
_COUNTER = re.compile(r'[su](32|64)\[]')
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

    @functools.cached_property
    def aliased(self) -> frozenset[int]:
        """The elements of its result that lie where an operand lay; of a result that is no tuple, element 0."""
        found = re.search(r'output_to_operand_aliasing=\{((?:[^{}]|\{[^{}]*\})*)\}', self.rest)
        return frozenset(int(each or 0) for each in re.findall(r'\{(\d*)\}: \(', found[1])) if found else frozenset()

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
                runs = found[name] * _iterations(instruction, program[name], program)
                for inner in instruction.called:
                    if inner in program and found[inner] < runs:
                        found[inner] = runs
                        waiting.append(inner)
    return dict(found)


def _iterations(loop: Instruction, within: Computation, program: dict[str, Computation]) -> int:
    """How often one execution of an instruction runs what it calls."""
    if loop.operation != 'while':
        return 1
    # Compilers for GPUs say it, and compare in a fusion.
    if (turns := _TURNS.search(loop.rest)) is not None:
        return int(turns[1])
    condition, body = (program[loop.attribute(name) or ''] for name in ('condition', 'body'))
    limits = [found for inner in condition.values() if (found := _number(inner.name, condition)) is not None]
    if len(limits) != 1:
        return 1
    counters = [inner.attribute('index') for inner in condition.values() if inner.operation == 'get-tuple-element']
    if len(counters) != 1:
        return limits[0]
    place = int(counters[0] or 0)
    start = _number(_element(loop.operands[0], place, within), within)
    step = _step(_element(next(inner.name for inner in body.values() if inner.root), place, body), body)
    return -(-(limits[0] - (start or 0)) // step)


def _element(name: str, place: int, within: Computation) -> str:
    """The name of an element of a tuple, empty where it was not made here."""
    made = within.get(name)
    return made.operands[place] if made is not None and made.operation == 'tuple' else ''


def _number(name: str, within: Computation) -> int | None:
    """The value of an integer constant, or of a copy of one."""
    made = within.get(name)
    if made is None or not _COUNTER.match(made.type):
        return None
    if made.operation == 'copy':
        return _number(made.operands[0], within)
    return int(made.rest.partition(')')[0]) if made.operation == 'constant' else None


def _step(name: str, body: Computation) -> int:
    """How much a loop adds to its counter: the constant of a sum, otherwise 1."""
    made = body.get(name)
    if made is None or made.operation != 'add':
        return 1
    return next((found for operand in made.operands if (found := _number(operand, body)) is not None), 1)
