import pathlib

import jax
import jax.numpy as jnp
import pytest

from attnlab.configuration import config_of
from attnlab.errors import UserError
from attnlab.functional import experts
from attnlab.train import cost
from attnlab.train.cost import LayerCore, executed_flops_per_token, flops_per_token, implementations, state_bytes
from attnlab.train.setup import prepare
from configs.language import get_config
from pallas_kernels import counting, linear_scan, target

LONG_RANGE = pathlib.Path(__file__).parents[2] / 'configs' / 'long_range.py'

DIM, DEPTH, LENGTH, HIDDEN, VOCAB = 64, 4, 128, 192, 256


def setup(loop, zoo='mha', length=LENGTH, *, remat=False, activations='float32'):
    config = get_config(f'zoo={zoo}')
    with config.unlocked():
        config.update(batch_size=2, length=length)
        config.model.dim = DIM
        config.model.stack.update(depth=DEPTH, loop=loop, remat=remat)
        config.precision.activations = activations
    return prepare(config)


HEAD = 2 * DIM * VOCAB
MLP = 2 * 3 * DIM * HIDDEN


def mha(length):
    """Four projections; each query meets the half of the keys that it sees, and itself, in two products."""
    return 3 * (2 * 4 * DIM * DIM + MLP + 2 * DIM * (length + 1))


def gla(length):
    """Keys of half the width, values, a gate, decays through 16 channels; 4 heads with a state of 8 x 16."""
    projections = 2 * (2 * DIM * DIM // 2 + 3 * DIM * DIM + DIM * 16 + 16 * DIM // 2)
    return 3 * (projections + MLP) + (5 + 11) * 4 * 8 * 16


def conv(channels, *, silu):
    """Four taps and a bias, forward and for two gradients; a SiLU, its sum again, and its slope."""
    taken, back = 2 * 4 + 1, 2 * 2 * 4 + 1
    return channels * (taken + back + (2 + (taken + 2) + 5 if silu else 0))


def mamba(length):
    """Twice the width, 16 numbers of state a channel, steps through 4 channels; no MLP."""
    d = 2 * DIM
    projections = 2 * (DIM * 2 * d + d * DIM + d * (4 + 2 * 16) + 4 * d)
    return 3 * projections + conv(d, silu=True) + d * ((6 + 15) * 16 + 3 + 6)


def mamba2(length):
    """Twice the width in 2 heads with a state of 128 x 64, of which they share keys and queries; no MLP."""
    projections = 2 * (DIM * (2 * 2 * DIM + 2 * 128 + 2) + 2 * DIM * DIM)
    return 3 * projections + conv(2 * DIM + 2 * 128, silu=True) + (5 + 11) * 2 * 128 * 64


def rg_lru(length):
    """A gate, a lift, an output, and two gates in 16 blocks."""
    return 3 * (2 * (3 * DIM * DIM + 2 * 16 * 4 * 4) + MLP) + conv(DIM, silu=False) + (2 + 3) * DIM


@pytest.mark.parametrize('length', [256, 2048, 8192])
@pytest.mark.parametrize('layer', [mha, gla, mamba, mamba2, rg_lru])
def test_flops_are_those_of_the_definition(layer, length):
    assert flops_per_token(setup('scan', layer.__name__, length)) == DEPTH * layer(length) + 3 * HEAD


@pytest.mark.parametrize('zoo', ['stick_breaking', 'adaptive_entmax', 'gumbel_softmax'])
def test_maps_of_whole_rows_need_the_pairs_that_attention_needs(zoo):
    assert flops_per_token(setup('scan', zoo, 256)) == DEPTH * mha(256) + 3 * HEAD


def test_attention_to_chosen_blocks_needs_their_tokens_and_not_all():
    """Blocks of 256 tokens, four a query, which meets the mean of every block that is over, without a gradient."""
    length = 2048
    read = sum(min(t + 1, 3 * 256 + t % 256 + 1) for t in range(length)) / length
    over = sum((t + 1) // 256 for t in range(length)) / length
    layer = 3 * (2 * 4 * DIM * DIM + MLP + 4 * DIM * read) + 2 * DIM * over
    found = flops_per_token(setup('scan', 'moba', length))
    assert found == DEPTH * layer + 3 * HEAD < flops_per_token(setup('scan', 'mha', length))


def test_experts_need_the_rows_sent_to_them_on_every_device():
    """Two of eight networks, of half the hidden channels rounded up to 64, and the router."""
    layer = mha(LENGTH) - 3 * MLP + 3 * (2 * DIM * 8 + 2 * 2 * 3 * DIM * 128)
    for device in (target.current(), target.H100, target.TPU_V5E):
        with target.compiling_for(device):
            assert flops_per_token(setup('scan', 'mha,mlp=moe')) == DEPTH * layer + 3 * HEAD


def test_blocks_of_experts_are_executed_with_their_room_and_two_products_again():
    """Of 24 rows of four networks, in blocks of 16, of which there are at most five."""
    x, chosen, networks = jnp.ones((12, 8)), jnp.zeros((12, 2), int), tuple(jnp.ones((4, 8, 8)) for _ in range(3))

    def total(x, networks):
        return jnp.sum(experts._blocks(x, chosen, networks, jax.nn.silu, whole=True))

    with counting.counting():
        program = jax.make_jaxpr(jax.value_and_grad(total, (0, 1)))(x, networks).jaxpr
    product = 2 * 8 * 8
    assert [cost._flops(program, kind) for kind in ('model', 'executed')] == [9 * 24 * product, 11 * 80 * product]


@pytest.mark.parametrize(
    'zoo', ['mha', 'gla', *(pytest.param(name, marks=pytest.mark.slow) for name in ('mamba', 'rg_lru'))]
)
def test_flops_are_the_same_on_every_device_however_layers_are_looped_or_recomputed(zoo):
    expected = flops_per_token(setup('unroll', zoo))
    assert flops_per_token(setup('scan', zoo)) == flops_per_token(setup('scan', zoo, remat=True)) == expected
    for device in (target.H100, target.TPU_V5E):
        with target.compiling_for(device):
            assert flops_per_token(setup('auto', zoo, activations='bfloat16')) == expected


def test_executed_flops_are_of_the_form_that_runs_and_count_recomputation():
    model, executed = flops_per_token(setup('scan')), executed_flops_per_token(setup('scan'))
    assert model < executed
    forward = DEPTH * (mha(LENGTH) / 3)
    again = executed_flops_per_token(setup('scan', remat=True)) - executed
    assert 0.7 * forward < again < 1.3 * forward
    with target.compiling_for(target.H100):
        on_gpu = executed_flops_per_token(setup('scan', activations='bfloat16'))
    assert on_gpu > model and on_gpu != executed


@pytest.mark.parametrize('stride', [1, 2, 4])
@pytest.mark.parametrize('groups', [1, 16])
def test_a_convolution_and_its_gradients_are_three_times_the_convolution(stride, groups):
    x, kernel = jnp.zeros((2, 32, 32, 16)), jnp.zeros((3, 3, 16 // groups, 32))

    def total(x, kernel):
        convolved = jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), 'SAME', feature_group_count=groups, dimension_numbers=('NHWC', 'HWIO', 'NHWC')
        )
        return jnp.sum(convolved**2)

    def counted(function):
        return cost._flops(cost._needed(jax.make_jaxpr(function)(x, kernel)), 'model')

    assert counted(total) == 2 * 2 * (32 // stride) ** 2 * 32 * 9 * 16 / groups
    assert counted(jax.value_and_grad(total, (0, 1))) == 3 * counted(total)


def test_state_bytes_are_measured():
    bytes_each = 4 * DIM * 2 * DEPTH
    assert state_bytes(setup('unroll'), 256) == pytest.approx(256 * bytes_each, rel=0.02)


def test_implementations_name_what_runs_and_why_others_do_not():
    (entry,) = implementations(setup('unroll'))
    assert (entry.layers, entry.mixer, entry.core) == ((0, 1, 2, 3), 'Attention', 'attention')
    assert entry.implementation == 'xla' and {name for name, _ in entry.refused} == {'mosaic_gpu', 'mosaic_tpu'}


def test_a_scan_of_a_scan_is_counted_in_full():
    def twice(x, w):
        def outer(carry, _):
            return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), carry, None, length=3)[0], None

        return jax.lax.scan(outer, x, None, length=5)[0]

    x = jnp.ones((32, 32))
    assert cost._flops(jax.make_jaxpr(twice)(x, x).jaxpr, 'model') == 15 * 2 * 32**3


def test_operations_are_counted_by_their_shapes():
    x, taps = jnp.ones((2, 6, 10)), jnp.ones((4, 6, 3))
    convolution = lambda x, taps: jax.lax.conv_general_dilated(x, taps, (1,), 'VALID')  # noqa: E731
    assert cost._flops(jax.make_jaxpr(convolution)(x, taps).jaxpr, 'model') == 2 * (2 * 4 * 8) * 6 * 3
    matrices, rows, sizes = jnp.ones((3, 5, 7)), jnp.ones((8, 5)), jnp.array([2, 2, 4])
    assert cost._flops(jax.make_jaxpr(jax.lax.ragged_dot)(rows, matrices, sizes).jaxpr, 'model') == 2 * 8 * 5 * 7
    choose = lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: x @ x.T, lambda x: x, x)  # noqa: E731
    assert cost._flops(jax.make_jaxpr(choose)(jnp.ones((4, 4))).jaxpr, 'model') == 2 * 4**3
    product = lambda x, y: jnp.einsum('bij,bjk->bik', x, y)  # noqa: E731
    assert cost._flops(jax.make_jaxpr(product)(jnp.ones((2, 3, 4)), jnp.ones((2, 4, 5))).jaxpr, 'model') == 240
    assert cost._flops(jax.make_jaxpr(jnp.fft.rfft)(jnp.ones((3, 16))).jaxpr, 'model') == 5 * 3 * 16 * 4


def test_products_of_sorted_rows_are_executed_for_every_group_but_on_tpus():
    def both(rows, matrices, sizes):
        result, pull = jax.vjp(lambda *factors: jax.lax.ragged_dot(*factors, sizes), rows, matrices)
        return pull(result)

    given = jnp.ones((64, 32)), jnp.ones((8, 32, 16)), jnp.full(8, 8)
    program = jax.make_jaxpr(both)(*given).jaxpr
    executed, model = (cost._flops(program, kind) for kind in ('executed', 'model'))
    assert (executed, model) == (8 * model, 3 * 2 * 64 * 32 * 16)
    compiled = jax.jit(both).lower(*given).compile().cost_analysis()['flops']
    # Masks are counted there, too.
    assert executed < compiled < 1.3 * executed
    for device, times in ((target.H100, 8), (target.TPU_V5E, 1)):
        with target.compiling_for(device):
            assert cost._flops(program, 'executed') == times * model


def test_a_kernel_that_is_no_core_is_not_passed_over():
    x = jax.ShapeDtypeStruct((2, 256, 128), jnp.float32)
    with target.compiling_for(target.H100):
        program = jax.make_jaxpr(lambda x: linear_scan(x, x)[0])(x)
    with pytest.raises(AssertionError, match='a kernel that belongs to no core: linear_scan'):
        cost._flops(program.jaxpr, 'model')


@pytest.mark.parametrize('zoo', ['hgrn', 'bi_hgrn', 's5', 'lru'])
def test_recurrences_of_complex_numbers_are_counted(zoo):
    """However they are recomputed, though JAX has no way of keeping complex numbers for a backward pass."""
    config = config_of(LONG_RANGE, f'task=digits,zoo={zoo},size=smoke')
    expected = flops_per_token(prepare(config))
    with config.unlocked():
        config.model.stack.remat = True
    assert 0 < expected == flops_per_token(prepare(config)) < executed_flops_per_token(prepare(config))


@pytest.mark.parametrize(
    'other',
    [{'layers': ['<img src=x>']}, {'layers': 3}, {'refused': []}, {'refused': {'xla': 7}}, {'core': None}, {'more': 1}],
)
def test_what_another_wrote_of_a_core_is_damaged(other):
    core = LayerCore((0, 1), 'Attention', 'attention', 'xla', (('mosaic_gpu', 'no GPU'),))
    path = pathlib.Path('runs/x/run.json')
    assert LayerCore.described(core.describe(), path) == core
    with pytest.raises(UserError, match=r'^runs/x/run.json is damaged: it says .* of a core; put back a copy of it'):
        LayerCore.described(core.describe() | other, path)
