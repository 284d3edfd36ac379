"""The contract of heads: the loss of their predictions, logits, and samples."""

import abc
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int, Shaped

from attnlab.errors import UserError
from attnlab.functional import sampling
from attnlab.functional.lookup import lookup
from attnlab.functional.precision import wide_dtype
from attnlab.module import Module
from attnlab.nn.parameter import param
from attnlab.typing import DropoutKey


class Head(Module):
    """Maps hidden states to predictions and computes their loss; made as `head(dim, vocab, rngs=rngs)`.

    Evaluations report `losses`; training minimises, and reports, `objective`.

    Attributes:
      documents: the number of documents that a prediction is about; a hidden state concatenates their vectors.
      degree: for predictions of real numbers, `p` if the loss scales with the `p`-th power of their unit, in which case
        training adds only `penalty` to the losses; otherwise 0.
      of_batch: whether the objective of a hidden state depends on the rest of its batch, which then cannot be divided
        into parts.
      missing: whether some of several labels of a hidden state may be missing; these are -1.
      estimated: for a head over a vocabulary, whether the value of its objective differs from its losses, so that it is
        not in nats of the text.
    """

    documents = 1
    degree = 0
    of_batch = False
    missing = False
    estimated = False

    @abc.abstractmethod
    def losses(self, hidden: Float[Array, '*b d'], targets: Shaped[Array, '...']) -> Float[Array, '*b']:
        """One number per hidden state: `-log p(target)` in nats, or an error where predictions are real numbers."""

    def objective(
        self, hidden: Float[Array, '*b d'], targets: Shaped[Array, '...'], key: DropoutKey
    ) -> Float[Array, '*b']:
        """What training minimises, one number per hidden state; by default the losses and the penalty."""
        del key
        return with_penalty(self.losses(hidden, targets), self.penalty())

    def penalty(self) -> Float[Array, ''] | None:
        """A penalty on the weights that training adds to every loss, in whatever unit that has; `None`: none."""
        return None

    @abc.abstractmethod
    def logits(self, hidden: Float[Array, '*b d']) -> Float[Array, '*b o']:
        """Log-probabilities up to a constant, or the predicted numbers, in float32."""

    def sample(self, hidden: Float[Array, 'b d'], key: Array, *, temperature: float, top_p: float) -> Int[Array, ' b']:
        """Samples a prediction for every hidden state; see `attnlab.functional.sampling`.

        A head that can sample without computing all logits overrides this method.
        """
        return sampling.sample(self.logits(hidden), key, temperature=temperature, top_p=top_p)


def heads(model: Any) -> list[Head]:
    """The heads within a model, an `nnx.Module`."""
    return [part for _, part in nnx.iter_modules(model) if isinstance(part, Head)]


def losses_of(
    head: Head, hidden: Float[Array, '*b d'], targets: Shaped[Array, '...'], key: DropoutKey | None
) -> Float[Array, '*b']:
    """The losses of a head, one number per hidden state; with a key its objective.

    Raises `UserError` for a head that gives another number of them: weights would be spread over these.
    """
    found = head.losses(hidden, targets) if key is None else head.objective(hidden, targets, key)
    if found.shape != hidden.shape[:-1]:
        raise UserError(
            f'{type(head).__name__} gave losses of shape {found.shape}; expected one per hidden state, '
            f'{hidden.shape[:-1]}'
        )
    return found


def in_gradient_only(penalty: Float[Array, '*b']) -> Float[Array, '*b']:
    """Zero with the gradient of `penalty`: added to losses, it is trained on but never appears in reported numbers."""
    return penalty - jax.lax.stop_gradient(penalty)


def with_penalty(losses: Float[Array, '*b'], penalty: Float[Array, ''] | None) -> Float[Array, '*b']:
    """The losses, each with the gradient of the penalty added; without a penalty, the losses themselves."""
    return losses if penalty is None else losses + in_gradient_only(penalty.astype(losses.dtype))


def wide(x: Float[Array, '*b']) -> Float[Array, '*b']:
    """`x` in float32, or as it is if it is wider."""
    return x.astype(wide_dtype(x.dtype))


def linear_logits(hidden: Float[Array, '*b d'], weight: Float[Array, 'o d']) -> Float[Array, '*b o']:
    """`hidden W^T`, multiplied in the type of `hidden`, accumulated and returned in float32 or better."""
    weight = weight.astype(hidden.dtype)
    accumulator = wide_dtype(hidden.dtype)
    return jnp.einsum('... d, o d -> ... o', hidden, weight, preferred_element_type=accumulator)


def target_logits(
    hidden: Float[Array, '*b d'], weight: Float[Array, 'o d'], targets: Int[Array, '*b']
) -> Float[Array, '*b']:
    """The logit of one class per hidden state, in float32 or better."""
    # Cast after the lookup, so that the gradient of the weight accumulates in its own type.
    rows = lookup(weight, targets).astype(hidden.dtype)
    return jnp.sum(wide(hidden) * wide(rows), axis=-1)


def output_weight(dim: int, outputs: int, rngs: nnx.Rngs) -> nnx.Param:
    """A weight matrix `o d`, initialised normal with variance 1 / d."""
    return param(
        jax.nn.initializers.normal(dim**-0.5), (outputs, dim), axes=('vocab', 'embed'), group='embedding', rngs=rngs
    )
