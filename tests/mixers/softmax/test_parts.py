"""The parts of attention, each against numbers worked out by hand or against another recipe that it must equal."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import attnlab
import pallas_kernels
from attnlab.blocks.softmax_only import EntropyMargin, EntropyMarginPerQuery
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional.dense import ScoreRows, softmax
from attnlab.functional.entmax import entmax
from attnlab.functional.penalty import Penalised
from attnlab.functional.reach import Reach
from attnlab.mixers.softmax.attention import Attention
from attnlab.nn.decays import ForgetGate
from attnlab.nn.dense_maps import AdaptiveEntmax, GumbelSoftmax, NoisySmallTemperature, NoisySoftmax
from attnlab.nn.gates import ChannelGate, HeadGate, SliceGate, SliceMLPGate
from attnlab.nn.norms import HeadOffsetRMSNorm, HeadRMSNorm
from attnlab.nn.penalties import RowPenalty
from attnlab.nn.positions import Alibi, Rope
from attnlab.nn.preludes import TokenShift
from attnlab.nn.projections import Linear
from attnlab.nn.reads import ShapedRead
from attnlab.nn.sinks import LearnedSink
from attnlab.nn.temperatures import LogLength, RootLength
from attnlab.testing.contract import compare_with_differences
from attnlab.testing.noise import noise
from attnlab.testing.tolerances import assert_close
from attnlab.train.optimizer import Muon
from attnlab.train.schedule import Constant
from attnlab.zoo import ZOO
from pallas_kernels import ClippedSoftmax, Relu, Softmax
from pallas_kernels.attention import maps

PENALISED = Penalised(Relu(), RowPenalty())
SCORES = [2.0, 1.0, 0.5, -1.0, -3.0]
DIM, HEADS, T = 16, 4, 9
RNGS = nnx.Rngs(0)


def rows(scores=SCORES, visible=None, limits=None) -> ScoreRows:
    """One row of one head."""
    scores = jnp.asarray(scores, jnp.float32)[None, None, None]
    visible = jnp.ones(scores.shape, bool) if visible is None else jnp.asarray(visible)[None, None, None]
    limits = jnp.full_like(scores, 4.0) if limits is None else limits
    return ScoreRows(scores, visible, limits, jnp.array([scores.shape[-1] - 1]))


def make(recipe: str, **overrides) -> Attention:
    return attnlab.make_mixer(recipe, DIM, **{'heads': HEADS, **overrides}, rngs=nnx.Rngs(0))


@jax.jit
def outputs(mixers, x):
    return [mixer(x, Context.full(*x.shape[:2]))[0] for mixer in mixers]


def same(one: Attention, other: Attention) -> None:
    """The two give the same output."""
    x = noise(2, T, DIM)
    actual, expected = outputs([one, other], x)
    assert_close(actual, expected, dtype=x.dtype, reduction=DIM * T, what='y')


def with_parameters_of(mixer: Attention, other: Attention) -> Attention:
    """The mixer with the projections of the other."""
    for name in ('query', 'key', 'value', 'output'):
        getattr(mixer, name).weight[...] = getattr(other, name).weight[...]
    return mixer


@pytest.mark.parametrize(
    ('alpha', 'expected'),
    [
        (1.25, [0.712040, 0.199831, 0.087320, 0.000808, 0]),
        (1.5, [0.814649, 0.162070, 0.023280, 0, 0]),
        (2.0, [1, 0, 0, 0, 0]),
    ],
)
def test_entmax_by_hand(alpha, expected):
    weights = entmax(*rows()[:1], jnp.array([alpha]), rows().visible)
    np.testing.assert_allclose(weights[0, 0, 0], expected, atol=2e-6)
    hidden = entmax(rows().scores, jnp.array([alpha]), jnp.zeros((1, 1, 1, 5), bool))
    assert not hidden.any()


def test_entmax_is_a_softmax_as_alpha_nears_one():
    with jax.enable_x64(True):
        scores = jnp.asarray(SCORES)[None, None, None]
        expected = jax.nn.softmax(scores)
        near, nearer = (
            np.abs(entmax(scores, jnp.array([alpha]), scores < 9) - expected).max() for alpha in (1.01, 1.001)
        )
    # The difference is of first order in alpha - 1.
    assert nearer < 2e-3 and 8 < near / nearer < 12


def test_gradients_of_entmax_are_differences():
    with jax.enable_x64(True):
        scores = jnp.asarray(np.random.default_rng(0).standard_normal((1, 3, 4, 6)))
        visible = jnp.broadcast_to(
            jnp.arange(6)[None, None, None] < jnp.array([6, 3, 1, 0])[None, None, :, None], scores.shape
        )
        along = jnp.cos(jnp.arange(scores.size, dtype=scores.dtype)).reshape(scores.shape)

        def loss(inputs):
            return jnp.vdot(along, entmax(*inputs, visible))

        compare_with_differences('entmax', loss, (scores, jnp.array([1.3, 1.5, 1.9])))


def test_learned_exponents_stay_in_range():
    part = AdaptiveEntmax(heads=5, rngs=nnx.Rngs(0))
    part.raw[...] = jnp.array([-100.0, -1.0, 0.0, 1.0, 100.0])
    np.testing.assert_allclose(part.alpha(), [1.01, 1 + 1 / (1 + math.e), 1.5, 1 + 1 / (1 + 1 / math.e), 2], rtol=1e-6)
    direct = AdaptiveEntmax(heads=64, direct=True, rngs=nnx.Rngs(0))
    assert 1.01 <= float(direct.raw[...].min()) < float(direct.raw[...].max()) <= 2
    np.testing.assert_array_equal(direct.alpha(), direct.raw[...])


def test_samples_are_of_the_softmax():
    hard = GumbelSoftmax(heads=1, hard=True, rngs=RNGS)
    keys = jax.random.split(jax.random.key(0), 4000)
    drawn = jax.jit(jax.vmap(lambda key: hard(rows(), key)))(keys)[:, 0, 0, 0]
    assert set(np.unique(drawn)) == {0.0, 1.0} and (drawn.sum(axis=-1) == 1).all()
    expected = softmax(rows().scores, rows().visible)
    # Five standard deviations of a mean of 4000.
    np.testing.assert_allclose(drawn.mean(axis=0), expected[0, 0, 0], atol=5 * 0.5 / math.sqrt(4000))
    np.testing.assert_array_equal(hard(rows(), None), expected)


def test_hard_samples_have_the_gradient_of_soft_ones():
    key, along = jax.random.key(3), jnp.arange(5.0)
    parts = [GumbelSoftmax(heads=1, temperature=0.7, hard=hard, rngs=RNGS) for hard in (True, False)]
    hard, soft = (
        jax.grad(lambda scores, part=part: jnp.vdot(along, part(rows()._replace(scores=scores), key)[0, 0, 0]))(
            rows().scores
        )
        for part in parts
    )
    np.testing.assert_array_equal(hard, soft)
    assert np.abs(soft).max() > 0
    cold = GumbelSoftmax(heads=1, temperature=0.5, rngs=RNGS)(rows(), None)
    np.testing.assert_allclose(cold, softmax(2 * rows().scores, rows().visible), rtol=1e-6)
    with pytest.raises(UserError, match=r'temperature of GumbelSoftmax is 0\.0; it must be positive'):
        GumbelSoftmax(heads=1, temperature=0.0, rngs=RNGS)


def test_noise_lowers_the_greatest_score_alone():
    part, key = NoisySoftmax(heads=1, strength=0.3, rngs=RNGS), jax.random.key(1)
    weights = part(rows(), key)[0, 0, 0]
    xi = abs(float(jax.random.normal(key, (1, 1, 1, 1))[0, 0, 0, 0]))
    lowered = jnp.array([2.0 - 0.3 * (4.0 - 2.0) * xi, *SCORES[1:]])
    np.testing.assert_allclose(weights, jax.nn.softmax(lowered), rtol=1e-5)
    np.testing.assert_allclose(part(rows(), None)[0, 0, 0], jax.nn.softmax(jnp.array(SCORES)), rtol=1e-6)
    # A key that points where the query does is left alone.
    aligned = rows()._replace(limits=rows().scores)
    np.testing.assert_allclose(part(aligned, key)[0, 0, 0], jax.nn.softmax(jnp.array(SCORES)), rtol=1e-6)


@pytest.mark.parametrize(
    ('make', 'said'),
    [
        (lambda: NoisySoftmax(heads=1, strength=-0.3, rngs=RNGS), 'the strength of NoisySoftmax is -0.3'),
        (lambda: RowPenalty(normalisation=-1.0), 'normalisation of RowPenalty is -1.0'),
        (lambda: RowPenalty(flatness=-1.0), 'flatness of RowPenalty is -1.0'),
        (lambda: EntropyMargin(weight=-1e-5), 'weight of EntropyMargin is -1e-05'),
        (lambda: EntropyMarginPerQuery(weight=-1e-5), 'weight of EntropyMarginPerQuery is -1e-05'),
    ],
)
def test_noise_and_penalties_that_would_do_the_opposite_are_refused(make, said):
    with pytest.raises(UserError, match=re.escape(f'{said}; it must be at least 0')):
        make()


def test_a_small_temperature_with_noise_keeps_few_keys_and_its_gradient():
    part, key = NoisySmallTemperature(heads=1, temperature=0.1, noise=2.0, kept=2, rngs=RNGS), jax.random.key(1)
    noisy = np.asarray(SCORES) + 2.0 * np.asarray(jax.random.normal(key, (1, 1, 1, 5)))[0, 0, 0]
    kept = np.where(noisy >= np.sort(noisy)[-2], noisy / 0.1, -np.inf)
    np.testing.assert_allclose(part(rows(), key)[0, 0, 0], jax.nn.softmax(kept), rtol=1e-4, atol=1e-6)
    still = np.array([20.0, 10.0, -np.inf, -np.inf, -np.inf])
    np.testing.assert_allclose(part(rows(), None)[0, 0, 0], jax.nn.softmax(still), rtol=1e-4, atol=1e-7)
    plain = NoisySmallTemperature(heads=1, temperature=1.0, noise=0.0, kept=None, rngs=RNGS)
    np.testing.assert_allclose(plain(rows(), key)[0, 0, 0], jax.nn.softmax(jnp.array(SCORES)), rtol=1e-6)
    for arguments in ({'temperature': 0.0}, {'noise': -1.0}):
        with pytest.raises(UserError, match=f'the {next(iter(arguments))} of NoisySmallTemperature is'):
            NoisySmallTemperature(heads=1, rngs=RNGS, **arguments)


@pytest.mark.parametrize('part', [GumbelSoftmax, NoisySoftmax, AdaptiveEntmax, NoisySmallTemperature])
def test_hidden_keys_and_rows_weigh_nothing(part):
    made, key = part(heads=1, rngs=nnx.Rngs(0)), jax.random.key(0)
    some = made(rows(visible=[False, True, False, True, False]), key)[0, 0, 0]
    assert (some[jnp.array([0, 2, 4])] == 0).all() and abs(float(some.sum()) - 1) < 1e-6
    assert not made(rows(visible=[False] * 5), key).any()


def test_draws_differ_by_key_and_not_without():
    mixer, x = make('gumbel_softmax'), noise(1, T, DIM)

    @jax.jit
    def run(key):
        ctx = Context(positions=Context.full(1, T).positions, deterministic=False, dropout_key=key)
        return mixer(x, ctx)[0]

    one, other = run(jax.random.key(0)), run(jax.random.key(1))
    assert np.abs(one - other).max() > 0.01
    np.testing.assert_array_equal(one, run(jax.random.key(0)))


def test_reluformer_by_hand():
    temperature = RootLength(1, heads=1, rngs=RNGS)(jnp.zeros((1, 1, 1)), jnp.full((1, 1), 5.0))
    n = len(SCORES)
    weights = one_row(SCORES, temperature, Relu(), n)
    np.testing.assert_allclose(weights, [1.264911, 0.632456, 0.316228, 0, 0], atol=2e-6)


def one_row(scores, temperature, weights, n):
    """The weights that one query gives to keys of these scores."""
    return pallas_kernels.attention(
        jnp.ones((1, 1, 1, 1)),
        jnp.asarray(scores).reshape(1, n, 1, 1),
        jnp.eye(n).reshape(1, n, 1, n),
        weights=weights,
        scale=1.0,
        causal=False,
        temperature=temperature,
    )[0, 0, 0]


def test_log_length_starts_at_one_on_average():
    part = LogLength(8, heads=2, length=1024, bias=True, rngs=RNGS)
    factors = part(jnp.zeros((1, 1024, 8)), jnp.arange(1.0, 1025)[None])
    np.testing.assert_allclose(factors.mean(axis=(0, 1)), [1, 1], rtol=1e-5)
    np.testing.assert_allclose(part.scale[...], 0.168, atol=6e-4)
    part.scale[...], part.bias[...] = jnp.array([0.5, 2.0]), jnp.array([0.0, 1.0])
    np.testing.assert_allclose(
        part(jnp.zeros((1, 1, 8)), jnp.full((1, 1), 7.0))[0, 0], [0.5 * math.log(7), 2 * math.log(7) + 1], rtol=1e-6
    )


def test_scalable_softmax_is_softmax_where_the_factor_is_one():
    mixer = make('ssmax_bias')
    mixer.temperature.scale[...], mixer.temperature.bias[...] = jnp.zeros(HEADS), jnp.ones(HEADS)
    same(mixer, make('mha'))


@pytest.mark.parametrize(
    ('window', 'sinks', 'causal', 'expected'),
    [
        (None, 0, True, [1, 2, 3, 4, 5, 6]),
        (3, 0, True, [1, 2, 3, 3, 3, 3]),
        (2, 1, True, [1, 2, 3, 3, 3, 3]),
        (2, 0, False, [2, 3, 3, 3, 3, 2]),
        (2, 1, False, [2, 3, 4, 4, 4, 3]),
    ],
)
def test_counts_are_of_the_keys_that_are_seen(window, sinks, causal, expected):
    mixer = make('mha', window=window, sinks=sinks, causal=causal)
    np.testing.assert_array_equal(mixer.reach.counts(Context.full(1, 6).positions, None)[0], expected)
    _, seen = mixer.read_weights(noise(1, 6, DIM), Context.full(1, 6))
    np.testing.assert_array_equal(seen[0].sum(axis=-1), expected)


def test_special_cases_are_other_recipes():
    plain = make('mha')
    capped = make('soft_cap', weights=Softmax(soft_cap=1e6))
    unsunk = make('learned_sink')
    unsunk.sink.scores[...] = jnp.full(HEADS, -jnp.inf)
    unclipped = make('clipped_softmax', weights=ClippedSoftmax(1.0, 0.0))
    wide = make('sliding_window', window=T)
    nope, entmax15 = make('nope'), make('entmax15')
    never = with_parameters_of(make('forgetting'), nope)
    never.forget.linear.weight[...], never.forget.linear.bias[...] = jnp.zeros((DIM, HEADS)), jnp.full(HEADS, 100.0)
    open_gates = make('gated_attention')
    open_gates.gate.bias[...] = jnp.full(HEADS, 100.0)
    bisected = make('adaptive_entmax')
    bisected.weights.raw[...] = jnp.zeros(HEADS)
    pairs = (
        (capped, plain),
        (unsunk, plain),
        (unclipped, plain),
        (wide, plain),
        (never, nope),
        (open_gates, plain),
        (bisected, entmax15),
        (make('gumbel_softmax'), plain),
        (make('noisy_softmax'), plain),
    )
    x = noise(2, T, DIM)
    mixers = [*(one for one, _ in pairs), plain, nope, entmax15]
    found = dict(zip(map(id, mixers), outputs(mixers, x), strict=True))
    for place, (one, other) in enumerate(pairs):
        assert_close(found[id(one)], found[id(other)], dtype=x.dtype, reduction=DIM * T, what=f'y of pair {place}')


def test_attention_of_qwen3_next_with_open_gates_is_grouped_query_attention():
    assert ZOO['gated_attention_qwen'].spec == ZOO['qwen3_next'].pattern[3]
    mixer = make('gated_attention_qwen', heads=2)
    parts = {'qk_norm': HeadOffsetRMSNorm, 'position': Rope(base=1e7, fraction=0.25)}
    plain = with_parameters_of(make('gqa', heads=2, kv_heads=1, **parts), mixer)
    mixer.gate.linear = Linear(DIM, DIM, bias=True, rngs=nnx.Rngs(0))
    mixer.gate.linear.bias[...] = jnp.full(DIM, 1e3)
    found, expected = outputs([mixer, plain], noise(2, T, DIM))
    assert_close(found, expected, dtype=found.dtype, reduction=DIM * T, what='y')


def test_forget_gates_by_hand():
    """Equal scores: what remains is the product of the gates of all tokens after the key."""
    mixer = make('forgetting')
    mixer.query.weight[...] = jnp.zeros((DIM, DIM))
    x = noise(1, 3, DIM)
    gates = jax.nn.sigmoid(mixer.forget.linear(x))[0]  # t h
    weights, _ = mixer.read_weights(x, Context.full(1, 3))
    left = np.stack([gates[1] * gates[2], gates[2], np.ones(HEADS)])
    np.testing.assert_allclose(weights[0, :, 2].T, left / left.sum(axis=0), rtol=1e-5)


def test_what_gates_have_forgotten_is_summed_since_the_key():
    mixer, x = make('forgetting'), noise(1, 5, DIM)
    log_forget = mixer.forget(x)[0]
    state = mixer.init_state(1, 5, x.dtype)
    for start, stop in ((0, 3), (3, 4), (4, 5)):
        ctx = Context.full(1, stop - start, start=start)
        _, state = mixer(x[:, start:stop], ctx, state)
    expected = np.stack([np.asarray(log_forget[key + 1 :].sum(axis=0)) for key in range(5)])
    np.testing.assert_allclose(state.cache.entries.forgotten[0], expected, atol=1e-6)


def test_a_shift_by_hand():
    shift = TokenShift(2, heads=1, channels=2, rngs=nnx.Rngs(0))
    shift.gate.weight[...] = jnp.array([[1.0], [0.0]])
    x = jnp.array([[[0.0, 0.0], [math.log(3), 0.0]]])
    keys = jnp.array([[[[2.0, 4.0]], [[6.0, 8.0]]]])
    shifted, _ = shift(keys, x, None)
    # Gates of a half and of three quarters; nothing comes before the first token.
    np.testing.assert_allclose(shifted[0, :, 0], [[1, 2], [0.75 * 2 + 0.25 * 6, 0.75 * 4 + 0.25 * 8]], rtol=1e-6)
    apart, _ = shift(keys, x, jnp.array([[1, 2]], jnp.int32))
    np.testing.assert_allclose(apart[0, 1, 0], [1.5, 2], rtol=1e-6)


def test_shaped_attention_starts_as_the_identity():
    mixer, x = make('shaped_attention'), noise(2, T, DIM)
    y = jax.jit(lambda x: mixer(x, Context.full(2, T))[0])(x)
    assert_close(y, mixer.output(mixer.value(x)), dtype=x.dtype, reduction=DIM * T, what='y')


def test_a_read_of_one_head_by_hand():
    part = ShapedRead(heads=1, rngs=RNGS)
    part.own[...], part.read[...], part.mean[...] = jnp.array([2.0]), jnp.array([3.0]), jnp.array([5.0])
    one = jnp.ones((1, 1, 1, 1))
    np.testing.assert_allclose(part(one, 10 * one, 100 * one), 2 + 30 - 500)


def test_muon_orthogonalises_the_maps_of_gates_head_by_head():
    """What one head's gate learns does not depend on the gradients of another's."""
    gate = SliceMLPGate(8, heads=2, channels=5, rngs=nnx.Rngs(0))
    params = nnx.state(gate, nnx.Param)
    transform = Muon(peak_lr=1.0, schedule=Constant(), weight_decay=0.0, clip=None).transform(params, 10)
    first, other = (jax.tree.map(jnp.ones_like, params), jax.tree.map(lambda p: jnp.ones_like(p).at[1].mul(-3), params))
    moved = [transform.update(each, transform.init(params), params)[0] for each in (first, other)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[0], b[0], rtol=1e-5), *moved)


def test_gates_by_hand():
    x = noise(2, 3, 8)
    slices = np.asarray(x).reshape(2, 3, 2, 4)
    sigmoid = lambda z: 1 / (1 + np.exp(-z))  # noqa: E731
    quarter = math.log(0.25 / 0.75)
    one = SliceGate(8, heads=2, channels=5, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(
        one(x)[..., 0], sigmoid(np.einsum('bthk,hk->bth', slices, one.weight[..., 0]) + quarter), rtol=1e-5
    )
    two = SliceMLPGate(8, heads=2, channels=5, rngs=nnx.Rngs(0))
    hidden = np.maximum(np.einsum('bthk,hkf->bthf', slices, two.up[...]), 0)
    np.testing.assert_allclose(two(x)[..., 0], sigmoid(np.einsum('bthf,hf->bth', hidden, two.down[...])), rtol=1e-5)
    three = HeadGate(8, heads=2, channels=5, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(three(x)[..., 0], sigmoid(three.linear(x) + quarter), rtol=1e-5)
    four = ChannelGate(8, heads=2, channels=5, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(four(x).reshape(2, 3, 10), sigmoid(four.linear(x)), rtol=1e-5)
    with pytest.raises(UserError, match=r'heads is 3; it must divide dim, which is 8$'):
        SliceGate(8, heads=3, channels=5, rngs=RNGS)


def test_norms_of_heads():
    x = noise(2, 3, 4, 5)
    for apart in (False, True):
        norm = HeadRMSNorm(5, heads=4, apart=apart, eps=0.0, rngs=RNGS)
        gain = noise(*norm.scale.shape, seed=1)
        norm.scale[...] = gain
        size = np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True))
        expected = np.asarray(x) / size * np.broadcast_to(gain, (4, 5))
        np.testing.assert_allclose(norm(x), expected, rtol=1e-5)


def test_normed_queries_and_keys_bound_the_scores():
    mixer, x = make('qk_norm'), 100 * noise(1, T, DIM)
    weights, seen = mixer.read_weights(x, Context.full(1, T))
    # |s| is at most sqrt(key_dim) = 2, so no weight is below e^-4 / T.
    assert float(jnp.min(jnp.where(seen[:, None], weights, 1))) > math.exp(-4) / T


def test_a_penalty_of_rows_by_hand():
    part = RowPenalty(normalisation=2.0, flatness=3.0, margin=0.1)
    q, k = jnp.ones((1, 2, 1, 1)), jnp.array([3.0, 1.0]).reshape(1, 2, 1, 1)
    actual = part(q, k, jnp.array([[1.0, 2.0]]), None, Reach())
    # Rows (3) and (3, 1) / 2: sums 3 and 2, entropies 0 and that of (3/4, 1/4).
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    expected = 2 * (math.log(3) + math.log(2)) + 3 * (entropy - 0.1 * math.log(2))
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    assert part(q, -k, jnp.array([[1.0, 2.0]]), None, Reach()) == 0


def penalty_by_definition(mixer: Attention, x: jax.Array) -> jax.Array:
    """That of `RowPenalty()`, from the weights themselves."""
    weights, seen = mixer.read_weights(x, Context.full(*x.shape[:2]))
    sums, counts = weights.sum(axis=-1), seen.sum(axis=-1)[:, None]
    present = sums > 0
    sums = jnp.where(present, sums, 1)
    shares = weights / sums[..., None]
    entropies = -jnp.sum(jnp.where(shares > 0, shares * jnp.log(jnp.where(shares > 0, shares, 1)), 0), axis=-1)
    rows = jnp.abs(jnp.log(sums)) + jax.nn.relu(entropies - 0.7 * jnp.log(counts))
    return jnp.sum(jnp.mean(jnp.where(present, rows, 0), axis=1))


@pytest.mark.parametrize('reach', [{}, {'window': 2, 'sinks': 3}, {'window': 2, 'sinks': 3, 'causal': False}], ids=str)
def test_training_pays_the_penalty_and_evaluation_does_not(reach):
    mixer, x = make('reluformer', **reach), noise(1, T, DIM)
    without = make('reluformer', weights=Relu(), **reach)

    @jax.jit
    def gradients(mixers):
        trained = Context(positions=Context.full(1, T).positions, deterministic=False, dropout_key=jax.random.key(0))
        return [
            jax.grad(lambda mixer, ctx=ctx: jnp.sum(mixer(x, ctx)[0]))(mixer).query.weight[...]
            for mixer, ctx in zip(mixers, (trained, Context.full(1, T), trained), strict=True)
        ] + [jax.grad(penalty_by_definition)(mixers[2], x).query.weight[...]]

    paid, evaluated, free, expected = gradients([mixer, mixer, without])
    np.testing.assert_allclose(evaluated, free, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(paid - free, expected, rtol=1e-3, atol=1e-4)
    assert np.abs(expected).max() > 1e-1


@pytest.mark.parametrize('weights', [Softmax(), Relu(soft_cap=1.0)], ids=repr)
def test_a_penalty_is_of_the_rows_of_its_map(weights):
    """The cap would bend scores that the penalty takes as they are."""
    said = re.escape(f'rows of Relu(soft_cap=None); the weights are {weights}')
    with pytest.raises(UserError, match=said):
        Penalised(weights, RowPenalty())


@pytest.mark.parametrize(
    ('parts', 'message'),
    [
        ({'forget': ForgetGate, 'causal': False}, 'a forget gate needs causal attention'),
        ({'forget': ForgetGate, 'window': 4, 'sinks': 1}, 'sinks are there to stay'),
        ({'forget': ForgetGate, 'weights': GumbelSoftmax}, 'GumbelSoftmax takes neither a forget gate nor'),
        ({'sink': LearnedSink, 'weights': Relu()}, 'Relu takes no learned sink'),
        ({'weights': PENALISED, 'position': Alibi()}, 'RowPenalty is a penalty of products .* there is also slopes'),
        ({'weights': PENALISED, 'forget': ForgetGate}, 'RowPenalty is a penalty of products .* there is also forget'),
    ],
)
def test_parts_that_exclude_each_other(parts, message):
    with pytest.raises(UserError, match=message):
        Attention(DIM, heads=HEADS, rngs=RNGS, **parts)


def test_every_map_of_the_core_has_a_recipe():
    named = {recipe.spec.weights.target.rsplit('.', 1)[1] for recipe in ZOO.values() if 'weights' in recipe.pattern[0]}
    # The softmax with a fixed scale has a learned one as a recipe, one entmax another, and one is for evaluation.
    # The squared rectifier is what gated attention units are made with.
    others = {'ScalableSoftmax', 'Entmax', 'AdaptiveSoftmax', 'SquaredRelu'}
    known = {
        name
        for name in maps.__all__
        if isinstance(getattr(maps, name), type) and issubclass(getattr(maps, name), maps.WeightMap)
    }
    assert known - {'WeightMap'} - others <= named
