"""The layers of a recipe: a mixer followed by a channel mixer, mixers alone, or complete residual blocks."""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ml_collections import ConfigDict

from attnlab.blocks.block import Block
from attnlab.config import spec
from attnlab.errors import UserError
from attnlab.nn.mlps import ConvolvedMLP, GatedMLP
from attnlab.nn.preludes import Canon
from attnlab.signature import checked_fields

POINTS = 'ABCD'
"""Where residual convolutions may stand: A before mixers, B within them, C before channel mixers, D within these."""

ByLayer = Mapping[str, Callable[[int, int], float]]
"""Arguments of mixers that differ between layers, made of the number of layers below and that of all."""


def check_points(points: str, has_mlp: bool) -> None:
    """Raises `UserError` for points at channel mixers where there are none; all of `POINTS` are what there is."""
    if not has_mlp and set(points) & set('CD') and set(points) != set(POINTS):
        raise UserError(
            f'C and D of conv={points} are at channel mixers, and layers of this model have none; choose AB'
        )


class Pattern(NamedTuple):
    """The number of blocks of a stack, and the specs of the repeating ones."""

    depth: int
    blocks: tuple[ConfigDict, ...]


class Layer(abc.ABC):
    """The blocks that make up one layer as a paper counts them."""

    @abc.abstractmethod
    def pattern(self, mixers: tuple[ConfigDict, ...], *, depth: int, mlp: ConfigDict | None) -> Pattern:
        """Returns the blocks of a model of `depth` layers; without `mlp` no block has a channel mixer."""

    def period(self, mixers: tuple[ConfigDict, ...]) -> int:
        """Returns how many layers hold every mixer once."""
        return len(mixers)


@checked_fields
@dataclasses.dataclass(frozen=True)
class MixerAndMLP(Layer):
    """A layer is a mixer, or several, and then a channel mixer, each of them a residual branch.

    Raises `UserError` for a pattern of mixers that does not fill whole layers, and for points at channel mixers where
    there are none, unless all four points are given: then those at channel mixers are left out.

    Attributes:
      norm: that of the branches; `None`: the default of `Block`.
      points: where residual convolutions are: `A`, before a mixer; `C`, before the channel mixer; `D`, within it.
      mixers: how many mixers a layer has.
    """

    norm: ConfigDict | None = None
    points: str = ''
    mixers: int = 1

    def pattern(self, mixers: tuple[ConfigDict, ...], *, depth: int, mlp: ConfigDict | None) -> Pattern:
        check_points(self.points, mlp is not None)
        parts: dict[str, ConfigDict] = {} if self.norm is None else {'norm': self.norm}
        if 'A' in self.points:
            parts['mixer_prelude'] = spec(Canon)
        before = dict(parts)
        if 'C' in self.points and mlp is not None:
            parts['mlp_prelude'] = spec(Canon)
        if 'D' in self.points and mlp is not None:
            mlp = _convolved(mlp)
        if len(mixers) % self.mixers:
            raise UserError(f'a layer has {self.mixers} mixers; a pattern of {len(mixers)} does not fill whole layers')
        blocks = []
        for place, mixer in enumerate(mixers):
            last = (place + 1) % self.mixers == 0
            blocks.append(spec(Block, mixer=mixer, mlp=mlp, **parts) if last else spec(Block, mixer=mixer, **before))
        return Pattern(self.mixers * depth, tuple(blocks))

    def period(self, mixers: tuple[ConfigDict, ...]) -> int:
        return len(mixers) // self.mixers


@checked_fields
@dataclasses.dataclass(frozen=True)
class MixersAlone(Layer):
    """Blocks without a channel mixer, `count` of which make a layer, with about as many parameters as any other.

    In models without channel mixers (`mlp=None`) every block is a layer.

    Attributes:
      count: how many blocks replace a mixer and a channel mixer.
      points: where residual convolutions are: only `A`, before the mixers, is possible.
    """

    count: int = 2
    points: str = ''

    def pattern(self, mixers: tuple[ConfigDict, ...], *, depth: int, mlp: ConfigDict | None) -> Pattern:
        parts = {'mixer_prelude': spec(Canon)} if 'A' in self.points else {}
        blocks = tuple(spec(Block, mixer=mixer, mlp=None, **parts) for mixer in mixers)
        return Pattern(depth if mlp is None else self.count * depth, blocks)


@checked_fields
@dataclasses.dataclass(frozen=True)
class WholeLayers(Layer):
    """Specs of complete residual blocks; each counts as `layers` layers if it has that field, else as one.

    `mlp` replaces their channel mixers, if they have any. If blocks of several layers do not divide the depth, the last
    one has the layers that are left; raises `UserError` if there are several kinds of blocks then.
    """

    def pattern(self, mixers: tuple[ConfigDict, ...], *, depth: int, mlp: ConfigDict | None) -> Pattern:
        layers = [mixer.layers if 'layers' in mixer else 1 for mixer in mixers]
        blocks = tuple(_with_mlp(mixer, mlp) for mixer in mixers)
        if set(layers) == {1}:
            return Pattern(depth, blocks)
        periods, rest = divmod(depth, sum(layers))
        if not rest:
            return Pattern(periods * len(blocks), blocks)
        if len(blocks) > 1:
            raise UserError(f'a pattern of {sum(layers)} layers does not divide a depth of {depth}; choose another')
        last = ConfigDict(blocks[0])
        last.layers = rest
        return Pattern(periods + 1, (*blocks * periods, last))


def joined(layers: Sequence[Layer]) -> Layer | None:
    """Returns the layer of a pattern of recipes with these layers, or `None` if they fill layers in different ways.

    If some recipes have channel mixers, those that have none in their own row get one too (Lieber et al. 2024,
    https://arxiv.org/abs/2403.19887).
    """
    accompanied = [layer for layer in layers if not isinstance(layer, MixersAlone)] or layers
    return accompanied[0] if all(layer == accompanied[0] for layer in accompanied) else None


def _convolved(mlp: ConfigDict) -> ConfigDict:
    """The network with a residual convolution of its hidden channels. Raises `UserError` for one that has no form."""
    if mlp.target != spec(GatedMLP).target:
        raise UserError(f'point D of residual convolutions is within a GatedMLP; the channel mixer is {mlp.target}')
    return spec(ConvolvedMLP, **{name: value for name, value in mlp.items() if name != 'target'})


def _with_mlp(blocks: ConfigDict, mlp: ConfigDict | None) -> ConfigDict:
    blocks = blocks.copy_and_resolve_references()
    if 'mlp' in blocks:
        blocks.mlp = mlp
    return blocks
