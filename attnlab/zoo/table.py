"""`attnlab zoo`: the recipes, with what each claims and the state it was measured to keep; one of them whole."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from attnlab.config import build, flatten
from attnlab.errors import UserError, nearest
from attnlab.mixers.mixer import Mixer
from attnlab.tables import Column, Printer, Table, digits, pairs, print_rows
from attnlab.typing import State
from attnlab.zoo import ZOO, Recipe

DIM, HEADS, LENGTHS = 256, 4, (1024, 8192)
CLAIMS = (
    'causal',
    'bidirectional',
    'mirrored',
    'streaming',
    'packed',
    'sequence',
    'grid',
    'sparse',
    'straight_through',
)
CAPTION = (
    f'State: bytes per sequence and layer (mean over the pattern), in float32 at width {DIM} with {HEADS} heads; '
    'none without streaming.'
)
COLUMNS = (
    Column('recipe'),
    Column('class', prose=True),
    Column('paper', rank=3),
    Column('claims', rank=2),
    *(Column(f'state at {length}', digits(',.0f'), right=True, rank=1) for length in LENGTHS),
)


def print_zoo(printer: Printer) -> None:
    """Prints the table of all recipes; as Markdown with the notes, for docs/zoo.md."""
    table = Table('recipes', COLUMNS, [_row(name, recipe) for name, recipe in ZOO.items()])
    print_rows(printer, table, CAPTION, {name: recipe.notes for name, recipe in ZOO.items()})


def print_recipe(printer: Printer, name: str) -> None:
    """Prints one recipe whole: paper, claims, kernels, notes and spec. Raises `UserError` for a name that is none."""
    if name not in ZOO:
        raise UserError(f'there is no recipe {name!r}{nearest(name, ZOO)}')
    recipe = ZOO[name]
    facts = {
        'recipe': name,
        'paper': recipe.cite,
        'claims': ', '.join(_claims(recipe)),
        'kernels': ', '.join(recipe.implementations) or 'none',
        'notes': recipe.notes or 'none',
    }
    printer.table(pairs('recipe', facts))
    printer.table(pairs('spec', flatten(recipe.spec), 'spec'))


def state_bytes(recipe: Recipe, lengths: Sequence[int]) -> list[float]:
    """Bytes of state a layer for each length, measured from `init_state`, the mean over the recipe's pattern."""
    sizes, layers = [], 0
    for mixer in recipe.sized(heads=HEADS):
        layers += mixer.layers if 'layers' in mixer else 1
        states = jax.eval_shape(functools.partial(_states, build(mixer), tuple(lengths)))
        sizes.append([sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)) for state in states])
    return [sum(each) / layers for each in zip(*sizes, strict=True)]


def _states(factory: Callable[..., Mixer], lengths: tuple[int, ...]) -> list[State]:
    mixer = factory(DIM, rngs=nnx.Rngs(0))
    return [mixer.init_state(1, length, jnp.float32) for length in lengths]


def _row(name: str, recipe: Recipe) -> tuple[Any, ...]:
    classes = dict.fromkeys(mixer.target.rpartition('.')[2] for mixer in recipe.pattern)
    sizes = state_bytes(recipe, LENGTHS) if recipe.streaming else (None,) * len(LENGTHS)
    return name, ', '.join(classes), recipe.cite, ', '.join(_claims(recipe)), *sizes


def _claims(recipe: Recipe) -> list[str]:
    return [claim.replace('_', '-') for claim in CLAIMS if getattr(recipe, claim)]
