"""What a run makes of rows: hidden states that the head reads, logits and labels, of every prediction."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Bool, Float, Int, Shaped

from attnlab.analysis import odin, scores
from attnlab.analysis.prediction import what_is_asked
from attnlab.errors import UserError
from attnlab.runs.loading import Loaded
from attnlab.tasks.long_range import Classification
from attnlab.tasks.task import Task
from attnlab.train.rows import rows_of

AT_ONCE = 32
"""Predictions of a call, in whole rows."""

PREDICTIONS = 4096
"""Predictions that are looked at where no number of rows is asked for, about."""

ROWS = (20, 512)
"""The fewest and the most rows that are looked at then."""


@dataclasses.dataclass(frozen=True, eq=False)
class Outputs:
    """What a run predicts, in float64: vectors that the head reads, logits, and the true labels.

    `odin` are ODIN's scores by the size of its step (`attnlab.analysis.odin`), if there are any; `members` the logits
    of every member of an ensemble, of whose mean probabilities `logits` are. `groups` are the rows that predictions
    are of, which are not independent of each other; without these every prediction has a row of its own.
    """

    features: Float[np.ndarray, 'b d']
    logits: Float[np.ndarray, 'b o']
    labels: Int[np.ndarray, 'b']
    odin: Float[np.ndarray, 'n b'] | None = None
    members: Float[np.ndarray, 'm b o'] | None = None
    groups: Int[np.ndarray, 'b'] | None = None

    def part(self, first: int, step: int) -> 'Outputs':
        """The outputs of every `step`-th row from `first` on."""
        places = self.places
        return self._of((places >= first) & ((places - first) % step == 0))

    def only(self, row: int) -> 'Outputs':
        """The outputs of one row, by its place."""
        return self._of(self.places == row)

    def _of(self, chosen: Bool[np.ndarray, 'b']) -> 'Outputs':
        moved, members = (None if each is None else each[:, chosen] for each in (self.odin, self.members))
        groups = None if self.groups is None else self.groups[chosen]
        return Outputs(self.features[chosen], self.logits[chosen], self.labels[chosen], moved, members, groups)

    @property
    def places(self) -> Int[np.ndarray, 'b']:
        """The row of every prediction."""
        return np.arange(len(self.labels)) if self.groups is None else self.groups

    def together(self, others: Sequence['Outputs']) -> 'Outputs':
        """The outputs of an ensemble with others, of the same rows; features are those of the first.

        Raises `UserError` for others of other labels, or another number of classes.
        """
        if not others:
            return self
        classes = sorted({each.logits.shape[-1] for each in (self, *others)})
        if len(classes) > 1:
            raise UserError(
                f'members of an ensemble have {" and ".join(map(str, classes))} classes; give runs of one task'
            )
        if not all(np.array_equal(self.labels, other.labels) for other in others):
            raise UserError('members of an ensemble are asked for different labels; give runs of one task')
        members = np.stack([self.logits, *(other.logits for other in others)])
        return dataclasses.replace(self, logits=scores.mean_logits(members), members=members)

    def by_row(self, values: Shaped[np.ndarray, 'b *s']) -> Float[np.ndarray, 'r *s']:
        """The means of what is known of predictions, over those of every row, in order."""
        if self.groups is None:
            return np.asarray(values, np.float64)
        order = np.argsort(self.groups, kind='stable')
        _, starts, counts = np.unique(self.groups[order], return_index=True, return_counts=True)
        totals = np.add.reduceat(np.asarray(values, np.float64)[order], starts, axis=0)
        return totals / counts.reshape(-1, *(1,) * (values.ndim - 1))

    @property
    def rows(self) -> Int[np.ndarray, 'r']:
        """The places of rows in which something is predicted, in order."""
        return np.unique(self.places)

    @property
    def right(self) -> Bool[np.ndarray, 'b']:
        """Whether the likeliest class is the label."""
        return scores.right(self.logits, self.labels)


def check_asks(task: Task, length: int) -> None:
    """Raises `UserError` for a task that asks for neither a class of a row nor tokens, or classes, of its places."""
    if isinstance(task, Classification):
        return
    row = task.example(length)
    labels = row[task.labels]
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer) or 'weights' not in row:
        raise UserError(
            f'{type(task).__name__} asks for no tokens; attnlab uncertainty is of classifiers and of predicted tokens'
        )


def one_a_row(task: Task) -> bool:
    """Whether a row has one label, rather than one of each of its places."""
    return isinstance(task, Classification)


def reader(loaded: Loaded, sizes: tuple[float, ...] = (), unit: float = 1.0) -> Callable[..., Outputs]:
    """What makes outputs of rows, some at a time; what is missing of the last call is its first rows again.

    With `sizes`, those of steps in units of `unit`, ODIN's scores as well.
    """
    setup, task = loaded.setup, loaded.setup.task

    @functools.partial(setup.jit, out_shardings=setup.whole)
    def call(variables: nnx.State, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
        asked, weights = what_is_asked(task, nnx.merge(setup.graphdef, variables), batch)
        hidden, logits, losses, targets = asked
        if targets.shape != losses.shape:
            raise UserError(f'{type(task).__name__} asks for several labels at once; uncertainty is of one at a time')
        found = hidden, logits, targets, weights
        if not sizes:
            return found
        return *found, odin.moved(setup, variables, batch, weights > 0, jnp.float32(unit), sizes)

    def read(rows: Mapping[str, np.ndarray]) -> Outputs:
        count = len(rows['tokens'])
        at_once = max(1, AT_ONCE // max(rows[task.labels][0].size, 1))
        parts, shared = [], False
        for begin in range(0, count, at_once):
            places = np.arange(begin, begin + min(at_once, count)) % count
            found = call(loaded.variables, {name: array[places] for name, array in rows.items()})
            hidden, logits, targets, weights, *moved = jax.device_get(found)
            row = np.arange(len(weights)) // (len(weights) // len(places))
            row = np.broadcast_to(row.reshape(-1, *(1,) * (weights.ndim - 1)), weights.shape)
            there = (weights > 0) & (begin + row < count)
            shared = weights.size > len(places)
            scored = [odin.odin(size[there].astype(np.float64)) for size in moved[0]] if moved else None
            parts.append(
                Outputs(
                    hidden[there].astype(np.float64),
                    logits[there].astype(np.float64),
                    np.asarray(targets[there]),
                    None if scored is None else np.stack(scored),
                    groups=begin + row[there],
                )
            )
        return _joined(parts, shared)

    return read


def outputs(loaded: Loaded, rows: Mapping[str, np.ndarray]) -> Outputs:
    """What a run makes of rows, without ODIN's scores."""
    return reader(loaded)(rows)


def _joined(parts: Sequence[Outputs], shared: bool) -> Outputs:
    """Outputs one after the other; where no rows are `shared` by predictions there are no groups."""
    names = ('features', 'logits', 'labels')
    joined = Outputs(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))
    moved = [part.odin for part in parts if part.odin is not None]
    groups = np.concatenate([part.groups for part in parts if part.groups is not None])
    return dataclasses.replace(
        joined, odin=np.concatenate(moved, axis=1) if moved else None, groups=groups if shared else None
    )


def changed(
    rows: Mapping[str, np.ndarray], trained: Mapping[str, np.ndarray], seed: int = 0
) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """The rows with inputs that are not of the data, by what was done to them; padding stays.

    `noise` is uniform between the least and the largest input of training, `shuffled` has the inputs of each row in
    another order; of real numbers there are `inverted` ones, reflected about the middle of that range, and five times
    as large ones, on which scores of the outputs of ReLU networks are worse than chance (Ulmer and Cina 2020,
    https://arxiv.org/abs/2012.05329).
    """
    rng, x, there = np.random.default_rng(seed), rows['tokens'], _there(rows)
    known = trained['tokens'][_there(trained)]
    low, high = known.min(), known.max()
    real = np.issubdtype(x.dtype, np.floating)
    noise = rng.uniform(low, high, x.shape) if real else rng.integers(low, high + 1, x.shape)
    made = {'noise': noise.astype(x.dtype), 'shuffled': x.copy()}
    for row, places in zip(made['shuffled'], map(np.flatnonzero, there), strict=True):
        row[places] = row[rng.permutation(places)]
    if real:
        made |= {'inverted': low + high - x, 'five times': 5 * x}
    mask = there.reshape(*there.shape, *(1,) * (x.ndim - there.ndim))
    for name, tokens in made.items():
        yield name, {**rows, 'tokens': np.where(mask, tokens, x)}


def _there(rows: Mapping[str, np.ndarray]) -> Bool[np.ndarray, 'b t']:
    """Which places are no padding; of rows without segments all."""
    return rows['segments'] > 0 if 'segments' in rows else np.ones(rows['tokens'].shape[:2], bool)


def stacked(loaded: Loaded, split: str, count: int | None, least: int) -> dict[str, np.ndarray]:
    """Rows all over a split as one batch; if no number is given those of about `PREDICTIONS`, or all there are.

    Raises `UserError` for fewer than `least`, and for more than there are.
    """
    task, length = loaded.setup.task, loaded.setup.length
    source = task.source(split, length)
    if count is None:
        count = min(len(source), int(np.clip(PREDICTIONS // max(task.example(length)[task.labels].size, 1), *ROWS)))
    if count < least:
        raise UserError(f'rows is {count} of the {split} split; there must be at least {least}')
    (rows,) = rows_of(loaded.setup, split, count, at_once=count)
    return dict(rows)
