"""How a recipe fills a layer: a mixer followed by a channel mixer, a mixer alone, or residual blocks of its own."""

import abc
import dataclasses
from typing import NamedTuple

from ml_collections import ConfigDict

from attnlab.blocks.block import Block
from attnlab.config import spec


class Pattern(NamedTuple):
    """How many blocks a stack has, and the specs of those that repeat."""

    depth: int
    blocks: tuple[ConfigDict, ...]


class Layer(abc.ABC):
    """What a layer of a paper is made of."""

    @abc.abstractmethod
    def pattern(self, mixers: tuple[ConfigDict, ...], *, depth: int, mlp: ConfigDict | None) -> Pattern:
        """Returns the blocks of a model of `depth` layers; without `mlp` no block has a channel mixer."""


@dataclasses.dataclass(frozen=True)
class MixerAndMLP(Layer):
    """A mixer and a channel mixer, each in its branch, are a layer."""

    def pattern(self, mixers: tuple[ConfigDict, ...], *, depth: int, mlp: ConfigDict | None) -> Pattern:
        return Pattern(depth, tuple(spec(Block, mixer=mixer, mlp=mlp) for mixer in mixers))


@dataclasses.dataclass(frozen=True)
class MixersAlone(Layer):
    """Blocks without a channel mixer, several of which have the parameters of a layer.

    Where no other model has channel mixers either (`mlp=None`), each is a layer.

    Attributes:
      count: how many take the place of a mixer and a channel mixer.
    """

    count: int = 2

    def pattern(self, mixers: tuple[ConfigDict, ...], *, depth: int, mlp: ConfigDict | None) -> Pattern:
        blocks = tuple(spec(Block, mixer=mixer, mlp=None) for mixer in mixers)
        return Pattern(depth if mlp is None else self.count * depth, blocks)


@dataclasses.dataclass(frozen=True)
class WholeLayers(Layer):
    """Specs that are residual blocks by themselves, each as many layers as its `layers` says, or one.

    `mlp` takes the place of their channel mixers, if they have any.
    """

    def pattern(self, mixers: tuple[ConfigDict, ...], *, depth: int, mlp: ConfigDict | None) -> Pattern:
        periods = depth // sum(mixer.layers if 'layers' in mixer else 1 for mixer in mixers)
        return Pattern(max(1, periods) * len(mixers), tuple(_with_mlp(mixer, mlp) for mixer in mixers))


def _with_mlp(blocks: ConfigDict, mlp: ConfigDict | None) -> ConfigDict:
    blocks = blocks.copy_and_resolve_references()
    if 'mlp' in blocks:
        blocks.mlp = mlp
    return blocks
