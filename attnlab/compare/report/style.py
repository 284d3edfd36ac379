"""How the page of a report looks: on a screen, on a phone, on paper."""

STYLE = """\
:root { color-scheme: light; --line: #d9d9d9; --soft: #f6f6f4; --quiet: #595959; --link: #0b5394; }
* { box-sizing: border-box; }
body {
  font: 15px/1.5 system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Arial, sans-serif;
  color: #222; background: #fff; max-width: 84rem; margin: 0 auto; padding: 1.5rem 1.25rem 4rem;
}
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .6rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.8rem 0 .5rem; padding-top: .8rem; border-top: 2px solid #222; }
p { max-width: 48rem; margin: .5rem 0 .9rem; }
section > p { color: var(--quiet); font-size: .9rem; }
a { color: var(--link); }
code { font: .92em ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace; }

nav ul { list-style: none; padding: 0; margin: 1.2rem 0 0; display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; }
.key { list-style: none; padding: 0; margin: .6rem 0 .8rem; display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; }
.key li { overflow-wrap: anywhere; }
.mark { width: .8em; height: .8em; margin-right: .45em; vertical-align: -.05em; flex: none; }

.verdict { border-left: 5px solid; padding: .6rem 1rem; margin: .8rem 0; max-width: 64rem; overflow-wrap: anywhere; }
.verdict p { margin: 0; }
.verdict ul { margin: .2rem 0; padding-left: 1.1rem; }
.matched { border-color: #007a5a; background: #eaf5f1; }
.unmatched { border-color: #b3261e; background: #fbeeed; }
.notice { border-color: #b07a00; background: #fdf6e3; }

.scroll {
  overflow-x: auto; margin: .6rem 0; max-width: fit-content; will-change: transform;
  background: linear-gradient(to left, #fff 45%, #fff0) right / 3rem 100% no-repeat local,
    linear-gradient(to left, #0003, #0000) right / .8rem 100% no-repeat scroll;
}
.name { white-space: nowrap; }
.scroll:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
table { border-collapse: separate; border-spacing: 0; font-size: .87rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .75rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th, td { white-space: nowrap; }
th:first-child { padding-left: .2rem; position: sticky; left: 0; background: #fff; }
thead th { border-bottom: 1.5px solid #222; vertical-align: bottom; font-weight: 600; }
tbody th { font-weight: 500; }
tbody tr:hover > * { background: var(--soft); }
th.number, td.number { text-align: right; }
.interval, .none { color: var(--quiet); }
.interval { display: block; font-size: .92em; }
.group th { padding-top: 1rem; font-weight: 700; }
.optimal { color: #222; font-size: .8em; }
.yes { color: #00614a; }
.no { color: #a1221b; font-weight: 600; }
.other, .whose { color: var(--quiet); }
.state.failed { color: #a1221b; font-weight: 600; }
.state.pruned, .state.not-finished { color: var(--quiet); }
.wrapping, .reason { display: inline-block; min-width: 16rem; max-width: 34rem; }
.wrapping, .reason { white-space: normal; overflow-wrap: anywhere; }

.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 17.5rem), 1fr)); gap: 1rem 1.2rem; }
.panels + p { margin-top: 1.4rem; }
.panels.wide { grid-template-columns: minmax(0, 27rem); }
figure { margin: 0; min-width: 0; }
figure svg { display: block; width: 100%; height: auto; }
figcaption { font-size: .8rem; color: var(--quiet); overflow-wrap: anywhere; }
.files { white-space: nowrap; }
p.files { font-size: .85rem; white-space: normal; overflow-wrap: anywhere; }

@media (max-width: 40rem) {
  body { padding: 1rem .9rem 3rem; }
  h1 { font-size: 1.35rem; }
  nav ul { gap: .4rem 1rem; }
}

@page { margin: 14mm 12mm; }
@media print {
  html { font-size: 12.5px; }
  body { font-size: 1rem; max-width: none; padding: 0; }
  nav { display: none; }
  h2 { margin-top: 1.6rem; }
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
