"""Chains of thought that are mixtures: the partial sums of a row, all at once, are what a model is to think."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attnlab.context import Context
from attnlab.data.synthetic.sums import SignedSums
from attnlab.metrics import Average, likeliest, proportion
from attnlab.models.thoughts import check_thinks, mixture, read, thinking
from attnlab.tasks.synthetic import LabelPrediction
from attnlab.tasks.task import Batch, context
from attnlab.typing import DropoutKey


@dataclasses.dataclass(frozen=True)
class ContinuousThought(LabelPrediction):
    """Think the partial sums after one number, two, and so on as mixtures of tokens, then say the answer.

        loss = sum_t KL(a*_t | a_t) - log p(answer),  a*_t = shares of the 2^t partial sums after t numbers, t < terms

    In training the model reads the right mixtures `E^T a*_t`; in evaluation its own, `E^T a_t`, and the accuracy is
    that of what it says then. Gozeten et al. 2025, https://arxiv.org/abs/2505.23648, without their second stage by
    rewards.
    """

    problem: SignedSums = SignedSums()

    def measure(self, model: object, batch: Batch, dropout_key: DropoutKey | None) -> dict[str, Average]:
        """Loss in nats, of which that of the answer, and the accuracy; of rows as long as the problem's."""
        check_thinks(model)
        tokens = batch['tokens'][:, : self.problem.terms + 1]
        wanted = partial_sums(self.problem, tokens)
        vectors = model.embed(tokens, Context.full(*tokens.shape))  # type: ignore[attr-defined]
        taught = jnp.concatenate([vectors, mixture(model, wanted)], axis=1)
        targets, weights = batch['targets'][:, 0], batch['weights'][:, 0]
        ctx = context({'tokens': taught}, dropout_key, weights)
        hidden, _ = read(model, taught, ctx)
        asked = hidden[:, self.problem.terms :]
        logs = jax.nn.log_softmax(model.logits(asked[:, :-1]), axis=-1)  # type: ignore[attr-defined]
        divergence = jnp.sum(wanted * (jnp.log(jnp.where(wanted > 0, wanted, 1)) - logs), axis=(1, 2))
        answers = model.losses(asked[:, -1], targets, dropout_key)  # type: ignore[attr-defined]
        said = asked[:, -1]
        if dropout_key is None:
            said = thinking(model, tokens, self.problem.terms - 1)[0][:, -1]
        right = likeliest(model.logits(said), targets)  # type: ignore[attr-defined]
        return {
            'loss': Average.of(divergence + answers, weights),
            'answer_loss': Average.of(answers, weights),
            **proportion('accuracy', right.astype(jnp.float32)[:, None], weights[:, None]),
        }


def partial_sums(problem: SignedSums, tokens: Int[Array, 'b t']) -> Float[Array, 'b n o']:
    """The shares of partial sums after one number to all but the last, as distributions over tokens."""
    numbers = tokens[:, : problem.terms] + 1
    middle = problem.terms * problem.largest

    def step(shares: Float[Array, 'o'], number: Int[Array, '']) -> tuple[Float[Array, 'o'], Float[Array, 'o']]:
        after = (jnp.roll(shares, number) + jnp.roll(shares, -number)) / 2
        return after, after

    def row(numbers: Int[Array, 'n']) -> Float[Array, 'm o']:
        start = jnp.zeros(problem.sums, jnp.float32).at[middle].set(1.0)
        return jax.lax.scan(step, start, numbers[:-1])[1]

    shares = jax.vmap(row)(numbers)
    return jnp.pad(shares, ((0, 0), (0, 0), (problem.largest + 1, 0)))
