"""Which rows of training a loss depends on: gradients, and gradients by the inverse of an approximate curvature."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float, Shaped
from scipy.stats import spearmanr

from attnlab.analysis.question import Question
from attnlab.errors import UserError
from attnlab.quantize.feedback import Moments, Watched
from attnlab.quantize.layers import replace_maps
from attnlab.quantize.told import derivative_of, tell
from attnlab.runs.loading import Loaded
from attnlab.tables import Column, Printer, Table, digits
from attnlab.tasks.task import Batch
from attnlab.train.rows import places_of, rows_of

SHOWN = 8
"""Rows of training that are printed for the loss, those that lower it most."""

DAMPING = 0.1
"""Added to the curvature, as a share of its mean."""


@dataclasses.dataclass(frozen=True, eq=False)
class Factors:
    """The curvature of a linear map by its factors: `F ~ (U_x kron U_g) diag(lambda) (U_x kron U_g)^T`.

    Bases are those of the second moments of inputs and of gradients of outputs, and `lambda_ij = E (u_i^T dW u_j)^2`,
    which makes the diagonal in that basis exact (EK-FAC; George et al. 2018, https://arxiv.org/abs/1806.03884).
    """

    inputs: Float[np.ndarray, 'd d']
    outputs: Float[np.ndarray, 'f f']
    values: Float[np.ndarray, 'd f']

    @classmethod
    def fitted(
        cls,
        of_inputs: Float[np.ndarray, 'd d'],
        of_outputs: Float[np.ndarray, 'f f'],
        gradients: Float[np.ndarray, 'n d f'],
    ) -> 'Factors':
        """From second moments, and the gradients of single rows."""
        bases = [np.linalg.eigh(each.astype(np.float64))[1] for each in (of_inputs, of_outputs)]
        turned = bases[0].T @ gradients.astype(np.float64) @ bases[1]
        return cls(bases[0], bases[1], np.mean(turned**2, axis=0))

    def solved(self, gradients: Float[np.ndarray, 'n d f'], damping: float) -> Float[np.ndarray, 'n d f']:
        """`(F + damping mean(lambda) I)^-1` times gradients."""
        turned = self.inputs.T @ gradients.astype(np.float64) @ self.outputs
        turned /= self.values + damping * max(float(self.values.mean()), 1e-30)
        return self.inputs @ turned @ self.outputs.T


def influences(
    asked: Mapping[str, Float[np.ndarray, 'm ...']],
    trained: Mapping[str, Float[np.ndarray, 'n ...']],
    factors: Mapping[str, Factors],
    damping: float,
) -> Float[np.ndarray, 'm n']:
    """By how much a row of training, were it to weigh more, would lower the loss of a row that is asked about.

        I_mn = g_m^T (F + damping)^-1 g_n

    for gradients of losses by parameters; of a parameter without factors, the product of gradients over the mean of
    their squares, as if its curvature were that number times the identity. Koh and Liang 2017,
    https://arxiv.org/abs/1703.04730; by EK-FAC Grosse et al. 2023, https://arxiv.org/abs/2308.03296, who take gradients
    of labels that the model draws for the curvature; here they are of the labels there are.
    """
    total = np.zeros((len(next(iter(asked.values()))), len(next(iter(trained.values())))))
    for name, ours in asked.items():
        theirs = trained[name].astype(np.float64)
        if name in factors:
            theirs = factors[name].solved(theirs, damping)
        else:
            theirs = theirs / ((1 + damping) * max(float(np.mean(theirs**2)), 1e-30))
        total += ours.reshape(len(ours), -1).astype(np.float64) @ theirs.reshape(len(theirs), -1).T
    return total


def products(
    asked: Mapping[str, Float[np.ndarray, 'm ...']], trained: Mapping[str, Float[np.ndarray, 'n ...']]
) -> Float[np.ndarray, 'm n']:
    """The products of gradients, of one checkpoint (TracIn; Pruthi et al. 2020, https://arxiv.org/abs/2002.08484)."""
    return sum(
        (each.reshape(len(each), -1).astype(np.float64) @ trained[name].reshape(len(trained[name]), -1).T)
        for name, each in asked.items()
    )


class TwiceWatched(Watched):
    """A linear map whose moments of inputs, and of gradients of outputs, come as derivatives.

    Raises `UserError` for a map that is rounded or stored in few bits.
    """

    def __init__(self, linear: Any):
        super().__init__(linear)
        shape = linear.weight[...].shape
        self.pulls = Moments(jnp.zeros((*shape[:-2], shape[-1], shape[-1]), jnp.float32))

    def apply(self, x: Shaped[Array, '*b d'], weight: Float[Array, 'd f']) -> Shaped[Array, '*b f']:
        """The product, watched."""
        return _pulled(super().apply(x, weight), self.pulls[...])


@jax.custom_vjp
def _pulled(y: Array, moments: Array) -> Array:
    return y


def _backward(_: None, gradient: Array) -> tuple[Array, Array]:
    rows = gradient.reshape(-1, gradient.shape[-1]).astype(jnp.float32)
    return gradient, jnp.einsum('nd,ne->de', rows, rows, precision=jax.lax.Precision.HIGHEST)


_pulled.defvjp(lambda y, moments: (y, None), _backward)


def gradients(loaded: Loaded, rows: Sequence[Batch]) -> dict[str, Float[np.ndarray, 'n ...']]:
    """The gradients of the losses of single rows, by parameter; layers of a stack apart, as `path[repeat]`."""
    _, gradient_of = derivative_of(loaded.setup, loaded.model(), nnx.Param)
    found = [jax.device_get(gradient_of(row)) for row in rows]
    stacked = jax.tree.map(lambda *each: np.stack(each), *found)
    return _by_name(stacked, lead=1)


def _by_name(state: nnx.State, lead: int) -> dict[str, Any]:
    """Leaves by path, those of stacked layers apart; `lead` axes stand before."""
    leaves, _ = jax.tree.flatten_with_path(state, is_leaf=lambda node: isinstance(node, nnx.Variable))
    found = {}
    for path, variable in leaves:
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        array, axes = np.asarray(variable[...]), len(variable.get_metadata()['axes'])
        if array.ndim - lead == axes:
            found[name] = array
        else:
            found |= {f'{name}[{place}]': np.take(array, place, axis=lead) for place in range(array.shape[lead])}
    return found


def factors_of(
    loaded: Loaded, rows: Sequence[Batch], trained: Mapping[str, Float[np.ndarray, 'n ...']]
) -> dict[str, Factors]:
    """The factors of all linear maps that rows of training give; of a map that is shared, none."""
    model = loaded.model()
    replace_maps(model, lambda index, linear: TwiceWatched(linear))
    tell(loaded.setup, model, Moments, rows)
    told = nnx.state(model, Moments)
    leaves, _ = jax.tree.flatten_with_path(told, is_leaf=lambda node: isinstance(node, nnx.Variable))
    known = {jax.tree_util.keystr(path, simple=True, separator='/'): np.asarray(each[...]) for path, each in leaves}
    made = {}
    for name, array in trained.items():
        path, _, place = name.partition('[')
        if not path.endswith('/weight') or f'{path.removesuffix("/weight")}/pulls' not in known:
            continue
        both = [known[f'{path.removesuffix("/weight")}/{what}'] for what in ('moments', 'pulls')]
        if place:
            both = [each[int(place.rstrip(']'))] for each in both]
        made[name] = Factors.fitted(both[0], both[1], array)
    return made


@dataclasses.dataclass(frozen=True, eq=False)
class Influence:
    """The results of `analyse_influence`.

    Attributes:
      by_curvature: by row that is asked about and row of training, with EK-FAC.
      by_gradient: products of gradients alone.
      agreement: the rank correlation of both, of the mean over rows asked about.
    """

    by_curvature: Float[np.ndarray, 'm n']
    by_gradient: Float[np.ndarray, 'm n']
    agreement: float


def influences_of_rows(loaded: Loaded, asked: Sequence[Batch], trained: Sequence[Batch]) -> Influence:
    """The influences of rows of training on the losses of others."""
    ours, theirs = gradients(loaded, asked), gradients(loaded, trained)
    found = influences(ours, theirs, factors_of(loaded, trained, theirs), DAMPING)
    plain = products(ours, theirs)
    agreement = float(spearmanr(found.mean(axis=0), plain.mean(axis=0))[0]) if found.shape[1] > 2 else float('nan')
    return Influence(found, plain, agreement)


def analyse_influence(question: Question, printer: Printer, trained: int) -> Influence:
    """How `trained` rows all over training bear on the loss of rows of a split.

    Writes `analysis/<step>-influence.json`. Raises `UserError` for rows that do not exist, fewer than two of training,
    and maps of few bits.
    """
    if trained < 2:
        raise UserError(f'--influence is {trained}; rows of training are compared, so there must be two or more')
    loaded = question.loaded
    places = places_of(loaded.setup, 'train', trained)
    found = influences_of_rows(loaded, question.batches(), rows_of(loaded.setup, 'train', trained))
    record = question.record() | {'trained_rows': trained, 'damping': DAMPING}
    numbers: dict[str, Any] = {'agreement': found.agreement, 'trained': places}
    numbers |= {'by_curvature': found.by_curvature.tolist(), 'by_gradient': found.by_gradient.tolist()}
    question.report(printer, '-influence', record, numbers, (_table(found, places, question.title),))
    return found


def _table(found: Influence, places: Sequence[int], title: str) -> Table:
    mean, plain = found.by_curvature.mean(axis=0), found.by_gradient.mean(axis=0)
    order = np.argsort(-mean)[:SHOWN]
    short = digits('.4g')
    columns = [
        Column('row of training', right=True),
        Column('influence', short, True),
        Column('of gradients', short, True),
    ]
    lines = [(places[row], float(mean[row]), float(plain[row])) for row in order]
    return Table(
        'influence', columns, lines, f'{title}: rows that lower the loss most; ranks agree by {found.agreement:.2f}'
    )
