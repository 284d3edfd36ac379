"""Facts rewritten by a change of rank one to one linear map (ROME)."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from attnlab.analysis.interventions import hidden_with, last_map, values_at
from attnlab.blocks.block import Block
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.models.predictor import Stacked, one_stack
from attnlab.nn.projections import Linear, check_plain
from attnlab.typing import Tokens


@dataclasses.dataclass(frozen=True)
class Edit:
    """How a fact is rewritten.

    Attributes:
      layer: whose branch gives the fact.
      branch: `mlp`, or `mixer` where layers have no channel mixer.
      steps: of Adam, by which the value is found.
      rate: of Adam, in units of the size of the branch's output.
      decay: by which the squared change of the value is weighed, relative to that size.
      damping: added to the second moments of keys, as a share of their mean.
    """

    layer: int
    branch: str = 'mlp'
    steps: int = 60
    rate: float = 0.2
    decay: float = 0.01
    damping: float = 0.01

    def __post_init__(self) -> None:
        """Raises `UserError` for an unknown branch, and for numbers out of range."""
        if self.branch not in ('mixer', 'mlp'):
            raise UserError(f"branch of Edit is {self.branch!r}; it must be 'mixer' or 'mlp'")
        if self.steps < 1 or not self.rate > 0 or self.decay < 0 or not self.damping > 0:
            raise UserError(
                f'steps, rate, decay and damping of Edit are {self.steps}, {self.rate}, {self.decay} and '
                f'{self.damping}; they must be at least 1, above 0, at least 0 and above 0'
            )

    @property
    def place(self) -> str:
        """The branch, as places begin."""
        return f'layers[{self.layer}].{self.branch}'


def rank_one(
    weight: Float[np.ndarray, 'd f'],
    key: Float[np.ndarray, 'd'],
    value: Float[np.ndarray, 'f'],
    moments: Float[np.ndarray, 'd d'],
) -> Float[np.ndarray, 'd f']:
    """The weight that maps a key to a value and changes least what it makes of other keys.

        W' = W + C^-1 k (v - k W) / (k^T C^-1 k),   C = E[k k^T],

    of all with `k W' = v` the one with the least `E |k (W' - W)|^2`. Meng et al. 2022,
    https://arxiv.org/abs/2202.05262.
    """
    towards = np.linalg.solve(moments, key)
    return weight + np.outer(towards, value - key @ weight) / (key @ towards)


def keys_and_values(
    model: Stacked, tokens: Tokens, ctx: Context, how: Edit
) -> tuple[Float[Array, 'b t d'], Float[Array, 'b t f']]:
    """What the last map of the branch reads and gives, at every token."""
    names = [f'{how.place}.hidden', f'{how.place}.output']
    found = values_at(model, tokens, ctx, names)
    return found[names[0]], found[names[1]]


def moments_of(keys: Float[Array, 'n d'], damping: float) -> Float[np.ndarray, 'd d']:
    """The damped second moments of keys, in float64."""
    rows = np.asarray(keys, np.float64)
    found = rows.T @ rows / len(rows)
    return found + damping * max(np.trace(found) / len(found), 1e-30) * np.eye(len(found))


def wanted_value(
    model: Stacked, tokens: Int[Array, '1 t'], ctx: Context, how: Edit, *, at: int, asked: int, target: Int[Array, 'n']
) -> Float[Array, 'f']:
    """The value of the branch at token `at` with which the model answers `target` from token `asked` on.

    What is added to the value is found by Adam, on `-log p(target) + decay |added|^2 / |value|^2`; of several tokens,
    all of which but the last are read, their probabilities are multiplied.
    """
    name = f'{how.place}.output'
    value = values_at(model, tokens, ctx, [name])[name][0, at].astype(jnp.float32)
    size = jnp.maximum(jnp.linalg.norm(value), 1e-3)

    def loss(added: Float[Array, 'f']) -> Float[Array, '']:
        def change(x: Array) -> Array:
            return x.at[:, at].add((size * added).astype(x.dtype)[None])

        hidden = hidden_with(model, tokens, ctx, {name: change})
        return -log_probability(model, hidden, asked, target) + how.decay * jnp.sum(added**2)

    rule = optax.adam(how.rate / value.size**0.5)

    def step(carry: tuple[Array, Any], _: None) -> tuple[tuple[Array, Any], None]:
        added, moments = carry
        update, moments = rule.update(jax.grad(loss)(added), moments)
        return (added + update, moments), None

    zeros = jnp.zeros_like(value)
    (added, _), _ = jax.lax.scan(step, (zeros, rule.init(zeros)), None, length=how.steps)
    return value + size * added


def log_probability(
    model: Stacked, hidden: Float[Array, '1 t d'], asked: int, target: Int[Array, 'n']
) -> Float[Array, '']:
    """The logarithm of the probability of an answer, whose tokens but the last stand behind token `asked`."""
    last = jax.lax.dynamic_slice_in_dim(hidden, asked, target.shape[0], axis=1)
    log = jax.nn.log_softmax(model.logits(last))[0]
    return jnp.sum(jnp.take_along_axis(log, target[:, None], axis=-1))


class Editor:
    """Rewrites facts of a model in one place; compiles once for prompts of one length.

    Args:
      model: of one stack; it is not changed.
      how: where, and by which steps.
      at: the token whose key is given the value, such as the last of the subject.
      asked: the token at which the answer is predicted, or the first of it.
      jit: compiles.

    Raises `UserError` for a layer or a branch without one last linear map, or with one of few bits, for layers that
    share parameters, and where no mixer after it could bring the value from `at` to `asked`.
    """

    def __init__(self, model: Any, how: Edit, *, at: int, asked: int, jit: Callable[..., Any] = jax.jit):
        stack = one_stack(model)
        stack.check_own()
        depth = stack.depth
        if not 0 <= how.layer < depth:
            raise UserError(f'--layer is {how.layer}; the model has layers 0 to {depth - 1}')
        if at > asked:
            raise UserError(f'at is {at} and asked {asked}: what is changed must not come after what is asked')
        if how.layer == depth - 1 and at != asked:
            raise UserError(
                f'--layer is {how.layer}, the last: what it gives token {at} is not read by token {asked}; '
                'choose an earlier one'
            )
        self.model, self.how, self.at = model, how, at
        if (linear := _place(model, how)) is None:
            raise UserError(f'{how.place} has no one linear map from which its output comes')
        check_plain(linear)
        graphdef, self._variables = nnx.split(model)

        def found(variables: nnx.State, tokens: Tokens, target: Int[Array, 'n']) -> tuple[Array, Array]:
            model, ctx = nnx.merge(graphdef, variables), Context.full(*tokens.shape)
            keys, _ = keys_and_values(model, tokens, ctx, how)
            return keys[0, at], wanted_value(model, tokens, ctx, how, at=at, asked=asked, target=target)

        def keys(variables: nnx.State, tokens: Tokens, ctx: Context) -> Array:
            return keys_and_values(nnx.merge(graphdef, variables), tokens, ctx, how)[0]

        self._found, self._keys = jit(found), jit(keys)

    def moments(self, prompts: Tokens, ctx: Context | None = None) -> Float[np.ndarray, 'd d']:
        """The damped second moments of keys of prompts, or of rows of training in their context, without padding."""
        ctx = Context.full(*prompts.shape) if ctx is None else ctx
        keys = self._keys(self._variables, prompts, ctx)
        return moments_of(keys[ctx.segments_or_ones() > 0], self.how.damping)

    def __call__(
        self, tokens: Int[Array, '1 t'], target: int | Sequence[int], moments: Float[np.ndarray, 'd d']
    ) -> Any:
        """A copy of the model in which the prompt is answered by `target`; moments are those of other keys."""
        answer = jnp.atleast_1d(jnp.asarray(target, jnp.int32))
        key, value = (np.asarray(each, np.float64) for each in self._found(self._variables, tokens, answer))
        made = nnx.clone(self.model)
        linear = _place(made, self.how)
        assert linear is not None
        _, repeat = made.stack.place(self.how.layer)
        weight = linear.weight[...]
        bias = 0 if linear.bias is None else np.asarray(linear.bias[...][repeat], np.float64)
        changed = rank_one(np.asarray(weight[repeat], np.float64), key, value - bias, moments)
        linear.weight[...] = weight.at[repeat].set(jnp.asarray(changed, weight.dtype))
        return made


def _place(model: Any, how: Edit) -> Linear | None:
    """The map that an edit changes, stacked over the repeats of its block."""
    place, _ = model.stack.place(how.layer)
    block = model.stack.blocks[place]
    read = last_map(getattr(block, how.branch, None)) if isinstance(block, Block) else None
    return None if read is None else read.map
