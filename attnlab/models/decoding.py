"""Ways to continue a text besides drawing one freely: many prompts, beams, contrastive, with a draft, constrained.

Every function reads a prompt once and keeps the states of the mixers. Continuations that go on side by side are a
leading axis (`jax.vmap`). Scalars of a state count tokens: where all streams have read equally many, one number
serves all, so that what a mixer does once in many tokens is done then, and not at every token for some of the streams.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional.constrained import Choice, Drawn, NothingAllowed
from attnlab.functional.sampling import UNRESTRICTED, Sampling
from attnlab.models.predictor import Predictor
from attnlab.nn.experts import MixtureOfExperts
from attnlab.nn.projections import Linear
from attnlab.typing import State


class Reader:
    """A model that reads tokens onto states, one stream at a time or several.

    Raises `UserError` for a model that cannot generate.
    """

    def __init__(self, model: Predictor, jit: Callable[..., Any]):
        if not model.decodes:
            raise UserError('this model does not read tokens one by one, so it cannot generate')
        self._model = model
        self._graphdef, self._variables = nnx.split(model)
        self._read = jit(functools.partial(_read, self._graphdef))
        self._step = jit(functools.partial(_step, self._graphdef))

    def start(self, capacity: int) -> State:
        """The state of one stream before its first token."""
        return self._model.init_state(1, capacity)

    def read(self, tokens: Sequence[int] | np.ndarray, state: State, position: int) -> tuple[Array, Array, State]:
        """Reads tokens of one stream from a position: hidden states `t d`, logits `t o`, and the state after them."""
        return self._read(self._variables, jnp.asarray(tokens, jnp.int32), state, jnp.int32(position))

    def step(self, tokens: Array, states: State, positions: Array) -> tuple[Array, Array, State]:
        """Reads a token of every stream: hidden states `n d`, logits `n o`, and the states.

        States are those of `_side_by_side`; positions are `n`, or one for all streams where these have one count.
        """
        hidden, logits, states = self._step(self._variables, tokens[:, None], states, positions)
        return hidden[:, 0], logits[:, 0], states


def _read(
    graphdef: nnx.GraphDef, variables: nnx.State, tokens: Int[Array, 't'], state: State, position: Array
) -> tuple[Float[Array, 't d'], Float[Array, 't o'], State]:
    model = nnx.merge(graphdef, variables)
    hidden, state = model.hidden(tokens[None], Context.full(1, tokens.shape[0], start=position), state)
    return hidden[0], model.logits(hidden[0]), state


def _step(
    graphdef: nnx.GraphDef, variables: nnx.State, tokens: Int[Array, 'n t'], states: State, positions: Array
) -> tuple[Float[Array, 'n t d'], Float[Array, 'n t o'], State]:
    """Reads tokens of several streams; what has no axis is one for all of them, before and after."""
    axes = jax.tree.map(lambda leaf: 0 if leaf.ndim else None, (states, positions))
    read = jax.vmap(functools.partial(_read, graphdef), in_axes=(None, 0, *axes), out_axes=(0, 0, axes[0]))
    return read(variables, tokens, states, positions)


def _side_by_side(states: Sequence[State], *, together: bool) -> State:
    """The states of several streams as one, each with an axis of streams before its own.

    Without it is what had no axis, where the streams have read equally many tokens, which is `together`.
    """
    return jax.tree.map(lambda *each: each[0] if together and not each[0].ndim else jnp.stack(each), *states)


def _of_streams(states: State, streams: int | Int[Array, 'n']) -> State:
    """The states of one stream, or of some, of those side by side."""
    return jax.tree.map(lambda leaf: leaf[streams] if leaf.ndim else leaf, states)


def generate_many(
    model: Predictor,
    prompts: Sequence[np.ndarray],
    steps: int,
    sampling: Sampling = UNRESTRICTED,
    *,
    seed: int = 0,
    jit: Callable[..., Any] = jax.jit,
) -> Int[np.ndarray, 'n t']:
    """Continues several prompts by `steps` tokens each, side by side.

    The draws of a prompt depend on the seed and its place among the prompts. Prompts of several lengths do not begin
    blocks of Hyena together, which then makes its filter for all slots at every token. Raises `UserError` for a model
    that cannot generate.
    """
    reader = Reader(model, jit)
    lengths = list(map(len, prompts))
    capacity = max(lengths) + steps
    read = [reader.read(prompt, reader.start(capacity), 0) for prompt in prompts]
    logits = jnp.stack([each[1][-1] for each in read])
    together = len(set(lengths)) == 1
    states = _side_by_side([each[2] for each in read], together=together)
    positions = jnp.asarray(lengths[0] if together else lengths, jnp.int32)
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(seed), jnp.arange(len(prompts)))
    draw = jit(jax.vmap(lambda row, key: sampling.draw(row[None], key)[0]))
    drawn: list[Array] = []
    for index in range(steps):
        if index:
            _, logits, states = reader.step(drawn[-1], states, positions)
            positions = positions + 1
        drawn.append(draw(logits, jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, index)))
    return np.stack([np.asarray(each) for each in drawn], axis=1)


def beam_search(
    model: Predictor, prompt: np.ndarray, steps: int, width: int, *, jit: Callable[..., Any] = jax.jit
) -> tuple[Int[np.ndarray, 't'], float]:
    """The likeliest continuation of `steps` tokens that a beam finds, and its log-probability in nats.

    Of all continuations of the `width` likeliest so far the `width` likeliest go on. One is greedy decoding. Raises
    `UserError` for a model that cannot generate.
    """
    reader = Reader(model, jit)
    _, logits, state = reader.read(prompt, reader.start(len(prompt) + steps), 0)
    states = _side_by_side([state] * width, together=True)
    # All beams are the same one at first, of which one counts.
    totals = jnp.where(jnp.arange(width) == 0, 0.0, -jnp.inf)
    logits = jnp.broadcast_to(logits[-1], (width, logits.shape[-1]))
    found = np.zeros((width, 0), np.int32)
    for index in range(steps):
        if index:
            position = jnp.int32(len(prompt) + index - 1)
            _, logits, states = reader.step(jnp.asarray(found[:, -1]), states, position)
        totals, places = jax.lax.top_k((totals[:, None] + jax.nn.log_softmax(logits, axis=-1)).reshape(-1), width)
        parents, tokens = jnp.divmod(places, logits.shape[-1])
        states = _of_streams(states, parents)
        found = np.concatenate([found[np.asarray(parents)], np.asarray(tokens, np.int32)[:, None]], axis=1)
    return found[0], float(totals[0])


def contrastive_search(
    model: Predictor,
    prompt: np.ndarray,
    steps: int,
    *,
    candidates: int = 4,
    penalty: float = 0.6,
    jit: Callable[..., Any] = jax.jit,
) -> Iterator[int]:
    """Yields `steps` tokens, each of the likeliest candidates the one whose hidden state repeats the least.

        argmax_v (1 - penalty) p(v) - penalty max_j cos(h_v, h_j),  j over all tokens before

    A penalty of 0 is greedy decoding. Su et al. 2022, https://arxiv.org/abs/2202.06417. Raises `UserError` for a model
    that cannot generate, and a penalty outside of [0, 1].
    """
    if not 0 <= penalty <= 1:
        raise UserError(f'penalty is {penalty}; it must be from 0 to 1')
    reader = Reader(model, jit)
    hidden, logits, state = reader.read(prompt, reader.start(len(prompt) + steps), 0)
    before, logits = _directions(hidden), logits[-1]
    for index in range(steps):
        count = min(candidates, len(logits))
        weights, tokens = jax.lax.top_k(jax.nn.softmax(logits), count)
        states, position = _side_by_side([state] * count, together=True), jnp.int32(len(prompt) + index)
        hidden, following, states = reader.step(tokens.astype(jnp.int32), states, position)
        directions = _directions(hidden)
        alike = np.max(directions @ before.T, axis=1)
        chosen = int(np.argmax((1 - penalty) * np.asarray(weights) - penalty * alike))
        before = np.concatenate([before, directions[chosen : chosen + 1]])
        state, logits = _of_streams(states, chosen), following[chosen]
        yield int(tokens[chosen])


def _directions(hidden: Array) -> Float[np.ndarray, 't d']:
    found = np.asarray(hidden, np.float32)
    return found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)


def speculate(
    model: Predictor,
    draft: Predictor,
    prompt: np.ndarray,
    steps: int,
    sampling: Sampling = UNRESTRICTED,
    *,
    ahead: int = 4,
    seed: int = 0,
    jit: Callable[..., Any] = jax.jit,
) -> Iterator[list[int]]:
    """Yields `steps` tokens in pieces, drawn as `model` alone would draw them, most of them proposed by a `draft`.

    The draft draws `ahead` tokens; the model reads them at once, and takes those before the first that it rejects, and
    one of its own (`accepted`). Of a piece of n tokens n - 1 are the draft's. Leviathan et al. 2023,
    https://arxiv.org/abs/2211.17192. Raises `UserError` for models that cannot generate, or of other vocabularies, and
    for a model that would not draw these tokens as it does one by one: with experts that lack room for all tokens of a
    piece, or linear maps that round the inputs of all of them by one scale.
    """
    _check_apart(model)
    target, small = Reader(model, jit), Reader(draft, jit)
    capacity = len(prompt) + steps + ahead + 1
    states = [reader.start(capacity) for reader in (target, small)]
    if len(prompt) > 1:
        states = [reader.read(prompt[:-1], state, 0)[2] for reader, state in zip((target, small), states, strict=True)]
    state, drafted_state = states
    last, position, left = int(prompt[-1]), len(prompt) - 1, steps
    weigh = jit(lambda logits: jax.nn.softmax(sampling.restricted(logits), axis=-1))
    decide, draw = jit(accepted), jit(lambda weights, key: jax.random.categorical(key, jnp.log(weights)))
    key = jax.random.key(seed)
    while left:
        key, choice, *keys = jax.random.split(key, 2 + ahead)
        tokens, weights, kept = [last], [], [drafted_state]
        for each in keys:
            _, logits, after = small.read(tokens[-1:], kept[-1], position + len(tokens) - 1)
            kept.append(after)
            weights.append(weigh(logits)[0])
            tokens.append(int(draw(weights[-1], each)))
        _, logits, after = target.read(tokens, state, position)
        if logits.shape[-1] != weights[0].shape[-1]:
            raise UserError(f'the draft has {weights[0].shape[-1]} tokens, the model {logits.shape[-1]}')
        count, following = decide(weigh(logits), jnp.stack(weights), jnp.asarray(tokens[1:], jnp.int32), choice)
        taken = tokens[: int(count) + 1]
        if len(taken) == len(tokens):
            state = after
            drafted_state = small.read(tokens[-1:], kept[-1], position + ahead)[2]
        else:
            # A state cannot be taken back: what was accepted is read again from the one before.
            state, drafted_state = target.read(taken, state, position)[2], kept[len(taken)]
        position, last = position + len(taken), int(following)
        piece = [*taken[1:], last][:left]
        left -= len(piece)
        yield piece


def _check_apart(model: Predictor) -> None:
    """Raises `UserError` where what a model makes of a token depends on those after it that are read with it."""
    for path, part in nnx.iter_graph(model):
        if isinstance(part, MixtureOfExperts) and part.limited:
            raise UserError(
                f'experts of this model have a capacity, {part.capacity:g}, which tokens that a draft proposes would '
                'share; generate token by token, without a draft'
            )
        if isinstance(part, Linear) and not part.rows_apart:
            raise UserError(
                f'inputs of the linear map {".".join(map(str, path))} are rounded by a scale that tokens that a draft '
                'proposes would share; generate token by token, without a draft, or round inputs by a scale a token, '
                'such as affine8'
            )


def accepted(
    target: Float[Array, 'm o'], draft: Float[Array, 'a o'], tokens: Int[Array, 'a'], key: Array
) -> tuple[Int[Array, ''], Int[Array, '']]:
    """How many drafted tokens are taken, and the token after them, so that all are distributed as the target says.

    Token `i` is taken with probability `min(1, p_i / q_i)`; the first that is not is replaced by a draw from
    `max(p - q, 0)`, and after the last comes a draw from the target's own last row.

    Args:
      target: probabilities after the last token and after each that was drafted; `m = a + 1`.
      draft: probabilities that the tokens were drawn from.
      tokens: the drafted tokens.
      key: of the draws.
    """
    ahead = len(tokens)
    first, second = jax.random.split(key)
    places = jnp.arange(ahead)
    uniform = jax.random.uniform(first, (ahead,))
    taken: Bool[Array, ' a'] = uniform * draft[places, tokens] < target[places, tokens]
    count = jnp.sum(jnp.cumprod(taken.astype(jnp.int32)))
    rest = jnp.maximum(target[:ahead] - draft, 0)
    # Where both agree nothing is rejected but by rounding.
    rest = jnp.where(jnp.sum(rest, axis=-1, keepdims=True) > 0, rest, target[:ahead])
    weights = jnp.concatenate([rest, target[ahead:]])[count]
    return count, jax.random.categorical(second, jnp.log(weights))


@runtime_checkable
class Constraint(Protocol):
    """Which texts may be written: places, between which tokens move.

    Attributes:
      counts: what `rest` counts: `tokens`, or `bytes`, of which every token has at least one.
    """

    counts: Literal['tokens', 'bytes']

    @property
    def start(self) -> int:
        """The place before the first token."""

    def after(self, place: int, tokens: Int[np.ndarray, 'n']) -> Int[np.ndarray, 'n']:
        """The places that tokens lead to."""

    def rest(self, places: Int[np.ndarray, 'n']) -> Int[np.ndarray, 'n']:
        """The fewest further tokens, or bytes, with which a text can be ended; more than any has where it cannot."""

    def ends(self, place: int) -> bool:
        """Whether a text cannot go on."""


def constrained(
    model: Predictor,
    prompt: np.ndarray,
    steps: int,
    constraint: Constraint,
    choice: Choice,
    *,
    seed: int = 0,
    jit: Callable[..., Any] = jax.jit,
) -> Iterator[Drawn]:
    """Yields the tokens of a text that keeps to a constraint, until it cannot go on within `steps` of them.

    A token is allowed where the text can still be ended with the tokens that are left. Each is drawn from the model's
    distribution given that it is allowed, so that a text is not drawn as if all of the model's texts that keep to the
    constraint had been kept: for that, texts are weighted by the product of the weights of their tokens,

        E[w f(text)] = sum_(texts that keep to it) p(text) f(text),  E[w] = P(the model's own text keeps to it).

    Where the constraint counts bytes, the texts are those that after every token could still be ended with tokens of
    one byte.

    Raises `UserError` for a model that cannot generate, and where no text of so few tokens keeps to the constraint.
    """
    reader = Reader(model, jit)
    needed = int(constraint.rest(np.array([constraint.start]))[0])
    if needed > steps:
        raise UserError(_too_few(steps, needed, constraint))
    _, logits, state = reader.read(prompt, reader.start(len(prompt) + steps), 0)
    place = constraint.start
    for index in range(steps):
        if constraint.ends(place):
            return

        def allowed(tokens: np.ndarray, place: int = place, left: int = steps - index - 1) -> np.ndarray:
            return constraint.rest(constraint.after(place, tokens)) <= left

        try:
            drawn = choice.draw(np.asarray(logits[-1], np.float32), allowed, np.random.default_rng([seed, index]))
        except NothingAllowed:
            # What could follow a whole text may take more tokens than are left.
            if constraint.rest(np.array([place]))[0] == 0:
                return
            raise
        place = int(constraint.after(place, np.array([drawn.token]))[0])
        yield drawn
        if index + 1 < steps and not constraint.ends(place):
            _, logits, state = reader.read([drawn.token], state, len(prompt) + index)


def _too_few(steps: int, needed: int, constraint: Constraint) -> str:
    if needed > 2**30:
        return f'no text of any length matches {constraint!r}'
    if constraint.counts == 'bytes':
        return (
            f'the shortest text that matches {constraint!r} has {needed} bytes, each of which is counted as a token, '
            f'and {steps} tokens are allowed; allow as many as it has bytes'
        )
    return f'no text of at most {steps} tokens matches {constraint!r}; the shortest has {needed}; allow as many tokens'
