"""The page of a report as a browser shows it: nothing wider than a phone, nothing over anything else, nothing cut."""

import html
import json
import re
import shutil
import subprocess

import pytest

from attnlab.compare.report import opening as openings
from attnlab.compare.report.figures import svg, swatch
from attnlab.compare.report.page import page, sections, shell
from tests.compare.report import made

CHROMIUM = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None)
FLAGS = (
    *('--headless', '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--hide-scrollbars'),
    *('--disable-background-networking', '--disable-component-update', '--disable-sync', '--disable-dev-shm-usage'),
)
PHONE, DESK, PAPER = 390, 1300, 702
"""Pixels of CSS; paper is A4 between its margins, 186 mm wide."""

SCRIPT = """
<script>
const box = element => element.getBoundingClientRect();
const before = (a, b) => a.right <= b.left + 1 || a.bottom <= b.top + 2;
const found = {overlaps: [], outside: [], cut: [], small: [], struck: [], broken: [], figures: 0};
const along = shape => {
  const whole = shape.getTotalLength(), steps = Math.ceil(whole / 2), place = shape.getScreenCTM();
  return Array.from({length: steps + 1}, (_, n) => shape.getPointAtLength(n * whole / steps).matrixTransform(place));
};
for (const svg of document.querySelectorAll('figure svg')) {
  const name = svg.getAttribute('aria-label'), texts = [...svg.querySelectorAll('text')], frame = box(svg);
  if (!frame.width) continue;
  found.figures += 1;
  texts.forEach((one, i) => {
    const a = box(one);
    if (a.left < frame.left - 1 || a.right > frame.right + 1 || a.top < frame.top - 1 || a.bottom > frame.bottom + 1)
      found.outside.push([name, one.textContent]);
    if (a.height < 8 && a.width < 8) found.small.push([name, one.textContent]);
    for (const other of texts.slice(i + 1))
      if (!before(a, box(other)) && !before(box(other), a))
        found.overlaps.push([name, one.textContent, other.textContent]);
    if (svg.closest('.large'))
      for (const shape of svg.querySelectorAll('path, polyline, circle, rect'))
        if (one.compareDocumentPosition(shape) & Node.DOCUMENT_POSITION_FOLLOWING)
          if (along(shape).some(at => a.left < at.x && at.x < a.right && a.top + 3 < at.y && at.y < a.bottom - 3))
            found.struck.push([one.textContent, shape.outerHTML]);
  });
}
for (const table of document.querySelectorAll('table'))
  if (box(table).right > box(document.querySelector('main')).right + 1)
    found.cut.push([table.parentNode.ariaLabel, box(table).width]);
for (const text of document.querySelectorAll('p, h1, h2, li, figcaption'))
  if (text.scrollWidth > text.clientWidth + 1 && text.clientWidth) found.cut.push(text.textContent);
const together = /[0-9.]+\\s(±\\s[0-9.]+|%|[KMGT]iB|seeds?|examples|\\[[0-9.]+,\\s[0-9.]+\\])/g;
for (const part of document.querySelectorAll('.lead, .scores td:nth-child(2), .scores td:nth-child(3)')) {
  const walker = document.createTreeWalker(part, NodeFilter.SHOW_TEXT), range = document.createRange();
  for (let text = walker.nextNode(); text; text = walker.nextNode())
    for (const match of text.data.matchAll(together)) {
      range.setStart(text, match.index); range.setEnd(text, match.index + match[0].length);
      if (new Set([...range.getClientRects()].map(line => line.top)).size > 1) found.broken.push(match[0]);
    }
}
found.width = document.documentElement.scrollWidth;
found.window = innerWidth;
console.log('looked');
top.document.title = JSON.stringify(found);
</script>
"""

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason='there is no chromium, chromium-browser or google-chrome on the path'),
    pytest.mark.xdist_group('browser'),
]


@pytest.fixture(scope='module')
def report(tmp_path_factory):
    """The page of eight studies of sixteen trials, failures and pruned ones among them."""
    contents = made.contents()
    parts = sections(contents)
    drawn = {plot.name: svg(plot, key=False) for part in parts for plot in part.plots}
    path = tmp_path_factory.mktemp('browser') / 'index.html'
    path.write_text(page(contents, parts, drawn))
    return path


def chromium(home, *arguments):
    """Runs the browser once, with a profile of its own; returns what it wrote to both streams."""
    command = [CHROMIUM, *FLAGS, f'--user-data-dir={home / "profile"}', *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, done.stderr


@pytest.fixture(
    scope='module', params=[made.crowd, made.against_a_line, made.of_runs], ids=['crowd', 'against_a_line', 'of_runs']
)
def opened(request, tmp_path_factory):
    """How a page opens whose names and lines have little room."""
    opening = request.param()
    path = tmp_path_factory.mktemp('browser') / 'index.html'
    heads = {name: f'<span class="name">{swatch(look)}{name}</span>' for name, look in opening.looks.items()}
    path.write_text(
        shell('Which?', openings.lead(opening), f'{openings.figure(opening, "")}{openings.table(opening, heads)}')
    )
    return path


def looked_at(report, tmp_path, width, edit=lambda text: text, script=SCRIPT):
    """What the script sees on a copy of the page so many pixels wide, all of it open, in a frame: windows have a least
    width.
    """
    text = edit(report.read_text().replace('<details ', '<details open ')).replace('</body>', f'{script}</body>')
    copy = tmp_path / 'index.html'
    copy.write_text(
        f'<!doctype html><meta charset="utf-8"><title></title>'
        f'<iframe style="border: 0; width: {width}px; height: 900px" srcdoc="{html.escape(text)}"></iframe>'
    )
    window = f'--window-size={max(width + 50, 800)},1000'
    shown, said = chromium(tmp_path, window, '--enable-logging=stderr', '--dump-dom', copy.as_uri())
    console = re.findall(r'CONSOLE.*?"(.*)", source', said)
    assert console == ['looked'], said
    return json.loads(html.unescape(re.search(r'<title>(.*?)</title>', shown)[1]))


@pytest.mark.parametrize('width', [PHONE, DESK])
def test_on_a_phone_and_on_a_desk(report, tmp_path, width):
    """The page is as wide as the window; tables that are wider scroll in a box of their own."""
    found = looked_at(report, tmp_path, width)
    assert found['window'] == width and found['width'] <= width
    assert found['figures'] == 23, 'the large one, two of curves, and the small ones'
    assert not found['overlaps'] and not found['outside'] and not found['small'] and not found['struck']


@pytest.mark.parametrize('width', [PHONE, DESK])
def test_names_at_points_are_whole_and_nothing_is_drawn_over_them(opened, tmp_path, width):
    """Nor over the names of trivial predictors' lines: no name, no mark, no interval and no line to another name."""
    found = looked_at(opened, tmp_path, width)
    assert found['figures'] == 1 and found['width'] <= width
    assert not found['overlaps'] and not found['outside'] and not found['struck']
    assert not re.search('…</text>', opened.read_text())


@pytest.mark.parametrize('width', [PHONE, DESK])
def test_tables_fit_and_lines_end_between_numbers(opened, tmp_path, width):
    """No column of scores and costs is lost, and a value, its error and its unit stand together."""
    found = looked_at(opened, tmp_path, width)
    assert not found['cut'] and not found['broken']


HOVER = """
<script>
const curves = document.querySelector('svg[data-series]'), at = curves.getBoundingClientRect();
curves.dispatchEvent(new PointerEvent('pointermove', {clientX: at.left + 0.5 * at.width, clientY: at.top + 9}));
const tip = curves.closest('figure').querySelector('.tip');
console.log('looked');
top.document.title = JSON.stringify({tip: tip.innerText.split('\\n'), hidden: tip.hidden,
  rule: curves.querySelector('.rule').style.visibility});
</script>
"""


def test_values_of_curves_stand_at_the_pointer(report, tmp_path):
    found = looked_at(report, tmp_path, DESK, script=HOVER)
    assert not found['hidden'] and found['rule'] == 'visible'
    assert found['tip'][0].startswith('step ') and len(found['tip']) == 1 + len(made.NAMES)
    assert any(line.startswith('rwkv & <co>') for line in found['tip']), 'names are text, whatever they hold'


TAP = """
<script>
const curves = document.querySelector('svg[data-series]'), at = curves.getBoundingClientRect();
const tip = curves.closest('figure').querySelector('.tip'), hidden = [];
const send = (target, name, pointerType) => {
  const options = {clientX: at.left + 0.5 * at.width, clientY: at.top + 9, pointerType, bubbles: true};
  target.dispatchEvent(new PointerEvent(name, options));
  hidden.push(tip.hidden);
};
send(curves, 'pointerdown', 'touch'); send(curves, 'pointerleave', 'touch');
send(document.body, 'pointerdown', 'touch');
send(curves, 'pointermove', 'mouse'); send(curves, 'pointerleave', 'mouse');
console.log('looked');
top.document.title = JSON.stringify({hidden});
</script>
"""


def test_values_of_curves_stay_after_a_tap_until_the_next_elsewhere(report, tmp_path):
    """A finger leaves when it is lifted, a mouse when it moves away."""
    found = looked_at(report, tmp_path, DESK, script=TAP)
    assert found['hidden'] == [False, False, True, False, True]


def test_on_paper_no_table_is_cut(report, tmp_path):
    """The rules for paper, applied to a window as wide as the paper."""
    found = looked_at(report, tmp_path, PAPER, lambda text: text.replace('@media print', '@media screen'))
    assert found['window'] == PAPER and found['width'] <= PAPER and not found['cut']
    assert not found['overlaps'] and not found['outside']


def test_it_prints(report, tmp_path):
    path = tmp_path / 'report.pdf'
    chromium(tmp_path, '--no-pdf-header-footer', f'--print-to-pdf={path}', report.as_uri())
    content = path.read_bytes()
    assert content.startswith(b'%PDF-')
    assert 5 <= len(re.findall(rb'/Type\s*/Page\b', content)) <= 25
