"""The style sheet of pages. Colours are those of Okabe and Ito, for all kinds of colour vision; darker ones of the same
hue where white would swallow them.

Knows: how the classes of `decode.page` and `decode.svg` look on light and dark screens and on paper. Refuses to know:
what is in a page.
"""

LIGHT = ("#0072b2", "#d55e00", "#00805d", "#a8447f", "#8a6100", "#4a5568")
"""Of lines and bars, in order, on white: 4.5 : 1 or nearly so."""
DARK = ("#56b4e9", "#e69f00", "#2fc79a", "#e29bc3", "#f0e442", "#cbd5e0")


def _looks(colours: tuple[str, ...]) -> str:
    return " ".join(f"--c{index}: {colour};" for index, colour in enumerate(colours))


_CLASSES = " ".join(f".s{index} {{ --c: var(--c{index}); }}" for index in range(len(LIGHT)))
_LIGHT = "--paper: #fff; --text: #1a202c; --pale: #4a5568; --rule: #a0aec0; --grid: #e2e8f0; --box: #f5f7fa; "
_DARK = "--paper: #14181f; --text: #e8ecf2; --pale: #a9b4c4; --rule: #5a6677; --grid: #2b3340; --box: #1d232d; "

STYLE = f"""
:root {{ color-scheme: light dark; {_LIGHT}{_looks(LIGHT)} }}
@media screen and (prefers-color-scheme: dark) {{ :root {{ {_DARK}{_looks(DARK)} }} }}
{_CLASSES}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; max-width: 70rem; padding: 1rem clamp(.75rem, 3vw, 2rem) 4rem; background: var(--paper);
  color: var(--text); font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }}
h1 {{ font-size: clamp(1.5rem, 5vw, 2.1rem); line-height: 1.2; margin: .5rem 0 0; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.35rem; margin: 2.5rem 0 .25rem; border-bottom: 2px solid var(--grid); padding-bottom: .2rem; }}
h3 {{ font-size: 1rem; margin: 0; }}
p {{ margin: .3rem 0; }}
a {{ color: var(--c0); }}
.under, .about, figcaption p, .how, .does {{ color: var(--pale); }}
.about {{ max-width: 48rem; }}
figcaption p, .how {{ font-size: .875rem; line-height: 1.4; }}
.notice {{ border-left: 4px solid var(--c1); background: var(--box); padding: .5rem .75rem; overflow-wrap: anywhere; }}
.tiles {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .75rem; margin: 1rem 0; }}
.tiles div {{ background: var(--box); border-radius: .5rem; padding: .6rem .8rem; }}
.tiles dt {{ font-size: .875rem; color: var(--pale); }}
.tiles dd {{ margin: 0; }}
.tiles strong {{ display: block; font-size: 1.7rem; line-height: 1.25; font-variant-numeric: tabular-nums; }}
.tiles span {{ font-size: .8125rem; color: var(--pale); }}
nav ul {{ list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; padding: 0; margin: 1rem 0; }}
nav a {{ display: inline-block; padding: .3rem 0; }}
.facts {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)); gap: .1rem 2rem;
  margin: 1rem 0; }}
.facts div {{ display: grid; grid-template-columns: 8.5rem 1fr; gap: .5rem; }}
.facts dt {{ color: var(--pale); }}
.facts dd {{ margin: 0; overflow-wrap: anywhere; }}
.command {{ margin: .1rem 0 .6rem; padding: .5rem .75rem; background: var(--box); border-radius: .4rem;
  white-space: pre-wrap; overflow-wrap: anywhere; font-size: .875rem; }}
.does {{ font-size: .875rem; margin: .4rem 0 0; }}
.items {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(22rem, 100%), 1fr)); gap: 1.75rem 2.5rem;
  margin-top: 1rem; }}
.items > * {{ min-width: 0; margin: 0; }}
.wide {{ grid-column: 1 / -1; }}
.chart {{ max-width: 33rem; }}
svg {{ display: block; width: 100%; height: auto; margin-top: .4rem; overflow: visible;
  font: 11.5px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }}
svg text {{ fill: var(--text); font-variant-numeric: tabular-nums; }}
svg .tick {{ fill: var(--pale); font-size: 11px; }}
svg .strong {{ fill: var(--text); font-weight: 600; }}
.grid, .axis, .level, .mark, .lead, .line {{ fill: none; }}
.grid {{ stroke: var(--grid); }}
.axis {{ stroke: var(--rule); }}
.level {{ stroke: var(--rule); stroke-width: 1.5; }}
.mark {{ stroke: var(--text); stroke-dasharray: 4 3; }}
.lead {{ stroke: var(--rule); stroke-width: .8; }}
.line {{ stroke: var(--c); stroke-width: 2.2; stroke-linejoin: round; }}
.dot {{ fill: var(--c); stroke: var(--paper); stroke-width: .8; }}
.bar {{ stroke: var(--c); stroke-width: 1.2; }}
.bar.s0 {{ fill: var(--c); }}
.hatch rect {{ fill: var(--paper); }}
.hatch path {{ stroke: var(--c); stroke-width: 2; fill: none; }}
details {{ font-size: .875rem; margin-top: .3rem; }}
summary {{ cursor: pointer; color: var(--pale); padding: .25rem 0; }}
.scroll {{ overflow-x: auto; max-height: 24rem; }}
.wide .scroll {{ max-height: none; margin-top: .4rem; }}
table {{ border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: left; padding: .22rem .9rem .22rem 0; vertical-align: top; }}
th, td {{ border-bottom: 1px solid var(--grid); }}
th {{ color: var(--pale); font-weight: 600; position: sticky; top: 0; background: var(--paper); }}
.number {{ text-align: right; }}
td code {{ background: var(--box); padding: .05rem .3rem; border-radius: .25rem; white-space: pre-wrap; }}
.legend {{ list-style: none; padding: 0; display: grid; gap: .35rem 2rem; margin: .6rem 0;
  grid-template-columns: repeat(auto-fit, minmax(min(22rem, 100%), 1fr)); }}
.texts label {{ display: block; padding: .4rem 0; font-size: .875rem; }}
.texts:has(input:checked) .marked del {{ display: inline; }}
article {{ border-top: 1px solid var(--grid); padding: .75rem 0; }}
.prompt {{ font-weight: 600; white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: plaintext; }}
.marked {{ max-width: 48rem; margin: .4rem 0; unicode-bidi: plaintext; }}
@media print {{
  body {{ max-width: none; font-size: 10pt; padding: 0; }}
  nav, .texts label, details {{ display: none; }}
  figure, article, tr {{ break-inside: avoid; }}
  h2, h3 {{ break-after: avoid; }}
  .scroll {{ max-height: none; overflow: visible; }}
  .tiles div, .command, .notice, .bar, .hatch {{ -webkit-print-color-adjust: exact; print-color-adjust: exact; }}
}}
"""
