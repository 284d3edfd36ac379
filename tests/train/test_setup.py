"""What runs share in one process, and what they do not."""

import copy
import dataclasses
import types
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from attnlab.config import spec
from attnlab.errors import UserError
from attnlab.evals.by_slice import BySlice
from attnlab.evals.cadence import AtEnd
from attnlab.functional import cores
from attnlab.metrics import Average
from attnlab.models.sampling import generate
from attnlab.tasks.long_range import Classification
from attnlab.testing.jaxprs import equations
from attnlab.train import partition
from attnlab.train.optimizer import Override
from attnlab.train.setup import SAME_BITS, Setup, prepare
from configs import grokking, images, language, long_range, recall

MATMULS = ('default', 'highest')


@pytest.fixture(scope='module')
def setups() -> dict[str, Setup]:
    """Runs that differ in the precision of matrix products; all are prepared before any is traced."""
    return {matmul: prepare(config(matmul)) for matmul in MATMULS}


def config(matmul: str) -> Any:
    made = language.get_config('zoo=mingru')
    with made.unlocked():
        made.update(length=16, batch_size=2)
        made.model.dim, made.model.stack.depth = 8, 1
        made.precision.matmul = matmul
    return made


def precisions(jaxpr: Any) -> Iterator[str]:
    """The precision of every matrix product."""
    for equation in equations(jaxpr):
        if equation.primitive.name == 'dot_general':
            asked = equation.params['precision']
            yield 'default' if asked is None else {str(one).lower() for one in asked}.pop()


@pytest.mark.parametrize('matmul', MATMULS)
def test_two_runs_keep_their_own_precision(setups: dict[str, Setup], matmul: str):
    setup = setups[matmul]
    programs = {
        'step': setup.trace().jaxpr,
        'measure': setup.measure.trace(setup.abstract.variables, setup.abstract_batch()).jaxpr,
    }
    for name, jaxpr in programs.items():
        assert set(precisions(jaxpr.jaxpr)) == {matmul}, name
    assert jax.config.jax_default_matmul_precision is None


def test_parameters_that_an_override_freezes_are_left_out_of_the_norm():
    frozen = config('default')
    with frozen.unlocked():
        frozen.optimizer.overrides = (spec(Override, pattern='*', lr=0.0),)
    setup = prepare(frozen)
    example = setup.task.example(setup.length)
    batch = {name: np.ones((2, *value.shape), value.dtype) for name, value in example.items()}
    state = setup.initialize()
    before = jax.tree.map(np.asarray, state.params)
    state, metrics = setup.step(state, setup.place(batch), np.int32(1))
    assert metrics['good'] and metrics['grad_norm'] == 0
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, state.params))


def test_decoding_has_the_precision_of_its_run(setups: dict[str, Setup]):
    found = {}
    for matmul, setup in setups.items():
        traced = []

        def jit(function: Any, setup: Setup = setup, traced: list[Any] = traced, **options: Any) -> Any:
            compiled = setup.jit(function, **options)
            return lambda *args: (traced.append(compiled.trace(*args).jaxpr.jaxpr), compiled(*args))[1]

        model = nnx.merge(setup.graphdef, setup.initialize().variables)
        list(generate(model, np.ones(4, np.int32), 2, jit=jit))
        found[matmul] = {precision for jaxpr in traced for precision in precisions(jaxpr)}
    assert found == {matmul: {matmul} for matmul in MATMULS}


def test_runs_that_share_programs_compile_them_once(setups: dict[str, Setup]):
    first, second = (prepare(config('default')) for _ in range(2))
    shared = second.sharing(first)
    assert shared.compiled is first.compiled is not second.compiled
    assert shared.seed == second.seed and shared.sharing(second).compiled is second.compiled


def test_programs_of_evaluators_are_made_once_for_each_of_their_options(setups: dict[str, Setup]):
    made = []

    def make(setup: Setup, count: int) -> tuple[Setup, int]:
        made.append(count)
        return setup, count

    first = prepare(config('default'))
    for trial in (first, setups['default'].sharing(first)):
        for count in (1, 2):
            assert trial.program(make, count) == (first, count)
    assert made == [1, 2]


OUTSIDE = {
    'labels of a text': (language, 'zoo=mingru', 'targets', 256),
    'labels below zero': (language, 'zoo=mingru', 'targets', -1),
    'tokens of a text': (language, 'zoo=mingru', 'tokens', 256),
    'labels of a drawn problem': (recall, 'zoo=mingru', 'targets', 10**6),
    'classes of sequences': (long_range, 'task=listops,zoo=mingru,size=smoke', 'label', 10),
    'sums': (grokking, 'size=tiny', 'target', 59),
}
"""Configs, the entry of a row, and a value that is outside of its table."""


@pytest.mark.parametrize('case', OUTSIDE)
def test_labels_and_tokens_outside_of_their_tables_are_refused_on_the_way_in(case: str):
    config, arg, name, value = OUTSIDE[case]
    setup = prepare(config.get_config(arg))
    batch = {key: np.stack([row] * 2) for key, row in setup.task.example(setup.length).items()}
    setup.place(batch)
    batch[name].flat[-1] = value
    whole = f'from {min(value, 0)} to {max(value, 0)}; there are '
    with pytest.raises(UserError, match=rf'^[a-z ]+(\({name}\) )?of {type(setup.task).__name__} are {whole}') as caught:
        setup.place(batch)
    assert '\n' not in str(caught.value)


class Several(Classification):
    """Two labels of an example, of which the second may be missing."""

    def example(self, length: int) -> dict[str, np.ndarray]:
        return super().example(length) | {'label': np.zeros(2, np.int32)}

    def measure(self, model: Any, batch: Any, dropout_key: Any) -> dict[str, Average]:
        losses = model.losses(self.vectors(model, batch, dropout_key), batch['label'], dropout_key)
        return {'loss': Average.of(losses[:, None], batch['weights'][:, None])}


def test_labels_of_which_some_are_missing_are_trained_on_by_heads_that_take_them():
    made = long_range.get_config('task=listops,zoo=mingru,size=smoke,head=decoupled_softmax')
    with made.unlocked():
        made.update(length=8, batch_size=2)
        made.model.dim, made.model.stack.depth = 8, 1
    single = prepare(made)
    setup = dataclasses.replace(single, task=Several(single.task.data), shared_with=None)
    example = setup.task.example(setup.length)
    batch = {name: np.ones((2, *value.shape), value.dtype) for name, value in example.items()}
    batch['label'] = np.array([[0, 9], [3, -1]], np.int32)
    state, metrics = setup.step(setup.initialize(), setup.place(batch), np.int32(1))
    assert metrics['good'] and state.step == 1
    for wrong in (-2, 10):
        batch['label'][0, 1] = wrong
        with pytest.raises(UserError, match='there are 10 classes, so they must be from -1 to 9'):
            setup.place(batch)
    with pytest.raises(UserError, match='from -1 to 3; there are 10 classes, so they must be from 0 to 9'):
        single.place(batch | {'label': np.array([3, -1], np.int32)})


def test_what_of_a_batch_a_process_supplies_is_found_once(monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []
    monkeypatch.setattr(partition, 'feed', lambda mesh: (asked.append(mesh), (0, 1))[1])
    setup = prepare(grokking.get_config('size=tiny'))
    batch = {key: np.stack([row] * 2) for key, row in setup.task.example(setup.length).items()}
    for _ in range(3):
        setup.place(batch)
    assert asked == [setup.mesh]


def test_targets_that_are_real_numbers_are_no_labels():
    setup = prepare(recall.get_config('task=regression,zoo=mingru'))
    rows = {key: np.stack([row] * 2) for key, row in setup.task.example(setup.length).items()}
    assert setup.place(rows | {'targets': rows['targets'] + 1e6})['targets'].shape == rows['targets'].shape


def test_steps_on_gpus_have_no_sums_in_the_order_of_threads(setups: dict[str, Setup], monkeypatch: pytest.MonkeyPatch):
    # XLA refuses names that it does not know, on any device.
    assert jax.jit(lambda x: x + 1, compiler_options=SAME_BITS)(1) == 2
    told: dict[str, Any] = {}
    monkeypatch.setattr(jax, 'jit', lambda function, **options: told.update(options))
    monkeypatch.setattr(cores, 'on', lambda mesh, function: function)
    for platform in ('cpu', 'gpu'):
        devices = np.array([types.SimpleNamespace(platform=platform)])
        setup = copy.copy(setups['default'])
        object.__setattr__(setup, 'mesh', types.SimpleNamespace(devices=devices))
        setup.jit(lambda x: x)
        assert told == ({} if platform == 'cpu' else {'compiler_options': SAME_BITS})


@pytest.mark.parametrize('parts', [{'accumulate': 4}, {'rows_at_once': 1}])
@pytest.mark.parametrize('head', ['masked_softmax', 'partial_fc', 'nbc_softmax'])
def test_a_batch_is_not_taken_in_parts_before_a_head_that_looks_at_all_of_it(head: str, parts: dict[str, int]):
    config = long_range.get_config(f'task=digits,zoo=mha,size=smoke,head={head}')
    with config.unlocked():
        config.update(batch_size=8)
        prepare(config).check()
        config.update(parts)
    names = r'taken in \d parts: config.accumulate is \d and config.rows_at_once is \w+; give accumulate=1'
    with pytest.raises(UserError, match=names):
        prepare(config).check()


@pytest.mark.parametrize(
    ('names', 'said'),
    [
        (
            ('test', 'test'),
            r"config\.evals\[1\]\.name is 'test': .* called test/\.\.\. as those of config\.evals\[0\];",
        ),
        (
            ('valid', 'valid_ema'),
            r"config\.evals\[1\]\.name is 'valid_ema': .* called valid_ema/\.\.\. as those of config",
        ),
        (('valid_ema', 'valid'), r"config\.evals\[1\]\.name is 'valid': .* called valid_ema/\.\.\. as those of config"),
        (('train',), r"config\.evals\[0\]\.name is 'train': .* as those of training itself; give it a name of its own"),
    ],
)
def test_evaluators_whose_numbers_would_have_one_name_are_refused(names: tuple[str, ...], said: str):
    config = recall.get_config('task=mqar,zoo=mingru')
    with config.unlocked():
        config.evals = tuple(spec(BySlice, cadence=spec(AtEnd), name=name, split=name) for name in ('valid', 'test'))
        prepare(config).check()
        config.evals = tuple(
            spec(BySlice, cadence=spec(AtEnd), name=name, split=name.removesuffix('_ema')) for name in names
        )
    setup = prepare(config)
    with pytest.raises(UserError, match=said):
        setup.check()


@pytest.mark.parametrize(('split', 'right'), [('test', 'test'), ('train', 'on_train')])
def test_an_evaluator_of_one_split_is_not_called_by_another(split: str, right: str):
    config = language.get_config('zoo=mingru')
    with config.unlocked():
        config.evals[0].split = split
        with pytest.raises(UserError, match=rf'its split is {split!r}: .*; --config\.evals\[0\]\.name={right} names'):
            prepare(config).check()
        config.evals[0].name = right
        prepare(config).check()


@pytest.mark.parametrize('head', ['masked_softmax', 'partial_fc', 'nbc_softmax'])
def test_images_of_two_labels_are_refused_before_a_head_that_looks_at_those_of_a_batch(head: str):
    prepare(images.get_config(f'head={head},augment=flip')).check()
    prepare(images.get_config('head=label_robust,augment=mixup')).check()
    for augment in ('mixup', 'flip+cutmix'):
        with pytest.raises(UserError, match='augmentation mixes images, which then have two: leave mixup and cutmix'):
            prepare(images.get_config(f'head={head},augment={augment}')).check()


@pytest.mark.parametrize(('head', 'there'), [('softmax_z_loss', True), ('sampled_softmax', False)])
def test_an_estimate_of_the_loss_is_not_reported_as_bits_of_the_text(head: str, there: bool):
    made = language.get_config(f'zoo=mingru,head={head}')
    with made.unlocked():
        made.update(length=16, batch_size=2)
        made.model.dim, made.model.stack.depth = 8, 1
    setup = prepare(made)
    _, metrics = jax.eval_shape(
        lambda *given: setup.compiled.program(*given),
        setup.abstract,
        setup.abstract_batch(),
        jax.ShapeDtypeStruct((), np.int32),
        setup.scalars,
    )
    assert ('byte_loss' in metrics) == there
    assert 'byte_loss' in jax.eval_shape(setup.compiled.averages, setup.abstract.variables, setup.abstract_batch())
