"""How the page of a report looks: on a screen, light or dark, on a phone, on paper; and what its script does."""

import re

from attnlab.compare.axes import COLOURS

INK, SOFT, GREY, PALE, GRID, PAPER = '#222222', '#595959', '#767676', '#c8c8c8', '#e8e8e8', '#ffffff'
"""Of text, of lesser text, of axes, of what stands behind, of grids, and of the page."""

DARK = ('#4aa8e0', '#f08a3c', '#2fc496', '#e39ac2', '#f0b429', '#9ad4f7', '#e8e8e8', '#b98be0')
"""What `COLOURS` are on a dark page."""

LIGHT_VALUES = {'ink': INK, 'soft': SOFT, 'axis': GREY, 'pale': PALE, 'grid': GRID, 'paper': PAPER}
DARK_VALUES = {
    'ink': '#e6e6e3',
    'soft': '#adb0b5',
    'axis': '#8b8f96',
    'pale': '#565b63',
    'grid': '#2c3037',
    'paper': '#15171b',
}
NAMES = {value: name for name, value in LIGHT_VALUES.items()} | {
    '#333333': 'soft',
    **{colour: f's{index}' for index, colour in enumerate(COLOURS)},
}
"""The variable of the page that stands for a colour of figures."""


def themed(text: str) -> str:
    """An SVG with the page's variables in the place of its colours, so that it is dark on a dark page."""
    return re.sub(r'(?<=[:; ])#[0-9a-f]{6}\b', lambda found: _variable(found[0]), text)


def _variable(colour: str) -> str:
    return f'var(--{NAMES[colour]})' if colour in NAMES else colour


def _values(values: dict[str, str], colours: tuple[str, ...]) -> str:
    found = values | {f's{index}': colour for index, colour in enumerate(colours)}
    return ' '.join(f'--{name}: {value};' for name, value in found.items())


STYLE = f"""\
:root {{
  color-scheme: light dark; {_values(LIGHT_VALUES, COLOURS)}
  --line: #d9d9d9; --wash: #f6f6f4; --link: #0b5394; --good: #00614a; --bad: #a1221b;
  --matched: #eaf5f1; --unmatched: #fbeeed; --notice: #fdf6e3; --shade: #0003;
}}
@media screen and (prefers-color-scheme: dark) {{
  :root {{
    {_values(DARK_VALUES, DARK)}
    --line: #363b43; --wash: #1e2126; --link: #7db8f0; --good: #57d3a8; --bad: #ff8f85;
    --matched: #12261f; --unmatched: #2e1918; --notice: #2b2412; --shade: #fff2;
  }}
}}
"""
STYLE += """\
* { box-sizing: border-box; }
body {
  font: 16px/1.5 system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Arial, sans-serif;
  color: var(--ink); background: var(--paper); max-width: 62rem; margin: 0 auto; padding: 2rem 1.25rem 4rem;
}
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .8rem; overflow-wrap: anywhere; text-wrap: balance; }
h2 { font-size: 1.1rem; margin: 0; display: inline; font-weight: 600; overflow-wrap: anywhere; }
p { max-width: 48rem; margin: .5rem 0 .9rem; overflow-wrap: anywhere; }
.lead { font-size: 1.15rem; line-height: 1.45; max-width: 56rem; margin-bottom: 1rem; }
section > p:not(.lead), details > p, .caption { color: var(--soft); font-size: .9rem; }
a { color: var(--link); }
code { font: .92em ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace; overflow-wrap: anywhere; }

.task { display: block; font-size: 1.35rem; margin: 2.4rem 0 .6rem; padding-top: 1rem; }
.task { border-top: 2px solid var(--ink); }

details { border-top: 1px solid var(--line); padding: .55rem 0; }
details:last-of-type { border-bottom: 1px solid var(--line); }
summary { cursor: pointer; padding: .15rem 0; }
summary:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
details[open] > summary { margin-bottom: .6rem; }
.rest { margin-top: 2.2rem; }

.key { list-style: none; padding: 0; margin: .6rem 0 .8rem; display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; }
.key li { overflow-wrap: anywhere; }
.mark { width: .8em; height: .8em; margin-right: .45em; vertical-align: -.05em; flex: none; }

.verdict { border-left: 4px solid; padding: .5rem .9rem; margin: .8rem 0; max-width: 56rem; overflow-wrap: anywhere; }
.verdict { font-size: .92rem; }
.verdict p { margin: 0; max-width: none; }
.verdict ul { margin: .2rem 0; padding-left: 1.1rem; }
.matched { border-color: #00916b; background: var(--matched); }
.unmatched { border-color: #c9362c; background: var(--unmatched); }
.notice { border-color: #b07a00; background: var(--notice); }

.scroll {
  overflow-x: auto; margin: .6rem 0; max-width: fit-content; will-change: transform;
  background: linear-gradient(to left, var(--paper) 45%, transparent) right / 3rem 100% no-repeat local,
    linear-gradient(to left, var(--shade), transparent) right / .8rem 100% no-repeat scroll;
}
.name { white-space: nowrap; }
.scroll:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
table { border-collapse: separate; border-spacing: 0; font-size: .87rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .75rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th, td { white-space: nowrap; }
th:first-child { padding-left: .2rem; position: sticky; left: 0; background: var(--paper); }
thead th { border-bottom: 1.5px solid var(--ink); vertical-align: bottom; font-weight: 600; }
tbody th { font-weight: 500; }
tbody tr:hover > * { background: var(--wash); }
th.number, td.number { text-align: right; }
.interval, .none { color: var(--soft); }
.interval { display: block; font-size: .92em; }
.group th { padding-top: 1rem; font-weight: 700; }
.optimal { color: var(--ink); font-size: .8em; }
.yes { color: var(--good); }
.no { color: var(--bad); font-weight: 600; }
.other, .whose { color: var(--soft); }
.state.failed { color: var(--bad); font-weight: 600; }
.state.pruned, .state.not-finished { color: var(--soft); }
.wrapping, .reason { display: inline-block; min-width: 16rem; max-width: 34rem; }
.wrapping, .reason { white-space: normal; overflow-wrap: anywhere; }

.scores { max-width: none; }
.scores table { font-size: .92rem; width: 100%; }
@media screen { .scores th + th, .scores td { padding-left: .6rem; padding-right: .6rem; } }
.scores tr.trivial > * { color: var(--soft); }
.scores b { font-weight: 750; }
.scores thead th, .scores td:nth-child(3) { white-space: normal; }

.large { margin: 1.2rem 0 .4rem; }
.large svg, .curve svg { display: block; width: 100%; height: auto; overflow: visible; }
.curves { touch-action: pan-y; }
.phone { display: none !important; }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 17.5rem), 1fr)); gap: 1rem 1.2rem; }
.panels + p { margin-top: 1.4rem; }
.panels.wide { grid-template-columns: minmax(0, 27rem); }
figure { margin: 0; min-width: 0; position: relative; }
figure svg { display: block; width: 100%; height: auto; }
figure svg text { fill: var(--ink); }
figcaption { font-size: .82rem; color: var(--soft); overflow-wrap: anywhere; }
.files { white-space: nowrap; }
p.files { font-size: .85rem; white-space: normal; overflow-wrap: anywhere; }
.tip {
  position: absolute; z-index: 2; pointer-events: none; max-width: 16rem; padding: .35rem .6rem; border-radius: 4px;
  background: var(--paper); color: var(--ink); border: 1px solid var(--axis); font-size: .8rem; line-height: 1.4;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere; box-shadow: 0 2px 8px var(--shade);
}
.tip i { display: inline-block; width: .7em; height: .7em; border-radius: 50%; margin-right: .45em; }

@media (max-width: 40rem) {
  body { padding: 1.1rem .9rem 3rem; }
  h1 { font-size: 1.35rem; }
  .lead { font-size: 1.05rem; }
  .desk { display: none !important; }
  .phone { display: block !important; }
  .scores, .scores table, .scores tbody, .scores tr, .scores th, .scores td { display: block; }
  .scores { overflow: visible; max-width: none; background: none; will-change: auto; }
  .scores thead { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
  .scores tr { padding: .55rem 0; border-bottom: 1px solid var(--line); }
  .scores tbody th, .scores td { border: 0; padding: .1rem 0; position: static; }
  .scores tbody th { white-space: normal; }
  .scores td.number { display: flex; justify-content: space-between; gap: 1rem; white-space: nowrap; }
  .scores td::before { content: attr(data-label); color: var(--soft); text-align: left; white-space: normal; }
  .scores td.none { display: none; }
  .scores tbody th { font-size: 1.05rem; font-weight: 600; overflow-wrap: anywhere; }
  .scores .name { white-space: normal; }
}

@page { margin: 14mm 12mm; }
@media print {
  html { font-size: 12.5px; }
  body { font-size: 1rem; max-width: none; padding: 0; }
  summary { list-style: none; }
  ::details-content { content-visibility: visible; block-size: auto; }
  h2, section > p:not(.files), .key, .group { break-after: avoid; }
  .verdict, .whole, figure, tr, p, .scroll { break-inside: avoid; }
  .long { break-inside: auto; }
  a { color: inherit; }
  .verdict, .yes, .no, .state { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  thead { display: table-header-group; }
  .scroll { overflow: visible; max-width: none; background: none; will-change: auto; }
  p.files { break-before: avoid; }
  table { font-size: 7pt; width: 100%; }
  th, td { padding: .12rem .25rem; white-space: normal; overflow-wrap: break-word; }
  th:first-child { position: static; background: none; }
  td.number, .interval { white-space: nowrap; }
  .wrapping, .reason { min-width: 0; max-width: none; }
  .panels { display: block; orphans: 1; widows: 1; }
  .panels figure { display: inline-block; width: 31.3%; margin: 0 1% .6rem 0; vertical-align: top; }
  .panels.wide figure { width: 48%; }
  figcaption { font-size: 6.5pt; }
  figcaption .files a { font-size: 0; margin-right: 1mm; }
  figcaption .files a::after { content: attr(title); font-size: 6.5pt; }
  .files { white-space: normal; }
}
"""

SCRIPT = """\
for (const svg of document.querySelectorAll('svg[data-series]')) {
  const series = JSON.parse(svg.dataset.series), figure = svg.closest('figure'), rule = svg.querySelector('.rule');
  const every = [...new Set(series.flatMap(one => one.points.map(point => point[1])))];
  const tip = figure.appendChild(document.createElement('div'));
  tip.className = 'tip'; tip.hidden = true;
  const hide = () => { tip.hidden = true; rule.style.visibility = 'hidden'; };
  const show = event => {
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    const at = (event.clientX - box.left) * scale;
    const x = every.reduce((best, one) => Math.abs(one - at) < Math.abs(best - at) ? one : best);
    const near = series.map(one => [one, one.points.reduce(
      (best, point) => Math.abs(point[1] - x) < Math.abs(best[1] - x) ? point : best)])
      .filter(([, point]) => Math.abs(point[1] - x) < 12).sort((a, b) => a[1][2] - b[1][2]);
    const line = text => { const found = document.createElement('div'); found.append(text); return found; };
    tip.replaceChildren(line('step ' + Number(near[0][1][0]).toLocaleString('en')), ...near.map(([one, point]) => {
      const mark = document.createElement('i'), found = line(mark);
      mark.style.background = one.colour; found.append(one.name + '  ' + point[3]); return found; }));
    rule.setAttribute('transform', `translate(${x} 0)`); rule.style.visibility = 'visible'; tip.hidden = false;
    const left = x / scale, wide = tip.offsetWidth;
    tip.style.left = (left + wide + 16 > box.width ? Math.max(0, left - wide - 12) : left + 12) + 'px';
    tip.style.top = '1.2rem';
  };
  svg.addEventListener('pointermove', show); svg.addEventListener('pointerdown', show);
  svg.addEventListener('pointerleave', event => { if (event.pointerType !== 'touch') hide(); });
  addEventListener('pointerdown', event => { if (!svg.contains(event.target)) hide(); });
}
const open = () => document.querySelectorAll('details').forEach(one => { one.open = true; });
addEventListener('beforeprint', open);
const target = () => { const one = location.hash && document.getElementById(location.hash.slice(1));
  if (one && one.tagName === 'DETAILS') { one.open = true; one.scrollIntoView(); } };
addEventListener('hashchange', target); target();
"""
