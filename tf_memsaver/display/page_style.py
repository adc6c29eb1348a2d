"""The style sheet of a report's page: light and dark, narrow and wide."""

from __future__ import annotations

from tf_memsaver.display.scales import CHOSEN_COLOUR, PLAIN_COLOUR, PLANNED_COLOUR

STYLE = f"""
:root {{ color-scheme: light dark; --paper: #fff; --panel: #f5f6f8; --ink: #1d2330; --soft: #5b6474; --line: #d9dde4;
  --plain: {PLAIN_COLOUR}; --planned: {PLANNED_COLOUR}; --chosen: {CHOSEN_COLOUR}; --kept: #8a94a6; --pinned: #9b6bc3;
  --recomputed: {PLANNED_COLOUR}; --recomputed-too: #2a9d8f; --label: #fff }}
@media (prefers-color-scheme: dark) {{
  :root {{ --paper: #14181f; --panel: #1d232d; --ink: #e6e9ef; --soft: #a3acba; --line: #353d4a; --label: #262d38 }} }}
* {{ box-sizing: border-box }}
body {{ margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif }}
main {{ max-width: 1120px; margin: 0 auto; padding: 24px 20px 60px }}
h1 {{ font-size: 1.05rem; font-weight: 600; color: var(--soft); margin: 0 0 6px; overflow-wrap: anywhere }}
h2 {{ font-size: 1.2rem; margin: 40px 0 6px }}
h3 {{ font-size: 1rem; margin: 14px 0 4px }}
p {{ margin: 6px 0 10px; max-width: 76ch }}
.answer {{ font-size: 1.45rem; line-height: 1.35; font-weight: 600; margin: 0 0 14px; max-width: 62ch }}
.soft, figcaption {{ color: var(--soft); font-size: .9rem }}
.cards {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 12px; margin: 14px 0 }}
.card {{ background: var(--panel); border-radius: 8px; padding: 12px 14px; border-top: 4px solid var(--line) }}
.card b {{ display: block; font-size: 1.5rem; line-height: 1.25 }}
.card.plain {{ border-color: var(--plain) }} .card.planned {{ border-color: var(--planned) }}
.card.cost {{ border-color: var(--chosen) }} .card.kept {{ border-color: var(--kept) }}
.card.recomputed {{ border-color: var(--recomputed) }} .card.pinned {{ border-color: var(--pinned) }}
figure {{ margin: 10px 0 }}
.pair {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 12px 32px }}
.pair > * {{ min-width: 0 }}
table {{ border-collapse: collapse; width: 100%; font-size: .9rem }}
th, td {{ text-align: left; padding: 4px 8px 4px 0; border-bottom: 1px solid var(--line); vertical-align: top;
  overflow-wrap: anywhere }}
th {{ color: var(--soft); font-weight: 600 }}
td.bytes, th.bytes {{ text-align: right; white-space: nowrap; padding-right: 0; font-variant-numeric: tabular-nums }}
.stack {{ display: flex; height: 22px; border-radius: 4px; overflow: hidden; margin: 8px 0 4px }}
.keys {{ display: flex; flex-wrap: wrap; gap: 2px 16px; list-style: none; margin: 6px 0 10px; padding: 0;
  font-size: .9rem }}
.keys i, .chip i {{ display: inline-block; width: .75em; height: .75em; border-radius: 2px; margin-right: 6px }}
.strip {{ display: flex; height: 26px; border-radius: 4px; overflow: hidden; margin: 10px 0 6px; gap: 1px }}
.strip span {{ min-width: 0 }}
.is-kept {{ background: var(--kept) }} .is-pinned {{ background: var(--pinned) }}
.is-recomputed {{ background: var(--recomputed) }} .is-recomputed.odd {{ background: var(--recomputed-too) }}
.tree {{ border-top: 1px solid var(--line) }}
.tree details > .inside {{ padding-left: 16px; border-left: 1px solid var(--line); margin-left: 5px }}
.row, summary {{ display: grid; grid-template-columns: minmax(0, 1fr) 250px 190px; gap: 12px; align-items: center;
  padding: 4px 0; border-bottom: 1px solid var(--line) }}
.why summary {{ display: block }}
summary {{ cursor: pointer; list-style: none }}
summary::-webkit-details-marker {{ display: none }}
summary .name::before {{ content: "▸"; display: inline-block; width: 1em; color: var(--soft) }}
details[open] > summary .name::before {{ content: "▾" }}
.name {{ overflow-wrap: anywhere }} .row .name {{ padding-left: 1em }}
.chip {{ font-size: .85rem; color: var(--soft); white-space: nowrap }}
.amount {{ text-align: right; font-size: .85rem; font-variant-numeric: tabular-nums; white-space: nowrap }}
.amount .bar {{ display: block; height: 4px; margin: 1px 0 0 auto; border-radius: 2px }}
.bar.plain {{ background: var(--plain) }} .bar.planned {{ background: var(--planned) }}
pre {{ background: var(--panel); border-radius: 8px; padding: 10px 14px; overflow-x: auto; font-size: .88rem }}
.buttons {{ margin: 8px 0 }}
button {{ font: inherit; font-size: .88rem; color: var(--ink); background: var(--panel); border: 1px solid var(--line);
  border-radius: 6px; padding: 3px 12px; cursor: pointer; margin-right: 6px }}
.js-plotly-plot text {{ fill: var(--ink) !important }}
.js-plotly-plot .gridlayer path {{ stroke: var(--line) !important }}
.js-plotly-plot .hoverlayer .hovertext path {{ fill: var(--label) !important; stroke: var(--soft) !important }}
@media (max-width: 620px) {{
  main {{ padding: 16px 12px 40px }} .answer {{ font-size: 1.2rem }}
  .card b {{ font-size: 1.08rem; white-space: nowrap }}
  .cards {{ grid-template-columns: repeat(auto-fit, minmax(104px, 1fr)); gap: 8px }} .card {{ padding: 10px }}
  .row, summary {{ grid-template-columns: minmax(0, 1fr) auto; gap: 0 10px }}
  .name {{ grid-column: 1 / -1 }} .row .chip, summary .chip {{ padding-left: 1em }} }}
"""

SCRIPT = """
for (const button of document.querySelectorAll("button[data-open]"))
  button.addEventListener("click", () => {
    for (const each of document.querySelectorAll(".tree details")) each.open = button.dataset.open === "yes";
  });
"""
"""Folds and unfolds all blocks."""
