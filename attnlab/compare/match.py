"""Models of one size: sizes of each recipe adjusted so that a measure of the built model agrees.

Nothing is declared: see `attnlab.compare.measures`.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from attnlab import files
from attnlab.compare.measures import Measure, measure
from attnlab.config import flatten, from_plain, plain, save, set_value, value_at
from attnlab.errors import UserError, nearest
from attnlab.tables import Column, Printer, Table, digits
from attnlab.train.setup import prepare
from attnlab.zoo import ZOO

LARGEST = 2**16
"""The largest value that is tried of an adjustable size."""

NEIGHBOURS = 2
"""Widths to either side of the solved one at which hidden widths are tried."""

STRETCH = 2.0
"""The factor by which a depth, or a hidden width over the width, may depart from the recipe's own."""

HIDDEN = '.mlp.hidden'
"""How the paths of hidden widths of channel mixers end."""

WIDENED = 8
"""How many times the tolerance may be widened, by doubling, before a target counts as not reached."""


@dataclasses.dataclass(frozen=True)
class Multiples:
    """What adjusted sizes are multiples of: widths and hidden widths, and states, channels of keys or latents."""

    width: int
    state: int


MULTIPLES: dict[str, Multiples] = {'any': Multiples(8, 8), 'accelerator': Multiples(128, 64)}
"""By what the models are for, the values of `--for`: matrix units of accelerators take 128 by 128, or 64."""


@dataclasses.dataclass(frozen=True)
class Knob:
    """A number that several keys of a config share, and the step in which it is adjusted.

    `following` are keys that keep their ratio to it: heads keep their channels when the width changes.
    """

    name: str
    keys: tuple[str, ...]
    step: int = 1
    following: tuple[str, ...] = ()

    def value(self, config: ConfigDict) -> int | None:
        """What the config has; `None` where that follows from other sizes."""
        return value_at(config, self.keys[0])

    def apply(self, config: ConfigDict, value: int) -> ConfigDict:
        """The config with the number in each of its keys."""
        copy = from_plain(plain(config))
        for key in self.following:
            set_value(copy, key, value_at(config, key) * value // (self.value(config) or value))
        for key in self.keys:
            set_value(copy, key, value)
        return copy.lock()


@dataclasses.dataclass(frozen=True)
class Adjusted:
    """A size after and before; `own` is `None` where the recipe's own value could not be found out."""

    value: int
    own: int | None


@dataclasses.dataclass(frozen=True)
class Matched:
    """A config that reaches the target, the sizes adjusted for it, what it measures, and the tolerance it needed."""

    config: ConfigDict
    adjusted: Mapping[str, Adjusted]
    value: float
    tolerance: float

    def off(self, target: float) -> float:
        """How far from the target, as a share of it; below 0 for too little."""
        return self.value / target - 1


def match(
    config: ConfigDict,
    by: str,
    target: float,
    tolerance: float,
    knobs: Mapping[str, str],
    *,
    multiples: Multiples = MULTIPLES['any'],
    smallest_state: int | None = 1,
) -> Matched:
    """Adjusts a recipe's config until it measures `target`. Of what reaches it, the config changed least wins.

    By parameters, operations or time, what carries no memory is adjusted: the hidden width of channel mixers, then the
    depth too, then the width, with the channels of a head kept; of a pyramid the width, and hidden widths with it. By
    bytes of state, the state alone is: the recipe's states, channels of keys or latents. Adjusted sizes are multiples
    of `multiples`. Where none is within `tolerance`, a share of the target, it is doubled, up to `WIDENED` times,
    before a size becomes odd.

    `knobs` are those of the recipe. Raises `UserError` where nothing comes within the widened tolerance, saying what
    came nearest, where a state to be matched is not adjustable, and where it would have to be below the config's own
    and below `smallest_state`, the smallest that its paper tries, which is not known where that is `None`.
    """
    bench = _Bench(measure(by))
    found_knobs = find_knobs(config, knobs, multiples)
    of_state = by.startswith('state_bytes')
    value = bench(config)
    tried = [] if value is None else [_Candidate(config, (), value)]
    if not tried or abs(tried[0].value / target - 1) > tolerance:
        if value is not None and of_state and 'state' not in found_knobs:
            raise UserError(f'{by} is {value:g}, and no argument of the mixer sets its state alone')
        search = (
            _by_state(config, found_knobs, target, bench)
            if of_state
            else _by_size(config, found_knobs, target, bench, multiples)
        )
        for candidate in search:
            tried.append(candidate)
            if abs(candidate.value / target - 1) <= tolerance:
                break
    if not tried:
        reason = bench.error(config)
        raise UserError(f'the config cannot be built, nor any near {by} = {target:g}: {reason}') from reason
    chosen, allowed = _within(tried, target, tolerance)
    own = {knob.name: _own(config, knob) for knob in chosen.knobs}
    adjusted = {knob.name: Adjusted(chosen.of(knob), own[knob.name]) for knob in chosen.knobs}
    matched = Matched(chosen.config, adjusted, chosen.value, allowed)
    if abs(matched.off(target)) > allowed:
        raise UserError(
            f'{by} = {target:g} is not reached within {allowed:.1%}; nearest is {matched.value:g} '
            f'({matched.off(target):+.2%}) with {shown(adjusted)}'
        )
    if of_state and matched.value < (value or math.inf):
        tries = 'is not known' if smallest_state is None else f'is {smallest_state}'
        for name, one in adjusted.items():
            if smallest_state is None or one.value < smallest_state:
                raise UserError(
                    f'{by} = {target:g} wants {shown({name: one})}, and the smallest that its paper tries {tries}; '
                    '--below_range takes it'
                )
    return matched


@dataclasses.dataclass(frozen=True)
class _Candidate:
    """A config, the knobs by which it differs from the one given, and what it measures."""

    config: ConfigDict
    knobs: tuple[Knob, ...]
    value: float

    def of(self, knob: Knob) -> int:
        value = knob.value(self.config)
        assert value is not None
        return value


def _within(tried: list[_Candidate], target: float, tolerance: float) -> tuple[_Candidate, float]:
    """The first within the tolerance, doubled until there is one; else the nearest, with the widest tolerance."""
    widened = 1
    while True:
        for candidate in tried:
            if abs(candidate.value / target - 1) <= widened * tolerance:
                return candidate, widened * tolerance
        if widened >= WIDENED:
            return min(tried, key=lambda one: abs(one.value / target - 1)), widened * tolerance
        widened *= 2


class _Bench:
    """Measures configs, each once; `None` for one that cannot be built, whose error is kept."""

    def __init__(self, measure: Measure):
        self._measure = measure
        self._known: dict[str, float | Exception] = {}

    def __call__(self, config: ConfigDict) -> float | None:
        found = self._found(config)
        return None if isinstance(found, Exception) else found

    def error(self, config: ConfigDict) -> Exception | None:
        """Why a config cannot be built; `None` where it can."""
        found = self._found(config)
        return found if isinstance(found, Exception) else None

    def _found(self, config: ConfigDict) -> float | Exception:
        key = json.dumps(plain(config))
        if key not in self._known:
            try:
                self._known[key] = self._measure(prepare(config))
            except (UserError, ValueError, ZeroDivisionError) as error:
                self._known[key] = error
        return self._known[key]


def _by_state(config: ConfigDict, knobs: dict[str, Knob], target: float, bench: _Bench) -> Iterator[_Candidate]:
    if 'state' in knobs:
        yield from _solved(_Candidate(config, (), 0.0), knobs['state'], target, bench)


def _by_size(
    config: ConfigDict, knobs: dict[str, Knob], target: float, bench: _Bench, multiples: Multiples
) -> Iterator[_Candidate]:
    """What comes nearest by hidden width, then by depth and hidden width, then by width with both."""
    start = _Candidate(config, (), bench(config) or 0.0)
    hidden = knobs.get('hidden')
    ratio = 0.0 if hidden is None else (_own(config, hidden) or 0) / config.model.dim
    depths = [start]
    yield from _with_hidden(start, hidden, ratio, target, bench)
    for candidate in _depths(start, bench):
        depths.append(candidate)
        yield candidate
        yield from _with_hidden(candidate, hidden, ratio, target, bench)
    width = _width(config, knobs, bench, multiples)
    for candidate in depths:
        for wide in _solved(candidate, width, target, bench, 0 if hidden is None else NEIGHBOURS):
            yield wide
            yield from _with_hidden(wide, hidden, ratio, target, bench)


def _depths(start: _Candidate, bench: _Bench) -> Iterator[_Candidate]:
    """Other depths in whole periods of the pattern, the nearest first; none of what has several stacks."""
    stack = start.config.model.stack
    if 'depth' not in stack:
        return
    period = len(stack.blocks)
    knob = Knob('depth', ('model.stack.depth',), period)
    least, most = math.ceil(stack.depth / STRETCH), int(stack.depth * STRETCH)
    counts = [depth for depth in range(period, most + 1, period) if depth >= least and depth != stack.depth]
    for depth in sorted(counts, key=lambda depth: abs(math.log(depth / stack.depth))):
        changed = knob.apply(start.config, depth)
        value = bench(changed)
        if value is not None:
            yield _Candidate(changed, (*start.knobs, knob), value)


def _with_hidden(
    start: _Candidate, hidden: Knob | None, ratio: float, target: float, bench: _Bench
) -> Iterator[_Candidate]:
    """The hidden widths on either side of the target whose ratio to the width is not far from the recipe's own."""
    if hidden is None:
        return
    for found in _solved(start, hidden, target, bench):
        if 1 / STRETCH <= found.of(hidden) / (ratio * found.config.model.dim) <= STRETCH:
            yield found


def find_knobs(config: ConfigDict, knobs: Mapping[str, str], multiples: Multiples) -> dict[str, Knob]:
    """Returns the adjustable sizes of a config besides width and depth: its recipe's, and the MLPs' hidden width.

    That of a pyramid, whose resolutions have other hidden widths each, is its width's.
    """
    ends = {name: (argument, f'.mixer.{argument}') for name, argument in knobs.items()}
    if not _pyramidal(config):
        ends['hidden'] = ('hidden', HIDDEN)
    leaves = flatten(config.model)
    found = {
        name: Knob(
            argument,
            tuple(f'model.{key}' for key in _adjustable(name, [key for key in leaves if key.endswith(end)], leaves)),
            multiples.state if name == 'state' else multiples.width,
        )
        for name, (argument, end) in ends.items()
    }
    return {name: knob for name, knob in found.items() if knob.keys}


def _adjustable(name: str, keys: Sequence[str], leaves: Mapping[str, Any]) -> Sequence[str]:
    """Sizes of the state that follow from the width, of other layers of a hybrid, are left to it where some do not."""
    own = [key for key in keys if leaves[key] is not None]
    return own if name == 'state' and own else keys


def _pyramidal(config: ConfigDict) -> bool:
    """Whether the layers are of several resolutions, each with a width of its own."""
    return 'resolutions' in config.model.stack


def _width(config: ConfigDict, knobs: dict[str, Knob], bench: _Bench, multiples: Multiples) -> Knob:
    """The width, in the smallest step that leaves models that can be built; more than one head keep their channels."""
    now = config.model.dim
    keys = knobs['heads'].keys if 'heads' in knobs and knobs['heads'].name == 'heads' else ()
    following = tuple(key for key in keys if value_at(config, key) not in (None, 1))
    heads = [value_at(config, key) for key in following]
    if _pyramidal(config):
        hidden = (f'model.{key}' for key in flatten(config.model) if key.endswith(HIDDEN))
        following += tuple(key for key in hidden if value_at(config, key) is not None)
    least = math.lcm(multiples.width, *(now // math.gcd(now, count) for count in heads))
    for factor in (1, 2, 4, 8, 16, 32):
        knob = Knob('width', ('model.dim',), least * factor, following)
        start = max(1, now // knob.step)
        if all(bench(knob.apply(config, knob.step * count)) is not None for count in (start, start + 1)):
            return knob
    return Knob('width', ('model.dim',), now, following)


def _solved(start: _Candidate, knob: Knob, target: float, bench: _Bench, neighbours: int = 0) -> Iterator[_Candidate]:
    """The settings of a knob on either side of the target, the nearer first; the measure grows with the knob.

    `neighbours` more follow on either side.
    """

    def at(count: int) -> _Candidate | None:
        changed = knob.apply(start.config, knob.step * count)
        value = bench(changed) if count > 0 else None
        return None if value is None else _Candidate(changed, (*start.knobs, knob), value)

    low, high, before = 0, max(1, (knob.value(start.config) or 0) // knob.step), None
    while (found := at(high)) is None or found.value < target:
        low, high = high, 2 * high
        if knob.step * high > LARGEST or (before is not None and found is not None and found.value <= before.value):
            return
        before = found or before
    while high - low > 1:
        middle = _between(low, high, at(low), at(high), target)
        found = at(middle)
        if found is None or found.value < target:
            low = middle
        else:
            high = middle
    sides = [side for side in (at(low), at(high)) if side is not None]
    yield from sorted(sides, key=lambda side: abs(side.value / target - 1))
    for away in range(1, neighbours + 1):
        yield from (side for side in (at(low - away), at(high + away)) if side is not None)


def _between(low: int, high: int, below: _Candidate | None, above: _Candidate | None, target: float) -> int:
    """Where a line through both would reach the target, strictly between them; the middle without a line."""
    if below is None or above is None or above.value <= below.value:
        return (low + high) // 2
    share = (target - below.value) / (above.value - below.value)
    return min(max(low + round(share * (high - low)), low + 1), high - 1)


def _own(config: ConfigDict, knob: Knob) -> int | None:
    """The config's own value of a knob; where it follows from other sizes, the number of equal parameters."""
    value = knob.value(config)
    if value is not None:
        return value
    bench = _Bench(measure('params'))
    wanted = bench(config)
    one = dataclasses.replace(knob, step=2)
    if wanted is None:
        return None
    for found in _solved(_Candidate(config, (), wanted), one, wanted, bench):
        if found.value == wanted:
            return found.of(one)
    return None


def match_recipes(
    configs: dict[str, ConfigDict],
    by: str,
    target: str,
    tolerance: float,
    out: pathlib.Path,
    printer: Printer,
    *,
    multiples: Multiples = MULTIPLES['any'],
    below_range: bool = False,
) -> dict[str, Matched]:
    """Matches the config of each recipe, by its name in the zoo, and prints a table.

    Writes `NAME.json` and a `NAME.py` that reads it.

    `target` is a number, or the name of the recipe that the others are matched to as it stands. `below_range` takes
    states smaller than their papers try, or than the recipes' own where that is not known.

    Raises `UserError` for what is no row of the zoo, such as a pattern of rows, and what `match` raises.
    """
    for name in configs:
        if name not in ZOO:
            raise UserError(
                f'--recipes has {name!r}; a recipe is a row of the zoo, which says what sizes may be adjusted'
                f'{nearest(name, ZOO)}'
            )
    wanted = _target(configs, by, target)
    found: dict[str, Matched] = {}
    for name, config in configs.items():
        smallest = 1 if below_range else ZOO[name].smallest_state
        try:
            found[name] = match(
                config, by, wanted, tolerance, ZOO[name].knobs, multiples=multiples, smallest_state=smallest
            )
        except UserError as error:
            raise UserError(f'{name}: {error}') from error
    for name, one in found.items():
        save(one.config, out / f'{name}.json')
        files.write(out / f'{name}.py', READER.format(name=name, by=by, target=wanted, value=one.value))
    columns = (
        Column('recipe'),
        Column(by, digits(',.6g'), right=True),
        Column('off', digits('+.2%'), right=True),
        Column('adjusted', prose=True),
        Column('config', prose=True),
    )
    rows = [
        (name, one.value, one.off(wanted), shown(one.adjusted), str(out / f'{name}.py')) for name, one in found.items()
    ]
    printer.table(Table('matched', columns, rows, f'matched by {by} to {wanted:g}, within {tolerance:.1%}'))
    for name, one in found.items():
        if one.tolerance > tolerance:
            printer.line(
                f'{name}: no sizes in multiples of {multiples.width} are within {tolerance:.1%}; '
                f'widened to {one.tolerance:.1%}'
            )
    return found


READER = '''"""{name}, matched by {by} to {target:g}: it has {value:g}."""

import pathlib

from attnlab.config import load


def get_config(arg=''):
    """The config beside this file."""
    return load(pathlib.Path(__file__).with_suffix('.json')).unlock()
'''


def _target(configs: dict[str, ConfigDict], by: str, target: str) -> float:
    if target in configs:
        return measure(by)(prepare(configs[target]))
    try:
        wanted = float(target)
    except ValueError as error:
        raise UserError(f'--target is {target!r}; it must be a number or one of {", ".join(configs)}') from error
    if not 0 < wanted < math.inf:
        raise UserError(f'--target is {target}; it must be a number above 0')
    return wanted


def shown(adjusted: Mapping[str, Adjusted]) -> str:
    """What was adjusted, and the recipe's own values, as text: 'hidden 400 (its own: 384)'."""
    return (
        ', '.join(
            f'{name} {one.value}' + ('' if one.own is None else f' (its own: {one.own})')
            for name, one in adjusted.items()
        )
        or 'nothing'
    )
