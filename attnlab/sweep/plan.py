"""`attnlab sweep --dry_run`: what a sweep would run, and what one of its trials costs, without a study."""

from attnlab.runs.plan import cost_table, memory_table
from attnlab.sweep.space import Dimension, Range
from attnlab.sweep.splits import said_of, without_own_split
from attnlab.sweep.sweep import Sweep, values_of
from attnlab.sweep.trial import check_metric
from attnlab.tables import Column, Printer, Table, pairs, spelled
from attnlab.train.setup import SCALARS, prepare


def print_sweep(sweep: Sweep, printer: Printer) -> None:
    """Prints the space and the number of trials and steps, and operations and memory of the base, compiled.

    Raises `UserError` for a value that does not fit, a base that cannot be trained, and a metric that nothing measures.
    """
    sweep.check_values()
    setup = prepare(sweep.base)
    setup.check()
    check_metric(sweep.metric, setup)
    check_metric(sweep.score, setup, 'reported')
    printer.table(space_table(sweep))
    printer.table(trials_table(sweep))
    if without_own_split(sweep):
        printer.line(said_of('This sweep chooses and reports', 'its data set'))
    printer.table(cost_table(setup))
    printer.table(memory_table(setup, setup.trace().lower().compile().memory_analysis()))
    others = sorted({key for kind in sweep.space.values() for key in kind.keys} - set(SCALARS))
    if others:
        printer.line(
            f'operations and memory are of the base; the space sets {", ".join(others)}, and a trial has its own'
        )


def space_table(sweep: Sweep) -> Table:
    """A row a dimension: the keys it sets, its kind, and its values."""
    columns = Column('dimension'), Column('sets', prose=True), Column('kind', rank=1), Column('values', prose=True)
    rows = [
        (name, ', '.join(kind.keys), type(kind).__name__, _values(kind)) for name, kind in sorted(sweep.space.items())
    ]
    return Table('space', columns, rows, 'space of the sweep')


def _values(kind: Dimension) -> str:
    if isinstance(kind, Range):
        return f'{spelled(kind.low)} to {spelled(kind.high)}'
    return ', '.join(' and '.join(map(spelled, settings.values())) for settings in values_of(kind))


def trials_table(sweep: Sweep) -> Table:
    """What is run, at most: a pruner gives up trials, and nothing is confirmed where none came to its end."""
    facts = {
        'sampler': type(sweep.sampler).__name__,
        'pruner': 'none' if sweep.pruner is None else type(sweep.pruner).__name__,
        'chosen by': f'{sweep.metric}, {sweep.goal}',
        'reported': sweep.score,
        'seeds': len(sweep.seeds),
        'trials': sweep.trials,
        'runs that confirm the best': sweep.confirm,
        'steps of a trial, at most': sweep.steps,
        'steps of all, at most': (sweep.trials + sweep.confirm) * sweep.steps,
    }
    return pairs('sweep', facts, 'what is run')
