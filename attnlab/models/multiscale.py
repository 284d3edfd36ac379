"""A pretrained forecaster that is tuned on a series at several resolutions at once."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from attnlab.blocks.block import Block, Stage
from attnlab.blocks.residual import Plain
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.models.forecasters import Vectors, WindowModel
from attnlab.models.heads.multiscale import MultiscaleHead, pooled
from attnlab.models.inputs.series import Rows, VariatesApart
from attnlab.models.stack import Stack
from attnlab.module import Module
from attnlab.nn.adapters import LowRankChanges
from attnlab.nn.norms import RMSNorm
from attnlab.nn.projections import Linear
from attnlab.nn.series_windows import NO_COVARIATES, Covariates, WindowGain, WindowNorm
from attnlab.typing import Features


class MultiscaleForecaster(WindowModel):
    """Encoded at several scales side by side, each with adapters of its own, and forecast at each.

        x_i = pool(x, 2^i),   e_i = patches(x_i),   z_i = e_i + e_i P_i,   i = 0 .. scales
        z_i <- block(z_i), the matrices of its mixer changed by a product of rank `rank` that is scale i's
        between blocks z_i <- (c_i + f_i) / 2:
          c_i = z_i + repeat(c_{i+1}, 2) Q_i,   c_scales = z_scales      from coarse to fine
          f_i = z_i + mean of pairs of f_{i-1},   f_0 = z_0              from fine to coarse

    Patches, their positions, blocks and norm are those of a pretrained model, under the names that they have there. A
    token meets those of its own scale alone, as under a mask of blocks over the tokens of all. `P`, `Q` and the changes
    of matrices start at zero, so that tokens of the finest scale are those of the pretrained model at first. Qiao et
    al. 2025, "MSFT", https://arxiv.org/abs/2506.14087, from its abstract and summaries: that `P` and `Q` start so, that
    sums run from scale to scale, and that coarse forecasts are repeated (`MultiscaleHead`) is ours.

    Args:
      vocab: steps forecast.
      dim: model width.
      stack: makes the stack, as `stack(dim, rngs=rngs)`.
      lookback: steps read.
      variates: columns that are forecast.
      covariates: columns behind these; none.
      window_norm: normalises a window; `None`: it stays as it is.
      window_gain: its learned gain, made as `window_gain(variates, rngs=rngs)`; `None`: without.
      inputs: makes patches of variates apart, all of which are read.
      norm: makes the final norm.
      scales: beside the finest.
      rank: of the changes of matrices.
      dtype: type of the activations of the stack.
      rngs: draws the parameters.

    Raises `UserError` for covariates, inputs of which not all tokens are read, another residual than the plain one,
    blocks without a mixer of their own, and windows whose tokens are not halved by every scale.
    """

    def __init__(
        self,
        vocab: int,
        *,
        dim: int,
        stack: Callable[..., Stack],
        lookback: int,
        variates: int,
        covariates: Covariates = NO_COVARIATES,
        window_norm: WindowNorm | None = None,
        window_gain: Callable[..., WindowGain] | None = None,
        inputs: Callable[..., VariatesApart] = VariatesApart,
        norm: Callable[..., nnx.Module] = RMSNorm,
        scales: int = 2,
        rank: int = 4,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        super().__init__(vocab, lookback, variates, covariates, window_norm, window_gain, dtype, rngs)
        self.dim, self.scales = dim, scales
        sizes = {'lookback': lookback, 'variates': variates, 'covariates': covariates.count}
        self.embedding: Any = inputs(vocab, dim, **sizes, rngs=rngs)
        self.stack = stack(dim, rngs=rngs)
        self.norm: Any = norm(dim, rngs=rngs)
        counts = self.counts()
        self.tuned = ScaleAdapters(dim, self.stack, scales=scales, rank=rank, rngs=rngs)
        self.head = MultiscaleHead(dim * sum(counts), vocab, scales=scales, rngs=rngs)
        self.check_gain()

    def counts(self) -> list[int]:
        """Tokens of every scale, the finest first. Raises `UserError` where one does not have half of those before."""
        if self.embedding.read_from != 'all' or self.covariates.count:
            raise UserError(
                f'a MultiscaleForecaster reads all tokens and no covariates; these are {self.covariates.count}, and '
                f'read_from is {self.embedding.read_from!r}: go on from an encoder (inputs=apart, form=bidirectional)'
            )
        if self.lookback % 2**self.scales == 0:
            found = [self.embedding.count(self.lookback >> scale) for scale in range(self.scales + 1)]
            if all(fine == 2 * coarse for fine, coarse in itertools.pairwise(found)):
                return found
        raise UserError(
            f'tokens of a look-back of {self.lookback} rows are not halved {self.scales} times; choose another '
            'look-back, or fewer scales'
        )

    def vectors(self, window: Features, ctx: Context) -> Vectors:
        """The tokens of all scales of a variate, the finest first, in one vector."""
        *_, last = self.reading(window, ctx)
        return last.value

    def reading(self, window: Features, ctx: Context) -> Iterator[Stage]:
        """The tokens of every scale after every block, one scale after the other, then the vectors."""
        steps = jnp.swapaxes(window, 1, 2)
        scales = range(self.scales + 1)
        windows = [jnp.swapaxes(pooled(steps, 2**scale), 1, 2) for scale in scales]
        tokens = self.tuned.adapted([self.embedding(one, self.dtype) for one in windows])
        contexts = [self.of_scale(ctx, one) for one in tokens]
        # Every scale has the blocks for itself, since it changes them.
        layers: list[list[Any]] = [list(self.stack.layers()) for _ in scales]
        for depth in range(self.stack.depth):
            if depth:
                tokens = self.tuned.aggregated(tokens, depth - 1)
            for scale in scales:
                layer = layers[scale][depth]
                self.tuned.changes[scale][depth].add(layer.mixer)
                own, contexts[scale] = self.stack.told(depth, layer, tokens[scale], contexts[scale])
                tokens[scale] = layer(tokens[scale], own.fold_in(depth + scale * self.stack.depth))[0]
                yield Stage(f'layers[{depth}].scales[{scale}]', tokens[scale])
        shape = (len(window), self.variates, -1)
        yield Stage('vectors', jnp.concatenate([self.norm(one).reshape(shape) for one in tokens], axis=-1))

    def of_scale(self, ctx: Context, tokens: Rows) -> Context:
        """The context of the tokens of one scale, which count from 0."""
        positions = Context.full(*tokens.shape[:2]).positions
        return dataclasses.replace(ctx, positions=positions, segments=None, grid=None)

    def stages(self, tokens: Features, ctx: Context) -> Iterator[Stage]:
        """The tokens of every scale after every block, the vectors and the forecasts."""
        yield from self.reading(self.normalised(tokens)[0], ctx)
        yield Stage('head', self.logits(self.hidden(tokens, ctx)[0]))


class ScaleAdapters(Module):
    """What `MultiscaleForecaster` trains besides its head: adapters of tokens and matrices, and maps to finer scales.

    Args:
      dim: model width.
      stack: of the pretrained model.
      scales: beside the finest.
      rank: of the changes of matrices.
      rngs: draws the parameters.
    """

    def __init__(self, dim: int, stack: Stack, *, scales: int, rank: int, rngs: nnx.Rngs):
        layers: list[Any] = list(stack.layers())
        if type(stack.residual) is not Plain or not all(isinstance(layer, Block) for layer in layers):
            raise UserError(
                f'a stack with residual {type(stack.residual).__name__} of {type(layers[0]).__name__} cannot be read '
                'at several scales; it needs the plain residual, and blocks of a mixer and a channel mixer'
            )

        def square() -> Linear:
            return Linear(dim, dim, initializer=nnx.initializers.zeros, axes=('embed', None), rngs=rngs)

        self.tokens = nnx.List([square() for _ in range(scales + 1)])
        self.changes = nnx.List(
            [
                nnx.List([LowRankChanges(layer.mixer, rank=rank, rngs=rngs) for layer in layers])
                for _ in range(scales + 1)
            ]
        )
        self.to_finer = nnx.List([nnx.List([square() for _ in range(scales)]) for _ in layers[1:]])

    def adapted(self, tokens: list[Array]) -> list[Array]:
        """The tokens of every scale, each by its own map."""
        return [one + adapter(one) for one, adapter in zip(tokens, self.tokens, strict=True)]

    def aggregated(self, tokens: list[Array], place: int) -> list[Array]:
        """Half of the sums from coarse to fine and half of those from fine to coarse, after block `place`."""
        finer, coarser = list(tokens), list(tokens)
        for scale in reversed(range(len(tokens) - 1)):
            finer[scale] = tokens[scale] + self.to_finer[place][scale](jnp.repeat(finer[scale + 1], 2, axis=1))
        for scale in range(1, len(tokens)):
            before = coarser[scale - 1]
            pairs = before.reshape(before.shape[0], -1, 2, before.shape[2])
            coarser[scale] = tokens[scale] + jnp.mean(pairs, axis=2)
        return [(one + other) / 2 for one, other in zip(finer, coarser, strict=True)]
