"""`attnlab train`: claims the work directory, records the start, trains."""

import dataclasses
import pathlib
import shlex
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax
from ml_collections import ConfigDict
from rich.console import Console

from attnlab.errors import UserError
from attnlab.train import loop, run
from attnlab.train.cost import flops_per_token, implementations, parameters, state_bytes, weight_bytes
from attnlab.train.fork import Fork
from attnlab.train.profile import Profile
from attnlab.train.run import QUANTIZATION
from attnlab.train.setup import Setup, prepare
from attnlab.trust import allowed

STOPPED = 75
"""The exit status of a run that was asked to stop and saved, EX_TEMPFAIL: the same command resumes it."""


def launch(
    config: ConfigDict,
    workdir: pathlib.Path,
    *,
    console: Console,
    data_workers: int = 0,
    other_data: bool = False,
    fork: Fork | None = None,
    profile: Profile | None = None,
) -> int:
    """Trains the config in its work directory; returns the exit status: 0, or `STOPPED` where it was asked to stop.

    A new work directory starts from `fork`, if given; one that has begun needs none. Errors in the config are found
    before the work directory is touched.
    """
    started = time.perf_counter()
    _check_trainable(config, workdir, fork)
    setup = prepare(config).restored(workdir if fork is None else fork.run)
    if fork is None and not run.has_begun(workdir):
        setup = setup.begun()
    setup.check()
    setup.load_data()
    facts = run_facts(setup)
    fork = None if fork is None else fork.in_parts(setup.parts)
    opening = [*setup.missing_layers, *(f'whole on every device: {line}' for line in setup.undivided())]
    opening += _forgets(setup, facts)
    opening.append(_headline(setup, facts, workdir, time.perf_counter() - started))
    outcome = train(
        setup,
        config,
        workdir,
        facts,
        console=console,
        data_workers=data_workers,
        other_data=other_data,
        fork=fork,
        profile=profile,
        opening=opening if fork is None else [*opening, str(fork)],
    )
    if jax.process_index() == 0 and outcome == loop.FINISHED:
        given = [('workdir', str(workdir)), *(('allow', package) for package in allowed())]
        flags = ' '.join(f'--{name}={shlex.quote(value)}' for name, value in given)
        console.print(f'finished: {setup.steps} steps. Next: attnlab eval {flags}')
    return 0 if outcome == loop.FINISHED else STOPPED


def train(
    setup: Setup,
    config: ConfigDict,
    workdir: pathlib.Path,
    facts: dict[str, Any],
    *,
    console: Console,
    data_workers: int = 0,
    other_data: bool = False,
    fork: Fork | None = None,
    profile: Profile | None = None,
    watch: loop.Watch = loop.unwatched,
    stop: threading.Event | None = None,
    opening: Sequence[str] = (),
) -> str:
    """Claims the work directory, records the start with the facts of `run_facts`, and trains; see `loop.train`.

    Prints `opening` as soon as nothing refuses the run.

    Raises `UserError` where the directory belongs to another config or process or holds a run derived from other runs,
    the data have changed, or steps to be traced were taken before.
    """
    _check_trainable(config, workdir, fork)
    run.check_claim(workdir, config)
    if not run.has_begun(workdir):
        if fork is not None:
            fork.check(setup.abstract)
        elif setup.start is not None:
            setup.start.check(setup.abstract)
    with run.held(workdir):
        if profile is not None:
            start = 0 if fork is None else fork.step
            profile.check(max(start, run.newest_checkpoint(workdir)), setup.steps)
        if fork is not None:
            run.check_data(fork.run, facts['data'], other=other_data)
        run.claim(workdir, config)
        run.check_data(workdir, facts['data'], other=other_data)
        setup, provenance = _with_provenance(setup, workdir, fork)
        if jax.process_index() == 0:
            # First, so that wherever this stops there is no checkpoint without the tokenizer of its parameters.
            setup.task.save(workdir)
            if fork is not None:
                fork.copy_into(workdir)
            opening = [*opening, *_other_parts(setup, workdir)]
            facts = {**facts, **provenance}
            facts = facts if profile is None else {**facts, 'profile': str(profile)}
            run.record(workdir, {**facts, 'other_data': other_data})
            for line in opening:
                console.print(line)
        outcome, _ = loop.train(
            setup,
            workdir,
            console=console,
            data_workers=data_workers,
            flops_per_token=facts['flops_per_token'],
            profile=profile,
            watch=watch,
            stop=stop,
        )
    return outcome


def _with_provenance(setup: Setup, workdir: pathlib.Path, fork: Fork | None) -> tuple[Setup, dict[str, Any]]:
    """The setup, its start at the step that is read, and what is recorded of what the run begins with.

    Once a run has begun, that is what its first start recorded, whatever the other run is by now.
    """
    if fork is not None:
        return setup, {'from': fork.describe()}
    first = next(iter(run.starts(workdir)), {})
    before: dict[str, Any] = {name: first[name] for name in ('from', 'start') if name in first}
    if setup.start is None or run.has_begun(workdir):
        return setup, before
    start = setup.start.settled(before['start']['step'] if 'start' in before else None)
    return dataclasses.replace(setup, start=start, shared_with=setup), {'start': start.describe()}


def _other_parts(setup: Setup, workdir: pathlib.Path) -> list[str]:
    """A line where a run that goes on took its steps in another number of parts."""
    other = run.other_parts(workdir, setup.parts)
    if other is None or not 0 < run.newest_checkpoint(workdir) < setup.steps:
        return []
    return [f'{other}: dropout, hidden places, experts and norms over a batch are of a part, so other than before']


def _check_trainable(config: ConfigDict, workdir: pathlib.Path, fork: Fork | None) -> None:
    if QUANTIZATION in config:
        raise UserError(
            f'config.{QUANTIZATION} is of a quantized run, which cannot be trained: train first, then attnlab quantize'
        )
    # Configs do not say so of edited and merged runs, which have no state of the optimiser either.
    for folder in (workdir,) if fork is None else (workdir, fork.run):
        if made := [name for start in run.starts(folder)[-1:] for name, _ in run.makings(start)]:
            raise UserError(
                f'{folder} holds a run derived from other runs ({", ".join(made)}), which cannot be trained further; '
                f'start a new run from its parameters, for example with run={folder} of configs/language.py'
            )


def run_facts(setup: Setup) -> dict[str, Any]:
    """The facts about model, kernels and data that a run records; none depends on the config's scalars."""
    return {
        'parameters': parameters(setup),
        'weight_bytes': weight_bytes(setup),
        'state_bytes_per_sequence': {
            str(length): state_bytes(setup, length) for length in (setup.length, 8 * setup.length)
        },
        'flops_per_token': flops_per_token(setup),
        'implementations': [entry.describe() for entry in implementations(setup)],
        'mesh': dict(setup.mesh.shape),
        'parts': setup.parts,
        'missing_layers': list(setup.missing_layers),
        'time_division': setup.time_division(),
        'data': setup.task.describe(),
    }


def _forgets(setup: Setup, facts: dict[str, Any]) -> list[str]:
    """What is said of a model that decodes and keeps nothing of what it read, as a mixer of one's own may have it."""
    if not getattr(setup.model, 'decodes', False) or any(facts['state_bytes_per_sequence'].values()):
        return []
    return [
        'no layer keeps a state, so that attnlab generate continues a text by its last token alone; where mixers read '
        'more, their init_state must say so: see attnlab.testing.contract.check_mixer'
    ]


def _headline(setup: Setup, facts: dict[str, Any], workdir: pathlib.Path, seconds: float) -> str:
    devices = jax.devices()
    return (
        f'{facts["parameters"]:,} parameters, {setup.batch_size} x {setup.length} tokens a step, '
        f'{len(devices)} {devices[0].device_kind} device{"s" if len(devices) > 1 else ""}, ready in {seconds:.1f} s; '
        f'writing {workdir}'
    )
