"""One self-contained page: sections of charts, tables and marked texts as HTML that loads nothing.

Knows: HTML and its style sheet, for light and dark, paper, and screens from 360 pixels on. Refuses to know: what the
figures mean (`decode.bench_page`, `train.run_page`). A chart's numbers stand under it as a table; whole numbers are in
the `value` of the table's `data` elements. The page forbids itself to load anything.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from decode import marked
from decode.charts import Chart, Lines, told
from decode.marked import safe
from decode.page_style import STYLE
from decode.svg import draw
from decode.trace import TracedText

POLICY = "default-src 'none'; style-src 'unsafe-inline'"


@dataclass(frozen=True)
class Token:
    """A cell that a model or its vocabulary wrote."""

    text: str


Cell = str | float | Token | None
"""None is a cell without anything to tell."""


@dataclass(frozen=True)
class Table:
    title: str
    about: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Decoded:
    """Texts to read."""

    title: str
    about: str
    texts: tuple[TracedText, ...]


@dataclass(frozen=True)
class Section:
    title: str
    about: str
    items: tuple[Chart | Table | Decoded, ...]

    @property
    def charts(self) -> list[Chart]:
        return [item for item in self.items if not isinstance(item, Table | Decoded)]


@dataclass(frozen=True)
class Tile:
    """A figure to see first."""

    name: str
    value: str
    about: str


@dataclass(frozen=True)
class Page:
    title: str
    subtitle: str
    notices: tuple[str, ...]
    """What a reader must know before any figure."""
    tiles: tuple[Tile, ...]
    facts: tuple[tuple[str, str], ...]
    commands: tuple[tuple[str, str], ...]
    """What each does, and the command."""
    sections: tuple[Section, ...]


def render(page: Page) -> str:
    """The page as one HTML document."""
    return "".join(
        (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            '<meta name="color-scheme" content="light dark">\n',
            f"<title>{safe(page.title)}</title>\n<style>{STYLE}{marked.STYLE}</style>\n</head>\n<body>\n",
            *_head(page),
            "<main>\n",
            *(_section(section) for section in page.sections),
            "</main>\n</body>\n</html>\n",
        )
    )


def slug(title: str) -> str:
    """A title as the name of a file or of a place in the page."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _head(page: Page) -> Iterator[str]:
    yield f'<header>\n<h1><bdi>{safe(page.title)}</bdi></h1>\n<p class="under">{safe(page.subtitle)}</p>\n'
    yield from (f'<p class="notice" role="note">{safe(notice)}</p>\n' for notice in page.notices)
    tiles = (
        f"<div><dt>{safe(tile.name)}</dt><dd><strong>{safe(tile.value)}</strong> "
        f"<span>{safe(tile.about)}</span></dd></div>"
        for tile in page.tiles
    )
    yield f'<dl class="tiles">{"".join(tiles)}</dl>\n' if page.tiles else ""
    links = (f'<li><a href="#{slug(one.title)}">{safe(one.title)}</a></li>' for one in page.sections)
    yield f'<nav aria-label="Sections"><ul>{"".join(links)}</ul></nav>\n'
    facts = (f"<div><dt>{safe(name)}</dt><dd><bdi>{safe(value)}</bdi></dd></div>" for name, value in page.facts)
    yield f'<dl class="facts">{"".join(facts)}</dl>\n'
    for what, command in page.commands:
        yield f'<p class="does">{safe(what)}</p>\n<pre class="command"><code>{safe(command)}</code></pre>\n'
    yield "</header>\n"


def _section(section: Section) -> str:
    name = slug(section.title)
    items = [_item(item, f"{name}-{number}") for number, item in enumerate(section.items, start=1)]
    about = f'<p class="about">{safe(section.about)}</p>\n' if section.about else ""
    return (
        f'<section id="{name}" aria-labelledby="{name}-h">\n<h2 id="{name}-h">{safe(section.title)}</h2>\n{about}'
        f'<div class="items">\n{"".join(items)}</div>\n</section>\n'
    )


def _item(item: Chart | Table | Decoded, name: str) -> str:
    if isinstance(item, Table):
        return f'<figure class="wide">{_caption(item)}{_table(item)}</figure>\n'
    if isinstance(item, Decoded):
        return f'<div class="wide">{_decoded(item)}</div>\n'
    table = _table(numbers(item))
    return (
        f'<figure class="chart">{_caption(item)}{draw(item, name)}'
        f"<details><summary>Numbers</summary>{table}</details></figure>\n"
    )


def _caption(item: Chart | Table) -> str:
    return f"<figcaption><h3>{safe(item.title)}</h3><p>{safe(item.about)}</p></figcaption>"


def numbers(chart: Chart) -> Table:
    """All that a chart shows, as a table."""
    if isinstance(chart, Lines):
        values = [dict(line.points) for line in chart.lines]
        xs = sorted({x for points in values for x in points})
        rows = tuple((x, *(points.get(x) for points in values)) for x in xs)
        return Table(chart.title, chart.about, (chart.x_name, *(line.name for line in chart.lines)), rows)
    named = len(chart.names) > 1
    cells: tuple[tuple[Cell, ...], ...] = tuple(
        (bar.group, *([bar.name] if named else []), bar.value) for bar in chart.bars
    )
    return Table(chart.title, chart.about, ("", *(["quantity"] if named else []), "value"), cells)


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{safe(column)}</th>' for column in table.columns)
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in table.rows)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{safe(table.title)}: table">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _cell(cell: Cell) -> str:
    if cell is None:
        return "<td></td>"
    if isinstance(cell, Token):
        return f'<td><code><bdi dir="auto">{safe(marked.visible(cell.text))}</bdi></code></td>'
    if isinstance(cell, str):
        return f"<td><bdi>{safe(cell)}</bdi></td>"
    return f'<td class="number"><data value="{cell!r}">{told(cell)}</data></td>'


def _decoded(item: Decoded) -> str:
    shown = "".join(map(_text, item.texts))
    return (
        f'<h3>{safe(item.title)}</h3><p class="about">{safe(item.about)}</p>{marked.legend(item.texts)}'
        '<div class="texts"><label><input type="checkbox"> show the rejected drafts, struck through, before the token '
        f"that came in their place</label>{shown}</div>"
    )


def _text(text: TracedText) -> str:
    steps, tokens = len(text.steps), len(text.tokens)
    category = f"{text.category}; " if text.category else ""
    rate = f"{tokens} tokens in {steps} steps, {tokens / max(1, steps):.2f} per step"
    how = f"{category}{rate}; ended by {text.finish_reason}"
    return (
        f'<article><p class="prompt" dir="auto">{safe(text.prompt)}</p>'
        f'<p class="how"><bdi>{safe(how)}</bdi></p>{marked.marked(text)}</article>'
    )


def all_charts(sections: Sequence[Section]) -> list[Chart]:
    """Of a page, in order."""
    return [chart for section in sections for chart in section.charts]
