"""Puts what `compile_gpu.py` found into docs/kernel_measurements.md.

python tests/kernels/compile_gpu.py attention ... > found.jsonl
python tests/kernels/gpu_table.py found.jsonl
"""

import json
import pathlib
import sys

from pallas_kernels.bench.table import between

DOCUMENT = pathlib.Path(__file__).parents[2] / 'docs' / 'kernel_measurements.md'
MARKS = ('<!-- assembled: begin -->', '<!-- assembled: end -->')


def table(lines: list[dict]) -> str:
    """A row a program: its new kernels with registers, spills and shared memory, and what XLA has beside them."""
    head = ['core', 'call', 'pass', 'kernels: registers, bytes spilled, KiB shared', 'read too early']
    head += ['bytes beside, MiB', 'arguments, MiB', 'temporaries, MiB', 's']
    rows = [head, ['---'] * len(head)]
    for line in lines:
        if 'error' in line:
            rows.append([f'`{line["core"]}`', 'failed', line['error'].strip().rpartition('\n')[2], *[''] * 6])
            continue
        kernels = dict.fromkeys(
            f'{kernel["kernel"]}: {kernel["registers"]}, {kernel["spilled"]}, {kernel["shared"] / 1024:.0f}'
            for kernel in line['kernels']
        )
        early = sum(len(kernel['early']) for kernel in line['kernels'])
        figures = [f'{line[what]:.0f}' for what in ('beside MiB', 'arguments MiB', 'temporary MiB')]
        named = '; '.join(kernels) or 'as before'
        rows.append(
            [f'`{line["core"]}`', line['call'], line['what'], named, str(early), *figures, str(line['seconds'])]
        )
    return '\n'.join(f'| {" | ".join(row)} |' for row in rows)


if __name__ == '__main__':
    found = [json.loads(line) for line in pathlib.Path(sys.argv[1]).read_text().splitlines()]
    DOCUMENT.write_text(between(MARKS, DOCUMENT.read_text(), f'{table(found)}\n', DOCUMENT))
