"""Makes a model of any depth of one whose layers are linear in their place: a linear expansion of learngene.

    expanded(model, depth=6)

Xia et al. 2024, "Transformer as Linear Expansion of Learngene", https://arxiv.org/abs/2312.05614. The paper trains the
model that is expanded on the outputs of a teacher; what is expanded is then trained with layers of their own, of a run
by `attnlab.train.start.FromLearngene`.
"""

from flax import nnx

from attnlab.errors import UserError
from attnlab.models.model import Model
from attnlab.models.predictor import one_stack
from attnlab.models.stack import LinearStack


def expanded(model: Model, depth: int) -> Model:
    """Returns a copy of the model with `depth` layers that have parameters of their own.

    `theta_l = theta_B + (l / L) theta_A` for the `l`-th of the `L` repeats of a block among `depth` layers, with the
    base and the slope of the model's `LinearStack`. At the depth that it was trained at it is the same function. All
    other parameters are the model's.

    Raises `UserError` for a stack of another kind, and for a depth below that of the pattern.
    """
    result = nnx.clone(model)
    stack = one_stack(result)
    if not isinstance(stack, LinearStack):
        raise UserError(f'a {type(stack).__name__} has no base and slope to expand; train one with layers=linear')
    result.stack = stack.apart(depth)
    return result
