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
    'v4': ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8)),
    'v5e': ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)),
    'v5p': ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8), (8, 8, 16)),
    'tpu7x': ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8)),
    'v6e': ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)),
}
"""Kinds of TPU and the usual shapes of their slices, to suggest one for an unknown name."""

GPU = re.compile(r'H100x([1-9]\d{0,3})')

MOST_GPUS = 9999
"""The most that such a name counts."""

HOST = 8
"""GPUs of a host, where there are several."""

PLUGIN = 'xla_cuda13'
"""JAX's plugin for CUDA, as the package `jax_plugins` has it."""

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84978434048
  cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
"""What XLA wants to know of the device, in the text form of its `GpuTargetConfigProto`."""

UNMEASURED = {
    'xla_gpu_autotune_level': 0,
    'xla_gpu_enable_cublaslt': False,
    'xla_gpu_enable_triton_gemm': False,
}
"""Options by which XLA chooses algorithms of products without a device."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices that a program is compiled for.

    Attributes:
      name: such as `v5p:4x4x4` or `H100x8`.
      devices: of the topology, for compiling; without a compiler CPU devices as stand-ins, for lowering.
      target: the kind of device.
      lacks: why there is no compiler for these devices, or how to have it; '' where there is.
    """

    name: str
    devices: tuple[jax.Device, ...]
    target: target.Target
    lacks: str = ''

    @property
    def compiles(self) -> bool:
        """Whether there is a compiler for these devices; if not, programs can still be lowered for them."""
        return not self.lacks

    @property
    def measures(self) -> bool:
        """Whether a run chooses algorithms of products by measuring them, which nobody can without the devices."""
        return self.target.platform == 'gpu'

    @property
    def platform(self) -> str:
        """JAX's name of the platform that programs are lowered for."""
        return {'gpu': 'cuda', 'tpu': 'tpu'}[self.target.platform]

    def compile(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """Compiles what was lowered for these devices. Raises `UserError` where there is no compiler for them."""
        if not self.compiles:
            raise UserError(f'there is no compiler for {self.name}: {self.lacks}')
        return lowered.compile(compiler_options=UNMEASURED if self.measures else None)


def gpus(name: str) -> int | None:
    """The number of GPUs in the name of a topology, for each of which a CPU device may stand in; `None` for TPUs."""
    found = GPU.fullmatch(name)
    return int(found[1]) if found else None


def find(name: str) -> Topology:
    """Returns the topology called `name`: `v5p:4x4x4` and whatever else libtpu knows, or `H100x8`.

    Of GPUs without JAX's plugin for CUDA CPU devices stand in, for which programs are lowered and not compiled.

    Raises `UserError` for an unknown name, naming the nearest or what there is, and where libtpu is not installed.
    """
    count = gpus(name)
    if count is not None:
        return _absent_gpus(name, count)
    if not re.fullmatch(r'\w+:[1-9]\d*(x[1-9]\d*)*', name):
        raise UserError(f'there is no topology {name!r}; {_meant(name)}')
    find_libtpu()
    # By default libtpu has two devices a chip of a v4, of which JAX makes no mesh.
    options = {'chip_config_name': 'megacore'} if name.startswith('v4:') else {}
    try:
        with _silent():
            devices: Any = topologies.get_topology_desc(platform='tpu', topology_name=name, **options).devices
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        reason = str(error).partition('\n')[0]
        raise UserError(f'there is no topology {name!r}; {_meant(name)} ({reason})') from error
    return Topology(name, tuple(devices), target.Target('tpu', devices[0].device_kind))


def _absent_gpus(name: str, count: int) -> Topology:
    """So many H100, in hosts of eight where these are full; stand-ins where there is no compiler for them."""
    if not find_cuda():
        return stand_ins(name, NO_CUDA)
    hosts = count // HOST if count % HOST == 0 else 1
    shape = f'1x{hosts}x{count // hosts}'
    try:
        with _silent():
            found = topologies.get_topology_desc('H100', platform='cuda', topology=shape, target_config=H100)
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        reason = str(error).partition('\n')[0]
        return stand_ins(name, f"JAX's plugin for CUDA refuses: {reason}")
    return Topology(name, tuple(found.devices), target.H100)


def stand_ins(name: str, lacks: str) -> Topology:
    """CPU devices in the place of the GPUs of a name, for which programs are lowered alone."""
    count = gpus(name) or 0
    if jax.device_count() < count:
        raise UserError(f'--topology={name} needs {count} CPU devices as stand-ins; there are {jax.device_count()}')
    return Topology(name, tuple(jax.devices()[:count]), target.H100, lacks)


def _meant(name: str) -> str:
    """What may be meant by a name of no topology, or what there is where it is of no kind of them."""
    near = nearest_topology(name)
    if near is None:
        return f'there are {", ".join(TPUS)}, as v5p:4x4x4, and of GPUs H100, as H100x8'
    return f'the nearest is {near}'


def nearest_topology(name: str) -> str | None:
    """The usual topology nearest to a name: of the same kind, with about as many chips; `None` for no such kind."""
    if name.lower().startswith(('h', 'gpu', 'cuda')):
        digits = re.findall(r'\d+', name)
        return f'H100x{min(max(int(digits[-1]), 1), MOST_GPUS) if len(digits) > 1 else 8}'
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


NO_CUDA = 'make .venv/cuda/complete puts it there in a checkout with .venv, or pip install "attnlab[gpu]"'
"""How to have the compiler for GPUs."""


def find_cuda() -> bool:
    """Makes JAX find the compiler for GPUs: the plugin that is installed, or the separate one in `<environment>/cuda`.

    Returns whether there is one.
    """
    apart = pathlib.Path(sys.prefix) / 'cuda'
    if not _has_plugin() and (apart / 'jax_plugins' / PLUGIN).exists():
        # JAX looks for plugins once, and would then look for GPUs too: it is told of this one afterwards.
        jax.devices()
        sys.path.append(str(apart))
        importlib.invalidate_caches()
        # The assembler is looked for on the path. Libraries that run programs are not missed, and nobody is told of
        # what the compiler tried in vain.
        assembler = apart / 'nvidia' / 'cu13' / 'bin'
        os.environ |= {
            'JAX_SKIP_CUDA_CONSTRAINTS_CHECK': '1',
            'PATH': f'{assembler}:{os.environ["PATH"]}',
            'TF_CPP_MIN_LOG_LEVEL': '2',
        }
        importlib.import_module(f'jax_plugins.{PLUGIN}').initialize()
    return _has_plugin()


def _has_plugin() -> bool:
    """Whether JAX's plugin for CUDA can be imported."""
    return all(importlib.util.find_spec(name) is not None for name in ('jax_plugins', f'jax_plugins.{PLUGIN}'))


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
