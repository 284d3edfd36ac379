"""The model: inputs, a stack, a norm, perhaps a pool, and a head."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int, Shaped

from attnlab.blocks.block import Stage
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.models.heads.head import Head, losses_of
from attnlab.models.heads.language import TiedHead
from attnlab.models.inputs.embedding import Embedding
from attnlab.models.inputs.inputs import Inputs
from attnlab.models.inputs.patches import Patches
from attnlab.models.pyramid import Pyramid
from attnlab.models.stack import Stack
from attnlab.models.two_rates import TwoRates
from attnlab.module import Module
from attnlab.nn.norms import RMSNorm
from attnlab.nn.pools import MeanPool, OneToken
from attnlab.nn.positions import Sinusoidal
from attnlab.typing import DropoutKey, Embedded, Features, State, Tokens


class Model(Module):
    """Maps tokens or real-valued inputs to predictions; implements `attnlab.models.predictor.Stacked`.

    Args:
      vocab: number of tokens, or of outputs where the inputs are real-valued.
      dim: model width; in a `Pyramid` that of the first resolution, in `TwoRates` that of windows.
      stack: makes the stack, as `stack(dim, rngs=rngs)`: a `Stack`, or a `Pyramid` or `TwoRates` of several.
      norm: makes the final norm.
      head: makes the head, as `head(dim, vocab, rngs=rngs)`; `None` ties it to the embedding.
      inputs: makes the map of inputs to activations, as `inputs(vocab, dim, rngs=rngs)`.
      positions: added to the activations; `None`: left to the mixers.
      pool: reduces a document to one vector, for predictions about whole documents; `None`: one per position.
      streaming: whether every hidden state depends only on the inputs up to its position, and the mixers keep a state.
      dtype: type of the activations; parameters are float32.

    Raises `UserError` when there is neither a head nor an embedding table to tie it to, and where a streaming model has
    a part that looks ahead (`attnlab.module.Module.looks_ahead`).
    """

    def __init__(
        self,
        vocab: int,
        *,
        dim: int,
        stack: Callable[..., Stack | Pyramid | TwoRates],
        norm: Callable[..., nnx.Module] = RMSNorm,
        head: Callable[..., Head] | None = None,
        inputs: Callable[..., Inputs] = Embedding,
        positions: Sinusoidal | None = None,
        pool: MeanPool | OneToken | None = None,
        streaming: bool = True,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.vocab = vocab
        self.dim = dim
        self.dtype = jnp.dtype(dtype)
        self.positions = positions
        self.pool = pool
        self.streaming = streaming
        self.embedding: Any = inputs(vocab, dim, rngs=rngs)
        self.stack = stack(dim, rngs=rngs)
        width = self.stack.dim
        self.norm = norm(width, rngs=rngs)
        self.head: Any = TiedHead(self.embedding.table) if head is None else head(width, vocab, rngs=rngs)
        if streaming:
            self.check_looks_back()

    @property
    def decodes(self) -> bool:
        """Whether it reads tokens one by one, so that it can generate."""
        return self.streaming and self.embedding.tokens

    @property
    def documents(self) -> int:
        """The number of documents that a prediction is about, concatenated in the hidden state."""
        return self.head.documents

    @property
    def outputs(self) -> int:
        """The number of classes, or of numbers, that a prediction is about."""
        graphdef, variables = nnx.split(self.head)
        hidden = jax.ShapeDtypeStruct((1, self.stack.dim * self.documents), self.dtype)
        return jax.eval_shape(lambda state, x: nnx.merge(graphdef, state).logits(x), variables, hidden).shape[-1]

    def embed(self, tokens: Tokens | Features, ctx: Context) -> Embedded:
        """The input of the first block."""
        x = self.embedding(tokens, self.dtype)
        if self.positions is None:
            return x
        return x + self.positions.encode(self.layout(ctx).positions, self.dim).astype(x.dtype)

    def layout(self, ctx: Context) -> Context:
        """Positions, segments and grid of what the blocks read, as the inputs derive them from `ctx`.

        The layout of a layout is the same. Blocks that inputs tell something are run with `context` instead.
        """
        return self.embedding.context(ctx)

    def context(self, ctx: Context, tokens: Tokens | Features) -> Context:
        """The context of the blocks: the layout, with what the inputs tell them of the rows."""
        ctx, condition = self.layout(ctx), self.embedding.condition(tokens)
        return ctx if condition is None else dataclasses.replace(ctx, condition=condition)

    def hidden(
        self, tokens: Tokens | Features, ctx: Context, state: State | None = None
    ) -> tuple[Embedded, State | None]:
        """The normalised output of the last block, and the advanced state (see the mixers' contract)."""
        x, state = self.stack(self.embed(tokens, ctx), self.context(ctx, tokens), state)
        return self.norm(x), state

    def pooled(self, tokens: Tokens | Features, ctx: Context) -> Float[Array, 'b d']:
        """One vector per row, pooled over its hidden states without padding. Raises `UserError` without a pool."""
        if self.pool is None:
            raise UserError('model.pool is None; predictions about whole documents need one, such as MeanPool')
        hidden, _ = self.hidden(tokens, ctx)
        return self.pool(hidden, self.stack.context(self.layout(ctx)).segments_or_ones() > 0)

    def losses(
        self, hidden: Float[Array, '*b d'], targets: Shaped[Array, '...'], key: DropoutKey | None = None
    ) -> Float[Array, '*b']:
        """The loss of the head, one number per hidden state; with a key what the head minimises in training.

        Raises `UserError` for a head that gives another number of them.
        """
        return losses_of(self.head, hidden, targets, key)

    def logits(self, hidden: Float[Array, '*b d']) -> Float[Array, '*b o']:
        """The head's, in float32."""
        return self.head.logits(hidden)

    def sample(self, hidden: Float[Array, 'b d'], key: Array, *, temperature: float, top_p: float) -> Int[Array, ' b']:
        """A prediction sampled by the head for every hidden state."""
        return self.head.sample(hidden, key, temperature=temperature, top_p=top_p)

    def resize(self, size: tuple[int, int]) -> None:
        """Takes images of another size from now on; see `Patches.resize`, and `Pyramid.resize` for its resolutions.

        Raises `UserError` for inputs that are no `Patches`, and for sizes that these or a pyramid refuse.
        """
        if not isinstance(self.embedding, Patches):
            raise UserError(
                f'the inputs of the model are {type(self.embedding).__name__}, not Patches of images; only these have '
                'another size'
            )
        if isinstance(self.stack, Pyramid):
            self.stack.resize(self.embedding.patches, self.embedding.grid_of(size))
        self.embedding.resize(size)

    def init_state(self, batch: int, length: int) -> State:
        """The state before the first token, able to hold `length` tokens; empty when the model is not streaming."""
        return self.stack.init_state(batch, length, self.dtype) if self.streaming else ()

    def stages(self, tokens: Tokens | Features, ctx: Context) -> Iterator[Stage]:
        """Every named intermediate value in order, lazily, layer by layer; to find the first wrong one.

        The head is applied to every position as if it were a whole document.
        """
        x, ctx = self.embed(tokens, ctx), self.context(ctx, tokens)
        yield Stage('embedding', x)
        for stage in self.stack.stages(x, ctx):
            yield Stage(f'stack.{stage.name}', stage.value)
            x = stage.value
        x = self.norm(x)
        yield Stage('norm', x)
        yield Stage('head', self.logits(jnp.concatenate([x] * self.documents, axis=-1)))
