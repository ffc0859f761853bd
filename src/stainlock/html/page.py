"""A self-contained HTML page made of sections: no scripts, nothing loaded from elsewhere."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass

_NARROW = 5  # most columns that fit on a phone
_STYLE = """
:root { color-scheme: light dark; --ink: #1c1d20; --soft: #5c6068; --line: #d8dade; --paper: #ffffff; --card: #f5f6f8;
  --good: #17653a; --bad: #8a4b08; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e9ec; --soft: #a5a9b3; --line: #3a3d44; --paper: #17181b;
  --card: #212327; --good: #7fd6a3; --bad: #eab56b; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 56rem; padding: 2rem 1.1rem 4rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.55 system-ui, sans-serif; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .6rem; }
h2 { font-size: 1.2rem; margin: 2.4rem 0 .5rem; padding-top: .9rem; border-top: 1px solid var(--line); }
p { margin: .5rem 0; max-width: 44rem; }
code { font: .9em ui-monospace, monospace; overflow-wrap: anywhere; }
pre { background: var(--card); padding: .7rem .9rem; border-radius: .4rem; white-space: pre-wrap;
  overflow-wrap: anywhere; }
ul { padding-left: 1.2rem; max-width: 44rem; }
li, p { overflow-wrap: anywhere; }
.wide { overflow-x: auto; margin-bottom: .8rem; }
table { border-collapse: collapse; width: 100%; font-size: .95rem; }
caption { text-align: left; color: var(--soft); font-size: .9rem; padding: .6rem 0 .2rem; }
.paper { color: var(--soft); margin-top: 0; }
th, td { text-align: left; padding: .4rem .7rem .4rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
td.number { white-space: nowrap; }
td:first-child:not(.number) { overflow-wrap: break-word; min-width: 6.5rem; }
td:first-child:nth-last-child(2) { min-width: 8rem; }
.stacked { font-size: .85rem; } .stacked :is(th, td):not(:first-child) { padding-right: .5rem; }
.stacked td:first-child:not(.number) { overflow-wrap: anywhere; }
.yes { color: var(--good); font-weight: 600; } .no { color: var(--bad); font-weight: 600; }
figure { margin: 1rem 0; }
figure img { max-width: 100%; height: auto; display: block; background: #fff; border-radius: .3rem; }
figcaption { color: var(--soft); font-size: .9rem; margin-top: .35rem; max-width: 44rem; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: 1rem .9rem; }
.grid figure { margin: 0; break-inside: avoid; }
.grid img { width: 100%; }
.grid figcaption { font-size: .8rem; line-height: 1.35; }
@media (max-width: 34rem) { table { font-size: .85rem; } th, td { padding-right: .45rem; }
  td:first-child:not(.number) { overflow-wrap: anywhere; }
  .stacked, .stacked tbody, .stacked td, .stacked caption { display: block; } .stacked thead { display: none; }
  .stacked tr { display: grid; grid-template-columns: 1fr 1fr; gap: 0 .9rem; padding: .35rem 0;
    border-bottom: 1px solid var(--line); }
  .stacked td, .stacked td.number { border: 0; padding: .1rem 0; text-align: left; white-space: normal; }
  .stacked td:first-child { grid-column: 1 / -1; font-weight: 600; }
  .stacked td::before { content: attr(data-label) ": "; color: var(--soft); font-weight: 400; } }
@media print { body { max-width: none; padding: 0; font-size: 10pt; } h2 { break-after: avoid; }
  table, figure { break-inside: avoid; } .wide { overflow: visible; }
  table { font-size: 8.5pt; } .stacked { font-size: 8pt; }
  th, td, .stacked :is(th, td):not(:first-child) { padding: .2rem .35rem .2rem 0; } figure img { max-height: 20cm; }
  .grid { grid-template-columns: repeat(5, 1fr); } }
"""


@dataclass(frozen=True)
class Section:
    """A heading and the blocks of HTML below it; ``anchor`` is the heading's id, for links within the page."""

    heading: str
    blocks: tuple[str, ...]
    anchor: str = ""


def page(title: str, introduction: str, sections: Sequence[Section]) -> str:
    """The whole document: title, introduction, and the sections."""
    body = "\n".join(_heading(section) + "\n".join(section.blocks) for section in sections)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{text(title)}</h1>\n"
        f"{paragraph(introduction)}\n{body}\n</body>\n</html>\n"
    )


def _heading(section: Section) -> str:
    identity = f' id="{text(section.anchor)}"' if section.anchor else ""
    return f"<h2{identity}>{text(section.heading)}</h2>\n"


def text(words: str) -> str:
    """Words as HTML, with special characters escaped."""
    return html.escape(words)


def paragraph(words: str, *, kind: str = "") -> str:
    """A paragraph of plain words; ``kind`` is its CSS class."""
    return paragraph_of(text(words), kind=kind)


def paragraph_of(content: str, *, kind: str = "") -> str:
    """A paragraph of HTML."""
    return f'<p class="{kind}">{content}</p>' if kind else f"<p>{content}</p>"


def link(address: str, words: str) -> str:
    """A link to an anchor of this page, or to a file beside it."""
    return f'<a href="{text(address)}">{text(words)}</a>'


def bullets(items: Sequence[str]) -> str:
    """A list of plain sentences."""
    return "<ul>" + "".join(f"<li>{text(item)}</li>" for item in items) + "</ul>"


def commands(lines: Sequence[str]) -> str:
    """Lines to type into a shell."""
    return f"<pre><code>{text(chr(10).join(lines))}</code></pre>"


def table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[int] = (), *, caption: str = ""
) -> str:
    """A table whose cells are HTML; the columns ``numeric`` are aligned to the right.

    On a phone, a table with many columns becomes one block for each row, with the heading before each value.
    """
    stacked = len(headings) > _NARROW

    def line(cells: Sequence[str], tag: str) -> str:
        marks = [' class="number"' if i in numeric else "" for i in range(len(cells))]
        if stacked and tag == "td":
            marks = [f'{mark} data-label="{heading}"' for mark, heading in zip(marks, headings, strict=True)]
        return "<tr>" + "".join(f"<{tag}{m}>{cell}</{tag}>" for cell, m in zip(cells, marks, strict=True)) + "</tr>"

    content = "".join(line(row, "td") for row in rows)
    kind = ' class="stacked"' if stacked else ""
    title = f"<caption>{text(caption)}</caption>" if caption else ""
    head = line(headings, "th")
    return f'<div class="wide"><table{kind}>{title}<thead>{head}</thead><tbody>{content}</tbody></table></div>'


def figure(image: bytes, description: str, caption: str, *, kind: str = "png", width: int | None = None) -> str:
    """An image embedded in the page; the caption is HTML."""
    data = base64.b64encode(image).decode()
    size = f' style="width: {width}px"' if width else ""
    return (
        f'<figure><img src="data:image/{kind};base64,{data}" alt="{text(description)}"{size}>'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def grid(figures: Sequence[str]) -> str:
    """Figures side by side, as many in a row as fit."""
    return f'<div class="grid">{"".join(figures)}</div>'
