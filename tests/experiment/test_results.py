"""The results that stand in experiments/: numbers as JSON, one figure, tables that follow from the numbers."""

import decimal
import json
import math
import pathlib
import re

import pytest

from attnlab.errors import UserError
from attnlab.experiment.experiment import SIZES, Experiment, module_of
from attnlab.experiment.results import plus_minus, preferred, rounded, with_gaps, write_results, written_results
from attnlab.experiment.runs import beside
from attnlab.experiment.studies import tables

NUMBER = re.compile(r'-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?')
LINK = re.compile(r'\]\(([^)]+)\)')
FOLDERS = sorted(path.parent for path in pathlib.Path(__file__).parents[2].glob('experiments/*/sweep.py'))
RUN = [folder for folder in FOLDERS if (folder / 'results' / 'cpu.json').exists()]


@pytest.mark.parametrize('folder', FOLDERS, ids=lambda folder: folder.name)
def test_an_experiment_keeps_numbers_one_figure_of_each_size_and_the_pictures_it_names(folder):
    readme = (folder / 'README.md').read_text()
    files = [path for path in (folder / 'results').rglob('*') if path.is_file()]
    kept = {path.relative_to(folder / 'results').as_posix() for path in files}
    sizes = [size for size in SIZES if f'{size}.json' in kept]
    missing = [size for size in SIZES if size not in sizes]
    assert sizes or all(f'Not run yet: `make experiment NAME={folder.name} SIZE={size}`' in readme for size in missing)
    found = {f'{size}.{ending}' for size in sizes for ending in ('json', 'png')}
    assert found <= kept and kept - found <= {picture for size in sizes for picture in pictures(folder, size)}
    assert all(f'](results/{name})' in readme for name in kept if name.endswith('.png'))
    linked = [target for target in LINK.findall(readme) if '://' not in target]
    assert [target for target in linked if not (folder / target.partition('#')[0]).exists()] == []


def pictures(folder, size):
    """The files of the pictures that `plot.py` names, of those that runs may have left."""
    plot = folder / 'plot.py'
    if not plot.exists() or not hasattr(module := module_of(plot), 'pictures'):
        return []
    results = written_results(Experiment(folder, size))
    return [f'{size}/{name}.png' for name in module.pictures(results['studies' if 'studies' in results else 'runs'])]


@pytest.mark.parametrize('folder', RUN, ids=lambda folder: folder.name)
def test_the_table_of_the_readme_and_the_figure_follow_from_the_numbers(folder):
    readme, plot = (folder / 'README.md').read_text(), module_of(folder / 'plot.py')
    results = json.loads((folder / 'results' / 'cpu.json').read_text())
    lines = [tuple(cell.strip() for cell in line.split('|')[1:-1]) for line in readme.splitlines() if line[:1] == '|']
    if Experiment(folder, 'cpu').has_studies():
        plot.figure(results['studies'])
        assert all(table in readme for table in tables(results))
    else:
        whole = [run for run in results['runs'] if 'failed' not in run]
        plot.figure(whole)
        for line in plot.table(whole):
            assert any(len(line) == len(other) and all(map(agree, line, other)) for other in lines), line
        assert all(said in readme for said in (beside(results['baselines']) if 'baselines' in results else []))


def test_bands_and_curves_of_figures_are_the_intervals_and_means_of_their_tables():
    """SSMax at 256 items has 0.572 ± 0.180 on its page, four experts of the sigmoid gate 0.0122 at 10,000 points."""
    accuracy, _ = _figure('sharpness_out_of_distribution').axes
    (band,) = [
        band for line, band in zip(accuracy.lines, accuracy.collections, strict=False) if line.get_label() == 'ssmax'
    ]
    ends = [y for x, y in band.get_paths()[0].vertices if x == 256]
    assert (min(ends), max(ends)) == pytest.approx((0.392, 0.752), abs=1e-3)
    _, error, *_ = _figure('gating').axes
    (means,) = [line.get_ydata() for line in error.lines if line.get_label() == 'sigmoid']
    assert means[-1] == pytest.approx(0.0122, abs=5e-5)


def _figure(name):
    folder = FOLDERS[0].parent / name
    return module_of(folder / 'plot.py').figure(json.loads((folder / 'results' / 'cpu.json').read_text())['runs'])


def test_results_have_what_trivial_predictors_reach_or_say_that_it_is_not_known():
    for folder in RUN:
        results = json.loads((folder / 'results' / 'cpu.json').read_text())
        if 'studies' in results:
            missing = [study['report'] for study in results['studies'] if not study['baselines']]
        else:
            missing = ['HeldOut'] if 'HeldOut' in (folder / 'sweep.py').read_text() else []
        assert not missing or 'baselines' in results, (folder.name, missing)


def test_the_sentence_above_a_table_is_made_from_the_numbers_and_not_kept():
    def study(name, confirmed, state):
        return {
            'report': 'recall',
            'study': name,
            'metric': 'test/accuracy',
            'goal': 'max',
            'flops_of_all': 1e9,
            'tokens': 1000,
            'counted': True,
            'noise': None,
            'trials': [{'rate': 1e-3, 'seed': 0, 'state': 'done', 'value': confirmed[0]}],
            'confirmed': confirmed,
            'baselines': {'chance': 0.1},
            'costs': {'parameters': 100.0, 'state_bytes': state, 'flops': 1e9},
        }

    kept = {'reasons': [], 'task': 'Recall', 'sentence': 'what was said of other numbers'}
    studies = [study('gla', [0.98, 0.2, 1.0], 1024.0), study('mha', [0.94, 0.95, 0.96], 4096.0)]
    (text,) = tables({'reports': {'recall': kept}, 'studies': studies})
    assert text.split('\n\n')[1] == (
        'mha has the highest confirmed test/accuracy on Recall, with 4.0 KiB of state: 0.95 ± 0.02 (95 %, 3 seeds); '
        'not separated from gla (0.73 [0.00, 1.00], 1.0 KiB of state), which is cheaper.'
    )


def agree(shown: str, other: str) -> bool:
    """Whether texts are the same but for one in the last digit of a number, for the JSON has been rounded before."""
    mine, theirs = NUMBER.findall(shown), NUMBER.findall(other)
    return NUMBER.sub('#', shown) == NUMBER.sub('#', other) and all(map(_close, mine, theirs))


def _close(shown: str, other: str) -> bool:
    one, two = (decimal.Decimal(text.replace(',', '')) for text in (shown, other))
    exponent = min(one.as_tuple().exponent, two.as_tuple().exponent)
    return abs(one - two) <= decimal.Decimal(1).scaleb(exponent)


def test_agreement_is_to_the_last_digit():
    assert agree('1.0000 [55,813, 1e-3]', '1.0001 [55,814, 1e-3]') and agree('0.492', '0.4921')
    assert not agree('1.0000', '1.0002') and not agree('55,813', '55,815') and not agree('a 1', 'b 1')


def test_a_setting_whose_score_is_not_finite_is_not_preferred():
    def scored(*values):
        return [{'loss': value} for value in values]

    nan = float('nan')
    for highest, best in ((False, 0.1), (True, 0.3)):
        rates = {1e-2: scored(nan, nan), 1e-3: scored(0.1, 0.1), 1e-4: scored(0.3, 0.3), 1e-1: scored(nan, 0.0)}
        assert preferred(rates, lambda run: run['loss'], highest=highest) == scored(best, best)
    # All have lost one.
    assert preferred({1: scored(nan, 0.4), 2: scored(0.2)}, lambda run: run['loss']) == scored(0.2)
    with pytest.raises(UserError, match='no run of the settings 1, 2 has a finite score'):
        preferred({1: scored(nan), 2: []}, lambda run: run['loss'])
    assert preferred({1: scored(None, 0.1), 2: scored(0.2, 0.2)}, lambda run: run['loss']) == scored(0.2, 0.2)


def test_a_number_that_one_run_lacks_is_no_number_and_what_all_lack_is_missing():
    first = {'label': 'a-0', 'loss': 1.5, 'accuracy': {'8': None, '16': 0.5}, 'curve': [[1, 2.0], [2, 1.0]]}
    second = {'label': 'a-1', 'loss': None, 'accuracy': {'8': None, '16': 0.25}, 'curve': [[1, 2.0], [2, None]]}
    whole, lacking = with_gaps([first, second])
    assert whole == first and lacking['accuracy'] == second['accuracy'] and lacking['curve'][0] == [1, 2.0]
    assert math.isnan(lacking['loss']) and math.isnan(lacking['curve'][1][1])


def test_tables_and_figures_of_experiments_say_that_a_seed_has_no_number():
    """A loss that is not finite ended the report, and a missing exponent was left out as if there were no such seed."""
    for name, label, lacks, place, cells in (
        ('dynamics', 'p0-low-1', 'exponent', 1, ('p0', '-1.07, nan, -1.06')),
        # The last, although softmax was among the first.
        ('drop_in', 'mha-1', 'loss', -1, ('mha', 'nan')),
        # The largest number is that of the rate that is best of the others.
        ('norms_and_activations', 'rmsnorm-silu-low', 'loss', 1, ('silu', 'nan', '2.1410', '14.6')),
    ):
        rows = json.loads((FOLDERS[0].parent / name / 'results' / 'cpu.json').read_text())['runs']
        plot = module_of(FOLDERS[0].parent / name / 'plot.py')
        lacking = with_gaps([row | {lacks: None} if row['label'] == label else row for row in rows])
        line = plot.table(lacking)[place]
        assert all(cell in line for cell in cells), (name, line)
        plot.figure(lacking).draw_without_rendering()


def test_the_side_on_which_edits_are_shown_is_chosen_by_the_other_half_of_them():
    """Layer 2 brings back most; edits of layer 0 take more often in the half that chooses, of layer 4 in the other."""
    takes = ([0.8, 0.25], [0.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.2, 0.9])
    seed = {
        'maps': {'mixer.output': [[0.0, float(layer == 2), 0.0, 0.0] for layer in range(5)]},
        'edits': {f'{layer}.mixer': {'takes': halves} for layer, halves in enumerate(takes)},
    }
    assert module_of(FOLDERS[0].parent / 'facts' / 'plot.py').elsewhere([seed] * 3) == '0.250 ± 0.000'


STORED = sorted(path for path in (FOLDERS[0].parent).rglob('*.json') if 'matched' not in path.parts)


@pytest.mark.parametrize('path', STORED, ids=lambda path: path.relative_to(FOLDERS[0].parent).as_posix())
def test_results_are_json_as_every_reader_has_it(path):
    json.loads(path.read_text(), parse_constant=refused)


def refused(constant):
    raise ValueError(f'{constant} is no JSON')


def test_what_is_no_number_is_written_and_read_as_missing(tmp_path):
    experiment = Experiment(FOLDERS[0], 'cpu')
    object.__setattr__(experiment, 'folder', tmp_path)
    found = {'loss': float('nan'), 'more': {'4': float('inf'), '8': 1.23456789}}
    with pytest.raises(ValueError, match='not JSON compliant'):
        write_results(experiment, {}, 'runs', [found])
    write_results(experiment, {'size': 'cpu'}, 'runs', [rounded(found)])
    assert written_results(experiment) == {'size': 'cpu', 'runs': [{'loss': None, 'more': {'4': None, '8': 1.23457}}]}
    assert plus_minus([None, 1.0, 2.0], 3) == 'nan'
