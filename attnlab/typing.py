"""Named array types, and the table of dimension letters they are written in.

| letter | meaning                                | letter | meaning                             |
|--------|----------------------------------------|--------|-------------------------------------|
| `b`    | batch (`*b` where leading dims are free) | `c`  | chunk length                        |
| `t`    | time, query side                       | `n`    | state size per channel, slots       |
| `s`    | time, key side                         | `m`    | features out of a feature map       |
| `h`    | query heads                            | `r`    | rank                                |
| `g`    | key/value heads                        | `w`    | window or convolution width         |
| `k`    | key channels per head                  | `l`    | layers                              |
| `v`    | value channels per head                | `o`    | classes or vocabulary               |
| `d`    | model width                            | `f`    | MLP hidden width                    |

The tests check these annotations at run time through an import hook; production pays nothing.
"""

from typing import Any

from jax import Array
from jaxtyping import Float, Int, Key

Tokens = Int[Array, 'b t']
Positions = Int[Array, 'b t']
Segments = Int[Array, 'b t']
Sequence = Float[Array, 'b t d']
Embedded = Float[Array, 'b _ d']
Features = Float[Array, 'b t m']
Queries = Float[Array, 'b t h k']
Keys = Float[Array, 'b s g k']
Values = Float[Array, 'b s g v']
Heads = Float[Array, 'b t h v']
DropoutKey = Key[Array, '']

State = Any
"""The carry of a mixer: a pytree of arrays made by its `init_state`, opaque to everyone else."""
