"""Two trained models of one shape: the loss between them, before and after the second is permuted towards the first."""

import dataclasses
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int, Shaped
from scipy.optimize import linear_sum_assignment

from attnlab.analysis.examination import first_rows
from attnlab.analysis.interventions import last_map
from attnlab.blocks.block import Block
from attnlab.errors import UserError
from attnlab.files import write_results
from attnlab.models.predictor import Stacked, one_stack
from attnlab.runs.loading import Loaded, load_run
from attnlab.runs.made import check_new, write_made
from attnlab.tables import Column, Printer, Table, digits
from attnlab.tasks.task import Batch
from attnlab.train import run
from attnlab.train.optimizer import named_parameters
from attnlab.train.state import joined, split

SHARES = tuple(step / 10 for step in range(11))
"""Of the second model in the mixtures whose loss is measured."""

SAME = 1e-4
"""How much of itself a loss may change by a change that is none, in float32."""

INNER = ('heads', 'mlp')
"""Names of axes inside of a branch along which units lie."""

FREE = ('seed', 'report', 'checkpoint', 'mesh')
"""What configs of two runs may differ in."""

SWEEPS = 100
"""The most rounds of matching; each ends sooner where nothing moves."""

Arrays = dict[str, Shaped[np.ndarray, '...']]
"""Parameters by path."""


@dataclasses.dataclass(frozen=True)
class Axis:
    """An axis of a parameter along which units lie.

    Attributes:
      path: of the parameter.
      axis: from the end, -1 or -2 and so on, so that stacked layers do not count.
      repeat: which layer of those stacked; `None` of a parameter that is not.
      together: whether what belongs to a unit lies side by side, as channels of a head do; else a unit has one number
        in each of several parts, as channels that are split after a map.
    """

    path: str
    axis: int
    repeat: int | None
    together: bool


@dataclasses.dataclass(frozen=True)
class Symmetry:
    """Units that can change places without a change of what the model computes: channels, heads, the stream."""

    name: str
    count: int
    axes: tuple[Axis, ...]


def symmetries(model: Any) -> list[Symmetry]:
    """What might change places in a model of one stack, by the names of its parameters' axes.

    Of every branch the channels that its last map reads: of an MLP its hidden units, of a mixer with heads these, of
    another (the inner channels of a state-space model) the channels with all that belongs to them; and the channels of
    the stream. Whether a model stays what it is has to be tried (`holds`). Raises `UserError` for maps of few bits, and
    for layers that share parameters.
    """
    stack = one_stack(model)
    stack.check_own()
    parameters = named_parameters(split(model)[1])
    ends = ('/mixer_norm/scale', '/mlp_norm/scale')
    norms = [path for path in parameters if path.endswith(ends) or path == 'norm/scale']
    stream = []
    for path, variable in parameters.items():
        names = variable.get_metadata()['axes']
        where = [place for place, name in enumerate(names) if name == 'embed'] or ([0] if path in norms else [])
        for place in where:
            for repeat in _repeats(variable, len(names)):
                stream.append(Axis(path, place - len(names), repeat, together=False))
    found = [Symmetry('stream', model.dim, tuple(stream))]
    for index in range(stack.depth):
        place, repeat = index % len(stack.blocks), index // len(stack.blocks)
        block = stack.blocks[place]
        for name in ('mixer', 'mlp') if isinstance(block, Block) else ():
            read = last_map(getattr(block, name))
            if read is None:
                continue
            if not hasattr(read.map, 'weight'):
                raise UserError(
                    f'the weights of layers[{index}].{name} are stored in few bits and are not changed; give the run '
                    'that it was made from'
                )
            inner = read.map.axes[0]
            branch = getattr(block, name)
            heads = getattr(branch, 'heads', None) if name == 'mixer' and inner == 'heads' else None
            count = heads if isinstance(heads, int) else int(read.map.weight[...].shape[-2])
            before = f'stack/blocks/{place}/{name}/'
            axes = [
                Axis(path, where - len(names), repeat, together=isinstance(heads, int))
                for path, variable in parameters.items()
                if path.startswith(before)
                for names in [variable.get_metadata()['axes']]
                for where, axis in enumerate(names)
                if axis in INNER and variable[...].shape[where - len(names)] % count == 0
            ]
            if count > 1:
                found.append(Symmetry(f'layers[{index}].{name}', count, tuple(axes)))
    return found


def _repeats(variable: Any, axes: int) -> Sequence[int | None]:
    return range(variable[...].shape[0]) if variable[...].ndim > axes else (None,)


def permuted(arrays: Mapping[str, np.ndarray], symmetry: Symmetry, order: Int[np.ndarray, 'n']) -> Arrays:
    """The parameters with the units of a symmetry in another order: unit `i` is what unit `order[i]` was."""
    made = dict(arrays)
    for axis in symmetry.axes:
        whole = made[axis.path].copy()
        part = whole if axis.repeat is None else whole[axis.repeat]
        places = _places(part.shape[axis.axis], symmetry.count, together=axis.together)
        part[...] = np.take(
            part, places[:, order].reshape(-1) if not axis.together else _side(places, order), axis.axis
        )
        made[axis.path] = whole
    return made


def _places(size: int, count: int, *, together: bool) -> Int[np.ndarray, 'm n']:
    """The places of an axis by what they are of a unit, and by unit."""
    each = np.arange(size)
    return each.reshape(count, -1).T if together else each.reshape(-1, count)


def _side(places: Int[np.ndarray, 'm n'], order: Int[np.ndarray, 'n']) -> Int[np.ndarray, 's']:
    return places[:, order].T.reshape(-1)


def likeness(
    one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray], symmetry: Symmetry
) -> Float[np.ndarray, 'n n']:
    """By unit of one model and unit of another, the products of all that belongs to them."""
    total = np.zeros((symmetry.count, symmetry.count))
    for axis in symmetry.axes:
        rows = []
        for arrays in (one, other):
            part = arrays[axis.path] if axis.repeat is None else arrays[axis.path][axis.repeat]
            part = np.moveaxis(part.astype(np.float64), axis.axis, 0)
            places = _places(part.shape[0], symmetry.count, together=axis.together)
            rows.append(part[places.T.reshape(-1)].reshape(symmetry.count, -1))
        total += rows[0] @ rows[1].T
    return total


def matched(
    one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray], found: Sequence[Symmetry], seed: int = 0
) -> tuple[Arrays, dict[str, Int[np.ndarray, 'n']]]:
    """The second model's parameters, permuted so that they lie close to those of the first, and in which order.

    Symmetries are taken in random order; each is solved exactly given the others (an assignment), until none gains:
    weight matching, Ainsworth et al. 2023, https://arxiv.org/abs/2209.04836. What it ends in is a local optimum.
    """
    rng, made = np.random.default_rng(seed), dict(other)
    orders = {symmetry.name: np.arange(symmetry.count) for symmetry in found}
    for _ in range(SWEEPS):
        moved = False
        for place in rng.permutation(len(found)):
            symmetry = found[place]
            products = likeness(one, made, symmetry)
            _, order = linear_sum_assignment(products, maximize=True)
            gain = products[np.arange(len(order)), order].sum() - np.trace(products)
            if gain > 1e-9 * (1 + abs(np.trace(products))):
                made, moved = permuted(made, symmetry, order), True
                orders[symmetry.name] = orders[symmetry.name][order]
        if not moved:
            break
    return made, orders


@dataclasses.dataclass(frozen=True)
class Between:
    """The results of `analyse_between`.

    Attributes:
      shares: of the second model.
      plain: the loss of mixtures.
      matched: the loss of mixtures with the second model permuted.
      barrier: the largest loss above the straight line between the ends, of both.
      moved: by symmetry, the share of units that changed places.
      left: symmetries that did not hold and were left as they are.
    """

    shares: tuple[float, ...]
    plain: tuple[float, ...]
    matched: tuple[float, ...]
    barrier: tuple[float, float]
    moved: Mapping[str, float]
    left: tuple[str, ...]


def barrier(losses: Sequence[float], shares: Sequence[float] = SHARES) -> float:
    """`max_a L(a) - (1 - a) L(0) - a L(1)`: how far the loss rises above the line between its ends.

    Frankle et al. 2020, https://arxiv.org/abs/1912.05671.
    """
    line = [(1 - share) * losses[0] + share * losses[-1] for share in shares]
    return float(max(loss - level for loss, level in zip(losses, line, strict=True)))


def holds(arrays: Mapping[str, np.ndarray], symmetry: Symmetry, loss: Callable[[Arrays], float]) -> bool:
    """Whether a model has the loss that it had with every unit in the next one's place, and with units as drawn."""
    turned = np.roll(np.arange(symmetry.count), 1)
    # Units in a ring could turn and not change places; of two a drawn order may be the one they have.
    orders = (turned, np.random.default_rng(0).permutation(symmetry.count))
    before = loss(dict(arrays))
    return all(abs(loss(permuted(arrays, symmetry, order)) - before) <= SAME * abs(before) for order in orders)


def arrays_of(loaded: Loaded) -> Arrays:
    """The parameters of a run."""
    params = split(loaded.model())[1]
    return {path: np.asarray(variable[...]) for path, variable in named_parameters(params).items()}


def with_arrays(loaded: Loaded, arrays: Mapping[str, np.ndarray]) -> Loaded:
    """The run with other parameters; buffers stay."""
    model = loaded.model()
    _, params, buffers = split(model)
    named = named_parameters(params)
    leaves = [jax.device_put(arrays[path], variable[...].sharding) for path, variable in named.items()]
    made = jax.tree.unflatten(jax.tree.structure(params), leaves)
    return dataclasses.replace(loaded, variables=joined(made, buffers))


def mixed(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray], share: float) -> Arrays:
    """`(1 - share)` of one model and `share` of another."""
    return {path: ((1 - share) * each + share * other[path]).astype(each.dtype) for path, each in one.items()}


def compared(first: Loaded, other: Arrays, losses: Callable[[Arrays], float], seed: int = 0) -> tuple[Between, Arrays]:
    """What lies between a run and the parameters of another, and these permuted."""
    one = arrays_of(first)
    known = symmetries(first.model())
    held = [symmetry for symmetry in known if holds(one, symmetry, losses)]
    near, orders = matched(one, other, held, seed)
    plain, close = (tuple(losses(mixed(one, each, share)) for share in SHARES) for each in (other, near))
    return Between(
        SHARES,
        plain,
        close,
        (barrier(plain), barrier(close)),
        {name: float(np.mean(order != np.arange(len(order)))) for name, order in orders.items()},
        tuple(symmetry.name for symmetry in known if symmetry not in held),
    ), near


def analyse_between(
    workdir: pathlib.Path,
    second: pathlib.Path,
    printer: Printer,
    step: int | None,
    split_name: str | None,
    rows: int,
    *,
    merged: pathlib.Path | None = None,
    ema: bool = False,
    other_data: bool = False,
) -> Between:
    """The loss between two runs of one config but for the seed, on the first `rows` rows of a split.

    Writes `analysis/<step>-between.json`, and with `merged` a run whose parameters are the mean of the first and of the
    second permuted. Raises `UserError` for runs whose configs differ in more than the seed, those with buffers that the
    seed has drawn, changed data unless `other_data` allows them, and a folder that holds a run.
    """
    first, last = load_run(workdir, step, ema=ema), load_run(second, None, ema=ema)
    task = first.setup.task
    run.check_data(workdir, task.describe(), other=other_data)
    if not isinstance(first.setup.model, Stacked):
        raise UserError(f'{workdir} holds a {type(first.setup.model).__name__}, whose layers are not told apart')
    check_alike(workdir, second)
    one, other = arrays_of(first), arrays_of(last)
    if {path: each.shape for path, each in one.items()} != {path: each.shape for path, each in other.items()}:
        raise UserError(
            f'{workdir} and {second} have parameters of other shapes; give two runs that differ in the seed'
        )
    if not same_buffers(first, last):
        raise UserError(
            f'{workdir} and {second} have other buffers, such as features drawn by the seed or running means, which '
            'parameters are trained with; runs with such are not mixed'
        )
    if merged is not None:
        check_new(workdir, merged, '--merged')
    split_name = task.evaluated_split if split_name is None else split_name
    batches = first_rows(first, split_name, rows)
    found, near = compared(first, other, measuring(first, batches))
    path = workdir / 'analysis' / f'{first.name}-between.json'
    record = {'step': first.step, 'second': str(second), 'second_step': last.step, 'ema': ema, 'split': split_name}
    record |= {'rows': rows, 'other_data': other_data}
    write_results(path, record | dataclasses.asdict(found))
    for table in tables(found, f'{workdir} and {second}, {split_name}'):
        printer.table(table)
    printer.line(f'written: {path}')
    if merged is not None:
        facts = {
            'merged': [str(workdir), str(second)],
            'merged_steps': [first.step, last.step],
            'merged_ema': ema,
            'other_data': other_data,
        }
        write_made(workdir, first, with_arrays(first, mixed(one, near, 0.5)), merged, facts)
        printer.line(f'written: {merged}, the mean of both, a run that eval and compare take')
    return found


def check_alike(workdir: pathlib.Path, second: pathlib.Path) -> None:
    """Raises `UserError` for runs whose configs differ in more than the seed and what leaves no trace."""
    differing = run.differences(run.saved_config(workdir), run.saved_config(second))
    others = [line for line in differing if re.split(r'[.:[]', line)[0] not in FREE]
    if others:
        found = '; '.join(others[:3])
        raise UserError(f'{workdir} and {second} differ in more than the seed ({found}); give two runs of one config')


def same_buffers(first: Loaded, second: Loaded) -> bool:
    """Whether two runs have the same buffers."""
    each = [jax.tree.leaves(split(loaded.model())[2]) for loaded in (first, second)]
    return len(each[0]) == len(each[1]) and all(map(np.array_equal, *each))


def measuring(loaded: Loaded, batches: Sequence[Batch]) -> Callable[[Arrays], float]:
    """The loss of parameters on batches."""
    stacked = {name: np.concatenate([np.asarray(each[name]) for each in batches]) for name in batches[0]}

    def loss(arrays: Arrays) -> float:
        found = loaded.setup.measure(with_arrays(loaded, arrays).variables, stacked)['loss']
        return float(found.total) / float(found.count)

    return loss


def tables(found: Between, title: str) -> list[Table]:
    """What is printed."""
    four = digits('.4f')
    columns = [Column('of the second', digits('.1f'), True), Column('loss', four, True), Column('matched', four, True)]
    caption = f'{title}: the loss of mixtures; barriers {found.barrier[0]:.4f}, matched {found.barrier[1]:.4f}'
    lines = list(zip(found.shares, found.plain, found.matched, strict=True))
    moved = [Column('units'), Column('share that moved', digits('.2f'), True)]
    rows: list[tuple[Any, ...]] = [*found.moved.items(), *((f'{name}, left', None) for name in found.left)]
    return [Table('between', columns, lines, caption), Table('matching', moved, rows, 'units that changed places')]
