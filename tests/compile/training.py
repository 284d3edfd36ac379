"""Compiles training steps for TPUs that are not there; a process of its own, as the compiler's library needs it.

    python -m tests.compile.training [--topology=v5e:2x2] zoo=mha,data=4 zoo=gla,fsdp=4

For every step, a recipe on a mesh, one line of JSON on standard output: how many kernels it calls, the collectives by
kind, the shapes gathered outside of cores, the bytes of temporaries on one device, and seconds of processor time.
"""

import argparse
import collections
import dataclasses
import json
import os
import pathlib
import re
import sys
import time

if __name__ == '__main__':
    os.environ |= {'TPU_SKIP_MDS_QUERY': '1', 'JAX_PLATFORMS': 'cpu', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1'}
    apart = pathlib.Path(sys.prefix) / 'libtpu' / 'libtpu' / 'libtpu.so'
    if apart.exists():
        os.environ['TPU_LIBRARY_PATH'] = str(apart)

from jax.experimental import topologies

from attnlab.train.partition import Axes
from attnlab.train.setup import Setup, prepare
from configs import language
from pallas_kernels import target

COLLECTIVE = re.compile(r'= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(')

APART = re.compile(r'shard_map|\blookup\)*/gather')
"""In cores; and where devices that need the same tokens look up a part of the width each: fewer bytes than a sum."""

ROWS, LENGTH = 8, 512
"""Sizes of a batch."""


def setup_for(arguments: str, devices) -> Setup:
    """The setup of a small model of a recipe in bfloat16, on a mesh of `devices`."""
    given = dict(item.split('=') for item in arguments.split(','))
    config = language.get_config(f'zoo={given.pop("zoo")},size=tiny').unlock()
    config.batch_size, config.length, config.model.stack.depth = ROWS, LENGTH, 2
    config.precision.activations = 'bfloat16'
    axes = Axes(**{'data': 1} | {axis: int(size) for axis, size in given.items()})
    return dataclasses.replace(prepare(config.lock()), mesh=axes.make(devices))


def describe(arguments: str, topology: str) -> dict[str, object]:
    devices = topologies.get_topology_desc(platform='tpu', topology_name=topology).devices
    start = time.process_time()
    with target.compiling_for(target.Target('tpu', devices[0].device_kind)):
        compiled = setup_for(arguments, devices).trace().lower(lowering_platforms=('tpu',)).compile()
    text = compiled.as_text()
    found = [(match, line) for line in text.splitlines() if (match := COLLECTIVE.search(line))]
    return {
        'step': arguments,
        'kernels': text.count('custom_call_target="tpu_custom_call"'),
        'collectives': collections.Counter(match[2] for match, _ in found),
        'gathered': sorted({match[1] for match, line in found if match[2] == 'all-gather' and not APART.search(line)}),
        'temporaries': compiled.memory_analysis().temp_size_in_bytes,
        'seconds': round(time.process_time() - start, 1),
    }


if __name__ == '__main__':
    parser = argparse.ArgumentParser()
    parser.add_argument('--topology', default='v5e:2x2')
    parser.add_argument('steps', nargs='+')
    options = parser.parse_args()
    for step in options.steps:
        print(json.dumps(describe(step, options.topology)), flush=True)
