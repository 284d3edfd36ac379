"""Maps from inputs to activations: a table of token vectors, or a linear map of real-valued inputs."""

from flax import nnx
from jax.typing import DTypeLike

from attnlab.errors import UserError
from attnlab.functional.indices import check_indices
from attnlab.functional.lookup import lookup
from attnlab.models.inputs.inputs import Inputs
from attnlab.nn.parameter import param, uniform_within
from attnlab.nn.projections import Linear
from attnlab.typing import Features, Sequence, Tokens


class Embedding(Inputs):
    """A learned vector per token, `y_t = E[token_t]`, `E` of shape `vocab dim`, initial standard deviation `scale`.

    The table may also serve as the head, see `attnlab.models.heads.language.TiedHead`. Raises `UserError` for a token
    outside the vocabulary; under `jax.jit` it gives NaN instead.
    """

    tokens = True

    def __init__(self, vocab: int, dim: int, *, scale: float = 0.02, rngs: nnx.Rngs):
        initializer = nnx.initializers.normal(scale)
        self.weight = param(initializer, (vocab, dim), axes=('vocab', 'embed'), group='embedding', rngs=rngs)

    @property
    def table(self) -> nnx.Param:
        """`E`."""
        return self.weight

    def __call__(self, tokens: Tokens, dtype: DTypeLike | None = None) -> Sequence:
        """Looks `tokens` up, giving activations of type `dtype` (`None`: the table's own)."""
        table = self.weight[...]
        check_indices('tokens', tokens, table.shape[0], 'in the vocabulary')
        # Cast after the lookup, so that the gradient of the table accumulates in its own type.
        return lookup(table, tokens).astype(table.dtype if dtype is None else dtype)


class Projection(Inputs):
    """A learned linear map of real-valued inputs, `y_t = x_t W + b`, `W` of shape `features dim`.

    `vocab`, the number of outputs, is ignored; inputs share one signature. `b` does not start at zero: what is silent
    from the start of a row would be zero in every layer, where a norm multiplies gradients by one over the root of its
    eps, a thousand, and again in the next.

    Raises `UserError` for inputs with a different number of features.
    """

    def __init__(self, vocab: int, dim: int, *, features: int, rngs: nnx.Rngs):
        del vocab
        self.features = features
        self.linear = Linear(
            features, dim, bias=True, axes=(None, 'embed'), bias_initializer=uniform_within(features**-0.5), rngs=rngs
        )

    def __call__(self, tokens: Features, dtype: DTypeLike | None = None) -> Sequence:
        """Maps `tokens`, giving activations of type `dtype` (`None`: the inputs' own)."""
        if tokens.shape[-1] != self.features:
            raise UserError(f'model.inputs.features is {self.features}; the inputs of the task have {tokens.shape[-1]}')
        return self.linear(tokens if dtype is None else tokens.astype(dtype))
