"""`attnlab eval`: a finished or unfinished run, evaluated at and beyond the length it was trained on."""

import json
import os
import pathlib
from collections.abc import Mapping

import jax
from rich.console import Console
from rich.table import Table

from attnlab.analysis.loading import load_run
from attnlab.evals.cadence import AtEnd
from attnlab.evals.held_out import HeldOut


def evaluate_run(
    workdir: pathlib.Path,
    console: Console,
    step: int | None,
    split: str,
    multiples: tuple[int, ...],
    tokens: int | None,
) -> dict[str, float]:
    """Evaluates a checkpoint, prints a table, and writes `evals/<step>.json` and a figure of loss by position."""
    loaded = load_run(workdir, step)
    evaluator = HeldOut(cadence=AtEnd(), split=split, multiples=multiples, tokens=tokens)
    evaluation = evaluator.evaluate(loaded.setup, loaded.params)
    if jax.process_index() == 0:
        folder = workdir / 'evals'
        folder.mkdir(exist_ok=True)
        evaluation.draw(folder / str(loaded.step))
        path = folder / f'{loaded.step}.json'
        partial = path.with_suffix('.partial')
        numbers = {'step': loaded.step, 'split': split, **evaluation.numbers}
        partial.write_text(json.dumps(numbers, indent=2) + '\n')
        os.replace(partial, path)
        console.print(
            _table(evaluation.numbers, multiples, loaded.setup.length, f'{workdir}, step {loaded.step}, {split}')
        )
        console.print(
            f'written: {path}, {folder / str(loaded.step) / "position_loss.png"}', highlight=False, soft_wrap=True
        )
    return dict(evaluation.numbers)


def _table(numbers: Mapping[str, float], multiples: tuple[int, ...], length: int, title: str) -> Table:
    table = Table(title=title, title_justify='left')
    for column in ('window', 'tokens', 'nats/token', 'bits/byte', 'perplexity'):
        table.add_column(column, justify='right')
    for multiple in multiples:
        suffix = '' if multiple == multiples[0] else f'@{multiple}x'
        loss, bits, perplexity = (numbers[f'{name}{suffix}'] for name in ('loss', 'bits_per_byte', 'perplexity'))
        table.add_row(f'{multiple}x', str(multiple * length), f'{loss:.4f}', f'{bits:.4f}', f'{perplexity:.4g}')
    return table
