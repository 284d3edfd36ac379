"""Tables of sessions, in Markdown."""

import collections
import fnmatch
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from scripts.session import lines
from scripts.session.cases import CORES
from scripts.session.lines import STATUSES, Line


def tables(sessions: Sequence[pathlib.Path], against: pathlib.Path | None = None) -> str:
    """The results of several sessions, the newest line of each case, and the changes since another."""
    found = lines.newest(sessions)
    parts = [
        *_environment(found.values()),
        *_counts(found.values()),
        *_failures(found.values()),
        *_timed(found.values()),
        *_profiled(found.values()),
    ]
    if against is not None:
        parts += _changed(found, lines.newest([against]))
    return '\n'.join(parts)


def record(sessions: Sequence[pathlib.Path], without: Sequence[str] = ()) -> dict[str, Any]:
    """What sessions timed of cores and of third parties' kernels, as `python -m pallas_kernels.bench --json` has it.

    Cases whose names are like one of `without` are left out: their kernels are others by now.

    Raises ValueError for sessions without times, and for those of several devices.
    """
    timed = [
        line
        for line in lines.newest(sessions).values()
        if line['stage'] in ('bench', 'peers')
        and line['status'] == 'ok'
        and 'ratio' in line['measured'][0]
        and not any(fnmatch.fnmatchcase(line['id'], pattern) for pattern in without)
    ]
    devices = sorted({line['device'] for line in timed})
    if len(devices) != 1:
        raise ValueError(f'{len(devices)} devices were timed in these records ({", ".join(devices)}); expected one')
    every = {name: sorted({line[name] for line in timed if name in line}) for name in ('platform', 'commit')}
    versions = {name: version for line in timed for name, version in line['versions'].items()}
    facts = {
        'device': devices[0],
        'platform': every['platform'][0],
        'date': ' and '.join(sorted({line['time'][:10] for line in timed})),
        'commit': ' and '.join(every['commit']),
        **versions,
    }
    timed.sort(key=lambda line: (CORES.index(line['core']), line['problem'], line['pass'], line['stage']))
    return {'facts': facts, 'lines': [_measurement(line, one) for line in timed for one in line['measured']]}


BEFORE = 3
"""Rounds of records that do not say how many: all that were made before did so many."""


def _measurement(line: Line, one: dict[str, Any]) -> dict[str, Any]:
    figures = {'rounds': BEFORE, **{name: value for name, value in one.items() if name != 'milliseconds'}}
    return {
        'core': line['core'],
        'problem': line['problem'],
        'what': line['pass'],
        **figures,
        'milliseconds': one['milliseconds'][1],
        'quartiles': one['milliseconds'],
    }


def _environment(found: Any) -> Iterator[str]:
    for name in ('device', 'commit', 'versions'):
        values = dict.fromkeys(str(line[name]) for line in found if name in line)
        yield f'{name}: {"; ".join(values) or "unknown"}'
    days = sorted(line['time'][:10] for line in found if 'time' in line)
    yield f'date: {" to ".join(dict.fromkeys((days[0], days[-1]))) if days else "unknown"}'
    yield ''


def _counts(found: Any) -> Iterator[str]:
    counts: dict[tuple[str, str], collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for line in found:
        counts[line['stage'], line.get('core', '')][line['status']] += 1
    yield from _table(
        ('stage', 'core', *STATUSES), [(*key, *(counts[key][status] or '' for status in STATUSES)) for key in counts]
    )


def _failures(found: Any) -> Iterator[str]:
    rows = [
        (line['id'], line['status'], line.get('reason', ''))
        for line in found
        if line['status'] != 'ok' or 'reason' in line
    ]
    if rows:
        yield from _table(('case', 'status', 'why'), rows)


def _timed(found: Any) -> Iterator[str]:
    rows = []
    for line in found:
        for one in line.get('measured', []):
            low, middle, high = one['milliseconds']
            figures = [
                f'{one[name]:.3g}' if one.get(name) is not None else '' for name in ('ratio', 'tflops', 'ceiling')
            ]
            rows.append((line['id'], one['contender'], f'{middle:.3g} ({low:.3g} to {high:.3g})', *figures))
    if rows:
        yield from _table(('case', 'contender', 'ms (quartiles)', 'over ours', 'TFLOP/s', 'of ceiling'), rows)
    steps = [line for line in found if 'tokens_per_second' in line]
    if steps:
        columns = ('tokens_per_second', 'mfu')
        yield from _table(
            ('case', 'tokens/s', 'MFU, of the measured product'),
            [(line['id'], *(f'{line[name]:.3g}' for name in columns)) for line in steps],
        )


def _profiled(found: Any) -> Iterator[str]:
    rows = []
    for line in found:
        kernels = line.get('kernels', [])
        if kernels:
            rows.append((line['id'], 'all', '', f'{sum(one["microseconds"] for one in kernels):.0f}'))
        rows += [(line['id'], one['kernel'], f'{one["times"]:g}', f'{one["microseconds"]:.0f}') for one in kernels]
    if rows:
        yield from _table(('case', 'kernel', 'times', 'us'), rows)


def _changed(found: dict[str, Line], before: dict[str, Line]) -> Iterator[str]:
    rows = []
    for name in sorted(found.keys() & before.keys()):
        one, other = found[name], before[name]
        if one['status'] != other['status']:
            rows.append((name, f'{other["status"]} -> {one["status"]}'))
        old = {figure['contender']: figure for figure in other.get('measured', [])}
        for figure in one.get('measured', []):
            if figure['contender'] in old:
                share = figure['milliseconds'][1] / old[figure['contender']]['milliseconds'][1]
                if abs(share - 1) > 0.05:
                    rows.append((name, f'{figure["contender"]}: {share:.2f} of the time'))
    yield from _table(('case', 'changed'), rows or [('none', 'nothing by more than 5 %')])


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    yield '| ' + ' | '.join(columns) + ' |'
    yield '|---' * len(columns) + '|'
    for row in rows:
        yield '| ' + ' | '.join(str(cell).replace('|', '/') for cell in row) + ' |'
    yield ''
