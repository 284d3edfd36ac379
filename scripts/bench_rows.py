"""Times one training step of every recipe of sequences against that of one of them, in turns.

    python scripts/bench_rows.py --out=docs/rows/cpu.json
    python scripts/bench_rows.py --length=4096 --batch=1 --against=mha --out=docs/rows/cpu_4096.json mha s4 hyena
    python scripts/bench_rows.py --both_ways --out=docs/rows/cpu_both_ways.json
    python scripts/bench_rows.py --depth=8 --out=docs/rows/cpu_stacks.json gla jamba griffin
    python scripts/bench_rows.py --page=docs/rows.md docs/rows/cpu.json docs/rows/cpu_4096.json

The step is the trainer's own. Models have one width, and by their hidden width or depth the parameters of the recipe
that they are timed against; what cannot have them is timed as it is, and says how many it has. A pattern of layers that
is longer than the depth is left out: its rows are in the table, and `--depth` times it whole. With `--both_ways`
recipes that have no causal form give sequences a label of ten, and so does the one that they are timed against, read
both ways. Programs are kept between calls (`--programs`), so a first call on a busy machine spares a second on a quiet
one the compiling. The record is written after every recipe, and what it has is not timed again.
"""

import dataclasses
import json
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags
from attnlab_step import random_batch
from ml_collections import ConfigDict
from turns import JaxContender, Turn, machine, summarise, take_turns

from attnlab.compare.match import match
from attnlab.compare.measures import parameters
from attnlab.configuration import config_of
from attnlab.data.long_range.listops import SYMBOLS
from attnlab.errors import UserError
from attnlab.files import write, write_json
from attnlab.train.devices import keep_freed_memory
from attnlab.train.setup import Setup, prepare
from attnlab.zoo import ZOO

_OUT = flags.DEFINE_string('out', None, 'The JSON file of the times; it is gone on with where it is there.')
_PAGE = flags.DEFINE_string('page', None, 'Time nothing; make this page of the files that are named.')
_AGAINST = flags.DEFINE_string('against', 'gla', 'The recipe that the others are timed against.')
_LENGTH = flags.DEFINE_integer('length', 256, 'Tokens of a sequence.', lower_bound=1)
_BATCH = flags.DEFINE_integer('batch', 8, 'Sequences of a step.', lower_bound=1)
_ROUNDS = flags.DEFINE_integer('rounds', 5, 'How often the two take turns.', lower_bound=2)
_BURST = flags.DEFINE_integer('burst', 2, 'Timed steps of one turn, after an untimed one.', lower_bound=1)
_DEPTH = flags.DEFINE_integer('depth', 2, 'Layers.', lower_bound=1)
_BOTH_WAYS = flags.DEFINE_bool('both_ways', False, 'Time recipes without a causal form, which label sequences.')
_PROGRAMS = flags.DEFINE_string('programs', None, 'The folder where compiled programs are kept.')

DIM = 256
TOLERANCE = 0.02


@dataclasses.dataclass(frozen=True)
class Size:
    """Of one step.

    Attributes:
      both_ways: whether sequences are read both ways, for a label, or from left to right, for the next token.
      depth: layers.
    """

    length: int
    batch: int
    both_ways: bool = False
    depth: int = 2

    @property
    def tokens(self) -> int:
        return self.length * self.batch


def config(name: str, size: Size) -> ConfigDict:
    """The recipe in as many layers, of the width that all have."""
    file, arg = ('long_range', 'task=listops,size=smoke') if size.both_ways else ('language', 'size=tiny')
    made = config_of(pathlib.Path(file), f'zoo={name},{arg}')
    with made.unlocked():
        made.update(batch_size=size.batch, length=size.length)
        made.model.dim, made.model.stack.depth = DIM, size.depth
    return made


def contender(setup: Setup, size: Size) -> JaxContender:
    """The trainer's step on random tokens."""
    program, scalars = setup.compiled.program, setup.scalars

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        state, metrics = program(state, batch, state.step + 1, scalars)
        return state, metrics['loss'].mean()

    batch = labelled(size) if size.both_ways else random_batch(size.batch, size.length, 256)
    return JaxContender(jax.jit(step, donate_argnums=0), setup.initialize(), batch)


def labelled(size: Size) -> dict[str, jax.Array]:
    """Random tokens and a label of ten, a document a row."""
    batch = random_batch(size.batch, size.length, len(SYMBOLS))
    kept = {name: batch[name] for name in ('tokens', 'segments', 'positions')}
    label = jnp.arange(size.batch, dtype=jnp.int32) % 10
    return {**kept, 'label': label, 'weights': jnp.ones(size.batch, jnp.float32)}


def matched(name: str, size: Size, target: float) -> tuple[Setup, str]:
    """The run with that many parameters, and what was adjusted for it; or as it is, and why."""
    made = config(name, size)
    try:
        found = match(made, 'params', target, TOLERANCE, ZOO[name].knobs)
    except UserError as error:
        return prepare(made), f'none: {error}'
    return prepare(found.config), ', '.join(f'{key} {one.value}' for key, one in found.adjusted.items())


def timed(name: str, size: Size, baseline: JaxContender, target: float) -> dict[str, Any]:
    """What a step of the recipe takes, and of the one that it is timed against in the same minutes."""
    setup, adjusted = matched(name, size, target)
    ours = contender(setup, size)
    turns: dict[str, list[Turn]] = take_turns({'ours': ours, 'theirs': baseline}, _ROUNDS.value, _BURST.value)
    return {
        **summarise(turns['ours'], turns['theirs'], size.tokens),
        **ours.facts(),
        'parameters': parameters(setup),
        'adjusted': adjusted,
    }


def names(asked: Sequence[str]) -> Iterator[str]:
    """The recipes to be timed."""
    for name in (*asked, _AGAINST.value):
        if name not in ZOO:
            raise app.UsageError(f'no recipe is called {name!r}; attnlab zoo lists them')
        if _BOTH_WAYS.value and not ZOO[name].bidirectional:
            raise app.UsageError(f'--both_ways, and {name!r} reads from left to right alone')
    for name, recipe in ZOO.items():
        timed_unasked = recipe.causal != _BOTH_WAYS.value and not recipe.grid and len(recipe.pattern) <= _DEPTH.value
        if name in asked if asked else timed_unasked:
            yield name


def asked_size() -> Size:
    """That of the flags."""
    return Size(_LENGTH.value, _BATCH.value, _BOTH_WAYS.value, _DEPTH.value)


def begun(out: pathlib.Path) -> dict[str, Any]:
    """The record that is there, or an empty one. Raises UsageError where it is of another size, recipe or commit."""
    size = dataclasses.asdict(asked_size())
    fresh: dict[str, Any] = {
        'size': size,
        'against': _AGAINST.value,
        'machine': machine(),
        'command': sys.argv,
        'rows': {},
    }
    if not out.exists():
        return fresh | {'failed': {}}
    record = json.loads(out.read_text())
    for name, now, before in (
        ('the size', size, dataclasses.asdict(Size(**record['size']))),
        ('the recipe they are against', fresh['against'], record['against']),
        ('the commit', fresh['machine']['commit'], record['machine']['commit']),
    ):
        if now != before:
            raise app.UsageError(f'{out} has times where {name} was {before}, not {now}; name another file')
    return record


def measure(asked: Sequence[str], out: pathlib.Path) -> None:
    """Times recipes, and writes the record after each."""
    keep_freed_memory()
    chosen, record, size = list(names(asked)), begun(out), asked_size()
    setup = prepare(config(_AGAINST.value, size))
    baseline, target = contender(setup, size), parameters(setup)
    for name in chosen:
        if name in record['rows']:
            continue
        try:
            record['rows'][name] = timed(name, size, baseline, target)
        except UserError as error:
            record['failed'][name] = str(error)
        write_json(out, record)
        print(name, json.dumps(record['rows'].get(name) or record['failed'][name]), flush=True)


PAGE = """# What a training step of every mixer takes

The trainer's own step, width 256, two layers where no other depth is named, at equal parameters where sizes for them
are found. "x" is the time over that of the recipe named above the table, in turns in one process, with a 95 % interval
over rounds. GPU and TPU: unmeasured. Made by

    {command}
"""


def page(records: Sequence[pathlib.Path]) -> str:
    """The page of several records."""
    command = ' '.join(['python scripts/bench_rows.py --page=docs/rows.md', *map(str, records)])
    return '\n'.join([PAGE.format(command=command), *(section(json.loads(path.read_text())) for path in records)])


def section(record: Mapping[str, Any]) -> str:
    """The table of a record, the fastest first."""
    where, size = record['machine'], Size(**record['size'])
    kind = ', read both ways for a label' if size.both_ways else ''
    kind += f', depth {size.depth}' if size.depth != Size.depth else ''
    versions = ', '.join(f'{name} {version}' for name, version in where['versions'].items())
    command = re.sub(r'\S*scripts/', 'scripts/', ' '.join(record['command']))
    lines = [
        f'## {size.batch} x {size.length} tokens{kind}, against `{record["against"]}`\n',
        f'    python {command}\n',
        f'{where["cores"]} cores, {where["cpu"]}; {versions}; {where["date"][:10]}; commit {where["commit"]}.\n',
        '| recipe | ms | x | by processor time | temporaries, MiB | parameters | adjusted |',
        '|---|---|---|---|---|---|---|',
    ]
    for name, row in sorted(record['rows'].items(), key=lambda item: item[1]['cpu_ms']):
        times, cpu = ({key: 1 / value for key, value in row[kind].items()} for kind in ('speed', 'speed_by_cpu_time'))
        lines.append(
            f'| `{name}` | {row["step_ms"]:.1f} | {times["median"]:.2f} ({times["high"]:.2f} to {times["low"]:.2f}) | '
            f'{cpu["median"]:.2f} | {row["temporary_bytes"] / 2**20:.0f} | {row["parameters"]:,.0f} | '
            f'{row["adjusted"]} |'
        )
    lines += [f'\n`{name}` was not timed: {reason}' for name, reason in record['failed'].items()]
    return '\n'.join(lines) + '\n'


def main(argv: Sequence[str]) -> None:
    """Times recipes, or makes the page."""
    if _PAGE.value:
        write(pathlib.Path(_PAGE.value), page([pathlib.Path(name) for name in argv[1:]]))
        return
    if not _OUT.value:
        raise app.UsageError('--out, the file of the times, is not given')
    if _PROGRAMS.value:
        jax.config.update('jax_compilation_cache_dir', _PROGRAMS.value)
        jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
    measure(argv[1:], pathlib.Path(_OUT.value))


if __name__ == '__main__':
    app.run(main)
