"""A row of the zoo: how a published mixer is put together, and what it claims to do."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ml_collections import ConfigDict

from attnlab.blocks.layer import ByLayer, Layer, MixerAndMLP
from attnlab.config import takes
from attnlab.errors import UserError
from attnlab.mixers.combine import copied, within
from attnlab.nn.initialization import Gaussian, Initialization, Orthogonal, Scaled


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """What a paper, or the code released with it, starts from where attnlab starts from something else.

    Attributes:
      maps: what linear maps start from.
      arguments: arguments of the mixers that set what their parts start from, by keys such as `gate.start`.
      by_layer: those that depend on the place of the layer, whether they set what parts start from or are what the
        paper defines.
      merge: what the maps between resolutions of its hierarchy start from; `None`: as usual.
      stem: what the map of pixels before them starts from; `None`: as usual.
    """

    maps: Initialization = Initialization()
    arguments: Mapping[str, Any] = MappingProxyType({})
    by_layer: ByLayer = MappingProxyType({})
    merge: Scaled | Gaussian | None = None
    stem: Scaled | Gaussian | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hierarchy:
    """The stages of a hierarchical model as a paper has them, from the finest; every tuple has one entry a stage.

    Attributes:
      dim: width of the first stage.
      widths: of the stages, in multiples of it.
      depths: layers.
      heads: of the mixers.
      mlp: hidden width of the channel mixers over the width of the stage.
      arguments: of the mixers, besides heads.
      merge: how the tokens of a stage become those of the next.
      stem: how pixels become those of the first.
      norm: of the branches, and of the output of the last stage.
      positions: whether learned positions are added at every stage.
    """

    dim: int
    widths: tuple[int, ...]
    depths: tuple[int, ...]
    heads: tuple[int, ...]
    mlp: tuple[int, ...]
    arguments: tuple[Mapping[str, Any], ...] = ()
    merge: ConfigDict
    stem: ConfigDict
    norm: ConfigDict
    positions: bool


PYTORCH = Scaled(gain=1 / 3, distribution='uniform')
"""What linear maps start from that are left as PyTorch makes them."""

UNTOUCHED = Start(maps=Initialization(linear=PYTORCH))
"""Linear maps as PyTorch makes them; biases, which it draws too, start at zero here."""

UNTOUCHED_SCALED = Initialization(linear=PYTORCH, residual=1.0)
"""Such maps, the last of every branch over the root of the number of branches."""

NARROW = Start(maps=Initialization(linear=Gaussian(0.02)))
"""Linear maps with a standard deviation of 0.02 at every width, channel mixers included."""

NARROW_THROUGHOUT = Start(maps=NARROW.maps, arguments={'prelude.gain': 4 * 0.02**2})
"""The taps of convolutions too, of width 4, though uniform where flash-linear-attention has them normal."""


def depth_below(below: int, layers: int) -> float:
    """The depth of a layer, from 0 for the first to 1 for the last."""
    return below / max(layers - 1, 1)


RWKV = Start(
    maps=Initialization(linear=Orthogonal(), output=Gaussian(0.0)),
    by_layer={
        'place': depth_below,
        'remaining': lambda below, layers: 1 - below / layers,
        'norm_gain': lambda below, layers: ((below + 1) / layers) ** 0.7,
    },
)
"""Orthogonal maps, the last of every branch at zero, and what depends on the place of the layer."""

LOG_LINEAR = Start(
    maps=Initialization(linear=Gaussian(0.006), output=PYTORCH, residual=1.0),
    arguments={'prelude.gain': 4 * 0.006**2},
)
"""Maps and taps as narrow as in the released configs of log-linear attention, of a width of 1,536, at every width; the
last of every branch as PyTorch has it over the root of the number of branches."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """One published variant as data; tests, benchmarks, configs and tables read the same rows, and know no other names.

    Attributes:
      spec: the mixer, from `attnlab.config.spec`, or a tuple of them: a hybrid's pattern of layers, repeated.
      cite: the paper, authors and year first, then the address.
      causal: built as it is, `y_t` depends on no later token.
      bidirectional: built with `causal=False`, every token sees the whole document; a row that is not causal besides is
        bidirectional by nature, built so as it is, and predicts no next token.
      mirrored: bidirectional, it cannot tell left from right: a document read backwards gives the outputs backwards.
      streaming: given a state, any split of a sequence gives what one pass gives.
      packed: documents sharing a row, told apart by segments, do not see each other.
      sequence: the tokens of a row may lie on several devices, over the mesh axis of that name.
      grid: the tokens are an image or a volume, whose shape it reads from `ctx.grid`; it needs one.
      sparse: places of the grid may be empty, tokens of segment 0, which no other token reads.
      implementations: the implementations of its core that serve it in bfloat16, in `pallas_kernels` names; empty
        when it has none.
      notes: where the recipe departs from the paper, or which of the paper's variants it is; `attnlab zoo NAME` shows
        them.
      layer: what a layer of the paper is made of, and how many mixers of the pattern fill one.
      small: arguments that suit a test, of a width of 16 or 32 and two dozen tokens, where the recipe's own do not;
        `reduced` sets heads and window besides.
      knobs: the arguments that matching may adjust: 'heads', how many heads there are or how wide each is, and 'state',
        what sets the size of the state.
      smallest_state: the smallest value of the argument that sets the state in what is known of the paper's
        experiments; `None`: not known, and the recipe's own counts. Matching goes below it, and below the recipe's own,
        only when told to.
      start: what the paper starts from, which `init=paper` of a config follows; `None`: nothing is known that differs,
        or it is not followed.
      by_layer: arguments of the mixers that differ between layers; `init=paper` takes those of `start`.
      hierarchy: the stages of the paper's model, where it has stages.
      slow: so long to compile that most of its properties are checked by nightly tests alone.
      surrogate: arguments that put in the place of what rounds the function whose gradient it has; gradients are
        compared with finite differences of the mixer so made, and its own must reach every parameter. Empty for a
        mixer whose gradients are those of its values.

    Raises `UserError` for a row that is sparse without a grid.
    """

    spec: ConfigDict | tuple[ConfigDict, ...]
    cite: str
    causal: bool = False
    bidirectional: bool = False
    mirrored: bool = False
    streaming: bool = False
    packed: bool = False
    sequence: bool = False
    grid: bool = False
    sparse: bool = False
    implementations: tuple[str, ...] = ('reference', 'xla', 'mosaic_gpu', 'mosaic_tpu')
    notes: str = ''
    layer: Layer = MixerAndMLP()
    small: Mapping[str, Any] = MappingProxyType({})
    knobs: Mapping[str, str] = MappingProxyType({'heads': 'heads', 'state': 'key_dim'})
    smallest_state: int | None = None
    start: Start | None = None
    by_layer: ByLayer = MappingProxyType({})
    hierarchy: Hierarchy | None = None
    slow: bool = False
    surrogate: Mapping[str, Any] = MappingProxyType({})

    def __post_init__(self) -> None:
        if self.sparse and not self.grid:
            raise UserError('sparse is a claim about grids; give grid=True')

    @property
    def straight_through(self) -> bool:
        """Whether gradients are those of a surrogate."""
        return bool(self.surrogate)

    @property
    def pattern(self) -> tuple[ConfigDict, ...]:
        """The mixers of one period of layers; a single one unless the recipe is a hybrid."""
        return self.spec if isinstance(self.spec, tuple) else (self.spec,)

    @property
    def config(self) -> str:
        """The config that trains it: `language` where it predicts the next token, else a classifier's."""
        return 'language' if self.causal else 'images' if self.grid else 'long_range'

    def sized(
        self, *, heads: int, window: int | None = None, length: int | None = None, causal: bool = True
    ) -> tuple[ConfigDict, ...]:
        """The pattern with `heads` where the recipe leaves them open, and `window`, unless `None`, where it has one.

        Mixers that are made for documents of a length are made for `length`, unless it is `None`; with `causal=False`
        those that have a bidirectional form are in it.
        """
        pattern = tuple(_sized(mixer, heads, window, length) for mixer in self.pattern)
        for mixer in () if causal else pattern:
            if 'causal' in takes(mixer):
                mixer.causal = False
        return pattern

    def reduced(self, *, heads: int = 4, window: int = 5, **sizes: Any) -> tuple[ConfigDict, ...]:
        """The pattern in sizes that suit a test, and with `sizes` in every mixer that takes them."""
        pattern = self.sized(heads=heads, window=window)
        for mixer in pattern:
            _resize(mixer, {**self.small, **sizes})
        return pattern


def _sized(mixer: ConfigDict, heads: int, window: int | None, length: int | None) -> ConfigDict:
    mixer = copied(mixer)
    for each in within(mixer):
        if 'heads' in takes(each) and 'heads' not in each:
            each.heads = heads
        if window is not None and 'window' in each and each.window is not None:
            each.window = window
        if 'length' in each and length is not None:
            each.length = length
    return mixer


def _resize(mixer: ConfigDict, sizes: Mapping[str, Any]) -> None:
    """Sets the arguments that the mixer, or one within it, takes."""
    for each in within(mixer):
        for name, value in sizes.items():
            if name in takes(each):
                each[name] = value


def merged(*families: dict[str, Recipe]) -> dict[str, Recipe]:
    """Returns the rows of all families in one dictionary. Raises ValueError when two of them share a name."""
    names = [name for family in families for name in family]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f'two recipes are called {", ".join(twice)}')
    return {name: recipe for family in families for name, recipe in family.items()}
