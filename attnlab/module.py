"""The base class of modules, and searches for modules of a kind within a model."""

from typing import Any, ClassVar

from flax import nnx

from attnlab.errors import UserError
from attnlab.signature import checked


class Module(nnx.Module):
    """A module whose constructor checks its arguments.

    Attributes of the class tell the code around a part, which does not know what it is, what to expect of it.

    Raises `UserError` for an argument of the wrong type, a size below its range, and NaN.

    Attributes:
      goes_on: whether its last operation is something other than a linear map, such as a gate on the map's output.
      learns_in_training: for a norm, whether blocks call `in_training(x)` during training.
      looks_ahead: whether its output for a token always depends on later tokens of the row.
      ordered: for a weight map, whether it needs all keys of a causal row, in order.
      remembers: for a channel mixer, whether it keeps a state. Blocks then call it like a prelude,
        `mlp(x, segments, state) -> (y, state)`, and call `init_state(batch, dtype)`.
      routes: for a channel mixer, whether blocks call it like a mixture of experts, `mlp(x, key, labels, segments,
        trains=)`; `key` is given in training only, `labels` and `segments` are for its penalty.
      tells: the names of those of its parts that it informs of training, which parts with `Moving` buffers need.
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
        """Raises `UserError`, with its path, for a part that looks ahead; `needs` names what cannot do with it."""
        for path, part in nnx.iter_modules(self):
            if isinstance(part, Module) and part.looks_ahead:
                raise UserError(
                    f'{".".join(map(str, path))} of {type(self).__name__} is {type(part).__name__}, which looks at '
                    f'later tokens; {needs} needs another part, such as a norm of one token'
                )

    def check_width(self, x: Any, channels: int) -> None:
        """Raises `UserError` unless the last axis of `x` has this many channels."""
        if x.shape[-1] != channels:
            raise UserError(
                f'the input of a {type(self).__name__} has shape {x.shape}, so {x.shape[-1]} channels; it must have '
                f'{channels}'
            )


def modules_of[M](model: Any, kind: type[M]) -> list[M]:
    """The modules of a kind within a model, in order."""
    return [module for _, module in nnx.iter_modules(model) if isinstance(module, kind)]


def places_of[M](model: Any, kind: type[M]) -> list[tuple[Any, str, M]]:
    """Every place of a module of a kind: its parent, the attribute, and the module; a shared one has several places."""
    return [
        (around, name, value)
        for around in modules_of(model, nnx.Module)
        for name, value in vars(around).items()
        if isinstance(value, kind)
    ]
