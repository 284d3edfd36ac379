"""The matcher against closed forms, and against a state that is not what it claims to be."""

import json
import math
import pathlib

import jax.numpy as jnp
import pytest
from rich.console import Console

from attnlab.compare import match as compare_match
from attnlab.compare.equality import unmatched
from attnlab.compare.match import MULTIPLES, Matched, find_knobs, match, match_recipes, shown
from attnlab.compare.measures import measure
from attnlab.config import spec, value_at
from attnlab.configuration import config_of
from attnlab.errors import UserError
from attnlab.mixers.state_space.selective import StateSpaceDual
from attnlab.tables import Printer
from attnlab.train.setup import prepare
from attnlab.zoo import ZOO
from configs import images, language

VOCAB, DEPTH, HEADS, RANK = 256, 4, 4, 16


class Doubled(StateSpaceDual):
    """A mixer that remembers twice what its `state` says."""

    def init_state(self, batch, length, dtype):
        state = super().init_state(batch, length, dtype)
        return state._replace(memory=jnp.concatenate([state.memory] * 2, axis=2))


def config(name):
    made = language.get_config(f'zoo={name}')
    with made.unlocked():
        made.length = 32
        made.batch_size = 2
    return made


def sizes(config):
    """Width, depth, mixer and hidden width."""
    stack = config.model.stack
    mixer, mlp = stack.blocks[0].mixer, stack.blocks[0].mlp
    dim, hidden = config.model.dim, None if mlp is None else mlp.hidden
    return dim, stack.depth, mixer, 64 * math.ceil(8 * dim / 192) if hidden is None else hidden


def outside(d, layers, norms):
    """Embedding, head and norms."""
    return 2 * VOCAB * d + d + layers * norms * d


def mha_parameters(d, depth, mixer, hidden):
    return outside(d, depth, 2) + depth * (4 * d * d + 3 * d * hidden)


def gla_parameters(d, depth, mixer, hidden):
    """Queries and keys of d/2, values, gate and output of d, the decay by a map of rank 16, a norm of d/h gains."""
    half = d // 2
    layer = 2 * d * half + 3 * d * d + (d * RANK + RANK * half + half) + d // mixer.heads + 3 * d * hidden
    return outside(d, depth, 2) + depth * layer


def mamba2_parameters(d, depth, mixer, hidden):
    """Inner width 2d, a convolution of width 4 with bias, three numbers a head, a norm of 2d."""
    n, inner = mixer.state, 2 * d
    heads, mixed = inner // mixer.head_dim, 2 * d + 2 * n
    layer = d * (inner + mixed + heads) + 5 * mixed + 3 * heads + inner + inner * d
    return outside(d, depth, 1) + depth * layer


@pytest.mark.parametrize(
    ('name', 'closed'),
    [
        ('mamba2', mamba2_parameters),
        pytest.param('mha', mha_parameters, marks=pytest.mark.slow),
        pytest.param('gla', gla_parameters, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize('target', [490_000.0, pytest.param(1_000_000.0, marks=pytest.mark.slow)])
def test_parameters(name, closed, target):
    before = config(name)
    found = match(before, 'params', target, 0.01, ZOO[name].knobs)
    assert closed(*sizes(found.config)) == found.value == pytest.approx(target, rel=found.tolerance)
    assert found.tolerance == 0.01 or name == 'mamba2'
    assert measure('params')(prepare(found.config)) == found.value
    # What carries no memory was adjusted, in sizes that somebody would choose.
    dim, _, mixer, hidden = sizes(found.config)
    assert dim % 8 == hidden % 8 == 0 and 'state' not in found.adjusted and 'key_dim' not in found.adjusted
    if name == 'mamba2':
        assert (mixer.state, mixer.head_dim) == (128, 64)
    else:
        assert dim // mixer.heads == 32 and mixer.key_dim is None


def test_the_hidden_width_comes_first_and_the_row_says_what_it_was():
    found = match(config('gla'), 'params', 918_656.0, 0.01, ZOO['gla'].knobs)
    assert shown(found.adjusted) == 'hidden 376 (its own: 384)'


def test_depth_comes_before_width():
    """The target is what a width of 160 has exactly; a depth that reaches it within the tolerance is taken first."""
    base = config('mamba2')
    width, depth, mixer, hidden = sizes(base)
    target = float(mamba2_parameters(160, depth, mixer, hidden))
    found = match(base, 'params', target, 0.02, ZOO['mamba2'].knobs)
    assert shown(found.adjusted) == 'depth 12 (its own: 8)' and found.config.model.dim == width == 128
    assert found.tolerance == 0.02 and found.value == mamba2_parameters(128, 12, mixer, hidden) != target
    # Which only the width has more closely.
    assert 'width 160' in shown(match(base, 'params', target, 0.001, ZOO['mamba2'].knobs).adjusted)


def test_an_accelerator_wants_multiples_of_its_tiles():
    found = match(config('mha'), 'params', 1_110_000.0, 0.01, ZOO['mha'].knobs, multiples=MULTIPLES['accelerator'])
    dim, _, _, hidden = sizes(found.config)
    assert dim % 128 == hidden % 128 == 0 and (dim, hidden) == (128, 512)
    # Of `based` the keys of the window follow from the width, and stay as they are.
    (key,) = find_knobs(config('based'), ZOO['based'].knobs, MULTIPLES['any'])['state'].keys
    assert key.endswith('.mixer.key_dim') and value_at(config('based'), key) == 16
    state = find_knobs(config('mamba2'), ZOO['mamba2'].knobs, MULTIPLES['accelerator'])['state']
    assert state.step == 64


def test_a_tolerance_that_was_widened_is_said(tmp_path, capsys, monkeypatch):
    found = Matched(config('mamba2'), {}, 500_000.0, 0.04)
    monkeypatch.setattr(compare_match, 'match', lambda *arguments, **settings: found)
    printer = Printer(Console(width=80, color_system=None))
    match_recipes({'mamba2': found.config}, 'params', '490000', 0.01, tmp_path, printer)
    said = 'mamba2: no sizes in multiples of 8 are within 1.0%; widened to 4.0%'
    assert said in ' '.join(capsys.readouterr().out.split())


def test_states():
    """Memories of k x v in float32 and a segment; Mamba-2 keeps three inputs too, attention every key and value."""
    found = match(config('gla'), 'state_bytes@8192', 100_000.0, 0.01, ZOO['gla'].knobs)
    d, _, mixer, _ = sizes(found.config)
    assert found.value == DEPTH * (4 * mixer.key_dim * d + 4) and found.tolerance == 0.02
    assert shown(found.adjusted) == 'key_dim 48 (its own: 16)' and d == 128
    found = match(config('mamba2'), 'state_bytes@64', 400_000.0, 0.01, ZOO['mamba2'].knobs)
    d, depth, mixer, _ = sizes(found.config)
    n = mixer.state
    closed = depth * (4 * n * 2 * d + 3 * (4 * (2 * d + 2 * n) + 4) + 4)
    assert found.value == closed == pytest.approx(400_000, rel=found.tolerance) and n % 8 == 0
    found = match(config('mha'), 'state_bytes@64', 132_112.0, 0.01, ZOO['mha'].knobs)
    d, _, mixer, _ = sizes(found.config)
    assert found.value == DEPTH * (64 * (4 * HEADS * 2 * mixer.key_dim + 4) + 4) and mixer.key_dim == 16


def test_a_state_below_the_range_of_its_paper_is_refused_unless_told():
    settings = {'by': 'state_bytes@64', 'target': 100_000.0, 'tolerance': 0.02, 'knobs': ZOO['mamba2'].knobs}
    smallest = ZOO['mamba2'].smallest_state
    refused = r'wants state 8 \(its own: 128\), and the smallest that its paper tries is 16; --below_range takes it'
    with pytest.raises(UserError, match=refused):
        match(config('mamba2'), **settings, smallest_state=smallest)
    assert shown(match(config('mamba2'), **settings).adjusted) == 'state 8 (its own: 128)'


@pytest.mark.parametrize(('name', 'tries'), [('gla', 'is 128'), ('retnet', 'is not known')])
def test_a_state_below_the_recipes_own_is_refused_though_its_paper_tries_only_larger_ones(name, tries, tmp_path):
    with (smaller := config(name)).unlocked():
        smaller.model.stack.blocks[0].mixer.key_dim = 8
    target = str(measure('state_bytes@64')(prepare(smaller)))
    rest = ('state_bytes@64', target, 0.01, tmp_path, Printer(Console(quiet=True)))
    refused = rf'{name}: state_bytes@64 = \d+ wants key_dim 8 \(its own: \d+\), and the smallest .* tries {tries}'
    with pytest.raises(UserError, match=refused):
        match_recipes({name: config(name)}, *rest)
    found = match_recipes({name: config(name)}, *rest, below_range=True)
    assert found[name].adjusted['key_dim'].value == 8 and found[name].value == float(target)


def test_a_state_above_the_recipes_own_is_not_below_any_range():
    taken = match(config('gla'), 'state_bytes@8192', 100_000.0, 0.01, ZOO['gla'].knobs, smallest_state=None)
    assert taken.adjusted['key_dim'].value == 48


def test_a_state_that_no_argument_sets_is_not_matched_by_others():
    with pytest.raises(UserError, match=r'state_bytes@64 is \d+, and no argument of the mixer sets its state alone'):
        match(config('base_conv'), 'state_bytes@64', 100_000.0, 0.01, ZOO['base_conv'].knobs)


def test_a_state_of_another_size_than_it_says_is_measured_as_it_is():
    honest, lying = config('mamba2'), config('mamba2')
    with lying.unlocked():
        block = lying.model.stack.blocks[0]
        kwargs = {name: block.mixer[name] for name in block.mixer if name != 'target'}
        block.mixer = spec(Doubled, **kwargs)
    bytes_of = measure('state_bytes@64')
    as_said, as_is = bytes_of(prepare(honest)), bytes_of(prepare(lying))
    assert as_is - as_said == 2 * DEPTH * 4 * 128 * 2 * 128
    assert unmatched([as_said, as_is], 0.01)
    solved = [match(one, 'state_bytes@64', 600_000.0, 0.02, ZOO['mamba2'].knobs) for one in (honest, lying)]
    first, second = (sizes(one.config) for one in solved)
    assert first[0] * first[2].state == pytest.approx(2 * second[0] * second[2].state, rel=0.15)
    assert not unmatched([one.value for one in solved], max(one.tolerance for one in solved))


def test_time():
    assert 0 < measure('decode_ms')(prepare(config('mingru'))) < 1000
    with pytest.raises(UserError, match='decode_ms is for models that decode tokens one by one; this one does not'):
        measure('decode_ms')(prepare(images.get_config('zoo=mha,size=tiny')))


@pytest.mark.slow
def test_operations():
    base = config('mingru')
    with base.unlocked():
        base.model.stack.depth = 1
    wanted = 1.1 * measure('train_flops')(prepare(base))
    found = match(base, 'train_flops', wanted, 0.03, ZOO['mingru'].knobs)
    assert measure('train_flops')(prepare(found.config)) == found.value == pytest.approx(wanted, rel=0.03)


@pytest.mark.parametrize(
    ('layout', 'more'), [('pyramid', 2.0), pytest.param('paper', 4.0, marks=pytest.mark.slow)], ids=['own', 'paper']
)
def test_a_pyramid_is_matched_by_its_width(layout, more):
    """Hidden widths and heads that are said keep their ratio to it, at every resolution."""
    base = images.get_config(f'zoo=pvt,layout={layout}')
    own = measure('params')(prepare(base))
    found = match(base, 'params', more * own, 0.05, ZOO['pvt'].knobs)
    assert found.tolerance == 0.05
    assert found.value == measure('params')(prepare(found.config)) == pytest.approx(more * own, rel=0.05)
    assert set(found.adjusted) == {'width'} and found.config.model.dim > base.model.dim
    for now, before in zip(resolutions(found.config), resolutions(base), strict=True):
        heads = before.mixer.heads * found.config.model.dim // base.model.dim
        assert now.mixer.heads == (heads if before.mixer.heads > 1 else 1)
        if before.mlp.hidden is not None:
            assert now.mlp.hidden * base.model.dim == before.mlp.hidden * found.config.model.dim


def resolutions(config):
    """A block of every resolution."""
    return [each.stack.blocks[0] for each in config.model.stack.resolutions]


@pytest.mark.slow
def test_matched_configs_can_be_trained(tmp_path):
    names = ('mha', 'gla')
    found = match_recipes({n: config(n) for n in names}, 'params', 'mha', 0.005, tmp_path, Printer(Console(quiet=True)))
    wanted = measure('params')(prepare(config('mha')))
    assert found['mha'].value == wanted
    again = config_of(tmp_path / 'gla.py')
    assert measure('params')(prepare(again)) == found['gla'].value == pytest.approx(wanted, rel=0.005)
    assert json.loads((tmp_path / 'gla.json').read_text())['model']['dim'] == found['gla'].config.model.dim


def test_what_cannot_be_built_says_why():
    never = config('mha')
    with never.unlocked():
        never.steps = 0
    with pytest.raises(UserError, match=r'built, nor any near params = 1e\+06: config.steps is 0; it must be'):
        match(never, 'params', 1e6, 0.01, ZOO['mha'].knobs)
    with pytest.raises(UserError, match=r'built, nor any near state_bytes@64 = 1000: config.steps is 0; it must be'):
        match(never, 'state_bytes@64', 1000.0, 0.01, {})


@pytest.mark.slow
def test_what_cannot_be_matched_says_what_came_nearest():
    with pytest.raises(UserError, match=r'is not reached within 8\.0%; nearest is'):
        match(config('mha'), 'state_bytes@8192', 1000.0, 0.01, ZOO['mha'].knobs)
    with pytest.raises(UserError, match="--by is 'parms'; did you mean 'params'"):
        measure('parms')
    with pytest.raises(UserError, match="--target is 'many'; it must be a number or one of mha"):
        match_recipes(
            {'mha': config('mha')}, 'params', 'many', 0.01, pathlib.Path('nowhere'), Printer(Console(quiet=True))
        )
    assert set(find_knobs(config('mamba2'), ZOO['mamba2'].knobs, MULTIPLES['any'])) == {'heads', 'state'}
    assert not unmatched([1.0, 1.02], 0.01) and unmatched([1.0, 1.03], 0.01) and math.isfinite(1.0)
