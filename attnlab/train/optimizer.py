"""Optimisers as values: a direction from optax, then a step with each parameter's learning rate and decay.

    p <- p - lr (direction(grad) + decay p),   lr = schedule * group.lr,   decay = weight_decay * group.weight_decay

Weight decay is decoupled from the gradient and scaled by the learning rate: Loshchilov and Hutter 2019,
https://arxiv.org/abs/1711.05101. Moments have the type of the parameters, float32.
"""

import abc
import dataclasses
import fnmatch
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from attnlab.errors import UserError, nearest
from attnlab.nn.parameter import GROUPS
from attnlab.train.perpendicular import Perpendicular
from attnlab.train.schedule import Cosine, Schedule

LEAST = float(jnp.finfo(jnp.float32).tiny)
"""The least number of float32 that devices do not take for 0."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Multipliers of the learning rate and the weight decay for a group of parameters.

    Attributes:
      lr: multiplies the learning rate; 0 freezes the group.
      weight_decay: multiplies the weight decay.
      most: the highest learning rate of the group, whatever that of the rest; `None`: no limit.
    """

    lr: float = 1.0
    weight_decay: float = 1.0
    most: float | None = None

    def __post_init__(self) -> None:
        if self.lr < 0 or self.weight_decay < 0:
            raise UserError(f'multipliers must be at least 0; got {self}')
        if self.most is not None and not self.most > 0:
            raise UserError(f'most of a group is {self.most}; it must be a learning rate above 0, or None')

    def share(self, peak_lr: float) -> float:
        """What multiplies a learning rate with this peak: `min(lr, most / peak_lr)`."""
        return self.lr if self.most is None else min(self.lr, self.most / peak_lr)


@dataclasses.dataclass(frozen=True)
class Groups:
    """The multipliers of each group in `attnlab.nn.parameter.GROUPS`; every parameter is annotated with its group.

    Gains, biases and the time scales of a recurrence do not decay. Time scales are trained at the rate of the rest,
    as in language models of Mamba or GLA. S4 and S5 train theirs at a lower one, at most 1e-3, as the configs of long
    ranges and of images do: `most` of `dynamics` (Gu et al. 2022, https://arxiv.org/abs/2111.00396).
    """

    matrix: Group = Group()
    embedding: Group = Group()
    vector: Group = Group(weight_decay=0.0)
    dynamics: Group = Group(weight_decay=0.0)

    @property
    def limited(self) -> tuple[Group, ...]:
        """The groups whose learning rate has a limit."""
        return tuple(group for name in GROUPS if (group := getattr(self, name)).most is not None)

    def scaled(self, factor: float) -> 'Groups':
        """The same groups, their limits times a factor."""
        groups = {name: getattr(self, name) for name in GROUPS}
        limited = {name: group for name, group in groups.items() if group.most is not None}
        scaled = {name: dataclasses.replace(group, most=group.most * factor) for name, group in limited.items()}
        return dataclasses.replace(self, **scaled)


@dataclasses.dataclass(frozen=True)
class Override:
    """Multipliers for the parameters whose path matches, in place of their group's.

    Attributes:
      pattern: as for file names, such as `stack/blocks/*/mixer/*/bias`; `*` also crosses `/`.
      lr: multiplies the learning rate; 0 freezes them.
      weight_decay: multiplies the weight decay.
    """

    pattern: str
    lr: float = 1.0
    weight_decay: float = 1.0


class Rates(NamedTuple):
    """The numbers of an optimiser that a compiled step takes as arguments: other values need no recompilation.

    `shares` multiply the learning rates of the groups that have a limit, in the order of `Groups.limited`.
    """

    peak_lr: Any
    weight_decay: Any
    shares: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer(abc.ABC):
    """Base class of optimisers.

    Attributes:
      peak_lr: the highest learning rate.
      schedule: the learning rate over the run.
      weight_decay: decoupled, multiplied by the learning rate.
      clip: gradients are scaled down to this global norm, of which frozen parameters are no part; `None` leaves them.
      perpendicular: removes the component of gradients along the weights, after clipping; `None`: no removal.
      groups: multipliers by group.
      overrides: multipliers by path; of several that match, the last applies.
      ema: decay of a moving average of the parameters that is kept beside them, and evaluated beside them
        (`attnlab.train.average`); `None`: none is kept.
      below: of the class, the numbers of its own that are 0 or more, and what each is below.
      divisors: of the class, the numbers of its own that it divides by where all else is 0.
    """

    peak_lr: float
    schedule: Schedule = Cosine()
    weight_decay: float = 0.1
    clip: float | None = 1.0
    perpendicular: Perpendicular | None = None
    groups: Groups = Groups()
    overrides: tuple[Override, ...] = ()
    ema: float | None = None

    below: ClassVar[Mapping[str, float]] = MappingProxyType({})
    divisors: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        if not (0 < self.peak_lr < math.inf and 0 <= self.weight_decay < math.inf) or (
            self.clip is not None and not self.clip > 0
        ):
            raise UserError(
                f'an optimizer needs peak_lr above 0, weight_decay of at least 0, and clip above 0 or None; '
                f'got {self.peak_lr}, {self.weight_decay}, {self.clip}'
            )
        if self.ema is not None and not 0 < self.ema < 1:
            raise UserError(
                f'ema of an optimizer is {self.ema}; it must be a decay above 0 and below 1, such as 0.999, or None'
            )
        for name, most in self.below.items():
            value = getattr(self, name)
            if not 0 <= value < most:
                raise UserError(f'{name} of an optimizer is {value}; it must be a number from 0 to below {most:g}')
        for name in self.divisors:
            value = getattr(self, name)
            if not LEAST <= value < math.inf:
                raise UserError(
                    f'{name} of an optimizer is {value}; it must be a number of at least {LEAST:.2g}: '
                    'gradients of 0 are divided by it'
                )

    @abc.abstractmethod
    def direction(self, params: nnx.State) -> optax.GradientTransformation:
        """Returns the transformation of gradients into a direction of ascent, for these parameters."""

    def learning_rate(self, steps: int) -> optax.Schedule:
        """Returns the learning rate, before multipliers, as a function of the number of updates made."""
        return self.schedule(steps, self.peak_lr)

    @property
    def rates(self) -> Rates:
        """This optimiser's own `Rates`."""
        shares = tuple(group.share(self.peak_lr) for group in self.groups.limited)
        return Rates(self.peak_lr, self.weight_decay, shares)

    def transform(self, params: nnx.State, steps: int, rates: Rates | None = None) -> optax.GradientTransformation:
        """Returns the transformation of gradients into updates, for a run of `steps` steps.

        `params` may be abstract, `rates` traced; without, they are the optimiser's own. Raises `UserError` for a
        parameter of an unknown group, a pattern that matches nothing, or a schedule that does not fit the run.
        """
        clip = () if self.clip is None else (optax.clip_by_global_norm(self.clip),)
        projection = () if self.perpendicular is None else (self.perpendicular.transform(_stacked_dims(params)),)
        peak_lr, weight_decay, shares = rates or self.rates
        multipliers = self.multipliers(params)
        limited = dict(zip(self.groups.limited, shares, strict=True))
        factors = [limited.get(group, group.lr) if group.lr else None for group in multipliers.values()]
        decays = [group.weight_decay for group in multipliers.values()]
        descend = _descend(self.schedule(steps, peak_lr), weight_decay, factors, decays)
        chain = optax.chain(*clip, *projection, self.direction(params), descend)

        # No member of the chain: states of runs that were begun before keep their places.
        def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            return chain.update(trained(gradients, multipliers), state, params)

        return optax.GradientTransformation(chain.init, update)

    def multipliers(self, params: nnx.State) -> dict[str, Group]:
        """Returns the multipliers of every parameter by its path, in the order of the tree's leaves."""
        variables = named_parameters(params)
        chosen = {path: self._group_of(path, variable) for path, variable in variables.items()}
        for override in self.overrides:
            matching = [path for path in variables if fnmatch.fnmatchcase(path, override.pattern)]
            if not matching:
                raise UserError(f'no parameter matches {override.pattern!r}{nearest(override.pattern, variables)}')
            chosen |= dict.fromkeys(matching, Group(override.lr, override.weight_decay))
        return chosen

    def _group_of(self, path: str, variable: nnx.Variable) -> Group:
        group = variable.get_metadata().get('group')
        if group not in GROUPS:
            raise UserError(
                f'parameter {path} is of group {group!r}; it must be one of {", ".join(GROUPS)}: make it by '
                'attnlab.nn.parameter.param, or its map by attnlab.nn.projections.Linear'
            )
        return getattr(self.groups, group)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer):
    """Direction `m / (sqrt(v) + eps)` of the bias-corrected moments.

    Kingma and Ba 2015, https://arxiv.org/abs/1412.6980; Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101.

    Attributes:
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
    """

    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8

    below = MappingProxyType({'b1': 1.0, 'b2': 1.0})
    divisors = ('eps',)

    def direction(self, params: nnx.State) -> optax.GradientTransformation:
        return optax.scale_by_adam(self.b1, self.b2, self.eps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lion(Optimizer):
    """Direction `sign(b1 m + (1 - b1) g)`; use 1/10 to 1/3 of AdamW's learning rate, and 3 to 10 times its decay.

    Chen et al. 2023, https://arxiv.org/abs/2302.06675.

    Attributes:
      b1: weight of the momentum in the direction.
      b2: decay of the momentum.
    """

    b1: float = 0.9
    b2: float = 0.99

    below = MappingProxyType({'b1': 1.0, 'b2': 1.0})

    def direction(self, params: nnx.State) -> optax.GradientTransformation:
        return optax.scale_by_lion(self.b1, self.b2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Muon(Optimizer):
    """Orthogonalised momentum for hidden matrices, AdamW for every other parameter.

    A matrix moves along `0.2 sqrt(max(in, out)) U V^T`, with `U S V^T` its Nesterov momentum, by five Newton-Schulz
    iterations; the factor gives it the root mean square of AdamW's updates, so that both share one learning rate.
    Matrices are those of group `matrix`; layers stacked in one array are orthogonalised one by one.
    Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; Liu et al. 2025, https://arxiv.org/abs/2502.16982.

    Attributes:
      momentum: decay of the momentum of the matrices.
      b1: decay of AdamW's first moment.
      b2: decay of AdamW's second moment.
      eps: added to the root of AdamW's second moment.
    """

    momentum: float = 0.95
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8

    below = MappingProxyType({'b1': 1.0, 'b2': 1.0, 'momentum': 1.0})
    divisors = ('eps',)

    def direction(self, params: nnx.State) -> optax.GradientTransformation:
        kinds = {path: _is_matrix(variable) for path, variable in named_parameters(params).items()}
        labels = jax.tree.unflatten(jax.tree.structure(params), ['matrix' if k else 'other' for k in kinds.values()])
        muon = optax.chain(
            optax.contrib.scale_by_muon(beta=self.momentum, weight_dimension_numbers=_last_two),
            optax.stateless(lambda updates, _: jax.tree.map(_like_adamw, updates)),
        )
        return optax.partition({'matrix': muon, 'other': optax.scale_by_adam(self.b1, self.b2, self.eps)}, labels)


def trained(gradients: Any, multipliers: Mapping[str, Group]) -> Any:
    """The gradients, zero for parameters that are frozen, so that these are no part of their norm."""
    leaves, tree = jax.tree.flatten(gradients)
    groups = zip(leaves, multipliers.values(), strict=True)
    return jax.tree.unflatten(tree, [leaf if group.lr else jnp.zeros_like(leaf) for leaf, group in groups])


def named_parameters(params: nnx.State) -> dict[str, nnx.Variable]:
    """The parameters by path, such as `stack/blocks/0/mixer/query/weight`, in the order of the tree's leaves."""
    leaves, _ = jax.tree.flatten_with_path(params, is_leaf=lambda node: isinstance(node, nnx.Variable))
    return {jax.tree_util.keystr(path, simple=True, separator='/'): variable for path, variable in leaves}


def _stacked_dims(params: nnx.State) -> Any:
    """For every parameter, how many leading dimensions stack the same parameter of several layers."""
    dims = [variable.ndim - len(variable.get_metadata()['axes']) for variable in named_parameters(params).values()]
    return jax.tree.unflatten(jax.tree.structure(params), dims)


def _is_matrix(variable: nnx.Variable) -> bool:
    metadata = variable.get_metadata()
    return metadata['group'] == 'matrix' and len(metadata['axes']) >= 2


def _last_two(updates: Any) -> Any:
    """Muon's dimensions: a matrix maps its second-to-last dimension to its last; those before stack matrices."""
    return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(-2, -1), updates)


def _like_adamw(orthogonal: jax.Array) -> jax.Array:
    return 0.2 * math.sqrt(max(orthogonal.shape[-2:])) * orthogonal


def _descend(
    rate: optax.Schedule, weight_decay: Any, factors: list[Any], decays: list[float]
) -> optax.GradientTransformation:
    """Converts directions into updates, in one pass over the leaves, so that XLA fuses each with its direction.

    A factor of `None` freezes a parameter, whatever its direction: 0 times one that is not finite would be NaN.
    """

    def init(params: optax.Params) -> optax.ScaleByScheduleState:
        return optax.ScaleByScheduleState(count=jnp.zeros([], jnp.int32))

    def update(directions: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        lr = rate(state.count)
        leaves, tree = jax.tree.flatten(directions)
        moved = [
            jnp.zeros_like(param)
            if factor is None
            else _update(direction, param, lr * factor, weight_decay * decay if decay else None)
            for direction, param, factor, decay in zip(leaves, jax.tree.leaves(params), factors, decays, strict=True)
        ]
        return jax.tree.unflatten(tree, moved), optax.ScaleByScheduleState(optax.safe_increment(state.count))

    return optax.GradientTransformation(init, update)


def _update(direction: jax.Array, param: jax.Array, lr: jax.Array, decay: Any) -> jax.Array:
    towards = direction if decay is None else direction + decay * param
    return (-lr * towards).astype(param.dtype)
