"""The model: embedding of tokens, or projection of real-valued inputs; stack, norm, head."""

from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from attnlab.blocks.block import Stage, stages
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.models.heads import ClassificationHead, LanguageHead, PairHead
from attnlab.models.inputs.embedding import Embedding, Projection
from attnlab.models.stack import Stack
from attnlab.nn.norms import RMSNorm
from attnlab.nn.positions import Sinusoidal
from attnlab.typing import Features, Logits, Sequence, State, Tokens


class LanguageModel(nnx.Module):
    """Tokens to next-token logits, or real-valued inputs to predictions.

    Args:
      vocab: number of tokens, or of outputs where the inputs are real-valued.
      dim: model width.
      stack: makes the stack, as `stack(dim, rngs=rngs)`.
      norm: makes the final norm.
      head: makes the output map, as `head(dim, vocab, rngs=rngs)`; `None` ties it to the embedding.
      inputs: makes the map of inputs to activations, as `inputs(vocab, dim, rngs=rngs)`: an `Embedding` of tokens, or a
        `Projection` of real values.
      positions: added to the activations; `None`: positions are the mixers' own matter.
      dtype: type of the activations; parameters are float32.

    Raises `UserError` for neither a head nor an embedding to tie it to.
    """

    def __init__(
        self,
        vocab: int,
        *,
        dim: int,
        stack: Callable[..., Stack],
        norm: Callable[..., nnx.Module] = RMSNorm,
        head: Callable[..., LanguageHead | ClassificationHead | PairHead] | None = None,
        inputs: Callable[..., Embedding | Projection] = Embedding,
        positions: Sinusoidal | None = None,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.vocab = vocab
        self.dim = dim
        self.dtype = jnp.dtype(dtype)
        self.positions = positions
        self.embedding: Any = inputs(vocab, dim, rngs=rngs)
        if head is None and not isinstance(self.embedding, Embedding):
            raise UserError('model.head is None, which ties it to the embedding, and there is none; give it a head')
        self.stack = stack(dim, rngs=rngs)
        self.norm = norm(dim, rngs=rngs)
        self.head: Any = None if head is None else head(dim, vocab, rngs=rngs)

    def embed(self, tokens: Tokens | Features, ctx: Context) -> Sequence:
        """What the first block is given."""
        x = self.embedding(tokens, self.dtype)
        if self.positions is None:
            return x
        return x + self.positions.encode(ctx.positions, self.dim).astype(x.dtype)

    def hidden(
        self, tokens: Tokens | Features, ctx: Context, state: State | None = None
    ) -> tuple[Sequence, State | None]:
        """The normalised output of the last block, and the advanced state (see the mixers' contract)."""
        x, state = self.stack(self.embed(tokens, ctx), ctx, state)
        return self.norm(x), state

    def unembedding(self) -> Float[Array, 'o d']:
        """The rows that hidden states are compared with: the head's, or the embedding's when tied."""
        return self.embedding.weight[...] if self.head is None else self.head.weight[...]

    def logits(self, hidden: Sequence) -> Logits:
        """Scores of the next token, in float32."""
        weight = self.unembedding().astype(hidden.dtype)
        return jnp.einsum('b t d, o d -> b t o', hidden, weight, preferred_element_type=jnp.float32)

    def init_state(self, batch: int, length: int) -> State:
        """The state before the first token, able to hold `length` tokens."""
        return self.stack.init_state(batch, length, self.dtype)

    def stages(self, tokens: Tokens | Features, ctx: Context) -> Iterator[Stage]:
        """Every named intermediate value in order, lazily, layer by layer; for finding where one went wrong."""
        x = self.embed(tokens, ctx)
        yield Stage('embedding', x)
        for index, block in enumerate(self.stack.layers()):
            for stage in stages(block, x, ctx):
                yield Stage(f'stack.layers[{index}].{stage.name}', stage.value)
                x = stage.value
        x = self.norm(x)
        yield Stage('norm', x)
        yield Stage('head', self.logits(x))


class Encoder(LanguageModel):
    """The same model where tokens see to both sides: it reads documents whole, and has no state to hand on."""

    def init_state(self, batch: int, length: int) -> State:
        """Nothing."""
        del batch, length
        return ()


class Classifier(Encoder):
    """Documents to classes: the same trunk under a head that is given one vector a document.

    Which vector that is, the task decides.

    Args:
      vocab: number of tokens; not used where the inputs are real-valued.
      dim: model width.
      stack: makes the stack, as `stack(dim, rngs=rngs)`.
      head: makes the output map, as `head(dim, vocab, rngs=rngs)`.
      norm: makes the final norm.
      inputs: makes the map of inputs to activations, as `inputs(vocab, dim, rngs=rngs)`.
      positions: added to the activations; `None`: positions are the mixers' own matter.
      dtype: type of the activations; parameters are float32.
    """

    def __init__(
        self,
        vocab: int,
        *,
        dim: int,
        stack: Callable[..., Stack],
        head: Callable[..., ClassificationHead | PairHead],
        norm: Callable[..., nnx.Module] = RMSNorm,
        inputs: Callable[..., Embedding | Projection] = Embedding,
        positions: Sinusoidal | None = None,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        super().__init__(
            vocab,
            dim=dim,
            stack=stack,
            norm=norm,
            head=head,
            inputs=inputs,
            positions=positions,
            dtype=dtype,
            rngs=rngs,
        )

    @property
    def documents(self) -> int:
        """How many documents a prediction is about."""
        return self.head.documents

    def classify(self, *pooled: Float[Array, 'b d']) -> Float[Array, 'b o']:
        """Scores of the classes, from one vector a document."""
        return self.head(*pooled)

    def logits(self, hidden: Sequence) -> Logits:
        """Scores of the classes were each place all there is of a document; for finding where one went wrong."""
        return self.head(*[hidden] * self.documents).astype(jnp.float32)
