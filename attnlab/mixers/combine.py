"""Several mixers side by side in one layer, and mixers that read from the end."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from ml_collections import ConfigDict

from attnlab.context import BACKWARDS, Context
from attnlab.errors import UserError
from attnlab.functional.documents import document_places
from attnlab.mixers.mixer import Mixer, TwoSided
from attnlab.typing import Sequence, State


class SideBySide(Mixer):
    """Mixers that read the same input, their outputs added: `y = sum_i s_i norm_i(f_i(x))`.

    Each has a state of its own. Dong et al. 2024, https://arxiv.org/abs/2411.13676, with norms and the mean; TII 2025,
    https://arxiv.org/abs/2507.22448, with neither.

    Raises `UserError` without mixers, and for scales that are not one a mixer.
    """

    def __init__(
        self,
        dim: int,
        *,
        mixers: tuple[Callable[..., Mixer], ...],
        scales: tuple[float, ...] | None = None,
        norm: Callable[..., nnx.Module] | None = None,
        rngs: nnx.Rngs,
    ):
        """Makes the mixers.

        Args:
          dim: model width.
          mixers: made as `mixer(dim, rngs=)`.
          scales: constants `s`, one a mixer; `None`: one over their number, a mean.
          norm: made as `norm(dim, rngs=)`, one for every output.
          rngs: draws the parameters.
        """
        self.scales = (1 / max(1, len(mixers)),) * len(mixers) if scales is None else scales
        if not mixers or len(self.scales) != len(mixers):
            raise UserError(
                f'SideBySide has {len(mixers)} mixers and {len(self.scales)} scales; it needs a mixer, and one scale '
                'for each'
            )
        self.mixers = nnx.List([mixer(dim, rngs=rngs) for mixer in mixers])
        self.norms = nnx.List([] if norm is None else [norm(dim, rngs=rngs) for _ in mixers])

    def __call__(
        self, x: Sequence, ctx: Context, state: tuple[State, ...] | None = None
    ) -> tuple[Sequence, tuple[State, ...] | None]:
        # A key for each: two that draw would draw the same numbers.
        found = [mixer(x, ctx.fold_in(i), None if state is None else state[i]) for i, mixer in enumerate(self.mixers)]
        outputs: list[Array] = [y for y, _ in found]
        if self.norms:
            outputs = [norm(y) for norm, y in zip(self.norms, outputs, strict=True)]
        y = jnp.sum(jnp.stack([scale * y for scale, y in zip(self.scales, outputs, strict=True)]), axis=0)
        return y.astype(x.dtype), None if state is None else tuple(advanced for _, advanced in found)

    @property
    def divides_time(self) -> bool:
        return all(mixer.divides_time for mixer in self.mixers)

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> tuple[State, ...]:
        """Returns the state of every mixer."""
        return tuple(mixer.init_state(batch, length, dtype) for mixer in self.mixers)


class Backwards(TwoSided):
    """Mixers that read every document from its end: `y = reversed(sum_i f_i(reversed(x)))`.

    Beside a causal mixer, as `SideBySide(mixers=(f, Backwards(mixers=(g,))), scales=(1, 1))`, it makes one that sees
    both ways; in every other layer it makes the directions alternate. Positions count from the end of a document.
    Schuster and Paliwal 1997, https://doi.org/10.1109/78.650093.

    Args:
      dim: model width.
      mixers: made as `mixer(dim, rngs=)`, by the contract of mixers.
      rngs: draws the parameters.

    Raises `UserError` without mixers.
    """

    def __init__(self, dim: int, *, mixers: tuple[Callable[..., Mixer], ...], rngs: nnx.Rngs):
        if not mixers:
            raise UserError('Backwards has no mixers; it needs one at least')
        self.mixers = nnx.List([mixer(dim, rngs=rngs) for mixer in mixers])

    def __call__(self, x: Sequence, ctx: Context, state: None = None) -> tuple[Sequence, None]:
        segments = None if ctx.segments is None else jnp.flip(ctx.segments, 1)
        positions = document_places(segments, *x.shape[:2])
        # Another key than that of a mixer beside it, which reads forwards.
        cut = None if ctx.cut is None else jnp.flip(ctx.cut, (1, 2))
        ctx = dataclasses.replace(ctx.fold_in(BACKWARDS), positions=positions, segments=segments, grid=None, cut=cut)
        outputs = [mixer(jnp.flip(x, 1), ctx.fold_in(i), None)[0] for i, mixer in enumerate(self.mixers)]
        return jnp.flip(jnp.sum(jnp.stack(outputs), axis=0), 1).astype(x.dtype), None


def within(mixer: ConfigDict) -> tuple[ConfigDict, ...]:
    """The mixer itself, then those that stand side by side in it."""
    return (mixer, *(each for inner in (mixer.mixers if 'mixers' in mixer else ()) for each in within(inner)))


def copied(mixer: ConfigDict) -> ConfigDict:
    """A copy of the mixer, whose inner mixers are copies too."""
    mixer = mixer.copy_and_resolve_references()
    if 'mixers' in mixer:
        mixer.mixers = tuple(copied(inner) for inner in mixer.mixers)
    return mixer
