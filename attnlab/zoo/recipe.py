"""A row of the zoo: how a published mixer is put together, and what it claims to do."""

import dataclasses

from ml_collections import ConfigDict


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """One published variant as data; tests, benchmarks, configs and tables read the same rows.

    Attributes:
      spec: the mixer, from `attnlab.config.spec`, or a tuple of them: a hybrid's pattern of layers, repeated.
      cite: the paper, authors and year first, then the address.
      causal: built as it is, `y_t` depends on no later token.
      bidirectional: built with `causal=False`, every token sees the whole document.
      streaming: given a state, any split of a sequence gives what one pass gives.
      packed: documents sharing a row, told apart by segments, do not see each other.
      implementations: the implementations of its core that serve it, in `pallas_kernels` names.
      notes: where the recipe departs from the paper, or which of the paper's variants it is.
      mlp: whether the paper's block follows the mixer with a channel mixer.
    """

    spec: ConfigDict | tuple[ConfigDict, ...]
    cite: str
    causal: bool = False
    bidirectional: bool = False
    streaming: bool = False
    packed: bool = False
    implementations: tuple[str, ...] = ('reference', 'xla')
    notes: str = ''
    mlp: bool = True

    @property
    def pattern(self) -> tuple[ConfigDict, ...]:
        """The mixers of one period of layers; a single one unless the recipe is a hybrid."""
        return self.spec if isinstance(self.spec, tuple) else (self.spec,)


def merged(*families: dict[str, Recipe]) -> dict[str, Recipe]:
    """Returns the rows of all families in one dictionary. Raises ValueError when two of them share a name."""
    names = [name for family in families for name in family]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f'two recipes are called {", ".join(twice)}')
    return {name: recipe for family in families for name, recipe in family.items()}
