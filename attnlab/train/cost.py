"""What a run costs, read off the things that will run: floating-point operations, bytes of state, implementations."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.extend as jex
import jax.numpy as jnp
from flax import nnx

from attnlab.blocks.block import mixer_of
from attnlab.context import Context
from attnlab.functional import cores
from attnlab.models.predictor import Stacked
from attnlab.train.setup import Setup
from pallas_kernels import dispatch


@dataclasses.dataclass(frozen=True)
class LayerCore:
    """Which implementation of a core a layer runs, and why those preferred to it were refused."""

    layers: tuple[int, ...]
    mixer: str
    core: str
    implementation: str
    refused: tuple[tuple[str, str], ...]

    def describe(self) -> dict[str, Any]:
        """As plain data, for run.json."""
        return dataclasses.asdict(self) | {'refused': dict(self.refused)}

    @classmethod
    def described(cls, entry: Mapping[str, Any]) -> 'LayerCore':
        """What `describe` returned, read back from run.json."""
        return cls(**{**entry, 'layers': tuple(entry['layers']), 'refused': tuple(entry['refused'].items())})


def flops_per_token(setup: Setup) -> float:
    """Floating-point operations of one training step, forward, backward and update, per token.

    They are those of XLA's cost analysis, of the step as one device would take it. It counts the body of a loop once,
    so for every `scan` the body is analysed too and counted for its remaining iterations.
    """
    # Under a mesh, a core is traced for the part of one device.
    traced = setup.alone().trace()
    total = _cost(traced.lower()) + sum(_repeats(traced.jaxpr))
    return total / (setup.batch_size * setup.length)


def state_bytes(setup: Setup, length: int) -> int:
    """Bytes that decoding one sequence of `length` tokens keeps, from the arrays of `init_state`."""
    graphdef, variables = nnx.split(setup.model)
    state = jax.eval_shape(lambda variables: nnx.merge(graphdef, variables).init_state(1, length), variables)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def implementations(setup: Setup) -> list[LayerCore]:
    """What the mixer at each place in the pattern of layers runs in training; nothing for a model without a stack."""
    if not isinstance(setup.model, Stacked):
        return []
    stack = setup.model.stack
    graphdef, variables = nnx.split(setup.model)
    x = jax.ShapeDtypeStruct((setup.batch_size, setup.length, setup.model.dim), setup.model.dtype)

    def mixed(place: int, variables: nnx.State, x: jax.Array) -> jax.Array:
        layers = list(nnx.merge(graphdef, variables).stack.layers())
        return mixer_of(layers[place])(x, _context(*x.shape[:2]))[0]

    found = []
    for place, block in enumerate(stack.blocks):
        with setup.precision.scope(), dispatch.ledger() as entries:
            jax.eval_shape(cores.on(setup.mesh, functools.partial(mixed, place)), variables, x)
        layers = tuple(range(place, stack.depth, len(stack.blocks)))
        found += [LayerCore(layers, type(mixer_of(block)).__name__, *entry) for entry in dict.fromkeys(entries)]
    return found


def _context(batch: int, length: int) -> Context:
    """A packed context: what training hands to every mixer."""
    ctx = Context.full(batch, length)
    return dataclasses.replace(ctx, segments=jnp.ones_like(ctx.positions))


def _repeats(jaxpr: Any) -> Iterator[float]:
    """The cost of each scan's body times its iterations after the first, nested scans included."""
    for equation in getattr(jaxpr, 'jaxpr', jaxpr).eqns:
        times = equation.params['length'] if equation.primitive.name == 'scan' else 1
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if not _is_jaxpr(inner):
                continue
            if times > 1:
                yield (times - 1) * _body_cost(inner)
            yield from (times * extra for extra in _repeats(inner))


def _body_cost(closed: Any) -> float:
    arguments = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.invars]
    return _cost(jax.jit(jex.core.jaxpr_as_fun(closed)).lower(*arguments))


def _cost(lowered: jax.stages.Lowered) -> float:
    analysis: Any = lowered.cost_analysis()
    return float(analysis['flops'])


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, jex.core.Jaxpr | jex.core.ClosedJaxpr)
