"""Softmax-free attention against its equations with exact inverses, in numpy float64."""

import dataclasses
import functools

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional.newton import BacktrackedStep, FixedStep
from attnlab.mixers.linear.softmax_free import SoftmaxFreeAttention
from attnlab.mixers.spatial.linear import GridSoftmaxFreeAttention
from attnlab.testing.noise import noise
from tests.mixers.linear.equations import DIM, HEADS, apply, check_layer, heads
from tests.mixers.linear.test_inline import gelu

PACKED = np.asarray([[1] * 9, [1, 1, 1, 2, 2, 3, 4, 4, 4]])
STRIDE, WIDTH = 2, 3


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def gaussian(a: np.ndarray, c: np.ndarray) -> np.ndarray:
    return np.exp(-((a[:, None] - c[None]) ** 2).sum(axis=-1) / 2)


def released(P: np.ndarray, iterations: int = 20) -> np.ndarray:
    """`newton_inv` of the code released for SOFT++."""
    one, step, halvings = np.eye(len(P)), 2 / P.sum(axis=1).max() ** 2, 0
    while np.abs(one - P @ (step * P)).sum(axis=0).max() > 1.01 and halvings < 10:
        step, halvings = step / 2, halvings + 1
    V = step * P
    for _ in range(iterations):
        V = 2 * V - V @ P @ V
    return V


def soft(mixer: SoftmaxFreeAttention, x: np.ndarray) -> np.ndarray:
    q, v = (heads(apply(linear, x)) for linear in (mixer.query, mixer.value))
    q = q / (DIM // HEADS) ** 0.25
    scale, shift, taps = (np.asarray(p[...], np.float64) for p in (mixer.norm.scale, mixer.norm.bias, mixer.conv.taps))
    out = np.zeros_like(v)
    for h in range(HEADS):
        filled = np.pad(q[:, h], ((0, -len(x) % STRIDE), (0, 0)))
        made = apply(mixer.landmark, filled.reshape(-1, STRIDE * filled.shape[1]))
        made = (made - made.mean(axis=1, keepdims=True)) / np.sqrt(made.var(axis=1, keepdims=True) + mixer.norm.eps)
        landmarks = gelu(scale * made + shift)
        to, between = gaussian(q[:, h], landmarks), gaussian(landmarks, landmarks)
        inverse = released(between) if mixer.ridge == 0 else np.linalg.inv(between + 0.01 * np.eye(len(landmarks)))
        if mixer.normalised:
            roots = np.sqrt(between.sum(axis=1))
            inverse = inverse / roots[:, None] / roots
        values = np.pad(v[:, h], ((WIDTH // 2,) * 2, (0, 0)))
        near = np.stack([taps[:, h] @ values[t : t + WIDTH] for t in range(len(x))])
        out[:, h] = to @ inverse @ to.T @ v[:, h] + near
    return apply(mixer.output, out.reshape(len(x), DIM))


@pytest.mark.parametrize('name', ['soft', 'soft_plus'])
def test_the_layer_is_that_of_the_paper(name):
    check_layer(name, soft, PACKED, stride=STRIDE, width=WIDTH, documents=4, iterations=30)


def test_newton_may_step_as_in_the_code_of_soft_plus():
    options = {'stride': STRIDE, 'width': WIDTH, 'documents': 4, 'ridge': 0.0, 'newton': BacktrackedStep()}
    check_layer('soft_plus', soft, PACKED, **options)


@pytest.mark.parametrize(
    ('newton', 'kept', 'refused'), [(FixedStep(), 0.054, 0.055), (BacktrackedStep(), 0.006, 0.004)], ids=['soft', '++']
)
def test_ridges_with_which_newton_diverges_are_refused(newton, kept, refused):
    """Where there is one landmark, or two that are alike."""

    def greatest(ridge):
        kernels = [jnp.ones((1, 1, n, n)) + ridge * jnp.eye(n)[None, None] for n in (1, 2)]
        found = [newton(kernel, jnp.full((1, 1, 1), 1.0 * len(kernel[0, 0])), None, 20) for kernel in kernels]
        return max(np.nan_to_num(np.abs(each), nan=np.inf).max() for each in found)

    assert greatest(kept) < 1e3 and greatest(refused) > 1e6
    for kind in (SoftmaxFreeAttention, GridSoftmaxFreeAttention):
        kind(8, heads=2, ridge=kept, newton=newton, rngs=nnx.Rngs(0))
        for ridge in (refused, -0.01):
            with pytest.raises(
                UserError, match=f'^ridge of {kind.__name__} is {ridge}; .*newton={type(newton).__name__}'
            ):
                kind(8, heads=2, ridge=ridge, newton=newton, rngs=nnx.Rngs(0))


def test_a_document_without_room_for_all_its_landmarks_is_nan_as_a_whole():
    mixer = SoftmaxFreeAttention(8, heads=2, stride=16, documents=1, rngs=nnx.Rngs(0))
    x = noise(1, 64, 8, dtype=jnp.float64)
    segments = np.repeat([[1, 2]], [24, 40], axis=1)
    ctx = Context(jnp.asarray(np.concatenate([np.arange(24), np.arange(40)])[None], jnp.int32), jnp.asarray(segments))
    y = mixer(x, ctx)[0]
    np.testing.assert_allclose(y[:, :24], mixer(x[:, :24], Context.full(1, 24))[0], atol=1e-9)
    assert np.isnan(y[:, 24:]).all()


CALLS = ('jit', 'pjit', 'checkpoint', 'remat2', 'closed_call', 'custom_jvp_call', 'custom_vjp_call')


def rounding(function, x: jax.Array) -> jax.Array:
    """The function as TPUs compute it: factors of products of the default precision have eight bits."""

    def evaluate(program, *arrays):
        jaxpr, consts = getattr(program, 'jaxpr', program), getattr(program, 'consts', ())
        known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arrays), strict=True))
        for equation in jaxpr.eqns:
            given = [v.val if isinstance(v, jax.extend.core.Literal) else known[v] for v in equation.invars]
            inner = [equation.params[name] for name in ('jaxpr', 'call_jaxpr') if name in equation.params]
            if equation.primitive.name in CALLS:
                found = evaluate(inner[0], *given)
            else:
                if equation.primitive.name == 'dot_general' and equation.params['precision'] is None:
                    given = [each.astype(jnp.bfloat16).astype(each.dtype) for each in given]
                found = equation.primitive.bind(*given, **equation.params)
                found = found if equation.primitive.multiple_results else [found]
            known.update(zip(equation.outvars, found, strict=True))
        return [v.val if isinstance(v, jax.extend.core.Literal) else known[v] for v in jaxpr.outvars]

    return evaluate(jax.make_jaxpr(function)(x), x)[0]


@pytest.mark.parametrize('kind', [SoftmaxFreeAttention, GridSoftmaxFreeAttention])
def test_tokens_that_are_all_alike_are_read_where_products_are_rounded(kind):
    """As those of a blank image: all landmarks are one, and what is inverted is all ones but for its ridge."""
    with jax.enable_x64(False):
        mixer = kind(8, heads=1, stride=2, rngs=nnx.Rngs(0))
        x, ctx = jnp.broadcast_to(noise(1, 1, 8), (1, 64, 8)), dataclasses.replace(Context.full(1, 64), grid=(8, 8))
        expected = np.asarray(jax.jit(lambda x: mixer(x, ctx)[0])(x))
        found = jax.jit(functools.partial(rounding, lambda x: mixer(x, ctx)[0]))(x)
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.03 * np.abs(expected).max())


def test_gradients_of_the_iterations_are_differences():
    """Also where they have not ended at the inverse; those of the inverse are others."""
    x = noise(1, 1, 4, 2, dtype=jnp.float64)
    P = gaussian(np.asarray(x[0, 0]), np.asarray(x[0, 0]))
    P, weights = jnp.asarray(P)[None, None], noise(1, 1, 4, 4, seed=1, dtype=jnp.float64)

    def loss(newton, P):
        return jnp.vdot(weights, newton(P, jnp.max(jnp.sum(P, axis=-1), axis=-1, keepdims=True), None, 3))

    expected = np.zeros(P.shape)
    for i, j in np.ndindex(4, 4):
        ahead, behind = (loss(BacktrackedStep(), P.at[0, 0, i, j].add(step)) for step in (1e-6, -1e-6))
        expected[0, 0, i, j] = (ahead - behind) / 2e-6
    found, other = (jax.grad(functools.partial(loss, newton))(P) for newton in (BacktrackedStep(), FixedStep()))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
    assert np.abs(other - found).max() > 1e-2
