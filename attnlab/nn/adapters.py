"""Low-rank changes of the matrices of a module that is not trained itself."""

from flax import nnx
from jax import Array
from jaxtyping import Float

from attnlab.errors import UserError
from attnlab.module import Module, modules_of
from attnlab.nn.projections import Linear


class LowRankChange(Module):
    """A change `A B` of a matrix, of `rank`; `B` starts at zero, so that the start is no change.

    With a scale of one. Hu et al. 2022, "LoRA", https://arxiv.org/abs/2106.09685.
    """

    def __init__(self, dim_in: int, dim_out: int, *, rank: int, rngs: nnx.Rngs):
        self.down = Linear(dim_in, rank, axes=('embed', None), rngs=rngs)
        self.up = Linear(rank, dim_out, initializer=nnx.initializers.zeros, axes=(None, 'heads'), rngs=rngs)

    def __call__(self) -> Float[Array, 'd f']:
        """The change."""
        return self.down.matrix() @ self.up.matrix()


class LowRankChanges(Module):
    """A `LowRankChange` of every linear map within a module, in the order of `linear_maps`.

    Args:
      module: what is changed; its shapes are read, and nothing of it is kept.
      rank: of every change.
      rngs: draws the parameters.

    Raises `UserError` for a module without linear maps.
    """

    def __init__(self, module: nnx.Module, *, rank: int, rngs: nnx.Rngs):
        shapes = [linear.weight.shape for linear in linear_maps(module)]
        if not shapes:
            raise UserError(f'{type(module).__name__} has no linear maps that could be adapted; choose another mixer')
        self.changes = nnx.List([LowRankChange(*shape, rank=rank, rngs=rngs) for shape in shapes])

    def add(self, module: nnx.Module) -> None:
        """Adds the changes to the matrices of a module, in place; its own matrices are lost.

        Raises `UserError` for a map whose weight is stored in few bits.
        """
        for change, linear in zip(self.changes, linear_maps(module), strict=True):
            if not hasattr(linear, 'weight'):
                raise UserError(
                    f'a linear map of {type(module).__name__} is a {type(linear).__name__}, to whose stored weight '
                    'low-rank changes cannot be added; of this model only inputs can have few bits'
                )
            linear.weight[...] = linear.weight[...] + change()


def linear_maps(module: nnx.Module) -> list[Linear]:
    """The linear maps within a module."""
    return modules_of(module, Linear)
