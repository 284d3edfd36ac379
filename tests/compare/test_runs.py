"""Runs side by side: scores and costs as the runs wrote them down, and every inequality said."""

import csv
import dataclasses
import math

import pytest
from rich.console import Console

from attnlab.cli import main
from attnlab.compare.runs import baselines_of, by_task, equalities, run_result, short_names, unequal
from attnlab.compare.runs_figure import costs_figure, draw_costs
from attnlab.compare.runs_table import compare_runs
from attnlab.config import spec
from attnlab.configuration import config_of
from attnlab.errors import UserError
from attnlab.quantize.formats import Symmetric
from attnlab.quantize.layers import Quantization
from attnlab.runs.record import newest, read_record
from attnlab.tables import Printer
from attnlab.train.start import FromRun
from tests.compare.conftest import CONFIGS

ACCURATE = [{'test/1x/loss': 0.1, 'test/1x/accuracy': 0.5}, {'test/1x/loss': 0.2, 'test/1x/accuracy': 0.75}]


def test_a_run_is_read_from_what_it_wrote(made):
    record = read_record(made('a', ACCURATE))
    one = run_result(record)
    assert (one.name, one.task, one.metric, one.score) == ('a', 'MultiQueryRecall', 'test/1x/accuracy', 0.75)
    assert one.higher and one.finished and one.tokens_per_second == 7
    # 400 steps of 64 rows of 32 tokens, at 10 operations each.
    assert one.flops == 400 * 64 * 32 * 10
    assert run_result(record, 'test/1x/loss').score == 0.2 and not run_result(record, 'test/1x/loss').higher
    with pytest.raises(UserError, match="has no metric 'test/1x/los'; did you mean"):
        run_result(record, 'test/1x/los')


def test_tasks_are_named_and_scored_in_their_own_way(made):
    listops = run_result(
        read_record(
            made(
                'b',
                [{'test/all/accuracy': 0.3}],
                'long_range',
                'task=listops,size=smoke',
                {'state_bytes_per_sequence': {'200': 1, '1600': 2}},
            )
        )
    )
    assert (listops.task, listops.metric, listops.state_bytes_8x) == ('ListOps', 'test/all/accuracy', 2)
    aan = config_of(CONFIGS / 'long_range.py', 'task=aan')
    assert (
        run_result(
            read_record(
                made(
                    'c',
                    [{'test/all/accuracy': 0.3}],
                    'long_range',
                    'task=aan',
                    {'state_bytes_per_sequence': {str(aan.length): 1, str(8 * aan.length): 2}},
                )
            )
        ).task
        == 'aan'
    )
    text = run_result(
        read_record(
            made(
                'd',
                [{'valid/loss': 2.0, 'valid/bits_per_byte': 2.9}],
                'language',
                '',
                {'state_bytes_per_sequence': {'256': 1, '2048': 2}},
            )
        )
    )
    assert (text.task, text.metric, text.higher) == ('StdlibText', 'valid/bits_per_byte', False)


def matching(results):
    """What is equal, and what is not, with its values."""
    found = equalities(results, 0.01)
    return [one.name for one in found if one.equal], unequal(found, results)


def test_what_is_matched_is_said_and_what_is_not_is_said_with_its_values(made):
    same = [run_result(read_record(made(name, ACCURATE))) for name in 'ab']
    matched, wrong = matching(same)
    assert not wrong
    assert {'parameters', 'state bytes', 'training FLOPs', 'data and length', 'initial parameters'} <= set(matched)
    for number, (changes, facts, lost, told) in enumerate(
        (
            ({'seed': 1}, {}, 'initial parameters', 'initial parameters (seed: 0, 1)'),
            (
                {'start': spec(FromRun, run='pretrained')},
                {},
                'initial parameters',
                "initial parameters (start.leave: none, ('head/*',); start.run: none, pretrained; "
                'start.target: none, attnlab.train.start.FromRun)',
            ),
            ({'steps': 500}, {}, 'tokens of training', 'tokens of training (steps: 400, 500)'),
            ({}, {'parameters': 1050}, 'parameters', 'parameters (1,000 to 1,050)'),
            ({}, {'device_kind': 'NVIDIA H100'}, 'device', 'device (1 NVIDIA H100; 1 cpu)'),
            (
                {},
                {'data': {'path': 'text', 'content_hash': 'a' * 64}},
                'data and length',
                f'data and length (data.content_hash: none, {"a" * 12})',
            ),
        )
    ):
        other = run_result(read_record(made(f'other{number}', ACCURATE, facts=facts, **changes)))
        matched, wrong = matching([same[0], other])
        assert lost not in matched and told in wrong, wrong
    assert not matching([same[0], run_result(read_record(made('near', ACCURATE, facts={'parameters': 1015})))])[1]
    kept = [{'data': {'python': '3.12', 'held_out': {'content_hash': letter * 64}}} for letter in 'aab']
    texts = [run_result(read_record(made(f'text{n}', ACCURATE, facts=facts))) for n, facts in enumerate(kept)]
    assert not matching(texts[:2])[1]
    assert any('data.held_out.content_hash: aaaaaaaaaaaa, bbbbbbbbbbbb' in one for one in matching(texts)[1])
    # What is equal in the model's own settings is for the measures to say.
    deeper = config_of(CONFIGS / 'recall.py', 'task=mqar').model.unlock()
    deeper.stack.depth = 3
    assert not matching([same[0], run_result(read_record(made('deep', ACCURATE, model=deeper)))])[1]
    begun = made('begun', ACCURATE)
    (begun / 'metrics.jsonl').write_text('{"step": 9, "test/1x/accuracy": 0.1}\n')
    unequal = matching([same[0], run_result(read_record(begun))])[1]
    assert 'trained to the last step (begun is not; others are)' in unequal


def test_the_best_comes_first_and_what_is_not_finite_last(made):
    scores = {'low': 0.2, 'high': 0.9, 'lost': 'nan', 'middle': 0.5}
    results = [run_result(read_record(made(name, [{'test/1x/accuracy': score}]))) for name, score in scores.items()]
    (group,) = by_task(results).values()
    assert [one.name for one in group] == ['high', 'middle', 'low', 'lost'] and math.isnan(group[-1].score)
    (group,) = by_task(run_result(read_record(made(f'loss/{n}', [{'test/1x/loss': n}]))) for n in (3, 1, 2)).values()
    assert [one.score for one in group] == [1, 2, 3]


def test_metrics_are_ranked_the_way_that_is_better_and_not_at_all_where_none_is_known(made):
    numbers = {'f1': 0.2, 'auroc': 0.6, 'false_alarms': 0.1, 'threshold': 3.0}
    found = {f'anomalies/model/{name}': value for name, value in numbers.items()}
    records = [
        read_record(made(name, [{'test/loss': 1.0, 'test/loss_low': 0.5, 'test/loss_high': 1.5, **found, **more}]))
        for name, more in (('a', {}), ('b', {'anomalies/model/f1': 0.7, 'anomalies/model/auroc': 0.9}))
    ]
    for metric in ('anomalies/model/f1', 'anomalies/model/auroc'):
        (group,) = by_task(run_result(record, metric) for record in records).values()
        assert [one.name for one in group] == ['b', 'a'] and group[0].higher and group[0].share
    assert not run_result(records[0], 'anomalies/model/false_alarms').higher
    for metric in ('anomalies/model/threshold', 'test/loss_low'):
        with pytest.raises(UserError, match=f'{metric}.*neither more nor less.*test/loss, anomalies/model/f1, '):
            run_result(records[0], metric)


def test_runs_of_a_task_are_ranked_by_a_score_that_all_have(made, tmp_path, capsys):
    folders = [
        made('a', [{'test/1x/accuracy': 0.5, 'test/1x/loss': 0.6}]),
        made('b', [{'test/1x/loss': 0.95}], steps=500),
        # Of another seed than the first: a mean over both is of one score as well.
        made('a1', [{'test/1x/accuracy': 0.9, 'test/1x/loss': 0.1}], seed=1),
    ]
    found = compare_runs([*folders[:2]], tmp_path / 'two', Printer(Console(width=200)))
    assert [(one.name, one.metric, one.score) for one in found] == [
        ('a', 'test/1x/loss', 0.6),
        ('b', 'test/1x/loss', 0.95),
    ]
    assert 'a has the lowest test/1x/loss' in capsys.readouterr().out
    compare_runs(folders, tmp_path / 'three', Printer(Console(width=200)))
    with (tmp_path / 'three' / 'runs.csv').open() as file:
        rows = {row['name']: row for row in csv.DictReader(file)}
    assert rows.keys() == {'a', 'b'} and float(rows['a']['score']) == pytest.approx(0.35)
    # Other tasks have their own, and --metric is that of all.
    text = made(
        'text', [{'valid/bits_per_byte': 2.9}], 'language', '', {'state_bytes_per_sequence': {'256': 1, '2048': 2}}
    )
    named = {one.name: one.metric for one in compare_runs([folders[0], text], tmp_path / 'tasks', Printer(Console()))}
    assert named == {'a': 'test/1x/accuracy', 'text': 'valid/bits_per_byte'}
    other = made('other', [{'test/all/accuracy': 0.5}])
    with pytest.raises(
        UserError,
        match=r'no score in common: .*other has test/all/accuracy, and those before it test/1x/accuracy, test/1x/loss',
    ):
        compare_runs([folders[0], other], tmp_path / 'none', Printer(Console()))
    assert not (tmp_path / 'none').exists()


def test_ends_of_an_interval_are_of_the_line_that_has_its_value(made, tmp_path, capsys):
    """An evaluation that is not finite writes none, and those of the step before it are not its own."""
    before = {'test/1x/accuracy': 0.5, 'test/1x/accuracy_low': 0.4, 'test/1x/accuracy_high': 0.6, 'step': 100}
    lines = [before | {'test/1x/loss': 1.0}, {'test/1x/accuracy': 'nan'}]
    folder = made('lost', lines, facts={'command': ['attnlab', 'train']})
    found = read_record(folder).measured('test/1x/accuracy')
    assert math.isnan(found.mean) and (found.low, found.high) == (None, None)
    whole = read_record(made('whole', [before])).measured('test/1x/accuracy')
    assert (whole.mean, whole.low, whole.high) == (0.5, 0.4, 0.6)
    far = [{'loss@8x': 1.0, 'loss_low@8x': 0.5, 'loss_high@8x': 2.0, 'step': 1}, {'loss@8x': 3.0}]
    assert newest(far) == {'loss@8x': 3.0, 'step': 1}
    compare_runs([folder, tmp_path / 'whole'], tmp_path / 'out', Printer(Console(width=200)))
    assert main(['show', str(folder), '--format=plain']) == 0
    shown = capsys.readouterr().out
    assert 'test/1x/accuracy\tnan' in shown and 'accuracy_low' not in shown and 'test/1x/loss\t1' in shown


def test_names_lose_what_they_share_up_to_a_words_end(made):
    group = [run_result(read_record(made(name, ACCURATE))) for name in ('mqar-gla', 'mqar-gateloop')]
    assert short_names(group) == ['gla', 'gateloop'] and short_names(group[:1]) == ['mqar-gla']


def test_one_table_one_figure_the_same_twice(made, tmp_path, capsys):
    folders = [
        made('mqar-gla', ACCURATE, facts={'parameters': 2000}),
        made('mqar-mha', [{'test/1x/accuracy': 1.0}]),
        made(
            'parity-mha',
            [{'test/1x/accuracy': 0.5}],
            arg='task=parity',
            facts={'state_bytes_per_sequence': {'16': 1, '128': 2}},
        ),
    ]
    for out in ('one', 'two'):
        compare_runs(folders, tmp_path / out, Printer(Console(width=200)))
    printed = capsys.readouterr().out
    # What is not equal stands between the sentence and the table, of a task with one run nothing.
    assert printed.count('Not matched: ') == 2 and 'Parity, matched: parameters' in printed
    above, table = printed.index('Not matched: parameters (1,000 to 2,000).'), printed.index('(a label shown)')
    assert printed.index('mha has the highest') < above < table
    names = sorted(path.name for path in (tmp_path / 'one').iterdir())
    assert names == ['index.html', 'runs.csv', 'runs.png', 'runs.svg']
    page = (tmp_path / 'one' / 'index.html').read_text()
    assert '<h1>Which of 3 runs is best on each of 2 tasks?</h1>' in page and page.count('class="lead"') == 2
    assert (
        'mha has the highest test/1x/accuracy on MultiQueryRecall' in printed
        and 'one seed cannot separate it' in printed
    )
    assert '(a label shown)' in printed and page.count('<li>parameters (1,000 to 2,000)</li>') == 1
    above, table = page.index('<li>parameters (1,000'), page.index('<i>a label shown</i>')
    assert page.index('class="lead"') < page.index('NOT MATCHED') < above < page.index('class="large"') < table
    for name in names:
        assert (tmp_path / 'one' / name).read_bytes() == (tmp_path / 'two' / name).read_bytes()
    with (tmp_path / 'one' / 'runs.csv').open() as file:
        rows = list(csv.DictReader(file))
    assert [row['name'] for row in rows] == ['mqar-mha', 'mqar-gla', 'parity-mha'] and rows[1]['parameters'] == '2000'
    groups = by_task(run_result(read_record(folder)) for folder in folders)
    figure = costs_figure(groups)
    shown = {float(line.get_xdata()[0]) for line in figure.axes[1].lines}
    assert shown == {640.0} and {float(line.get_ydata()[0]) for line in figure.axes[1].lines} == {0.75, 1.0}
    guessed = [segment[0][1] for lines in figure.axes[1].collections for segment in lines.get_segments()]
    assert sorted(guessed) == sorted(set(groups['MultiQueryRecall'][0].baselines.values()))
    with pytest.raises(UserError, match='the runs are not matched: MultiQueryRecall: parameters'):
        compare_runs(folders, tmp_path / 'three', Printer(Console()), strict=True)
    assert not (tmp_path / 'three').exists()


def test_the_figure_draws_every_interval_and_names_what_it_is_over_and_the_lines(made):
    one = dataclasses.replace(run_result(read_record(made('a', ACCURATE))), low=0.7, high=0.8, evaluated=300)
    one = dataclasses.replace(one, baselines={'near': 0.101, 'chance': 0.1})
    seeds = dataclasses.replace(one, name='b', score=0.5, low=0.4, high=0.6, scores=(0.4, 0.5, 0.6))
    bare = dataclasses.replace(one, name='c', low=None, high=None)
    figure = costs_figure({one.task: [one, seeds, bare]})
    axis = figure.axes[-1]
    ends = [segment[:, 1].tolist() for lines in axis.collections[:2] for segment in lines.get_segments()]
    assert ends == [[0.7, 0.8], [0.4, 0.6]]
    assert axis.collections[0].get_linestyle() != axis.collections[1].get_linestyle()
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words == ['a', 'b', 'c', '95 % over seeds', '95 % over examples']
    named = {text.get_text(): text.get_position()[1] for text in axis.texts}
    assert set(named) == {'chance', 'near'} and named['near'] - named['chance'] == pytest.approx(0.08)
    assert all(not axis.texts for axis in figure.axes[:-1])


def test_the_legend_of_many_runs_is_in_the_figure(made):
    one = dataclasses.replace(run_result(read_record(made('a', ACCURATE))), low=0.7, high=0.8, evaluated=300)
    figure = costs_figure({one.task: [dataclasses.replace(one, name=f'run{place}') for place in range(40)]})
    figure.draw_without_rendering()
    legend = figure.legends[0].get_window_extent()
    assert figure.bbox.y0 <= legend.y0 and legend.y1 <= figure.bbox.y1


def test_names_in_the_figure_are_no_formulas(made, tmp_path):
    names = ('x$y$', r'x$\foo$', '_one')
    groups = by_task(run_result(read_record(made(name, ACCURATE))) for name in names)
    draw_costs(groups, tmp_path / 'costs.svg')
    assert all(f'>{name}<' in (tmp_path / 'costs.svg').read_text() for name in names[:2])


def test_the_command_says_what_it_cannot_compare(made, tmp_path, capsys):
    folder, empty = made('a', []), tmp_path / 'empty'
    empty.mkdir()
    for arguments, message in (
        ([folder], 'a has not been evaluated yet'),
        ([empty], 'empty is neither a run nor a study'),
        ([(b := made('b', ACCURATE)), made('c', ACCURATE), b], f'{b} is named twice; name every run once'),
        ([b, b.parent / 'c' / '..' / 'b'], f'{b.parent / "c" / ".." / "b"} is named twice, as {b} too'),
    ):
        assert main(['compare', *map(str, arguments), f'--out={tmp_path / "out"}']) == 2
        assert message in capsys.readouterr().err
    (folder / 'run.json').unlink()
    with pytest.raises(UserError, match='never started'):
        read_record(folder)
    assert main(['compare', str(tmp_path / 'b'), f'--out={tmp_path / "out"}', '--metric=test/1x/loss']) == 0
    assert '0.2000' in capsys.readouterr().out


def test_runs_of_few_bits_are_compared_by_bytes_of_weights(made, tmp_path, capsys):
    folders = [
        made('mqar-mha', [{'test/1x/accuracy': 1.0}]),
        made(
            'mqar-mha-int4',
            [{'test/1x/accuracy': 0.5}],
            facts={'weight_bytes': 600, 'quantized': {'bits': 4.5}},
            quantization=spec(Quantization, weights=spec(Symmetric, bits=4)),
        ),
    ]
    compare_runs(folders, tmp_path / 'out', Printer(Console(width=200)))
    printed = capsys.readouterr().out
    assert 'Not matched: weight bytes (600 to 4,000); bits a parameter (5 to 32).' in printed
    # Of as many parameters bits are what the page is drawn over.
    assert 'with 32.00 bits a parameter' in printed
    page = (tmp_path / 'out' / 'index.html').read_text()
    assert 'bits a parameter</text>' in page and 'data-label="Bits a parameter">4.80<' in page
    assert main(['report', *map(str, folders), f'--out={tmp_path / "report"}', '--format=plain']) == 0
    assert (tmp_path / 'report' / 'index.html').read_text() == page
    figure = costs_figure(by_task(run_result(read_record(folder)) for folder in folders))
    assert [axis.get_xlabel() for axis in figure.axes][-2:] == ['weight bytes', 'bits a parameter']


def test_trivial_predictors_on_other_data_are_those_of_the_best_run(made):
    """Of texts of one's own the class is one task, whatever they hold."""
    one = dataclasses.replace(
        run_result(read_record(made('own-a', ACCURATE))), baselines={'bigram': 0.4, 'unigram': 3.0}
    )
    other = dataclasses.replace(one, name='own-b', score=0.5, baselines={'bigram': 0.9, 'unigram': 3.0})
    assert baselines_of([one, one]) == one.baselines
    assert baselines_of([one, other]) == {'bigram, data of a': 0.4, 'unigram': 3.0}
    away = dataclasses.replace(one, name='own-c', baselines={})
    assert baselines_of([away, other]) == baselines_of([other, away]) == other.baselines
