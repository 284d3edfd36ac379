"""Several formats of one run: a run of each, so that what bits cost can be compared."""

import contextlib
import itertools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from attnlab.config import plain, spec_of
from attnlab.errors import UserError
from attnlab.quantize.formats import format_called, storage_called
from attnlab.quantize.layers import Quantization
from attnlab.quantize.run import How, quantize_run
from attnlab.quantize.states import state_called
from attnlab.runs.record import read_record
from attnlab.tables import Printer
from attnlab.train.checkpoint import Checkpoints
from attnlab.train.metrics_file import METRICS
from attnlab.train.run import QUANTIZATION, saved_config

NONE = 'none'
"""The name of what stays as it is."""

CALLED: Mapping[str, Callable[[str], Any]] = {
    'weights': storage_called,
    'inputs': format_called,
    'state': state_called,
}


def combinations(names: Mapping[str, str]) -> dict[str, Quantization]:
    """Every combination of the formats named, by `weights=int4+state=int8`.

    `names` has lists such as `none,int8,int4` for `weights`, `inputs` and `state`. What stays as it is in all of the
    three is left out. Raises `UserError` for an unknown format, one that is named twice, and where nothing is left.
    """
    listed = {place: text.split(',') for place, text in names.items()}
    for place, each in listed.items():
        if len(set(each)) != len(each):
            raise UserError(f'--{place} is {names[place]}; every format may be named once')
    found = {}
    for chosen in itertools.product(*listed.values()):
        given = {place: name for place, name in zip(listed, chosen, strict=True) if name != NONE}
        if given:
            label = '+'.join(f'{place}={name}' for place, name in given.items())
            found[label] = Quantization(**{place: CALLED[place](name) for place, name in given.items()})
    if not found:
        raise UserError('nothing is quantized: give several formats, such as --weights=int8,int4,int3')
    return found


def quantize_each(
    workdir: pathlib.Path,
    out: pathlib.Path,
    formats: Mapping[str, Quantization],
    printer: Printer,
    how: How,
    *,
    step: int | None = None,
) -> list[pathlib.Path]:
    """Quantizes a run to each of several formats, every one into a folder of `out` of its name, which are returned.

    Folders that are there already are left, so that an interrupted command goes on. Raises `UserError` as
    `quantize_run` does, and where a folder holds something else.
    """
    folders = []
    for label, quantization in formats.items():
        folder = out / label
        folders.append(folder)
        if not (folder / METRICS).exists():
            printer.line(f'{label}:')
            quantize_run(workdir, folder, quantization, printer, how, step=step)
        elif not _made_of(folder, workdir, quantization, how, step):
            raise UserError(
                f'{folder} holds a run of another format, made otherwise or of another run; give --out another folder'
            )
    return folders


def _made_of(
    folder: pathlib.Path, workdir: pathlib.Path, quantization: Quantization, how: How, step: int | None
) -> bool:
    """Whether a folder holds this run, quantized so, as `quantize_run` would."""
    config, wanted = saved_config(folder), spec_of(quantization)
    if QUANTIZATION not in config or plain(config[QUANTIZATION]) != plain(wanted):
        return False
    made = read_record(folder).facts['quantized']
    asked = {'step': _newest_step(workdir) if step is None else step, **how.record()}
    same = all(made.get(name) == value for name, value in asked.items())
    return same and pathlib.Path(made['from']).resolve() == workdir.resolve()


def _newest_step(workdir: pathlib.Path) -> int | None:
    """The newest step that a run has a checkpoint of; `None`: it has none."""
    with contextlib.closing(Checkpoints(workdir / 'checkpoints', notify=lambda line: None)) as checkpoints:
        return max(checkpoints.steps(), default=None)
