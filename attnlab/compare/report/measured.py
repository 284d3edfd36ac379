"""What is measured on a device rather than counted: decoding time and peak memory.

Clocks never show the same twice, so both are measured once and kept in the study, in `measured.json`, by the kind of
device: a report on a laptop adds to what a cluster measured, and takes nothing away. They are of the config that was
best then, and say which it was.
"""

import dataclasses
import hashlib
import json
import pathlib
import types
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from attnlab.compare.measures import decode_ms
from attnlab.config import flatten, plain
from attnlab.errors import UserError
from attnlab.files import read_json, write_json
from attnlab.train.run import environment
from attnlab.train.setup import ROUNDING, Setup, prepare

FILE = 'measured.json'

COSTLY = ('model', ROUNDING, 'length', 'batch_size', 'accumulate', 'optimizer', 'precision', 'mesh')
"""The keys of a config that decoding time and memory depend on."""


@dataclasses.dataclass(frozen=True)
class DeviceCost:
    """The cost of a model on one kind of device.

    Attributes:
      decode_ms: milliseconds of one step of decoding one sequence; `None` for a model that does not decode tokens.
      peak_bytes: of the training step on one device; `None` where its compiler does not say.
      python: the version that measured.
      packages: their versions.
      config: what was measured, as `costing` has it; empty in files of before it was written down.
    """

    decode_ms: float | None
    peak_bytes: int | None
    python: str
    packages: Mapping[str, str | None]
    config: str = ''


def costing(config: ConfigDict) -> str:
    """A hash of what of a config decoding time and memory depend on: not of rates and other fractions of optimisers."""
    leaves = flatten({key: value for key, value in plain(config).items() if key in COSTLY})
    kept = {
        key: 'a fraction' if isinstance(value, float) and key.startswith('optimizer.') else value
        for key, value in leaves.items()
    }
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def read_measured(folder: pathlib.Path) -> dict[str, DeviceCost]:
    """What is kept in a study, by the kind of device. Raises `UserError` where the file is damaged."""
    path = folder / FILE
    if not path.exists():
        return {}
    remedy = 'delete it: what was measured is measured again'
    kept = read_json(path, remedy)
    try:
        return {device: _cost(numbers) for device, numbers in kept.items()}
    except (AttributeError, TypeError) as error:
        raise UserError(f'{path} is damaged: {error}; {remedy}') from error


KINDS: dict[str, tuple[type, ...]] = {
    'decode_ms': (float, int, types.NoneType),
    'peak_bytes': (int, types.NoneType),
    'python': (str,),
    'packages': (dict,),
    'config': (str,),
}


def _cost(numbers: Any) -> DeviceCost:
    """What is kept of a device. Raises TypeError for what is of another kind."""
    if not isinstance(numbers, dict) or {'config', *numbers} != KINDS.keys():
        raise TypeError(f'a device has {numbers!r:.40}')
    numbers = {'config': ''} | numbers
    for name, kinds in KINDS.items():
        if type(numbers[name]) not in kinds:
            raise TypeError(f'{name} is {numbers[name]!r:.40}')
    return DeviceCost(**numbers)


def measure_here(folder: pathlib.Path, config: ConfigDict) -> None:
    """Measures a config on the device at hand, and saves it in the study next to results of other kinds of device.

    Raises `UserError` for a config that cannot be built here, such as one that needs more devices.
    """
    setup = prepare(config)
    here = environment()
    found = DeviceCost(
        decode_ms=decode_ms(setup) if setup.model.decodes else None,
        peak_bytes=peak_bytes(setup),
        python=here['python'],
        packages=here['packages'],
        config=costing(config),
    )
    kept = read_measured(folder) | {here['device_kind']: found}
    write_json(folder / FILE, {device: dataclasses.asdict(kept[device]) for device in sorted(kept)})


def peak_bytes(setup: Setup) -> int | None:
    """Bytes that the compiled training step occupies on one device, as XLA laid them out.

    Arguments, results and temporaries, less the results that are written over arguments. Unlike the device's own count
    it excludes whatever else the process allocated, and is the same every time.
    """
    memory = setup.trace().lower().compile().memory_analysis()
    if memory is None:
        return None
    occupied = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
    return int(occupied - memory.alias_size_in_bytes)


def shared_device(kept: list[Mapping[str, DeviceCost]], ran_on: Mapping[str, int]) -> str | None:
    """The kind of device to compare on: the one most studies were measured on; of equals, where most trials ran.

    `ran_on` counts trials by the kind of device. `None` where nothing was measured.
    """
    counts = {device: sum(device in one for one in kept) for one in kept for device in one}
    ranked = sorted(counts, key=lambda device: (-counts[device], -ran_on.get(device, 0), device))
    return ranked[0] if ranked else None


def shown_versions(measured: DeviceCost) -> str:
    """Where the numbers come from, in a line."""
    return f'Python {measured.python}, jax {measured.packages.get("jax")}, attnlab {measured.packages.get("attnlab")}'
