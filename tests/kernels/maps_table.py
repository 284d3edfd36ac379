"""Puts the instructions of kernels of every weight map, over those of the softmax, into docs/kernel_measurements.md.

python tests/kernels/compile_tpu.py --topologies=v5e:2x2 --calls=every_map --schedules attention > found.jsonl
python tests/kernels/maps_table.py found.jsonl
"""

import json
import pathlib
import sys
from typing import Any

from pallas_kernels.bench.table import between

DOCUMENT = pathlib.Path(__file__).parents[2] / 'docs' / 'kernel_measurements.md'
MARKS = ('<!-- maps: begin -->', '<!-- maps: end -->')
KERNELS = ('attention_forward', 'attention_query_gradients', 'attention_key_gradients')


def instructions(lines: list[dict[str, Any]]) -> dict[str, list[int]]:
    """The bundles of the three kernels of every map, by its name."""
    return {line['call']: [_bundles(line, name) for name in KERNELS] for line in lines if 'backward' in line['what']}


def _bundles(line: dict[str, Any], name: str) -> int:
    (found,) = (kernel['bundles'] for kernel in line['kernels'] if name in kernel['kernel'])
    return found


def over_softmax(lines: list[dict[str, Any]]) -> dict[str, list[float]]:
    """The same over those of the softmax, which is the first."""
    found = instructions(lines)
    first = next(iter(found.values()))
    return {
        name: [round(own / plain, 2) for own, plain in zip(each, first, strict=True)] for name, each in found.items()
    }


def table(lines: list[dict[str, Any]]) -> str:
    """A row a map: bundles of each kernel, and what they are over those of the softmax."""
    rows = [['map', *(f'`{name}`' for name in KERNELS)], ['---'] * 4]
    ratios = over_softmax(lines)
    for name, each in instructions(lines).items():
        cells = (f'{bundles:,} ({ratio:.2f})' for bundles, ratio in zip(each, ratios[name], strict=True))
        rows.append([name, *cells])
    return '\n'.join(f'| {" | ".join(row)} |' for row in rows)


if __name__ == '__main__':
    found = [json.loads(line) for line in pathlib.Path(sys.argv[1]).read_text().splitlines()]
    DOCUMENT.write_text(between(MARKS, DOCUMENT.read_text(), f'{table(found)}\n', DOCUMENT))
