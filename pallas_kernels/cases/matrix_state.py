"""What named calls of the cores whose state is a matrix have in common."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.cases import drawing


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatrixCase:
    """A call with an incoming state.

    Attributes:
      b, t, k, v: rows, tokens, key channels and value channels.
      heads: those of q, of k and of v.
      decay: letters of the shape of the log decays, such as 'h' or 'b t h k'; `None`: no decay.
      strength: the log decays are between minus twice this and 0.
      sudden: whether a tenth of the log decays are -50, and the others a thousand times smaller.
      documents: those of every row; `None`: one document per row.
    """

    b: int
    t: int
    k: int
    v: int
    heads: tuple[int, int, int] = (2, 2, 2)
    decay: str | None = None
    strength: float = 0.2
    sudden: bool = False
    documents: tuple[drawing.Runs, ...] | None = None

    def shape(self, letters: str) -> tuple[int, ...]:
        """The sizes of dimensions by letter; `hq`, `hk` and `hv` are the heads of q, k and v, `h` the most of them."""
        hq, hk, hv = self.heads
        sizes = {'b': self.b, 't': self.t, 'k': self.k, 'v': self.v}
        return drawing.shape(letters, sizes | {'h': max(self.heads), 'hq': hq, 'hk': hk, 'hv': hv})

    def call(self, name: str, dtype: DTypeLike, own: dict[str, Any]) -> drawing.Call:
        """Returns the call with the arrays `own`, of `dtype`, and those that all have, drawn by `name`.

        q and v are of `dtype`, the state and the log decays of float32 at least.
        """
        wide = jnp.promote_types(dtype, jnp.float32)
        arrays = {
            'q': drawing.normal(name, 'q', self.shape('b t hq k'), dtype),
            'v': drawing.normal(name, 'v', self.shape('b t hv v'), dtype),
            **{argument: array.astype(dtype) for argument, array in own.items()},
            'state': drawing.normal(name, 'state', self.shape('b h k v'), wide),
        }
        if self.decay is not None:
            shape = self.shape(self.decay)
            arrays['log_decay'] = drawing.log_decay(name, shape, self.strength, sudden=self.sudden).astype(wide)
        return drawing.Call(arrays, drawing.documents(self.documents))
