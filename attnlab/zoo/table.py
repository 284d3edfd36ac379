"""`attnlab zoo`: the recipes, with what each claims and the state it was measured to keep."""

import jax
import jax.numpy as jnp
from flax import nnx
from rich.console import Console
from rich.table import Table

from attnlab.config import build, takes
from attnlab.zoo import ZOO, Recipe

DIM, HEADS, LENGTHS = 256, 4, (1024, 8192)
COLUMNS = ('recipe', 'class', 'paper', 'claims', *(f'state at {length}' for length in LENGTHS))


def print_zoo(console: Console, *, markdown: bool) -> None:
    """Prints the table, for reading or for docs/zoo.md."""
    rows = [_row(name, recipe) for name, recipe in ZOO.items()]
    caption = f'State: bytes a sequence and layer (mean over the pattern) in float32 at width {DIM}, {HEADS} heads.'
    if markdown:
        print('\n'.join([*_markdown(rows), '', caption]))
        return
    table = Table(caption=caption, caption_justify='left')
    for column in COLUMNS:
        table.add_column(column, justify='right' if column.startswith('state') else 'left', overflow='fold')
    for row in rows:
        table.add_row(*row)
    console.print(table)


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
    claims = [
        claim for claim in ('causal', 'bidirectional', 'mirrored', 'streaming', 'packed') if getattr(recipe, claim)
    ]
    sizes = [f'{state_bytes(recipe, length):,.0f}' for length in LENGTHS]
    return name, ', '.join(classes), recipe.cite, ', '.join(claims), *sizes


def _markdown(rows: list[tuple[str, ...]]) -> list[str]:
    lines = [COLUMNS, tuple('---' for _ in COLUMNS), *rows]
    return [f'| {" | ".join(line)} |' for line in lines]
