"""Compiles cores for TPUs that are not there, forward and backward at the sizes of models; a process of its own.

    python tests/kernels/compile_tpu.py [--topologies=v5e:2x2,v6e:2x2] [--first] [--schedules] linear_scan attention
    python tests/kernels/compile_tpu.py --topologies=v5e:2x2 --calls=every_map --schedules attention
    python tests/kernels/compile_tpu.py --topologies=v5e:2x2 --implementation=xla long_conv

For every topology, core and call of `real()`, or of what `--calls` names, one line of JSON on standard output:
seconds of processor time, memory and cost as the compiler has them, and the cycles that it expects of what is no
kernel; with `--schedules` of every kernel the instructions
(bundles) that it was compiled to, those of each loop in a program, the part of their slots for matrix units and for
vectors that is used, the instructions and the first of these parts of each stretch between branches that multiplies,
and registers spilled. libtpu is taken from `<environment>/libtpu`, where it disturbs nobody else, or as installed.
"""

import argparse
import functools
import importlib
import itertools
import json
import os
import pathlib
import re
import shutil
import sys
import tempfile
import time
import traceback

os.environ |= {'TPU_SKIP_MDS_QUERY': '1', 'JAX_PLATFORMS': 'cpu', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1'}
_APART = pathlib.Path(sys.prefix) / 'libtpu' / 'libtpu' / 'libtpu.so'
if _APART.exists():
    os.environ['TPU_LIBRARY_PATH'] = str(_APART)

import jax  # noqa: E402
from jax.experimental import topologies  # noqa: E402

import pallas_kernels  # noqa: E402
from pallas_kernels import dispatch, target  # noqa: E402

TOPOLOGIES = 'v5e:2x2,v5p:2x2x1,v6e:2x2'


def schedules(folder: pathlib.Path, core: str) -> list[dict[str, object]]:
    """What the compiler wrote of the kernels of a core, in the order in which it compiled them; empties the folder."""
    found: list[dict[str, object]] = []
    for path in sorted(folder.glob('*-final_hlo-static-per-bundle-utilization.txt')):
        stem = re.sub(r'-\d+-final_hlo.*', '', path.name)
        name = re.sub(r'^\d+-', '', stem)
        if core in name or 'matrix_state' in name:
            (bundles,) = (path for path in folder.glob(f'{stem}-*-final_bundles.txt') if 'analysis' not in path.name)
            own = bundles.read_text()
            found.append({'kernel': name} | schedule(path.read_text(), cuts(own)) | {'loops': loops(own)})
    shutil.rmtree(folder)
    folder.mkdir()
    return found


def loops(text: str) -> list[int]:
    """The bundles of each loop within a program, in their order, from a line for every bundle of a kernel.

    Bundles that branches leave out are those of the loop. All programs together are a loop too, which is left out.
    """
    found: list[int] = []
    depth = 1
    for begins, arrows in re.findall(r'^\s*(?:0x[0-9a-f]+|0)\s+([A-Z]*)\s*:\s*(>*)', text, re.MULTILINE):
        if len(arrows) > 1:
            if depth == 1 or begins == 'LB':
                found.append(0)
            found[-1] += 1
        depth = max(1, len(arrows))
    return found


def cuts(text: str) -> list[int]:
    """Where branches begin and end, from a line for every bundle; a branch is taken four bundles after it."""
    found = set()
    for at, begins, what in re.findall(r'^\s*(0x[0-9a-f]+|0)\s+([A-Z]*)\s*:(.*)', text, re.MULTILINE):
        if begins:
            found.add(int(at, 16))
        if 'sbr.rel' in what:
            found.add(int(at, 16) + 4)
    return sorted(found)


def schedule(text: str, cuts: list[int]) -> dict[str, object]:
    """The use of slots by a kernel, from a line of their names, one of capacities, and one for every bundle."""
    names, capacities, *lines = (line.replace(',', ' ').split() for line in text.splitlines() if line[:2] != '==')
    bundles = [list(map(int, line)) for line in lines]
    slots = dict(zip(names, map(int, capacities), strict=True))

    def used(first: int, last: int) -> dict[str, int]:
        return dict(zip(names, map(sum, zip(*bundles[first:last], strict=True)), strict=True))

    def part(name: str, first: int, last: int) -> float:
        return round(used(first, last)[name] / slots[name] / (last - first), 3)

    ends = itertools.pairwise([0, *cuts, len(bundles)])
    stretches = [(last - first, part('MXU', first, last)) for first, last in ends if last > first]
    return {
        'bundles': len(bundles),
        **{name: part(name, 0, len(bundles)) for name in ('MXU', 'VALU')},
        'products': [stretch for stretch in stretches if stretch[1]],
        'spills': used(0, len(bundles))['VSTORE:SPILL'],
    }


def compile_calls(
    core: str, topology: str, calls: str, *, first: bool, implementation: str | None, dumps: pathlib.Path | None
) -> None:
    """Compiles the calls of a core that a function of its cases has, or the first, and prints what came of it."""
    device = topologies.get_topology_desc(platform='tpu', topology_name=topology).devices[0]
    found = getattr(importlib.import_module(f'pallas_kernels.cases.{core}'), calls)()
    for name, call in list(found.items())[: 1 if first else None]:
        for what in ('forward', 'forward and backward'):
            function = functools.partial(getattr(pallas_kernels, core), implementation=implementation)
            start = time.process_time()
            with target.compiling_for(target.Target('tpu', device.device_kind)), dispatch.ledger() as entries:
                compiled = _compile(function, call, device, gradients=what != 'forward')
            expected = re.findall(r'"estimated_cycles":"?(\d+)', compiled.as_text())
            memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
            line = {
                'core': core,
                'call': name,
                'device': device.device_kind,
                'what': what,
                'implementation': entries[0].implementation,
                'refused': dict(entries[0].refused).get('mosaic_tpu'),
                'seconds': round(time.process_time() - start, 2),
                'arguments MiB': memory.argument_size_in_bytes / 2**20,
                'temporary MiB': memory.temp_size_in_bytes / 2**20,
                'GFLOP': cost.get('flops', 0) / 1e9,
                'accessed MiB': cost.get('bytes accessed', 0) / 2**20,
                'beside Mcycles': round(sum(map(int, expected)) / 1e6, 2),
            }
            if dumps is not None:
                line['kernels'] = schedules(dumps, core)
            print(json.dumps(line), flush=True)


def _compile(function, call, device, *, gradients):
    options = {name: value for name, value in call.options.items() if not isinstance(value, jax.ShapeDtypeStruct)}
    constant = {name: value for name, value in call.options.items() if isinstance(value, jax.ShapeDtypeStruct)}

    def forward(arrays, constant):
        return function(**arrays, **constant, **options)

    def both(arrays, constant):
        outputs, pull = jax.vjp(lambda arrays: forward(arrays, constant), arrays)
        return outputs, pull(outputs)

    here = jax.sharding.SingleDeviceSharding(device)
    compiled = jax.jit(both if gradients else forward, in_shardings=here, out_shardings=here)
    return compiled.trace(call.arrays, constant).lower(lowering_platforms=('tpu',)).compile()


if __name__ == '__main__':
    parser = argparse.ArgumentParser()
    parser.add_argument('--topologies', default=TOPOLOGIES)
    parser.add_argument('--calls', default='real', help='the function of the cases of a core that has its calls')
    parser.add_argument('--first', action='store_true', help='the first call of a core alone')
    parser.add_argument('--implementation', help='a form by its name; the one that serves is taken otherwise')
    parser.add_argument('--schedules', action='store_true', help='what kernels are compiled to')
    parser.add_argument('cores', nargs='+')
    options = parser.parse_args()
    dumps = pathlib.Path(tempfile.mkdtemp()) if options.schedules else None
    if dumps is not None:
        # Read when the library is loaded, with the first topology.
        os.environ['LIBTPU_INIT_ARGS'] = f'--xla_jf_dump_to={dumps} --xla_jf_dump_llo_text=true'
    for topology in options.topologies.split(','):
        for core in options.cores:
            try:
                compile_calls(
                    core,
                    topology,
                    options.calls,
                    first=options.first,
                    implementation=options.implementation,
                    dumps=dumps,
                )
            except Exception:
                # One core of several: what went wrong is said, and the others are compiled.
                print(json.dumps({'core': core, 'error': traceback.format_exc()[-3000:]}), flush=True)
