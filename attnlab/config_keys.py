"""`attnlab config`: every key of a config with its value, its type and what its class says of it."""

import dataclasses
import inspect
import re
import types
from collections.abc import Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict
from rich.text import Text

from attnlab.config import TARGET
from attnlab.signature import PLAIN, Parameter, members, parameters
from attnlab.tables import TERMINAL, Column, Printer, Table, visible, wrapped
from attnlab.trust import named

RUN = {
    'accumulate': 'micro-batches per step, processed in turn',
    'batch_size': 'rows per step',
    'checkpoint': 'how often checkpoints are saved, and how many are kept',
    'evals': 'what is evaluated, and when',
    'length': 'tokens per row',
    'mesh': 'how devices divide the work',
    'model': 'what is trained',
    'optimizer': 'how the model is trained',
    'precision': 'dtype of activations, precision of matrix products',
    'quantization': 'post-training quantization, set by attnlab quantize',
    'report': 'what is logged',
    'rounding': 'quantization during training, set by rounding=',
    'rows_at_once': 'most rows of a micro-batch on one device; more micro-batches are used to stay within it',
    'seed': 'seed of initial parameters, data order and dropout',
    'start': 'the parameters to start from, in place of random ones',
    'steps': 'training steps',
    'task': 'the task and its data',
}
"""What the keys of a run are."""


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of a config.

    Attributes:
      key: as an override spells it, `--config.KEY=VALUE`.
      value: as an override spells it; for a part, the import path of its class.
      kind: its type: those of plain values, or a part, which is what a class makes.
      doc: what the docstring of the class that takes it says of it; for a part, what its own class is.
    """

    key: str
    value: str
    kind: str
    doc: str


Group = tuple[Key, ...]
"""A part, which heads its group, and its plain keys; the first group is of the config's own keys and has no head."""


def groups(config: ConfigDict, own: Mapping[str, str]) -> list[Group]:
    """The keys of a config by the parts that they belong to; `own` says what its own keys are, where it is no run."""
    return [group for group in _groups(config, '', None, own) if group]


def documented(target: Any) -> dict[str, str]:
    """What the docstrings of a class, of its bases and of their constructors say of each argument; or of a function."""
    sources = [target]
    if isinstance(target, type):
        sources = [source for base in reversed(target.__mro__[:-1]) for source in (base, vars(base).get('__init__'))]
    found: dict[str, str] = {}
    for source in sources:
        found |= arguments_of(inspect.getdoc(source) or '' if getattr(source, '__doc__', None) else '')
    return found


def arguments_of(docstring: str) -> dict[str, str]:
    """The arguments or attributes that a docstring lists, each in one line."""
    found: dict[str, str] = {}
    for section in re.split(r'^(?:Args|Attributes):\n', docstring, flags=re.MULTILINE)[1:]:
        listed = re.split(r'^(?=\S)', section, maxsplit=1, flags=re.MULTILINE)[0]
        for names, text in re.findall(r'^  (\w[\w, ]*): ((?:.*\n?)(?:^ {3,}.*\n?)*)', listed, flags=re.MULTILINE):
            found |= dict.fromkeys(names.split(', '), ' '.join(text.split()))
    return found


def print_config(config: ConfigDict, printer: Printer, own: Mapping[str, str]) -> None:
    """Prints every key: `key = value  # type: doc` where no terminal folds it, a group a part."""
    found = groups(config, own)
    if printer.form not in ('plain', TERMINAL):
        columns = [Column(field.name) for field in dataclasses.fields(Key)]
        printer.table(Table('config', columns, [dataclasses.astuple(entry) for group in found for entry in group]))
        return
    for number, group in enumerate(found):
        if number:
            printer.line('')
        for entry in group:
            _print_entry(entry, printer)


def _print_entry(entry: Key, printer: Printer) -> None:
    said = f'{entry.kind}: {entry.doc}' if entry.doc else entry.kind
    if printer.form == 'plain':
        printer.line(f'{entry.key} = {entry.value}  # {said}')
        return
    head = Text(visible(f'{entry.key} = {entry.value}'), style='bold' if entry.kind.startswith('part') else '')
    printer.console.print(head, soft_wrap=True)
    for line in wrapped(visible(said), printer.console.width - 4):
        printer.console.print(Text(f'    {line}', style='dim'), soft_wrap=True)


def _groups(config: ConfigDict, path: str, head: Key | None, docs: Mapping[str, str]) -> Iterator[Group]:
    """The group of a part, then those of the parts in it."""
    target = named(config[TARGET], path) if TARGET in config else None
    taken = {} if target is None else parameters(target)
    docs = documented(target) if target is not None else RUN if 'model' in config else docs
    plain = [] if head is None else [head]
    parts: list[tuple[str, ConfigDict, str]] = []
    for name in config:
        key, doc = f'{path}.{name}' if path else name, docs.get(name, '')
        value = config[name]
        if isinstance(value, ConfigDict):
            parts.append((key, value, doc))
        elif _holds_parts(value):
            parts += [(f'{key}[{index}]', part, doc) for index, part in enumerate(value)]
        elif name in taken:
            plain.append(Key(key, str(value), _kind(value, taken[name]), doc))
        elif name != TARGET:
            plain.append(Key(key, str(value), type(value).__name__, doc))
    yield tuple(plain)
    for key, part, doc in parts:
        yield from _groups(part, key, _head(key, part, doc), {})


def _head(key: str, part: ConfigDict, doc: str) -> Key | None:
    """The entry of a part; `None` for keys that are grouped, and no part."""
    if TARGET not in part:
        return None
    said = [doc.rstrip('.'), _summary(named(part[TARGET], key))]
    return Key(key, part[TARGET], 'part', '. '.join(filter(None, said)))


def _summary(target: Any) -> str:
    """The first sentence of a docstring; a dataclass without one has its signature, which says nothing here."""
    paragraph = ' '.join((inspect.getdoc(target) or '').partition('\n\n')[0].split())
    return '' if paragraph.startswith(f'{target.__name__}(') else paragraph


def _holds_parts(value: Any) -> bool:
    return isinstance(value, tuple) and any(isinstance(item, ConfigDict) for item in value)


def _kind(value: Any, taken: Parameter) -> str:
    """The type of a plain value, or of one that is not set."""
    kinds = members(taken.kind)
    optional = types.NoneType in kinds or taken.default is None
    names = [kind.__name__ for kind in kinds if kind in PLAIN and kind is not types.NoneType]
    if any(kind not in PLAIN for kind in kinds):
        names.append('part' if value is None else type(value).__name__)
    return ' or '.join(dict.fromkeys([*names, *(['None'] if optional else [])]))
