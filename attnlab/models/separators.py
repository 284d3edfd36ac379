"""Models that separate a mixture into its sources, by masks of a learned transform of short frames."""

import abc
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from attnlab.blocks.block import Stage
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional.separation import best_order, every_pair, matched
from attnlab.models.heads.head import wide
from attnlab.models.stack import Stack
from attnlab.models.whole_rows import WholeRows
from attnlab.module import Module
from attnlab.nn.activations import PReLU, activation
from attnlab.nn.convolutions import DilatedConv
from attnlab.nn.norms import GlobalLayerNorm, LayerNorm, RMSNorm
from attnlab.nn.positions import Sinusoidal
from attnlab.nn.projections import Linear
from attnlab.typing import DropoutKey, Embedded, Features, Sequence, State

Signals = Float[Array, 'b n t']


class Separator(WholeRows):
    """Base class of models that estimate the `vocab` sources of a mixture, `b t 1`, by masks.

        w_k = f(x_k U),   m_k = sigmoid(z_k M + c),   s_nk = (m_nk * w_k) V

    `x_k` are frames of `frame` samples, half a frame apart; `z_k` is what a subclass makes of the `w`; the `s_nk` of a
    source are added up where frames overlap. Half a frame of zeros before and after the mixture puts every sample into
    two frames. The hidden states are the estimates, `b n t`, in float32; the loss of each is its negative SI-SNR, in
    the order of the sources that is best. No constant added to an estimate changes it, so that the transform back has
    none. Luo and Mesgarani 2019, https://arxiv.org/abs/1809.07454. Implements `attnlab.models.predictor.Predictor`.

    Raises `UserError` for an odd frame, an unknown activation, and mixtures of several channels.
    """

    predicts = 'signals'

    def __init__(
        self, vocab: int, width: int, features: int, frame: int, activation_name: str, dtype: DTypeLike, rngs: nnx.Rngs
    ):
        if frame % 2:
            raise UserError(f'frame of {type(self).__name__} is {frame}; it must be even, since frames overlap by half')
        activation(activation_name)
        self.vocab, self.dtype = vocab, jnp.dtype(dtype)
        self.features, self.hop, self.activation = features, frame // 2, activation_name
        self.encoder = Linear(frame, features, axes=(None, 'mlp'), rngs=rngs)
        self.masks = Linear(width, vocab * features, bias=True, axes=('embed', 'mlp'), rngs=rngs)
        self.decoder = Linear(features, frame, axes=('mlp', None), rngs=rngs)

    @abc.abstractmethod
    def read(self, encoded: Float[Array, 'b k f'], ctx: Context) -> Float[Array, 'b k d']:
        """What the masks are a map of, from the transform of the frames; `ctx` is that of the frames."""

    @property
    def outputs(self) -> int:
        """How many sources there are."""
        return self.vocab

    def frames(self, samples: int) -> int:
        """The number of frames of a mixture of `samples` samples."""
        return -(-samples // self.hop) + 1

    def layout(self, ctx: Context) -> Context:
        """The context of the frames of mixtures whose context is `ctx`."""
        rows, samples = ctx.positions.shape
        positions = Context.full(rows, self.frames(samples)).positions
        return dataclasses.replace(ctx, positions=positions, segments=None, grid=None)

    def encode(self, tokens: Features) -> Float[Array, 'b k f']:
        """The transform of the frames."""
        if tokens.shape[2] != 1:
            raise UserError(f'mixtures of the task have {tokens.shape[2]} channels; a {type(self).__name__} reads one')
        rows, samples = tokens.shape[:2]
        count, hop = self.frames(samples), self.hop
        padded = jnp.pad(tokens[:, :, 0], ((0, 0), (hop, count * hop - samples))).astype(self.dtype)
        halves = padded.reshape(rows, count + 1, hop)
        frames = jnp.concatenate([halves[:, :-1], halves[:, 1:]], axis=2)
        return activation(self.activation)(self.encoder(frames))

    def masked(self, encoded: Float[Array, 'b k f'], read: Float[Array, 'b k d']) -> Float[Array, 'b k n f']:
        """The transform of every source."""
        masks = jax.nn.sigmoid(self.masks(read)).reshape(*encoded.shape[:2], self.vocab, self.features)
        return masks * jnp.broadcast_to(encoded[:, :, None], masks.shape)

    def decode(self, masked: Float[Array, 'b k n f'], samples: int) -> Signals:
        """The waveforms of the sources, in float32."""
        frames = jnp.swapaxes(self.decoder(wide(masked)), 1, 2)
        first, second = jnp.split(frames, 2, axis=3)
        beside = ((0, 0), (0, 0))
        halves = jnp.pad(first, (*beside, (0, 1), (0, 0))) + jnp.pad(second, (*beside, (1, 0), (0, 0)))
        return halves.reshape(*halves.shape[:2], -1)[:, :, self.hop : self.hop + samples]

    def hidden(self, tokens: Features, ctx: Context, state: State | None = None) -> tuple[Embedded, State | None]:
        """The estimates of the sources, `b n t`, in float32, and no state."""
        del state
        encoded = self.encode(tokens)
        return self.decode(self.masked(encoded, self.read(encoded, self.layout(ctx))), tokens.shape[1]), None

    def pooled(self, tokens: Features, ctx: Context) -> Float[Array, 'b d']:
        """The mean of the estimates."""
        return jnp.mean(self.hidden(tokens, ctx)[0], axis=1)

    def losses(self, hidden: Signals, targets: Signals, key: DropoutKey | None = None) -> Float[Array, 'b n']:
        """The negative SI-SNR of every estimate in dB, for the order of the sources in which the sum is least."""
        del key
        scores = every_pair(hidden, targets)
        return -matched(scores, best_order(scores))

    def logits(self, hidden: Float[Array, '*b d']) -> Float[Array, '*b o']:
        """The estimates, in float32."""
        return wide(hidden)

    def stages(self, tokens: Features, ctx: Context) -> Iterator[Stage]:
        """The transform, what is made of it, the masked transforms and the estimates."""
        encoded = self.encode(tokens)
        yield Stage('encoder', encoded)
        *inside, last = self.reading(encoded, self.layout(ctx))
        yield from (*inside, last)
        masked = self.masked(encoded, last.value)
        yield Stage('masks', masked)
        yield Stage('decoder', self.decode(masked, tokens.shape[1]))

    def reading(self, encoded: Float[Array, 'b k f'], ctx: Context) -> Iterator[Stage]:
        """The stages of `read`; the last is its value."""
        yield Stage('read', self.read(encoded, ctx))


class ConvTasNet(Separator):
    """Conv-TasNet: masks from a temporal convolutional network of `repeats` times `blocks` blocks.

        z = prelu(sum_i skip_i);   block i of a repeat has dilation 2^i

    The first block reads `norm(w) B + c`. Of frames it sees `1 + repeats (width - 1) (2^blocks - 1)`, centred, or
    causal with a norm that is. As in the code that its authors released, https://github.com/naplab/Conv-TasNet, the
    transform is linear, without an intercept; the last block has no map to the next, which nothing would read. Luo and
    Mesgarani 2019, https://arxiv.org/abs/1809.07454.

    Args:
      vocab: number of sources.
      dim: channels between blocks.
      features: of the transform.
      frame: samples of a frame; frames overlap by half.
      hidden: channels within blocks.
      skip: channels that every block hands to the masks.
      width: taps of the convolutions.
      blocks: of a repeat.
      repeats: of the blocks.
      causal: whether convolutions look back alone.
      norm: makes the norms; `GlobalLayerNorm`, `CumulativeLayerNorm` or `LayerNorm`.
      activation: of the transform: 'identity', or 'relu' as in other code.
      dtype: type of the activations.
      rngs: draws the parameters.

    Raises `UserError` for a norm that looks ahead where convolutions do not, and for an even width where they do.
    """

    def __init__(
        self,
        vocab: int,
        *,
        dim: int = 128,
        features: int = 512,
        frame: int = 16,
        hidden: int = 512,
        skip: int = 128,
        width: int = 3,
        blocks: int = 8,
        repeats: int = 3,
        causal: bool = False,
        norm: Callable[..., LayerNorm] = GlobalLayerNorm,
        activation: str = 'identity',
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        super().__init__(vocab, skip, features, frame, activation, dtype, rngs)
        self.encoded_norm = norm(features, rngs=rngs)
        self.bottleneck = Linear(features, dim, bias=True, axes=('mlp', 'embed'), rngs=rngs)
        count = blocks * repeats
        self.blocks = nnx.List(
            [
                TemporalBlock(
                    dim,
                    hidden=hidden,
                    skip=skip,
                    last=place == count - 1,
                    conv=DilatedConv(hidden, width=width, dilation=2 ** (place % blocks), causal=causal, rngs=rngs),
                    norm=norm,
                    rngs=rngs,
                )
                for place in range(count)
            ]
        )
        self.rectified = PReLU(rngs=rngs)
        if causal:
            self.check_looks_back('causal=True')

    def read(self, encoded: Float[Array, 'b k f'], ctx: Context) -> Float[Array, 'b k d']:
        """The sum of what blocks hand on, rectified."""
        *_, last = self.reading(encoded, ctx)
        return last.value

    def reading(self, encoded: Float[Array, 'b k f'], ctx: Context) -> Iterator[Stage]:
        """What blocks hand on, one after the other, and their sum, rectified."""
        del ctx
        x = self.bottleneck(self.encoded_norm(encoded))
        yield Stage('bottleneck', x)
        skips: list[Array] = []
        for index, block in enumerate(self.blocks):
            x, skip = block(x)
            yield Stage(f'blocks[{index}].skip', skip)
            skips.append(skip)
        yield Stage('rectified', self.rectified(functools.reduce(operator.add, skips)))


class TemporalBlock(Module):
    """A block of `ConvTasNet`: `y = norm(prelu(conv(norm(prelu(x A)))))`, handing on `x + y B` and `y S`.

    Args:
      dim: channels of the stream.
      hidden: channels within.
      skip: channels of `y S`.
      last: whether it hands nothing on but `y S`.
      conv: along time.
      norm: makes the norms.
      rngs: draws the parameters.
    """

    def __init__(
        self,
        dim: int,
        *,
        hidden: int,
        skip: int,
        last: bool,
        conv: DilatedConv,
        norm: Callable[..., LayerNorm],
        rngs: nnx.Rngs,
    ):
        self.widen = Linear(dim, hidden, bias=True, axes=('embed', 'mlp'), rngs=rngs)
        self.conv = conv
        self.rectified = nnx.List([PReLU(rngs=rngs) for _ in range(2)])
        self.norms = nnx.List([norm(hidden, rngs=rngs) for _ in range(2)])
        self.skip = Linear(hidden, skip, bias=True, axes=('mlp', 'embed'), rngs=rngs)
        self.narrow = None if last else Linear(hidden, dim, bias=True, axes=('mlp', 'embed'), rngs=rngs)

    def __call__(self, x: Sequence) -> tuple[Sequence, Float[Array, 'b t m']]:
        """The stream, as it is after the last block, and what goes to the masks."""
        y = self.norms[0](self.rectified[0](self.widen(x)))
        y = self.norms[1](self.rectified[1](self.conv(y)))
        return x if self.narrow is None else x + self.narrow(y), self.skip(y)


class StackSeparator(Separator):
    """Masks from a stack of blocks, `z = norm(stack(layer_norm(w) B))`; implements `Stacked` too.

    Args:
      vocab: number of sources.
      dim: model width.
      stack: makes the stack, as `stack(dim, rngs=rngs)`.
      features: of the transform.
      frame: samples of a frame; frames overlap by half.
      causal: whether no part may look at later frames; mixers are given their own.
      norm: makes the final norm.
      positions: of frames, added to the input of the stack; `None`: left to the mixers.
      activation: of the transform.
      dtype: type of the activations.
      rngs: draws the parameters.

    Raises `UserError` for a part that looks ahead where none may.
    """

    def __init__(
        self,
        vocab: int,
        *,
        dim: int,
        stack: Callable[..., Stack],
        features: int = 512,
        frame: int = 16,
        causal: bool = False,
        norm: Callable[..., nnx.Module] = RMSNorm,
        positions: Sinusoidal | None = None,
        activation: str = 'identity',
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        super().__init__(vocab, dim, features, frame, activation, dtype, rngs)
        self.dim, self.positions = dim, positions
        self.encoded_norm = LayerNorm(features, rngs=rngs)
        self.bottleneck = Linear(features, dim, axes=('mlp', 'embed'), rngs=rngs)
        self.stack = stack(dim, rngs=rngs)
        self.norm: Any = norm(dim, rngs=rngs)
        if causal:
            self.check_looks_back('causal=True')

    def read(self, encoded: Float[Array, 'b k f'], ctx: Context) -> Float[Array, 'b k d']:
        """The normalised output of the stack."""
        return self.norm(self.stack(self.narrowed(encoded), ctx, None)[0])

    def narrowed(self, encoded: Float[Array, 'b k f']) -> Sequence:
        """The input of the stack."""
        x = self.bottleneck(self.encoded_norm(encoded))
        if self.positions is None:
            return x
        return x + self.positions.encode(jnp.arange(x.shape[1])[None], self.dim).astype(x.dtype)

    def context(self, ctx: Context, tokens: Features) -> Context:
        """The layout: blocks are told nothing besides."""
        del tokens
        return self.layout(ctx)

    def embed(self, tokens: Features, ctx: Context) -> Embedded:
        """The input of the first block."""
        del ctx
        return self.narrowed(self.encode(tokens))

    def reading(self, encoded: Float[Array, 'b k f'], ctx: Context) -> Iterator[Stage]:
        """Every named intermediate value in order, lazily, layer by layer."""
        x = self.narrowed(encoded)
        yield Stage('embedding', x)
        for stage in self.stack.stages(x, ctx):
            yield Stage(f'stack.{stage.name}', stage.value)
            x = stage.value
        yield Stage('norm', self.norm(x))
