"""Models of one size: width, heads and state of each recipe solved so that a measure of the built model agrees.

Nothing is declared: see `attnlab.compare.measures`.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Iterator, Mapping

from ml_collections import ConfigDict
from ml_collections.config_flags import config_path
from rich.console import Console
from rich.table import Table

from attnlab import files
from attnlab.compare.measures import Measure, measure
from attnlab.config import from_plain, plain, save
from attnlab.errors import UserError
from attnlab.train.run import flatten
from attnlab.train.setup import prepare
from attnlab.zoo import ZOO

LARGEST = 2**16
"""The largest value that is tried of an adjustable size."""

NEIGHBOURS = 8
"""Widths to either side that are tried where the state is what is solved."""


@dataclasses.dataclass(frozen=True)
class Knob:
    """A number that several keys of a config share, and the step in which it is adjusted."""

    name: str
    keys: tuple[str, ...]
    step: int = 1

    def apply(self, config: ConfigDict, value: int) -> ConfigDict:
        """The config with the number in each of its keys."""
        copy = from_plain(plain(config))
        for key in self.keys:
            config_path.set_value(key, copy, value)
        return copy.lock()


@dataclasses.dataclass(frozen=True)
class Matched:
    """A config that reaches the target, what was adjusted for it, and what it measures."""

    config: ConfigDict
    adjusted: dict[str, int]
    value: float

    def off(self, target: float) -> float:
        """How far from the target, as a share of it; below 0 for too little."""
        return self.value / target - 1


def match(config: ConfigDict, by: str, target: float, tolerance: float, knobs: Mapping[str, str]) -> Matched:
    """Solves a recipe's config for a measure. Of what reaches the target, the config changed least wins.

    By parameters, operations or time, the width is solved, and the hidden width of channel mixers takes up the rest, or
    the state where there are none; then with other heads. By bytes of state, the states or the channels of keys are
    solved, at the width there is, then at widths near it, then with other heads; at last the width as before.

    `knobs` are those of the recipe. Raises `UserError` where nothing comes within `tolerance`, a share of the target;
    it says what came nearest.
    """
    bench = _Bench(measure(by))
    nearest_found: Matched | None = None
    for found in _attempts(config, by, target, find_knobs(config, knobs), bench):
        if abs(found.off(target)) <= tolerance:
            return found
        if nearest_found is None or abs(found.off(target)) < abs(nearest_found.off(target)):
            nearest_found = found
    if nearest_found is None:
        raise UserError(f'the config cannot be built near {by} = {target:g}')
    raise UserError(
        f'{by} = {target:g} is not reached within {tolerance:.1%}; nearest is {nearest_found.value:g} '
        f'({nearest_found.off(target):+.2%}) with {_shown(nearest_found.adjusted)}'
    )


class _Bench:
    """Measures configs, each once; `None` for one that cannot be built."""

    def __init__(self, measure: Measure):
        self._measure = measure
        self._known: dict[str, float | None] = {}

    def __call__(self, config: ConfigDict) -> float | None:
        key = json.dumps(plain(config))
        if key not in self._known:
            try:
                self._known[key] = self._measure(prepare(config))
            except (UserError, ValueError, ZeroDivisionError):
                self._known[key] = None
        return self._known[key]


def _attempts(config: ConfigDict, by: str, target: float, knobs: dict[str, Knob], bench: _Bench) -> Iterator[Matched]:
    """The config as it is, then what comes nearest in each direction of search, the gentlest first."""
    value = bench(config)
    if value is not None:
        yield Matched(config, {}, value)
    width = _width(config, bench)
    if by.startswith('state_bytes') and 'state' in knobs:
        for changed, adjusted in _variants(config, knobs, width):
            yield from _solved(changed, adjusted, knobs['state'], target, bench)
    for changed, adjusted in _variants(config, knobs, None):
        for found in _solved(changed, adjusted, _width(changed, bench), target, bench):
            yield found
            for name in ('hidden', 'state'):
                if name in knobs:
                    yield from _solved(found.config, found.adjusted, knobs[name], target, bench)


def find_knobs(config: ConfigDict, knobs: Mapping[str, str]) -> dict[str, Knob]:
    """Returns the adjustable sizes of a config besides its width: those of its recipe, and the MLPs' hidden width."""
    ends = {name: (argument, f'.mixer.{argument}') for name, argument in knobs.items()}
    ends['hidden'] = ('hidden', '.mlp.hidden')
    leaves = flatten(config.model)
    found = {
        name: Knob(argument, tuple(f'model.{key}' for key in leaves if key.endswith(end)))
        for name, (argument, end) in ends.items()
    }
    return {name: knob for name, knob in found.items() if knob.keys}


def _variants(
    config: ConfigDict, knobs: dict[str, Knob], width: Knob | None
) -> Iterator[tuple[ConfigDict, dict[str, int]]]:
    """The config itself, then with neighbouring widths if there is a knob for them, then with other heads."""
    yield config, {}
    if width is not None:
        now = config.model.dim // width.step
        for count in (now + sign * away for away in range(1, NEIGHBOURS + 1) for sign in (1, -1)):
            if count > 0:
                yield width.apply(config, width.step * count), {'width': width.step * count}
    now = config_path.get_value(knobs['heads'].keys[0], config) if 'heads' in knobs else None
    if now is not None:
        for value in (now // 2, now * 2, now // 4, now * 4, now // 8, now * 8):
            if value > 0:
                yield knobs['heads'].apply(config, value), {knobs['heads'].name: value}


def _width(config: ConfigDict, bench: _Bench) -> Knob:
    """The width, in the smallest step that leaves a model that can be built."""
    now = config.model.dim
    for step in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        knob = Knob('width', ('model.dim',), step)
        start = max(1, now // step)
        if all(bench(knob.apply(config, step * count)) is not None for count in (start, start + 1)):
            return knob
    return Knob('width', ('model.dim',), now)


def _solved(
    config: ConfigDict, adjusted: dict[str, int], knob: Knob, target: float, bench: _Bench
) -> Iterator[Matched]:
    """The settings of a knob on either side of the target, the nearer first; the measure grows with the knob."""

    def at(count: int) -> Matched | None:
        changed = knob.apply(config, knob.step * count)
        value = bench(changed)
        return None if value is None else Matched(changed, {**adjusted, knob.name: knob.step * count}, value)

    low, high, before = 0, 1, None
    while (found := at(high)) is None or found.value < target:
        low, high = high, 2 * high
        if knob.step * high > LARGEST or (before is not None and found is not None and found.value <= before.value):
            return
        before = found or before
    while high - low > 1:
        middle = (low + high) // 2
        found = at(middle)
        if found is None or found.value < target:
            low = middle
        else:
            high = middle
    sides = [side for side in (at(low) if low else None, at(high)) if side is not None]
    yield from sorted(sides, key=lambda side: abs(side.off(target)))


def match_recipes(
    configs: dict[str, ConfigDict], by: str, target: str, tolerance: float, out: pathlib.Path, console: Console
) -> dict[str, Matched]:
    """Solves the config of each recipe, by its name in the zoo, and prints a table.

    Writes `NAME.json` and a `NAME.py` that reads it.

    `target` is a number, or the name of the recipe that the others are matched to as it stands.
    """
    wanted = _target(configs, by, target)
    found: dict[str, Matched] = {}
    for name, config in configs.items():
        try:
            found[name] = match(config, by, wanted, tolerance, ZOO[name].knobs)
        except UserError as error:
            raise UserError(f'{name}: {error}') from error
    table = Table(title=f'matched by {by} to {wanted:g}, within {tolerance:.1%}', title_justify='left')
    for column in ('recipe', by, 'off', 'adjusted', 'config'):
        table.add_column(column, justify='right' if column in (by, 'off') else 'left', overflow='fold')
    for name, one in found.items():
        save(one.config, out / f'{name}.json')
        files.write(out / f'{name}.py', READER.format(name=name, by=by, target=wanted, value=one.value))
        table.add_row(
            name, f'{one.value:,.6g}', f'{one.off(wanted):+.2%}', _shown(one.adjusted), str(out / f'{name}.py')
        )
    console.print(table)
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


def _shown(adjusted: dict[str, int]) -> str:
    return ', '.join(f'{name} {value}' for name, value in adjusted.items()) or 'nothing'
