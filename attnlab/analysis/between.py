"""Two trained models of one shape: the loss between them, before and after the second is permuted towards the first."""

import dataclasses
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float, Int, Shaped
from scipy.optimize import linear_sum_assignment

from attnlab.analysis.asked import stacked
from attnlab.analysis.interventions import LastMap, last_map
from attnlab.analysis.question import Question
from attnlab.blocks.block import Block
from attnlab.errors import UserError
from attnlab.mixers.mixer import Mixer
from attnlab.mixers.state_space.selective import SelectiveMaps
from attnlab.models.predictor import one_stack
from attnlab.runs.loading import Loaded, load_run
from attnlab.runs.made import check_new, write_made
from attnlab.tables import Column, Printer, Table, digits
from attnlab.tasks.task import Batch
from attnlab.train import run
from attnlab.train.optimizer import named_parameters
from attnlab.train.setup import TRACELESS
from attnlab.train.state import joined, split

SHARES = tuple(step / 10 for step in range(11))
"""Of the second model in the mixtures whose loss is measured."""

SAME = 1e-4
"""How much of itself a loss may change by a change that is none, in float32."""

INNER = ('heads', 'mlp')
"""Names of axes inside of a branch along which units lie."""

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
      start: where along the axis the units begin.
      sets: the axis, from the end, along which sets of units lie; `None` where there is one set.
    """

    path: str
    axis: int
    repeat: int | None
    together: bool
    start: int = 0
    sets: int | None = None


@dataclasses.dataclass(frozen=True)
class Symmetry:
    """Units that can change places without a change of what the model computes: channels, heads, states, the stream.

    Of several `sets` of `count` units the units of each change places among themselves; `None`: there is one.
    """

    name: str
    count: int
    axes: tuple[Axis, ...]
    sets: int | None = None

    @property
    def same(self) -> Int[np.ndarray, '*s n']:
        """The order in which nothing changes places."""
        return np.broadcast_to(np.arange(self.count), (*self._lead, self.count))

    def drawn(self, seed: int) -> Int[np.ndarray, '*s n']:
        """An order that is drawn, of every set by itself."""
        return np.random.default_rng(seed).permuted(self.same, axis=-1)

    @property
    def _lead(self) -> tuple[int, ...]:
        return () if self.sets is None else (self.sets,)


def symmetries(model: Any) -> list[Symmetry]:
    """What might change places in a model of one stack, by the names of its parameters' axes.

    Of every branch the channels that its last map reads: of an MLP its hidden units, of a mixer with heads these, of
    another (the inner channels of a state-space model) the channels with all that belongs to them; of a mixer with a
    diagonal state its coordinates (`state_symmetries`); and the channels of the stream. Whether a model stays what it
    is has to be tried (`holds`). Raises `UserError` for maps of few bits, and for layers that share parameters.
    """
    stack = one_stack(model)
    stack.check_own()
    parameters = named_parameters(split(model)[1])
    norms = [path for path, variable in parameters.items() if _of_norm(path, variable, model.dim)]
    stream = []
    for path, variable in parameters.items():
        names = variable.get_metadata()['axes']
        where = [place for place, name in enumerate(names) if name == 'embed'] or ([0] if path in norms else [])
        for place in where:
            for repeat in _repeats(variable, len(names)):
                stream.append(Axis(path, place - len(names), repeat, together=False))
    found = [Symmetry('stream', model.dim, tuple(stream))]
    for index in range(stack.depth):
        place, repeat = stack.place(index)
        block = stack.blocks[place]
        for name in ('mixer', 'mlp') if isinstance(block, Block) else ():
            branch, called = getattr(block, name), f'layers[{index}].{name}'
            before = f'stack/blocks/{place}/{name}/'
            read = last_map(branch)
            if read is not None:
                found += _of_channels(branch, read, parameters, before, repeat, called)
            if branch is not None:
                found += state_symmetries(branch, parameters, before, repeat, called)
    return found


def _of_norm(path: str, variable: Any, dim: int) -> bool:
    """Whether a parameter is a number of every channel of the stream, of a norm of a block or the last."""
    per_channel = variable.get_metadata()['axes'] == (None,) and variable[...].shape[-1] == dim
    return per_channel and (path.startswith('norm/') or not {'mixer_norm', 'mlp_norm'}.isdisjoint(path.split('/')))


def _of_channels(
    branch: Any, read: LastMap, parameters: Mapping[str, Any], before: str, repeat: int, name: str
) -> list[Symmetry]:
    """The channels that the last map of a branch reads, or its heads; none where there is one alone."""
    _check_whole(read.map, name)
    inner = read.map.axes[0]
    heads = getattr(branch, 'heads', None) if isinstance(branch, Mixer) and inner == 'heads' else None
    count = heads if isinstance(heads, int) else int(read.map.weight[...].shape[-2])
    axes = [
        Axis(path, where - len(names), repeat, together=isinstance(heads, int))
        for path, variable in parameters.items()
        if path.startswith(before)
        for names in [variable.get_metadata()['axes']]
        for where, axis in enumerate(names)
        if axis in INNER and variable[...].shape[where - len(names)] % count == 0
    ]
    return [Symmetry(name, count, tuple(axes))] if count > 1 else []


def _check_whole(linear: Any, name: str) -> None:
    """Raises `UserError` for a map of a branch whose weights are stored in few bits."""
    if not hasattr(linear, 'weight'):
        raise UserError(
            f'the weights of {name} are stored in few bits and are not changed; give the run that it was made from'
        )


def state_symmetries(
    branch: nnx.Module, parameters: Mapping[str, nnx.Variable], before: str, repeat: int, name: str
) -> list[Symmetry]:
    """The coordinates of diagonal states, of every part of a branch that has such a state.

        h_t = diag(a) h_{t-1} + b x_t,  y_t = c . h_t     is the same for P a, P b and P c

    with any permutation P. Where every channel has a, b and c of its own it has a P of its own, a set (S4D, MEGA); one
    P is of all channels where they share a or b (S4), where one state is of all of them (S5, LRU), and where maps make
    b and c of the input (Mamba), whose outputs then change places too.

    Args:
      branch: of a layer, a mixer or an MLP.
      parameters: of the model, by path.
      before: what paths of the branch begin with.
      repeat: which layer of those stacked.
      name: of the branch.
    """
    found = []
    for path, module in nnx.iter_modules(branch):
        inside = ''.join(f'{each}/' for each in path)
        own = {
            key: variable.get_metadata()['axes']
            for key, variable in parameters.items()
            if key.startswith(before + inside) and '/' not in key.removeprefix(before + inside)
        }
        named = {key: axes.index('state') - len(axes) for key, axes in own.items() if 'state' in axes}
        if not named:
            continue
        (count,) = {parameters[key][...].shape[axis] for key, axis in named.items()}
        axes = [Axis(key, axis, repeat, together=False) for key, axis in named.items()]
        if isinstance(module, SelectiveMaps):
            _check_whole(module.select, name)
            axes.append(Axis(f'{before}{inside}select/weight', -1, repeat, together=False, start=module.splits[0]))
            norms = [f'{before}{inside}select_norms/{place}/' for place in (1, 2)]
            axes += [
                Axis(key, -1, repeat, together=False)
                for key in parameters
                if any(key.startswith(norm) for norm in norms)
            ]
        shapes = [parameters[axis.path][...].shape[1:] for axis in axes]
        sets = {
            shape[axis.axis - 1] if len(shape) >= 1 - axis.axis else 1 for axis, shape in zip(axes, shapes, strict=True)
        }
        each = sets.pop() if len(sets) == 1 and not isinstance(module, SelectiveMaps) else 1
        if each > 1:
            axes = [dataclasses.replace(axis, sets=axis.axis - 1) for axis in axes]
        if count > 1:
            whole = '.'.join((name, *map(str, path), 'state'))
            found.append(Symmetry(whole, count, tuple(axes), each if each > 1 else None))
    return found


def _repeats(variable: Any, axes: int) -> Sequence[int | None]:
    return range(variable[...].shape[0]) if variable[...].ndim > axes else (None,)


def permuted(arrays: Mapping[str, np.ndarray], symmetry: Symmetry, order: Int[np.ndarray, '*s n']) -> Arrays:
    """The parameters with the units of a symmetry in another order: unit `i` is what unit `order[i]` was.

    Of sets of units `order` has a row for each.
    """
    made = dict(arrays)
    for axis in symmetry.axes:
        whole = made[axis.path].copy()
        part = _units_first(whole, axis)
        for rows, new in zip(part, np.atleast_2d(order), strict=True):
            places = _places(rows.shape[0], axis, symmetry.count)
            rows[places] = rows[places[:, new]]
        made[axis.path] = whole
    return made


def _units_first(whole: np.ndarray, axis: Axis) -> Shaped[np.ndarray, 's n ...']:
    """A view of a parameter by set of units, one set or several, and by place along the axis of units."""
    part = whole if axis.repeat is None else whole[axis.repeat]
    return (
        np.moveaxis(part, axis.axis, 0)[None]
        if axis.sets is None
        else np.moveaxis(part, (axis.sets, axis.axis), (0, 1))
    )


def _places(size: int, axis: Axis, count: int) -> Int[np.ndarray, 'm n']:
    """The places of an axis by what they are of a unit, and by unit."""
    each = np.arange(axis.start, size)
    return each.reshape(count, -1).T if axis.together else each.reshape(-1, count)


def likeness(
    one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray], symmetry: Symmetry
) -> Float[np.ndarray, 's n n']:
    """By set, by unit of one model and unit of another, the products of all that belongs to them."""
    sets, count = symmetry.sets or 1, symmetry.count
    total = np.zeros((sets, count, count))
    for axis in symmetry.axes:
        parts = []
        for arrays in (one, other):
            part = _units_first(arrays[axis.path], axis).astype(np.float64)
            places = _places(part.shape[1], axis, count)
            parts.append(part[:, places.T.reshape(-1)].reshape(sets, count, -1))
        total += parts[0] @ np.swapaxes(parts[1], 1, 2)
    return total


def matched(
    one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray], found: Sequence[Symmetry], seed: int = 0
) -> tuple[Arrays, dict[str, Int[np.ndarray, '*s n']]]:
    """The second model's parameters, permuted so that they lie close to those of the first, and in which order.

    Symmetries are taken in random order; each is solved exactly given the others (an assignment), until none gains:
    weight matching, Ainsworth et al. 2023, https://arxiv.org/abs/2209.04836. What it ends in is a local optimum.
    """
    rng, made = np.random.default_rng(seed), dict(other)
    orders = {symmetry.name: symmetry.same for symmetry in found}
    for _ in range(SWEEPS):
        moved = False
        for place in rng.permutation(len(found)):
            symmetry = found[place]
            products = likeness(one, made, symmetry)
            rows = np.stack([linear_sum_assignment(each, maximize=True)[1] for each in products])
            before = np.trace(products, axis1=1, axis2=2).sum()
            gain = np.take_along_axis(products, rows[:, :, None], axis=2).sum() - before
            if gain > 1e-9 * (1 + abs(before)):
                order = rows.reshape(symmetry.same.shape)
                made, moved = permuted(made, symmetry, order), True
                orders[symmetry.name] = np.take_along_axis(orders[symmetry.name], order, axis=-1)
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

    After Frankle et al. 2020, https://arxiv.org/abs/1912.05671, who take the mean of the ends for the line.
    """
    line = [(1 - share) * losses[0] + share * losses[-1] for share in shares]
    return float(max(loss - level for loss, level in zip(losses, line, strict=True)))


def holds(arrays: Mapping[str, np.ndarray], symmetry: Symmetry, loss: Callable[[Arrays], float]) -> bool:
    """Whether a model has the loss that it had with every unit in the next one's place, and with units as drawn."""
    turned = np.roll(symmetry.same, 1, axis=-1)
    # Units in a ring could turn and not change places; of two a drawn order may be the one they have.
    orders = (turned, symmetry.drawn(0))
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
        {symmetry.name: float(np.mean(orders[symmetry.name] != symmetry.same)) for symmetry in held},
        tuple(symmetry.name for symmetry in known if symmetry not in held),
    ), near


def analyse_between(
    question: Question, second: pathlib.Path, printer: Printer, *, merged: pathlib.Path | None = None
) -> Between:
    """The loss between two runs of one config but for the seed, on rows of a split.

    Writes `analysis/<step>-between.json`, and with `merged` a run whose parameters are the mean of the first and of the
    second permuted. Raises `UserError` for runs whose configs differ in more than the seed, those with buffers that the
    seed has drawn, rows that do not exist, and a folder that holds a run.
    """
    workdir, first = question.workdir, question.loaded
    last = load_run(second, ema=first.ema)
    question.check_layers('whose layers cannot be addressed one by one')
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
    found, near = compared(first, other, measuring(first, question.batches()))
    record = question.record() | {'second': str(second), 'second_step': last.step}
    shown = tables(found, f'{workdir} and {second}, {question.split}')
    question.report(printer, '-between', record, dataclasses.asdict(found), shown)
    if merged is not None:
        facts = {
            'merged': [str(workdir), str(second)],
            'merged_steps': [first.step, last.step],
            'merged_ema': first.ema,
            'other_data': question.other_data,
        }
        write_made(workdir, first, with_arrays(first, mixed(one, near, 0.5)), merged, facts)
        printer.line(f'written: {merged}, the mean of both, a run that eval and compare take')
    return found


def check_alike(workdir: pathlib.Path, second: pathlib.Path) -> None:
    """Raises `UserError` for runs whose configs differ in more than the seed and what leaves no trace."""
    differing = run.differences(run.saved_config(workdir), run.saved_config(second))
    others = [line for line in differing if re.split(r'[.:[]', line)[0] not in ('seed', *TRACELESS)]
    if others:
        found = '; '.join(others[:3])
        raise UserError(f'{workdir} and {second} differ in more than the seed ({found}); give two runs of one config')


def same_buffers(first: Loaded, second: Loaded) -> bool:
    """Whether two runs have the same buffers."""
    each = [jax.tree.leaves(split(loaded.model())[2]) for loaded in (first, second)]
    return len(each[0]) == len(each[1]) and all(map(np.array_equal, *each))


def measuring(loaded: Loaded, batches: Sequence[Batch]) -> Callable[[Arrays], float]:
    """The loss of parameters on batches."""
    rows = stacked(batches)

    def loss(arrays: Arrays) -> float:
        found = loaded.setup.measure(with_arrays(loaded, arrays).variables, rows)['loss']
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
