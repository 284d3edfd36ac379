"""Runs that are made of a run, with other parameters: written, and evaluated as that was in training."""

import contextlib
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from ml_collections import ConfigDict

from attnlab.errors import UserError
from attnlab.runs.loading import Loaded
from attnlab.tables import Column, Table, digits
from attnlab.train import run
from attnlab.train.average import SUFFIX
from attnlab.train.checkpoint import Checkpoints
from attnlab.train.launch import run_facts
from attnlab.train.metrics_file import METRICS, append_line, is_accessory, read_lines
from attnlab.train.setup import Setup
from attnlab.train.state import TrainState, split


def check_new(workdir: pathlib.Path, out: pathlib.Path, flag: str) -> None:
    """Raises `UserError` for a folder `out`, given by `flag`, that is the run itself or holds a run."""
    if out.resolve() == workdir.resolve():
        raise UserError(f'{flag} is {out}, the run itself; give it a folder of its own')
    if _taken(out):
        raise UserError(f'{out} holds a run already; give {flag} a new folder')


def _taken(out: pathlib.Path) -> bool:
    """Whether a folder holds a run that is complete, or checkpoints that no command which makes runs has written."""
    if (out / METRICS).exists():
        return True
    recorded = run.starts(out)
    return (out / 'checkpoints').exists() and not (recorded and run.makings(recorded[-1]))


def write_made(
    workdir: pathlib.Path,
    loaded: Loaded,
    made: Loaded,
    out: pathlib.Path,
    facts: Mapping[str, Any],
    config: ConfigDict | None = None,
) -> dict[str, float]:
    """Writes a run made of the one in `workdir` and returns the numbers of its evaluators, as `metrics.jsonl` has them.

    It has the facts of that run, and those given in their place; `config` is that of the run unless another is given.
    It keeps no optimiser state and no average of parameters. What an interrupted command has left is written anew.
    Raises `UserError` where `out` holds something else.
    """
    config = run.saved_config(workdir) if config is None else config
    with config.unlocked():
        if loaded.setup.optimizer.ema is not None:
            config.optimizer.ema = None
    run.claim(out, config)
    with run.held(out):
        # Another command may have come first since `check_new`.
        check_new(workdir, out, 'the command')
        # Configs do not tell what was made apart, so that the parameters may be those of another command: they go
        # before its facts do.
        if (out / 'checkpoints').exists():
            shutil.rmtree(out / 'checkpoints')
        before = [making for start in run.starts(workdir)[-1:] for making in run.makings(start)]
        run.record(out, {**recorded_facts(loaded.setup, workdir), **facts, 'made_before': before})
        loaded.setup.task.save(out)
        save_model(made, out)
        numbers = evaluated(made)
        append_line(out / METRICS, {'step': made.step, **numbers})
    return numbers


def recorded_facts(setup: Setup, workdir: pathlib.Path) -> dict[str, Any]:
    """What the run recorded of its model, data and training; of one that recorded nothing what it would record now."""
    recorded = run.starts(workdir)
    return {name: recorded[-1][name] for name in sorted(run.FACTS)} if recorded else run_facts(setup)


def save_model(made: Loaded, out: pathlib.Path) -> None:
    """Writes the checkpoint."""
    _, params, buffers = split(made.model())
    with contextlib.closing(Checkpoints(out / 'checkpoints', notify=lambda line: None)) as checkpoints:
        state = TrainState(params, (), jnp.int32(made.step), buffers)
        checkpoints.save(made.step, state, {'step': made.step, 'sums': {}})


def evaluated(made: Loaded) -> dict[str, float]:
    """The numbers of every evaluator of the run, as `metrics.jsonl` has them."""
    found: dict[str, float] = {}
    for evaluator in made.setup.evals:
        numbers = evaluator.evaluate(made.setup, made.variables).numbers
        found |= {f'{evaluator.name}/{name}': value for name, value in numbers.items()}
    return found


def reported(workdir: pathlib.Path, step: int, ema: bool) -> dict[str, float]:
    """What a run reported of its evaluation after a step, of the average of its parameters if that is asked for."""
    lines = [line for line in read_lines(workdir / METRICS) if line['step'] == step]
    found = {name: float(value) for line in lines for name, value in line.items()}
    if not ema:
        return found
    parts = {name: name.partition('/') for name in found}
    return {
        f'{each.removesuffix(SUFFIX)}/{metric}': found[name]
        for name, (each, _, metric) in parts.items()
        if each.endswith(SUFFIX)
    }


def score_table(numbers: Mapping[str, float], before: Mapping[str, float]) -> Table:
    """The numbers of the run made beside those of the run that it is made of."""
    columns = (
        Column('metric'),
        Column('before', digits('.4f'), right=True),
        Column('after', digits('.4f'), right=True),
        Column('change', digits('+.4f'), right=True),
    )
    rows = [
        (name, before.get(name), value, value - before[name] if name in before else None)
        for name, value in numbers.items()
        if not is_accessory(name)
    ]
    return Table('scores', columns, rows, 'evaluated as in training')
