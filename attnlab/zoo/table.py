"""`attnlab zoo`: the recipes, with what each claims and the state it was measured to keep; one of them whole."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from attnlab.config import build, flatten, takes
from attnlab.errors import UserError, nearest
from attnlab.tables import Column, Printer, Table, digits, pairs
from attnlab.zoo import ZOO, Recipe

DIM, HEADS, LENGTHS = 256, 4, (1024, 8192)
CLAIMS = ('causal', 'bidirectional', 'mirrored', 'streaming', 'packed', 'sequence')
CAPTION = f'State: bytes a sequence and layer (mean over the pattern) in float32 at width {DIM}, {HEADS} heads.'
COLUMNS = (
    Column('recipe'),
    Column('class', prose=True),
    Column('paper', rank=3),
    Column('claims', rank=2),
    *(Column(f'state at {length}', digits(',.0f'), right=True, rank=1) for length in LENGTHS),
)


def print_zoo(printer: Printer) -> None:
    """Prints the table of all recipes; as Markdown with the notes, for docs/zoo.md."""
    printer.table(Table('recipes', COLUMNS, [_row(name, recipe) for name, recipe in ZOO.items()]))
    if printer.form != 'plain':
        printer.line(CAPTION)
    if printer.form == 'markdown':
        notes = [f'- **{name}**: {recipe.notes}' for name, recipe in ZOO.items() if recipe.notes]
        printer.line('\n'.join(['## Notes', '', *notes]))


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


def state_bytes(recipe: Recipe, length: int) -> float:
    """Bytes of state a layer, measured from `init_state`, the mean over the recipe's pattern."""
    sizes, layers = [], 0
    for mixer in recipe.pattern:
        mixer = mixer.copy_and_resolve_references()
        if 'heads' in takes(mixer) and 'heads' not in mixer:
            mixer.heads = HEADS
        factory = build(mixer)
        layers += mixer.layers if 'layers' in mixer else 1
        make = lambda factory=factory: factory(DIM, rngs=nnx.Rngs(0)).init_state(1, length, jnp.float32)  # noqa: E731
        sizes.append(sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(make))))
    return sum(sizes) / layers


def _row(name: str, recipe: Recipe) -> tuple[Any, ...]:
    classes = dict.fromkeys(mixer.target.rpartition('.')[2] for mixer in recipe.pattern)
    sizes = [state_bytes(recipe, length) for length in LENGTHS]
    return name, ', '.join(classes), recipe.cite, ', '.join(_claims(recipe)), *sizes


def _claims(recipe: Recipe) -> list[str]:
    return [claim for claim in CLAIMS if getattr(recipe, claim)]
