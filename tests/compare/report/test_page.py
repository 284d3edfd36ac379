"""The page of a report: complete, self-contained, the same twice, and drawn from the numbers that it offers."""

import csv
import dataclasses
import html
import html.parser
import io
import os
import pathlib
import re
import subprocess
import sys
import urllib.parse
import xml.etree.ElementTree

import pytest
from rich.console import Console

from attnlab.compare.report import figures, tables
from attnlab.compare.report import opening as openings
from attnlab.compare.report.chart import WIDE
from attnlab.compare.report.contents import costs_of, frontier
from attnlab.compare.report.page import opening_of, page, render, sections, write_report
from tests.compare.report import made

ROOT = pathlib.Path(__file__).parents[3]
VOID = {'meta', 'br', 'wbr', 'link', 'img', 'hr', 'input'}
DIGEST = """
import hashlib
from attnlab.compare.report.page import render
from tests.compare.report import made
files = render(made.contents(2, 5, companion=True))
print(hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest())
"""


# One worker draws them once.
pytestmark = pytest.mark.xdist_group('page')


@pytest.fixture(scope='module')
def contents():
    return made.contents(2, 9, grid=True)


@pytest.fixture(scope='module')
def files(contents):
    return render(contents)


def bare(contents):
    """The page with nothing in its figures, which is quick."""
    parts = sections(contents)
    return page(contents, parts, {plot.name: '' for part in parts for plot in part.plots})


class Reader(html.parser.HTMLParser):
    """Collects what a page holds, and insists that elements close in the order in which they open."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.references, self.tags, self.headers = [], [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.handle_startendtag(tag, attributes)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.ids += [value for name, value in attributes if name == 'id']
        self.references += [value for name, value in attributes if name in ('href', 'src', 'xlink:href', 'srcset')]
        if tag == 'th':
            self.headers.append(dict(attributes))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f'</{tag}> at {self.getpos()} closes what is not open'


def test_the_page_is_well_formed_and_every_link_leads_somewhere(contents, files):
    read = Reader(files['index.html'])
    assert not read.open
    assert len(set(read.ids)) == len(read.ids)
    runs = {trial.link for study in contents.studies for trial in study.trials}
    led = [urllib.parse.unquote(reference) for reference in read.references]
    for reference in led:
        assert reference.removeprefix('#') in read.ids or reference in files or reference in runs, reference
    assert runs <= set(led)
    assert set(files) - {'index.html'} <= set(led)
    assert all(header.get('scope') in ('col', 'row', 'rowgroup') for header in read.headers)
    curves = len(contents.studies[0].curves)
    figures = sum(name.endswith('.svg') for name in files) + curves
    assert read.tags.count('figure') == read.tags.count('figcaption') == figures


def test_nothing_is_fetched_from_anywhere(files):
    for name, text in files.items():
        without = re.sub(r'xmlns(:\w+)?="[^"]*"|<!DOCTYPE[^>]*>', '', text)
        assert not re.search(r'https?:|//\w|@import|<script[^>]|<link|<iframe|<object|data:', without), name
        assert all(target.startswith('#') for target in re.findall(r'url\(([^)]*)\)', without)), name


def luminance(colour):
    """Relative luminance of `#rrggbb`: Web Content Accessibility Guidelines 2.2."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_a_dark_page_has_its_own_colour_for_every_one_and_both_can_be_read(files):
    blocks = re.findall(r':root \{(.*?)\}', files['index.html'], re.DOTALL)[:2]
    light, dark = (dict(re.findall(r'--([\w-]+): (#\w+);', block)) for block in blocks)
    rest = files['index.html']
    for block in blocks:
        rest = rest.replace(block, '')
    assert light.keys() == dark.keys() >= set(re.findall(r'var\(--([\w-]+)\)', rest))
    assert not re.findall(r'(?:fill|stroke|(?<!border-)color|background)[:=]\s*"?(#\w+)', rest)
    for values, paper in ((light, luminance(light['paper'])), (dark, luminance(dark['paper']))):
        for name in ('ink', 'soft', 'link', *(f's{index}' for index in range(8))):
            least, most = sorted((luminance(values[name]), paper))
            wanted = 4.5 if name in ('ink', 'soft', 'link') else 2
            assert (most + 0.05) / (least + 0.05) >= wanted, name
    assert luminance(dark['paper']) < 0.05 < 0.5 < luminance(light['paper'])


def test_every_figure_is_an_svg_that_stands_alone(files):
    for name in [name for name in files if name.endswith('.svg')]:
        root = xml.etree.ElementTree.fromstring(files[name])
        assert root.tag == '{http://www.w3.org/2000/svg}svg'
        assert root[0].tag.endswith('title') and root[0].text
        assert root.attrib['role'] == 'img' and root.attrib['viewBox']
        words = {(text.text or '').strip() for text in root.iter('{http://www.w3.org/2000/svg}text')}
        if name.startswith('cost'):
            assert set(made.NAMES[:2]) <= words, 'a figure of its own has its own key'


def test_a_report_is_the_same_twice(contents, files, tmp_path):
    write_report(contents, tmp_path / 'report', Console(quiet=True))
    written = {path.name: path.read_text() for path in (tmp_path / 'report').iterdir()}
    assert written == files


@pytest.mark.slow
def test_a_report_is_the_same_in_another_process():
    """Another process has other hashes of strings, and so another order of sets."""
    found = []
    for seed in ('1', '2'):
        environment = os.environ | {'PYTHONHASHSEED': seed}
        made = subprocess.run(
            [sys.executable, '-c', DIGEST], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
        found.append(made.stdout)
    assert found[0] == found[1] and len(found[0].strip()) == 64


def lines_of(text):
    """The lines of a CSV file, numbers as numbers."""
    header, *lines = csv.reader(io.StringIO(text))
    return tuple(header), tuple(tuple(map(read, line)) for line in lines)


def read(cell):
    if cell in ('True', 'False'):
        return cell == 'True'
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            pass
    return cell


def test_figures_are_what_is_drawn_from_their_csv_files(contents, files):
    """Each is drawn anew from the numbers that were read back, to the same bytes; with other numbers, it changes."""
    plots = [plot for section in sections(contents) for plot in section.plots]
    assert {plot.name for plot in plots} >= {
        *('cost_state_bytes', 'cost_tokens_per_second', 'cost_decode_ms', 'cost_peak_bytes'),
        *(
            'learning_rate_mha',
            'learning_rate_gla',
            'lengths',
            'progress',
            'interval_expected_best',
            'interval_confirmed',
        ),
    }
    for plot in plots:
        header, lines = lines_of(files[f'{plot.data}.csv'])
        assert header == plot.header
        drawn = figures.svg(dataclasses.replace(plot, lines=lines), key=bool(plot.keyed))
        assert files[f'{plot.name}.svg'].endswith(drawn), plot.name
    first = plots[0]
    study, cost, best, *rest = first.lines[0]
    moved = dataclasses.replace(first, lines=((study, cost, best + 0.01, *rest), *first.lines[1:]))
    assert not files[f'{first.name}.svg'].endswith(figures.svg(moved, key=True))
    assert 'cost_parameters.svg' not in files, 'what was matched is no axis'


def test_the_large_figure_is_what_is_drawn_from_its_csv_file(contents, files):
    opening = opening_of(contents)
    header, rows = lines_of(files['score.csv'])
    assert header == openings.HEADER and rows == tuple(openings.lines(opening))
    assert files['score.svg'].endswith(openings.draw(opening, rows, WIDE))
    name, cost, score, *rest = rows[0]
    moved = ((name, cost, score + 0.01, *rest), *rows[1:])
    assert openings.draw(opening, moved, WIDE) != openings.draw(opening, rows, WIDE)
    assert all(name in files['score.svg'] for name in made.NAMES[:2]) and 'unigram' in files['score.svg']


def test_figures_say_where_seeds_failed(contents):
    first, *others = contents.studies
    row = dataclasses.replace(first.row, confirmed=first.row.confirmed[:2], failed=1)
    trials = tuple(trial for trial in first.trials if not (trial.confirms and trial.number == 2))
    comparison = dataclasses.replace(contents.comparison, rows=(row, *(other.row for other in others)))
    studies = (dataclasses.replace(first, row=row, trials=trials), *others)
    some = dataclasses.replace(contents, comparison=comparison, studies=studies)
    for failed, shown in ((True, some), (False, contents)):
        plots = {plot.name: plot for section in sections(shown) for plot in section.plots}
        for name in ('cost_state_bytes', 'lengths', 'interval_confirmed'):
            assert figures.svg(plots[name], key=False).count('2 of 3 seeds') == failed, name
        assert '2 of 3 seeds' not in figures.svg(plots['interval_expected_best'], key=False)
        opening = opening_of(shown)
        drawn = openings.draw(opening, openings.lines(opening), WIDE)
        assert drawn.count('>mha †</text>') == failed and drawn.count('2 seeds, others failed') == failed
        assert ('† Some of its seeds failed; the mean is of the others.' in bare(shown)) == failed
        flat = dataclasses.replace(opening, entries=[dataclasses.replace(one, costs={}) for one in opening.entries])
        assert openings.draw(flat, openings.lines(flat), WIDE).count('>mha †</text>') == failed


def test_the_page_opens_with_its_question_a_sentence_and_the_table(contents, files):
    text = files['index.html']
    assert '<h1>Which of mha and gla has the lowest valid/loss on StdlibText?</h1>' in text
    sentence = html.escape(opening_of(contents).sentence)
    shown = text.replace('\u00a0', ' ')
    assert f'<p class="lead">{sentence}</p>' in shown and 'separated' in sentence
    assert text.index('class="lead"') < text.index('class="large"') < text.index('class="scroll scores"')
    assert text.index('class="scroll scores"') < text.index('<details')
    assert 'unigram' in text and 'data-label="n">3 seeds<' in shown


def reported(confirmed):
    """Contents whose trials are chosen by one metric and whose confirmed runs report another."""
    before = made.contents(2, 4)
    rows = [
        dataclasses.replace(row, metric='valid/loss', score='test/bits', confirmed=confirmed)
        for row in before.comparison.rows
    ]
    words = {'reported': 'test/bits', 'baselines': {'unigram': 2.4}, 'reasons': ()}
    studies = [dataclasses.replace(study, row=row) for study, row in zip(before.studies, rows, strict=True)]
    comparison = dataclasses.replace(before.comparison, rows=tuple(rows), **words)
    return dataclasses.replace(before, comparison=comparison, studies=tuple(studies))


@pytest.mark.parametrize(('confirmed', 'named'), [((3.3, 3.31, 3.32), 'test/bits'), ((), 'valid/loss')])
def test_a_page_names_the_metric_that_it_shows(confirmed, named):
    """That of confirmed runs only where there are some; curves are those of the metric that chooses."""
    contents = reported(confirmed)
    page = bare(contents)
    assert f'has the lowest {named} on StdlibText' in page and f'<h2>{named} against cost</h2>' in page
    curves = page[page.index('id="curves"') : page.index('id="comparison"')]
    assert 'valid/loss over training steps' in curves and ('unigram' in curves) == (not confirmed)


def test_values_of_trials_are_of_the_metric_that_they_have():
    contents = reported((3.3, 3.31, 3.32))
    assert '>valid/loss, confirmed: test/bits</th>' in tables.trial_table(contents)
    assert '>valid/loss</th>' in tables.trial_table(made.contents(1, 2))
    rows = list(csv.DictReader(io.StringIO(tables.trials_csv(contents))))
    assert {(row['confirms'], row['metric']) for row in rows} == {('0', 'valid/loss'), ('1', 'test/bits')}


def test_the_metric_beside_that_of_the_studies_has_figures_too():
    both = made.contents(2, 9, companion=True)
    plots = figures.companion_plots(both)
    assert [plot.name for plot in plots] == [f'cost_accuracy_{cost}' for cost in costs_of(both) if cost != 'parameters']
    for study, line in zip(both.studies, plots[0].lines, strict=True):
        best = study.companion.statistics['best']
        assert line[:5] == (study.row.name, study.costs.state_bytes, best.mean, best.mean, best.mean)
        assert best.mean == max(point.value for point in study.companion.points if point.ended)
    assert 'valid/accuracy against cost' in bare(both)
    assert 'valid/accuracy over state bytes' in figures.svg(plots[0], key=True)


def test_the_tables_hold_every_study_and_trial(contents, files):
    header, lines = lines_of(files['studies.csv'])
    assert [line[0] for line in lines] == list(made.NAMES[:2])
    for study, line in zip(contents.studies, lines, strict=True):
        row = dict(zip(header, line, strict=True))
        best = study.row.statistics['best']
        assert (row['best'], row['best_low']) == (best.mean, '')
        sure = study.row.statistics['confirmed']
        assert [row[f'confirmed{end}'] for end in ('', '_low', '_high')] == [sure.mean, sure.low, sure.high]
        assert row['decode_ms'] == study.costs.decode_ms and row['peak_bytes'] == study.costs.peak_bytes
    header, lines = lines_of(files['trials.csv'])
    trials = [trial for study in contents.studies for trial in study.trials]
    assert len(lines) == len(trials) == 2 * (9 + 3)
    for trial, line in zip(trials, lines, strict=True):
        row = dict(zip(header, line, strict=True))
        assert (row['state'], row['run'], row['optimizer.peak_lr']) == (
            trial.state,
            trial.link,
            trial.settings['optimizer.peak_lr'],
        )
        assert row['value'] == ('' if trial.value is None else trial.value)


def test_the_page_says_what_it_should(contents, files):
    text = files['index.html']
    assert 'NOT MATCHED' in text and 'base.steps: 2000 there, 1000 here' in text
    assert 'mosaic_gpu</b>: the head has 12 channels' in text
    failed = sum(trial.state == 'failed' for study in contents.studies for trial in study.trials)
    assert failed and text.count('the first that is not finite: stack.layers[3].mixer') == failed
    assert contents.notices[0] in text
    assert html.escape(contents.comparison.at_an_end) in text
    fair = dataclasses.replace(contents.comparison, reasons=())
    text = bare(dataclasses.replace(contents, comparison=fair, notices=()))
    assert 'NOT MATCHED' not in text and 'Matched by params within ±1.0%' in text and '<aside' not in text


def test_a_study_in_which_everything_failed_is_shown(contents):
    """It has no statistics and no point in any figure, but its trials and their reasons are there."""
    first, *others = contents.studies
    points = tuple(dataclasses.replace(point, state='failed', value=None) for point in first.row.points)
    row = dataclasses.replace(first.row, points=points, confirmed=())
    trials = tuple(dataclasses.replace(t, state='failed', value=None, best=False, lengths={}) for t in first.trials)
    failed = dataclasses.replace(first, row=row, companion=row, trials=trials)
    comparison = dataclasses.replace(contents.comparison, rows=(row, *(other.row for other in others)))
    mixed = dataclasses.replace(contents, comparison=comparison, studies=(failed, *others))
    assert bare(mixed).count('class="state failed"') >= len(trials)
    (states,) = (plot for plot in figures.cost_plots(mixed) if plot.name == 'cost_state_bytes')
    assert [line[0] for line in states.lines] == [other.row.name for other in others]
    assert tables.studies_csv(mixed).splitlines()[1].startswith('mha,')
    alone = dataclasses.replace(contents, comparison=dataclasses.replace(comparison, rows=(row,)), studies=(failed,))
    assert not any(section.plots for section in sections(alone))
    assert bare(alone).count('class="state failed"') == len(trials)


def test_names_cannot_break_the_page():
    contents = made.contents(7, 4)
    assert contents.studies[-1].row.name == 'rwkv & <co>'
    text = bare(contents)
    assert 'rwkv &amp; &lt;co&gt;' in text and '<co>' not in text
    assert not Reader(text).open
    (plot,) = (plot for plot in figures.rate_plots(contents) if plot.name == 'learning_rate_rwkv & <co>')
    root = xml.etree.ElementTree.fromstring(figures.svg(plot, key=True))
    assert root[0].text == 'rwkv & <co>: valid/loss over learning rate'


def test_what_does_not_stream_has_no_state_that_would_be_the_least(contents):
    """Nothing is drawn at 0 bytes, and no mark says that none is better in both."""
    first, *others = contents.studies
    classifier = dataclasses.replace(first, costs=dataclasses.replace(first.costs, state_bytes=0.0, state_bytes_8x=0.0))
    found = dataclasses.replace(contents, studies=(classifier, *others))
    rows = [study.row for study in found.studies]
    assert not frontier(found, 'state_bytes', rows)[0] and any(frontier(found, 'state_bytes', rows))
    assert '>no stream<' in tables.cost_table(found) and '0 B<' not in tables.cost_table(found)
    (plot,) = (plot for plot in figures.cost_plots(found) if plot.name == 'cost_state_bytes')
    assert [line[0] for line in plot.lines] == [study.row.name for study in others]


def test_more_tokens_a_second_are_better(contents):
    """The first study is the fastest; of the others, only what has a better value than every faster one is marked."""
    rows = [study.row for study in contents.studies]
    speeds = [study.costs.tokens_per_second for study in contents.studies]
    values = [row.statistics['confirmed'].mean for row in rows]
    expected = [
        all(not (s >= speed and v <= value and (s, v) != (speed, value)) for s, v in zip(speeds, values, strict=True))
        for speed, value in zip(speeds, values, strict=True)
    ]
    assert frontier(contents, 'tokens_per_second', rows) == expected
    assert not any(frontier(contents, 'parameters', rows)), 'what was matched has no marks'
    assert expected[0] and max(speeds) == speeds[0]


def test_numbers_are_short_and_line_up():
    assert [figures.short(value) for value in (1.5e6, 2e4, 0.5, 1e-4, 0.0, 3e19)] == [
        *('1.5M', '20k', '0.5', '1e-4', '0', '3e19'),
    ]
    assert figures.power(3e-4) == '3e-4' and figures.power(0.1) == '1e-1'
    assert tables.decimals([2.345678, 2.1]) == 3 and tables.decimals([0.0123]) == 5 and tables.decimals([]) == 0
    assert tables.decimals([12345.6]) == 0
    assert (
        tables.layers((0, 1, 2, 3)) == '0 to 3'
        and tables.layers((0, 2)) == '0, 2'
        and tables.layers((0, 2, 4)) == '0, 2, 4'
    )
    assert tables.parent('base.model.stack.blocks[0].mixer.decay.rank') == 'base.model.stack.blocks[0].mixer'
    assert tables.parent('base.steps') == 'base' and tables.parent('metric') == ''


def test_looks_of_studies_differ():
    looks = figures.styles([str(n) for n in range(72)])
    assert len(set(looks.values())) == 72
    first = [looks[str(n)] for n in range(8)]
    assert len({look.colour for look in first}) == len({look.marker for look in first}) == 8
    assert set(figures.MARKERS) == set(figures.SHAPES)
