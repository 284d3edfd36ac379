"""Compiles whole training steps of configs/language.py for one H100 that is not there, and says what memory they take.

    python -m tests.compile.fits zoo=mha,size=350m zoo=mha,size=1b

For every config one line of JSON on standard output: bytes of arguments (train state and batch), of temporaries, and
seconds of processor time. The compiler is found as by `attnlab train --topology=H100x1`. What cuBLAS, the allocator and
the compiled programs themselves take on the device is not in it.
"""

import argparse
import dataclasses
import functools
import json
import time

import jax

from attnlab.train import topologies
from attnlab.train.partition import Axes
from attnlab.train.setup import prepare
from configs import language
from tests.compile.steps import compiled


def traced(arguments: str, device: jax.Device) -> jax.stages.Traced:
    """The step of a config, on one device."""
    setup = prepare(language.get_config(arguments))
    return dataclasses.replace(setup, mesh=Axes().make([device])).trace()


def main() -> None:
    parser = argparse.ArgumentParser(prog='python -m tests.compile.fits', description=(__doc__ or '').split('\n')[0])
    parser.add_argument('configs', nargs='+', metavar='CONFIG', help='arguments of configs/language.py')
    options = parser.parse_args()
    jax.config.update('jax_platforms', 'cpu')
    topology = topologies.find('H100x1')
    for arguments in options.configs:
        start = time.process_time()
        memory = compiled(topology, functools.partial(traced, arguments, topology.devices[0])).memory_analysis()
        line = {
            'config': arguments,
            'arguments': memory.argument_size_in_bytes,
            'temporaries': memory.temp_size_in_bytes,
            'seconds': round(time.process_time() - start, 1),
        }
        print(json.dumps(line), flush=True)


if __name__ == '__main__':
    main()
