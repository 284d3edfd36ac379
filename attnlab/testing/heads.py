"""Checks of the contract of heads over classes, to be run on your own.

    check_head(lambda dim, vocab, *, rngs: MyHead(dim, vocab, rngs=rngs), exact=True, streams=True, divided=True)

Each property has its own function, which takes a `HeadSubject`: a small head made by `make`. It raises AssertionError
with the name of the property and what was found.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from scipy.special import chdtri

from attnlab.errors import UserError
from attnlab.functional import cores
from attnlab.testing.contract.gradients import compare_with_differences
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

    Float64 properties must be used inside `jax.enable_x64`.
    """

    def __init__(self, make: Make):
        self.make = make

    @functools.cached_property
    def head(self) -> Any:
        """The head with perturbed parameters."""
        with jax.enable_x64(False):
            return perturbed(self.make(DIM, CLASSES, rngs=nnx.Rngs(0)), 0.3)

    @functools.cached_property
    def params(self) -> Any:
        """The parameters."""
        return self._split[1]

    def hidden(self, seed: int = 0, dtype: DTypeLike = jnp.float32) -> Array:
        """Hidden states `ROWS CLASSES dim`, all of a row the same."""
        one = np.asarray(noise(ROWS, 1, DIM * self.head.documents, seed=seed))
        return jnp.asarray(np.repeat(one, CLASSES, axis=1), dtype)

    def targets(self) -> Array:
        """Every class for every row, `ROWS CLASSES`."""
        return jnp.asarray(np.tile(np.arange(CLASSES, dtype=np.int32), (ROWS, 1)))

    def run(self, params: Any, hidden: Array, targets: Array) -> tuple[Array, Array]:
        """Losses, and the logits of the first hidden state of every row, as a function of the parameters."""
        with jax.default_matmul_precision('highest'):
            head = self.merged(params)
            return head.losses(hidden, targets), head.logits(hidden[:, 0])

    def merged(self, params: Any) -> Any:
        """The head with these parameters."""
        graphdef, _, rest = self._split
        return nnx.merge(graphdef, params, rest)

    @functools.cached_property
    def apply(self) -> Callable[[Any, Array, Array], tuple[Array, Array]]:
        """`run`, compiled."""
        return jax.jit(self.run)

    @functools.cached_property
    def trained(self) -> Callable[[Any, Array, Array, Array], Array]:
        """The objective of training, compiled."""
        return jax.jit(lambda params, hidden, targets, key: self.merged(params).objective(hidden, targets, key))

    @functools.cached_property
    def _split(self) -> tuple[Any, Any, Any]:
        graphdef, *states = nnx.split(self.head, nnx.Param, ...)
        params, rest = states
        return graphdef, params, rest


Check = Callable[[HeadSubject], None]


def check_head(make: Make, *, exact: bool, streams: bool, divided: bool, say: Callable[[str], None] = print) -> None:
    """Checks every property that is claimed (see `HeadRecipe`), and those that no head may lack; says which hold.

    Raises AssertionError for the first property that does not hold: its name, and what was found.
    """
    check_each(HeadSubject(make), claimed_of_head(exact=exact, streams=streams, divided=divided), say)


def claimed_of_head(*, exact: bool, streams: bool, divided: bool) -> dict[str, Check]:
    """Returns the checks, by name, that a head with these claims must pass."""
    return {
        'probabilities': check_probabilities,
        'gradients': check_gradients,
        'objective': functools.partial(check_objective, exact=exact),
        'sampling': check_sampling,
        'bfloat16': check_bfloat16,
        'outside': check_outside,
        **({'tensor': check_tensor} if divided else {}),
        **({'streams': check_streams} if streams else {}),
    }


def check_probabilities(subject: HeadSubject) -> None:
    """`exp(-loss)` over all classes sums to one, and is the softmax of the logits."""
    losses, logits = subject.apply(subject.params, subject.hidden(), subject.targets())
    require(logits.dtype == jnp.float32, f'probabilities: the logits are of type {logits.dtype}; expected float32')
    chances = np.exp(-np.asarray(losses, np.float64))
    assert_close(
        chances.sum(axis=1), np.ones(ROWS), dtype=jnp.float32, reduction=CLASSES, what='probabilities: their sum'
    )
    expected = jax.nn.softmax(logits, axis=-1)
    assert_close(chances, expected, dtype=jnp.float32, reduction=DIM * CLASSES, what='probabilities: exp(-loss)')


def check_gradients(subject: HeadSubject) -> None:
    """In float64 the derivative of the losses along a random direction is the finite difference."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf).astype(np.float64), subject.params)
    weights = np.random.default_rng(1).standard_normal((ROWS, CLASSES))
    with jax.enable_x64(True):
        params = jax.tree.map(jnp.asarray, params)
        targets = subject.targets()

        def loss(inputs: tuple[Any, Array]) -> Array:
            return jnp.sum(jnp.asarray(weights) * subject.run(*inputs, targets)[0])

        compare_with_differences('gradients', loss, (params, subject.hidden(dtype=jnp.float64)))


def check_objective(subject: HeadSubject, *, exact: bool) -> None:
    """What training minimises is finite, and for a head that claims so the losses themselves."""
    inputs = subject.params, subject.hidden(), subject.targets()
    found = subject.trained(*inputs, jax.random.key(0))
    require(bool(jnp.isfinite(found).all()), 'objective: not finite')
    if exact:
        expected = subject.apply(*inputs)[0]
        assert_close(found, expected, dtype=jnp.float32, reduction=DIM * CLASSES, what='objective')


def check_sampling(subject: HeadSubject) -> None:
    """Draws agree with the probabilities by a chi-square test; at temperature 0 the likeliest is drawn."""
    logits = subject.apply(subject.params, subject.hidden(), subject.targets())[1]
    hidden = jnp.asarray(np.repeat(np.asarray(subject.hidden())[:1, 0], DRAWS, axis=0))
    draw = jax.jit(
        lambda key, temperature: subject.head.sample(hidden, key, temperature=temperature, top_p=1.0),
        static_argnums=1,
    )
    counts = np.bincount(np.asarray(draw(jax.random.key(0), 1.0)), minlength=CLASSES)
    require(len(counts) == CLASSES, f'sampling: class {len(counts) - 1} was drawn of {CLASSES}')
    expected = DRAWS * np.asarray(jax.nn.softmax(logits[0]), np.float64)
    # Classes of few expected draws count as one.
    common = expected >= 5
    found, wanted = (np.append(each[common], each[~common].sum()) for each in (counts, expected))
    statistic = float(np.sum((found - wanted) ** 2 / np.maximum(wanted, 1e-9)))
    bound = float(chdtri(len(found) - 1, CHANCE))
    require(statistic <= bound, f'sampling: chi-square is {statistic:.4g}, beyond {bound:.4g}')
    likeliest = np.asarray(draw(jax.random.key(0), 0.0))
    require(bool((likeliest == int(np.argmax(logits[0]))).all()), 'sampling: temperature 0 draws not the likeliest')


def check_bfloat16(subject: HeadSubject) -> None:
    """Losses of hidden states in bfloat16 are close to those of the same, rounded, states in float32."""
    hidden = subject.hidden(dtype=jnp.bfloat16)
    narrow, logits = subject.apply(subject.params, hidden, subject.targets())
    require(logits.dtype == jnp.float32 == narrow.dtype, f'bfloat16: the loss is of type {narrow.dtype}')
    expected = subject.apply(subject.params, hidden.astype(jnp.float32), subject.targets())[0]
    assert_close(narrow, expected, dtype=jnp.bfloat16, reduction=DIM * CLASSES, what='bfloat16: losses')


def check_outside(subject: HeadSubject) -> None:
    """A target beyond the classes is refused, and inside of a compiled program its loss is NaN, of it alone."""
    targets = np.array(subject.targets())
    targets[0, 3] = CLASSES
    try:
        subject.head.losses(subject.hidden(), jnp.asarray(targets))
    except UserError as error:
        require(f'there are {CLASSES} classes' in str(error), f'outside: the error is {error}')
    else:
        raise AssertionError('outside: a target beyond the classes is not refused')
    losses = np.asarray(subject.apply(subject.params, subject.hidden(), jnp.asarray(targets))[0])
    wrong = np.isnan(losses)
    require(bool(wrong[0, 3]) and wrong.sum() == 1, 'outside: the loss of a target beyond the classes is a number')


def check_tensor(subject: HeadSubject) -> None:
    """With parameters divided over two devices of the axis `tensor`, losses and their gradients are those of one."""
    weights = noise(ROWS, CLASSES, seed=1)
    hidden, targets = subject.hidden(), subject.targets()

    def loss(params: Any) -> tuple[Array, Array]:
        losses = subject.run(params, hidden, targets)[0]
        return jnp.vdot(weights, losses), losses

    function = jax.value_and_grad(loss, has_aux=True)
    (_, expected), wanted = jax.jit(function)(subject.params)
    mesh = Axes(data=1, tensor=2).make(jax.devices()[:2])
    placed = jax.device_put(subject.params, state_shardings(subject.params, mesh))
    divided = [leaf for leaf in jax.tree.leaves(placed) if not leaf.sharding.is_fully_replicated]
    require(bool(divided), 'tensor: no parameter is divided')
    (_, losses), found = jax.jit(cores.on(mesh, function))(placed)
    assert_close(losses, expected, dtype=jnp.float32, reduction=DIM * CLASSES, what='tensor: losses')
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(wanted), jax.tree.leaves(found), strict=True):
        what = f'tensor: the gradient of {jax.tree_util.keystr(path)}'
        assert_close(other, one, dtype=jnp.float32, reduction=DIM * CLASSES * ROWS, what=what)


def check_streams(subject: HeadSubject) -> None:
    """Losses of one row, in training too, are the same to rounding whatever stands in the other."""
    targets, key = subject.targets(), jax.random.key(0)
    one = np.asarray(subject.hidden())
    other = np.stack([one[0], np.asarray(subject.hidden(seed=1))[1]])
    for name, function in (
        ('loss', lambda hidden: subject.apply(subject.params, hidden, targets)[0]),
        ('objective', lambda hidden: subject.trained(subject.params, hidden, targets, key)),
    ):
        first, second = (function(jnp.asarray(hidden)) for hidden in (one, other))
        assert_close(
            second[:1], first[:1], dtype=jnp.float32, reduction=DIM * CLASSES, what=f'streams: the {name} of a row'
        )
