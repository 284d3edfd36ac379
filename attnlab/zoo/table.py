"""`attnlab zoo`: the recipes, with what each claims and the state it was measured to keep; one of them whole."""

import json

import jax
import jax.numpy as jnp
from flax import nnx
from rich.console import Console
from rich.table import Table

from attnlab.config import build, plain, takes
from attnlab.errors import UserError, nearest
from attnlab.zoo import ZOO, Recipe

DIM, HEADS, LENGTHS = 256, 4, (1024, 8192)
CLAIMS = ('causal', 'bidirectional', 'mirrored', 'streaming', 'packed', 'sequence')
COLUMNS = ('recipe', 'class', 'paper', 'claims', *(f'state at {length}' for length in LENGTHS))


def print_zoo(console: Console, *, markdown: bool) -> None:
    """Prints the table, for reading or for docs/zoo.md."""
    rows = [_row(name, recipe) for name, recipe in ZOO.items()]
    caption = f'State: bytes a sequence and layer (mean over the pattern) in float32 at width {DIM}, {HEADS} heads.'
    if markdown:
        notes = [f'- **{name}**: {recipe.notes}' for name, recipe in ZOO.items() if recipe.notes]
        print('\n'.join([*_markdown(rows), '', caption, '', '## Notes', '', *notes]))
        return
    if not console.is_terminal:
        # Names stay whole for what reads them, such as grep.
        console.file.write(''.join('\t'.join(row) + '\n' for row in (COLUMNS, *rows)))
        return
    table = Table(caption=caption, caption_justify='left')
    for column in COLUMNS:
        table.add_column(column, justify='right' if column.startswith('state') else 'left', overflow='fold')
    for row in rows:
        table.add_row(*row)
    console.print(table)


def print_recipe(console: Console, name: str) -> None:
    """Prints one recipe whole: paper, claims, kernels, notes and spec. Raises `UserError` for a name that is none."""
    if name not in ZOO:
        raise UserError(f'there is no recipe {name!r}{nearest(name, ZOO)}')
    recipe = ZOO[name]
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row('recipe', name)
    table.add_row('paper', recipe.cite)
    table.add_row('claims', ', '.join(_claims(recipe)))
    table.add_row('kernels', ', '.join(recipe.implementations) or 'none')
    table.add_row('notes', recipe.notes or 'none')
    console.print(table)
    console.print_json(json.dumps(plain(recipe.spec)))


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


def _row(name: str, recipe: Recipe) -> tuple[str, ...]:
    classes = dict.fromkeys(mixer.target.rpartition('.')[2] for mixer in recipe.pattern)
    sizes = [f'{state_bytes(recipe, length):,.0f}' for length in LENGTHS]
    return name, ', '.join(classes), recipe.cite, ', '.join(_claims(recipe)), *sizes


def _claims(recipe: Recipe) -> list[str]:
    return [claim for claim in CLAIMS if getattr(recipe, claim)]


def _markdown(rows: list[tuple[str, ...]]) -> list[str]:
    lines = [COLUMNS, tuple('---' for _ in COLUMNS), *rows]
    return [f'| {" | ".join(line)} |' for line in lines]
