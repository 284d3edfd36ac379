"""A mixture of experts against its definition, expert by expert, and what no token may lose."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.blocks.block import Block
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional import cores, experts
from attnlab.functional.experts import mixed
from attnlab.mixers.convolution.gated import GatedConvolution
from attnlab.mixers.softmax.attention import Attention
from attnlab.nn.experts import (
    HierarchicalGate,
    LaplaceGate,
    MixtureOfExperts,
    NoisyGate,
    SigmoidGate,
    SmallTemperatureGate,
    SoftmaxGate,
    TemperedGate,
)
from attnlab.nn.mlps import GatedMLP
from attnlab.testing.contract import compare_with_differences
from attnlab.testing.noise import noise
from attnlab.train.partition import Axes, batch_sharding, state_shardings
from pallas_kernels import target

GATES = {'softmax': SoftmaxGate(), 'sigmoid': SigmoidGate(), 'laplace': LaplaceGate()}
X = noise(2, 6, 8)


@functools.lru_cache
def mixture(gate='softmax', **options):
    return MixtureOfExperts(8, hidden=4, gate=GATES[gate], rngs=nnx.Rngs(0), **{'experts': 4, **options})


def affinities_by_hand(gate, x, weight):
    scores = x @ weight.T
    if gate == 'sigmoid':
        found = 1 / (1 + np.exp(-scores))
    else:
        scores = scores if gate == 'softmax' else -np.linalg.norm(x[:, None] - weight, axis=-1)
        found = np.exp(scores)
    return found / found.sum(1, keepdims=True)


def by_hand(moe, gate, x):
    """Every expert for every token, in float64, by the definition."""
    x = np.asarray(x, np.float64).reshape(-1, 8)
    gates, up, down, router = (np.asarray(each[...], np.float64) for each in (moe.gates, moe.up, moe.down, moe.router))
    affinities = affinities_by_hand(gate, x, router)
    chosen = np.argsort(-affinities, axis=1, kind='stable')[:, : moe.active]
    y = np.zeros_like(x)
    for token in range(len(x)):
        weights = affinities[token, chosen[token]]
        weights = weights / weights.sum() if moe.active > 1 else weights
        for weight, expert in zip(weights, chosen[token], strict=True):
            gated = x[token] @ gates[expert]
            y[token] += weight * ((gated / (1 + np.exp(-gated)) * (x[token] @ up[expert])) @ down[expert])
    return y, chosen


@pytest.mark.parametrize('active', [1, 2])
@pytest.mark.parametrize('gate', GATES)
def test_the_definition(gate, active):
    moe = mixture(gate, active=active)
    expected, chosen = by_hand(moe, gate, X)
    np.testing.assert_allclose(moe(X).reshape(-1, 8), expected, rtol=1e-4, atol=1e-5)
    routing = moe.routing(X.reshape(-1, 8))
    np.testing.assert_array_equal(routing.experts, chosen)
    np.testing.assert_array_equal(routing.load, np.bincount(chosen.ravel(), minlength=4))
    assert routing.dropped == 0 and routing.kept.all()


@pytest.mark.parametrize('gate', GATES)
def test_one_expert_is_the_mlp(gate):
    moe, mlp = mixture(gate, experts=1, active=1), GatedMLP(8, hidden=4, rngs=nnx.Rngs(1))
    for linear, own in ((mlp.gate, moe.gates), (mlp.up, moe.up), (mlp.down, moe.down)):
        linear.weight[...] = own[...][0]
    np.testing.assert_allclose(moe(X), mlp(X), rtol=1e-5, atol=1e-6)


def test_a_shared_expert_is_added():
    moe = MixtureOfExperts(8, hidden=4, experts=4, shared=2, rngs=nnx.Rngs(0))
    without = mixture.__wrapped__()
    for name in ('router', 'gates', 'up', 'down'):
        getattr(without, name)[...] = getattr(moe, name)[...]
    np.testing.assert_allclose(moe(X), without(X) + moe.shared(X), rtol=1e-5, atol=1e-6)


def test_packed_is_apart_and_any_split_is_the_whole():
    moe = mixture('sigmoid')
    apart = jnp.concatenate([moe(X[:, :1]), moe(X[:, 1:4]), moe(X[:, 4:])], axis=1)
    np.testing.assert_allclose(moe(X), apart, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('gate', GATES)
def test_gradients_are_differences(gate):
    graphdef, params = nnx.split(mixture(gate, balance=0.0, z_loss=0.0))
    params = jax.tree.map(lambda leaf: np.asarray(leaf).astype(np.float64), params)
    with jax.enable_x64(True):
        weights = noise(2, 6, 8, seed=3, dtype=jnp.float64)

        def loss(inputs):
            return jnp.sum(weights * nnx.merge(graphdef, inputs[0])(inputs[1]))

        compare_with_differences(gate, loss, (jax.tree.map(jnp.asarray, params), X.astype(jnp.float64)))


def test_what_has_no_room_is_counted_and_adds_nothing():
    moe = mixture(capacity=0.5)
    tokens = X.reshape(-1, 8)
    routing, whole = moe.routing(tokens), mixture().routing(tokens)
    room = 3  # ceil(0.5 * 2 * 12 / 4)
    kept = np.zeros((12, 2), bool)
    taken = [0] * 4
    for choice in range(2):
        for token in range(12):
            expert = int(routing.experts[token, choice])
            kept[token, choice] = taken[expert] < room
            taken[expert] += 1
    np.testing.assert_array_equal(routing.kept, kept)
    assert 0 < routing.dropped == np.sum(~kept) and routing.dropped + kept.sum() == 24 == routing.load.sum()
    np.testing.assert_array_equal(routing.weights, np.where(kept, whole.weights, 0))
    lost = ~kept.any(axis=1)
    assert lost.any() and not moe(X).reshape(-1, 8)[lost].any()
    np.testing.assert_array_equal(mixture(capacity=4.0)(X), mixture()(X))


def test_penalties_are_in_the_gradient_alone():
    moe, plain = mixture(balance=0.3, z_loss=0.2), mixture(balance=0.0, z_loss=0.0)
    np.testing.assert_array_equal(moe(X), plain(X))
    tokens = X.reshape(-1, 8)

    def penalty(router):
        scores = tokens @ router.T
        load = jax.lax.stop_gradient(moe.routing(tokens).load) / 24
        uneven = 4 * jnp.sum(load * jnp.mean(jax.nn.softmax(scores), axis=0))
        return 12 * 0.3 * uneven + 0.2 * jnp.sum(jax.nn.logsumexp(scores, axis=1) ** 2)

    found, without = (nnx.grad(lambda m: jnp.sum(m(X)))(m)['router'][...] for m in (moe, plain))
    np.testing.assert_allclose(found - without, jax.grad(penalty)(moe.router[...]), rtol=1e-3, atol=1e-4)
    even = MixtureOfExperts(8, hidden=4, experts=4, active=2, z_loss=0.0, balance=1.0, rngs=nnx.Rngs(0))
    even.router[...] = jnp.zeros((4, 8))
    np.testing.assert_allclose(even.routing(tokens).penalty, 12.0, rtol=1e-5)


def test_what_does_not_train_has_no_penalty_in_its_gradients():
    """Nor has a stack that is evaluated: of a causal one nothing depends on later tokens."""
    moe, plain = mixture(balance=0.3, z_loss=0.2), mixture(balance=0.0, z_loss=0.0)
    found, without = (jax.grad(lambda x, m=m: jnp.sum(m(x, trains=False)))(X) for m in (moe, plain))
    np.testing.assert_array_equal(found, without)
    mlp = functools.partial(MixtureOfExperts, hidden=4, experts=4, active=2)
    block = Block(8, mixer=functools.partial(Attention, heads=2), mlp=mlp, rngs=nnx.Rngs(0))
    ctx = Context.full(1, 6)

    def early(x, ctx):
        return jnp.sum(block(x, ctx)[0][:, 2])

    x = noise(1, 6, 8)
    reach = np.abs(jax.grad(early)(x, ctx)).sum(axis=(0, 2))
    assert (reach[:3] > 0).all() and not reach[3:].any()
    trained = dataclasses.replace(ctx, deterministic=False, dropout_key=jax.random.key(0))
    assert np.abs(jax.grad(early)(x, trained)).sum(axis=(0, 2))[3:].all()


def test_ties_and_types_are_decided():
    moe = mixture.__wrapped__('sigmoid', experts=5)
    moe.router[...] = jnp.zeros((5, 8))
    np.testing.assert_array_equal(moe.routing(X.reshape(-1, 8)).experts, [[0, 1]] * 12)
    narrow = mixture()(X.astype(jnp.bfloat16))
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        narrow.astype(jnp.float32), mixture()(X.astype(jnp.bfloat16).astype(jnp.float32)), atol=0.1
    )
    step = jax.jit(nnx.grad(lambda m: jnp.sum(m(X) ** 2)))
    first, second = (jax.tree.leaves(step(mixture())) for _ in range(2))
    assert all((one == other).all() for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize('gate', GATES)
def test_the_router_computes_in_float32_whatever_the_type_of_tokens(gate):
    # Of weights in bfloat16 some are off by 2^-9, and which expert is the best may change.
    moe, narrow = mixture(gate), X.reshape(-1, 8).astype(jnp.bfloat16)
    routing = moe.routing(narrow)
    affinities = affinities_by_hand(gate, np.asarray(narrow, np.float64), np.asarray(moe.router[...], np.float64))
    best = -np.sort(-affinities, axis=1)[:, :2]
    assert routing.weights.dtype == routing.penalty.dtype == jnp.float32
    np.testing.assert_array_equal(routing.experts, np.argsort(-affinities, axis=1, kind='stable')[:, :2])
    np.testing.assert_allclose(routing.weights, best / best.sum(axis=1, keepdims=True), rtol=1e-5)


SLOW_AXES = [pytest.param(axis, marks=pytest.mark.slow) for axis in ('tensor', 'sequence')]


def divided(moe, axis, x=X):
    """Value and gradients on one device, and a program with its arguments that computes them on two."""
    graphdef, params = nnx.split(moe)

    def run(params, x):
        return jax.value_and_grad(lambda params: jnp.sum(nnx.merge(graphdef, params)(x) ** 2))(params)

    mesh = Axes(**{'data': 1, axis: 2}).make(jax.devices()[:2])
    placed = jax.device_put(params, state_shardings(params, mesh))
    given = jax.device_put(x, batch_sharding(mesh, x.shape) if len(x) % 2 == 0 else None)
    return jax.jit(run)(params, x), jax.jit(cores.on(mesh, run)), (placed, given)


@pytest.mark.parametrize('axis', ['data', 'expert', *SLOW_AXES])
@pytest.mark.parametrize('options', [{}, {'capacity': 0.5}], ids=['room for all', 'dropped'])
def test_two_devices_give_what_one_gives(axis, options):
    one, run, arguments = divided(mixture(**options), axis)
    for one_leaf, other in zip(jax.tree.leaves(one), jax.tree.leaves(run(*arguments)), strict=True):
        np.testing.assert_allclose(other, one_leaf, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('options', [{'experts': 3}, {}], ids=['experts', 'rows'])
def test_what_the_axis_does_not_divide_is_replicated_and_named(options):
    x = X[:1] if not options else X
    with cores.undivided() as found:
        one, run, arguments = divided(mixture.__wrapped__(**options), 'expert', x)
        for one_leaf, other in zip(jax.tree.leaves(one), jax.tree.leaves(run(*arguments)), strict=True):
            np.testing.assert_allclose(other, one_leaf, rtol=1e-4, atol=1e-5)
    assert str(found[0]) == f'experts: {"experts 3" if options else "rows 1"} over expert 2'


def test_the_choices_of_one_token_are_taken_alone_to_the_same_result():
    """So few that nothing is sorted into blocks, on one device or with experts of others."""
    moe, x = mixture(balance=0.0, z_loss=0.0), X[:1, :1]
    assert ['scan' in str(jax.make_jaxpr(lambda x: moe(x))(given)) for given in (x, X)] == [False, True]
    np.testing.assert_allclose(moe(x), moe(X)[:1, :1], rtol=1e-4, atol=1e-6)
    one, slope = jnp.zeros_like(X).at[0, 0].set(1), jax.grad(lambda x: jnp.sum(moe(x) ** 2))
    many = jax.grad(lambda x: jnp.sum((one * moe(x)) ** 2))(X)
    np.testing.assert_allclose(slope(x)[0, 0], many[0, 0], rtol=1e-3, atol=1e-5)
    rows = jax.vmap(lambda row: moe(row[None])[0])(X.reshape(-1, 1, 8))
    np.testing.assert_allclose(rows.reshape(X.shape), moe(X), rtol=1e-4, atol=1e-6)
    with cores.undivided():
        single, run, arguments = divided(moe, 'expert', x)
        for leaf, other in zip(jax.tree.leaves(single), jax.tree.leaves(run(*arguments)), strict=True):
            np.testing.assert_allclose(other, leaf, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('networks', [4, 2], ids=['all', 'two of four'])
def test_products_of_sorted_rows_and_blocks_give_the_same(networks):
    """The one is for TPUs, the other for what is none; two networks of four are those of a device among others."""
    moe, tokens = mixture(), X.reshape(-1, 8)
    chosen, whole = jnp.minimum(moe.routing(tokens).experts, networks), networks == 4
    parameters = tuple(each[...][:networks] for each in (moe.gates, moe.up, moe.down))
    here = (chosen < networks)[..., None]

    def total(form, tokens, parameters):
        return jnp.sum(jnp.where(here, jnp.sin(form(tokens, chosen, parameters, jax.nn.silu, whole=whole)), 0))

    one, other = (
        jax.value_and_grad(functools.partial(total, form), (0, 1))(tokens, parameters)
        for form in (experts._blocks, experts._products_of_sorted)
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), one, other)
    for device, name in ((target.current(), 'scan'), (target.H100, 'scan'), (target.TPU_V5E, 'ragged_dot')):
        with target.compiling_for(device):
            text = str(jax.make_jaxpr(lambda x: moe(x))(X))
        assert [word in text for word in ('scan', 'ragged_dot')] == [name == 'scan', name != 'scan'], device


def test_no_device_has_the_tokens_of_others_but_those_that_share_experts():
    """Of two devices with rows of their own none computes, or is sent, what the other's tokens need."""
    gathered = {}
    for axis in ('data', 'expert'):
        _, run, arguments = divided(mixture(), axis)
        text = run.lower(*arguments).compile().as_text()
        gathered[axis] = re.findall(r'f32\[([\d,]+)\]\S* all-gather', text)
    assert not gathered['data'] and '2,6,8' in gathered['expert'], gathered


@pytest.mark.parametrize('inner', ['softmax', 'laplace'])
def test_a_hierarchical_gate_multiplies_the_chances_of_group_and_expert(inner):
    gate = HierarchicalGate(groups=2, outer=SoftmaxGate(), inner=GATES[inner])
    weight, x = noise(2 + 6, 8, seed=1), X.reshape(-1, 8)
    assert gate.rows(6) == 8
    found = gate.affinities(gate.scores(x, weight))
    groups = affinities_by_hand('softmax', np.asarray(x), np.asarray(weight[:2]))
    each = [affinities_by_hand(inner, np.asarray(x), np.asarray(part)) for part in (weight[2:5], weight[5:])]
    expected = np.concatenate([groups[:, :1] * each[0], groups[:, 1:] * each[1]], axis=1)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_a_noisy_gate_moves_scores_by_a_learned_amount_in_training_alone():
    moe, key, x = MixtureOfExperts(8, hidden=4, experts=4, gate=NoisyGate(), rngs=nnx.Rngs(0)), jax.random.key(5), X[0]
    scores, spread = x @ moe.router[...][:4].T, np.log1p(np.exp(x @ moe.router[...][4:].T))
    expected = jax.nn.softmax(scores + jax.random.normal(key, (6, 4)) * spread, axis=-1)
    found = moe.routing(x, key)
    np.testing.assert_array_equal(found.experts, np.argsort(-expected, axis=1, kind='stable')[:, :2])
    best = -np.sort(-np.asarray(expected), axis=1)[:, :2]
    np.testing.assert_allclose(found.weights, best / best.sum(1, keepdims=True), rtol=1e-4)
    plain = MixtureOfExperts(8, hidden=4, experts=4, rngs=nnx.Rngs(0))
    plain.router[...] = moe.router[...][:4]
    np.testing.assert_allclose(moe.routing(x).weights, plain.routing(x).weights, rtol=1e-6)
    gradient = jax.grad(lambda router: jnp.sum(NoisyGate().drawn(scores, x, router, key) ** 2))(moe.router[...])
    assert (np.abs(gradient[4:]).max(1) > 0).all()


def test_a_small_temperature_sharpens_and_noise_is_of_training():
    moe = MixtureOfExperts(8, hidden=4, experts=4, gate=SmallTemperatureGate(0.2, 0.5), rngs=nnx.Rngs(0))
    key, x = jax.random.key(5), X[0]
    scores = np.asarray(x @ moe.router[...].T, np.float64)
    for given, noisy in ((None, scores), (key, scores + 0.5 * np.asarray(jax.random.normal(key, (6, 4))))):
        shares = np.exp(noisy / 0.2)
        found = moe.routing(x, given)
        np.testing.assert_array_equal(found.experts, np.argsort(-shares, axis=1, kind='stable')[:, :2])
        best = -np.sort(-shares, axis=1)[:, :2]
        np.testing.assert_allclose(found.weights, best / best.sum(1, keepdims=True), rtol=1e-3, atol=1e-6)
    np.testing.assert_array_equal(moe(X, key), moe(X, key))
    assert not np.array_equal(moe(X, key), moe(X))
    for arguments in ({'temperature': 0.0}, {'noise': -1.0}):
        with pytest.raises(UserError, match=f'the {next(iter(arguments))} of SmallTemperatureGate is'):
            SmallTemperatureGate(**arguments)


def test_a_learned_temperature_divides_the_scores_and_has_a_gradient():
    gate, x = TemperedGate('tanh'), np.asarray(X[0], np.float64)
    moe = MixtureOfExperts(8, hidden=4, experts=4, gate=gate, rngs=nnx.Rngs(0))
    weight = np.asarray(moe.router[...], np.float64)
    shares = np.exp(np.tanh(x @ weight[:4].T) / np.exp(weight[4, 0]))
    shares /= shares.sum(1, keepdims=True)
    np.testing.assert_allclose(gate.affinities(gate.scores(X[0], moe.router[...])), shares, rtol=1e-5)
    np.testing.assert_array_equal(moe.routing(X[0]).experts, np.argsort(-shares, axis=1, kind='stable')[:, :2])
    graphdef, params = nnx.split(moe)
    found = jax.grad(lambda params: jnp.sum(jnp.square(nnx.merge(graphdef, params)(X))))(params).router[...]
    assert found[4, 0] != 0
    np.testing.assert_array_equal(found[4, 1:], 0)


def test_a_block_draws_in_training_and_not_in_evaluation():
    mlp = functools.partial(MixtureOfExperts, hidden=4, experts=4, gate=SmallTemperatureGate())
    block = Block(8, mixer=GatedConvolution, mlp=mlp, rngs=nnx.Rngs(0))
    ctx = Context.full(2, 6)
    one, other = (dataclasses.replace(ctx, deterministic=False, dropout_key=jax.random.key(seed)) for seed in (1, 2))
    np.testing.assert_array_equal(block(X, one)[0], block(X, one)[0])
    assert not np.array_equal(block(X, one)[0], block(X, other)[0])
    np.testing.assert_array_equal(block(X, ctx)[0], block(X, dataclasses.replace(one, deterministic=True))[0])


MISTAKES = {
    'groups of unequal size': ({'gate': HierarchicalGate(groups=3)}, 'groups is 3; it must divide experts, which is 4'),
    'no room': ({'capacity': 0.0}, 'capacity is 0.0; it must be positive, or None'),
    'more active than there are': ({'active': 5}, 'active is 5; it must be at most experts, which is 4'),
    'rewarded for unevenness': ({'balance': -1.0}, 'balance is -1.0; it must be at least 0'),
    'a learned nonlinearity': ({'activation': 'prelu'}, "activation 'prelu' has parameters"),
}


@pytest.mark.parametrize('case', MISTAKES)
def test_mistakes_are_named_in_one_line(case):
    options, sentence = MISTAKES[case]
    with pytest.raises(UserError, match=sentence) as caught:
        MixtureOfExperts(8, hidden=4, rngs=nnx.Rngs(0), **{'experts': 4, **options})
    assert '\n' not in str(caught.value)


def test_a_tempered_gate_names_a_nonlinearity_without_parameters():
    with pytest.raises(UserError, match="activation 'prelu' has parameters"):
        TemperedGate('prelu')


def test_levels_of_a_hierarchical_gate_are_softmax_or_laplace():
    with pytest.raises(UserError, match='inner of HierarchicalGate is SigmoidGate'):
        HierarchicalGate(inner=SigmoidGate())


def test_a_choice_that_is_not_kept_leaves_weights_their_gradient_whatever_its_network_gives():
    """As rows of no group do, whose products are not said."""
    x, (gates, up, down) = noise(2, 6, 8), (noise(3, 8, 4), noise(3, 8, 4), noise(3, 4, 8))
    experts = jnp.arange(24, dtype=jnp.int32).reshape(2, 6, 2) % 3
    kept = experts < 2

    def gradient(size):
        large = [matrices.at[2].multiply(size) for matrices in (gates, up)]

        def total(weights):
            return jnp.sum(mixed(x, experts, weights, kept, (*large, down), activation=jax.nn.silu))

        return jax.grad(total)(jnp.ones((2, 6, 2)))

    # Products beyond float32.
    np.testing.assert_array_equal(gradient(1e30), gradient(1.0))
