"""Every head keeps every promise that its row makes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.config import build
from attnlab.functional import cores
from attnlab.models.heads.language import LanguageHead
from attnlab.models.heads.registry import CLASSIFIERS, HEADS, REGRESSORS, HeadRecipe
from attnlab.testing.heads import Check, HeadSubject, check_head, claimed_of_head
from attnlab.testing.noise import perturbed
from pallas_kernels import target

NIGHTLY = ('sampling', 'bfloat16', 'tensor')
"""The checks that compile a program of their own, and so are nightly but for the heads of `ALL`."""

EVERY = {**HEADS, **CLASSIFIERS, **REGRESSORS}

ALL = ('softmax', 'adaptive_softmax', 'hierarchical', 'sampled_softmax', 'arcface', 'fourier_head')
"""Heads that have nothing in common with those before them; a link is an elementwise function in one class."""


@functools.lru_cache(maxsize=1)
def subject(name: str) -> HeadSubject:
    """The head of a row; the tests of a head follow one another in one process."""
    made = build(EVERY[name].reduced())
    if name in CLASSIFIERS:
        return HeadSubject(lambda dim, vocab, **rngs: made(dim, 1, classes=vocab, **rngs))
    return HeadSubject(made, numbers=name in REGRESSORS)


def claimed(recipe: HeadRecipe) -> dict[str, Check]:
    return claimed_of_head(
        exact=recipe.exact,
        streams=recipe.streams,
        divided=recipe.divided,
        normalised=recipe.normalised,
        derived=recipe.derived,
    )


def marks(name: str, what: str) -> list[pytest.MarkDecorator]:
    always = what not in NIGHTLY or name in ALL
    return [pytest.mark.xdist_group(f'contract of head {name}')] + ([] if always else [pytest.mark.slow])


@pytest.mark.parametrize(
    ('name', 'check'),
    [
        pytest.param(name, check, id=f'{name}-{what}', marks=marks(name, what))
        for name, recipe in EVERY.items()
        for what, check in claimed(recipe).items()
    ],
)
def test_property(name: str, check: Check):
    check(subject(name))


def test_rows_are_complete():
    assert len(EVERY) == len(HEADS) + len(CLASSIFIERS) + len(REGRESSORS)
    for name, recipe in EVERY.items():
        assert 'https://' in recipe.cite and recipe.cost and recipe.normalised == (name not in REGRESSORS), name
        assert recipe.exact or recipe.notes, name


@pytest.mark.parametrize('name', ['hierarchical', 'sampled_softmax', 'augment_and_reduce'])
def test_rows_of_weights_are_looked_up_by_what_gpus_sum_in_order(name):
    graphdef, state = nnx.split(build(HEADS[name].reduced())(16, 24, rngs=nnx.Rngs(0)))
    targets = jnp.arange(16).reshape(2, 8)

    def loss(state, hidden):
        return jnp.sum(nnx.merge(graphdef, state).objective(hidden, targets, jax.random.key(0)))

    with target.compiling_for(target.H100):
        program = jax.make_jaxpr(jax.grad(loss, allow_int=True))(state, jnp.ones((2, 8, 16)))
    assert 'scatter-add' not in str(program)


class Overconfident(LanguageHead):
    """Reports other probabilities than its losses are of."""

    def logits(self, hidden):
        return 2 * super().logits(hidden)


class Doubled(LanguageHead):
    """Trains on another loss than it says."""

    def objective(self, hidden, targets, key):
        return 2 * self.losses(hidden, targets)


class Stubborn(LanguageHead):
    """Draws one class."""

    def sample(self, hidden, key, *, temperature, top_p):
        return jnp.zeros(len(hidden), jnp.int32)


class Forgiving(LanguageHead):
    """Takes classes that are not there for the last one."""

    def losses(self, hidden, targets):
        return super().losses(hidden, jnp.clip(targets, 0, 11))


class Centred(LanguageHead):
    """Looks at the other rows of a batch."""

    def losses(self, hidden, targets):
        return super().losses(hidden - jnp.mean(hidden, axis=(0, 1), keepdims=True), targets)


class OffByOne(LanguageHead):
    """Pairs the target of a token with the hidden state of the next."""

    def losses(self, hidden, targets):
        return super().losses(jnp.roll(hidden, -1, axis=-2), targets)


class Behind(LanguageHead):
    """Pairs the target of a token with the hidden state of the one before it, and of the first with its own."""

    def losses(self, hidden, targets):
        return super().losses(jnp.concatenate([hidden[..., :1, :], hidden[..., :-1, :]], axis=-2), targets)


class Smooths(LanguageHead):
    """Looks at the other tokens of a row."""

    def losses(self, hidden, targets):
        return super().losses(jnp.broadcast_to(jnp.mean(hidden, axis=-2, keepdims=True), hidden.shape), targets)


class Divisive(LanguageHead):
    """Trains on more where its classes are divided."""

    def objective(self, hidden, targets, key):
        return cores.parts('o', 12) * self.losses(hidden, targets)


class Deaf(LanguageHead):
    """Has no gradient by its hidden states."""

    def losses(self, hidden, targets):
        return super().losses(jax.lax.stop_gradient(hidden), targets)


class Stopped(LanguageHead):
    """The same in training alone, where losses and their gradients show nothing."""

    def objective(self, hidden, targets, key):
        return self.losses(jax.lax.stop_gradient(hidden), targets)


class Rounded(LanguageHead):
    """Gives losses in the type of its hidden states."""

    def losses(self, hidden, targets):
        return super().losses(hidden, targets).astype(hidden.dtype)


BROKEN = (
    ('probabilities', Overconfident),
    ('gradients', Deaf),
    ('objective', Doubled),
    ('objective', Stopped),
    ('sampling', Stubborn),
    ('bfloat16', Rounded),
    ('outside', Forgiving),
    ('streams', Centred),
    ('streams', OffByOne),
    ('streams', Behind),
    ('streams', Smooths),
    ('tensor', Divisive),
)


@pytest.mark.parametrize(('what', 'head'), BROKEN)
def test_a_head_that_breaks_a_promise_is_found(what: str, head: type[LanguageHead]):
    with pytest.raises(AssertionError, match=f'^{what}'):
        claimed_of_head(exact=True, streams=True, divided=True)[what](HeadSubject(head))


def test_check_head_says_what_holds():
    said = []
    check_head(build(HEADS['softmax'].reduced()), exact=True, streams=True, divided=True, say=said.append)
    assert said[0] == 'probabilities: holds' and len(said) == 8


def test_many_tokens_are_computed_some_at_a_time():
    head = perturbed(build(HEADS['taylor'].reduced())(4, 6, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.standard_normal((2, 300, 4)), jnp.float32)
    targets = jnp.asarray(rng.integers(6, size=(2, 300)), jnp.int32)
    whole = -jnp.take_along_axis(jax.nn.log_softmax(head.logits(hidden)), targets[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(head.losses(hidden, targets), whole, rtol=1e-5)


@pytest.mark.parametrize('name', EVERY)
def test_heads_that_say_they_look_at_the_batch_are_those_without_streams(name: str):
    assert subject(name).head.of_batch == (not EVERY[name].streams)


@pytest.mark.parametrize('name', HEADS)
def test_heads_of_a_vocabulary_say_where_the_objective_is_another_number_than_the_loss(name: str):
    losses, _, objective = subject(name).measure(subject(name).hidden(), subject(name).targets())
    assert subject(name).head.estimated == (not np.allclose(losses, objective))
