"""Devices that are not present, for which programs can still be compiled."""

import contextlib
import dataclasses
import difflib
import importlib.util
import itertools
import math
import os
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import topologies

from attnlab.errors import UserError
from pallas_kernels import target

TPUS = {
    'v4': ((1, 2, 2), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8)),
    'v5e': ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)),
    'v5p': ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8), (8, 8, 16)),
    'tpu7x': ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8)),
    'v6e': ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)),
}
"""Kinds of TPU and the usual shapes of their slices, to suggest one for an unknown name."""

GPU = re.compile(r'H100x([1-9]\d{0,3})')


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices that a program is compiled for.

    Attributes:
      name: such as `v5p:4x4x4` or `H100x8`.
      devices: of the topology, for compiling; for GPUs CPU devices as stand-ins, for lowering.
      target: the kind of device.
    """

    name: str
    devices: tuple[jax.Device, ...]
    target: target.Target

    @property
    def compiles(self) -> bool:
        """Whether there is a compiler for these devices; if not, programs can still be lowered for them."""
        return self.target.platform == 'tpu'

    @property
    def platform(self) -> str:
        """JAX's name of the platform that programs are lowered for."""
        return {'gpu': 'cuda', 'tpu': 'tpu'}[self.target.platform]


def gpus(name: str) -> int | None:
    """The number of GPUs in the name of a topology, for each of which a CPU device stands in; `None` for TPUs."""
    found = GPU.fullmatch(name)
    return int(found[1]) if found else None


def find(name: str) -> Topology:
    """Returns the topology called `name`: `v5p:4x4x4` and whatever else libtpu knows, or `H100x8`.

    Raises `UserError` for an unknown name, naming the nearest or what there is, and where libtpu is not installed.
    """
    count = gpus(name)
    if count is not None:
        if jax.device_count() < count:
            raise UserError(f'--topology={name} needs {count} CPU devices as stand-ins; there are {jax.device_count()}')
        return Topology(name, tuple(jax.devices()[:count]), target.H100)
    if not re.fullmatch(r'\w+:\d+(x\d+)*', name):
        raise UserError(f'there is no topology {name!r}; {_meant(name)}')
    find_libtpu()
    try:
        with _silent():
            devices: Any = topologies.get_topology_desc(platform='tpu', topology_name=name).devices
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        reason = str(error).partition('\n')[0]
        raise UserError(f'there is no topology {name!r}; {_meant(name)} ({reason})') from error
    return Topology(name, tuple(devices), target.Target('tpu', devices[0].device_kind))


def _meant(name: str) -> str:
    """What may be meant by a name of no topology, or what there is where it is of no kind of them."""
    near = nearest(name)
    if near is None:
        return f'there are {", ".join(TPUS)}, as v5p:4x4x4, and of GPUs H100, as H100x8'
    return f'the nearest is {near}'


def nearest(name: str) -> str | None:
    """The usual topology nearest to a name: of the same kind, with about as many chips; `None` for no such kind."""
    if name.lower().startswith(('h', 'gpu', 'cuda')):
        digits = re.findall(r'\d+', name)
        return f'H100x{digits[-1] if len(digits) > 1 else 8}'
    kind, _, shape = name.lower().partition(':')
    close = difflib.get_close_matches(kind, TPUS, n=1)
    if not close:
        return None
    (kind,) = close
    sizes = tuple(int(size) for size in re.findall(r'\d+', shape)) or (2, 2)
    # The nearest number of chips first, then the nearest shape.
    best = min(
        TPUS[kind],
        key=lambda usual: (
            abs(math.log2(math.prod(usual) / max(math.prod(sizes), 1))),
            sum(abs(one - other) for one, other in itertools.zip_longest(sorted(usual), sorted(sizes), fillvalue=1)),
        ),
    )
    return f'{kind}:{"x".join(map(str, best))}'


def find_libtpu() -> None:
    """Makes JAX find the compiler for TPUs: the installed one, or the separate one in `<environment>/libtpu`.

    Raises `UserError` where there is neither.
    """
    apart = pathlib.Path(sys.prefix) / 'libtpu'
    if importlib.util.find_spec('libtpu') is None and (apart / 'libtpu' / 'libtpu.so').exists():
        # At the end, so that nothing else is imported from there.
        sys.path.append(str(apart))
        importlib.invalidate_caches()
    if importlib.util.find_spec('libtpu') is None:
        raise UserError(
            f'the compiler for TPUs, libtpu, is neither installed nor in {apart}; '
            'make .venv/libtpu/complete puts it there in a checkout with .venv, or pip install libtpu'
        )
    # The only way to keep it from asking which TPU this machine is, and from claiming the machine for itself.
    os.environ |= {'TPU_SKIP_MDS_QUERY': '1', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1'}


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Discards standard error: libtpu complains on every machine without a TPU."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, 'w') as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
