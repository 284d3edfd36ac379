"""The base of modules."""

from typing import Any, ClassVar

from flax import nnx

from attnlab.errors import UserError
from attnlab.signature import checked


class Module(nnx.Module):
    """A module that checks what it is made with.

    Attributes:
      goes_on: of the class, whether more than a linear map stands at its end, such as a gate on what a map gives.
      learns_in_training: of the class of a norm, whether blocks call `in_training(x)` in training.
      looks_ahead: of the class, whether what it gives for a token always depends on later ones of the row.
      ordered: of the class of a weight map, whether it needs all keys of a causal row, in their order.
      remembers: of the class of a channel mixer, whether it keeps a state; blocks then call it as they do a prelude,
        `mlp(x, segments, state) -> (y, state)`, and ask for `init_state(batch, dtype)`.
      routes: of the class of a channel mixer, whether blocks call it as they do a mixture of experts, `mlp(x, key,
        labels, segments, trains=)`, with a key in training alone and what else of the context a penalty needs.
      tells: of the class, the names of the parts that it tells of training, as those with `Moving` buffers must be.

    Raises `UserError` for a value of a wrong type, a size below its range, and what is not a number.
    """

    goes_on: ClassVar[bool] = False
    learns_in_training: ClassVar[bool] = False
    looks_ahead: ClassVar[bool] = False
    ordered: ClassVar[bool] = False
    remembers: ClassVar[bool] = False
    routes: ClassVar[bool] = False
    tells: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if '__init__' in vars(cls):
            cls.__init__ = checked(cls.__init__)  # type: ignore[method-assign]

    def check_looks_back(self, needs: str = 'a model that predicts the next one') -> None:
        """Raises `UserError`, naming its place, for a part that looks ahead; `needs` is what needs another."""
        for path, part in nnx.iter_modules(self):
            if isinstance(part, Module) and part.looks_ahead:
                raise UserError(
                    f'{".".join(map(str, path))} of {type(self).__name__} is {type(part).__name__}, which looks at '
                    f'later tokens; {needs} needs another part, such as a norm of one token'
                )

    def check_width(self, x: Any, channels: int) -> None:
        """Raises `UserError` for an input of another number of channels."""
        if x.shape[-1] != channels:
            raise UserError(
                f'the input of a {type(self).__name__} has shape {x.shape}, so {x.shape[-1]} channels; it must have '
                f'{channels}'
            )


def modules_of[M](model: Any, kind: type[M]) -> list[M]:
    """The modules of a kind within a model, in order."""
    return [module for _, module in nnx.iter_modules(model) if isinstance(module, kind)]


def places_of[M](model: Any, kind: type[M]) -> list[tuple[Any, str, M]]:
    """Where a model has modules of a kind: the module around it, its attribute, and it, as often as it is shared."""
    return [
        (around, name, value)
        for around in modules_of(model, nnx.Module)
        for name, value in vars(around).items()
        if isinstance(value, kind)
    ]
