"""Times the cores as `python -m pallas_kernels.bench` does; on a GPU also flash-linear-attention, before and after.

python scripts/bench_kernels.py [--peer_python=/venv/with/flash-linear-attention/bin/python] [options of the bench]
"""

import pathlib
import subprocess
import sys

from pallas_kernels.bench.__main__ import main

PEER = pathlib.Path(__file__).parent / 'fla_kernels.py'


def run(arguments: list[str]) -> int:
    peers = [one.partition('=')[2] for one in arguments if one.startswith('--peer_python=')]
    rest = [one for one in arguments if not one.startswith('--peer_python=')]
    for peer in peers:
        subprocess.run([peer, PEER], check=True)
    status = main(rest)
    for peer in peers:
        subprocess.run([peer, PEER], check=True)
    return status


if __name__ == '__main__':
    sys.exit(run(sys.argv[1:]))
