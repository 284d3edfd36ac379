"""The cost of a run, computed from shapes: floating-point operations, bytes of state, implementations."""

import dataclasses
import functools
import itertools
import math
import operator
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.extend as jex
import jax.numpy as jnp
from flax import nnx
from jax.interpreters import partial_eval

from attnlab.blocks.block import mixer_of
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional import cores
from attnlab.models.predictor import Stacked
from attnlab.tasks.given import documents_of
from attnlab.tasks.task import Batch
from attnlab.train.setup import Setup
from attnlab.train.state import joined
from pallas_kernels import counting, dispatch, target, tuning


@dataclasses.dataclass(frozen=True)
class LayerCore:
    """The implementation of a core that a layer runs, and why those preferred to it were rejected.

    `tiles` is 'table' where the table of the device chose them, see `pallas_kernels.tuning`, otherwise 'heuristic'.
    """

    layers: tuple[int, ...]
    mixer: str
    core: str
    implementation: str
    refused: tuple[tuple[str, str], ...]
    tiles: str = tuning.HEURISTIC

    def describe(self) -> dict[str, Any]:
        """As plain data, for run.json."""
        return dataclasses.asdict(self) | {'refused': dict(self.refused)}

    @classmethod
    def described(cls, entry: Mapping[str, Any], path: pathlib.Path) -> 'LayerCore':
        """Reads the output of `describe` back from the file `path`. Raises `UserError` for what it never wrote."""
        damaged = UserError(f'{path} is damaged: it says {entry!r} of a core; put back a copy of it')
        try:
            layers, refused = tuple(map(operator.index, entry['layers'])), tuple(entry['refused'].items())
            found = cls(**{**entry, 'layers': layers, 'refused': refused})
        except (AttributeError, KeyError, TypeError) as error:
            raise damaged from error
        texts = (found.mixer, found.core, found.implementation, found.tiles, *itertools.chain(*refused))
        if not all(isinstance(text, str) for text in texts):
            raise damaged
        return found


def parameters(setup: Setup) -> int:
    """Numbers that are trained."""
    return sum(leaf.size for leaf in jax.tree.leaves(setup.abstract.params))


def flops_per_token(setup: Setup) -> float:
    """Model FLOPs of a training step, per token: those that the definition of the model needs, forward and backward.

    Matrix products, convolutions and Fourier transforms are counted by their shapes, and cores as in
    `pallas_kernels.cost`: causal attention counts visible pairs, ignoring documents. So does attention in plain JAX to
    whole rows and to chosen blocks, and experts count the rows sent to them (`attnlab.functional.needed`); where a
    mixer's equations need less than the call of a core computes, that is counted. Other mixers in plain JAX count the
    products that they compute, with what is masked. Of convolutions products with the zeros around an array are
    counted, and those with the zeros that the gradient of a stride puts into it are not. Elementwise operations outside
    of cores, recomputation, and the optimiser are not counted. The count does not depend on the device or the
    implementation.
    """
    params, others, loss = _loss(setup)
    with setup.precision.scope(), counting.counting():
        forward = jax.make_jaxpr(loss)(params, *others)
        leaves = jax.tree.leaves((params, *others))
        count = len(jax.tree.leaves(params))
        kept = jex.core.jaxpr_as_fun(_keeping(forward))

        def gradient(leaves: list[jax.Array], rest: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
            return jax.value_and_grad(lambda leaves: kept(*leaves, *rest)[0])(leaves)

        backward = jax.make_jaxpr(gradient)(leaves[:count], leaves[count:])
    return _flops(_needed(backward), 'model') / (setup.batch_size * setup.length)


def forward_flops_per_token(setup: Setup) -> float:
    """Model FLOPs of the training objective without its gradient, per token, counted as in `flops_per_token`."""
    params, others, loss = _loss(setup)
    with setup.precision.scope(), counting.counting():
        forward = jax.make_jaxpr(loss)(params, *others)
    return _flops(_needed(forward), 'model') / (setup.batch_size * setup.length)


def executed_flops_per_token(setup: Setup) -> float:
    """FLOPs of a training step as executed, per token, with recomputation, chunking and the optimiser.

    Cores count as the implementation that runs, and experts, but for TPUs, by the room that blocks of their rows have
    (`attnlab.functional.by_group`); everything else as in `flops_per_token`.
    """
    params, others, loss = _loss(setup)
    with setup.precision.scope(), counting.counting():
        step = jax.make_jaxpr(jax.value_and_grad(loss))(params, *others)
        update = jax.make_jaxpr(setup.transform.update)(params, _shapes(setup.abstract.opt_state), params)
    # Moving an average takes a difference, a product and a sum for every parameter in it.
    average = 3 * sum(leaf.size for leaf in jax.tree.leaves(setup.abstract.average))
    operations = _flops(_needed(step), 'executed') + _flops(update.jaxpr, 'executed') + average
    return operations / (setup.batch_size * setup.length)


def _loss(setup: Setup) -> tuple[Any, tuple[Any, Any], Callable[..., jax.Array]]:
    """The shapes of the parameters, of the buffers and of a batch, and the loss as a function of them."""

    def loss(params: nnx.State, buffers: nnx.State, batch: Batch) -> jax.Array:
        model = nnx.merge(setup.graphdef, joined(params, buffers))
        return setup.task.measure(model, batch, jax.random.key(0))['loss'].total

    state = setup.abstract
    return _shapes(state.params), (_shapes(state.buffers), _shapes(setup.abstract_batch())), loss


def _shapes(tree: Any) -> Any:
    """Shapes and types without shardings."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def state_bytes(setup: Setup, length: int) -> int:
    """Bytes of decoding state of one sequence of `length` tokens, from the arrays of `init_state`."""
    graphdef, variables = nnx.split(setup.model)
    state = jax.eval_shape(lambda variables: nnx.merge(graphdef, variables).init_state(1, length), variables)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def weight_bytes(setup: Setup) -> int:
    """Bytes of parameters and buffers, as they are held and saved."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(setup.abstract.variables))


def implementations(setup: Setup) -> list[LayerCore]:
    """The implementations that each mixer of the layer pattern runs in training; empty for a model without a stack."""
    if not isinstance(setup.model, Stacked):
        return []
    graphdef, variables = nnx.split(setup.model)

    def mixed(index: int, place: int, variables: nnx.State) -> jax.Array:
        stack, ctx = nnx.merge(graphdef, variables).stack.stacks(_context(setup))[index]
        x = jnp.zeros((*ctx.positions.shape, stack.dim), setup.model.dtype)
        return mixer_of(list(stack.layers())[place])(x, ctx)[0]

    found, before = [], 0
    for index, stack in enumerate(setup.model.stack.parts):
        for place, (block, own) in enumerate(stack.pattern()):
            with setup.precision.scope(), dispatch.ledger() as entries:
                jax.eval_shape(cores.on(setup.mesh, functools.partial(mixed, index, place)), variables)
            layers = tuple(before + layer for layer in own)
            mixer = type(mixer_of(block)).__name__
            served = dict.fromkeys((entry.core, entry.implementation, entry.refused, entry.tiles) for entry in entries)
            found += [LayerCore(layers, mixer, *entry) for entry in served]
        before += stack.depth
    return found


def _context(setup: Setup) -> Context:
    """The context of the mixers in training: with segments where the task packs documents, a row each of pairs."""
    count = documents_of(setup.task)
    ctx = Context.full(setup.batch_size * count, setup.length // count)
    return setup.model.layout(
        dataclasses.replace(ctx, segments=jnp.ones_like(ctx.positions)) if setup.task.packs else ctx
    )


def _keeping(closed: jex.core.ClosedJaxpr) -> jex.core.ClosedJaxpr:
    """The program without recomputation in the backward pass."""

    def keep(value: Any) -> Any:
        if _is_jaxpr(value):
            # The newest versions of JAX have one class for programs with constants and without.
            if getattr(value, 'jaxpr', value) is not value:
                return value.replace(jaxpr=keep(value.jaxpr))
            return value.replace(eqns=[_kept(equation) for equation in value.eqns])
        if isinstance(value, tuple):
            return tuple(keep(part) for part in value) if any(map(_is_jaxpr, value)) else value
        return value

    def _kept(equation: Any) -> Any:
        params = {name: keep(value) for name, value in equation.params.items()}
        if equation.primitive.name in REMATERIALISED:
            # A policy that keeps everything will not do: JAX cannot round kept complex numbers.
            inside = jex.core.ClosedJaxpr(params['jaxpr'], ())
            return equation.replace(primitive=jex.core.primitives.closed_call_p, params={'call_jaxpr': inside})
        return equation.replace(params=params)

    return keep(closed)


REMATERIALISED = ('checkpoint', 'remat', 'remat2')
"""The names of `jax.checkpoint` in programs."""


def _needed(closed: jex.core.ClosedJaxpr) -> Any:
    """The equations of a program that its results depend on."""
    return partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))[0]


def _flops(jaxpr: Any, kind: str) -> float:
    """The operations of a program: `kind` is 'model' or 'executed'."""
    return float(sum(_of_equation(equation, kind) for equation in jaxpr.eqns))


def _of_equation(equation: Any, kind: str) -> float:
    """FLOPs of one operation; a loop counts its body once per iteration, a branch counts its most expensive case.

    Raises:
      AssertionError: for a kernel that does not belong to a core, whose cost is unknown.
    """
    inner = [_flops(getattr(jaxpr, 'jaxpr', jaxpr), kind) for jaxpr in _programs(equation)]
    match equation.primitive.name:
        case 'core_call':
            return float(equation.params[kind].flops)
        case 'dot_general':
            (contracted, _), _ = equation.params['dimension_numbers']
            left, result = equation.invars[0].aval, equation.outvars[0].aval
            return 2.0 * result.size * math.prod(left.shape[axis] for axis in contracted)
        case 'ragged_dot' | 'ragged_dot_general':
            (left, right, sizes), result = (each.aval for each in equation.invars[:3]), equation.outvars[0].aval
            # Every row of the left factor is multiplied by one group of the right one; XLA takes all but for TPUs.
            groups = sizes.size if kind == 'executed' and target.current().platform != 'tpu' else 1
            rows = result.size * left.shape[-1] if result.ndim == 2 else left.size * right.shape[-1]
            return 2.0 * groups * rows
        case 'conv_general_dilated':
            kernel, result = equation.invars[1].aval, equation.outvars[0].aval
            taps = kernel.size / kernel.shape[equation.params['dimension_numbers'].rhs_spec[0]]
            # Of what a stride put zeros into, as its gradient does, a tap in so many meets a number.
            return 2.0 * result.size * taps / math.prod(equation.params['lhs_dilation'])
        case 'fft':
            length = math.prod(equation.params['fft_lengths'])
            numbers = max(equation.invars[0].aval.size, equation.outvars[0].aval.size)
            return 5.0 * numbers * math.log2(max(length, 2))
        case 'triangular_solve':
            return float(equation.outvars[0].aval.size * equation.invars[0].aval.shape[-1])
        case 'scan':
            return equation.params['length'] * sum(inner)
        case 'cond':
            return max(inner)
        case 'pallas_call' | 'mpmd_map' | 'core_map':
            raise AssertionError(f'a kernel that belongs to no core: {equation.params.get("name")}')
    return float(sum(inner))


def _programs(equation: Any) -> list[Any]:
    return [value for value in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr) if _is_jaxpr(value)]


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, jex.core.Jaxpr | jex.core.ClosedJaxpr)
