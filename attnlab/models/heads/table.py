"""`attnlab zoo --heads`: the heads, with what each claims and the parameters that it has; one of them whole."""

import functools
import math
from typing import Any

import jax
from flax import nnx

from attnlab.config import build, flatten, takes
from attnlab.errors import UserError, nearest
from attnlab.models.heads.registry import CLASSIFIERS, HEADS, REGRESSORS, HeadRecipe
from attnlab.tables import Column, Printer, Table, digits, pairs, print_rows

DIM, VOCAB = 256, 8192
EVERY = {**HEADS, **CLASSIFIERS, **REGRESSORS}
CLAIMS = ('normalised', 'exact', 'derived', 'streams', 'divided')
CAPTION = (
    'Cost: products with a vector that the loss of a token takes. '
    f'Parameters: at width {DIM}, {VOCAB} classes or one number.'
)
COLUMNS = (
    Column('head'),
    Column('class', prose=True),
    Column('paper', rank=3),
    Column('claims', rank=2),
    Column('cost', rank=1),
    Column('parameters', digits(',.0f'), right=True),
)


def print_heads(printer: Printer) -> None:
    """Prints the table of all heads; as Markdown with the notes, for docs/heads.md."""
    table = Table('heads', COLUMNS, [_row(name, head) for name, head in EVERY.items()])
    print_rows(printer, table, CAPTION, {name: head.notes for name, head in EVERY.items()})


def print_head(printer: Printer, name: str) -> None:
    """Prints one head whole: paper, claims, cost, notes and spec. Raises `UserError` for a name that is none."""
    if name not in EVERY:
        raise UserError(f'there is no head {name!r}{nearest(name, EVERY)}')
    head = EVERY[name]
    facts = {
        'head': name,
        'paper': head.cite,
        'claims': ', '.join(_claims(head)),
        'cost': head.cost,
        'notes': head.notes or 'none',
    }
    printer.table(pairs('head', facts))
    printer.table(pairs('spec', flatten(head.spec), 'spec'))


def parameters(head: HeadRecipe) -> int:
    """The number of parameters at width `DIM` and `VOCAB` tokens, or one real number."""
    sizes = {'classes': VOCAB} if 'classes' in takes(head.spec) else {}
    made = jax.eval_shape(functools.partial(_made, build(head.spec), VOCAB if head.normalised else 1, sizes))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(made))


def _made(factory: Any, outputs: int, sizes: dict[str, int]) -> nnx.State:
    return nnx.state(factory(DIM, outputs, **sizes, rngs=nnx.Rngs(0)), nnx.Param)


def _row(name: str, head: HeadRecipe) -> tuple[Any, ...]:
    return name, head.spec.target.rpartition('.')[2], head.cite, ', '.join(_claims(head)), head.cost, parameters(head)


def _claims(head: HeadRecipe) -> list[str]:
    return [claim for claim in CLAIMS if getattr(head, claim)]
