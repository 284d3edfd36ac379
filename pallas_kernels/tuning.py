"""Tiles that were measured on a device, in place of the rules of `tiling`.

A table is a file of JSON, `tuned/<device>.json`, that `scripts/gpu_session.py` writes: of some calls of a rule the tile
that was fastest. It is read, never written, when a kernel is built, so that the same call runs the same program; a call
that it does not have takes the rule. A table may only choose among `candidates`, tiles that the kernel can run.
"""

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import json
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pallas_kernels import tiling
from pallas_kernels.target import Target

TUNED = pathlib.Path(__file__).parent / 'tuned'
"""The folder of tables; where it has none for a device, every tile is a rule's."""

HEURISTIC, TABLE = 'heuristic', 'table'
"""How the ledger names where a tile is from."""

Number = int | bool
Tile = Any
"""A frozen record of `tiling`, or a number of steps."""


class TableError(ValueError):
    """A table that cannot be used; the message is one line."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """A tile that a kernel asked for: the name of the rule, and its arguments."""

    rule: str
    call: tuple[tuple[str, Number], ...]


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule whose tiles can be measured.

    Attributes:
      core: the core whose kernels it is for.
      heuristic: the function of `tiling`.
      candidates: from the same arguments to other tiles that the kernels can run; some may spill registers.
    """

    core: str
    heuristic: Callable[..., Tile]
    candidates: Callable[..., Iterator[Tile]]


@dataclasses.dataclass(frozen=True)
class _Trial:
    """A tile to be taken in place of any other."""

    asked: Asked
    tile: Tile


_TRIAL: contextvars.ContextVar[_Trial | None] = contextvars.ContextVar('trial', default=None)
_RECORD: contextvars.ContextVar[list[Asked] | None] = contextvars.ContextVar('record', default=None)


def tile(here: Target, rule: Callable[..., Tile], *arguments: Number, **named: Number) -> Tile:
    """The tile of a call on a device: that of the device's table, or what the rule gives.

    Raises `TableError` where there is a table that cannot be read.
    """
    asked = _asked(rule, arguments, named)
    record = _RECORD.get()
    if record is not None:
        record.append(asked)
    trial = _TRIAL.get()
    if trial is not None and trial.asked == asked:
        return trial.tile
    measured = table(here.kind).get(asked)
    return rule(**dict(asked.call)) if measured is None else measured


def source(here: Target, rule: Callable[..., Tile], *arguments: Number, **named: Number) -> str:
    """Where `tile` takes the tile of a call from, `HEURISTIC` or `TABLE`."""
    return TABLE if _asked(rule, arguments, named) in table(here.kind) else HEURISTIC


@contextlib.contextmanager
def trying(asked: Asked, candidate: Tile) -> Iterator[None]:
    """Makes kernels that are built inside the `with` block, in this thread, take a tile; for measurements."""
    token = _TRIAL.set(_Trial(asked, candidate))
    try:
        yield
    finally:
        _TRIAL.reset(token)


@contextlib.contextmanager
def recording() -> Iterator[list[Asked]]:
    """Collects what kernels that are built inside the `with` block, in this thread, ask for."""
    found: list[Asked] = []
    token = _RECORD.set(found)
    try:
        yield found
    finally:
        _RECORD.reset(token)


def candidates(asked: Asked) -> tuple[Tile, ...]:
    """The tiles that the kernels of a call can run, each once, the rule's own first.

    Raises ValueError where the rule has none for the call.
    """
    rule, call = RULES[asked.rule], dict(asked.call)
    first = rule.heuristic(**call)
    if first is None:
        raise ValueError(f'{asked.rule} has no tile for {call}')
    return tuple(dict.fromkeys((first, *rule.candidates(**call))))


def file_name(kind: str) -> str:
    """The file of a kind of device: its name in lower case, all but letters and digits as underscores."""
    return re.sub(r'[^a-z0-9]+', '_', kind.lower()).strip('_') + '.json'


@functools.lru_cache
def table(kind: str) -> Mapping[Asked, Tile]:
    """The table of a kind of device, empty where there is none; read once.

    Raises `TableError` where there is one that cannot be read.
    """
    path = TUNED / file_name(kind)
    return read(path, kind) if path.exists() else {}


LARGEST = 2**20
"""The most bytes of a table."""


def entries(path: pathlib.Path, kind: str) -> list[dict[str, Any]]:
    """The entries of the table of a kind of device; what does not belong in one is an error.

    Raises `TableError`.
    """
    try:
        if path.stat().st_size > LARGEST:
            raise ValueError(f'it has {path.stat().st_size} bytes; expected {LARGEST} at most')
        found = json.loads(path.read_bytes())
        _expect('a table', found, {'device': str, 'tiles': list})
        if found['device'] != kind:
            raise ValueError(f'it is for {found["device"]!r:.100}; expected {kind!r}')
        asked = [entry(f'tiles[{place}]', one)[0] for place, one in enumerate(found['tiles'])]
        twice = next((place for place, one in enumerate(asked) if one in asked[:place]), None)
        if twice is not None:
            raise ValueError(f'tiles[{twice}] is there twice')
    except (OSError, ValueError, ArithmeticError, RecursionError) as error:
        raise TableError(f'{path}: {(str(error).splitlines() or [""])[0]:.300}') from error
    return found['tiles']


def read(path: pathlib.Path, kind: str) -> dict[Asked, Tile]:
    """The tiles of a table by the calls they are for.

    Raises `TableError`.
    """
    return dict(entry(str(path), one) for one in entries(path, kind))


def content(kind: str, found: Sequence[Mapping[str, Any]]) -> str:
    """The text of a table of entries, which `read` reads."""
    return json.dumps({'device': kind, 'tiles': list(found)}, indent=1) + '\n'


def entry_of(asked: Asked, chosen: Tile) -> dict[str, Any]:
    """What a table has of a tile; more may stand beside it, of which nothing is read."""
    return {'rule': asked.rule, 'call': dict(asked.call), 'tile': fields(chosen)}


def fields(chosen: Tile) -> Any:
    """A tile as a table has it."""
    return dataclasses.asdict(chosen) if dataclasses.is_dataclass(chosen) else chosen  # type: ignore[arg-type]


def _asked(rule: Callable[..., Tile], arguments: tuple[Number, ...], named: Mapping[str, Number]) -> Asked:
    bound = inspect.signature(rule).bind(*arguments, **named).arguments
    return Asked(rule.__name__, tuple(sorted(bound.items())))


def entry(place: str, found: Any) -> tuple[Asked, Tile]:
    """An entry of a table, read: what it is for, and the tile. `place` names it in messages.

    Raises ValueError where no kernel can run it.
    """
    _expect(place, found, {'rule': str, 'call': dict})
    if found['rule'] not in RULES:
        raise ValueError(f'{place}: no rule is called {found["rule"]!r:.100}; they are {", ".join(RULES)}')
    parameters = inspect.signature(RULES[found['rule']].heuristic).parameters
    call = found['call']
    if set(call) != set(parameters):
        raise ValueError(f'{place}: call has {", ".join(sorted(call)):.100}; expected {", ".join(sorted(parameters))}')
    for name, number in call.items():
        wanted = bool if parameters[name].annotation is bool else int
        if type(number) is not wanted or not 0 <= number < 2**31:
            raise ValueError(f'{place}: {name} is {number!r:.50}; expected {wanted.__name__}, from 0 and below 2^31')
    asked = Asked(found['rule'], tuple(sorted(call.items())))
    for candidate in candidates(asked):
        if _same(fields(candidate), found.get('tile')):
            return asked, candidate
    raise ValueError(f'{place}: no kernel can run the tile {found.get("tile")!r:.150}')


def _same(ours: Any, theirs: Any) -> bool:
    """Equal in types too: `True` is no 1 here, and 64.0 no 64."""
    if isinstance(ours, dict):
        return (
            isinstance(theirs, dict) and ours.keys() == theirs.keys() and all(_same(ours[k], theirs[k]) for k in ours)
        )
    return type(ours) is type(theirs) and ours == theirs


def _expect(place: str, found: Any, wanted: Mapping[str, type]) -> None:
    if not isinstance(found, dict):
        raise ValueError(f'{place} is a {type(found).__name__}; expected an object')
    for name, kind in wanted.items():
        if not isinstance(found.get(name), kind):
            raise ValueError(f'{place} has {name}={found.get(name)!r:.50}; expected a {kind.__name__}')


def _softmax(n: int, o: int, itemsize: int) -> Iterator[Tile]:
    """Rows of one warp, or shared by four, and fewer or more numbers a thread."""
    for warps in (1, 4):
        for numbers in (16, 32, 64, 128):
            if (n >= 4 and o >= 32) if warps == 1 else o >= 128:
                yield tiling.warps_tile(n, o, itemsize, warps, numbers)


def _attention(k: int, v: int, r: int, *, vectors: int, numbers: int, bias: bool) -> Iterator[Tile]:
    """Steps half as long or twice as long, which shared memory holds; whether registers do is for the assembler."""
    rule = tiling.attention_hopper(k, v, r, vectors=vectors, numbers=numbers, bias=bias)
    if rule is None:
        return
    sizes: dict[str, Any] = {'k': k, 'v': v, 'r': r, 'vectors': vectors, 'numbers': numbers, 'bias': bias}

    def steps(kernel: str) -> list[int]:
        step = getattr(rule, kernel)
        near = [one for one in (step // 2, step, 2 * step) if one in tiling.ATTENTION_STEPS]
        return [one for one in near if tiling.attention_hopper_memory(kernel, one, **sizes) <= tiling.SHARED_MEMORY]

    for forward in steps('forward'):
        for queries in steps('query_gradients'):
            for keys in steps('key_gradients'):
                yield tiling.HopperAttentionTile(forward, queries, keys, rule.together)


def _linear_scan(b: int, t: int, blocks: int, row: int) -> Iterator[Tile]:
    """Blocks of 8 steps or more, 32 KiB at most of which four are there at a time; up to 8 spans of time, of as many
    sequences as a grid holds.
    """
    del blocks
    for spans in (1, 2, 4, 8):
        for rows in (8, 16, 32, 64, 128):
            if b * spans <= tiling.GRID and t % (spans * rows) == 0 and rows * row <= 2**15:
                yield tiling.SpanTile(rows=rows, spans=spans)


def _selective_scan(b: int, t: int, blocks: int, n: int, x_bytes: int, dt_bytes: int) -> Iterator[Tile]:
    """One or two segments a tile where shared memory holds them, and spans of four tiles or more, up to 16."""
    segment = tiling.SELECTIVE_SCAN_SEGMENT
    for spans in (1, 2, 4, 8, 16):
        for rows in (segment, 2 * segment):
            fits = tiling.selective_scan_gpu_memory(rows, n, x_bytes, dt_bytes) <= tiling.SHARED_MEMORY
            if fits and 4 * rows * spans <= t and b * blocks * spans <= 4096:
                yield tiling.SpanTile(rows=rows, spans=spans)


def _delta_rule(k: int, keys: int) -> Iterator[Tile]:
    """Fewer chunks at once than shared memory holds, two at least."""
    yield from range(2, tiling.delta_rule_hopper(k, keys) or 0)


RULES = {
    rule.heuristic.__name__: rule
    for rule in (
        Rule('attention', tiling.attention_hopper, _attention),
        Rule('delta_rule', tiling.delta_rule_hopper, _delta_rule),
        Rule('selective_scan', tiling.selective_scan_gpu, _selective_scan),
        Rule('linear_scan', tiling.linear_scan_gpu, _linear_scan),
        Rule('softmax', tiling.softmax_hopper, _softmax),
    )
}
"""What can be measured, by the names of the rules."""
