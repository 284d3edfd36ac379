"""Runs that differ only in seed are one row: their mean with Student's interval, and nothing else is merged."""

import csv
import dataclasses
import json

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from attnlab.compare.runs import equalities, run_result, unequal
from attnlab.compare.runs_table import compare_runs
from attnlab.compare.seeds import mean_curve, merged, over_seeds, seed_groups, shared_name
from attnlab.config import plain, spec_of
from attnlab.quantize.formats import Fixed, FixedFloating, Symmetric
from attnlab.quantize.layers import Quantization
from attnlab.runs.record import read_record
from attnlab.tables import Printer
from attnlab.zoo import ZOO

SCORES = (0.5, 0.6, 0.8)


def scored(value):
    return [{'test/1x/accuracy': 0.1, 'step': 100}, {'test/1x/accuracy': value}]


def seeded(made, name, scores=SCORES, first=0, **changes):
    """The folders of runs with seeds from `first`."""
    return [made(f'{name}-seed{seed}', scored(value), seed=seed, **changes) for seed, value in enumerate(scores, first)]


def test_runs_that_differ_only_in_seed_are_one_group_and_no_others(made):
    folders = [
        *seeded(made, 'mha'),
        *seeded(made, 'longer', steps=500),
        *seeded(made, 'elsewhere', SCORES[:2], facts={'device_kind': 'NVIDIA H100'}),
        *seeded(made, 'again', SCORES[:2], first=3),
        *seeded(made, 'gla', SCORES[:2], arg='task=mqar,zoo=gla'),
    ]
    groups = seed_groups([read_record(folder) for folder in folders])
    assert groups == [[0, 1, 2, 8, 9], [3, 4, 5], [6, 7], [10, 11]]
    # Nor are runs of other data under one name.
    texts = [made(f'text{n}', scored(0.5), seed=n, facts={'data': {'content': 'aab'[n]}}) for n in range(3)]
    assert seed_groups([read_record(folder) for folder in texts]) == [[0, 1], [2]]
    # A repeat of a seed is no further sample of seeds.
    repeat = made('repeat', scored(0.9), seed=1)
    assert seed_groups([read_record(folder) for folder in (*folders[:3], repeat)]) == [[0], [1], [2], [3]]


def test_seeds_at_other_steps_are_no_sample_of_one_result(made, tmp_path, capsys):
    folders = seeded(made, 'mha', (0.90, 0.91))
    begun = made('mha-seed2', [], seed=2)
    (begun / 'metrics.jsonl').write_text('{"step": 60, "test/1x/accuracy": 0.3}\n')
    folders.append(begun)
    assert seed_groups([read_record(folder) for folder in folders]) == [[0, 1], [2]]
    both, alone = compare_runs(folders, tmp_path / 'out', Printer(Console(width=200)))
    assert (both.name, both.scores, both.finished) == ('mha', (0.90, 0.91), True)
    assert (alone.name, alone.score, alone.low, alone.finished) == ('mha-seed2', 0.3, None, False)
    assert 'mha-seed2 (not finished, step 60)' in capsys.readouterr().out
    assert 'seed2 (not finished, step 60)' in (tmp_path / 'out' / 'index.html').read_text()
    # Those that came as far are seeds of what was reached there.
    (folders[0] / 'metrics.jsonl').write_text('{"step": 60, "test/1x/accuracy": 0.2}\n')
    assert seed_groups([read_record(folder) for folder in folders]) == [[0, 2], [1]]


def test_runs_made_of_runs_are_no_seeds_of_trained_ones(made):
    edit = {'edited': {'from': 'a', 'answer': 'x'}}
    few = {'quantized': {'from': 'a', 'feedback': None, 'allocation': []}}
    tried = [
        {},
        edit,
        {'merged': ['a', 'b']},
        {},
        {'merged': ['b', 'a']},
        {'edited': {'from': 'b', 'answer': 'x'}},
        {'edited': {'from': 'b', 'answer': 'y'}},
        few,
        {'quantized': {'from': 'b', 'feedback': {'rows': 8}, 'allocation': []}},
        {'quantized': {'from': 'b', 'feedback': None, 'allocation': [0.5]}},
        few | {'made_before': [['edited', edit['edited']]]},
    ]
    records = [read_record(made(f'run-{i}', scored(0.5), seed=i, facts=facts)) for i, facts in enumerate(tried)]
    assert seed_groups(records) == [[0, 3], [1, 5], [2], [4], [6], [7, 9], [8], [10]]


def quantized(made, name, few_bits, seed=0, share=0.5):
    """The folder of a run that was quantized, by what its config has of it."""
    record = {'from': name, 'sparsity': {'share': share, 'rows': 64}, 'rows': 64, 'allocation': []}
    folder = made(name, scored(0.5), seed=seed, facts={'quantized': record})
    saved = json.loads((folder / 'config.json').read_text())
    (folder / 'config.json').write_text(json.dumps(saved | {'quantization': plain(spec_of(few_bits))}))
    return folder


def test_seeds_quantized_alike_by_numbers_measured_on_each_are_one_group(made):
    def found(by, bits=8, element='e4m3', **more):
        fixed = (Fixed(bits, 0.1 + by, 128 + round(1e4 * by)), FixedFloating(element, 0.2 + by))
        return Quantization(inputs=fixed, thresholds=(0.3 + by, 0.4 - by), **more)

    folders = [quantized(made, f'run-{seed}', found(1e-4 * seed), seed) for seed in range(3)]
    assert seed_groups([read_record(folder) for folder in folders]) == [[0, 1, 2]]
    others = (
        quantized(made, 'bits', found(0.0, bits=9), 3),
        quantized(made, 'element', found(0.0, element='e5m2'), 4),
        quantized(made, 'weights', found(0.0, weights=Symmetric(4)), 5),
        quantized(made, 'softmax', found(0.0, softmax=3), 6),
        quantized(made, 'sparser', found(0.0), 7, share=0.7),
        quantized(made, 'dense', dataclasses.replace(found(0.0), thresholds=None), 8),
    )
    records = [read_record(folder) for folder in (*folders, *others)]
    assert seed_groups(records) == [[0, 1, 2], [3], [4], [5], [6], [7], [8]]


def test_the_score_is_the_mean_with_students_interval_and_the_noise_of_the_test_set(made):
    results = [run_result(read_record(folder)) for folder in seeded(made, 'mha')]
    (one,) = over_seeds(results, [[0, 1, 2]])
    low, high = stats.t.interval(0.95, 2, np.mean(SCORES), stats.sem(SCORES))
    assert (one.name, one.seeds, one.scores) == ('mha', 3, SCORES)
    assert one.measured.kind == 'seeds' and one.measured.n == 3
    assert one.score == pytest.approx(np.mean(SCORES)) and one.low == pytest.approx(low)
    assert high > 1 and one.high == 1
    noisy = merged('mha', [dataclasses.replace(result, noise=0.1) for result in results])
    assert noisy.low == pytest.approx(np.mean(SCORES) - np.hypot(np.mean(SCORES) - low, 1.96 * 0.1), abs=1e-5)
    two = merged('mha', results[:2]).measured
    assert (two.kind, two.low, two.high) == ('range', 0.5, 0.6)
    lost = merged('mha', [results[0], dataclasses.replace(results[1], score=float('nan'))])
    assert lost.measured.kind == 'one' and np.isnan(lost.score)


def test_groups_with_the_same_seeds_count_as_equal_in_them(made):
    folders = [*seeded(made, 'mha'), *seeded(made, 'gla', arg='task=mqar,zoo=gla')]
    results = [run_result(read_record(folder)) for folder in folders]
    pair = over_seeds(results, [[0, 1, 2], [3, 4, 5]])
    assert not unequal(equalities(pair, 0.01), pair)
    pair = over_seeds(results, [[0, 1, 2], [5, 3, 4]])
    assert not unequal(equalities(pair, 0.01), pair)
    pair = over_seeds(results, [[0, 1, 2], [3, 4]])
    assert unequal(equalities(pair, 0.01), pair) == ['initial parameters (seed: 0/1/2, 0/1)']


def test_names_are_what_is_shared_and_told_apart():
    assert shared_name(['mqar-gla-seed0', 'mqar-gla-seed1']) == 'mqar-gla'
    assert shared_name(['run10', 'run11']) == 'run' and shared_name(['gla_s0', 'gla_s12']) == 'gla'
    assert shared_name(['runs/gla/seed0', 'runs/gla/seed1']) == 'runs/gla'
    assert shared_name(['gla-2']) == 'gla-2' and shared_name(['one', 'two']) == ''


@pytest.mark.parametrize(
    'marked', ['{}-{}', '{} {}', '{}_s{}', '{}-s{}', '{}seed{}', '{}-seed{}', '{}/seed{}', '{}_seed={}']
)
def test_what_seeds_of_a_recipe_share_is_its_name(marked):
    shared = {name: shared_name([marked.format(name, seed) for seed in (0, 1)]) for name in ZOO}
    assert shared == {name: name for name in ZOO}


def test_two_groups_never_have_one_name(made):
    folders = [
        made(name, scored(0.5), seed=seed, steps=steps)
        for name, seed, steps in (('a0', 0, 100), ('a1', 1, 100), ('a2', 0, 200), ('a3', 1, 200))
    ]
    results = [run_result(read_record(folder)) for folder in folders]
    assert [one.name for one in over_seeds(results, [[0, 1], [2, 3]])] == ['a0 and 1 more', 'a2 and 1 more']


def test_a_curve_is_the_mean_at_the_steps_that_all_have():
    assert mean_curve([[(1, 1.0), (2, 2.0), (3, 3.0)], [(2, 4.0), (3, 5.0), (4, 0.0)]]) == [(2, 3.0), (3, 4.0)]


def test_the_command_shows_one_row_and_says_how_many_seeds(made, tmp_path, capsys):
    folders = [*seeded(made, 'mha', (0.90, 0.91, 0.92)), *seeded(made, 'gla', (0.5, 0.51, 0.52), arg='zoo=gla')]
    compare_runs(folders, tmp_path / 'out', Printer(Console(width=200)))
    printed = capsys.readouterr().out
    assert 'mha has the highest test/1x/accuracy' in printed and 'separated from the second, gla' in printed
    assert '0.9100 ± 0.0248' in printed and '(95 %, 3 seeds)' in printed
    with (tmp_path / 'out' / 'runs.csv').open() as file:
        rows = list(csv.DictReader(file))
    assert [(row['name'], row['scores']) for row in rows] == [
        ('mha', '(0.9, 0.91, 0.92)'),
        ('gla', '(0.5, 0.51, 0.52)'),
    ]
