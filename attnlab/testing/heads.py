"""Checks of the contract of heads, to be run on your own.

    check_head(lambda dim, vocab, *, rngs: MyHead(dim, vocab, rngs=rngs), exact=True, streams=True, divided=True)

Each property has its own function, which takes a `HeadSubject`: a small head made by `make`. It raises AssertionError
with the name of the property and what was found. A head of real numbers, whose loss is no logarithm of a probability,
is checked with `normalised=False`; one whose training holds numbers fixed, or has a penalty in the gradient alone, with
`derived=False`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh
from scipy.special import chdtri, softmax

from attnlab.errors import UserError
from attnlab.functional import cores
from attnlab.models.heads.head import Head
from attnlab.testing.contract.gradients import compare_derivatives
from attnlab.testing.contract.subject import check_each, require
from attnlab.testing.noise import noise, perturbed
from attnlab.testing.tolerances import assert_close
from attnlab.train.partition import Axes, state_shardings

Make = Callable[..., Any]
"""Builds a head as `make(dim, vocab, rngs=rngs)`."""

DIM, CLASSES, ROWS = 8, 12, 2
"""Even, so that two devices divide them."""

DRAWS = 4096
CHANCE = 1e-6
"""How often draws from the right distribution fail the test of them."""


class HeadSubject:
    """A small head made by `make`, its parameters perturbed; every hidden state is asked for all classes.

    With `numbers` it is a head of one real number, and every hidden state is asked for as many of them. `measure`,
    compiled once in float64, is what most checks use; what needs float32 or several devices compiles its own.
    """

    def __init__(self, make: Make, *, numbers: bool = False):
        self.make, self.numbers = make, numbers

    @functools.cached_property
    def head(self) -> Any:
        """The head with perturbed parameters."""
        with jax.enable_x64(False):
            return perturbed(self.make(DIM, 1 if self.numbers else CLASSES, rngs=nnx.Rngs(0)), 0.3)

    @functools.cached_property
    def params(self) -> Any:
        """The parameters."""
        return self._split[1]

    def hidden(self, seed: int = 0) -> np.ndarray:
        """Hidden states `ROWS CLASSES dim`, all of a row the same."""
        one = np.asarray(noise(ROWS, 1, DIM * self.head.documents, seed=seed))
        return np.repeat(one, CLASSES, axis=1)

    def targets(self) -> np.ndarray:
        """Every class for every row, `ROWS CLASSES`; or real numbers, `ROWS CLASSES 1`."""
        if self.numbers:
            return np.asarray(noise(ROWS, CLASSES, 1, seed=2))
        return np.tile(np.arange(CLASSES, dtype=np.int32), (ROWS, 1))

    def run(self, params: Any, hidden: Array, targets: Array) -> tuple[Array, Array]:
        """Losses, and the logits of the first hidden state of every row, as a function of the parameters."""
        with jax.default_matmul_precision('highest'):
            head = self.merged(params)
            return head.losses(hidden, targets), head.logits(hidden[:, 0])

    def merged(self, params: Any) -> Any:
        """The head with these parameters."""
        graphdef, _, rest = self._split
        return nnx.merge(graphdef, params, rest)

    def measure(self, hidden: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Losses, logits of the first hidden state of every row, and the objective of training, in float64."""
        with jax.enable_x64(True):
            inputs = _double(self.params), jnp.asarray(hidden, jnp.float64)
            (_, found), _ = self._differentiated(inputs, *self._given(targets))
            losses, logits, objective = (np.asarray(each) for each in found)
            return losses, logits, objective

    @functools.cached_property
    def gradients(self) -> tuple[Any, Array]:
        """Gradients of the weighted sum of the losses by the parameters, and by the hidden states, in float64."""
        with jax.enable_x64(True):
            inputs = _double(self.params), jnp.asarray(self.hidden(), jnp.float64)
            return self._differentiated(inputs, *self._given(self.targets()))[1]

    def value_and_gradients(self, inputs: Any) -> tuple[Array, Any]:
        """That sum, and its gradients, of parameters and hidden states in float64; inside of `jax.enable_x64`."""
        (value, _), gradients = self._differentiated(inputs, *self._given(self.targets()))
        return value, gradients

    def objective_and_gradients(self, inputs: Any) -> tuple[Array, Any]:
        """The same of what training minimises, for one key: draws are those of every call."""
        return self._minimised(inputs, *self._given(self.targets()))

    @functools.cached_property
    def weights(self) -> np.ndarray:
        """The weights of the losses in their sum."""
        return np.asarray(noise(ROWS, CLASSES, seed=1))

    def _given(self, targets: np.ndarray) -> tuple[Array, Array, Array]:
        targets = targets.astype(np.float64) if self.numbers else targets
        return jnp.asarray(targets), jnp.asarray(self.weights, jnp.float64), jax.random.key(0)

    @functools.cached_property
    def _differentiated(self) -> Callable[..., Any]:
        def loss(inputs: tuple[Any, Array], targets: Array, weights: Array, key: Array) -> Any:
            params, hidden = inputs
            losses, logits = self.run(params, hidden, targets)
            with jax.default_matmul_precision('highest'):
                objective = self.merged(params).objective(hidden, targets, key)
            # Where a loss is not a number, the sum is not either; losses are read beside it.
            return jnp.vdot(weights, losses), (losses, logits, objective)

        return jax.jit(jax.value_and_grad(loss, has_aux=True))

    @functools.cached_property
    def _minimised(self) -> Callable[..., Any]:
        def loss(inputs: tuple[Any, Array], targets: Array, weights: Array, key: Array) -> Array:
            params, hidden = inputs
            with jax.default_matmul_precision('highest'):
                return jnp.vdot(weights, self.merged(params).objective(hidden, targets, key))

        return jax.jit(jax.value_and_grad(loss))

    @functools.cached_property
    def _split(self) -> tuple[Any, Any, Any]:
        graphdef, *states = nnx.split(self.head, nnx.Param, ...)
        params, rest = states
        return graphdef, params, rest


def _double(params: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), jnp.float64), params)


Check = Callable[[HeadSubject], None]


def check_head(
    make: Make,
    *,
    exact: bool,
    streams: bool,
    divided: bool,
    normalised: bool = True,
    derived: bool = True,
    say: Callable[[str], None] = print,
) -> None:
    """Checks every property that is claimed (see `HeadRecipe`), and those that no head may lack; says which hold.

    Raises AssertionError for the first property that does not hold: its name, and what was found.
    """
    claims = claimed_of_head(exact=exact, streams=streams, divided=divided, normalised=normalised, derived=derived)
    check_each(HeadSubject(make, numbers=not normalised), claims, say)


def claimed_of_head(
    *, exact: bool, streams: bool, divided: bool, normalised: bool = True, derived: bool = True
) -> dict[str, Check]:
    """Returns the checks, by name, that a head with these claims must pass."""
    classes = {'probabilities': check_probabilities, 'sampling': check_sampling, 'outside': check_outside}
    return {
        **(classes if normalised else {}),
        'gradients': check_gradients,
        'objective': functools.partial(check_objective, exact=exact, derived=derived),
        'bfloat16': check_bfloat16,
        **({'tensor': check_tensor} if divided else {}),
        **({'streams': check_streams} if streams else {}),
    }


def check_probabilities(subject: HeadSubject) -> None:
    """`exp(-loss)` over all classes sums to one, and is the softmax of the logits, which are float32 or better."""
    losses, logits, _ = subject.measure(subject.hidden(), subject.targets())
    traced = jax.eval_shape(subject.run, subject.params, jnp.asarray(subject.hidden()), jnp.asarray(subject.targets()))
    require(
        traced[1].dtype == jnp.float32, f'probabilities: the logits are of type {traced[1].dtype}; expected float32'
    )
    chances = np.exp(-losses)
    ones = np.ones(ROWS)
    # Sums are to float32: what a head computes once, such as its bins, it may compute in that.
    assert_close(chances.sum(axis=1), ones, dtype=jnp.float32, reduction=CLASSES, what='probabilities: their sum')
    expected = softmax(logits, axis=-1)
    assert_close(chances, expected, dtype=jnp.float32, reduction=DIM * CLASSES, what='probabilities: exp(-loss)')


def check_gradients(subject: HeadSubject) -> None:
    """In float64 the derivative of the losses along a random direction is the finite difference."""
    _check_differences('gradients', subject, subject.value_and_gradients)


def _check_differences(what: str, subject: HeadSubject, differentiated: Callable[[Any], tuple[Array, Any]]) -> None:
    params = jax.tree.map(lambda leaf: np.asarray(leaf).astype(np.float64), subject.params)
    with jax.enable_x64(True):
        compare_derivatives(what, differentiated, (params, subject.hidden().astype(np.float64)))


def check_objective(subject: HeadSubject, *, exact: bool, derived: bool = True) -> None:
    """What training minimises is finite, and for a head that claims so the losses themselves.

    Its gradients are the finite differences, but of a head that is not `derived`.
    """
    losses, _, found = subject.measure(subject.hidden(), subject.targets())
    require(bool(np.isfinite(found).all()), 'objective: not finite')
    if exact:
        assert_close(found, losses, dtype=jnp.float32, reduction=DIM * CLASSES, what='objective')
    # Of a head without an objective of its own they are the gradients of the losses.
    if derived and type(subject.head).objective is not Head.objective:
        _check_differences('objective', subject, subject.objective_and_gradients)


def check_sampling(subject: HeadSubject) -> None:
    """Draws agree with the probabilities by a chi-square test; at temperature 0 the likeliest is drawn."""
    logits = subject.measure(subject.hidden(), subject.targets())[1]
    hidden = jnp.asarray(np.repeat(subject.hidden()[:1, 0], DRAWS, axis=0))

    @jax.jit
    def draw(key: Array) -> tuple[Array, Array]:
        return tuple(subject.head.sample(hidden, key, temperature=temperature, top_p=1.0) for temperature in (1.0, 0.0))

    drawn, likeliest = (np.asarray(each) for each in draw(jax.random.key(0)))
    counts = np.bincount(drawn, minlength=CLASSES)
    require(len(counts) == CLASSES, f'sampling: class {len(counts) - 1} was drawn of {CLASSES}')
    expected = DRAWS * softmax(logits[0])
    # Classes of few expected draws count as one.
    common = expected >= 5
    found, wanted = (np.append(each[common], each[~common].sum()) for each in (counts, expected))
    statistic = float(np.sum((found - wanted) ** 2 / np.maximum(wanted, 1e-9)))
    bound = float(chdtri(len(found) - 1, CHANCE))
    require(statistic <= bound, f'sampling: chi-square is {statistic:.4g}, beyond {bound:.4g}')
    require(bool((likeliest == int(np.argmax(logits[0]))).all()), 'sampling: temperature 0 draws not the likeliest')


def check_bfloat16(subject: HeadSubject) -> None:
    """Losses of hidden states in bfloat16 are close to those of the same, rounded, states in float64."""
    hidden = jnp.asarray(subject.hidden(), jnp.bfloat16)
    narrow, logits = jax.jit(subject.run)(subject.params, hidden, jnp.asarray(subject.targets()))
    require(logits.dtype == jnp.float32 == narrow.dtype, f'bfloat16: the loss is of type {narrow.dtype}')
    expected = subject.measure(np.asarray(hidden).astype(np.float64), subject.targets())[0]
    assert_close(narrow, expected, dtype=jnp.bfloat16, reduction=DIM * CLASSES, what='bfloat16: losses')


def check_outside(subject: HeadSubject) -> None:
    """A target that is no class is refused, and inside of a compiled program its loss is NaN, of it alone.

    So is what training minimises.
    """
    for outside in (CLASSES, -1):
        targets = subject.targets()
        targets[0, 3] = outside
        hidden = jnp.asarray(subject.hidden())
        losses, _, objective = subject.measure(subject.hidden(), targets)
        for name, eager, found in (
            ('loss', subject.head.losses, losses),
            ('objective', functools.partial(subject.head.objective, key=jax.random.key(0)), objective),
        ):
            try:
                eager(hidden, jnp.asarray(targets))
            except UserError as error:
                require(f'there are {CLASSES} classes' in str(error), f'outside: the error is {error}')
            else:
                raise AssertionError(f'outside: the {name} of the target {outside} of {CLASSES} classes is not refused')
            wrong = np.isnan(found)
            require(
                bool(wrong[0, 3]) and wrong.sum() == 1,
                f'outside: of the targets one is {outside} of {CLASSES} classes, and the {name} is NaN of '
                f'{wrong.sum()}, of that it is {found[0, 3]:.4g}',
            )


def check_tensor(subject: HeadSubject) -> None:
    """With parameters divided over two devices of the axis `tensor`, losses and their gradients are those of one.

    So is what training minimises, where that is not the losses.
    """
    hidden, targets = jnp.asarray(subject.hidden()), jnp.asarray(subject.targets())
    weights = jnp.asarray(subject.weights)

    def loss(params: Any) -> tuple[Array, Array]:
        losses = subject.run(params, hidden, targets)[0]
        return jnp.vdot(weights, losses), losses

    mesh = Axes(data=1, tensor=2).make(jax.devices()[:2])
    placed = jax.device_put(subject.params, state_shardings(subject.params, mesh))
    divided = [leaf for leaf in jax.tree.leaves(placed) if not leaf.sharding.is_fully_replicated]
    require(bool(divided), 'tensor: no parameter is divided')
    (_, losses), found = jax.jit(cores.on(mesh, jax.value_and_grad(loss, has_aux=True)))(placed)
    expected = subject.measure(subject.hidden(), subject.targets())[0]
    assert_close(losses, expected, dtype=jnp.float32, reduction=DIM * CLASSES, what='tensor: losses')
    wanted = jax.tree_util.tree_leaves_with_path(subject.gradients[0])
    for (path, one), other in zip(wanted, jax.tree.leaves(found), strict=True):
        what = f'tensor: the gradient of {jax.tree_util.keystr(path)}'
        assert_close(other, one, dtype=jnp.float32, reduction=DIM * CLASSES * ROWS, what=what)
    if type(subject.head).objective is not Head.objective:
        _check_objective_divided(subject, mesh, placed)


def _check_objective_divided(subject: HeadSubject, mesh: Mesh, placed: Any) -> None:
    """What training minimises, and its gradients, of one device and of two, both in float32: draws depend on types."""
    hidden, targets = jnp.asarray(subject.hidden()), jnp.asarray(subject.targets())
    weights = jnp.asarray(subject.weights)

    def minimised(params: Any) -> Array:
        with jax.default_matmul_precision('highest'):
            losses = subject.merged(params).objective(hidden, targets, jax.random.key(0))
        return jnp.vdot(weights, losses)

    graded = jax.value_and_grad(minimised)
    wanted, found = jax.jit(graded)(subject.params), jax.jit(cores.on(mesh, graded))(placed)
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(wanted), jax.tree.leaves(found), strict=True):
        what = f'tensor: the objective or its gradient {jax.tree_util.keystr(path)}'
        assert_close(other, np.asarray(one), dtype=jnp.float32, reduction=DIM * CLASSES * ROWS, what=what)


def check_streams(subject: HeadSubject) -> None:
    """Losses of a token, in training too, are the same to rounding whatever stands in other rows and at other tokens.

    Hidden states of a row differ here, so that a target which is paired with another token's is found.
    """
    one, other = (np.asarray(noise(*subject.hidden().shape, seed=seed)) for seed in (3, 4))
    first = subject.measure(one, subject.targets())
    late = np.arange(CLASSES) >= CLASSES // 2
    for where, kept in (('a row', np.arange(ROWS)[:, None] < 1), ('early tokens', ~late), ('late tokens', late)):
        kept = np.broadcast_to(kept, (ROWS, CLASSES))
        second = subject.measure(np.where(kept[..., None], one, other), subject.targets())
        for name, place in (('loss', 0), ('objective', 2)):
            assert_close(
                second[place][kept],
                first[place][kept],
                dtype=jnp.float32,
                reduction=DIM * CLASSES,
                what=f'streams: the {name} of {where}',
            )
