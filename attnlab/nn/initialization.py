"""The distributions that the linear maps of a model start from, where a paper chooses others than attnlab's.

attnlab draws them with fan-in variance, `N(0, 1 / n)` for `n` inputs, and the output maps of all residual branches too.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from attnlab.errors import UserError
from attnlab.nn.experts import MixtureOfExperts
from attnlab.nn.parameter import Initializer
from attnlab.nn.projections import Linear
from attnlab.signature import checked_fields


@checked_fields
@dataclasses.dataclass(frozen=True)
class Scaled:
    """Zero mean and a variance of `gain / n`, `n` the number of inputs, or the mean of inputs and outputs (`fan_avg`).

    PyTorch's linear maps are uniform with a gain of 1/3; Xavier's of gain `g` have `fan_avg` and `g^2`.
    Raises `UserError` for an unknown mode or distribution.
    """

    gain: float = 1.0
    mode: Literal['fan_in', 'fan_avg'] = 'fan_in'
    distribution: Literal['normal', 'uniform'] = 'normal'

    def initializer(self) -> Initializer:
        """The initializer of weights `... n m`, whose leading dimensions are copies."""

        def draw(key: jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
            copies = tuple(range(len(shape) - 2))
            make = nnx.initializers.variance_scaling(self.gain, self.mode, self.distribution, batch_axis=copies)
            return make(key, shape, dtype)

        return draw


@checked_fields
@dataclasses.dataclass(frozen=True)
class Gaussian:
    """Zero mean and a standard deviation of `deviation`, whatever the width."""

    deviation: float = 0.02

    def initializer(self) -> Initializer:
        """The initializer of weights `... n m`."""
        return nnx.initializers.normal(self.deviation)


def logit(name: str, start: float) -> Initializer:
    """The biases at which a logistic function is `start`. Raises `UserError` unless that is above 0 and below 1."""
    if not 0 < start < 1:
        raise UserError(f'{name} is {start}; it must be above 0 and below 1')
    return nnx.initializers.constant(math.log(start) - math.log1p(-start))


@checked_fields
@dataclasses.dataclass(frozen=True)
class Orthogonal:
    """Inputs or outputs, whichever are fewer, orthogonal to each other and of length `gain`.

    Saxe, McClelland and Ganguli 2014, https://arxiv.org/abs/1312.6120.
    """

    gain: float = 1.0

    def initializer(self) -> Initializer:
        """The initializer of weights `... n m`, whose leading dimensions are copies with draws of their own."""

        def draw(key: jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
            make = nnx.initializers.orthogonal(self.gain)
            keys = jax.random.split(key, math.prod(shape[:-2]))
            return jax.vmap(lambda key: make(key, shape[-2:], dtype))(keys).reshape(shape)

        return draw


@checked_fields
@dataclasses.dataclass(frozen=True)
class Initialization:
    """What the linear maps of a stack start from; `None`: as attnlab draws them.

    Maps whose part chooses their distribution itself, such as that of Mamba's step sizes, keep it.

    Attributes:
      linear: of the maps in general.
      output: of the last map of every residual branch; `None`: as `linear`.
      residual: the factor `residual / branches` of the variance of those last maps, `branches` the number of residual
        branches in the stack, so that their sum does not grow with depth. GPT-2 and Mamba have 1, Griffin, whose
        factor is 2 over the number of layers of two branches, 4. Radford et al. 2019; Gu and Dao 2023,
        https://arxiv.org/abs/2312.00752; De et al. 2024, https://arxiv.org/abs/2402.19427.
      mlp: what the maps of channel mixers start from; `None`: the same as all others.

    Raises `UserError` for a residual that is not above 0, and for an `mlp` that has one of its own.
    """

    linear: Scaled | Gaussian | Orthogonal | None = None
    output: Scaled | Gaussian | Orthogonal | None = None
    residual: float | None = None
    mlp: 'Initialization | None' = None

    def __post_init__(self) -> None:
        if self.residual is not None and not self.residual > 0:
            raise UserError(f'residual of Initialization is {self.residual}; it must be above 0')
        if self.mlp is not None and self.mlp.mlp is not None:
            raise UserError(
                'mlp of Initialization has an mlp itself; it is that of channel mixers, so leave it out there'
            )

    def apply(self, blocks: nnx.Module, branches: int, key: jax.Array) -> None:
        """Draws the linear maps of `blocks` anew and scales the last of each branch.

        Raises `UserError` for a residual where no block says what its branches are.
        """
        if not branches and any(each is not None and each.residual is not None for each in (self, self.mlp)):
            raise UserError('residual of Initialization is for blocks of branches; these wire their own')
        for index, (path, weight, usual) in enumerate((*_linear_maps(blocks), *_experts(blocks))):
            start = self if self.mlp is None or 'mlp' not in path else self.mlp
            weight[...] = start._drawn(weight, branches, jax.random.fold_in(key, index), usual=usual)

    def _drawn(self, variable: nnx.Param, branches: int, key: jax.Array, *, usual: bool) -> jax.Array:
        last = variable.get_metadata()['axes'][-1] == 'embed'
        drawn = (self.output or self.linear) if last else self.linear
        weight = variable[...]
        if drawn is not None and usual:
            weight = drawn.initializer()(key, weight.shape, weight.dtype)
        if last and self.residual is not None:
            weight = weight * jnp.sqrt(self.residual / branches).astype(weight.dtype)
        return weight


Weights = Iterator[tuple[tuple[Any, ...], nnx.Param, bool]]
"""Maps with the paths of their modules, and whether they have no distribution of their own."""


def _linear_maps(blocks: nnx.Module) -> Weights:
    """The linear maps, each once, in the order of their paths; blocks call their channel mixers `mlp`."""
    for path, module in nnx.iter_modules(blocks):
        if isinstance(module, Linear):
            yield path, module.weight, module.usual


def _experts(blocks: nnx.Module) -> Weights:
    """The maps of mixtures of experts but their routers, likewise."""
    for path, module in nnx.iter_modules(blocks):
        if isinstance(module, MixtureOfExperts):
            yield from ((path, weight, True) for weight in (module.gates, module.up, module.down))
