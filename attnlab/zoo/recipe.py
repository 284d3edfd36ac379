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
    """The initial values of a paper, or of the code released with it, where they differ from attnlab's.

    Attributes:
      maps: those of linear maps.
      arguments: arguments of the mixers that set initial values of their parts, by keys such as `gate.start`.
      by_layer: arguments of the mixers that depend on the place of the layer, whether they set initial values or are
        part of what the paper defines.
      merge: those of the maps between resolutions of its hierarchy; `None`: as usual.
      stem: those of the map of pixels before them; `None`: as usual.
    """

    maps: Initialization = Initialization()
    arguments: Mapping[str, Any] = MappingProxyType({})
    by_layer: ByLayer = MappingProxyType({})
    merge: Scaled | Gaussian | None = None
    stem: Scaled | Gaussian | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hierarchy:
    """The stages of a paper's hierarchical model, from the finest; every tuple has one entry per stage.

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
"""PyTorch's default for the weights of linear maps."""

UNTOUCHED = Start(maps=Initialization(linear=PYTORCH))
"""PyTorch's default for linear maps, except that biases, which it draws too, start at zero."""

UNTOUCHED_SCALED = Initialization(linear=PYTORCH, residual=1.0)
"""The same, with the last map of every branch divided by the square root of the number of branches."""

NARROW = Start(maps=Initialization(linear=Gaussian(0.02)))
"""Linear maps with a standard deviation of 0.02 at every width, channel mixers included."""

NARROW_THROUGHOUT = Start(maps=NARROW.maps, arguments={'prelude.gain': 4 * 0.02**2})
"""As `NARROW`, and the same deviation for the taps of convolutions of width 4; they are uniform, where those of
flash-linear-attention are normal."""


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
"""Orthogonal maps, the last of every branch zero, and arguments that depend on the place of the layer."""

LOG_LINEAR = Start(
    maps=Initialization(linear=Gaussian(0.006), output=PYTORCH, residual=1.0),
    arguments={'prelude.gain': 4 * 0.006**2},
)
"""Maps and taps as narrow, at every width, as in the released configs of log-linear attention, of width 1,536; the last
map of every branch has PyTorch's default, divided by the square root of the number of branches."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """One published variant as data; tests, benchmarks, configs and tables read these rows and name no recipe.

    Attributes:
      spec: the mixer, from `attnlab.config.spec`, or a tuple of them: a hybrid's pattern of layers, repeated.
      cite: the paper, authors and year first, then the address.
      causal: claims that `y_t`, as the recipe is built by default, depends on no later token.
      bidirectional: claims that with `causal=False` every token sees the whole document. A row that does not claim
        `causal` as well is built so by default and cannot predict a next token.
      mirrored: its bidirectional form cannot tell left from right: a document read backwards gives the outputs
        backwards.
      streaming: claims that a sequence split anywhere, with the state handed on, gives the same as one pass.
      packed: claims that documents in one row, told apart by segments, do not see each other.
      sequence: claims that the tokens of a row may be divided over devices, along the mesh axis of that name.
      grid: its tokens are an image or a volume; it needs `ctx.grid`, their shape.
      sparse: claims that places of the grid may be empty: no other token reads a token of segment 0.
      implementations: the implementations of its core that serve it in bfloat16, as `pallas_kernels` names them; empty
        if it has no core.
      notes: how the recipe departs from the paper, or which of the paper's variants it is; `attnlab zoo NAME` shows
        them.
      layer: what a layer of the paper consists of, and how many mixers of the pattern make one.
      small: arguments for tests, at a width of 16 or 32 and two dozen tokens, in place of the recipe's own; `reduced`
        sets heads and window as well.
      knobs: the arguments that matching may adjust: 'heads', the number or the width of heads, and 'state', the size of
        the state.
      smallest_state: the smallest value of the latter argument known from the paper's experiments; `None`: none is
        known, and the recipe's own value counts. Matching goes below either only when told to.
      start: the paper's initial values, which `init=paper` of a config follows; `None`: they are not known to differ,
        or are not followed.
      by_layer: arguments of the mixers that differ between layers; with `init=paper` those of `start` replace them.
      hierarchy: the stages of the paper's model; `None`: it has no stages.
      slow: whether it takes so long to compile that most of its properties are checked only by nightly tests.
      surrogate: for a mixer that rounds and passes gradients straight through, arguments that replace the rounding by
        the function whose gradient it uses. Tests compare gradients with finite differences of the mixer so built, and
        check that its own gradients reach every parameter. Empty for other mixers.

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
        """Whether its gradients are those of a surrogate."""
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
        """The pattern with `heads` where the recipe leaves them open, and with `window` where it has a window.

        Mixers that are made for documents of a given length are made for `length`. `None` leaves the recipe's own
        value. With `causal=False`, mixers that have a bidirectional form are built in it.
        """
        pattern = tuple(_sized(mixer, heads, window, length) for mixer in self.pattern)
        for mixer in () if causal else pattern:
            if 'causal' in takes(mixer):
                mixer.causal = False
        return pattern

    def reduced(self, *, heads: int = 4, window: int = 5, **sizes: Any) -> tuple[ConfigDict, ...]:
        """The pattern in sizes for tests, with `sizes` in every mixer that takes them."""
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
